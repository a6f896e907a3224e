// Questions that ride along with the softmax: what they need is summed up beside it, relative to the same peak,
// in the loop that makes the weights. The output is computed by the same operations with and without them.
//
//   entropy        with D = Σ 2^x · x over keys, x = exponent - peak: H = ln 2 · (share · log2 sum - D / sum)
//   mean distance  Σ 2^x · |distance| / sum
//   segment mass   differences of the running sum at the borders of segments, each kept with the peak it belongs to
//   largest weight the largest exponent
//   top keys       the largest scores of each lane, sorted
#pragma once

#include "answer.h"
#include "softmax.h"

namespace clearhead {
namespace {

// The questions of one task that ride along, and their states ([block_lanes] floats each, or several of those).
class Riders {
  public:
    bool entropy = false, distance = false;

    Riders(const Plan& plan, const Task& task, Scratch& scratch) : call_(*plan.call), task_(task) {
        for (int64_t i = 0; i < call_.question_count; ++i) {
            const Question& question = call_.questions[i];
            if (chosen_lanes(question, task) == 0 || !rides(call_, i)) continue;
            if (question.kind == Question::Kind::entropy) entropy = true;
            if (question.kind == Question::Kind::mean_distance) distance = true;
            if (question.kind == Question::Kind::max_weight) largest_ = true;
            if (question.kind == Question::Kind::segment_mass) segments_ = &question;
            if (question.kind == Question::Kind::top_keys) top_ = &question;
        }
        const Mask& m = call_.mask;
        first_ = m.offset[task.b * m.offset_batch] + task.query - m.key_offset;
        ids_ = segments_ == nullptr ? nullptr : segments_->ids + task.b * segments_->ids_batch;
        const int64_t S = segments_ == nullptr ? 0 : segments_->segments, k = top_ == nullptr ? 0 : top_->count;
        keys_ = filled(scratch, 1, 0.0f);
        deviation_ = filled(scratch, 1, 0.0f);
        distance_ = filled(scratch, 1, 0.0f);
        high_ = filled(scratch, 1, -__builtin_inff());
        mass_ = filled(scratch, S, 0.0f);
        reference_ = filled(scratch, S, lowest);
        best_ = filled(scratch, k, -__builtin_inff());
        index_ = scratch.take<int32_t>(k * block_lanes);
        query_ = scratch.take<float>(block_lanes);
        for (int64_t i = 0; i < k * block_lanes; ++i) index_[i] = -1;
        for (int64_t lane = 0; lane < block_lanes; ++lane) query_[lane] = static_cast<float>(lane % task.queries);
    }

    static int64_t bytes(const Call& call) {
        int64_t floats = 6 * block_lanes;
        for (int64_t i = 0; i < call.question_count; ++i)
            floats += 2 * (call.questions[i].segments + call.questions[i].count) * block_lanes;
        return floats * 4 + 10 * 64;
    }

    // Whether a question rides: of segments and of top keys the first one does.
    static bool rides(const Call& call, int64_t number) {
        const Question::Kind kind = call.questions[number].kind;
        if (kind == Question::Kind::entropy || kind == Question::Kind::max_weight || kind == Question::Kind::mean_distance)
            return true;
        if (kind != Question::Kind::segment_mass && kind != Question::Kind::top_keys) return false;
        for (int64_t i = 0; i < number; ++i)
            if (call.questions[i].kind == kind) return false;
        return true;
    }

    // The first key after chunk key j at which another segment begins, at most `end`.
    CLEARHEAD_INLINE int64_t border(int64_t low, int64_t j, int64_t end) const {
        if (ids_ == nullptr) return end;
        const int32_t* ids = ids_ + low;
        int64_t to = j + 1;
        while (to < end && ids[to] == ids[j]) ++to;
        return to;
    }

    // Before the scores of a chunk become weights. most: the largest score of each lane.
    void before(const Block& block, const Run* runs, int found, float factor, int64_t low, const float* most) {
        for (int v = 0; v < block.vectors && largest_; ++v)
            store(high_ + v * W, larger(load(most + v * W) * factor, load(high_ + v * W)));
        if (top_ == nullptr) return;
        const int64_t k = top_->count;
        float* floor = best_ + (k - 1) * block_lanes;
        for (int v = 0; v < block.vectors; ++v) {
            if (!some(load(most + v * W) > load(floor + v * W))) continue;
            for (int n = 0; n < found; ++n) {
                if (v < runs[n].v0 || v >= runs[n].v1) continue;
                for (int64_t j = runs[n].low; j < runs[n].low + runs[n].count; ++j) {
                    const vf score = load(block.scores + j * block_lanes + v * W);
                    if (some(score > load(floor + v * W))) sink_in(score, static_cast<int32_t>(low + j), v, k);
                }
            }
        }
    }

