// Attention in double precision, element by element, from the definitions in call.h. Shares no code with the
// kernels and has no idea of tiles, vectors or threads: slow, and meant to be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "call.h"

namespace reference {

using clearhead::Backward;
using clearhead::Bias;
using clearhead::Call;
using clearhead::Mask;
using clearhead::Question;
using clearhead::Rows;
using clearhead::Type;

// The stored number at element `at`; scales of int8 rows are not applied.
double stored(const void* data, Type type, int64_t at);

// Column t of row (b, h, j).
double element(const Rows& rows, int64_t b, int64_t h, int64_t j, int64_t t);

// Whether query i of head h of item b may see key j, as far as `mask` and the masks chained to it say.
bool may_see(const Mask& mask, int64_t b, int64_t h, int64_t i, int64_t j);

// One query's look at the keys, Lk numbers each; 0 where it does not see the key.
struct Row {
    std::vector<uint8_t> seen;
    std::vector<double> score;   // after softcap and biases
    std::vector<double> weight;  // exp(score - lse)
    std::vector<double> bend;    // d score / d (scale · q·k): 1 without softcap
    std::vector<double> size;    // |scale| · Σ |q k|, what the rounding errors of the product are relative to
    std::vector<double> extra;   // |bias| + |relative bias|
    double sink = 0;             // weight of the learned sink
    double sink_logit = 0;
    double lse = 0;  // -inf: sees nothing
};

Row look(const Call& call, int64_t b, int64_t h, int64_t i);

// A number, what float32 may do to it on the way, and the sum of the sizes of the terms that it is the sum of.
struct Near {
    double value = 0, blur = 0, size = 0;
    void add(double term, double term_blur) {
        value += term;
        blur += term_blur;
        size += term < 0 ? -term : term;
    }
};

// The rows of a call, (B, Hq, Lq), and how much the logarithm of each weight may be off (bounds.h).
struct Weights {
    const Call* call = nullptr;
    std::vector<Row> rows;
    std::vector<std::vector<double>> blur;         // of log weight, per row and key
    std::vector<std::vector<double>> weight_blur;  // of the weight itself
    std::vector<double> lse_blur;

    const Row& row(int64_t b, int64_t h, int64_t i) const { return rows[index(b, h, i)]; }
    std::size_t index(int64_t b, int64_t h, int64_t i) const {
        return static_cast<size_t>((b * call->Hq + h) * call->Lq + i);
    }
    double weight(std::size_t row, int64_t j) const { return rows[row].weight[static_cast<std::size_t>(j)]; }
    double off(std::size_t row, int64_t j) const { return weight_blur[row][static_cast<std::size_t>(j)]; }
};

Weights look_everywhere(const Call& call);

std::vector<Near> out_of(const Weights& weights);  // (B, Hq, Lq, dv)

// The answer to a question in the layout of `Question::out`; of top_keys only the weights.
std::vector<Near> answer_to(const Weights& weights, const Question& question);

struct Gradients {
    std::vector<Near> dq, dk, dv;
};

// Gradients of Σ dout · out + Σ dlse · lse. `out_blur`: how much each element of the stored `out` may be off.
Gradients gradients_of(const Weights& weights, const Backward& back, const std::vector<double>& out_blur);

}  // namespace reference
