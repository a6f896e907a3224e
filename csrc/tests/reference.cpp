#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "bounds.h"

namespace reference {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

double from_half(uint16_t bits) {
    const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    double size = std::ldexp(mantissa, -24);
    if (exponent > 0) size = std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31) size = mantissa != 0 ? std::nan("") : infinity;
    return (bits & 0x8000) != 0 ? -size : size;
}

double from_bfloat(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

int64_t floor_div(int64_t a, int64_t b) {
    const int64_t q = a / b;
    return a % b < 0 ? q - 1 : q;
}

// One mask alone, rule by rule in the order of call.h.
bool sees_through(const Mask& m, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t query = m.offset[b * m.offset_batch] + i, key = m.key_offset + j;
    if (m.lengths != nullptr && j >= m.lengths[b]) return false;
    if (m.real != nullptr && m.real[b * m.real_batch + j] == 0) return false;
    const int64_t origin = m.origin == nullptr ? 0 : m.origin[b * m.origin_batch + j];
    const int64_t place = key - origin;  // of the key in its row or document
    if (m.causal && key > query) {
        bool lifted = false;
        if (m.prefix != nullptr) lifted = place >= 0 && place < m.prefix[b * m.prefix_batch];
        if (m.block_key != nullptr) {
            const int64_t mine = m.block_query[b * m.block_query_batch + i];
            const int64_t theirs = m.block_key[b * m.block_key_batch + j];
            lifted = lifted || (mine == theirs && theirs >= 0);
        }
        if (!lifted) return false;
    }
    const bool too_far_back = m.left != Mask::no_limit && query - key > m.left;
    const bool too_far_ahead = m.right != Mask::no_limit && key - query > m.right;
    if (too_far_back || too_far_ahead) {
        const bool sink = place >= 0 && place < m.sinks;
        if (!sink) return false;
    }
    if (m.chunk > 0 && floor_div(query - origin, m.chunk) != floor_div(place, m.chunk)) return false;
    if (m.document_key != nullptr &&
        m.document_query[b * m.document_query_batch + i] != m.document_key[b * m.document_key_batch + j])
        return false;
    return m.dense == nullptr ||
           m.dense[b * m.dense_batch + h * m.dense_head + i * m.dense_query + j * m.dense_key] != 0;
}

}  // namespace

double stored(const void* data, Type type, int64_t at) {
    switch (type) {
        case Type::f32: return static_cast<const float*>(data)[at];
        case Type::bf16: return from_bfloat(static_cast<const uint16_t*>(data)[at]);
        case Type::f16: return from_half(static_cast<const uint16_t*>(data)[at]);
        case Type::i8: return static_cast<const int8_t*>(data)[at];
    }
    return 0;
}

double element(const Rows& rows, int64_t b, int64_t h, int64_t j, int64_t t) {
    int64_t item = b, row = j;
    if (rows.table != nullptr) {
        item = rows.table[b * rows.table_batch + j / rows.page];
        row = j % rows.page;
    }
    const double x = stored(rows.data, rows.type, item * rows.batch + h * rows.head + row * rows.row + t * rows.column);
    if (rows.type != Type::i8) return x;
    return x * rows.scale[item * rows.scale_batch + h * rows.scale_head + row * rows.scale_row];
}

bool may_see(const Mask& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
    for (const Mask* m = &mask; m != nullptr; m = m->next)
        if (!sees_through(*m, b, h, i, j)) return false;
    return true;
}