    // Adds what V vectors from v on gathered over a chunk; before: the peaks until then.
    template <int V>
    CLEARHEAD_INLINE void add(int v, const vf (&before)[V], const vf (&peak)[V], const float* fade, const vf (&total)[V],
                              const vf (&deviation)[V], const vf (&distance)[V]) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) {
            const int64_t at = (v + i) * W;
            const vf factor = load(fade + at), keys = load(keys_ + at);
            const vf moved = factor * (load(deviation_ + at) + keys * (before[i] - peak[i]));
            store(deviation_ + at, choose(factor == 0.0f, same(0.0f), moved) + deviation[i]);
            store(distance_ + at, load(distance_ + at) * factor + distance[i]);
            store(keys_ + at, keys * factor + total[i]);
        }
    }

    // Adds a stretch of one segment to its mass.
    CLEARHEAD_INLINE void add_mass(int64_t key, int v, vf peak, vf part) {
        const int64_t at = ids_[key] * block_lanes + v * W;
        store(mass_ + at, load(mass_ + at) * exp2(load(reference_ + at) - peak) + part);
        store(reference_ + at, peak);
    }

    bool has_segments() const { return ids_ != nullptr; }
    const float* queries() const { return query_; }
    int64_t first() const { return first_; }

    // Writes the answers, given the final peaks and sums.
    void close(const float* peak, const float* sum, float factor) {
        for (int64_t i = 0; i < call_.question_count; ++i) {
            const Question& question = call_.questions[i];
            const uint64_t chosen = chosen_lanes(question, task_);
            if (chosen == 0 || !rides(call_, i)) continue;
            alignas(64) float values[block_lanes];
            switch (question.kind) {
                case Question::Kind::entropy:
                    for (int64_t at = 0; at < block_lanes; at += W) {
                        const vf total = load(sum + at), share = load(keys_ + at) / total;
                        store(values + at, (share * log2(total) - load(deviation_ + at) / total) * ln_2);
                    }
                    write(question, chosen, sum, values);
                    break;
                case Question::Kind::max_weight:
                    for (int64_t at = 0; at < block_lanes; at += W)
                        store(values + at, exp2(load(high_ + at) - load(peak + at)) / load(sum + at));
                    write(question, chosen, sum, values);
                    break;
                case Question::Kind::mean_distance:
                    for (int64_t at = 0; at < block_lanes; at += W) store(values + at, load(distance_ + at) / load(sum + at));
                    write(question, chosen, sum, values);
                    break;
                case Question::Kind::segment_mass: write_masses(question, chosen, peak, sum); break;
                case Question::Kind::top_keys: write_top(question, chosen, peak, sum, factor); break;
                default: break;
            }
        }
    }

  private:
    static bool some(vi where) { return any(where); }

    static float* filled(Scratch& scratch, int64_t rows, float x) {
        float* to = scratch.take<float>(rows * block_lanes);
        for (int64_t i = 0; i < rows * block_lanes; i += W) store(to + i, same(x));
        return to;
    }

    // A score takes its place among the best of its lane; what it beats moves one place down.
    void sink_in(vf score, int32_t key, int v, int64_t k) {
        vi number = same_int(key);
        for (int64_t place = 0; place < k; ++place) {
            float* held = best_ + place * block_lanes + v * W;
            vi_loose* mark = reinterpret_cast<vi_loose*>(index_ + place * block_lanes + v * W);
            const vf old = load(held);
            const vi was = *mark, beats = score > old;
            store(held, choose(beats, score, old));
            *mark = beats ? number : was;
            score = choose(beats, old, score);
            number = beats ? was : number;
        }
    }

