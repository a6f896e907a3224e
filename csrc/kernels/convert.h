// Rows of any storage type and layout as contiguous float32, and float32 as any output type.
#pragma once

#include "../core/call.h"
#include "simd.h"

namespace clearhead {
namespace {

CLEARHEAD_INLINE int64_t size_of(Type type) { return type == Type::f32 ? 4 : type == Type::i8 ? 1 : 2; }

CLEARHEAD_INLINE float float_of_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
CLEARHEAD_INLINE uint32_t bits_of_float(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

CLEARHEAD_INLINE float from_bf16(uint16_t x) { return float_of_bits(static_cast<uint32_t>(x) << 16); }

// To the nearest bfloat16, halves to even; NaN stays NaN.
CLEARHEAD_INLINE uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of_float(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_f16(uint16_t x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16, exponent = (x >> 10) & 31u, mantissa = x & 1023u;
    if (exponent == 31u) return float_of_bits(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0u) {  // zero or subnormal: mantissa * 2^-24
        const float size = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -size : size;
    }
    return float_of_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
#endif
}

inline uint16_t to_f16(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    const uint32_t bits = bits_of_float(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (size < 0x38800000u) {  // subnormal: adding 0.5 leaves multiples of 2^-24 in the low bits, rounded
        const uint32_t moved = bits_of_float(float_of_bits(size) + 0.5f);
        return static_cast<uint16_t>(sign | (moved - 0x3f000000u));
    }
    const uint32_t rounded = size + 0xfffu + ((size >> 13) & 1u) - 0x38000000u;
    return static_cast<uint16_t>(sign | (rounded >> 13));
#endif
}

// `count` floats from contiguous storage of each type.
inline void floats_from(const float* from, int64_t count, float* to) {
    __builtin_memcpy(to, from, static_cast<size_t>(count) * 4);
}

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

inline void floats_from(const Bf16* from, int64_t count, float* to) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
        store(to + i, reinterpret_cast<vf>(_mm512_slli_epi32(wide, 16)));
    }
#elif defined(__AVX2__)
    for (; i + 8 <= count; i += 8) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
        store(to + i, reinterpret_cast<vf>(_mm256_slli_epi32(wide, 16)));
    }
#endif
    for (; i < count; ++i) to[i] = from_bf16(from[i].bits);
}

inline void floats_from(const F16* from, int64_t count, float* to) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        store(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif defined(__AVX2__) && defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        store(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < count; ++i) to[i] = from_f16(from[i].bits);
}

inline void floats_from(const int8_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);  // the compiler widens in vectors
}

CLEARHEAD_INLINE float one_float(float x) { return x; }
CLEARHEAD_INLINE float one_float(Bf16 x) { return from_bf16(x.bits); }
CLEARHEAD_INLINE float one_float(F16 x) { return from_f16(x.bits); }
CLEARHEAD_INLINE float one_float(int8_t x) { return static_cast<float>(x); }

// `count` floats from `from` on, `column` elements apart.
template <typename T>
inline void floats_apart(const T* from, int64_t column, int64_t count, float* to) {
    if (column == 1) return floats_from(from, count, to);
    for (int64_t i = 0; i < count; ++i) to[i] = one_float(from[i * column]);
}

// Storage of a type that is known only at run time; `count` floats, `column` elements apart.
inline void floats_of_type(Type type, const void* data, int64_t offset, int64_t column, int64_t count, float* to) {
    switch (type) {
        case Type::f32: return floats_apart(static_cast<const float*>(data) + offset, column, count, to);
        case Type::bf16: return floats_apart(static_cast<const Bf16*>(data) + offset, column, count, to);
        case Type::f16: return floats_apart(static_cast<const F16*>(data) + offset, column, count, to);
        case Type::i8: return floats_apart(static_cast<const int8_t*>(data) + offset, column, count, to);
    }
}

// Where row j of item b and head h starts, in elements from `data`.
CLEARHEAD_INLINE int64_t row_offset(const Rows& rows, int64_t b, int64_t h, int64_t j) {
    if (rows.table == nullptr) return b * rows.batch + h * rows.head + j * rows.row;
    return rows.table[b * rows.table_batch + j / rows.page] * rows.batch + h * rows.head + j % rows.page * rows.row;
}

// The factor of an int8 row.
CLEARHEAD_INLINE float row_scale(const Rows& rows, int64_t b, int64_t h, int64_t j) {
    if (rows.table == nullptr) return rows.scale[b * rows.scale_batch + h * rows.scale_head + j * rows.scale_row];
    return rows.scale[rows.table[b * rows.table_batch + j / rows.page] * rows.scale_batch + h * rows.scale_head +
                      j % rows.page * rows.scale_row];
}

// One row as floats.
inline void read_row(const Rows& rows, int64_t b, int64_t h, int64_t j, int64_t count, float* to) {
    floats_of_type(rows.type, rows.data, row_offset(rows, b, h, j), rows.column, count, to);
    if (rows.type == Type::i8) {
        const float scale = row_scale(rows, b, h, j);
        for (int64_t i = 0; i < count; ++i) to[i] *= scale;
    }
}

// `count` contiguous floats to an output of any type, at element `offset`.
inline void write_floats(Type type, void* out, int64_t offset, int64_t count, const float* from) {
    if (type == Type::f32) {
        __builtin_memcpy(static_cast<float*>(out) + offset, from, static_cast<size_t>(count) * 4);
    } else if (type == Type::bf16) {
        uint16_t* to = static_cast<uint16_t*>(out) + offset;
        int64_t i = 0;
#if defined(__AVX512F__)
        for (; i + 16 <= count; i += 16) {
            const __m512i bits = reinterpret_cast<__m512i>(load(from + i)), one = _mm512_set1_epi32(1);
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
            const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
            const __mmask16 nan = _mm512_cmp_ps_mask(load(from + i), load(from + i), _CMP_UNORD_Q);
            const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
        }
#endif
        for (; i < count; ++i) to[i] = to_bf16(from[i]);
    } else {
        uint16_t* to = static_cast<uint16_t*>(out) + offset;
        for (int64_t i = 0; i < count; ++i) to[i] = to_f16(from[i]);
    }
}

// A run of rows as contiguous-column float32: where the first lies and how far apart they are.
struct Panel {
    const float* data;
    int64_t stride;
};

// Rows j … j + count of item b, head h. float32 rows with unit columns are used where they lie; all others are
// copied into `room` (count x columns floats).
inline Panel stage(const Rows& rows, int64_t b, int64_t h, int64_t j, int64_t count, int64_t columns, float* room) {
    const bool in_place = rows.type == Type::f32 && rows.column == 1 &&
                          (rows.table == nullptr || j / rows.page == (j + count - 1) / rows.page);
    if (in_place) return {static_cast<const float*>(rows.data) + row_offset(rows, b, h, j), rows.row};
    for (int64_t i = 0; i < count; ++i) read_row(rows, b, h, j + i, columns, room + i * columns);
    return {room, columns};
}

}  // namespace
}  // namespace clearhead
