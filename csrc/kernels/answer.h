// Questions answered from final weights, a run of keys at a time: weight = 2^(exponent - peak) / sum.
//
// Every kind is a few vector operations per key with queries in the lanes. Sums over a stretch of keys are made
// apart and added afterwards, so that long rows lose no digits. Sums over queries meet those of other threads:
// they are kept as integers (fixed point), which add up to the same bits in any order.
#pragma once

#include "best.h"
#include "block.h"
#include "fixed_point.h"
#include "microkernel.h"

namespace clearhead {
namespace {

// Keys in order, `stride` floats apart: exponents and weights of a task's lanes.
struct Weighed {
    int64_t low, count;
    const float *exponents, *weights;
    int64_t stride;
    float factor = 1.0f;  // what the exponents are still to be multiplied by
    const float* shares = nullptr;  // [block_lanes], the same for the weights; null: 1
};

// One question in one task.
struct Answer {
    const Question* question;
    int64_t number;      // among the call's questions
    uint64_t chosen;     // the lanes that it asks about
    float* state;        // what was gathered so far
};

CLEARHEAD_INLINE int64_t state_floats(const Question& question, const Call& call) {
    switch (question.kind) {
        case Question::Kind::entropy:
        case Question::Kind::max_weight:
        case Question::Kind::mean_distance: return block_lanes;
        case Question::Kind::segment_mass: return question.segments * block_lanes;
        case Question::Kind::segment_output:
        case Question::Kind::segment_norm: return question.segments * call.dv * block_lanes;
        case Question::Kind::top_keys: return 2 * question.count * block_lanes;
        case Question::Kind::pooled_mean:
        case Question::Kind::pooled_max: return question.map_columns * block_lanes;
        case Question::Kind::key_mass:
        case Question::Kind::weights: return 0;
    }
    return 0;
}

// The lanes of a task whose queries a question asks about.
inline uint64_t chosen_lanes(const Question& question, const Task& task) {
    uint64_t chosen = 0;
    for (int64_t i = 0; i < task.queries; ++i)
        chosen |= static_cast<uint64_t>(question.place[task.query + i] >= 0) << i;
    uint64_t all = 0;
    for (int64_t g = 0; g < task.heads; ++g) all |= chosen << (g * task.queries);
    return all;
}

inline bool any_chosen(const Call& call, const Task& task) {
    for (int64_t i = 0; i < call.question_count; ++i)
        if (chosen_lanes(call.questions[i], task) != 0) return true;
    return false;
}

// All questions that ask about a task's queries.
class Answers {
  public:
    static constexpr int most = 32;  // questions in one call

    // Before the weights are known.
    Answers(const Plan& plan, const Task& task, Scratch& scratch)
        : plan_(plan), call_(*plan.call), task_(task), lanes_(task.queries * task.heads),
          vectors_(static_cast<int>((lanes_ + W - 1) / W)) {
        for (int64_t lane = 0; lane < block_lanes; ++lane) query_[lane] = static_cast<float>(lane % task.queries);
        for (int64_t i = 0; i < call_.question_count; ++i) {
            const Question& question = call_.questions[i];
            const uint64_t chosen = chosen_lanes(question, task);
            if (chosen == 0) continue;
            const int64_t floats = state_floats(question, call_);
            Answer& answer = open_[count_++];
            answer = {&question, i, chosen, scratch.take<float>(floats)};
            for (int64_t k = 0; k < floats; k += W) store(answer.state + k, vf{});
            if (question.kind == Question::Kind::top_keys) {
                int32_t* index = reinterpret_cast<int32_t*>(answer.state + question.count * block_lanes);
                for (int64_t k = 0; k < question.count * block_lanes; ++k) index[k] = -1;
            }
        }
    }

    // peak, sum: [block_lanes], final.
    Answers(const Plan& plan, const Task& task, const float* peak, const float* sum, Scratch& scratch)
        : Answers(plan, task, scratch) {
        settle(peak, sum);
    }

    void settle(const float* peak, const float* sum) {
        sum_ = sum;
        for (int64_t lane = 0; lane < block_lanes; lane += W) {
            const vf total = load(sum + lane);
            store(share_ + lane, choose(total == 0.0f, same(0.0f), 1.0f / total));
            store(norm_ + lane, load(peak + lane) + choose(total == 0.0f, same(0.0f), log2(total)));
            store(peak_ + lane, load(peak + lane));
        }
    }

