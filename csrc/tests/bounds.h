// How far float32 may lie from the reference: forward error bounds, derived here and nowhere tuned to what the
// kernels happen to give.
//
// u = 2^-24. A sum of n float32 products is off by at most about n·u·Σ|terms| whatever its order (Higham 2002,
// section 3.1). A score that is off by e multiplies its weight by exp(e); the sum of all weights moves by the
// weighted mean of those factors; every bound below is one of these two, carried on.
#pragma once

#include <cstdint>
#include <vector>

#include "reference.h"

namespace reference {

constexpr double unit = 0x1p-24;

// The n of a sum over `count` keys: sums are made apart over stretches of at most 128 keys and then added.
inline double terms(int64_t count) {
    const auto n = static_cast<double>(count);
    const double apart = 128 + n / 32;
    return (n < apart ? n : apart) + 8;
}

// How much a score may be off, per key.
std::vector<double> score_blur(const Call& call, const Row& row);

// How much the logarithm of each weight may be off: its own score, and all of them through the sum.
std::vector<double> log_weight_blur(const Call& call, const Row& row);

double lse_blur(const Call& call, const Row& row);

// What storing a number of this size in `type` may change.
double storing_blur(Type type, double size);

// The relative error of weights when they are multiplied with values: bfloat16 pairs round them.
double weight_rounding(const Call& call, const char* isa);

}  // namespace reference
