// The forward of one block: its queries against all the keys that they may see (Dao et al. 2022, algorithm 1).
#pragma once

#include "microkernel.h"
#include "pairs.h"
#include "riders.h"
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

// The same for a stretch of a run's keys, whose part goes to `part` as well. The sums of one product go on from
// stretch to stretch, so that `out` gets the same bits as from `mix_run`: `running` holds them at the borders.
template <bool first, bool last>
inline void mix_stretch(const Block& block, const Panel& values, int64_t dv, const Stretch& stretch, const float* fade,
                        float* part, float* running) {
    float* out = block.out;
    product<Floats, Walk::across_rows>(
        values.data + stretch.from * values.stride, values.stride, dv, block.weights + stretch.from * block_lanes, block_lanes,
        stretch.to - stretch.from, stretch.v0, stretch.v1,
        [&](int64_t row, int v, const auto& sums) __attribute__((always_inline)) {
            for_each(sums, [&](int r, int i, vf sum) __attribute__((always_inline)) {
                const int64_t at = (row + r) * block_lanes + (v + i) * W;
                store(part + at, load(part + at) + (first ? sum : sum - load(running + at)));
                if (!last) store(running + at, sum);
                if (last) store(out + at, fade == nullptr ? load(out + at) + sum : load(out + at) * load(fade + (v + i) * W) + sum);
            });
        },
        [&](int64_t row, int v, auto& sums) __attribute__((always_inline)) {
            for_each(sums, [&](int r, int i, vf) __attribute__((always_inline)) {
                sums[r][i] = first ? vf{} : load(running + (row + r) * block_lanes + (v + i) * W);
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

    static constexpr bool brings_parts = true;

    // The same, and the parts of the output from each stretch of keys.
    void mix_parts(const Run* runs, int found, const float* fade, const Riders& riders, const Brought& parts) {
        if (found > 1) fade_out(block, call.dv, fade);
        const float* factors = found > 1 ? nullptr : fade;
        const Stretch* stretch = parts.stretches->part;
        for (int i = 0; i < found; ++i) {
            if (runs[i].v0 == runs[i].v1) continue;
            const int64_t end = runs[i].low + runs[i].count;
            for (bool first = true, last = false; !last; first = false, ++stretch) {
                last = stretch->to == end;
                for (int v = runs[i].v0; v < runs[i].v1; ++v) parts.rows->touch(stretch->number, v, riders.time(), fade);
                float* part = parts.rows->row(stretch->number);
                if (first && last) mix_stretch<true, true>(block, values, call.dv, *stretch, factors, part, parts.running);
                else if (first) mix_stretch<true, false>(block, values, call.dv, *stretch, factors, part, parts.running);
                else if (last) mix_stretch<false, true>(block, values, call.dv, *stretch, factors, part, parts.running);
                else mix_stretch<false, false>(block, values, call.dv, *stretch, factors, part, parts.running);
            }
        }
    }

    // The chunk's values in float32.
    Panel floats(int64_t, int64_t) const { return values; }

    int64_t kv() const { return task.head / (call.Hq / call.Hkv); }
};

// How a block is watched while it walks over its keys; three ways with the same face.

// No questions: nothing.
struct Unwatched {
    static constexpr bool rides = false;
    void begin(Block&, int64_t, int64_t) {}
    void end(const Block&, const Run*, int) {}
};

// Questions about a piece of a block whose keys are split: its scores are kept for the join.
struct WatchedPiece {
    static constexpr bool rides = false;
    float* scores;  // [key of the piece][block_lanes], -inf where nothing was computed
    int64_t first;

    void begin(Block& block, int64_t low, int64_t) { block.scores = scores + (low - first) * block_lanes; }

    // Vectors that were passed over see nothing, and what a tile wrote beyond the last key is no key.
    void end(const Block& block, const Run* runs, int found) {
        const vf nothing = same(-__builtin_inff());
        const int64_t count = runs[found - 1].low + runs[found - 1].count;
        for (int n = 0; n < found; ++n)
            for (int64_t j = runs[n].low; j < runs[n].low + runs[n].count; ++j)
                for (int v = 0; v < block.vectors; ++v)
                    if (v < runs[n].v0 || v >= runs[n].v1) store(block.scores + j * block_lanes + v * W, nothing);
        for (int64_t j = count; j < (count + 15) / 16 * 16; ++j)
            for (int v = 0; v < block.vectors; ++v) store(block.scores + j * block_lanes + v * W, nothing);
    }
};

// Questions about a whole block: most ride along; for the others the weights are kept until the end.
class Watched {
  public:
    static constexpr bool rides = true;

    Watched(const Plan& plan, const Task& task, Scratch& scratch)
        : answers_(plan, task, scratch),
          riders_(plan, task, answers_, chunks(keys_in(visible_ranges(plan, task))), scratch) {
        if (!answers_.any_single()) return;
        const int64_t keys = keys_in(visible_ranges(plan, task));
        weights_ = scratch.take<float>((keys + beyond) * block_lanes);
        kept_ = scratch.take<Stretch>(chunks(keys));
    }

    static int64_t bytes(const Call& call, int64_t keys) {
        bool single = false;
        for (int64_t i = 0; i < call.question_count; ++i) single |= Answers::single(call.questions[i].kind);
        const int64_t kept = (keys + beyond) * block_lanes * 4 + chunks(keys) * static_cast<int64_t>(sizeof(Stretch)) + 2 * 64;
        return Answers::bytes(call) + Riders::bytes(call, chunks(keys)) + (single ? kept : 0);
    }

    void begin(Block& block, int64_t low, int64_t count) {
        if (weights_ == nullptr) return;
        block.scores = block.weights = weights_ + rows_ * block_lanes;
        kept_[chunk_++] = {low, count};
        rows_ += count;
    }

    // Vectors that were passed over see nothing.
    void end(const Block& block, const Run* runs, int found) {
        if (weights_ == nullptr) return;
        for (int n = 0; n < found; ++n) {
            if (runs[n].v0 == 0 && runs[n].v1 == block.vectors) continue;
            for (int64_t j = runs[n].low; j < runs[n].low + runs[n].count; ++j)
                for (int v = 0; v < block.vectors; ++v)
                    if (v < runs[n].v0 || v >= runs[n].v1) store(block.weights + j * block_lanes + v * W, vf{});
        }
    }

    Riders& riders() { return riders_; }

    // Answers all questions. factor: that of the scores. sink: [block_lanes], exponents of the learned sinks or -inf.
    void close(const Block& block, float factor, const float* sink) {
        answers_.settle(block.peak, block.sum);
        riders_.close(block.peak, block.sum, factor, sink, block.vectors);
        const float* from = weights_;
        for (int64_t n = 0; n < chunk_; ++n) {
            alignas(64) float shares[block_lanes];
            answers_.shares_since(riders_.time().peaks + n * block_lanes, shares);
            answers_.take_single({kept_[n].low, kept_[n].count, nullptr, from, block_lanes, 1.0f, shares});
            from += kept_[n].count * block_lanes;
        }
        answers_.close();
    }

  private:
    struct Stretch {
        int64_t low, count;
    };
    static constexpr int64_t beyond = 16;  // what a tile may write beyond the last key
    static int64_t chunks(int64_t keys) { return keys / chunk_keys + Ranges::capacity + 1; }

    Answers answers_;
    Riders riders_;
    float* weights_ = nullptr;  // [key][block_lanes], chunk after chunk, each relative to the peak after it
    Stretch* kept_ = nullptr;
    int64_t chunk_ = 0, rows_ = 0;
};

// Calls each(Number<V>, v) for all vectors, two at a time.
template <class Each>
CLEARHEAD_INLINE void pairwise(int vectors, const Each& each) {
    int v = 0;
    for (; v + 2 <= vectors; v += 2) each(Number<2>{}, v);
    if (v < vectors) each(Number<1>{}, v);
}

// The mixing product, and the parts of the output that are asked about.
template <class Products>
inline void mix_watched(Products& products, Riders& riders, const Block& block, int64_t low, int64_t count, const Run* runs,
                        int found, const float* fade) {
    if constexpr (Products::brings_parts) {
        const Brought parts = riders.brought_along(found);
        if (parts.rows != nullptr) return products.mix_parts(runs, found, fade, riders, parts);
    }
    products.mix(low, count, runs, found, fade);
    if (riders.parts_asked()) riders.mixed(block, products.floats(low, count), fade);
}

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
    if (words != nullptr)
        pairwise(block.vectors, [&](auto width, int v) __attribute__((always_inline)) {
            masked_peaks<decltype(width)::value>(block.scores, runs, found, words, v, most);
        });
    if constexpr (Watch::rides) {
        Riders& riders = watch.riders();
        riders.begin(block, runs, found, low, count, words == nullptr, most);
        pairwise(block.vectors, [&](auto width, int v) __attribute__((always_inline)) {
            constexpr int V = decltype(width)::value;
            if (riders.spread_asked()) {
                admit<V>(block, runs, found, factor, v, most, fade, products.ahead(), riders.totals(), riders.spread());
            } else {
                admit<V>(block, runs, found, factor, v, most, fade, products.ahead(), riders.totals());
            }
            riders.template gather<V>(block, runs, found, v, fade);
        });
        mix_watched(products, riders, block, low, count, runs, found, fade);
    } else {
        pairwise(block.vectors, [&](auto width, int v) __attribute__((always_inline)) {
            admit<decltype(width)::value>(block, runs, found, factor, v, most, fade, products.ahead());
        });
        products.mix(low, count, runs, found, fade);
    }
    watch.end(block, runs, found);
}

// The exponents of the learned sinks that a task starts with, or -inf; of split keys, the first piece has them.
inline void sinks_of(const Call& call, const Task& task, float* sink) {
    for (int64_t lane = 0; lane < block_lanes; ++lane) {
        sink[lane] = -__builtin_inff();
        if (call.sink_logits == nullptr || task.keys.low != 0 || lane >= task.heads * task.queries) continue;
        const float exponent = call.sink_logits[task.head + lane / task.queries] * log2_e;
        if (exponent >= lowest) sink[lane] = exponent;
    }
}

inline void start(const Call& call, const Task& task, Block& block, const Scaling& scaling) {
    pack_lanes(call.q, task, block.lanes, call.d, scaling.query, block.room, block.queries);
    for (int64_t i = 0; i < call.dv * block_lanes; i += W) store(block.out + i, vf{});
    // A learned sink is a key without a value that is there from the start.
    alignas(64) float sink[block_lanes];
    sinks_of(call, task, sink);
    for (int64_t lane = 0; lane < block_lanes; ++lane) {
        const bool there = sink[lane] >= lowest;
        block.peak[lane] = there ? sink[lane] : lowest;
        block.sum[lane] = there ? 1.0f : 0.0f;
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
        alignas(64) float sink[block_lanes];
        sinks_of(call, task, sink);
        watch.close(block, has_extras(call) ? 1.0f : scaling.factor, sink);
        return;
    }
    if (asked) {
        WatchedPiece watch{pieces.scores + task.piece * pieces.rows * block_lanes, task.keys.low};
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
    if (call.question_count > 0) bytes += Watched::bytes(call, keys);
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
    for (int64_t low = 0; low < call.Lk;) {
        const int64_t piece = low / each, within = low % each;
        int64_t keys = chunk_keys;
        if (keys > each - within) keys = each - within;
        if (keys > call.Lk - low) keys = call.Lk - low;
        const float* scores = pieces.scores + ((first + piece) * pieces.rows + within) * block_lanes;
        answers.weigh(scores, keys, block_lanes, block.weights, factor);
        Panel values{nullptr, 0};
        if (answers.needs_values())
            values = stage(call.v, task.b, task.head / (call.Hq / call.Hkv), low, keys, call.dv, block.keys);
        answers.take({low, keys, scores, block.weights, block_lanes, factor}, values);
        low += keys;
    }
    answers.close();
}

}  // namespace
}  // namespace clearhead
