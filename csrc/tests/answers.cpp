// The questions and the gradients, from full rows of weights.
#include <algorithm>
#include <cmath>

#include "bounds.h"
#include "reference.h"

namespace reference {
namespace {

using Kind = Question::Kind;

size_t width_of(const Question& question, const Call& call) {
    switch (question.kind) {
        case Kind::segment_mass:
        case Kind::segment_norm: return static_cast<size_t>(question.segments);
        case Kind::segment_output: return static_cast<size_t>(question.segments * call.dv);
        case Kind::top_keys: return static_cast<size_t>(question.count);
        case Kind::weights: return static_cast<size_t>(call.Lk);
        default: return 1;
    }
}

// One result row of one query.
std::vector<Near> row_answer(const Weights& weights, const Question& question, int64_t b, int64_t h, int64_t i) {
    const Call& call = *weights.call;
    const size_t row = weights.index(b, h, i);
    std::vector<Near> answer(width_of(question, call));
    auto weight = [&](int64_t j) { return weights.weight(row, j); };
    auto blur = [&](int64_t j) { return weights.off(row, j); };
    auto segment = [&](int64_t j) { return static_cast<size_t>(question.ids[b * question.ids_batch + j]); };
    std::vector<double> low, high, exact;
    for (int64_t j = 0; j < call.Lk; ++j) {
        const double w = weight(j);
        switch (question.kind) {
            case Kind::segment_mass: {
                // Differences of a running sum, which is at most 1: a rounding of that size for every key.
                Near& mass = answer[segment(j)];
                if (mass.size == 0 && w > 0) mass.blur += 8 * unit;
                mass.add(w, w > 0 ? blur(j) + unit : 0);
                break;
            }
            case Kind::entropy:
                if (w > 0) {
                    const double log = std::log(w), off = weights.blur[row][static_cast<size_t>(j)];
                    answer[0].add(-w * log, blur(j) * std::abs(log) + (w + blur(j)) * off);
                }
                break;
            case Kind::mean_distance: {
                const auto apart = static_cast<double>(call.mask.offset[b * call.mask.offset_batch] + i - call.mask.key_offset - j);
                answer[0].add(w * std::abs(apart), blur(j) * std::abs(apart));
                break;
            }
            case Kind::segment_output:
            case Kind::segment_norm:
                break;
            case Kind::weights: answer[static_cast<size_t>(j)] = {w, blur(j), w}; break;
            case Kind::max_weight:
            case Kind::top_keys:
                exact.push_back(w);
                low.push_back(w - blur(j));
                high.push_back(w + blur(j));
                break;
            default: break;
        }
    }
    if (question.kind == Kind::max_weight || question.kind == Kind::top_keys) {
        // The k-th largest is no less than the k-th largest lower bound and no more than the k-th largest upper one.
        for (auto* numbers : {&exact, &low, &high}) {
            numbers->resize(std::max(numbers->size(), answer.size()), 0.0);
            std::sort(numbers->rbegin(), numbers->rend());
        }
        for (size_t k = 0; k < answer.size(); ++k)
            answer[k] = {exact[k], std::max(exact[k] - low[k], high[k] - exact[k]), exact[k]};
    }
    if (question.kind == Kind::segment_output || question.kind == Kind::segment_norm) {
        const auto dv = static_cast<size_t>(call.dv);
        std::vector<Near> vectors(static_cast<size_t>(question.segments) * dv);
        for (int64_t j = 0; j < call.Lk; ++j) {
            if (!weights.rows[row].seen[static_cast<size_t>(j)]) continue;
            for (size_t t = 0; t < dv; ++t) {
                const double value = element(call.v, b, h / (call.Hq / call.Hkv), j, static_cast<int64_t>(t));
                vectors[segment(j) * dv + t].add(weight(j) * value, blur(j) * std::abs(value));
            }
        }
        // A part is a difference of a running sum over all keys: its roundings are relative to the whole output.
        for (size_t t = 0; t < dv; ++t) {
            double whole = 0;
            for (size_t at = t; at < vectors.size(); at += dv) whole += vectors[at].size;
            for (size_t at = t; at < vectors.size(); at += dv)
                if (vectors[at].size > 0) vectors[at].blur += terms(call.Lk) * unit * whole;
        }
        if (question.kind == Kind::segment_output) return vectors;
        for (size_t s = 0; s < answer.size(); ++s) {  // | |a| - |b| | <= |a - b|
            double square = 0, off = 0, size = 0;
            for (size_t t = 0; t < dv; ++t) {
                const Near& x = vectors[s * dv + t];
                square += x.value * x.value;
                off += x.blur * x.blur;
                size += x.size * x.size;
            }
            answer[s] = {std::sqrt(square), std::sqrt(off), std::sqrt(size)};
        }
    }
    return answer;
}

int64_t border(int64_t i, int64_t length, int64_t bins) { return i * length / bins; }

// The query behind each result row.
std::vector<int64_t> chosen_queries(const Question& question, const Call& call) {
    std::vector<int64_t> chosen(static_cast<size_t>(question.R));
    for (int64_t i = 0; i < call.Lq; ++i)
        if (question.place[i] >= 0) chosen[static_cast<size_t>(question.place[i])] = i;
    return chosen;
}

// key_mass and the pooled maps, which look at several queries at once, for one head.
void head_answer(const Weights& weights, const Question& question, int64_t b, int64_t h, std::vector<Near>& answer) {
    const Call& call = *weights.call;
    const std::vector<int64_t> chosen = chosen_queries(question, call);
    if (question.kind == Kind::key_mass) {
        for (int64_t j = 0; j < call.Lk; ++j) {
            Near sum;
            for (const int64_t i : chosen) {
                const size_t row = weights.index(b, h, i);
                sum.add(weights.weight(row, j), weights.off(row, j) + 0x1p-40);  // kept in fixed point
            }
            answer.push_back(sum);
        }
        return;
    }
    for (int64_t r = 0; r < question.map_rows; ++r)
        for (int64_t c = 0; c < question.map_columns; ++c) {
            Near sum, most;
            int64_t count = 0;
            for (int64_t p = border(r, question.R, question.map_rows); p < border(r + 1, question.R, question.map_rows); ++p) {
                const size_t row = weights.index(b, h, chosen[static_cast<size_t>(p)]);
                for (int64_t j = border(c, call.Lk, question.map_columns); j < border(c + 1, call.Lk, question.map_columns); ++j) {
                    const double w = weights.weight(row, j), off = weights.off(row, j);
                    sum.add(w, off + 0x1p-40);
                    most.value = std::max(most.value, w);
                    most.blur = std::max(most.blur, off);
                    ++count;
                }
            }
            most.size = most.value;
            if (question.kind == Kind::pooled_max) {
                answer.push_back(most);
            } else {
                const double share = count > 0 ? 1 / static_cast<double>(count) : 0;
                answer.push_back({sum.value * share, sum.blur * share, sum.size * share});
            }
        }
}

}  // namespace

std::vector<Near> answer_to(const Weights& weights, const Question& question) {
    const Call& call = *weights.call;
    const Kind kind = question.kind;
    const bool by_head = kind == Kind::key_mass || kind == Kind::pooled_mean || kind == Kind::pooled_max;
    std::vector<Near> answer;
    for (int64_t b = 0; b < call.B; ++b)
        for (int64_t h = 0; h < call.Hq; ++h) {
            if (by_head) {
                head_answer(weights, question, b, h, answer);
                continue;
            }
            for (const int64_t i : chosen_queries(question, call)) {
                const std::vector<Near> row = row_answer(weights, question, b, h, i);
                answer.insert(answer.end(), row.begin(), row.end());
            }
        }
    return answer;
}

Gradients gradients_of(const Weights& weights, const Backward& back, const std::vector<double>& out_blur) {
    const Call& call = *weights.call;
    const auto d = static_cast<size_t>(call.d), dv = static_cast<size_t>(call.dv), Lk = static_cast<size_t>(call.Lk);
    Gradients all;
    all.dq.resize(static_cast<size_t>(call.B * call.Hq * call.Lq) * d);
    all.dk.resize(static_cast<size_t>(call.B * call.Hkv) * Lk * d);
    all.dv.resize(static_cast<size_t>(call.B * call.Hkv) * Lk * dv);
    for (int64_t b = 0; b < call.B; ++b)
        for (int64_t h = 0; h < call.Hq; ++h)
            for (int64_t i = 0; i < call.Lq; ++i) {
                const size_t row = weights.index(b, h, i);
                const Row& look = weights.rows[row];
                const int64_t kv = h / (call.Hq / call.Hkv);
                const std::vector<double> score_off = score_blur(call, look);
                const double dlse = back.dlse != nullptr ? static_cast<double>(back.dlse[row]) : 0.0;
                std::vector<double> pull(dv, 0.0), q(d);
                if (back.dout.data != nullptr)
                    for (size_t t = 0; t < dv; ++t) pull[t] = element(back.dout, b, h, i, static_cast<int64_t>(t));
                for (size_t t = 0; t < d; ++t) q[t] = element(call.q, b, h, i, static_cast<int64_t>(t));
                // d out / d weight_j = dout · v_j; `mean` is what the softmax takes off: Σ weight · that.
                std::vector<double> gain(Lk, 0.0), gain_size(Lk, 0.0);
                double mean = 0, mean_size = 0;
                for (size_t j = 0; j < Lk; ++j) {
                    if (!look.seen[j]) continue;
                    for (size_t t = 0; t < dv; ++t) {
                        const double term = pull[t] * element(call.v, b, kv, static_cast<int64_t>(j), static_cast<int64_t>(t));
                        gain[j] += term;
                        gain_size[j] += std::abs(term);
                    }
                    mean += look.weight[j] * gain[j];
                    mean_size += look.weight[j] * gain_size[j];
                }
                // The kernels take dout · out for the mean: out as it was stored.
                double mean_blur = unit * (terms(call.dv) * mean_size + std::abs(dlse));
                for (size_t t = 0; t < dv; ++t) mean_blur += std::abs(pull[t]) * out_blur[row * dv + t];
                for (size_t j = 0; j < Lk; ++j) {
                    if (!look.seen[j]) continue;
                    const auto key = static_cast<int64_t>(j);
                    const double w = look.weight[j], w_off = weights.off(row, key);
                    const size_t to = (static_cast<size_t>(b * call.Hkv + kv) * Lk + j);
                    for (size_t t = 0; t < dv; ++t) all.dv[to * dv + t].add(w * pull[t], w_off * std::abs(pull[t]));
                    const double inner = gain[j] - mean + dlse, scale = call.scale;
                    const double inner_off = unit * (terms(call.dv) * gain_size[j] + 4 * (std::abs(gain[j]) + std::abs(mean) + std::abs(dlse))) + mean_blur;
                    // The slope of softcap changes by 2 |bent| (1 - bent²) / c for each unit of the score.
                    const double bend = look.bend[j];
                    const double bend_off = call.softcap > 0 ? std::min(1.0, 2 * score_off[j] / static_cast<double>(call.softcap) + 16 * unit) : 0.0;
                    const double slope = scale * w * inner * bend;
                    const double slope_off = std::abs(scale) * (w_off * std::abs(inner) * (bend + bend_off) + (w + w_off) * inner_off * (bend + bend_off) +
                                                                w * std::abs(inner) * bend_off);
                    for (size_t t = 0; t < d; ++t) {
                        const double k = element(call.k, b, kv, key, static_cast<int64_t>(t));
                        all.dq[row * d + t].add(slope * k, slope_off * std::abs(k));
                        all.dk[to * d + t].add(slope * q[t], slope_off * std::abs(q[t]));
                    }
                }
            }
    return all;
}

}  // namespace reference
