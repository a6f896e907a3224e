// What a block holds while it walks over its keys: packed queries, scores, running maximum and sum, outputs.
//
// Queries lie in the lanes, keys run downwards: Q^T is [d][lanes], scores are [key][lanes], O^T is [dv][lanes].
// So the softmax never looks across lanes, and a mask is one bit per lane.
#pragma once

#include "../core/kernels.h"
#include "convert.h"
#include "mask.h"

namespace clearhead {
namespace {

// Keys between two looks at the running maximum. Their weights and values should stay in the first-level cache,
// also where the rows of the values lie a power of two apart and share few of its sets.
#if defined(__AMX_BF16__)
constexpr int64_t chunk_keys = 128;
#else
constexpr int64_t chunk_keys = W == 16 ? 96 : 64;
#endif
constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;
constexpr float lowest = -3.40282347e38f;  // stands for "nothing seen yet"; -inf would make -inf - -inf = NaN

// Hands out aligned pieces of one stretch of memory.
struct Scratch {
    char* at;
    template <typename T>
    T* take(int64_t count) {
        T* here = reinterpret_cast<T*>(at);
        at += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return here;
    }
};

CLEARHEAD_INLINE int64_t padded(int64_t columns) { return (columns + W - 1) / W * W; }

// How scores become exponents of two: exponent = score * factor, factor > 0, score = (query * sign) · key.
struct Scaling {
    float query = 1.0f;   // multiplies the queries when they are packed: a sign, or the scale where it is too small
    float factor = 1.0f;  // multiplies the product

    explicit Scaling(float scale) {
        const float size = scale < 0 ? -scale : scale;
        if (size > 1e-30f && size < 1e30f) {  // the usual case: exact, queries are not rounded again
            query = scale < 0 ? -1.0f : 1.0f;
            factor = size * log2_e;
        } else {  // 0 · -inf would be NaN
            query = scale;
            factor = log2_e;
        }
    }
};

// The rows of W lanes from `lane` on as [columns][lanes]: transposed, times `factor`, 0 where there is no query.
inline void pack_lanes(const Rows& rows, const Task& task, int64_t lanes, int64_t columns, float factor,
                       float* room, float* to) {
    const int64_t wide = padded(columns);
    for (int64_t lane = 0; lane < padded(lanes); lane += W) {
        for (int i = 0; i < W; ++i) {
            float* row = room + i * wide;
            int64_t filled = 0;
            if (lane + i < lanes) {
                const int64_t head = task.head + (lane + i) / task.queries;
                read_row(rows, task.b, head, task.query + (lane + i) % task.queries, columns, row);
                filled = columns;
            }
            for (int64_t t = filled; t < wide; ++t) row[t] = 0.0f;
        }
        for (int64_t t = 0; t < wide; t += W) {
            vf x[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) x[i] = load(room + i * wide + t) * factor;
            transpose(x);
            const int64_t left = columns - t < W ? columns - t : W;
            for (int64_t i = 0; i < left; ++i) store(to + (t + i) * block_lanes + lane, x[i]);
        }
    }
}

// [columns][lanes] back to rows in memory: out of lane l is the column of numbers times factors[l].
inline void write_lanes(const float* from, const Task& task, int64_t lanes, int64_t columns, const float* factors,
                        float* room, Type type, void* out, int64_t batch, int64_t head, int64_t row) {
    const int64_t wide = padded(columns);
    for (int64_t lane = 0; lane < lanes; lane += W) {
        const vf factor = load(factors + lane);
        for (int64_t t = 0; t < wide; t += W) {
            vf x[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) x[i] = t + i < columns ? load(from + (t + i) * block_lanes + lane) * factor : vf{};
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) store(room + i * wide + t, x[i]);
        }
        for (int i = 0; i < W && lane + i < lanes; ++i) {
            const int64_t h = task.head + (lane + i) / task.queries, q = task.query + (lane + i) % task.queries;
            write_floats(type, out, task.b * batch + h * head + q * row, columns, room + i * wide);
        }
    }
}

// Everything a block keeps in memory.
struct Block {
    int64_t lanes;    // in use
    int vectors;      // that hold them
    float* queries;   // [d][block_lanes]
    float* scores;    // [chunk_keys][block_lanes], of the chunk at hand
    float* weights;   // likewise, 2^(exponent - peak); the same memory, unless scores are kept for questions
    float* out;       // [dv, to a multiple of 16][block_lanes], relative to `peak`
    float* peak;      // [block_lanes], running maximum of the exponents
    float* sum;       // [block_lanes], Σ 2^(exponent - peak)
    float* keys;      // room to stage a chunk of K or V
    float* room;      // W padded rows
    uint64_t* words;  // visible lanes of each key of the chunk

    Block(const Call& call, const Task& task, Scratch& scratch)
        : lanes(task.queries * task.heads), vectors(static_cast<int>((lanes + W - 1) / W)) {
        const int64_t widest = call.d > call.dv ? call.d : call.dv;
        queries = scratch.take<float>(call.d * block_lanes);
        scores = weights = scratch.take<float>(chunk_keys * block_lanes);
        out = scratch.take<float>((call.dv + 15) / 16 * 16 * block_lanes);
        peak = scratch.take<float>(block_lanes);
        sum = scratch.take<float>(block_lanes);
        keys = scratch.take<float>(chunk_keys * widest);
        room = scratch.take<float>(W * padded(widest));
        words = scratch.take<uint64_t>(chunk_keys);
    }

    static int64_t bytes(const Call& call) {
        const int64_t widest = call.d > call.dv ? call.d : call.dv;
        const int64_t floats = (call.d + (call.dv + 15) / 16 * 16 + chunk_keys + 2) * block_lanes + chunk_keys * widest + W * padded(widest);
        return floats * 4 + chunk_keys * 8 + 16 * 64;
    }
};

}  // namespace
}  // namespace clearhead
