// Numbers gathered while the running maximum still rises, brought up to date only where they are touched.
//
// A row of lanes (the mass of a segment, say) is relative to the maximum at the chunk of keys in which it was last
// touched. That chunk's number is kept with the row, the maxima of all chunks are kept here, and what is gathered
// in one chunk after the other costs no exponential.
#pragma once

#include "block.h"

namespace clearhead {
namespace {

struct Timeline {
    float* peaks = nullptr;  // [chunk][block_lanes], the running maximum after each chunk
    int32_t now = -1;        // the chunk at hand

    // Factors that bring a vector of numbers from chunk `then` to the chunk at hand.
    CLEARHEAD_INLINE vf since(int32_t then, int v) const {
        return exp2(load(peaks + then * block_lanes + v * W) - load(peaks + now * block_lanes + v * W));
    }
};

// Rows of lanes that are touched now and then; all 0 before.
struct LazyRows {
    float* rows = nullptr;     // [number][height][block_lanes]
    int32_t* tags = nullptr;   // [number][block_vectors], the chunk that each was last touched in, or never
    int64_t numbers = 0, height = 1;

    static constexpr int32_t never = -1;

    static int64_t tag_count(int64_t numbers) { return numbers * block_vectors; }

    void open(float* memory, int32_t* tag_memory, int64_t count, int64_t rows_each) {
        rows = memory;
        tags = tag_memory;
        numbers = count;
        height = rows_each;
        for (int64_t i = 0; i < tag_count(numbers); ++i) tags[i] = never;
    }

    CLEARHEAD_INLINE float* row(int64_t number) const { return rows + number * height * block_lanes; }

    // Vector v of a row, relative to the maximum of the chunk at hand. `fade`: factors from the chunk before.
    CLEARHEAD_INLINE float* touch(int64_t number, int v, const Timeline& time, const float* fade) const {
        float* at = row(number) + v * W;
        int32_t& tag = tags[number * block_vectors + v];
        if (tag == time.now) return at;
        if (tag != never) scale(at, tag == time.now - 1 ? load(fade + v * W) : time.since(tag, v));
        tag = time.now;
        return at;
    }

    // Brings everything up to date and multiplies it by `share` [block_lanes].
    void settle(const Timeline& time, const float* share, int vectors) const {
        for (int64_t number = 0; number < numbers; ++number)
            for (int v = 0; v < vectors; ++v) {
                const int32_t tag = tags[number * block_vectors + v];
                if (tag != never) scale(row(number) + v * W, time.since(tag, v) * load(share + v * W));
            }
    }

  private:
    CLEARHEAD_INLINE void scale(float* at, vf factor) const {
        for (int64_t i = 0; i < height; ++i) store(at + i * block_lanes, load(at + i * block_lanes) * factor);
    }
};

}  // namespace
}  // namespace clearhead
