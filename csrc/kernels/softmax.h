// Online softmax of one chunk of scores (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1), in base 2.
//
// Invariant: sum = Σ 2^(exponent - peak) over the keys admitted so far, and the block's `out` is relative to the
// same peak. Keys run downwards, queries lie in the lanes: nothing here looks across lanes.
#pragma once

#include "block.h"

namespace clearhead {
namespace {

// The largest score of each lane over `count` keys, V vectors from vector v on. Hidden scores become -inf.
template <int V>
CLEARHEAD_INLINE void peaks_of(float* scores, int64_t count, const uint64_t* words, int v, vf (&most)[V]) {
    const vf nothing = same(-__builtin_inff());
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) most[i] = nothing;
    for (int64_t j = 0; j < count; ++j) {
        float* row = scores + j * block_lanes + v * W;
        if (words == nullptr) {
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) most[i] = larger(load(row + i * W), most[i]);
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) {
                const vf seen = choose(lanes_in(words[j] >> ((v + i) * W)), load(row + i * W), nothing);
                store(row + i * W, seen);
                most[i] = larger(seen, most[i]);
            }
        }
    }
}

// Turns the chunk's scores into weights relative to the new peak, for V vectors from vector v on, and writes the
// factors that bring what was gathered before to that peak. most: as `peaks_of` gives it.
template <int V>
CLEARHEAD_INLINE void admit(Block& block, int64_t count, float factor, int v, const vf (&most)[V], float* fade) {
    vf peak[V], total[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
        const vf before = load(block.peak + (v + i) * W);
        peak[i] = larger(most[i] * factor, before);
        store(block.peak + (v + i) * W, peak[i]);
        store(fade + (v + i) * W, exp2(before - peak[i]));
        total[i] = vf{};
    }
    for (int64_t j = 0; j < count; ++j) {
        float* row = block.scores + j * block_lanes + v * W;
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) {
            const vf weight = exp2(load(row + i * W) * factor - peak[i]);
            store(row + i * W, weight);
            total[i] += weight;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
        const vf before = load(block.sum + (v + i) * W);
        store(block.sum + (v + i) * W, before * load(fade + (v + i) * W) + total[i]);
    }
}

}  // namespace
}  // namespace clearhead
