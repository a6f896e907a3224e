#include "bounds.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace reference {
namespace {

// log Σ w exp(e): how far errors e of the scores move the log of the sum of the weights.
double pooled(const Row& row, const std::vector<double>& errors) {
    if (std::isinf(row.lse)) return 0;
    double most = 0, sum = 0;
    for (size_t j = 0; j < errors.size(); ++j)
        if (row.weight[j] > 0) most = std::max(most, errors[j]);
    sum = row.sink;
    for (size_t j = 0; j < errors.size(); ++j) sum += row.weight[j] * std::exp(errors[j] - most);
    return most + std::log(std::max(sum, 1e-300));
}

double seen_keys(const Row& row) {
    return terms(std::count(row.seen.begin(), row.seen.end(), 1));
}

// exp2 and log2 of the kernels (a few units), the sum of the weights, and what is rounded at the size of the
// maximum: both x - maximum and maximum + log2(sum).
double common(const Row& row, double largest) { return unit * (16 + seen_keys(row) + 4 * largest); }

double largest_score(const Row& row) {
    double largest = std::isfinite(row.sink_logit) ? std::abs(row.sink_logit) : 0.0;
    if (std::isfinite(row.lse)) largest = std::max(largest, std::abs(row.lse));
    return largest;
}

}  // namespace

std::vector<double> score_blur(const Call& call, const Row& row) {
    std::vector<double> errors(row.score.size(), 0.0);
    const double steps = static_cast<double>(call.d) + 6;  // products, the int8 factor, scale · log2 e, rounding of both
    for (size_t j = 0; j < errors.size(); ++j) {
        if (!row.seen[j]) continue;
        double error = unit * steps * row.size[j];
        if (call.softcap > 0) {
            // The cap is flat where it saturates: what counts is its slope at the nearest point within the error.
            const double c = call.softcap, bent = std::sqrt(1 - row.bend[j]);
            const double nearest = std::max(0.0, std::atanh(std::min(bent, 1 - 1e-15)) - error / c);
            const double slope = 1 - std::tanh(nearest) * std::tanh(nearest);
            error = std::min(error * slope, 2 * c) + 8 * unit * std::min(c, row.size[j]);
        }
        errors[j] = error + unit * 4 * (std::abs(row.score[j]) + row.extra[j]);
    }
    return errors;
}

std::vector<double> log_weight_blur(const Call& call, const Row& row) {
    std::vector<double> errors = score_blur(call, row);
    const double all = pooled(row, errors) + common(row, largest_score(row));
    for (double& error : errors) error += all;
    return errors;
}

double lse_blur(const Call& call, const Row& row) {
    return pooled(row, score_blur(call, row)) + common(row, largest_score(row));
}

double storing_blur(Type type, double size) {
    if (type == Type::bf16) return size * 0x1p-8 * 1.01;
    if (type == Type::f16) return size * 0x1p-11 * 1.01 + 0x1p-25;
    return size * unit;
}

double weight_rounding(const Call& call, const char* isa) {
    const bool pairs = std::strcmp(isa, "v4bf16") == 0 || std::strcmp(isa, "v4amx") == 0;
    const bool all = call.q.type == Type::bf16 && call.k.type == Type::bf16 && call.v.type == Type::bf16;
    return pairs && all ? 0x1p-8 * 1.01 : 0.0;
}

}  // namespace reference