    int count() const { return count_; }
    const Answer& operator[](int i) const { return open_[i]; }
    const float* shares() const { return share_; }  // [block_lanes], 1 / sum, 0 where nothing was seen

    // Memory for the states of all questions, in bytes.
    static int64_t bytes(const Call& call) {
        int64_t floats = 0;
        for (int64_t i = 0; i < call.question_count; ++i) floats += state_floats(call.questions[i], call) + 16;
        return floats * 4;
    }

    // The weights of some keys from their exponents, `stride` floats from key to key in both.
    // factor: as in `Weighed`. Multiplied here, in one rounding with the subtraction, as the softmax does it.
    void weigh(const float* exponents, int64_t count, int64_t stride, float* weights, float factor = 1.0f) const {
        for (int v = 0; v < vectors_; ++v) {
            const vf peak = load(peak_ + v * W), share = load(share_ + v * W);
            for (int64_t j = 0; j < count; ++j)
                store(weights + j * stride + v * W, exp2(load(exponents + j * stride + v * W) * factor - peak) * share);
        }
    }

    // What brings weights that are relative to an earlier peak to their final values; both [block_lanes].
    void shares_since(const float* earlier, float* shares) const {
        for (int v = 0; v < vectors_; ++v)
            store(shares + v * W, exp2(load(earlier + v * W) - load(peak_ + v * W)) * load(share_ + v * W));
    }

    // Whether a question needs the final weights of single keys.
    static bool single(Question::Kind kind) {
        return kind == Question::Kind::key_mass || kind == Question::Kind::weights;
    }
    bool any_single() const {
        for (int i = 0; i < count_; ++i)
            if (single(open_[i].question->kind)) return true;
        return false;
    }

    // Takes some keys for those questions alone.
    void take_single(const Weighed& keys) const {
        for (int i = 0; i < count_; ++i) {
            if (open_[i].question->kind == Question::Kind::key_mass) received(open_[i], keys);
            if (open_[i].question->kind == Question::Kind::weights) copy(open_[i], keys);
        }
    }

    // Takes some keys; every key that is visible to anyone comes once. values: rows of v for the same keys.
    void take(const Weighed& keys, const Panel& values) {
        for (int i = 0; i < count_; ++i) {
            const Answer& answer = open_[i];
            switch (answer.question->kind) {
                case Question::Kind::entropy: entropy(answer, keys); break;
                case Question::Kind::max_weight: largest(answer.state, keys); break;
                case Question::Kind::mean_distance: distance(answer, keys); break;
                case Question::Kind::segment_mass: segments(answer, keys); break;
                case Question::Kind::segment_output:
                case Question::Kind::segment_norm: outputs(answer, keys, values); break;
                case Question::Kind::top_keys: top(answer, keys); break;
                case Question::Kind::key_mass: received(answer, keys); break;
                case Question::Kind::pooled_mean:
                case Question::Kind::pooled_max: pool(answer, keys); break;
                case Question::Kind::weights: copy(answer, keys); break;
            }
        }
    }

    bool needs_values() const {
        for (int i = 0; i < count_; ++i)
            if (open_[i].question->kind == Question::Kind::segment_output || open_[i].question->kind == Question::Kind::segment_norm)
                return true;
        return false;
    }

    // Writes what was gathered to the results.
    void close() const {
        for (int i = 0; i < count_; ++i) {
            const Answer& answer = open_[i];
            const Question& question = *answer.question;
            switch (question.kind) {
                case Question::Kind::entropy:
                case Question::Kind::max_weight:
                case Question::Kind::mean_distance: 
                    for_chosen(answer, [&](int64_t lane, int64_t result) { question.out[result] = settled(answer.state[lane], lane); });
                    break;
                case Question::Kind::segment_mass: write_rows(answer, question.segments); break;
                case Question::Kind::segment_output: write_rows(answer, question.segments * call_.dv); break;
                case Question::Kind::segment_norm:
                    take_lengths(answer);
                    write_rows(answer, question.segments);
                    break;
                case Question::Kind::top_keys: write_top(answer); break;
                case Question::Kind::pooled_mean:
                case Question::Kind::pooled_max: write_pooled(answer); break;
                case Question::Kind::key_mass:
                case Question::Kind::weights: break;  // written key by key
            }
        }
    }

