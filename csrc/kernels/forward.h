// The forward of one block: its queries against all the keys that they may see (Dao et al. 2022, algorithm 1).
#pragma once

#include "microkernel.h"
#include "pairs.h"
#include "ride.h"
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

// How a block is watched while it walks over its keys; three ways with the same face.

// No questions: nothing.
struct Unwatched {
    void begin(Block&, int64_t, int64_t) {}
    void scored(const Block&, const Run*, int, float, const float*) {}
    template <int V, class Softmax>
    CLEARHEAD_INLINE void with_ride(const Softmax& softmax) {
        softmax(NoRide<V>{});
    }
    void end(const Block&, const Run*, int, float) {}
};

// Questions about a whole block: some ride along; for the others the weights are kept until the end.
class Watched {
  public:
    Watched(const Plan& plan, const Task& task, Scratch& scratch) : plan_(plan), task_(task), riders_(plan, task, scratch) {
        const Call& call = *plan.call;
        for (int64_t i = 0; i < call.question_count; ++i)
            keeps_ |= !Riders::rides(call, i) && chosen_lanes(call.questions[i], task) != 0;
        if (!keeps_) return;
        const int64_t keys = keys_in(visible_ranges(plan, task));
        weights_ = scratch.take<float>(keys * block_lanes);
        stretches_ = scratch.take<Stretch>(keys / chunk_keys + Ranges::capacity + 1);
    }

    static int64_t bytes(const Call& call, int64_t keys) {
        const int64_t stretches = keys / chunk_keys + Ranges::capacity + 1;
        return Riders::bytes(call) + keys * block_lanes * 4 + stretches * static_cast<int64_t>(sizeof(Stretch)) + 2 * 64;
    }

    void begin(Block& block, int64_t low, int64_t count) {
        low_ = low;
        if (!keeps_) return;
        stretches_[found_].low = low;
        stretches_[found_].count = count;
        block.weights = weights_ + rows_ * block_lanes;
        rows_ += count;
    }

    void scored(const Block& block, const Run* runs, int found, float factor, const float* most) {
        riders_.before(block, runs, found, factor, low_, most);
    }

    template <int V, class Softmax>
    CLEARHEAD_INLINE void with_ride(const Softmax& softmax) {
        if (riders_.entropy && riders_.distance) return softmax(Ride<V, true, true>(riders_, low_));
        if (riders_.entropy) return softmax(Ride<V, true, false>(riders_, low_));
        if (riders_.distance) return softmax(Ride<V, false, true>(riders_, low_));
        softmax(Ride<V, false, false>(riders_, low_));
    }

    void end(const Block& block, const Run* runs, int found, float) {
        if (!keeps_) return;
        for (int n = 0; n < found; ++n) {  // vectors that were passed over see nothing
            if (runs[n].v0 == 0 && runs[n].v1 == block.vectors) continue;
            for (int64_t j = runs[n].low; j < runs[n].low + runs[n].count; ++j)
                for (int v = 0; v < block.vectors; ++v)
                    if (v < runs[n].v0 || v >= runs[n].v1) store(block.weights + j * block_lanes + v * W, vf{});
        }
        __builtin_memcpy(stretches_[found_++].peak, block.peak, sizeof(Stretch::peak));
    }

    // Answers all questions. weights: room for a chunk; values: room to stage a chunk of values.
    void close(const float* peak, const float* sum, float factor, float* weights, float* values, Scratch& scratch) {
        riders_.close(peak, sum, factor);
        if (!keeps_) return;
        const Call& call = *plan_.call;
        Answers answers(plan_, task_, peak, sum, scratch, Riders::rides);
        const float* from = weights_;
        for (int64_t n = 0; n < found_; ++n) {
            const Stretch& stretch = stretches_[n];
            answers.reweigh(stretch.peak, from, stretch.count, block_lanes, weights);
            Panel rows{nullptr, 0};
            if (answers.needs_values())
                rows = stage(call.v, task_.b, task_.head / (call.Hq / call.Hkv), stretch.low, stretch.count, call.dv, values);
            answers.take({stretch.low, stretch.count, nullptr, weights, block_lanes}, rows);
            from += stretch.count * block_lanes;
        }
        answers.close();
    }

