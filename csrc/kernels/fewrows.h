// The two products of decoding: a few query rows against many keys, lanes along the columns.
//
// With fewer rows than lanes the rows cannot lie in the lanes. Here a register tile holds one vector of partial
// sums for each (key, row); it is folded across the lanes once the columns are through. Each vector of a key or
// value is loaded once for all rows. Keys come as a list of addresses, so that pages and staged copies need no loop
// of their own, and each product fetches ahead, line by line, the rows that the next one reads.
#pragma once

#include "microkernel.h"
#include "streams.h"

namespace clearhead {
namespace {

constexpr int rows_at_once = W < 8 ? W : 8;  // rows that one tile can hold

// Scores of R rows lie side by side in a power of two of lanes, those of the next key behind them.
template <int R>
constexpr int slots_of = R <= 1 ? 1 : R <= 2 ? 2 : R <= 4 ? 4 : 8;

constexpr int slots_for(int64_t rows) { return rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8; }

// One vector of lanes [key][slot] from one number per key.
template <int slots>
CLEARHEAD_INLINE vf spread(const float* per_key) {
    if constexpr (slots == 1) return load(per_key);
    if constexpr (slots == W) return same(*per_key);
    vf x{};
    __builtin_memcpy(&x, per_key, W / slots * 4);
    constexpr int s = slots;
#if defined(__AVX512F__)
    return __builtin_shufflevector(x, x, 0, 1 / s, 2 / s, 3 / s, 4 / s, 5 / s, 6 / s, 7 / s, 8 / s, 9 / s, 10 / s, 11 / s,
                                   12 / s, 13 / s, 14 / s, 15 / s);
#elif defined(__AVX2__)
    return __builtin_shufflevector(x, x, 0, 1 / s, 2 / s, 3 / s, 4 / s, 5 / s, 6 / s, 7 / s);
#else
    return __builtin_shufflevector(x, x, 0, 1 / s, 2 / s, 3 / s);
#endif
}

// The vector with lanes i and i ^ distance exchanged.
template <int distance>
CLEARHEAD_INLINE vf exchanged(vf x) {
    constexpr int e = distance;
#if defined(__AVX512F__)
    return __builtin_shufflevector(x, x, 0 ^ e, 1 ^ e, 2 ^ e, 3 ^ e, 4 ^ e, 5 ^ e, 6 ^ e, 7 ^ e, 8 ^ e, 9 ^ e, 10 ^ e, 11 ^ e,
                                   12 ^ e, 13 ^ e, 14 ^ e, 15 ^ e);
#elif defined(__AVX2__)
    return __builtin_shufflevector(x, x, 0 ^ e, 1 ^ e, 2 ^ e, 3 ^ e, 4 ^ e, 5 ^ e, 6 ^ e, 7 ^ e);
#else
    return __builtin_shufflevector(x, x, 0 ^ e, 1 ^ e, 2 ^ e, 3 ^ e);
#endif
}

// The largest, or the sum, over all keys of a vector, in every lane of a slot.
template <int slots>
CLEARHEAD_INLINE vf largest_of_slots(vf x) {
    if constexpr (slots < W) return largest_of_slots<slots * 2>(larger(x, exchanged<slots>(x)));
    return x;
}
template <int slots>
CLEARHEAD_INLINE vf sum_of_slots(vf x) {
    if constexpr (slots < W) return sum_of_slots<slots * 2>(x + exchanged<slots>(x));
    return x;
}

constexpr int64_t line_bytes = 64;

// Rows to be fetched ahead, `bytes` of each: line by line in the order of their addresses, which the hardware's own
// prefetchers recognise as a stream.
struct RowsAhead {
    const char* const* rows = nullptr;
    int64_t bytes = 0;

