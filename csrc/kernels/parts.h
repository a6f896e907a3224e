// The parts of the output that come from each segment: products of the weights of some keys with their values.
//
// Where a chunk is one stretch of keys, or a few, the mixing product brings the parts along: it runs from border
// to border, and what its sums gained since the last border is the segment's part (forward.h). Scattered
// segments take a product of their own, over the keys of each segment brought together.
#pragma once

#include "microkernel.h"
#include "stretches.h"
#include "timeline.h"

namespace clearhead {
namespace {

class Parts {
  public:
    explicit Parts(const Call& call) : dv_(call.dv) {}

    void open(Scratch& scratch) {
        running = scratch.take<float>(dv_ * block_lanes);
        weights_ = scratch.take<float>(chunk_keys * block_lanes);
        values_ = scratch.take<float>(chunk_keys * dv_);
    }

    static int64_t bytes(const Call& call) {
        return (call.dv * block_lanes + chunk_keys * (block_lanes + call.dv)) * 4 + 3 * 64;
    }

    float* running = nullptr;  // [dv][block_lanes], the mixing product's sums at the last border

    // Adds a chunk by products of its own.
    void add(const Block& block, const Panel& values, const Stretches& stretches, const LazyRows& rows, const Timeline& time,
             const float* fade) const {
        bool done[Stretches::most] = {};
        for (int n = 0; n < stretches.count; ++n) {
            if (done[n]) continue;
            const Stretch& first = stretches.part[n];
            int others = 0;
            for (int m = n + 1; m < stretches.count; ++m) others += stretches.part[m].number == first.number;
            if (others == 0) {
                multiply(block.weights + first.from * block_lanes, values.data + first.from * values.stride, values.stride,
                         first.to - first.from, first.v0, first.v1, first.number, rows, time, fade);
                continue;
            }
            int64_t depth = 0;
            for (int m = n; m < stretches.count; ++m) {
                const Stretch& here = stretches.part[m];
                if (here.number != first.number) continue;
                done[m] = true;
                for (int64_t j = here.from; j < here.to; ++j, ++depth) {
                    for (int v = 0; v < block.vectors; ++v) {
                        const bool seen = v >= here.v0 && v < here.v1;
                        store(weights_ + depth * block_lanes + v * W, seen ? load(block.weights + j * block_lanes + v * W) : vf{});
                    }
                    __builtin_memcpy(values_ + depth * dv_, values.data + j * values.stride, static_cast<size_t>(dv_) * 4);
                }
            }
            multiply(weights_, values_, dv_, depth, 0, block.vectors, first.number, rows, time, fade);
        }
    }

  private:
    void multiply(const float* weights, const float* values, int64_t stride, int64_t depth, int v0, int v1, int32_t number,
                  const LazyRows& rows, const Timeline& time, const float* fade) const {
        for (int v = v0; v < v1; ++v) rows.touch(number, v, time, fade);
        float* part = rows.row(number);
        product<Floats, Walk::across_rows>(
            values, stride, dv_, weights, block_lanes, depth, v0, v1, [&](int64_t row, int v, const auto& sums) __attribute__((always_inline)) {
                for_each(sums, [&](int r, int i, vf sum) __attribute__((always_inline)) {
                    float* to = part + (row + r) * block_lanes + (v + i) * W;
                    store(to, load(to) + sum);
                });
            });
    }

    int64_t dv_;
    float *weights_ = nullptr, *values_ = nullptr;
};

}  // namespace
}  // namespace clearhead
