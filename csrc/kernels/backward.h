// The backward of a task: the gradients of its queries and keys by recomputing the weights (Dao 2023, algorithm 2).
//
// Per block of queries and chunk of keys there are five products, all of them `product` of microkernel.h:
//   S^T = K · Q^T, dP^T = V · dO^T    queries in the lanes, as in the forward
//   dQ^T += K^T · dS^T                queries in the lanes
//   dV += P^T · dO, dK += dS^T · Q    columns in the lanes
// and between them P = exp2(exponent - lse), dS = scale · P ∘ (dP - D), D = rowsum(dO ∘ O) - dlse. Nothing is
// transposed but Q, dO and the finished dQ, once per block. Every tile starts at zero and is added to memory:
// carrying on from memory makes dK and dV two to three times less exact.
//
// Which tasks there are, and who adds up their results, is the business of core/backward.cpp.
#pragma once

#include "microkernel.h"
#include "scores.h"

namespace clearhead {
namespace {

// Keys per step. The tiles P^T and dS^T should share the first-level cache with what they are multiplied by.
constexpr int64_t step_keys = 64;
static_assert(step_keys <= chunk_keys, "a block has room for this many scores");

// What a block keeps for the backward besides its packed queries and scores.
struct Slopes {
    float* queries;   // [lanes][padded d]
    float* pull;      // [lanes][padded dv]: dO
    float* pull_t;    // [dv][block_lanes]: dO^T
    float* slopes;    // [step_keys][block_lanes]: dP^T, then dS^T
    float* bend;      // likewise, 1 - (s / c)²: the derivative of softcap
    float* dq;        // [d, to a multiple of 16][block_lanes]: dQ^T
    float* norm;      // [block_lanes]: lse in base 2; +inf where nothing is seen, so that the weights are 0
    float* rest;      // [block_lanes]: D · scale
    float* keys;      // room for all keys of the task: [keys][d]
    float* values;    // likewise [keys][dv]

    Slopes(const Call& call, int64_t most_keys, Scratch& scratch) {
        queries = scratch.take<float>(block_lanes * padded(call.d));
        pull = scratch.take<float>(block_lanes * padded(call.dv));
        pull_t = scratch.take<float>(call.dv * block_lanes);
        slopes = scratch.take<float>(step_keys * block_lanes);
        bend = scratch.take<float>(call.softcap > 0 ? step_keys * block_lanes : 0);
        dq = scratch.take<float>((call.d + 15) / 16 * 16 * block_lanes);
        norm = scratch.take<float>(block_lanes);
        rest = scratch.take<float>(block_lanes);
        keys = scratch.take<float>(in_rows(call.k, call.d) ? 0 : most_keys * call.d);
        values = scratch.take<float>(in_rows(call.v, call.dv) ? 0 : most_keys * call.dv);
    }

    static int64_t bytes(const Call& call, int64_t most_keys) {
        const int64_t across = padded(call.d) + padded(call.dv) + call.dv + 2 * step_keys + (call.d + 15) / 16 * 16 + 2;
        return (across * block_lanes + most_keys * (call.d + call.dv)) * 4 + 10 * 64;
    }