Row look(const Call& call, int64_t b, int64_t h, int64_t i) {
    const auto Lk = static_cast<size_t>(call.Lk);
    Row row;
    row.seen.assign(Lk, 0);
    for (auto* numbers : {&row.score, &row.weight, &row.bend, &row.size, &row.extra}) numbers->assign(Lk, 0.0);
    row.sink_logit = call.sink_logits != nullptr ? static_cast<double>(call.sink_logits[h]) : -infinity;
    const int64_t kv = h / (call.Hq / call.Hkv);
    std::vector<double> q(static_cast<size_t>(call.d));
    for (int64_t t = 0; t < call.d; ++t) q[static_cast<size_t>(t)] = element(call.q, b, h, i, t);
    double high = row.sink_logit;
    for (int64_t j = 0; j < call.Lk; ++j) {
        if (!may_see(call.mask, b, h, i, j)) continue;
        const auto at = static_cast<size_t>(j);
        double product = 0, size = 0;
        for (int64_t t = 0; t < call.d; ++t) {
            const double term = q[static_cast<size_t>(t)] * element(call.k, b, kv, j, t);
            product += term;
            size += std::abs(term);
        }
        double score = call.scale * product, bend = 1;
        if (call.softcap > 0) {
            const double bent = std::tanh(score / call.softcap);
            score = call.softcap * bent;
            bend = 1 - bent * bent;
        }
        if (call.bias.data != nullptr) {
            const Bias& a = call.bias;
            const double bias = stored(a.data, a.type, b * a.batch + h * a.head + i * a.query + j * a.key);
            if (bias == -infinity) continue;
            score += bias;
            row.extra[at] += std::abs(bias);
        }
        if (call.relative.values != nullptr) {
            const int64_t distance = call.mask.offset[b * call.mask.offset_batch] + i - (call.mask.key_offset + j);
            const double bias = call.relative.values[h * call.relative.head + distance - call.relative.first];
            score += bias;
            row.extra[at] += std::abs(bias);
        }
        row.seen[at] = 1;
        row.score[at] = score;
        row.bend[at] = bend;
        row.size[at] = std::abs(static_cast<double>(call.scale)) * size;
        high = std::max(high, score);
    }
    if (high == -infinity) {
        row.lse = -infinity;
        return row;
    }
    double sum = std::exp(row.sink_logit - high);
    for (size_t j = 0; j < Lk; ++j)
        if (row.seen[j]) sum += std::exp(row.score[j] - high);
    row.lse = high + std::log(sum);
    row.sink = std::exp(row.sink_logit - row.lse);
    for (size_t j = 0; j < Lk; ++j)
        if (row.seen[j]) row.weight[j] = std::exp(row.score[j] - row.lse);
    return row;
}

Weights look_everywhere(const Call& call) {
    Weights weights;
    weights.call = &call;
    for (int64_t b = 0; b < call.B; ++b)
        for (int64_t h = 0; h < call.Hq; ++h)
            for (int64_t i = 0; i < call.Lq; ++i) {
                weights.rows.push_back(look(call, b, h, i));
                const Row& row = weights.rows.back();
                weights.blur.push_back(log_weight_blur(call, row));
                std::vector<double> off(row.weight.size());
                for (size_t j = 0; j < off.size(); ++j)
                    off[j] = row.weight[j] * std::expm1(std::min(weights.blur.back()[j], 700.0));
                weights.weight_blur.push_back(std::move(off));
                weights.lse_blur.push_back(lse_blur(call, row));
            }
    return weights;
}

std::vector<Near> out_of(const Weights& weights) {
    const Call& call = *weights.call;
    const auto dv = static_cast<size_t>(call.dv);
    std::vector<Near> out(weights.rows.size() * dv);
    for (int64_t b = 0; b < call.B; ++b)
        for (int64_t h = 0; h < call.Hq; ++h)
            for (int64_t i = 0; i < call.Lq; ++i) {
                const size_t row = weights.index(b, h, i);
                for (int64_t j = 0; j < call.Lk; ++j) {
                    if (!weights.rows[row].seen[static_cast<size_t>(j)]) continue;
                    const double weight = weights.weight(row, j), off = weights.off(row, j);
                    for (size_t t = 0; t < dv; ++t) {
                        const double value = element(call.v, b, h / (call.Hq / call.Hkv), j, static_cast<int64_t>(t));
                        out[row * dv + t].add(weight * value, off * std::abs(value));
                    }
                }
            }
    return out;
}

}  // namespace reference