  private:
    static constexpr int64_t together = 128;  // keys whose sums are added in one go

    void entropy(const Answer& answer, const Weighed& keys) const {
        for (int v = 0; v < vectors_; ++v) {
            const vf norm = load(norm_ + v * W);
            vf total{};
            for (int64_t j = 0; j < keys.count; ++j) {
                const vf weight = load(keys.weights + j * keys.stride + v * W);
                const vf term = weight * ((norm - load(keys.exponents + j * keys.stride + v * W) * keys.factor) * ln_2);
                total += choose(weight == 0.0f, same(0.0f), term);  // 0 log 0 = 0
            }
            store(answer.state + v * W, load(answer.state + v * W) + total);
        }
    }

    void largest(float* state, const Weighed& keys) const {
        for (int v = 0; v < vectors_; ++v) {
            vf high = load(state + v * W);
            for (int64_t j = 0; j < keys.count; ++j) high = larger(load(keys.weights + j * keys.stride + v * W), high);
            store(state + v * W, high);
        }
    }

    void distance(const Answer& answer, const Weighed& keys) const {
        const Mask& m = call_.mask;
        const int64_t first = m.offset[task_.b * m.offset_batch] + task_.query - m.key_offset - keys.low;
        for (int v = 0; v < vectors_; ++v) {
            const vf query = load(query_ + v * W);
            vf total{};
            for (int64_t j = 0; j < keys.count; ++j) {
                const vf apart = query + static_cast<float>(first - j);
                total += load(keys.weights + j * keys.stride + v * W) * floats_of(bits_of(apart) & 0x7fffffff);
            }
            store(answer.state + v * W, load(answer.state + v * W) + total);
        }
    }

    void segments(const Answer& answer, const Weighed& keys) const {
        const int32_t* ids = answer.question->ids + task_.b * answer.question->ids_batch + keys.low;
        for (int64_t from = 0, to = 0; from < keys.count; from = to) {
            for (to = from + 1; to < keys.count && ids[to] == ids[from];) ++to;
            for (int v = 0; v < vectors_; ++v) {
                vf total{};
                for (int64_t j = from; j < to; ++j) total += load(keys.weights + j * keys.stride + v * W);
                float* state = answer.state + ids[from] * block_lanes + v * W;
                store(state, load(state) + total);
            }
        }
    }

    // Whether any query sees key j.
    bool seen(const Weighed& keys, int64_t j) const {
        const vf hidden = same(-__builtin_inff());
        for (int v = 0; v < vectors_; ++v) {
            const vi used = lanes_in(first_bits(lanes_) >> (v * W));
            if (any(choose(used, load(keys.exponents + j * keys.stride + v * W), hidden) != hidden)) return true;
        }
        return false;
    }

    // Values of keys that nobody sees may be anything: 0 times NaN must not get in.
    void outputs(const Answer& answer, const Weighed& keys, const Panel& values) const {
        const int32_t* ids = answer.question->ids + task_.b * answer.question->ids_batch + keys.low;
        for (int64_t from = 0, to = 0; from < keys.count; from = to) {
            to = from + 1;
            if (!seen(keys, from)) continue;
            while (to < keys.count && ids[to] == ids[from] && seen(keys, to)) ++to;
            float* state = answer.state + ids[from] * call_.dv * block_lanes;
            product<Floats, Walk::across_rows>(
                values.data + from * values.stride, values.stride, call_.dv, keys.weights + from * keys.stride, keys.stride,
                to - from, 0, vectors_, [&](int64_t row, int v, const auto& sums) __attribute__((always_inline)) {
                    for_each(sums, [&](int r, int i, vf sum) __attribute__((always_inline)) {
                        float* at = state + (row + r) * block_lanes + (v + i) * W;
                        store(at, load(at) + sum);
                    });
                });
        }
    }

    void top(const Answer& answer, const Weighed& keys) const {
        Best best;
        best.k = answer.question->count;
        best.weights = answer.state;
        best.keys = reinterpret_cast<int32_t*>(answer.state + best.k * block_lanes);
        for (int v = 0; v < vectors_; ++v) best.take(v, keys.weights + v * W, keys.stride, keys.count, keys.low);
    }

