// The forward of one block: its queries against all the keys that they may see (Dao et al. 2022, algorithm 1).
#pragma once

#include "answer.h"
#include "microkernel.h"
#include "pairs.h"
#include "scores.h"
#include "softmax.h"

namespace clearhead {
namespace {

// S^T = K · Q^T. Unless `most` is null it gets the largest score of each lane ([block_lanes], -inf before).
inline void score_run(const Block& block, const Panel& keys, int64_t d, const Run& run, float* most) {
    float* scores = block.scores + run.low * block_lanes;
    product<Floats, Walk::along_rows>(
        keys.data + run.low * keys.stride, keys.stride, run.count, block.queries, block_lanes, d, run.v0, run.v1,
        [&](int64_t row, int v, const auto& sums) __attribute__((always_inline)) {
            for_each(sums, [&](int r, int i, vf sum) __attribute__((always_inline)) {
                store(scores + (row + r) * block_lanes + (v + i) * W, sum);
            });
            if (most != nullptr) raise(most + v * W, sums);
        });
}

// O^T = O^T · fade + V^T · P^T; `fade` null: 1.
inline void mix_run(const Block& block, const Panel& values, int64_t dv, const Run& run, const float* fade) {
    float* out = block.out;
    product<Floats, Walk::across_rows>(
        values.data + run.low * values.stride, values.stride, dv, block.weights + run.low * block_lanes, block_lanes,
        run.count, run.v0, run.v1, [&](int64_t row, int v, const auto& sums) __attribute__((always_inline)) {
            for_each(sums, [&](int r, int i, vf sum) __attribute__((always_inline)) {
                float* to = out + (row + r) * block_lanes + (v + i) * W;
                store(to, fade == nullptr ? load(to) + sum : load(to) * load(fade + (v + i) * W) + sum);
            });
        });
}

// The two products of a chunk in float32: K and V are read where they lie, or from a float32 copy of the chunk.
struct FloatProducts {
    const Call& call;
    const Task& task;
    Block& block;
    Panel values{};

    void begin(const Scaling&) {}
    void end() {}

    // `most`: null, or gets the largest score of each lane.
    bool score(int64_t low, int64_t count, const Run* runs, int found, float* most) {
        const Panel keys = stage(call.k, task.b, kv(), low, count, call.d, block.keys);
        for (int i = 0; i < found; ++i) score_run(block, keys, call.d, runs[i], most);
        values = stage(call.v, task.b, kv(), low, count, call.dv, block.keys);
        return most != nullptr;
    }

    // What the softmax fetches into the cache ahead of `mix`.
    Ahead ahead() const { return {values.data, values.stride, call.dv}; }

    void mix(int64_t, int64_t, const Run* runs, int found, const float* fade) {
        if (found == 1) return mix_run(block, values, call.dv, runs[0], fade);
        fade_out(block, call.dv, fade);
        for (int i = 0; i < found; ++i) mix_run(block, values, call.dv, runs[i], nullptr);
    }

    int64_t kv() const { return task.head / (call.Hq / call.Hkv); }
};

// The exponents of a block for all its keys, kept for the questions. Without questions: nothing.
struct Kept {
    struct Stretch {
        int64_t low, count;
    };
    float* exponents = nullptr;  // [key][block_lanes], stretch after stretch
    Stretch* stretches = nullptr;
    int64_t count = 0, rows = 0;
    bool in_place = false;  // of a piece: key low + j of the task is row j, whatever was passed over
    int64_t first = 0;

    // What a tile may write beyond the last key.
    static constexpr int64_t beyond = 16;

    static int64_t bytes(int64_t keys) {
        return (keys + beyond) * block_lanes * 4 + (keys / chunk_keys + Ranges::capacity + 1) * 16 + 128;
    }

    void begin(Block& block, int64_t low, int64_t keys) {
        if (exponents == nullptr) return;
        if (in_place) rows = low - first;
        if (stretches != nullptr) stretches[count++] = {low, keys};
        block.scores = exponents + rows * block_lanes;
    }

    // Makes exponents of the scores; vectors that were passed over see nothing.
    void end(const Block& block, const Run* runs, int found, float factor) {
        if (exponents == nullptr) return;
        for (int n = 0; n < found; ++n)
            for (int64_t j = runs[n].low; j < runs[n].low + runs[n].count; ++j) {
                float* row = block.scores + j * block_lanes;
                for (int v = 0; v < block.vectors; ++v) {
                    const bool seen = v >= runs[n].v0 && v < runs[n].v1;
                    store(row + v * W, seen ? load(row + v * W) * factor : same(-__builtin_inff()));
                }
                ++rows;
            }
    }
};

// Answers the questions about a block from its exponents, which become weights on the way.
struct Closing {
    const Plan& plan;
    const Task& task;
    Answers answers;
    float *weights, *values;

