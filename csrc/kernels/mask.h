// Which lanes see which key: one 64-bit word per key, for the queries of a task. Made only for chunks of keys
// that are neither wholly visible nor wholly hidden.
#pragma once

#include "../core/plan.h"
#include "simd.h"

namespace clearhead {
namespace {

CLEARHEAD_INLINE uint64_t first_bits(int64_t n) { return n >= 64 ? ~uint64_t{0} : n <= 0 ? 0 : (uint64_t{1} << n) - 1; }

// Bits low … high - 1.
CLEARHEAD_INLINE uint64_t bits_between(int64_t low, int64_t high) { return first_bits(high) & ~first_bits(low); }

// The queries of a task against the keys of one mask of the conjunction.
struct Sight {
    const Mask& m;
    int64_t b, query, queries;
    int64_t base;  // slot of the task's first query: it sees key j causally if j <= base + i
    bool documents = true;  // whether words have to look at them

    Sight(const Mask& mask, const Task& task)
        : m(mask),
          b(task.b),
          query(task.query),
          queries(task.queries),
          base(mask.offset[task.b * mask.offset_batch] - mask.key_offset + task.query) {}

    CLEARHEAD_INLINE int64_t origin(int64_t j) const { return m.origin == nullptr ? 0 : m.origin[b * m.origin_batch + j]; }

    // Whether key j is among the first `count` of its row or document.
    CLEARHEAD_INLINE bool leads(int64_t j, int64_t count) const {
        const int64_t place = m.key_offset + j - origin(j);
        return place >= 0 && place < count;
    }

    uint64_t equal(const int64_t* theirs, int64_t batch, int64_t number) const {
        const int64_t* own = theirs + b * batch + query;
        uint64_t word = 0;
        for (int64_t i = 0; i < queries; ++i) word |= static_cast<uint64_t>(own[i] == number) << i;
        return word;
    }

    // The queries that see key j, as far as everything but `dense` is concerned.
    uint64_t word(int64_t j) const {
        uint64_t seen = first_bits(queries);
        if (m.real != nullptr && !m.real[b * m.real_batch + j]) return 0;
        if (m.lengths != nullptr && j >= m.lengths[b]) return 0;
        const int64_t own = j - base;  // the query that sits where the key does
        if (m.causal) {
            uint64_t behind = ~first_bits(own);
            if (m.prefix != nullptr && leads(j, m.prefix[b * m.prefix_batch])) behind = ~uint64_t{0};
            if (m.block_key != nullptr) {
                const int64_t number = m.block_key[b * m.block_key_batch + j];
                if (number >= 0) behind |= equal(m.block_query, m.block_query_batch, number);
            }
            seen &= behind;
        }
        if (m.left != Mask::no_limit || m.right != Mask::no_limit) {
            uint64_t near = ~uint64_t{0};
            if (m.left != Mask::no_limit) near &= first_bits(own + m.left + 1);
            if (m.right != Mask::no_limit) near &= ~first_bits(own - m.right);
            if (m.sinks > 0 && leads(j, m.sinks)) near = ~uint64_t{0};
            seen &= near;
        }
        if (m.chunk > 0) {
            const int64_t start = origin(j), place = m.key_offset + j - start;
            const int64_t rest = place % m.chunk, low = place - (rest < 0 ? rest + m.chunk : rest);
            const int64_t from = start + low - m.key_offset - base;  // the first query of the key's chunk
            seen &= bits_between(from, from + m.chunk);
        }
        if (documents && m.document_key != nullptr)
            seen &= equal(m.document_query, m.document_query_batch, m.document_key[b * m.document_key_batch + j]);
        return seen;
    }

    // Whether all queries and the keys low … high - 1 belong to the same document.
    bool one_document(int64_t low, int64_t high) const {
        const int64_t* key = m.document_key + b * m.document_key_batch;
        const int64_t* own = m.document_query + b * m.document_query_batch + query;
        int64_t others = 0;
        for (int64_t j = low; j < high; ++j) others |= key[j] ^ own[0];
        for (int64_t i = 0; i < queries; ++i) others |= own[i] ^ own[0];
        return others == 0;
    }

    // Whether every query sees all keys low … high - 1 of this mask (false may also mean: not known).
    bool whole(const Reach& reach, int64_t low, int64_t high) const {
        if (m.dense != nullptr) return false;
        if (m.lengths != nullptr && high > m.lengths[b]) return false;
        if (m.causal && high - 1 > base) return false;
        if (m.left != Mask::no_limit && low < base + queries - 1 - m.left &&
            !(m.sinks >= high && m.origin == nullptr && m.key_offset == 0))
            return false;
        if (m.right != Mask::no_limit && high - 1 > base && high - 1 - base > m.right) return false;
        if (m.chunk > 0) {
            if (m.origin != nullptr) return false;
            const int64_t a = m.key_offset + low, z = m.key_offset + high - 1;
            const int64_t q = m.key_offset + base, p = q + queries - 1;
            if (floor_div(a) != floor_div(z) || floor_div(q) != floor_div(p) || floor_div(a) != floor_div(q)) return false;
        }
        if (m.document_key != nullptr && !one_document(low, high)) return false;
        if (m.real != nullptr) {
            const int64_t item = reach.real_batch ? b : 0;
            if (low < reach.real[item].low || high > reach.real[item].high || !reach.solid[item]) return false;
        }
        return true;
    }

