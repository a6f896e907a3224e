// The table of kernels that each instruction set provides. Compiled once per instruction set from the same source.
#pragma once

#include "plan.h"

namespace clearhead {

// What blocks over split keys leave behind for the join.
struct Pieces {
    float* results = nullptr;    // piece_floats each
    float* scores = nullptr;     // [piece][rows][lanes], if any question is asked; else null
    int64_t rows = 0;            // keys of a piece, and room for what is computed beyond its last
};

// Where a backward task leaves its gradients.
struct GradientPlaces {
    float* dq = nullptr;  // [heads][queries][d], contiguous
    float *dk = nullptr, *dv = nullptr;  // [keys][d] and [keys][dv], rows …
    int64_t dk_row = 0, dv_row = 0;      // … this far apart: at least d and dv, and multiples of `width`
};

struct BackwardKernels {
    int width;  // floats of a vector

    // All queries of a task (any number of them if it is one head) against its keys: sets what `places` holds.
    // `scratch`: bytes(call, keys) bytes, 64-byte aligned, where `keys` is the most that any task has.
    int64_t (*bytes)(const Call& call, int64_t keys);
    void (*task)(const Plan& plan, const Backward& gradients, const Task& task, char* scratch,
                 const GradientPlaces& places);
};

struct Kernels {
    const char* name;
    int lanes;  // queries that a block computes side by side, at most 64

    // A block of queries against its keys. `scratch`: block_scratch(plan, keys) bytes, 64-byte aligned, where `keys`
    // is the most that any block sees. If task.piece >= 0 the unfinished result goes to `pieces`.
    int64_t (*block_scratch)(const Plan& plan, int64_t keys);
    void (*block)(const Plan& plan, const Task& task, char* scratch, const Pieces& pieces);

    // Joins pieces first … first + count - 1, which hold the same block over disjoint keys, into the call's results.
    void (*join)(const Plan& plan, const Task& task, char* scratch, const Pieces& pieces, int64_t first, int64_t count);

    // For calls that `decodes` says yes to: all queries and heads of a key/value head in one task (decode.h). `scratch`:
    // decode_scratch(plan) bytes. If task.piece >= 0 the unfinished result goes to `piece`, decode_piece_floats(call)
    // floats. `exponents`: 2 * rows * Lk floats for each key/value head, if any question is asked; else null.
    bool (*decodes)(const Call& call);
    int64_t (*decode_scratch)(const Plan& plan);
    int64_t (*decode_piece_floats)(const Call& call);
    void (*decode)(const Plan& plan, const Task& task, char* scratch, float* piece, float* exponents);
    void (*decode_join)(const Plan& plan, const Task& task, char* scratch, const float* pieces, int64_t count, float* exponents);

    BackwardKernels backward;
};

// Floats of one unfinished block: per lane the maximum and the sum, then dv values.
inline int64_t piece_floats(const Call& call, int lanes) { return lanes * (2 + call.dv); }

const Kernels& kernels_portable();
const Kernels& kernels_v3();
const Kernels& kernels_v4();
const Kernels& kernels_v4bf16();
const Kernels& kernels_v4amx();

// The kernels in use (dispatch.cpp).
const Kernels& kernels();

}  // namespace clearhead
