// What one attention call is, in pointers, strides and sizes. Knows no tensor library and no Python.
//
// Axes: B batch, Hq query heads, Hkv key/value heads, Lq queries, Lk keys, d and dv head sizes of keys and of
// values. Strides count elements (never bytes), may be 0 or negative, and are 64 bits wide, as all sizes are.
// Memory that a call reads is never written to; what it writes to is named `out` or `d...`.
#pragma once

#include <cstdint>

namespace clearhead {

enum class Type : int32_t { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };

// An array (B, H, L, columns) that is read row by row.
struct Rows {
    const void* data = nullptr;
    Type type = Type::f32;
    int64_t batch = 0, head = 0, row = 0, column = 1;  // strides
    // i8: row (b, h, j) holds data * scale[b * scale_batch + h * scale_head + j * scale_row].
    const float* scale = nullptr;
    int64_t scale_batch = 0, scale_head = 0, scale_row = 0;
    // Paged: row j of item b is row j % page of block table[b * table_batch + j / page]. A block starts at
    // block number * batch (so `batch` is the stride from block to block, `scale_batch` likewise).
    const int32_t* table = nullptr;
    int64_t table_batch = 0, page = 0;
};

// Additive bias that broadcasts to (B, Hq, Lq, Lk): stride 0 along axes of size 1. -inf hides.
struct Bias {
    const void* data = nullptr;
    Type type = Type::f32;
    int64_t batch = 0, head = 0, query = 0, key = 0;
};

// Bias by distance alone (ALiBi, T5): values[h * head + (query position - key position) - first].
struct RelativeBias {
    const float* values = nullptr;
    int64_t head = 0;
    int64_t first = 0;  // the distance (query position - key position) of the first value
};

// Who sees whom: `clearhead.Mask`, bound to sizes. Key j sits at position key_offset + j, query i of item b at
// offset[b * offset_batch] + i. Every field narrows; so does `next`.
struct Mask {
    static constexpr int64_t no_limit = INT64_MAX;

    int64_t key_offset = 0;
    const int64_t* offset = nullptr;  // never null in a call
    int64_t offset_batch = 0;         // 0: one value for all items

    bool causal = false;                               // key position <= query position …
    const int64_t* prefix = nullptr;                   // … or key among the first `prefix` of its row or document
    int64_t prefix_batch = 0;
    const int64_t *block_query = nullptr, *block_key = nullptr;  // … or equal numbers >= 0, (B | 1, L)
    int64_t block_query_batch = 0, block_key_batch = 0;

    // Limits lie below 2^62 or are no_limit.
    int64_t left = no_limit, right = no_limit;  // query position - left <= key position <= query position + right …
    int64_t sinks = 0;                          // … or key among the first `sinks` of its row or document
    int64_t chunk = 0;                          // > 0: same floor((position - origin of the key) / chunk)

    const int64_t *document_query = nullptr, *document_key = nullptr;  // equal numbers, (B | 1, L)
    int64_t document_query_batch = 0, document_key_batch = 0;
    const uint8_t* real = nullptr;  // (B | 1, Lk), 0 = padding
    int64_t real_batch = 0;
    const int64_t* lengths = nullptr;  // (B,): keys from here on are not there (and not read)
    const int64_t* origin = nullptr;  // (B | 1, Lk): position where each key's row or document starts; null: 0
    int64_t origin_batch = 0;

    const uint8_t* dense = nullptr;  // broadcasts to (B, Hq, Lq, Lk): stride 0 along axes of size 1
    int64_t dense_batch = 0, dense_head = 0, dense_query = 0, dense_key = 0;

    const Mask* next = nullptr;  // a further mask that must hold too
};

// What is asked about the weights, exp(score - lse), of the chosen queries. Results are contiguous float32.
struct Question {
    enum class Kind : int32_t {
        segment_mass,    // out (B, Hq, R, segments)
        entropy,         // out (B, Hq, R), nats
        max_weight,      // out (B, Hq, R)
        mean_distance,   // out (B, Hq, R), |query position - key position|
        top_keys,        // out (B, Hq, R, count), index likewise, heaviest first; weight 0 and index -1 where missing
        key_mass,        // out (B, Hq, Lk): sum over the chosen queries
        pooled_mean,     // out (B, Hq, map_rows, map_columns): cell (r, c) covers chosen queries from
        pooled_max,      //     r * R / map_rows on and keys from c * Lk / map_columns on
        segment_output,  // out (B, Hq, R, segments, dv)
        segment_norm,    // out (B, Hq, R, segments): Euclidean lengths of the above
        weights,         // out (B, Hq, R, Lk)
    };
    Kind kind = Kind::entropy;
    const int32_t* place = nullptr;  // (Lq): the result row of each query, -1 where it is not chosen; places ascend
    int64_t R = 0;
    float* out = nullptr;
    int64_t* index = nullptr;
    const int32_t* ids = nullptr;  // (B | 1, Lk): segment numbers 0 … segments - 1
    int64_t ids_batch = 0;
    int64_t segments = 0;
    int64_t count = 0;
    int64_t map_rows = 0, map_columns = 0;
};

// Asked now and then on the calling thread; true ends the call early.
struct Interrupt {
    bool (*asked)(void*) = nullptr;
    void* context = nullptr;
};

struct Call {
    int64_t B = 0, Hq = 0, Hkv = 0, Lq = 0, Lk = 0, d = 0, dv = 0;
    Rows q, k, v;
    Mask mask;
    float scale = 1.0f;
    float softcap = 0.0f;  // c > 0: scores become c · tanh(score / c) before bias; 0: none
    Bias bias;
    RelativeBias relative;
    const float* sink_logits = nullptr;  // (Hq): one more logit per head, with weight and without value

    void* out = nullptr;  // (B, Hq, Lq, dv) in `out_type`, unit last stride
    Type out_type = Type::f32;
    int64_t out_batch = 0, out_head = 0, out_row = 0;
    float* lse = nullptr;  // (B, Hq, Lq), contiguous, natural logarithm; may be null

    const Question* questions = nullptr;
    int64_t question_count = 0;

    int threads = 1;
    Interrupt interrupt;
};

// The backward of a call: `out`, `lse` of its forward and the gradients that come in; float32 gradients out.
struct Backward {
    Rows out, dout;                                 // (B, Hq, Lq, dv); dout.data null: no gradient through out
    const float* lse = nullptr;                     // (B, Hq, Lq), contiguous
    const float* dlse = nullptr;                    // (B, Hq, Lq), contiguous, or null
    float *dq = nullptr, *dk = nullptr, *dv = nullptr;  // (B, Hq, Lq, d), (B, Hkv, Lk, d), (B, Hkv, Lk, dv), contiguous
};

enum class Status : int32_t { done = 0, interrupted = 1, no_memory = 2 };

Status forward(const Call& call);
Status backward(const Call& call, const Backward& gradients);

// Which compiled kernels run: "portable", "v3", "v4", "v4bf16", "v4amx". The best that the processor can run, unless
// chosen. `choose_isa` returns false if the processor cannot run it or it was not built.
const char* isa();
bool choose_isa(const char* name);
bool isa_available(const char* name);  // built and runnable here
bool isa_built(const char* name);

}  // namespace clearhead
