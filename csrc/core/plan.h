// What the core derives from a call before it computes: which keys a row of documents or padding can reach at
// all, and the tasks that the work is cut into.
#pragma once

#include <cstdint>
#include <vector>

#include "call.h"

namespace clearhead {

struct Range {
    int64_t low = 0, high = 0;
};

// Ranges of keys, disjoint and ascending. A handful always suffices: one window and one run of sinks per mask.
struct Ranges {
    static constexpr int capacity = 8;
    Range part[capacity];
    int count = 0;
};

// One mask of the conjunction with what was looked up once for the whole call.
struct Reach {
    const Mask* mask = nullptr;
    const Range* document = nullptr;  // (B | 1, Lq): the first and one past the last key with the query's number
    const Range* real = nullptr;      // (B | 1): the first and one past the last key that is not padding
    const uint8_t* solid = nullptr;   // (B | 1): whether all keys between those are real
    bool document_batch = false, real_batch = false;
};

// A block of queries of one item, over the keys in `keys`. Lane l is query `query + l % queries` of head
// `head + l / queries`; all `heads` share one key/value head.
struct Task {
    int64_t b = 0, head = 0, heads = 1, query = 0, queries = 0;
    Range keys;
    int64_t piece = -1;  // where the partial result goes if the keys are split; -1: the task is the whole of it
    double cost = 0;     // (query, key) pairs to be computed, about
};

// Plain pointers only: kernels for different instruction sets read it.
struct Plan {
    const Call* call = nullptr;
    const Reach* reach = nullptr;  // one per mask of the conjunction
    int reach_count = 0;
    int64_t* const* sums = nullptr;  // per question: fixed-point sums over queries, or null (sums.h)
    int32_t* locks = nullptr;         // (B, Hq): taken while a task adds to the sums of a head
};

// A plan and the memory behind it. Cost of making one: linear in Lq + Lk, constant without documents and padding.
struct OwnedPlan : Plan {
    explicit OwnedPlan(const Call& call);
    OwnedPlan(const OwnedPlan&) = delete;

  private:
    std::vector<Reach> masks_;
    std::vector<std::vector<Range>> ranges_;
    std::vector<std::vector<uint8_t>> flags_;
};

// The keys that any of these queries may see: the rest need not be touched. Clipped to `task.keys`.
Ranges visible_ranges(const Plan& plan, const Task& task);

// How many keys `visible_ranges` holds.
int64_t keys_in(const Ranges& ranges);

}  // namespace clearhead