    template <class Each>
    void for_chosen(const Question& question, uint64_t chosen, const Each& each) const {
        for (int64_t lane = 0; lane < task_.queries * task_.heads; ++lane) {
            if (!(chosen >> lane & 1)) continue;
            const int64_t head = task_.head + lane / task_.queries, query = task_.query + lane % task_.queries;
            each(lane, (task_.b * call_.Hq + head) * question.R + question.place[query]);
        }
    }

    // 0 where nothing was seen and where rounding went below, NaN where the row's sum is.
    static float settled(float x, float sum) {
        if (!(sum == sum)) return sum;
        return x > 0.0f && sum > 0.0f ? x : 0.0f;
    }

    void write(const Question& question, uint64_t chosen, const float* sum, const float* values) const {
        for_chosen(question, chosen, [&](int64_t lane, int64_t result) { question.out[result] = settled(values[lane], sum[lane]); });
    }

    void write_masses(const Question& question, uint64_t chosen, const float* peak, const float* sum) const {
        const int64_t S = question.segments;
        for (int64_t s = 0; s < S; ++s)
            for (int64_t at = 0; at < block_lanes; at += W) {
                float* mass = mass_ + s * block_lanes + at;
                store(mass, load(mass) * exp2(load(reference_ + s * block_lanes + at) - load(peak + at)) / load(sum + at));
            }
        for_chosen(question, chosen, [&](int64_t lane, int64_t result) {
            for (int64_t s = 0; s < S; ++s) question.out[result * S + s] = settled(mass_[s * block_lanes + lane], sum[lane]);
        });
    }

    void write_top(const Question& question, uint64_t chosen, const float* peak, const float* sum, float factor) const {
        const int64_t k = question.count;
        for (int64_t place = 0; place < k; ++place)
            for (int64_t at = 0; at < block_lanes; at += W) {
                float* score = best_ + place * block_lanes + at;
                store(score, exp2(load(score) * factor - load(peak + at)) / load(sum + at));
            }
        for_chosen(question, chosen, [&](int64_t lane, int64_t result) {
            for (int64_t place = 0; place < k; ++place) {
                const float weight = settled(best_[place * block_lanes + lane], sum[lane]);
                question.out[result * k + place] = weight;
                question.index[result * k + place] = weight > 0.0f ? index_[place * block_lanes + lane] : -1;
            }
        });
    }

    const Call& call_;
    const Task& task_;
    const Question *segments_ = nullptr, *top_ = nullptr;
    bool largest_ = false;
    int64_t first_ = 0;
    const int32_t* ids_ = nullptr;
    float *keys_ = nullptr, *deviation_ = nullptr, *distance_ = nullptr, *high_ = nullptr, *mass_ = nullptr,
          *reference_ = nullptr, *best_ = nullptr, *query_ = nullptr;
    int32_t* index_ = nullptr;
};

// What rides with V vectors of one chunk: the part of `Riders` that lives in registers.
template <int V, bool entropy, bool distance>
struct Ride {
    Riders& riders;
    int64_t low;
    vf deviation[V], distances[V], until[V];

    CLEARHEAD_INLINE Ride(Riders& of, int64_t first_key) : riders(of), low(first_key) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) deviation[i] = distances[i] = until[i] = vf{};
    }

    CLEARHEAD_INLINE int64_t border(int64_t j, int64_t end) const { return riders.border(low, j, end); }

    CLEARHEAD_INLINE void key(int64_t j, int v, int i, vf exponent, vf weight) {
        // A hidden key has exponent -inf and weight 0: their product must not be NaN.
        if constexpr (entropy) deviation[i] += weight * larger(exponent, same(-1e4f));
        if constexpr (distance) {
            const vf apart = load(riders.queries() + (v + i) * W) + static_cast<float>(riders.first() - low - j);
            distances[i] += weight * floats_of(bits_of(apart) & 0x7fffffff);
        }
    }

    // The keys up to here were of one segment.
    CLEARHEAD_INLINE void pause(int64_t j, int v, const vf (&peak)[V], const vf (&total)[V]) {
        if (!riders.has_segments()) return;
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) {
            riders.add_mass(low + j, v + i, peak[i], total[i] - until[i]);
            until[i] = total[i];
        }
    }

    CLEARHEAD_INLINE void end(int v, const vf (&before)[V], const vf (&peak)[V], const float* fade, const vf (&total)[V]) {
        riders.add<V>(v, before, peak, fade, total, deviation, distances);
    }
};

}  // namespace
}  // namespace clearhead
