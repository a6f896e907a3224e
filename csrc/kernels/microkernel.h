// The one matrix product of the core: a register tile of R rows by V vectors, C = A · B.
//
// A is read by scalar broadcast and needs no packing; B holds vectors of lanes, `ldb` floats from one step of the
// depth to the next. All five products of attention and of its backward are this tile; they differ in how A
// is walked and in what happens to the finished tile (`end`).
#pragma once

#include "simd.h"

namespace clearhead {
namespace {

// A number as a type, so that loops over it unroll.
template <int N>
struct Number {
    static constexpr int value = N;
};

// How A is walked: rows apart and the depth contiguous (Q · K, …), or the other way round (P · V, …).
enum class Walk { along_rows, across_rows };

// Float32 multiply-add; the bf16 unit has its own (pairs.h).
struct Floats {
    using Scalar = float;
    using Vector = vf;
    CLEARHEAD_INLINE static vf broadcast(const float* a) { return same(*a); }
    CLEARHEAD_INLINE static vf take(const float* b) { return load(b); }
    CLEARHEAD_INLINE static vf add(vf sum, vf a, vf b) { return sum + a * b; }
};

// Where a tile's sums start.
struct FromZero {
    template <int R, int V>
    CLEARHEAD_INLINE void operator()(int64_t, int, vf (&sums)[R][V]) const {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = vf{};
    }
};

// One tile. a: the first scalar; lda: scalars from row to row (along_rows) or from step to step (across_rows).
// begin(sums): sets them; end(sums): gets the finished R x V vectors.
template <class Kind, Walk walk, int R, int V, class Begin, class End>
CLEARHEAD_INLINE void tile(const typename Kind::Scalar* a, int64_t lda, const typename Kind::Scalar* b, int64_t ldb,
                           int64_t depth, const Begin& begin, const End& end) {
    vf sums[R][V];
    begin(sums);
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; ++k) {
        typename Kind::Vector across[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) across[v] = Kind::take(b + k * ldb + v * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const auto x = Kind::broadcast(walk == Walk::along_rows ? a + r * lda + k : a + k * lda + r);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = Kind::add(sums[r][v], x, across[v]);
        }
    }
    end(sums);
}

// Rows per tile: enough independent sums to cover the latency of a multiply-add (4 cycles, 2 a cycle), and as many
// as the registers hold, so that each load serves more of them.
template <int V>
constexpr int tile_rows = V >= 3 ? (W == 16 ? 6 : 4) : V == 2 ? 6 : 12;

// All rows of one strip of V vectors. begin, end(row, sums): the first row of a tile, and its R x V vectors.
template <class Kind, Walk walk, int V, class Begin, class End>
CLEARHEAD_INLINE void strip(const typename Kind::Scalar* a, int64_t lda, int64_t rows, const typename Kind::Scalar* b,
                            int64_t ldb, int64_t depth, const Begin& begin, const End& end) {
    const int64_t step = walk == Walk::along_rows ? lda : 1;
    int64_t row = 0;
    auto some = [&](auto count) __attribute__((always_inline)) {
        tile<Kind, walk, decltype(count)::value, V>(
            a + row * step, lda, b, ldb, depth,
            [&](auto& sums) __attribute__((always_inline)) { begin(row, sums); },
            [&](const auto& sums) __attribute__((always_inline)) { end(row, sums); });
        row += decltype(count)::value;
    };
    while (row + tile_rows<V> <= rows) some(Number<tile_rows<V>>{});
    if constexpr (tile_rows<V> > 4)
        while (row + 4 <= rows) some(Number<4>{});
    if (row + 2 <= rows) some(Number<2>{});
    if (row < rows) some(Number<1>{});
}

// most[lane] = the largest of itself and the lane's numbers in a finished tile.
template <int R, int V>
CLEARHEAD_INLINE void raise(float* most, const vf (&sums)[R][V]) {
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
        vf high = load(most + i * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) high = larger(sums[r][i], high);
        store(most + i * W, high);
    }
}

// All rows and the vectors v0 … v1 - 1 of a block. begin, end(row, v, sums): the tile's first row and vector.
template <class Kind, Walk walk, class End, class Begin = FromZero>
CLEARHEAD_INLINE void product(const typename Kind::Scalar* a, int64_t lda, int64_t rows,
                              const typename Kind::Scalar* b, int64_t ldb, int64_t depth, int v0, int v1,
                              const End& end, const Begin& begin = {}) {
    int v = v0;
    auto wide = [&](auto count) __attribute__((always_inline)) {
        strip<Kind, walk, decltype(count)::value>(
            a, lda, rows, b + v * W, ldb, depth,
            [&](int64_t row, auto& sums) __attribute__((always_inline)) { begin(row, v, sums); },
            [&](int64_t row, const auto& sums) __attribute__((always_inline)) { end(row, v, sums); });
        v += decltype(count)::value;
    };
    while (v + tile_vectors <= v1) wide(Number<tile_vectors>{});
    if constexpr (tile_vectors > 3)
        if (v + 3 <= v1) wide(Number<3>{});
    if (v + 2 <= v1) wide(Number<2>{});
    if (v < v1) wide(Number<1>{});
}

// Calls each(r, i, sum) for every vector of a finished tile.
template <int R, int V, class Each>
CLEARHEAD_INLINE void for_each(const vf (&sums)[R][V], const Each& each) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) each(r, i, sums[r][i]);
}

}  // namespace
}  // namespace clearhead
