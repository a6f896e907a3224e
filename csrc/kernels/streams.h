// Rows as they are stored, read in vectors of floats: what lets the decode kernel have one loop for all types.
//
// A type brings two loads. `vector_at` gives W numbers in their order. `pair_at` gives two vectors that hold the
// same 2 W numbers in whatever order is cheapest: where `interleaved` is set the first has the even ones and the
// second the odd ones. The factor of an int8 row is not this file's business.
#pragma once

#include "convert.h"

namespace clearhead {
namespace {

struct Pair {
    vf a, b;
};

template <typename T>
constexpr bool interleaved = false;
template <>
constexpr bool interleaved<Bf16> = true;

CLEARHEAD_INLINE vf vector_at(const float* from) { return load(from); }

CLEARHEAD_INLINE vf vector_at(const Bf16* from) {
    typedef uint16_t halves __attribute__((vector_size(W * 2)));
    halves x;
    __builtin_memcpy(&x, from, sizeof x);
    return floats_of(__builtin_convertvector(x, vi) << 16);
}

CLEARHEAD_INLINE vf vector_at(const F16* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    vf x;
    for (int i = 0; i < W; ++i) x[i] = from_f16(from[i].bits);
    return x;
#endif
}

CLEARHEAD_INLINE vf vector_at(const int8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    vf x;
    for (int i = 0; i < W; ++i) x[i] = static_cast<float>(from[i]);
    return x;
#endif
}

template <typename T>
CLEARHEAD_INLINE Pair pair_at(const T* from) {
    return {vector_at(from), vector_at(from + W)};
}

// One load brings both: a bfloat16 is the upper half of a float.
CLEARHEAD_INLINE Pair pair_at(const Bf16* from) {
    vi both;
    __builtin_memcpy(&both, from, sizeof both);
    return {floats_of(both << 16), floats_of(both & static_cast<int32_t>(0xffff0000))};
}

// Turns `columns` floats (a multiple of W) from their own order into that in which type T's pairs come, and back.
// Columns beyond the last whole pair keep their order.
template <typename T>
inline void to_stream_order(float* row, int64_t columns) {
    if constexpr (interleaved<T>) {
        for (int64_t t = 0; t + 2 * W <= columns; t += 2 * W) {
            float even[W], odd[W];
            for (int i = 0; i < W; ++i) {
                even[i] = row[t + 2 * i];
                odd[i] = row[t + 2 * i + 1];
            }
            store(row + t, load(even));
            store(row + t + W, load(odd));
        }
    }
}

template <typename T>
inline void to_natural_order(float* row, int64_t columns) {
    if constexpr (interleaved<T>) {
        for (int64_t t = 0; t + 2 * W <= columns; t += 2 * W) {
            const vf even = load(row + t), odd = load(row + t + W);
            store(row + t, interleave_low(even, odd));
            store(row + t + W, interleave_high(even, odd));
        }
    }
}

// How the rows of K or of V reach the products.
struct Stream {
    const Rows& rows;
    int64_t columns, wide;  // columns, and their number filled up to whole vectors
    bool staged;            // as floats: columns that are apart or no whole number of vectors
    Type type;              // as the products see it
    int64_t row_bytes;      // to be fetched ahead

    Stream(const Rows& of, int64_t width)
        : rows(of),
          columns(width),
          wide(padded(width)),
          staged(of.column != 1 || width % W != 0),
          type(staged ? Type::f32 : of.type),
          row_bytes(staged ? 0 : width * size_of(of.type)) {}

    bool scaled() const { return type == Type::i8; }

    // Addresses of the rows of a chunk, filled up to `room`, and their factors.
    void find(int64_t b, int64_t h, int64_t low, int64_t count, int64_t room, const char** at, float* scale) const {
        if (staged) return;
        const char* data = static_cast<const char*>(rows.data);
        const int64_t size = size_of(type), step = rows.row * size;
        for (int64_t i = 0; i < count;) {
            int64_t run = count - i;
            if (rows.table != nullptr) {
                const int64_t left = rows.page - (low + i) % rows.page;
                run = left < run ? left : run;
            }
            const char* from = data + row_offset(rows, b, h, low + i) * size;
            for (int64_t k = 0; k < run; ++k) at[i + k] = from + k * step;
            if (scaled())
                for (int64_t k = 0; k < run; ++k) scale[i + k] = row_scale(rows, b, h, low + i + k);
            i += run;
        }
        fill_up(count, room, at);
        if (scaled())
            for (int i = 0; i < W; ++i) scale[count + i] = 0.0f;
    }

    // Copies the rows of a chunk to `room` as floats, if they cannot be read where they lie.
    void stage(int64_t b, int64_t h, int64_t low, int64_t count, const char** at, float* room) const {
        if (!staged) return;
        for (int64_t i = 0; i < count; ++i) {
            float* row = room + i * wide;
            read_row(rows, b, h, low + i, columns, row);
            for (int64_t t = columns; t < wide; ++t) row[t] = 0.0f;
            at[i] = reinterpret_cast<const char*>(row);
        }
        fill_up(count, count, at);
    }

    // The last row again, so that there are `room` addresses and a multiple of any tile.
    static void fill_up(int64_t count, int64_t room, const char** at) {
        for (; count < room || count % W != 0; ++count) at[count] = at[count - 1];
    }
};

}  // namespace
}  // namespace clearhead
