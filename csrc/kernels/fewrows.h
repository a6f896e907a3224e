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

// Rows to be fetched ahead: `bytes` of each.
struct RowsAhead {
    const char* const* rows = nullptr;
    int64_t bytes = 0;
};

constexpr int64_t line_bytes = 64;

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
// no row has are copies of the last row. queries: R rows of `vectors` vectors each, in T's order.
template <typename T, int R>
void score_rows(const char* const* keys, int64_t tiles, int64_t vectors, const float* queries, float* scores, RowsAhead ahead) {
    constexpr int slots = slots_of<R>, K = W / slots;
    constexpr int part = K > 8 ? 8 : K;  // keys that are computed side by side: more addresses do not fit registers
    const int64_t ldq = vectors * W;
    for (int64_t tile = 0; tile < tiles; ++tile, keys += K, scores += W) {
        vf parts[K / part];
        for (int64_t at = 0; at < ahead.bytes; at += line_bytes)
#pragma GCC unroll 16
            for (int k = 0; k < K; ++k) __builtin_prefetch(ahead.rows[tile * K + k] + at);
#pragma GCC unroll 2
        for (int p = 0; p < K / part; ++p) {
            const T* row[part];
            vf sums[part * slots];
#pragma GCC unroll 8
            for (int k = 0; k < part; ++k) row[k] = reinterpret_cast<const T*>(keys[p * part + k]);
#pragma GCC unroll 16
            for (int i = 0; i < part * slots; ++i) sums[i] = vf{};
            int64_t v = 0;
            for (; v + 2 <= vectors; v += 2) {
#pragma GCC unroll 8
                for (int k = 0; k < part; ++k) {
                    const Pair x = pair_at(row[k] + v * W);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sums[k * slots + r] += x.a * load(queries + r * ldq + v * W);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sums[k * slots + r] += x.b * load(queries + r * ldq + v * W + W);
                }
            }
            if (v < vectors) {
#pragma GCC unroll 8
                for (int k = 0; k < part; ++k) {
                    const vf x = vector_at(row[k] + v * W);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sums[k * slots + r] += x * load(queries + r * ldq + v * W);
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
                                int64_t slots, const float* fade, float* out, int64_t ldo, RowsAhead ahead, int64_t from,
                                int64_t to) {
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
        for (int64_t at = from; at < to; at += line_bytes) __builtin_prefetch(ahead.rows[j] + at);
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

// All columns: strips as wide as the registers allow. out: R rows of `vectors` vectors, in T's order.
template <typename T, int R>
void mix_rows(const char* const* values, int64_t count, int64_t vectors, const float* weights, int64_t slots,
              const float* fade, float* out, RowsAhead ahead) {
    int64_t v = 0, fetched = 0;
    auto strip = [&](auto width) __attribute__((always_inline)) {
        constexpr int S = decltype(width)::value;
        // Each strip fetches its share of the rows ahead.
        const int64_t until = v + S == vectors ? ahead.bytes : ahead.bytes * (v + S) / vectors / line_bytes * line_bytes;
        mix_strip<T, R, S>(values, v * W, count, weights, slots, fade, out, vectors * W, ahead, fetched, until);
        fetched = until;
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