  private:
    struct Stretch {
        alignas(64) float peak[block_lanes];  // what its weights are relative to
        int64_t low, count;
    };

    const Plan& plan_;
    const Task& task_;
    Riders riders_;
    bool keeps_ = false;
    float* weights_ = nullptr;  // [key][block_lanes], stretch after stretch
    Stretch* stretches_ = nullptr;
    int64_t found_ = 0, rows_ = 0, low_ = 0;
};

// Questions about a piece of a block whose keys are split: its scores are kept for the join.
struct WatchedPiece {
    float* scores;  // [key of the piece][block_lanes], -inf where nothing was computed
    int64_t first;

    // What a tile may write beyond the last key.
    static constexpr int64_t beyond = 16;

    void begin(Block& block, int64_t low, int64_t) { block.scores = scores + (low - first) * block_lanes; }
    void scored(const Block&, const Run*, int, float, const float*) {}
    template <int V, class Softmax>
    CLEARHEAD_INLINE void with_ride(const Softmax& softmax) {
        softmax(NoRide<V>{});
    }

    // Vectors that were passed over see nothing, nor is anything beyond the last key.
    void end(const Block& block, const Run* runs, int found, float) {
        const vf nothing = same(-__builtin_inff());
        int64_t last = 0;
        for (int n = 0; n < found; ++n) {
            last = runs[n].low + runs[n].count;
            for (int64_t j = runs[n].low; j < last; ++j)
                for (int v = 0; v < block.vectors; ++v)
                    if (v < runs[n].v0 || v >= runs[n].v1) store(block.scores + j * block_lanes + v * W, nothing);
        }
        for (int64_t i = last * block_lanes; i < (last + beyond) * block_lanes; i += W) store(block.scores + i, nothing);
    }
};

// Calls each(Number<V>, v) for all vectors, two at a time.
struct Pairwise {
    int vectors;
    template <class Each>
    CLEARHEAD_INLINE void operator()(const Each& each) const {
        int v = 0;
        for (; v + 2 <= vectors; v += 2) each(Number<2>{}, v);
        if (v < vectors) each(Number<1>{}, v);
    }
};

