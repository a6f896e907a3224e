// Questions answered while a block walks over its keys, from weights that are relative to the running maximum.
//
// After the softmax of a chunk its weights lie in the first-level cache, and a question costs a load and an add for
// each: sums over stretches of keys (segment masses, maps), distances, the best keys. The entropy alone is summed
// up inside the softmax, where the exponents are at hand. The output is computed by the same operations whether
// anything rides along or not. What needs final weights (sums over queries) is left to forward.h, which keeps them.
#pragma once

#include "answer.h"
#include "best.h"
#include "parts.h"
#include "softmax.h"
#include "stretches.h"
#include "timeline.h"

namespace clearhead {
namespace {

// Sums over keys from … to - 1 for V vectors: term(j, i, sum) returns the sum with key j of vector i in it. Four
// sums to a vector, so that none waits for the one before.
template <int V, class Term>
CLEARHEAD_INLINE void sum_up(int64_t from, int64_t to, vf (&total)[V], const Term& term) {
    vf part[4][V];
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u)
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) part[u][i] = vf{};
    int64_t j = from;
    for (; j + 4 <= to; j += 4)
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u)
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) part[u][i] = term(j + u, i, part[u][i]);
    for (; j < to; ++j)
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) part[0][i] = term(j, i, part[0][i]);
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) total[i] += (part[0][i] + part[1][i]) + (part[2][i] + part[3][i]);
}

// The kinds that ride along; the others need final weights.
CLEARHEAD_INLINE bool rides(Question::Kind kind) {
    return kind != Question::Kind::key_mass && kind != Question::Kind::weights;
}

// A question about parts of the output that the mixing product brings along.
struct Brought {
    const Stretches* stretches = nullptr;
    const LazyRows* rows = nullptr;  // null: none
    float* running = nullptr;        // room for [dv][block_lanes]
};

class Riders {
  public:
    // chunks: the most that the block has.
    Riders(const Plan& plan, const Task& task, Answers& answers, int64_t chunks, Scratch& scratch)
        : call_(*plan.call), task_(task), answers_(answers), parts_(call_) {
        time_.peaks = scratch.take<float>(chunks * block_lanes);
        const Mask& m = call_.mask;
        first_ = m.offset[task.b * m.offset_batch] + task.query - m.key_offset;
        for (int64_t lane = 0; lane < block_lanes; ++lane) {
            spread_[lane] = far_[lane] = totals_[lane] = 0.0f;
            high_[lane] = -__builtin_inff();
            query_[lane] = static_cast<float>(lane % task.queries);
        }
        for (int n = 0; n < answers.count(); ++n) {
            const Answer& answer = answers[n];
            const Question& question = *answer.question;
            if (!rides(question.kind)) continue;
            Rider& rider = riders_[count_++];
            rider.answer = &answer;
            spread_asked_ |= question.kind == Question::Kind::entropy;
            far_asked_ |= question.kind == Question::Kind::mean_distance;
            const int64_t rows = lazy_rows(question);
            if (rows > 0) {
                rider.stretches.part = scratch.take<Stretch>(Stretches::most);
                rider.lazy.open(answer.state, scratch.take<int32_t>(LazyRows::tag_count(rows)), rows, lazy_height(question, call_));
            }
            if (question.kind == Question::Kind::top_keys) rider.best.open(answer.state, question.count);
            parts_asked_ |= has_parts(question);
        }
        if (parts_asked_) parts_.open(scratch);
    }

    static int64_t bytes(const Call& call, int64_t chunks) {
        int64_t bytes = chunks * block_lanes * 4 + 64 + Parts::bytes(call);
        for (int64_t i = 0; i < call.question_count; ++i)
            bytes += LazyRows::tag_count(lazy_rows(call.questions[i])) * 4 + Stretches::most * static_cast<int64_t>(sizeof(Stretch)) + 2 * 64;
        return bytes;
    }

    bool spread_asked() const { return spread_asked_; }
    bool parts_asked() const { return parts_asked_; }
    float* spread() { return spread_; }
    float* totals() { return totals_; }
    const Timeline& time() const { return time_; }

    // Before the softmax of a chunk. most: the largest score of each lane. whole: everybody sees every key.
    void begin(const Block& block, const Run* runs, int found, int64_t low, int64_t count, bool whole, const float* most) {
        ++time_.now;
        low_ = low;
        keys_ = count;
        whole_ = whole;
        for (int v = 0; v < block.vectors; ++v) store(high_ + v * W, larger(load(most + v * W), load(high_ + v * W)));
        for (int n = 0; n < count_; ++n) {
            const Question& question = *riders_[n].answer->question;
            if (riders_[n].lazy.numbers == 0) continue;
            if (question.kind == Question::Kind::pooled_mean || question.kind == Question::Kind::pooled_max)
                riders_[n].stretches.by_columns(runs, found, low, call_.Lk, question.map_columns);
            else
                riders_[n].stretches.by_ids(runs, found, question.ids + task_.b * question.ids_batch + low);
        }
    }