    CLEARHEAD_INLINE int64_t floor_div(int64_t x) const {
        return (x - (x % m.chunk < 0 ? x % m.chunk + m.chunk : x % m.chunk)) / m.chunk;
    }

    // Narrows the words of keys low … low + count - 1 by the dense booleans of `head`.
    void narrow(int64_t head, int64_t low, int64_t count, uint64_t* words) const {
        const uint8_t* dense = m.dense + b * m.dense_batch + head * m.dense_head + low * m.dense_key;
        constexpr int64_t most = 256;
        uint64_t seen[most];
        for (int64_t from = 0; from < count; from += most) {
            const int64_t here = count - from < most ? count - from : most;
            for (int64_t j = 0; j < here; ++j) seen[j] = 0;
            for (int64_t i = 0; i < queries; ++i) {
                const uint8_t* row = dense + (query + i) * m.dense_query + from * m.dense_key;
                if (m.dense_key == 1) {
                    for (int64_t j = 0; j < here; ++j) seen[j] |= static_cast<uint64_t>(row[j] != 0) << i;
                } else {
                    for (int64_t j = 0; j < here; ++j) seen[j] |= static_cast<uint64_t>(row[j * m.dense_key] != 0) << i;
                }
            }
            for (int64_t j = 0; j < here; ++j) words[from + j] &= seen[j];
        }
    }
};

// The visible lanes of keys low … low + count - 1. Returns false, and leaves `words` alone, if all lanes see all.
inline bool visible_words(const Plan& plan, const Task& task, int64_t low, int64_t count, uint64_t* words) {
    bool whole = true, by_head = false;
    for (int i = 0; i < plan.reach_count && whole; ++i)
        whole = Sight(*plan.reach[i].mask, task).whole(plan.reach[i], low, low + count);
    if (whole) return false;
    for (int64_t j = 0; j < count; ++j) words[j] = first_bits(task.queries);
    for (const Mask* m = &plan.call->mask; m != nullptr; m = m->next) {
        Sight sight(*m, task);
        sight.documents = m->document_key != nullptr && !sight.one_document(low, low + count);
        for (int64_t j = 0; j < count; ++j)
            if (words[j] != 0) words[j] &= sight.word(low + j);
        if (m->dense != nullptr && m->dense_head == 0) sight.narrow(task.head, low, count, words);
        by_head |= m->dense != nullptr && m->dense_head != 0;
    }
    if (task.heads == 1) {
        for (const Mask* m = &plan.call->mask; m != nullptr && by_head; m = m->next)
            if (m->dense != nullptr && m->dense_head != 0) Sight(*m, task).narrow(task.head, low, count, words);
        return true;
    }
    // Several heads lie side by side in the lanes: repeat what they share, then narrow each by its own booleans.
    for (int64_t j = 0; j < count; ++j) {
        uint64_t all = 0;
        for (int64_t g = 0; g < task.heads; ++g) {
            uint64_t one = words[j];
            for (const Mask* m = &plan.call->mask; m != nullptr && by_head; m = m->next)
                if (m->dense != nullptr && m->dense_head != 0) Sight(*m, task).narrow(task.head + g, low + j, 1, &one);
            all |= one << (g * task.queries);
        }
        words[j] = all;
    }
    return true;
}

// Keys in a row whose visible lanes all lie in the vectors v0 … v1 - 1; the others are passed over.
struct Run {
    int64_t low, count;
    int v0, v1;
};

// Runs begin at multiples of this many keys of a chunk.
#if defined(__AMX_BF16__)
constexpr int64_t run_keys = 32;  // the depth of the tile unit
#else
constexpr int64_t run_keys = W;
#endif

// Cuts a chunk into runs.
inline int runs_of(const uint64_t* words, int64_t count, int vectors, Run* runs) {
    if (words == nullptr) {
        runs[0] = {0, count, 0, vectors};
        return 1;
    }
    int found = 0;
    for (int64_t j = 0; j < count; j += run_keys) {
        const int64_t here = count - j < run_keys ? count - j : run_keys;
        uint64_t seen = 0;
        for (int64_t i = 0; i < here; ++i) seen |= words[j + i];
        int v0 = 0, v1 = 0;
        if (seen != 0) {
            v0 = __builtin_ctzll(seen) / W;
            v1 = (63 - __builtin_clzll(seen)) / W + 1;
        }
        if (found > 0 && runs[found - 1].v0 == v0 && runs[found - 1].v1 == v1) {
            runs[found - 1].count += here;
        } else {
            runs[found++] = {j, here, v0, v1};
        }
    }
    return found;
}

}  // namespace
}  // namespace clearhead
