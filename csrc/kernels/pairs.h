// Products of bfloat16 with float32 sums: pairs of numbers, two steps of the depth at a time.
//
// Two kinds of instruction do it. VDPBF16PS multiplies vectors and takes the shape of the float32 tile
// (microkernel.h). The tile unit (AMX) multiplies 16 x 32 by 32 x 16 in one instruction. Both read queries and
// weights as pairs in the lanes, [depth / 2][lanes][2]; keys are read as they are stored, values are packed.
#pragma once

#include "block.h"
#include "microkernel.h"
#include "softmax.h"

#if defined(__AVX512BF16__)
#define CLEARHEAD_PAIRS 1

namespace clearhead {
namespace {

typedef uint32_t pair_loose __attribute__((aligned(2), may_alias));

#if defined(__AMX_BF16__)
constexpr bool tile_unit = true;
#else
constexpr bool tile_unit = false;
#endif
constexpr int64_t depth_step = tile_unit ? 32 : 2;  // columns and keys are padded with zeros to multiples of it

CLEARHEAD_INLINE int64_t stepped(int64_t count) { return (count + depth_step - 1) / depth_step * depth_step; }

// VDPBF16PS as the tile's multiply-add.
struct Pairs {
    using Scalar = pair_loose;
    using Vector = __m512i;
    CLEARHEAD_INLINE static __m512i broadcast(const pair_loose* a) { return _mm512_set1_epi32(static_cast<int>(*a)); }
    CLEARHEAD_INLINE static __m512i take(const pair_loose* b) { return _mm512_loadu_si512(b); }
    CLEARHEAD_INLINE static vf add(vf sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
};

// What a block keeps besides its floats.
struct PairBlock {
    pair_loose* queries;  // [stepped(d) / 2][block_lanes]
    pair_loose* weights;  // [stepped(chunk_keys) / 2][block_lanes]
    uint16_t* values;     // tile unit: [dv, to a multiple of 16][stepped(chunk_keys)]; else [chunk_keys / 2][dv][2]
    uint16_t* keys;       // room for keys that cannot be read where they lie: [chunk_keys][stepped(d)]

    PairBlock(const Call& call, Scratch& scratch) {
        queries = scratch.take<pair_loose>(stepped(call.d) / 2 * block_lanes);
        weights = scratch.take<pair_loose>(stepped(chunk_keys) / 2 * block_lanes);
        values = scratch.take<uint16_t>((call.dv + 15) / 16 * 16 * stepped(chunk_keys));
        keys = scratch.take<uint16_t>((chunk_keys + 15) / 16 * 16 * stepped(call.d));
    }