    Closing(const Plan& of, const Task& at, const float* peak, const float* sum, float* weights_room, float* values_room,
            Scratch& scratch)
        : plan(of), task(at), answers(of, at, peak, sum, scratch), weights(weights_room), values(values_room) {}

    void stretch(const float* exponents, int64_t low, int64_t count) {
        const Call& call = *plan.call;
        for (int64_t j = 0; j < count; j += chunk_keys) {
            const int64_t here = count - j < chunk_keys ? count - j : chunk_keys;
            answers.weigh(exponents + j * block_lanes, here, block_lanes, weights);
            Panel panel{nullptr, 0};
            if (answers.needs_values())
                panel = stage(call.v, task.b, task.head / (call.Hq / call.Hkv), low + j, here, call.dv, values);
            answers.take({low + j, here, exponents + j * block_lanes, weights, block_lanes}, panel);
        }
    }
};

// One chunk of keys: scores, softmax, values.
template <class Products>
inline void chunk(const Plan& plan, const Task& task, Block& block, Products& products, const Scaling& scaling,
                  int64_t low, int64_t count, Kept& kept) {
    const Call& call = *plan.call;
    const uint64_t* words = visible_words(plan, task, low, count, block.words) ? block.words : nullptr;
    Run runs[chunk_keys / run_keys + 1];
    const int found = runs_of(words, count, block.vectors, runs);
    if (found == 1 && runs[0].v0 == runs[0].v1) return;  // nobody sees anything here
    kept.begin(block, low, count);
    alignas(64) float most[block_lanes], fade[block_lanes];
    for (int64_t lane = 0; lane < block_lanes; ++lane) most[lane] = -__builtin_inff();
    const bool extras = has_extras(call);
    const bool peaks = products.score(low, count, runs, found, extras || words != nullptr ? nullptr : most);
    float factor = scaling.factor;
    if (extras) {
        finish_scores(call, task, block, scaling, low, count);
        factor = 1.0f;
    }
    if (words == nullptr && !peaks) plain_peaks(block.scores, count, block.vectors, most);
    auto softmax = [&](auto width, int v) __attribute__((always_inline)) {
        constexpr int V = decltype(width)::value;
        if (words != nullptr) masked_peaks<V>(block.scores, runs, found, words, v, most);
        admit<V>(block, runs, found, factor, v, most, fade, products.ahead());
    };
    int v = 0;
    for (; v + 2 <= block.vectors; v += 2) softmax(Number<2>{}, v);
    if (v < block.vectors) softmax(Number<1>{}, v);
    products.mix(low, count, runs, found, fade);
    kept.end(block, runs, found, factor);
}

inline void start(const Call& call, const Task& task, Block& block, const Scaling& scaling) {
    pack_lanes(call.q, task, block.lanes, call.d, scaling.query, block.room, block.queries);
    for (int64_t i = 0; i < call.dv * block_lanes; i += W) store(block.out + i, vf{});
    // A learned sink is a key without a value that is there from the start; of split keys, the first piece has it.
    const bool sink = call.sink_logits != nullptr && task.keys.low == 0;
    for (int64_t lane = 0; lane < block_lanes; ++lane) {
        block.peak[lane] = lowest;
        block.sum[lane] = 0.0f;
        if (sink && lane < block.lanes) {
            const float logit = call.sink_logits[task.head + lane / task.queries] * log2_e;
            if (logit >= lowest) {
                block.peak[lane] = logit;
                block.sum[lane] = 1.0f;
            }
        }
    }
}

// Out and lse from what was gathered: out / sum, and log sum + peak; 0 and -inf where a query saw nothing.
inline void finish(const Call& call, const Task& task, int64_t lanes, const float* out, const float* peak,
                   const float* sum, float* room) {
    alignas(64) float share[block_lanes], lse[block_lanes];
    for (int64_t lane = 0; lane < padded(lanes); lane += W) {
        const vf total = load(sum + lane);
        store(share + lane, choose(total == 0.0f, same(0.0f), 1.0f / total));
        store(lse + lane, (load(peak + lane) + log2(total)) * ln_2);
    }
    write_lanes(out, task, lanes, call.dv, share, room, call.out_type, call.out, call.out_batch, call.out_head, call.out_row);
    if (call.lse == nullptr) return;
    for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t head = task.head + lane / task.queries, query = task.query + lane % task.queries;
        call.lse[(task.b * call.Hq + head) * call.Lq + query] = lse[lane];
    }
}

template <class Products>
inline void all_chunks(const Plan& plan, const Task& task, Block& block, Products products, const Scaling& scaling,
                       Kept& kept) {
    products.begin(scaling);
    const Ranges ranges = visible_ranges(plan, task);
    for (int i = 0; i < ranges.count; ++i)
        for (int64_t low = ranges.part[i].low; low < ranges.part[i].high; low += chunk_keys) {
            const int64_t left = ranges.part[i].high - low;
            chunk(plan, task, block, products, scaling, low, left < chunk_keys ? left : chunk_keys, kept);
        }
    products.end();
}

void forward_block(const Plan& plan, const Task& task, char* memory, const Pieces& pieces) {
    const Call& call = *plan.call;
    Scratch scratch{memory};
    Block block(call, task, scratch);
    const Scaling scaling(call.scale);
    start(call, task, block, scaling);
    Kept kept;
    const bool asked = any_chosen(call, task);
    if (asked && task.piece < 0) {
        const int64_t keys = keys_in(visible_ranges(plan, task));
        kept.exponents = scratch.take<float>((keys + Kept::beyond) * block_lanes);
        kept.stretches = scratch.take<Kept::Stretch>(keys / chunk_keys + Ranges::capacity + 1);
    } else if (asked) {
        kept.exponents = pieces.exponents + task.piece * pieces.rows * block_lanes;
        kept.in_place = true;
        kept.first = task.keys.low;
        for (int64_t i = 0; i < pieces.rows * block_lanes; i += W) store(kept.exponents + i, same(-__builtin_inff()));
    }
#if defined(CLEARHEAD_PAIRS)
    if (runs_on_pairs(call, scaling))
        all_chunks(plan, task, block, PairProducts{call, task, block, PairBlock(call, scratch)}, scaling, kept);
    else
#endif
        all_chunks(plan, task, block, FloatProducts{call, task, block}, scaling, kept);
    if (task.piece >= 0) {
        float* piece = pieces.results + task.piece * piece_floats(call, block_lanes);
        __builtin_memcpy(piece, block.peak, block_lanes * 4);
        __builtin_memcpy(piece + block_lanes, block.sum, block_lanes * 4);
        __builtin_memcpy(piece + 2 * block_lanes, block.out, static_cast<size_t>(call.dv * block_lanes) * 4);
        return;
    }
    finish(call, task, block.lanes, block.out, block.peak, block.sum, block.room);
    if (!asked) return;
    Closing closing(plan, task, block.peak, block.sum, block.weights, block.keys, scratch);
    const float* exponents = kept.exponents;
    for (int64_t i = 0; i < kept.count; ++i) {
        closing.stretch(exponents, kept.stretches[i].low, kept.stretches[i].count);
        exponents += kept.stretches[i].count * block_lanes;
    }
    closing.answers.close();
}

int64_t forward_block_bytes(const Plan& plan, int64_t keys) {
    const Call& call = *plan.call;
    int64_t bytes = Block::bytes(call);
#if defined(CLEARHEAD_PAIRS)
    bytes += PairBlock::bytes(call);
#endif
    if (call.question_count > 0) bytes += Kept::bytes(keys) + Answers::bytes(call);
    return bytes;
}

// Pieces over disjoint keys combine exactly when each brings its maximum and sum (Dao et al. 2022, section 3.1).
void join_pieces(const Plan& plan, const Task& task, char* memory, const Pieces& pieces, int64_t first, int64_t count) {
    const Call& call = *plan.call;
    Scratch scratch{memory};
    Block block(call, task, scratch);
    const int64_t size = piece_floats(call, block_lanes);
    for (int64_t lane = 0; lane < block_lanes; lane += W) {
        vf peak = same(lowest), total{};
        for (int64_t i = first; i < first + count; ++i) peak = larger(load(pieces.results + i * size + lane), peak);
        for (int64_t t = 0; t < call.dv; ++t) store(block.out + t * block_lanes + lane, vf{});
        for (int64_t i = first; i < first + count; ++i) {
            const float* piece = pieces.results + i * size;
            const vf fade = exp2(load(piece + lane) - peak);
            total += load(piece + block_lanes + lane) * fade;
            for (int64_t t = 0; t < call.dv; ++t) {
                float* to = block.out + t * block_lanes + lane;
                store(to, load(to) + load(piece + (2 + t) * block_lanes + lane) * fade);
            }
        }
        store(block.peak + lane, peak);
        store(block.sum + lane, total);
    }
    finish(call, task, block.lanes, block.out, block.peak, block.sum, block.room);
    if (!any_chosen(call, task)) return;
    Closing closing(plan, task, block.peak, block.sum, block.weights, block.keys, scratch);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t low = i * (task.keys.high - task.keys.low);
        const int64_t left = call.Lk - low;
        closing.stretch(pieces.exponents + (first + i) * pieces.rows * block_lanes, low,
                        left < task.keys.high - task.keys.low ? left : task.keys.high - task.keys.low);
    }
    closing.answers.close();
}

}  // namespace
}  // namespace clearhead
