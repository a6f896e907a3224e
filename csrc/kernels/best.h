// The k largest weights of each lane and the keys that they belong to, kept sorted while keys stream by.
//
// Few keys of a long row get in, but with W lanes side by side some lane nearly always wants one. So a chunk is
// looked through twice: once without a branch, for the lanes in which a key beats the k-th best so far; then only
// the keys found so are collected, lane by lane, and inserted for all lanes at once. Insertion is a chain of
// compare-exchanges from the top down.
#pragma once

#include "block.h"

namespace clearhead {
namespace {

// The lanes in which a is greater, as bits.
CLEARHEAD_INLINE uint32_t greater_lanes(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
#elif defined(__AVX2__)
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
#else
    const vi where = a > b;
    uint32_t word = 0;
    for (int i = 0; i < W; ++i) word |= static_cast<uint32_t>(where[i] & 1) << i;
    return word;
#endif
}

struct Best {
    float* weights = nullptr;  // [k][block_lanes], heaviest first, 0 where there is none
    int32_t* keys = nullptr;   // likewise
    int64_t k = 0;

    static int64_t floats(int64_t k) { return 2 * k * block_lanes; }

    void open(float* memory, int64_t count) {
        weights = memory;
        keys = reinterpret_cast<int32_t*>(memory + count * block_lanes);
        k = count;
        for (int64_t i = 0; i < k * block_lanes; ++i) {
            weights[i] = 0.0f;
            keys[i] = -1;
        }
    }

    // Brings vector v to a new scale.
    void scale(int v, vf factor) const {
        for (int64_t place = 0; place < k; ++place) {
            float* held = weights + place * block_lanes + v * W;
            store(held, load(held) * factor);
        }
    }

    CLEARHEAD_INLINE vf last(int v) const { return load(weights + (k - 1) * block_lanes + v * W); }

    // Lets one key of each lane in; weight 0 never gets in.
    CLEARHEAD_INLINE void insert(int v, vf weight, vi key) const {
        for (int64_t place = 0; place < k; ++place) {
            float* held = weights + place * block_lanes + v * W;
            vi_loose* mark = reinterpret_cast<vi_loose*>(keys + place * block_lanes + v * W);
            const vf old = load(held);
            const vi before = *mark, beats = weight > old;
            store(held, choose(beats, weight, old));
            *mark = beats ? key : before;
            weight = choose(beats, old, weight);
            key = beats ? before : key;
        }
    }

    // Looks through `count` keys from number `first` on; vector v of their weights lies at `from`, `stride` floats
    // from key to key.
    [[gnu::noinline]] void take(int v, const float* from, int64_t stride, int64_t count, int64_t first) const {
        for (int64_t j = 0; j < count; j += chunk_keys) {
            const int64_t here = count - j < chunk_keys ? count - j : chunk_keys;
            look_through(v, from + j * stride, stride, here, first + j);
        }
    }

  private:
    static constexpr int crowd = 8 * W;  // so many lanes' keys are rather inserted key by key

    void look_through(int v, const float* from, int64_t stride, int64_t count, int64_t first) const {
        alignas(8) uint16_t marks[chunk_keys + 4];
        const vf bar = last(v);
        for (int64_t j = 0; j < count; ++j) marks[j] = static_cast<uint16_t>(greater_lanes(load(from + j * stride), bar));
        for (int64_t j = count; j < count + 3; ++j) marks[j] = 0;
        int found = 0;
        for (int64_t j = 0; j < count; j += 4) found += __builtin_popcountll(four(marks + j));
        if (found == 0) return;
        if (found > crowd) {
            for (int64_t j = 0; j < count; ++j)
                if (marks[j] != 0) insert(v, load(from + j * stride), same_int(static_cast<int32_t>(first + j)));
            return;
        }
        alignas(64) float queue[crowd * W];
        alignas(64) int32_t queued[crowd * W], waiting[W] = {};
        for (int64_t j = 0; j < count; j += 4)
            for (uint64_t word = four(marks + j); word != 0; word &= word - 1) {
                const int bit = __builtin_ctzll(word), lane = bit % 16, key = static_cast<int>(j) + bit / 16;
                const int32_t at = waiting[lane]++;
                queue[at * W + lane] = from[key * stride + lane];
                queued[at * W + lane] = static_cast<int32_t>(first) + key;
            }
        const vi waits = *reinterpret_cast<const vi_loose*>(waiting);
        for (int32_t at = 0;; ++at) {
            const vi there = waits > at;
            if (!any(there)) return;
            insert(v, choose(there, load(queue + at * W), vf{}), *reinterpret_cast<const vi_loose*>(queued + at * W));
        }
    }

    CLEARHEAD_INLINE static uint64_t four(const uint16_t* marks) {
        uint64_t word;
        __builtin_memcpy(&word, marks, 8);
        return word;
    }
};

}  // namespace
}  // namespace clearhead