// One chunk of keys: scores, softmax, values.
template <class Products, class Watch>
inline void chunk(const Plan& plan, const Task& task, Block& block, Products& products, const Scaling& scaling,
                  int64_t low, int64_t count, Watch& watch) {
    const Call& call = *plan.call;
    const uint64_t* words = visible_words(plan, task, low, count, block.words) ? block.words : nullptr;
    Run runs[chunk_keys / run_keys + 1];
    const int found = runs_of(words, count, block.vectors, runs);
    if (found == 1 && runs[0].v0 == runs[0].v1) return;  // nobody sees anything here
    watch.begin(block, low, count);
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
    const Pairwise vectors{block.vectors};
    if (words != nullptr)
        vectors([&](auto width, int v) __attribute__((always_inline)) {
            masked_peaks<decltype(width)::value>(block.scores, runs, found, words, v, most);
        });
    watch.scored(block, runs, found, factor, most);
    vectors([&](auto width, int v) __attribute__((always_inline)) {
        constexpr int V = decltype(width)::value;
        watch.template with_ride<V>([&](auto ride) __attribute__((always_inline)) {
            admit<V>(block, runs, found, factor, v, most, fade, products.ahead(), ride);
        });
    });
    products.mix(low, count, runs, found, fade);
    watch.end(block, runs, found, factor);
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

template <class Products, class Watch>
inline void all_chunks(const Plan& plan, const Task& task, Block& block, Products products, const Scaling& scaling,
                       Watch& watch) {
    products.begin(scaling);
    const Ranges ranges = visible_ranges(plan, task);
    for (int i = 0; i < ranges.count; ++i)
        for (int64_t low = ranges.part[i].low; low < ranges.part[i].high; low += chunk_keys) {
            const int64_t left = ranges.part[i].high - low;
            chunk(plan, task, block, products, scaling, low, left < chunk_keys ? left : chunk_keys, watch);
        }
    products.end();
}

// All keys of a block, by the products that suit the call's types.
template <class Watch>
inline void walk(const Plan& plan, const Task& task, Block& block, const Scaling& scaling, Scratch& scratch, Watch& watch) {
    const Call& call = *plan.call;
#if defined(CLEARHEAD_PAIRS)
    if (runs_on_pairs(call, scaling))
        return all_chunks(plan, task, block, PairProducts{call, task, block, PairBlock(call, scratch)}, scaling, watch);
#else
    (void)scratch;
#endif
    all_chunks(plan, task, block, FloatProducts{call, task, block}, scaling, watch);
}

void forward_block(const Plan& plan, const Task& task, char* memory, const Pieces& pieces) {
    const Call& call = *plan.call;
    Scratch scratch{memory};
    Block block(call, task, scratch);
    const Scaling scaling(call.scale);
    start(call, task, block, scaling);
    const bool asked = any_chosen(call, task), whole = task.piece < 0;
    if (asked && whole) {
        Watched watch(plan, task, scratch);
        walk(plan, task, block, scaling, scratch, watch);
        finish(call, task, block.lanes, block.out, block.peak, block.sum, block.room);
        watch.close(block.peak, block.sum, has_extras(call) ? 1.0f : scaling.factor, block.scores, block.keys, scratch);
        return;
    }
    if (asked) {
        WatchedPiece watch{pieces.exponents + task.piece * pieces.rows * block_lanes, task.keys.low};
        for (int64_t i = 0; i < pieces.rows * block_lanes; i += W) store(watch.scores + i, same(-__builtin_inff()));
        walk(plan, task, block, scaling, scratch, watch);
    } else {
        Unwatched watch;
        walk(plan, task, block, scaling, scratch, watch);
    }
    if (whole) return finish(call, task, block.lanes, block.out, block.peak, block.sum, block.room);
    float* piece = pieces.results + task.piece * piece_floats(call, block_lanes);
    __builtin_memcpy(piece, block.peak, block_lanes * 4);
    __builtin_memcpy(piece + block_lanes, block.sum, block_lanes * 4);
    __builtin_memcpy(piece + 2 * block_lanes, block.out, static_cast<size_t>(call.dv * block_lanes) * 4);
}

int64_t forward_block_bytes(const Plan& plan, int64_t keys) {
    const Call& call = *plan.call;
    int64_t bytes = Block::bytes(call);
#if defined(CLEARHEAD_PAIRS)
    bytes += PairBlock::bytes(call);
#endif
    if (call.question_count > 0) bytes += Watched::bytes(call, keys) + Answers::bytes(call);
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
    Answers answers(plan, task, block.peak, block.sum, scratch);
    const float factor = has_extras(call) ? 1.0f : Scaling(call.scale).factor;
    const int64_t each = task.keys.high - task.keys.low;
    for (int64_t low = 0; low < call.Lk; low += chunk_keys) {
        for (int64_t from = low; from < low + chunk_keys && from < call.Lk;) {  // a chunk may reach into the next piece
            const int64_t piece = from / each, within = from % each;
            int64_t keys = low + chunk_keys - from;
            if (keys > each - within) keys = each - within;
            if (keys > call.Lk - from) keys = call.Lk - from;
            const float* exponents = pieces.exponents + ((first + piece) * pieces.rows + within) * block_lanes;
            answers.weigh(exponents, keys, block_lanes, block.weights, factor);
            Panel rows{nullptr, 0};
            if (answers.needs_values())
                rows = stage(call.v, task.b, task.head / (call.Hq / call.Hkv), from, keys, call.dv, block.keys);
            answers.take({from, keys, exponents, block.weights, block_lanes, factor}, rows);
            from += keys;
        }
    }
    answers.close();
}

}  // namespace
}  // namespace clearhead