    // Whether rows can be read where they lie. Rows far apart are not: a column of them would be found in few sets
    // of the cache.
    static bool in_rows(const Rows& rows, int64_t columns) {
        return rows.type == Type::f32 && rows.column == 1 && rows.row == columns && rows.table == nullptr;
    }
};

// All keys or values of a task as contiguous float32 rows; keys beyond the length of the row are not read.
inline Panel whole_panel(const Plan& plan, const Rows& rows, const Task& task, int64_t kv, int64_t columns, float* room) {
    int64_t count = task.keys.high - task.keys.low;
    for (const Mask* m = &plan.call->mask; m != nullptr; m = m->next)
        if (m->lengths != nullptr && m->lengths[task.b] - task.keys.low < count) count = m->lengths[task.b] - task.keys.low;
    if (Slopes::in_rows(rows, columns)) return stage(rows, task.b, kv, task.keys.low, count, columns, room);
    for (int64_t j = 0; j < count; ++j) read_row(rows, task.b, kv, task.keys.low + j, columns, room + j * columns);
    return {room, columns};
}

// The rows of a block's lanes, [lanes][padded columns], zeros to the right.
inline void gather_rows(const Rows& rows, const Task& task, int64_t lanes, int64_t columns, float* to) {
    const int64_t wide = padded(columns);
    for (int64_t lane = 0; lane < lanes; ++lane, to += wide) {
        read_row(rows, task.b, task.head + lane / task.queries, task.query + lane % task.queries, columns, to);
        for (int64_t t = columns; t < wide; ++t) to[t] = 0.0f;
    }
}

// Gathered rows times `factor` as [columns][block_lanes], zeros where there is no query.
inline void turn_rows(const float* rows, int64_t lanes, int64_t columns, float factor, float* to) {
    const int64_t wide = padded(columns);
    for (int64_t lane = 0; lane < padded(lanes); lane += W)
        for (int64_t t = 0; t < wide; t += W) {
            vf x[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) x[i] = lane + i < lanes ? load(rows + (lane + i) * wide + t) * factor : vf{};
            transpose(x);
            const int64_t left = columns - t < W ? columns - t : W;
            for (int64_t i = 0; i < left; ++i) store(to + (t + i) * block_lanes + lane, x[i]);
        }
}

// rest = scale · (rowsum(dO ∘ O) - dlse) and norm = lse in base 2, of each lane. `room`: one padded row.
inline void row_numbers(const Call& call, const Backward& back, const Task& task, int64_t lanes, float* room,
                        Slopes& at) {
    const int64_t wide = padded(call.dv);
    for (int64_t lane = 0; lane < padded(lanes); lane += W) {
        vf dot[W];
        float minus[W] = {}, lse[W];
        for (int64_t i = 0; i < W; ++i) {
            dot[i] = vf{};
            lse[i] = -__builtin_inff();
            if (lane + i >= lanes) continue;
            const int64_t head = task.head + (lane + i) / task.queries, query = task.query + (lane + i) % task.queries;
            const int64_t row = (task.b * call.Hq + head) * call.Lq + query;
            lse[i] = back.lse[row];
            if (back.dlse != nullptr) minus[i] = back.dlse[row];
            if (back.dout.data == nullptr) continue;
            read_row(back.out, task.b, head, query, call.dv, room);
            for (int64_t t = call.dv; t < wide; ++t) room[t] = 0.0f;
            for (int64_t t = 0; t < wide; t += W) dot[i] += load(room + t) * load(at.pull + (lane + i) * wide + t);
        }
        transpose(dot);
        vf sum = -load(minus);
        for (int i = 0; i < W; ++i) sum += dot[i];
        const vf norm = load(lse), none = same(-__builtin_inff());
        store(at.rest + lane, choose(norm == none, vf{}, sum * call.scale));
        store(at.norm + lane, choose(norm == none, same(__builtin_inff()), norm * log2_e));
    }
}

// What turns scores into weights and the pull on weights into the pull on scores.
struct Slope {
    float factor;           // exponent = score * factor
    float scale;            // of the call
    bool bent;              // softcap
    const uint64_t* words;  // visible lanes of each key of the chunk; null: all
};

// scores → P, slopes (dP) → dS, for one run.
template <bool masked, bool bent>
inline void differentiate(const Block& block, const Slopes& at, const Slope& slope, const Run& run) {
    const vf factor = same(slope.factor), scale = same(slope.scale);
    for (int v = run.v0; v < run.v1; ++v) {
        const vf norm = load(at.norm + v * W), rest = load(at.rest + v * W);
        float *weights = block.scores + v * W, *slopes = at.slopes + v * W;
#pragma GCC unroll 4
        for (int64_t j = run.low; j < run.low + run.count; ++j) {
            vf weight = exp2(load(weights + j * block_lanes) * factor - norm);
            vf pull = load(slopes + j * block_lanes) * scale - rest;
            if constexpr (bent) pull *= load(at.bend + j * block_lanes + v * W);
            pull *= weight;
            if constexpr (masked) {
                const vi seen = lanes_in(slope.words[j] >> (v * W));
                weight = choose(seen, weight, vf{});
                pull = choose(seen, pull, vf{});
            }
            store(weights + j * block_lanes, weight);
            store(slopes + j * block_lanes, pull);
        }
    }
}

inline void differentiate(const Block& block, const Slopes& at, const Slope& slope, const Run& run) {
    if (slope.words != nullptr)
        slope.bent ? differentiate<true, true>(block, at, slope, run) : differentiate<true, false>(block, at, slope, run);
    else
        slope.bent ? differentiate<false, true>(block, at, slope, run) : differentiate<false, false>(block, at, slope, run);
}

// to[key][lane] = rows · lanes for the keys and vectors of a run.
inline void keys_by_lanes(const Panel& rows, const float* lanes, int64_t depth, const Run& run, float* to) {
    to += run.low * block_lanes;
    product<Floats, Walk::along_rows>(
        rows.data + run.low * rows.stride, rows.stride, run.count, lanes, block_lanes, depth, run.v0, run.v1,
        [&](int64_t row, int v, const auto& sums) __attribute__((always_inline)) {
            for_each(sums, [&](int r, int i, vf sum) __attribute__((always_inline)) {
                store(to + (row + r) * block_lanes + (v + i) * W, sum);
            });
        });
}

CLEARHEAD_INLINE void add_to(float* to, vf sum) { store(to, load(to) + sum); }

// to[column][lane] += rows^T · slopes.
inline void columns_by_lanes(const Panel& rows, int64_t columns, const float* slopes, const Run& run, float* to) {
    product<Floats, Walk::across_rows>(
        rows.data + run.low * rows.stride, rows.stride, columns, slopes + run.low * block_lanes, block_lanes, run.count,
        run.v0, run.v1, [&](int64_t row, int v, const auto& sums) __attribute__((always_inline)) {
            for_each(sums, [&](int r, int i, vf sum) __attribute__((always_inline)) {
                add_to(to + (row + r) * block_lanes + (v + i) * W, sum);
            });
        });
}

// to[key][column] += by_key · rows, over the lanes of a run. rows: [lanes][padded columns].
inline void keys_by_columns(const float* by_key, const Run& run, int64_t lanes, const float* rows, int64_t columns,
                            float* to, int64_t stride) {
    const int64_t wide = padded(columns), from = run.v0 * W, end = run.v1 * W < lanes ? run.v1 * W : lanes;
    to += run.low * stride;
    product<Floats, Walk::along_rows>(
        by_key + run.low * block_lanes + from, block_lanes, run.count, rows + from * wide, wide, end - from, 0,
        static_cast<int>(wide / W), [&](int64_t row, int v, const auto& sums) __attribute__((always_inline)) {
            for_each(sums, [&](int r, int i, vf sum) __attribute__((always_inline)) {
                add_to(to + (row + r) * stride + (v + i) * W, sum);
            });
        });
}

// A block of queries against the keys low … low + count - 1, which are `keys` and `values`.
inline void backward_step(const Plan& plan, const Task& task, Block& block, Slopes& at, const Scaling& scaling,
                          bool pulled, int64_t low, int64_t count, const Panel& keys, const Panel& values,
                          const GradientPlaces& to) {
    const Call& call = *plan.call;
    Slope slope{scaling.factor, call.scale, call.softcap > 0, nullptr};
    if (visible_words(plan, task, low, count, block.words)) slope.words = block.words;
    Run runs[step_keys / run_keys + 1];
    int found = 0;
    for (int n = 0, all = runs_of(slope.words, count, block.vectors, runs); n < all; ++n)
        if (runs[n].v0 < runs[n].v1) runs[found++] = runs[n];  // nobody sees the others
    if (found == 0) return;
    for (int n = 0; n < found; ++n) keys_by_lanes(keys, block.queries, call.d, runs[n], block.scores);
    if (has_extras(call)) {
        finish_scores(call, task, block, scaling, low, count, slope.bent ? at.bend : nullptr);
        slope.factor = 1.0f;
    }
    for (int n = 0; n < found; ++n) {
        const Run& run = runs[n];
        if (pulled) {
            keys_by_lanes(values, at.pull_t, call.dv, run, at.slopes);
        } else {
            for (int64_t j = run.low; j < run.low + run.count; ++j)
                for (int v = run.v0; v < run.v1; ++v) store(at.slopes + j * block_lanes + v * W, vf{});
        }
        differentiate(block, at, slope, run);
    }
    for (int n = 0; n < found && pulled; ++n)
        keys_by_columns(block.scores, runs[n], block.lanes, at.pull, call.dv, to.dv, to.dv_row);
    for (int n = 0; n < found; ++n) {
        keys_by_columns(at.slopes, runs[n], block.lanes, at.queries, call.d, to.dk, to.dk_row);
        columns_by_lanes(keys, call.d, at.slopes, runs[n], at.dq);
    }
}

void backward_task(const Plan& plan, const Backward& back, const Task& task, char* memory, const GradientPlaces& to) {
    const Call& call = *plan.call;
    Scratch scratch{memory};
    Task part = task;  // the block at hand
    Block block(call, part, scratch);
    const int64_t first_key = task.keys.low, count = task.keys.high - first_key;
    Slopes at(call, count, scratch);
    const Scaling scaling(call.scale);
    const bool pulled = back.dout.data != nullptr;
    const int64_t kv = task.head / (call.Hq / call.Hkv);
    const Panel keys = whole_panel(plan, call.k, task, kv, call.d, at.keys);
    const Panel values = whole_panel(plan, call.v, task, kv, call.dv, at.values);
    __builtin_memset(to.dk, 0, static_cast<size_t>(count * to.dk_row) * 4);
    __builtin_memset(to.dv, 0, static_cast<size_t>(count * to.dv_row) * 4);
    alignas(64) float ones[block_lanes];
    for (int64_t lane = 0; lane < block_lanes; ++lane) ones[lane] = 1.0f;
    const int64_t most = block_lanes / task.heads;
    for (int64_t done = 0; done < task.queries; done += part.queries) {
        part.query = task.query + done;
        part.queries = task.queries - done < most ? task.queries - done : most;
        block.lanes = part.queries * part.heads;
        block.vectors = static_cast<int>((block.lanes + W - 1) / W);
        for (int64_t i = 0; i < call.d * block_lanes; i += W) store(at.dq + i, vf{});
        const Ranges ranges = visible_ranges(plan, part);
        if (ranges.count > 0) {
            gather_rows(call.q, part, block.lanes, call.d, at.queries);
            turn_rows(at.queries, block.lanes, call.d, scaling.query, block.queries);
            if (pulled) {
                gather_rows(back.dout, part, block.lanes, call.dv, at.pull);
                turn_rows(at.pull, block.lanes, call.dv, 1.0f, at.pull_t);
            }
            row_numbers(call, back, part, block.lanes, block.room, at);
        }
        for (int i = 0; i < ranges.count; ++i)
            for (int64_t low = ranges.part[i].low; low < ranges.part[i].high; low += step_keys) {
                const int64_t left = ranges.part[i].high - low, place = low - first_key;
                const GradientPlaces here{nullptr, to.dk + place * to.dk_row, to.dv + place * to.dv_row, to.dk_row, to.dv_row};
                backward_step(plan, part, block, at, scaling, pulled, low, left < step_keys ? left : step_keys,
                              {keys.data + place * keys.stride, keys.stride},
                              {values.data + place * values.stride, values.stride}, here);
            }
        // Rows of the task's queries lie one after the other, those of a further head after them.
        Task own = part;
        own.b = own.head = 0;
        own.query = done;
        write_lanes(at.dq, own, block.lanes, call.d, ones, block.room, Type::f32, to.dq, 0, task.queries * call.d, call.d);
    }
}

int64_t backward_task_bytes(const Call& call, int64_t keys) { return Block::bytes(call) + Slopes::bytes(call, keys); }

}  // namespace
}  // namespace clearhead
