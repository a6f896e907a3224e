#include "plan.h"

#include <algorithm>
#include <unordered_map>

namespace clearhead {
namespace {

// First and last key of each number, looked up for the queries of one item.
void look_up_documents(const int64_t* query, int64_t Lq, const int64_t* key, int64_t Lk, Range* into) {
    std::unordered_map<int64_t, Range> seen;
    int64_t number = 0;
    Range* current = nullptr;
    for (int64_t j = 0; j < Lk; ++j) {
        if (current == nullptr || key[j] != number) {
            number = key[j];
            auto [place, fresh] = seen.try_emplace(number, Range{j, j + 1});
            current = &place->second;
            (void)fresh;
        }
        current->high = j + 1;
    }
    for (int64_t i = 0; i < Lq; ++i) {
        const auto found = seen.find(query[i]);
        into[i] = found == seen.end() ? Range{0, 0} : found->second;
    }
}

// The positions below are key numbers ("slots"): query i of item b sits at slot base + i.
int64_t base_of(const Mask& mask, int64_t b) { return mask.offset[b * mask.offset_batch] - mask.key_offset; }

// a - b without overflow at "no limit".
int64_t below(int64_t a, int64_t b) { return b == Mask::no_limit ? INT64_MIN : a - b; }
int64_t after(int64_t a, int64_t b) { return b == Mask::no_limit ? INT64_MAX : a + b + 1; }

int64_t floor_to(int64_t x, int64_t step) {
    const int64_t rest = x % step;
    return x - (rest < 0 ? rest + step : rest);
}

// Ranges of one mask of the conjunction.
Ranges ranges_of(const Reach& reach, const Call& call, const Task& task) {
    const Mask& m = *reach.mask;
    const int64_t b = task.b, base = base_of(m, b);
    const int64_t first = base + task.query, last = first + task.queries - 1;  // slots of the queries
    int64_t low = 0, high = call.Lk;
    if (m.lengths != nullptr) high = std::min(high, m.lengths[b]);
    const bool lifted = m.block_key != nullptr;
    if (m.causal && !lifted) {
        int64_t edge = last + 1;
        if (m.prefix != nullptr) {
            const int64_t prefix = m.prefix[b * m.prefix_batch];
            edge = m.origin != nullptr ? high : std::max(edge, prefix - m.key_offset);
        }
        high = std::min(high, edge);
    }
    if (reach.real != nullptr) {
        const Range& real = reach.real[reach.real_batch ? b : 0];
        low = std::max(low, real.low);
        high = std::min(high, real.high);
    }
    if (reach.document != nullptr) {
        const Range* documents = reach.document + (reach.document_batch ? b * call.Lq : 0);
        Range all{INT64_MAX, 0};
        for (int64_t i = task.query; i < task.query + task.queries; ++i) {
            if (documents[i].low >= documents[i].high) continue;
            all.low = std::min(all.low, documents[i].low);
            all.high = std::max(all.high, documents[i].high);
        }
        low = std::max(low, all.low);
        high = std::min(high, all.high);
    }
    if (m.chunk > 0 && m.origin == nullptr) {
        const int64_t shift = m.key_offset;  // position of slot 0
        low = std::max(low, floor_to(first + shift, m.chunk) - shift);
        high = std::min(high, floor_to(last + shift, m.chunk) + m.chunk - shift);
    }
    Ranges found;
    auto admit = [&](int64_t from, int64_t to) {
        if (from < to) found.part[found.count++] = {from, to};
    };
    const int64_t near_low = std::max(low, below(first, m.left));
    const int64_t near_high = std::min(high, after(last, m.right));
    const bool windowed = m.left != Mask::no_limit || m.right != Mask::no_limit;
    if (!windowed || m.sinks == 0) {
        admit(near_low, near_high);
    } else if (m.origin != nullptr) {
        admit(low, high);  // the sinks of any document: empty chunks are passed over one by one
    } else {
        const int64_t sink_low = low, sink_high = std::min(high, m.sinks - m.key_offset);
        if (near_low < near_high && near_low <= sink_high) {
            admit(std::min(sink_low, near_low), std::max(near_high, sink_high));
        } else {
            admit(sink_low, sink_high);
            admit(std::max(near_low, sink_high), near_high);
        }
    }
    return found;
}

Ranges intersected(const Ranges& a, const Ranges& b) {
    Ranges both;
    for (int i = 0; i < a.count; ++i) {
        for (int k = 0; k < b.count; ++k) {
            const Range part{std::max(a.part[i].low, b.part[k].low), std::min(a.part[i].high, b.part[k].high)};
            if (part.low >= part.high) continue;
            if (both.count == Ranges::capacity) {
                both.part[both.count - 1].high = part.high;  // keeps more than needed, never less
            } else {
                both.part[both.count++] = part;
            }
        }
    }
    return both;
}

}  // namespace

OwnedPlan::OwnedPlan(const Call& of) {
    call = &of;
    for (const Mask* m = &of.mask; m != nullptr; m = m->next) {
        Reach reach;
        reach.mask = m;
        if (m->document_key != nullptr) {
            reach.document_batch = m->document_query_batch != 0 || m->document_key_batch != 0;
            const int64_t items = reach.document_batch ? of.B : 1;
            auto& found = ranges_.emplace_back(static_cast<size_t>(items * of.Lq));
            for (int64_t b = 0; b < items; ++b)
                look_up_documents(m->document_query + b * m->document_query_batch, of.Lq,
                                  m->document_key + b * m->document_key_batch, of.Lk, found.data() + b * of.Lq);
            reach.document = found.data();
        }
        if (m->real != nullptr) {
            reach.real_batch = m->real_batch != 0;
            auto& bounds = ranges_.emplace_back();
            auto& solid = flags_.emplace_back();
            for (int64_t b = 0; b < (reach.real_batch ? of.B : 1); ++b) {
                const uint8_t* real = m->real + b * m->real_batch;
                Range range{0, of.Lk};
                while (range.low < range.high && !real[range.low]) ++range.low;
                while (range.low < range.high && !real[range.high - 1]) --range.high;
                bounds.push_back(range);
                solid.push_back(std::find(real + range.low, real + range.high, 0) == real + range.high);
            }
            reach.real = bounds.data();
            reach.solid = solid.data();
        }
        masks_.push_back(reach);
    }
    reach = masks_.data();
    reach_count = static_cast<int>(masks_.size());
}

Ranges visible_ranges(const Plan& plan, const Task& task) {
    Ranges found;
    found.part[0] = task.keys;
    found.count = task.keys.low < task.keys.high;
    for (int i = 0; i < plan.reach_count; ++i)
        found = intersected(found, ranges_of(plan.reach[i], *plan.call, task));
    return found;
}

int64_t keys_in(const Ranges& ranges) {
    int64_t keys = 0;
    for (int i = 0; i < ranges.count; ++i) keys += ranges.part[i].high - ranges.part[i].low;
    return keys;
}

}  // namespace clearhead
