// Stretches of a chunk's keys that belong together: neighbours with the same segment number, or in the same column
// of a map. Contiguous segments make one or two to a chunk, scattered ones up to one for each key.
#pragma once

#include "block.h"

namespace clearhead {
namespace {

// Keys from … to - 1 of a chunk, seen by the vectors v0 … v1 - 1 alone.
struct Stretch {
    int32_t from, to, number;
    int16_t v0, v1;
};

struct Stretches {
    static constexpr int most = chunk_keys + chunk_keys / run_keys + 1;
    Stretch* part = nullptr;  // [most]
    int count = 0;

    // end(from, limit, &number): where the stretch ends that begins at `from`, and its number.
    template <class End>
    void cut(const Run* runs, int found, const End& end) {
        count = 0;
        for (int n = 0; n < found; ++n) {
            if (runs[n].v0 == runs[n].v1) continue;
            const int64_t limit = runs[n].low + runs[n].count;
            for (int64_t from = runs[n].low; from < limit;) {
                Stretch& here = part[count++];
                const int64_t to = end(from, limit, here.number);
                here.from = static_cast<int32_t>(from);
                here.to = static_cast<int32_t>(to);
                here.v0 = static_cast<int16_t>(runs[n].v0);
                here.v1 = static_cast<int16_t>(runs[n].v1);
                from = to;
            }
        }
    }

    // By segment numbers; ids: of the chunk's first key on.
    void by_ids(const Run* runs, int found, const int32_t* ids) {
        cut(runs, found, [&](int64_t from, int64_t limit, int32_t& number) {
            number = ids[from];
            int64_t to = from + 1;
            for (; to + W <= limit; to += W)
                if (any(*reinterpret_cast<const vi_loose*>(ids + to) != same_int(number))) break;
            while (to < limit && ids[to] == number) ++to;
            return to;
        });
    }

    // By the columns of a map: column c covers keys from c * Lk / columns on.
    void by_columns(const Run* runs, int found, int64_t low, int64_t Lk, int64_t columns) {
        cut(runs, found, [&](int64_t from, int64_t limit, int32_t& number) {
            const int64_t column = ((low + from + 1) * columns - 1) / Lk;
            const int64_t edge = (column + 1) * Lk / columns - low;
            number = static_cast<int32_t>(column);
            return edge < limit ? edge : limit;
        });
    }
};

}  // namespace
}  // namespace clearhead