    static int64_t bytes(const Call& call) {
        return stepped(call.d) * 2 * block_lanes + stepped(chunk_keys) * 2 * block_lanes +
               (call.dv + 15) / 16 * 16 * stepped(chunk_keys) * 2 + (chunk_keys + 15) / 16 * 16 * stepped(call.d) * 2 + 4 * 64;
    }
};

// Whether a call's products run on pairs. Queries are multiplied by nothing but a sign, so they stay exact.
CLEARHEAD_INLINE bool runs_on_pairs(const Call& call, const Scaling& scaling) {
    return call.q.type == Type::bf16 && call.k.type == Type::bf16 && call.v.type == Type::bf16 &&
           (scaling.query == 1.0f || scaling.query == -1.0f);
}

// Two rows of floats as one row of pairs: (a[lane], b[lane]).
CLEARHEAD_INLINE void store_pairs(pair_loose* to, vf a, vf b) {
    const __m512bh packed = _mm512_cvtne2ps_pbh(b, a);  // a in the low half, b in the high half
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(packed)));
}

// [count][lanes] floats as [stepped(count) / 2][lanes] pairs, vectors v0 … v1 - 1; what is beyond `count` is 0.
inline void pair_up(const float* from, int64_t count, int v0, int v1, pair_loose* to) {
    for (int64_t j = 0; j < stepped(count); j += 2)
        for (int v = v0; v < v1; ++v) {
            const vf a = j < count ? load(from + j * block_lanes + v * W) : vf{};
            const vf b = j + 1 < count ? load(from + (j + 1) * block_lanes + v * W) : vf{};
            store_pairs(to + j / 2 * block_lanes + v * W, a, b);
        }
}

struct PairPanel {
    const uint16_t* data;
    int64_t stride;
};

// Keys low … low + count - 1, in place where the instruction can read them so, else copied with zeros around.
inline PairPanel stage_pairs(const Rows& rows, int64_t b, int64_t h, int64_t low, int64_t count, int64_t columns,
                             uint16_t* room) {
    const uint16_t* data = static_cast<const uint16_t*>(rows.data);
    const bool together = rows.table == nullptr || low / rows.page == (low + count - 1) / rows.page;
    if (together && rows.column == 1 && columns == stepped(columns) && (!tile_unit || count % 16 == 0) &&
        (tile_unit || rows.row % 2 == 0))
        return {data + row_offset(rows, b, h, low), rows.row};
    const int64_t wide = stepped(columns), deep = tile_unit ? (count + 15) / 16 * 16 : count;
    for (int64_t j = 0; j < deep; ++j) {
        uint16_t* to = room + j * wide;
        const uint16_t* from = j < count ? data + row_offset(rows, b, h, low + j) : nullptr;
        const int64_t filled = from != nullptr ? columns : 0;
        if (rows.column == 1 && filled > 0) {
            __builtin_memcpy(to, from, static_cast<size_t>(columns) * 2);
        } else {
            for (int64_t t = 0; t < filled; ++t) to[t] = from[t * rows.column];
        }
        for (int64_t t = filled; t < wide; ++t) to[t] = 0;
    }
    return {room, wide};
}

#if defined(__AMX_BF16__)

// The unit's eight tiles as 16 rows of 64 bytes each.
inline void open_tiles() {
    struct {
        uint8_t palette, row;
        uint8_t reserved[14];
        uint16_t columns[16];
        uint8_t rows[16];
    } shape{};
    shape.palette = 1;
    for (int i = 0; i < 8; ++i) {
        shape.columns[i] = 64;
        shape.rows[i] = 16;
    }
    // g++ 12 declares eight bytes of what the instruction reads: without this it leaves out the other stores.
    asm volatile("" : : "r"(&shape) : "memory");
    _tile_loadconfig(&shape);
}
inline void close_tiles() { _tile_release(); }

// C[rows][lanes] (+)= A[rows][depth] · B[depth / 2][lanes][2], 32 rows by 32 lanes at a time; rows in multiples of
// 16, depth of 32. A's rows lie `lda` numbers apart.
inline void tile_product(const uint16_t* a, int64_t lda, int64_t rows, const pair_loose* b, int64_t depth, int v0, int v1,
                         float* c, bool onto) {
    const size_t a_bytes = static_cast<size_t>(lda) * 2, row_bytes = block_lanes * 4;
    for (int64_t r = 0; r < rows; r += 32) {
        const bool low = r + 16 < rows;  // a second 16 rows
        for (int v = v0; v < v1; v += 2) {
            const bool right = v + 1 < v1;
            float *c0 = c + r * block_lanes + v * W, *c1 = c0 + W, *c2 = c0 + 16 * block_lanes, *c3 = c2 + W;
            if (onto) {
                _tile_loadd(0, c0, row_bytes);
                if (right) _tile_loadd(1, c1, row_bytes);
                if (low) _tile_loadd(2, c2, row_bytes);
                if (low && right) _tile_loadd(3, c3, row_bytes);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            const uint16_t* above = a + r * lda;
            const pair_loose* left = b + v * W;
            if (low && right) {
                for (int64_t k = 0; k < depth; k += 32) {
                    _tile_loadd(4, above + k, a_bytes);
                    _tile_loadd(6, left + k / 2 * block_lanes, row_bytes);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(7, left + k / 2 * block_lanes + W, row_bytes);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_loadd(5, above + 16 * lda + k, a_bytes);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            } else {
                for (int64_t k = 0; k < depth; k += 32) {
                    _tile_loadd(4, above + k, a_bytes);
                    _tile_loadd(6, left + k / 2 * block_lanes, row_bytes);
                    _tile_dpbf16ps(0, 4, 6);
                    if (right) {
                        _tile_loadd(7, left + k / 2 * block_lanes + W, row_bytes);
                        _tile_dpbf16ps(1, 4, 7);
                    }
                    if (low) {
                        _tile_loadd(5, above + 16 * lda + k, a_bytes);
                        _tile_dpbf16ps(2, 5, 6);
                    }
                }
            }
            _tile_stored(0, c0, row_bytes);
            if (right) _tile_stored(1, c1, row_bytes);
            if (low) _tile_stored(2, c2, row_bytes);
            if (low && right) _tile_stored(3, c3, row_bytes);
        }
    }
}

#else

inline void open_tiles() {}
inline void close_tiles() {}

#endif

// S^T = K · Q^T for keys low … low + count - 1 of the chunk.
inline void score_pairs(const Block& block, const PairBlock& pairs, const PairPanel& keys, int64_t d, const Run& run) {
    float* scores = block.scores + run.low * block_lanes;
    const uint16_t* a = keys.data + run.low * keys.stride;
#if defined(__AMX_BF16__)
    tile_product(a, keys.stride, (run.count + 15) / 16 * 16, pairs.queries, stepped(d), run.v0, run.v1, scores, false);
#else
    product<Pairs, Walk::along_rows>(
        reinterpret_cast<const pair_loose*>(a), keys.stride / 2, run.count, pairs.queries, block_lanes, stepped(d) / 2,
        run.v0, run.v1, [&](int64_t row, int v, const auto& sums) __attribute__((always_inline)) {
            for_each(sums, [&](int r, int i, vf sum) __attribute__((always_inline)) {
                store(scores + (row + r) * block_lanes + (v + i) * W, sum);
            });
        });
#endif
}

// 16 numbers of two rows as 16 pairs; a row that is not there counts as zeros.
CLEARHEAD_INLINE __m512i pairs_of(const uint16_t* first, const uint16_t* second) {
    const __m256i none = _mm256_setzero_si256();
    const __m256i x = first == nullptr ? none : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
    const __m256i y = second == nullptr ? none : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
    return _mm512_or_si512(_mm512_cvtepu16_epi32(x), _mm512_slli_epi32(_mm512_cvtepu16_epi32(y), 16));
}

// Packs the values of a chunk: transposed for the tile unit, else in pairs of keys. 32 keys by 16 columns at a time.
inline void pack_values(const Rows& rows, int64_t b, int64_t h, int64_t low, int64_t count, int64_t dv, uint16_t* to) {
    const uint16_t* data = static_cast<const uint16_t*>(rows.data);
    const int64_t plain = rows.column == 1 ? dv / 16 * 16 : 0;  // the columns that vectors can load
    for (int64_t j = 0; j < stepped(count); j += 32) {
        const uint16_t* row[32];
        for (int64_t i = 0; i < 32; ++i)
            row[i] = j + i < count ? data + row_offset(rows, b, h, low + j + i) : nullptr;
        for (int64_t t = 0; t < dv; t += 16) {
            vf x[W];
            if (t < plain) {
                for (int64_t i = 0; i < 16; ++i) {
                    const uint16_t *first = row[2 * i], *second = row[2 * i + 1];
                    x[i] = reinterpret_cast<vf>(pairs_of(first == nullptr ? nullptr : first + t, second == nullptr ? nullptr : second + t));
                }
            } else {  // the last columns, or columns that lie apart
                const int64_t here = dv - t < 16 ? dv - t : 16;
                for (int64_t i = 0; i < 16; ++i) {
                    uint16_t pair[2][16] = {};
                    for (int64_t s = 0; s < 2; ++s)
                        for (int64_t c = 0; c < here && row[2 * i + s] != nullptr; ++c)
                            pair[s][c] = row[2 * i + s][(t + c) * rows.column];
                    x[i] = reinterpret_cast<vf>(pairs_of(pair[0], pair[1]));
                }
            }
            if (tile_unit) {
                transpose(x);
                for (int64_t c = 0; c < 16; ++c)
                    _mm512_storeu_si512(to + (t + c) * stepped(chunk_keys) + j, reinterpret_cast<__m512i>(x[c]));
            } else {
                const int64_t deep = stepped(count) - j < 32 ? (stepped(count) - j) / 2 : 16;
                const __mmask16 kept = static_cast<__mmask16>((1u << (dv - t < 16 ? dv - t : 16)) - 1);
                for (int64_t i = 0; i < deep; ++i)
                    _mm512_mask_storeu_epi32(to + ((j / 2 + i) * dv + t) * 2, kept, reinterpret_cast<__m512i>(x[i]));
            }
        }
    }
}

// O^T = O^T · fade + V^T · P^T over the keys of a run (its first a multiple of the depth step).
inline void mix_pairs(const Block& block, const PairBlock& pairs, int64_t dv, const Run& run) {
    const pair_loose* weights = pairs.weights + run.low / 2 * block_lanes;
#if defined(__AMX_BF16__)
    tile_product(pairs.values + run.low, stepped(chunk_keys), (dv + 15) / 16 * 16, weights, stepped(run.count), run.v0,
                 run.v1, block.out, true);
#else
    float* out = block.out;
    product<Pairs, Walk::across_rows>(
        reinterpret_cast<const pair_loose*>(pairs.values) + run.low / 2 * dv, dv, dv, weights, block_lanes,
        stepped(run.count) / 2, run.v0, run.v1, [&](int64_t row, int v, const auto& sums) __attribute__((always_inline)) {
            for_each(sums, [&](int r, int i, vf sum) __attribute__((always_inline)) {
                float* to = out + (row + r) * block_lanes + (v + i) * W;
                store(to, load(to) + sum);
            });
        });
#endif
}

// The two products of a chunk on pairs: what `FloatProducts` is for floats.
struct PairProducts {
    const Call& call;
    const Task& task;
    Block& block;
    PairBlock pairs;

    void begin(const Scaling&) {
        pair_up(block.queries, call.d, 0, block.vectors, pairs.queries);
        open_tiles();
    }
    void end() { close_tiles(); }

    bool score(int64_t low, int64_t count, const Run* runs, int found, float*) {
        const PairPanel keys = stage_pairs(call.k, task.b, kv(), low, count, call.d, pairs.keys);
        for (int i = 0; i < found; ++i) score_pairs(block, pairs, keys, call.d, runs[i]);
        return false;
    }

    Ahead ahead() const { return {}; }

    void mix(int64_t low, int64_t count, const Run* runs, int found, const float* fade) {
        pack_values(call.v, task.b, kv(), low, count, call.dv, pairs.values);
        fade_out(block, call.dv, fade);
        for (int i = 0; i < found; ++i) {
            const Run& run = runs[i];
            pair_up(block.weights + run.low * block_lanes, run.count, run.v0, run.v1,
                    pairs.weights + run.low / 2 * block_lanes);
            mix_pairs(block, pairs, call.dv, run);
        }
    }

    static constexpr bool brings_parts = false;

    // The chunk's values in float32.
    Panel floats(int64_t low, int64_t count) const { return stage(call.v, task.b, kv(), low, count, call.dv, block.keys); }

    int64_t kv() const { return task.head / (call.Hq / call.Hkv); }
};

}  // namespace
}  // namespace clearhead

#endif
