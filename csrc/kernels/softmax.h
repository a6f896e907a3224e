// Online softmax of one chunk of scores (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1), in base 2.
//
// Invariant: sum = Σ 2^(exponent - peak) over the keys admitted so far, and the block's `out` is relative to the
// same peak. Keys run downwards, queries lie in the lanes: nothing here looks across lanes.
#pragma once

#include "block.h"

namespace clearhead {
namespace {

// The largest score of each lane over the keys of some runs, V vectors from vector v on, into `most`
// [block_lanes]. Hidden scores become -inf; runs that these vectors take no part in are passed over.
template <int V>
CLEARHEAD_INLINE void masked_peaks(float* scores, const Run* runs, int found, const uint64_t* words, int v, float* most) {
    const vf nothing = same(-__builtin_inff());
    vf high[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) high[i] = nothing;
    for (int n = 0; n < found; ++n) {
        if (runs[n].v0 >= v + V || runs[n].v1 <= v) continue;
        for (int64_t j = runs[n].low; j < runs[n].low + runs[n].count; ++j) {
            float* row = scores + j * block_lanes + v * W;
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) {
                const vf seen = choose(lanes_in(words[j] >> ((v + i) * W)), load(row + i * W), nothing);
                store(row + i * W, seen);
                high[i] = larger(seen, high[i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) store(most + (v + i) * W, high[i]);
}

// The same where every lane sees every key.
inline void plain_peaks(const float* scores, int64_t count, int vectors, float* most) {
    for (int v = 0; v < vectors; ++v) {
        vf high = same(-__builtin_inff());
        for (int64_t j = 0; j < count; ++j) high = larger(load(scores + j * block_lanes + v * W), high);
        store(most + v * W, high);
    }
}

// Rows that the mixing product will read next: fetched into the cache while the weights are computed.
struct Ahead {
    const float* data = nullptr;
    int64_t stride = 0, columns = 0;
};

// Turns the scores of some runs into weights relative to the new peak, for V vectors from vector v on, and writes
// the factors that bring what was gathered before to that peak. most: the largest score of each lane.
//
// totals: null, or gets the sums of this chunk's weights. spread: null, or kept at Σ 2^x · x over all keys so far,
// x = exponent - peak; a higher peak lowers every x by the same amount.
template <int V>
CLEARHEAD_INLINE void admit(Block& block, const Run* runs, int found, float factor, int v, const float* most, float* fade,
                            const Ahead& ahead, float* totals = nullptr, float* spread = nullptr) {
    vf before[V], peak[V], total[V], terms[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
        before[i] = load(block.peak + (v + i) * W);
        peak[i] = larger(load(most + (v + i) * W) * factor, before[i]);
        store(block.peak + (v + i) * W, peak[i]);
        store(fade + (v + i) * W, exp2(before[i] - peak[i]));
        total[i] = terms[i] = vf{};
    }
    for (int n = 0; n < found; ++n) {
        if (runs[n].v0 >= v + V || runs[n].v1 <= v) continue;
        for (int64_t j = runs[n].low; j < runs[n].low + runs[n].count; ++j) {
            const float* row = block.scores + j * block_lanes + v * W;
            float* to = block.weights + j * block_lanes + v * W;
            if (v == 0)
                for (int64_t t = 0; t < ahead.columns; t += 16) __builtin_prefetch(ahead.data + j * ahead.stride + t);
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) {
                const vf exponent = load(row + i * W) * factor - peak[i];
                const vf weight = exp2(exponent);
                store(to + i * W, weight);
                total[i] += weight;
                if (spread != nullptr) terms[i] += weight * larger(exponent, same(-1e4f));  // not 0 · -inf = NaN
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
        const int64_t at = (v + i) * W;
        const vf sum = load(block.sum + at), factors = load(fade + at);
        store(block.sum + at, sum * factors + total[i]);
        if (totals != nullptr) store(totals + at, total[i]);
        if (spread != nullptr) {
            const vf moved = factors * (load(spread + at) + sum * (before[i] - peak[i]));
            store(spread + at, choose(factors == 0.0f, vf{}, moved) + terms[i]);
        }
    }
}

// Brings the outputs gathered so far to the new peak.
inline void fade_out(const Block& block, int64_t dv, const float* fade) {
    for (int v = 0; v < block.vectors; ++v) {
        const vf factor = load(fade + v * W);
        for (int64_t t = 0; t < dv; ++t) store(block.out + t * block_lanes + v * W, load(block.out + t * block_lanes + v * W) * factor);
    }
}

}  // namespace
}  // namespace clearhead