    // The sum over the chosen lanes of each head, W keys at a time.
    void received(const Answer& answer, const Weighed& keys) const {
        for (int64_t g = 0; g < task_.heads; ++g) {
            const uint64_t word = answer.chosen & bits_between(g * task_.queries, (g + 1) * task_.queries);
            if (word == 0) continue;
            vi chosen[block_vectors];
            vf share[block_vectors];
            for (int v = 0; v < vectors_; ++v) {
                chosen[v] = lanes_in(word >> (v * W));
                share[v] = keys.shares == nullptr ? same(1.0f) : load(keys.shares + v * W);
            }
            const int64_t head = task_.b * call_.Hq + task_.head + g;
            int64_t* sums = plan_.sums[answer.number] + head * call_.Lk + keys.low;
            for (int64_t low = 0; low < keys.count; low += together) {
                const int64_t here = keys.count - low < together ? keys.count - low : together;
                alignas(64) float each[together + W];
                for (int64_t j = 0; j < here; j += W) {
                    vf x[W];
                    for (int64_t i = 0; i < W; ++i) {
                        x[i] = vf{};
                        if (j + i >= here) continue;
                        const float* weights = keys.weights + (low + j + i) * keys.stride;
                        for (int v = 0; v < vectors_; ++v)
                            x[i] = choose(chosen[v], x[i] + load(weights + v * W) * share[v], x[i]);
                    }
                    transpose(x);
                    vf total{};
                    for (int i = 0; i < W; ++i) total += x[i];
                    store(each + j, total);
                }
                bool numbers = true;
                for (int64_t j = 0; j < here; ++j) numbers &= each[j] == each[j];
                const Held held(plan_.locks + head);
                if (numbers) {
                    for (int64_t j = 0; j < here; ++j) sums[low + j] += to_fixed(each[j]);
                    continue;
                }
                for (int64_t j = 0; j < here; ++j)
                    if (each[j] == each[j]) sums[low + j] += to_fixed(each[j]);
                    else sums[low + j] |= not_a_number;
            }
        }
    }

    int64_t column_of(const Answer& answer, int64_t key) const {
        return ((key + 1) * answer.question->map_columns - 1) / call_.Lk;
    }

    void pool(const Answer& answer, const Weighed& keys) const {
        const bool most_of = answer.question->kind == Question::Kind::pooled_max;
        for (int64_t from = 0, to = 0; from < keys.count; from = to) {
            const int64_t column = column_of(answer, keys.low + from);
            for (to = from + 1; to < keys.count && column_of(answer, keys.low + to) == column;) ++to;
            float* state = answer.state + column * block_lanes;
            for (int v = 0; v < vectors_; ++v) {
                vf total{}, high = load(state + v * W);
                for (int64_t j = from; j < to; ++j) {
                    const vf weight = load(keys.weights + j * keys.stride + v * W);
                    total += weight;
                    high = larger(weight, high);
                }
                store(state + v * W, most_of ? high : load(state + v * W) + total);
            }
        }
    }

    void copy(const Answer& answer, const Weighed& keys) const {
        for_chosen(answer, [&](int64_t lane, int64_t result) {
            float* out = answer.question->out + result * call_.Lk + keys.low;
            const float share = keys.shares == nullptr ? 1.0f : keys.shares[lane];
            for (int64_t j = 0; j < keys.count; ++j) out[j] = keys.weights[j * keys.stride + lane] * share;
        });
    }

    // ------------------------------------------------------------------ results

    // Calls each(lane, number of the result row) for the chosen lanes.
    template <class Each>
    void for_chosen(const Answer& answer, const Each& each) const {
        for (int64_t lane = 0; lane < lanes_; ++lane) {
            if (!(answer.chosen >> lane & 1)) continue;
            each(lane, row_of(answer, lane));
        }
    }

    int64_t row_of(const Answer& answer, int64_t lane) const {
        const int64_t head = task_.head + lane / task_.queries, query = task_.query + lane % task_.queries;
        return (task_.b * call_.Hq + head) * answer.question->R + answer.question->place[query];
    }

