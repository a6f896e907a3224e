// Sums over queries, which tasks of several threads add to: integers add up to the same bits in any order.
#pragma once

#include "simd.h"

namespace clearhead {
namespace {

constexpr double fixed_point = 0x1p40;             // weights are at most 1: 2^22 queries fit
constexpr int64_t not_a_number = int64_t{1} << 62;  // this bit of a fixed-point sum says that a term was NaN

CLEARHEAD_INLINE int64_t to_fixed(float x) { return static_cast<int64_t>(static_cast<double>(x) * fixed_point + 0.5); }

CLEARHEAD_INLINE void add_fixed(int64_t* to, float x) {
    if (x == x) {
        if (x != 0.0f) __atomic_fetch_add(to, to_fixed(x), __ATOMIC_RELAXED);
    } else {
        __atomic_fetch_or(to, not_a_number, __ATOMIC_RELAXED);
    }
}

// The larger of two floats >= 0 whatever the order of threads: their bits compare as integers. NaN is largest.
CLEARHEAD_INLINE void raise_to(float* to, float x) {
    uint32_t mine, theirs;
    __builtin_memcpy(&mine, &x, 4);
    mine &= 0x7fffffffu;
    uint32_t* place = reinterpret_cast<uint32_t*>(to);
    theirs = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (mine > theirs && !__atomic_compare_exchange_n(place, &theirs, mine, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// Held while many numbers in a row are added: an atomic addition each costs ten times as much. It is held for some
// hundred cycles in ten thousand.
class Held {
  public:
    explicit Held(int32_t* lock) : lock_(lock) {
        while (__atomic_exchange_n(lock_, 1, __ATOMIC_ACQUIRE) != 0)
            while (__atomic_load_n(lock_, __ATOMIC_RELAXED) != 0) {
#if defined(__x86_64__)
                _mm_pause();
#endif
            }
    }
    ~Held() { __atomic_store_n(lock_, 0, __ATOMIC_RELEASE); }
    Held(const Held&) = delete;

  private:
    int32_t* lock_;
};

}  // namespace
}  // namespace clearhead
