// What may happen to scores between the product and the softmax: softcap, additive bias, bias by distance.
#pragma once

#include "block.h"

namespace clearhead {
namespace {

CLEARHEAD_INLINE bool has_extras(const Call& call) {
    return call.softcap > 0 || call.bias.data != nullptr || call.relative.values != nullptr;
}

// Adds bias[i][j] to the scores of a chunk: W queries by W keys at a time, transposed on the way. -inf hides.
inline void add_bias(const Call& call, const Task& task, Block& block, int64_t low, int64_t count) {
    const Bias& bias = call.bias;
    const vf nothing = same(-__builtin_inff());
    for (int v = 0; v < block.vectors; ++v) {
        for (int64_t j = 0; j < count; j += W) {
            const int64_t here = count - j < W ? count - j : W;
            vf x[W];
            for (int i = 0; i < W; ++i) {
                const int64_t lane = v * W + i;
                float row[W] = {};
                if (lane < block.lanes) {
                    const int64_t head = task.head + lane / task.queries, query = task.query + lane % task.queries;
                    const int64_t at = task.b * bias.batch + head * bias.head + query * bias.query + (low + j) * bias.key;
                    floats_of_type(bias.type, bias.data, at, bias.key, here, row);
                }
                x[i] = load(row);
            }
            transpose(x);
            for (int64_t i = 0; i < here; ++i) {
                float* to = block.scores + (j + i) * block_lanes + v * W;
                // A bias of -inf hides whatever the key holds; a finite one hides nothing, however low it is.
                const vf sum = load(to) + x[i] * log2_e;
                const vf floor = same(lowest);
                const vf kept = choose(sum < floor, floor, sum);
                store(to, choose(x[i] == nothing, nothing, kept));
            }
        }
    }
}

// Adds the bias that depends on the distance alone: consecutive queries are consecutive distances.
inline void add_relative(const Call& call, const Task& task, Block& block, int64_t low, int64_t count) {
    const RelativeBias& relative = call.relative;
    const Mask& m = call.mask;
    const int64_t position = m.offset[task.b * m.offset_batch] + task.query;
    for (int64_t g = 0; g < task.heads; ++g) {
        const float* values = relative.values + (task.head + g) * relative.head;
        for (int64_t j = 0; j < count; ++j) {
            const float* from = values + (position - (m.key_offset + low + j)) - relative.first;
            float* to = block.scores + j * block_lanes + g * task.queries;
            for (int64_t i = 0; i < task.queries; ++i) to[i] += from[i] * log2_e;
        }
    }
}

// Turns the products of a chunk into exponents of two. `bend`, unless null, gets the derivative of softcap,
// 1 - (s / c)², in the places of the scores.
inline void finish_scores(const Call& call, const Task& task, Block& block, const Scaling& scaling, int64_t low,
                          int64_t count, float* bend = nullptr) {
    const vf cap = same(call.softcap * log2_e), into = same(scaling.factor / log2_e / call.softcap);
    const vf factor = same(scaling.factor);
    for (int64_t j = 0; j < count; ++j) {
        float* row = block.scores + j * block_lanes;
        for (int v = 0; v < block.vectors; ++v) {
            const vf x = load(row + v * W);
            if (call.softcap > 0) {
                const vf bounded = tanh(x * into);
                store(row + v * W, cap * bounded);
                if (bend != nullptr) store(bend + j * block_lanes + v * W, 1.0f - bounded * bounded);
            } else {
                store(row + v * W, x * factor);
            }
        }
    }
    if (call.bias.data != nullptr) add_bias(call, task, block, low, count);
    if (call.relative.values != nullptr) add_relative(call, task, block, low, count);
}

}  // namespace
}  // namespace clearhead
