// Vectors of W floats and the few operations that the kernels need, for whichever instruction set this unit is
// compiled for. Plain operators come from the compiler's vector extensions; intrinsics stand only where those
// fall short (maximum, exp2, conversions).
//
// Nothing here has external linkage: units for different instruction sets must not share a function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace clearhead {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;            // floats in a vector
constexpr int tile_vectors = 4;  // vectors across a register tile: 4 rows x 4 vectors = 16 of 32 registers
constexpr int block_vectors = 4;
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int tile_vectors = 3;  // 4 rows x 3 vectors = 12 of 16 registers
constexpr int block_vectors = 6;
#else
constexpr int W = 4;
constexpr int tile_vectors = 3;
constexpr int block_vectors = 12;
#endif

constexpr int block_lanes = block_vectors * W;  // queries that one block computes side by side; at most 64
static_assert(block_lanes <= 64, "the visible lanes of a key are a 64-bit word");

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));  // arithmetic that wraps around
typedef float vf_loose __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi_loose __attribute__((vector_size(W * 4), aligned(4), may_alias));

#define CLEARHEAD_INLINE [[gnu::always_inline]] inline

CLEARHEAD_INLINE vf load(const float* from) { return *reinterpret_cast<const vf_loose*>(from); }
CLEARHEAD_INLINE void store(float* to, vf x) { *reinterpret_cast<vf_loose*>(to) = x; }
CLEARHEAD_INLINE vf same(float x) { return x - vf{}; }  // x - 0 is x, so the compiler sees a broadcast
CLEARHEAD_INLINE vi same_int(int32_t x) { return x - vi{}; }
CLEARHEAD_INLINE vi bits_of(vf x) { return reinterpret_cast<vi>(x); }
CLEARHEAD_INLINE vu plain_bits_of(vf x) { return reinterpret_cast<vu>(x); }
CLEARHEAD_INLINE vf floats_of(vu x) { return reinterpret_cast<vf>(x); }
CLEARHEAD_INLINE vf floats_of(vi x) { return reinterpret_cast<vf>(x); }
CLEARHEAD_INLINE vf choose(vi where, vf yes, vf no) { return where ? yes : no; }

CLEARHEAD_INLINE vi lane_numbers() {
    vi lanes{};
    for (int i = 0; i < W; ++i) lanes[i] = i;
    return lanes;
}

// The larger of two; `b` where `a` is not a number, so a running maximum in `b` ignores NaN.
CLEARHEAD_INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return choose(a > b, a, b);
#endif
}

// All bits set in the lanes whose bit in `word` is set.
CLEARHEAD_INLINE vi lanes_in(uint64_t word) {
    return (same_int(static_cast<int32_t>(word)) & (same_int(1) << lane_numbers())) != 0;
}

// Whether any lane of a comparison holds.
CLEARHEAD_INLINE bool any(vi where) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(where), reinterpret_cast<__m512i>(where)) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_epi8(reinterpret_cast<__m256i>(where)) != 0;
#else
    int32_t either = 0;
    for (int i = 0; i < W; ++i) either |= where[i];
    return either != 0;
#endif
}

// 2^x for x below 128, relative error below 2e-7 for results that are normal numbers; 0 for -inf, NaN for NaN.
CLEARHEAD_INLINE vf exp2(vf x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const vf f = _mm512_reduce_ps(x, 9);  // x - floor(x) in 0 … 1; 0 for infinities
    // Minimax polynomial of degree 5 for 2^f on 0 … 1, exact at 0; relative error 8.3e-8.
    vf p = f * 0x1.e974fap-10f + 0x1.277856p-7f;
    p = p * f + 0x1.c91ce6p-5f;
    p = p * f + 0x1.ebdb56p-3f;
    p = p * f + 0x1.62e4bap-1f;
    p = p * f + 1.0f;
    return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
#else
    // Nearest integer by adding 1.5 * 2^23, the fraction in -½ … ½, a polynomial of degree 6.
    const vf cut = larger(same(-127.0f), x);  // in this order NaN stays NaN
    const vf magic = same(12582912.0f);
    const vf shifted = cut + magic;
    const vf f = cut - (shifted - magic);
    vf p = f * 0x1.41fbbcp-13f + 0x1.5f3e52p-10f;
    p = p * f + 0x1.3b2d4cp-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e43p-1f;
    p = p * f + 1.0f;
    // The exponent: the integer sits in the low bits of `shifted`. -127 gives exponent field 0: exactly 0 below.
    const vu power = (plain_bits_of(shifted) + 127u) << 23;
    return p * floats_of(power);
#endif
}

// log2 of a positive normal number, absolute error below 1e-7 + rounding; -inf for 0, NaN for NaN.
CLEARHEAD_INLINE vf log2(vf x) {
    const vu bits = plain_bits_of(x);
    const vi shifted = reinterpret_cast<vi>(bits - 0x3f3504f3u);  // so that the mantissa lies in √½ … √2
    const vi power = shifted >> 23;
    const vf m = floats_of(bits - (reinterpret_cast<vu>(power) << 23)) - 1.0f;
    // log(1 + m): the polynomial of Cephes' logf (Moshier).
    vf p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const vf square = m * m;
    const vf natural = m + (square * (m * p - 0.5f));
    const vf result = natural * 1.44269504f + __builtin_convertvector(power, vf);
    const vf proper = choose((x > 0.0f) | (x == 0.0f), result, x);  // NaN and negative numbers pass through
    const vf infinite = choose(x == same(__builtin_inff()), x, proper);
    return choose(x == 0.0f, same(-__builtin_inff()), infinite);
}

// tanh, relative error a few units in the last place (Cephes' tanhf, Moshier).
CLEARHEAD_INLINE vf tanh(vf x) {
    const vf size = floats_of(bits_of(x) & 0x7fffffff);
    const vf z = x * x;
    vf p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const vf near = x + x * z * p;
    const vf most = same(44.0f);  // 1 from far below that on
    const vf far = 1.0f - 2.0f / (exp2(choose(size < most, size, most) * 2.88539008f) + 1.0f);
    const vf signed_far = floats_of(bits_of(far) | (bits_of(x) & static_cast<int32_t>(0x80000000)));
    return choose(size < 0.625f, near, choose(x == x, signed_far, x));
}

// a0 b0 a1 b1 …: the first half of two vectors interleaved, and the second half.
CLEARHEAD_INLINE vf interleave_low(vf a, vf b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}
CLEARHEAD_INLINE vf interleave_high(vf a, vf b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Transposes W vectors of W floats in registers: log2(W) rounds of interleaving the halves (a perfect shuffle).
CLEARHEAD_INLINE void transpose(vf (&x)[W]) {
    for (int round = 1; round < W; round *= 2) {
        vf y[W];
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; ++i) {
            y[2 * i] = interleave_low(x[i], x[i + W / 2]);
            y[2 * i + 1] = interleave_high(x[i], x[i + W / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) x[i] = y[i];
    }
}

// Sum and largest over the lanes.
CLEARHEAD_INLINE float sum_of(vf x) {
    float lanes[W], total = 0.0f;
    store(lanes, x);
    for (int step = W / 2; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    total = lanes[0];
    return total;
}

}  // namespace
}  // namespace clearhead