    // After the softmax of V vectors from v on.
    template <int V>
    [[gnu::noinline]] void gather(const Block& block, const Run* runs, int found, int v, const float* fade) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i)
            store(time_.peaks + time_.now * block_lanes + (v + i) * W, load(block.peak + (v + i) * W));
        if (far_asked_) distances<V>(block, runs, found, v, fade);
        for (int n = 0; n < count_; ++n) {
            const Rider& rider = riders_[n];
            switch (rider.answer->question->kind) {
                case Question::Kind::segment_mass:
                case Question::Kind::pooled_mean: masses<V>(rider, block, v, fade); break;
                case Question::Kind::pooled_max: peaks<V>(rider, block, v, fade); break;
                case Question::Kind::top_keys: best<V>(rider, block, runs, found, v, fade); break;
                default: break;
            }
        }
    }

    // The question about parts, if there is just one and its segments cut the runs in few places.
    Brought brought_along(int found) const {
        Brought brought;
        for (int n = 0; n < count_; ++n) {
            if (!has_parts(*riders_[n].answer->question)) continue;
            if (brought.rows != nullptr || riders_[n].stretches.count > found + few_cuts) return {};
            brought = {&riders_[n].stretches, &riders_[n].lazy, parts_.running};
        }
        return brought;
    }

    // After the chunk's values were mixed in. values: the chunk's, in float32.
    void mixed(const Block& block, const Panel& values, const float* fade) {
        for (int n = 0; n < count_; ++n)
            if (has_parts(*riders_[n].answer->question))
                parts_.add(block, values, riders_[n].stretches, riders_[n].lazy, time_, fade);
    }

    // Turns what was gathered into the answers' states.
    void close(const float* peak, const float* sum, float factor, const float* sink, int vectors) {
        const float* share = answers_.shares();
        for (int n = 0; n < count_; ++n) {
            const Rider& rider = riders_[n];
            float* state = rider.answer->state;
            if (rider.lazy.numbers > 0 && time_.now >= 0) rider.lazy.settle(time_, share, vectors);
            for (int v = 0; v < vectors; ++v) {
                const vf part = load(share + v * W), top = load(peak + v * W), total = load(sum + v * W);
                switch (rider.answer->question->kind) {
                    case Question::Kind::entropy: {
                        // H = -Σ w / sum · ln(w / sum); a sink, that counts into the sums as a key, has no term.
                        const vf x = load(sink + v * W) - top, w = exp2(x);
                        const vf there = choose(w == 0.0f, w, w * x);
                        const vf terms = log2(total) * ((total - w) * part) - (load(spread_ + v * W) - there) * part;
                        store(state + v * W, choose(total == 0.0f, vf{}, terms * ln_2));
                        break;
                    }
                    case Question::Kind::max_weight:
                        store(state + v * W, exp2(load(high_ + v * W) * factor - top) * part);
                        break;
                    case Question::Kind::mean_distance: store(state + v * W, load(far_ + v * W) * part); break;
                    case Question::Kind::top_keys: rider.best.scale(v, part); break;
                    default: break;
                }
            }
        }
    }

  private:
    struct Rider {
        const Answer* answer = nullptr;
        Stretches stretches;
        LazyRows lazy;
        Best best;
    };

    static bool has_parts(const Question& question) {
        return question.kind == Question::Kind::segment_output || question.kind == Question::Kind::segment_norm;
    }

    static int64_t lazy_rows(const Question& question) {
        switch (question.kind) {
            case Question::Kind::segment_mass:
            case Question::Kind::segment_output:
            case Question::Kind::segment_norm: return question.segments;
            case Question::Kind::pooled_mean:
            case Question::Kind::pooled_max: return question.map_columns;
            default: return 0;
        }
    }

    static int64_t lazy_height(const Question& question, const Call& call) { return has_parts(question) ? call.dv : 1; }

    // Calls each(from, to) for the keys that the vectors v … v + V - 1 take part in.
    template <int V, class Each>
    CLEARHEAD_INLINE static void for_runs(const Run* runs, int found, int v, const Each& each) {
        for (int n = 0; n < found; ++n)
            if (runs[n].v0 < v + V && runs[n].v1 > v) each(runs[n].low, runs[n].low + runs[n].count);
    }

    template <int V>
    CLEARHEAD_INLINE void masses(const Rider& rider, const Block& block, int v, const float* fade) const {
        for (int n = 0; n < rider.stretches.count; ++n) {
            const Stretch& stretch = rider.stretches.part[n];
            if (stretch.v0 >= v + V || stretch.v1 <= v) continue;
            vf total[V];
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) total[i] = vf{};
            if (whole_ && stretch.to - stretch.from == keys_) {  // the softmax has this sum
#pragma GCC unroll 8
                for (int i = 0; i < V; ++i) total[i] = load(totals_ + (v + i) * W);
            } else {
                sum_up<V>(stretch.from, stretch.to, total, [&](int64_t j, int i, vf sum) __attribute__((always_inline)) {
                    return sum + load(block.weights + j * block_lanes + (v + i) * W);
                });
            }
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) {
                float* mass = rider.lazy.touch(stretch.number, v + i, time_, fade);
                store(mass, load(mass) + total[i]);
            }
        }
    }

    template <int V>
    CLEARHEAD_INLINE void peaks(const Rider& rider, const Block& block, int v, const float* fade) const {
        for (int n = 0; n < rider.stretches.count; ++n) {
            const Stretch& stretch = rider.stretches.part[n];
            if (stretch.v0 >= v + V || stretch.v1 <= v) continue;
            for (int i = 0; i < V; ++i) {
                float* held = rider.lazy.touch(stretch.number, v + i, time_, fade);
                vf high = load(held), other{};
                int64_t j = stretch.from;
                for (; j + 2 <= stretch.to; j += 2) {
                    high = larger(load(block.weights + j * block_lanes + (v + i) * W), high);
                    other = larger(load(block.weights + (j + 1) * block_lanes + (v + i) * W), other);
                }
                if (j < stretch.to) high = larger(load(block.weights + j * block_lanes + (v + i) * W), high);
                store(held, larger(other, high));
            }
        }
    }

    // Where all keys lie on one side of all queries the distance is that to the nearest key and a share of the chunk.
    template <int V>
    CLEARHEAD_INLINE void distances(const Block& block, const Run* runs, int found, int v, const float* fade) {
        const int64_t first = first_ - low_, last = keys_ - 1;  // of lane 0 to the chunk's first key; its last key
        const bool behind = first >= last, ahead = first + task_.queries - 1 <= 0;
        vf total[V];
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) total[i] = vf{};
        for_runs<V>(runs, found, v, [&](int64_t from, int64_t to) __attribute__((always_inline)) {
            const float* weights = block.weights + v * W;
            if (behind || ahead) {
                const float start = behind ? static_cast<float>(last) : 0.0f, step = behind ? -1.0f : 1.0f;
                sum_up<V>(from, to, total, [&](int64_t j, int i, vf sum) __attribute__((always_inline)) {
                    return sum + load(weights + j * block_lanes + i * W) * (start + step * static_cast<float>(static_cast<int32_t>(j)));
                });
            } else {
                sum_up<V>(from, to, total, [&](int64_t j, int i, vf sum) __attribute__((always_inline)) {
                    const vf apart = load(query_ + (v + i) * W) + static_cast<float>(static_cast<int32_t>(first - j));
                    return sum + load(weights + j * block_lanes + i * W) * floats_of(bits_of(apart) & 0x7fffffff);
                });
            }
        });
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) {
            const int64_t at = (v + i) * W;
            if (behind) total[i] += (load(query_ + at) + static_cast<float>(first - last)) * load(totals_ + at);
            if (ahead && !behind) total[i] += (static_cast<float>(-first) - load(query_ + at)) * load(totals_ + at);
            store(far_ + at, load(far_ + at) * load(fade + at) + total[i]);
        }
    }

    template <int V>
    CLEARHEAD_INLINE void best(const Rider& rider, const Block& block, const Run* runs, int found, int v, const float* fade) const {
        for (int i = 0; i < V; ++i) {
            const vf factor = load(fade + (v + i) * W);
            if (any(factor != 1.0f)) rider.best.scale(v + i, factor);
            for_runs<V>(runs, found, v, [&](int64_t from, int64_t to) {
                rider.best.take(v + i, block.weights + from * block_lanes + (v + i) * W, block_lanes, to - from, low_ + from);
            });
        }
    }

    static constexpr int most = Answers::most, few_cuts = 6;

    const Call& call_;
    const Task& task_;
    Answers& answers_;
    Timeline time_;
    Parts parts_;
    int count_ = 0;
    bool spread_asked_ = false, far_asked_ = false, parts_asked_ = false, whole_ = false;
    int64_t first_ = 0, low_ = 0, keys_ = 0;
    Rider riders_[most];
    alignas(64) float spread_[block_lanes], far_[block_lanes], high_[block_lanes], totals_[block_lanes], query_[block_lanes];
};

}  // namespace
}  // namespace clearhead