    // The first `width` rows of a state, one after the other for each chosen lane.
    void write_rows(const Answer& answer, int64_t width) const {
        for (int v = 0; v < vectors_; ++v) {
            if ((answer.chosen >> (v * W) & first_bits(W)) == 0) continue;
            int64_t place[W];
            for (int i = 0; i < W; ++i) place[i] = answer.chosen >> (v * W + i) & 1 ? row_of(answer, v * W + i) : -1;
            for (int64_t t = 0; t < width; t += W) {
                vf x[W];
                for (int i = 0; i < W; ++i) x[i] = t + i < width ? load(answer.state + (t + i) * block_lanes + v * W) : vf{};
                transpose(x);
                const size_t here = static_cast<size_t>(width - t < W ? width - t : W);
                for (int i = 0; i < W; ++i)
                    if (place[i] >= 0) __builtin_memcpy(answer.question->out + place[i] * width + t, &x[i], here * 4);
            }
        }
    }

    // Makes one row of lengths of the dv rows of each segment. Very small and very large numbers are squared at
    // another scale, where neither vanishes.
    void take_lengths(const Answer& answer) const {
        for (int64_t s = 0; s < answer.question->segments; ++s)
            for (int v = 0; v < vectors_; ++v) {
                const float* rows = answer.state + s * call_.dv * block_lanes + v * W;
                vf most{}, total{};
                for (int64_t t = 0; t < call_.dv; ++t) most = larger(floats_of(bits_of(load(rows + t * block_lanes)) & 0x7fffffff), most);
                const vf scale = choose(most < same(0x1p-50f), same(0x1p100f), choose(most > same(0x1p50f), same(0x1p-100f), same(1.0f)));
                for (int64_t t = 0; t < call_.dv; ++t) {
                    const vf x = load(rows + t * block_lanes) * scale;
                    total += x * x;
                }
                for (int i = 0; i < W; ++i) total[i] = __builtin_sqrtf(total[i]) / scale[i];
                store(answer.state + s * block_lanes + v * W, total);
            }
    }

    // A number that cannot be below 0 (rounding may leave -1e-7), NaN where the row's sum is.
    float settled(float x, int64_t lane) const {
        if (!(sum_[lane] == sum_[lane])) return sum_[lane];
        return x > 0.0f ? x : x == x ? 0.0f : x;
    }

    void write_top(const Answer& answer) const {
        const int64_t k = answer.question->count;
        const int32_t* index = reinterpret_cast<const int32_t*>(answer.state + k * block_lanes);
        for_chosen(answer, [&](int64_t lane, int64_t result) {
            for (int64_t place = 0; place < k; ++place) {
                const float weight = answer.state[place * block_lanes + lane];
                answer.question->out[result * k + place] = sum_[lane] == sum_[lane] ? weight : sum_[lane];
                answer.question->index[result * k + place] = weight > 0.0f ? index[place * block_lanes + lane] : -1;
            }
        });
    }

    void write_pooled(const Answer& answer) const {
        const Question& question = *answer.question;
        for (int64_t lane = 0; lane < lanes_;) {  // lanes of the same head and map row lie side by side
            if (!(answer.chosen >> lane & 1)) {
                ++lane;
                continue;
            }
            const int64_t g = lane / task_.queries, row = map_row(question, lane);
            int64_t end = lane + 1;
            while (end < lanes_ && end / task_.queries == g && (!(answer.chosen >> end & 1) || map_row(question, end) == row)) ++end;
            const int64_t cell = ((task_.b * call_.Hq + task_.head + g) * question.map_rows + row) * question.map_columns;
            for (int64_t c = 0; c < question.map_columns; ++c) {
                float total = 0.0f, high = 0.0f;
                for (int64_t l = lane; l < end; ++l) {
                    if (!(answer.chosen >> l & 1)) continue;
                    const float x = answer.state[c * block_lanes + l];
                    total += x;
                    high = x > high ? x : high;
                    if (!(sum_[l] == sum_[l])) high = sum_[l];
                }
                if (question.kind == Question::Kind::pooled_mean) {
                    add_fixed(plan_.sums[answer.number] + cell + c, total);
                } else {
                    raise_to(question.out + cell + c, high);
                }
            }
            lane = end;
        }
    }

    int64_t map_row(const Question& question, int64_t lane) const {
        const int64_t place = question.place[task_.query + lane % task_.queries];
        return ((place + 1) * question.map_rows - 1) / question.R;
    }

    const Plan& plan_;
    const Call& call_;
    const Task& task_;
    int64_t lanes_;
    int vectors_;
    const float* sum_ = nullptr;
    int count_ = 0;
    Answer open_[most];
    alignas(64) float share_[block_lanes], norm_[block_lanes], peak_[block_lanes], query_[block_lanes];
};

}  // namespace
}  // namespace clearhead