    CLEARHEAD_INLINE void fetch(int64_t row) const {
        if (bytes == 0) return;
        const char* from = rows[row];
        for (int64_t at = 0; at < bytes; at += line_bytes) __builtin_prefetch(from + at);
    }
};

// Lanes of two vectors regrouped so that low + high adds neighbours: by one lane, by two, then by groups of four.
template <int step>
CLEARHEAD_INLINE vf fold_two(vf a, vf b) {
#if defined(__AVX512F__)
    if constexpr (step == 0)
        return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
               __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    else if constexpr (step == 1)
        return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    else
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif defined(__AVX2__)
    if constexpr (step == 0)
        return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    else if constexpr (step == 1)
        return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    else
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
#else
    if constexpr (step == 0)
        return __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    else
        return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
#endif
}

// Folds N vectors (a power of two) into one, from round `step` on: with log2(W) rounds in all, lane i has the sum
// over the lanes of x[i].
template <int step, int N>
CLEARHEAD_INLINE vf fold(const vf (&x)[N]) {
    if constexpr (N == 1) {
        return x[0];
    } else {
        vf half[N / 2];
#pragma GCC unroll 16
        for (int i = 0; i < N / 2; ++i) half[i] = fold_two<step>(x[2 * i], x[2 * i + 1]);
        return fold<step + 1>(half);
    }
}

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// Scores of R rows against `keys`, W / slots keys at a time: tile t writes W floats, [key][slot]. Lanes of slots that
// no row has are copies of the last row. queries: [vector][R][W], in T's order. ahead: as many rows as keys, or none
// (bytes = 0).
template <typename T, int R>
void score_rows(const char* const* keys, int64_t tiles, int64_t vectors, const float* queries, float* scores,
                RowsAhead ahead) {
    constexpr int slots = slots_of<R>, K = W / slots;
    constexpr int part = K > 8 ? 8 : K;  // keys that are computed side by side: more addresses do not fit registers
    for (int64_t tile = 0; tile < tiles; ++tile, scores += W) {
        vf parts[K / part];
#pragma GCC unroll 2
        for (int p = 0; p < K / part; ++p, keys += part, ahead.rows += part) {
#pragma GCC unroll 8
            for (int k = 0; k < part; ++k) ahead.fetch(k);
            vf sums[part * slots];
#pragma GCC unroll 16
            for (int i = 0; i < part * slots; ++i) sums[i] = vf{};
            const float* q = queries;
            int64_t v = 0;
            for (; v + 2 <= vectors; v += 2, q += 2 * R * W) {
#pragma GCC unroll 8
                for (int k = 0; k < part; ++k) {
                    const Pair x = pair_at(reinterpret_cast<const T*>(keys[k]) + v * W);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sums[k * slots + r] += x.a * load(q + r * W);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sums[k * slots + r] += x.b * load(q + (R + r) * W);
                }
            }
            if (v < vectors) {
#pragma GCC unroll 8
                for (int k = 0; k < part; ++k) {
                    const vf x = vector_at(reinterpret_cast<const T*>(keys[k]) + v * W);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sums[k * slots + r] += x * load(q + r * W);
                }
            }
#pragma GCC unroll 8
            for (int k = 0; k < part; ++k)
#pragma GCC unroll 8
                for (int r = R; r < slots; ++r) sums[k * slots + r] = sums[k * slots + R - 1];
            parts[p] = fold<0>(sums);
        }
        store(scores, fold<log2_of(part * slots)>(parts));
    }
}

// Rows that one pass over the values serves, and vectors of columns beside them: what fits the registers.
constexpr int mix_rows_at_once = W == 16 ? 8 : 4;
constexpr int mix_sums = W == 16 ? 24 : 12;

// out = out · fade + Σ weight · value for R rows and S vectors of columns. weights: [key][slots], from the first row.
template <typename T, int R, int S>
CLEARHEAD_INLINE void mix_strip(const char* const* values, int64_t column, int64_t count, const float* weights,
                                int64_t slots, const float* fade, float* out, int64_t ldo, RowsAhead ahead, int64_t& due, int64_t& fetched) {
    // Fewer sums than a multiply-add's latency covers: several keys at a time, each with sums of its own.
    constexpr int U = R * S >= 8 ? 1 : R * S >= 4 ? 2 : 4;
    vf sums[U][R][S];
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int s = 0; s < S; ++s) sums[u][r][s] = vf{};
    auto admit = [&](int64_t j, int u) __attribute__((always_inline)) {
        const T* row = reinterpret_cast<const T*>(values[j]) + column;
        // The rows ahead are spread over all strips: S of every ldo / W columns, so many of the rows.
        due += S * W;
        if (due >= ldo) {
            due -= ldo;
            ahead.fetch(fetched++);
        }
        vf weight[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) weight[r] = same(weights[j * slots + r]);
#pragma GCC unroll 4
        for (int s = 0; s + 2 <= S; s += 2) {
            const Pair x = pair_at(row + s * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[u][r][s] += weight[r] * x.a;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[u][r][s + 1] += weight[r] * x.b;
        }
        if constexpr (S % 2 == 1) {
            const vf x = vector_at(row + (S - 1) * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[u][r][S - 1] += weight[r] * x;
        }
    };
    int64_t j = 0;
    for (; j + U <= count; j += U)
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) admit(j + u, u);
    if constexpr (U > 1)
        for (; j < count; ++j) admit(j, 0);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int s = 0; s < S; ++s) {
            vf total = sums[0][r][s];
#pragma GCC unroll 4
            for (int u = 1; u < U; ++u) total += sums[u][r][s];
            float* place = out + r * ldo + column + s * W;
            store(place, load(place) * fade[r] + total);
        }
}

// All columns: strips as wide as the registers allow. out: R rows of `vectors` vectors, in T's order. ahead: as for
// the scores.
template <typename T, int R>
void mix_rows(const char* const* values, int64_t count, int64_t vectors, const float* weights, int64_t slots,
              const float* fade, float* out, RowsAhead ahead) {
    int64_t v = 0, due = 0, fetched = 0;
    auto strip = [&](auto width) __attribute__((always_inline)) {
        constexpr int S = decltype(width)::value;
        mix_strip<T, R, S>(values, v * W, count, weights, slots, fade, out, vectors * W, ahead, due, fetched);
        v += S;
    };
    while (v < vectors) {
        const int64_t left = vectors - v;
        if constexpr (R * 8 <= mix_sums)
            if (left >= 8) {
                strip(Number<8>{});
                continue;
            }
        if constexpr (R * 6 <= mix_sums)
            if (left == 6) {
                strip(Number<6>{});
                continue;
            }
        if constexpr (R * 4 <= mix_sums)
            if (left >= 4) {
                strip(Number<4>{});
                continue;
            }
        if (left >= 2) {
            strip(Number<2>{});
        } else {
            strip(Number<1>{});
        }
    }
}

}  // namespace
}  // namespace clearhead
