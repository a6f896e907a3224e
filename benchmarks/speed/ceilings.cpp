// What the processor can do at best: multiply and add in registers, and read memory. No part of the product.
//
// Each loop is written once as a macro and compiled per instruction set by a function attribute; the caller
// asks only for those that the processor has. Accumulators are single variables of a fully unrolled array:
// one that is initialised or stored by a loop that stays a loop lives on the stack, and halves the rate.
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#endif

namespace {

constexpr int chains = 12;  // independent sums: two units with four cycles of latency need at least eight

volatile float seed = 0.999f;
thread_local volatile float sink;

#define FMA_LOOP(name, attributes, Vector, broadcast, step, add_up)             \
    attributes void name(int64_t count) {                                       \
        const float start = seed;                                               \
        Vector sums[chains];                                                    \
        const Vector factor = broadcast(start);                                 \
        _Pragma("GCC unroll 16") for (int i = 0; i < chains; ++i) sums[i] = broadcast(start); \
        for (int64_t n = 0; n < count; ++n) {                                   \
            _Pragma("GCC unroll 16") for (int i = 0; i < chains; ++i) {         \
                step(sums[i], factor);                                          \
                asm volatile("" : "+" REGISTER(sums[i]));                       \
            }                                                                   \
        }                                                                       \
        float total = 0;                                                        \
        _Pragma("GCC unroll 16") for (int i = 0; i < chains; ++i) total += add_up(sums[i]); \
        sink = total;                                                           \
    }

// The empty asm keeps each step as it is: without it, a compiler may prove what the sums converge to.
#if defined(__x86_64__)
#define REGISTER(x) "v"(x)
#else
#define REGISTER(x) "w"(x)
#endif

typedef float Four __attribute__((vector_size(16)));
#define FOUR_BROADCAST(x) (Four{x, x, x, x})
#define FOUR_STEP(sum, factor) sum = sum * factor + factor
#define FIRST(sum) (sum[0])
FMA_LOOP(fma_base, , Four, FOUR_BROADCAST, FOUR_STEP, FIRST)

#if defined(__x86_64__)
#define TARGET(flags) __attribute__((target(flags)))
#define STEP_256(sum, factor) sum = _mm256_fmadd_ps(sum, factor, factor)
FMA_LOOP(fma_avx2, TARGET("avx2,fma"), __m256, _mm256_set1_ps, STEP_256, FIRST)

#define STEP_512(sum, factor) sum = _mm512_fmadd_ps(sum, factor, factor)
FMA_LOOP(fma_avx512, TARGET("avx512f"), __m512, _mm512_set1_ps, STEP_512, FIRST)

#define STEP_BF16(sum, factor) \
    sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(factor), reinterpret_cast<__m512bh>(factor))
FMA_LOOP(dot_bf16, TARGET("avx512f,avx512bf16"), __m512, _mm512_set1_ps, STEP_BF16, FIRST)
#endif

#if defined(TILES)
// The tile unit (AMX): 16 × 16 sums, each of 32 products of bfloat16, per instruction. Four sums at a time, as
// in a matrix product with two tiles of each factor, hide its latency.
constexpr int tiles = 4;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

const TileShapes shapes;  // not a local: g++ 12 believes that only its first 8 bytes are read

TARGET("amx-tile,amx-bf16") void dot_tiles(int64_t count) {
    _tile_loadconfig(&shapes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t n = 0; n < count; ++n) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}

// The system lends the tiles to a process that asks (Linux: arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool tiles_lent() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#endif

// Every line is asked for some lines ahead: what the hardware fetches by itself leaves up to a third undone.
constexpr int64_t line = 64, ahead = 24 * line;

#define READ_LOOP(name, attributes, Vector, zero, load, combine, fold)                           \
    attributes uint64_t name(const char* from, const char* end) {                                \
        constexpr int64_t size = sizeof(Vector), per_step = 4 * line;                            \
        Vector sums[4];                                                                          \
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) sums[i] = zero;                      \
        for (; from + per_step <= end; from += per_step) {                                       \
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) __builtin_prefetch(from + ahead + i * line); \
            _Pragma("GCC unroll 16") for (int64_t i = 0; i < per_step / size; ++i)               \
                sums[i % 4] = combine(sums[i % 4], load(from + i * size));                       \
        }                                                                                        \
        return fold(combine(combine(sums[0], sums[1]), combine(sums[2], sums[3])));              \
    }

typedef uint64_t Two __attribute__((vector_size(16), aligned(1), may_alias));
#define TWO_LOAD(p) (*reinterpret_cast<const Two*>(p))
#define TWO_COMBINE(a, b) ((a) ^ (b))
#define TWO_FOLD(a) ((a)[0])
READ_LOOP(read_base, , Two, (Two{0, 0}), TWO_LOAD, TWO_COMBINE, TWO_FOLD)

#if defined(__x86_64__)
#define LOAD_256(p) _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
#define FOLD(a) static_cast<uint64_t>((a)[0])
READ_LOOP(read_avx2, TARGET("avx2"), __m256i, _mm256_setzero_si256(), LOAD_256, _mm256_xor_si256, FOLD)

#define LOAD_512(p) _mm512_loadu_si512(p)
READ_LOOP(read_avx512, TARGET("avx512f"), __m512i, _mm512_setzero_si512(), LOAD_512, _mm512_xor_si512, FOLD)
#endif

struct Loop {
    void (*multiply)(int64_t);
    double operations;  // of one step
    uint64_t (*read)(const char*, const char*);
};

// In the order of `KINDS` in ceilings.py.
const Loop loops[] = {
    {fma_base, chains * 2 * 4, read_base},
#if defined(__x86_64__)
    {fma_avx2, chains * 2 * 8, read_avx2},
    {fma_avx512, chains * 2 * 16, read_avx512},
    {dot_bf16, chains * 2 * 32, read_avx512},
#endif
#if defined(TILES)
    {dot_tiles, tiles * 2 * 16 * 16 * 32, read_avx512},
#endif
};

}  // namespace

extern "C" {

// Whether the system lets this process use what a loop needs.
bool allowed(int kind) {
#if defined(TILES)
    return loops[kind].multiply != dot_tiles || tiles_lent();
#else
    return loops[kind].multiply != nullptr;
#endif
}

// Operations (a product and a sum are two) of `multiply` on one thread.
double operations(int kind, int64_t count) {
    return loops[kind].operations * static_cast<double>(count);
}

// `count` steps on each thread.
void multiply(int kind, int64_t count, int threads) {
#pragma omp parallel num_threads(threads)
    loops[kind].multiply(count);
}

// Read `parts` stretches of memory once, each divided among the threads.
uint64_t read_all(int kind, const char* const* starts, const int64_t* bytes, int parts, int threads) {
    uint64_t all = 0;
#pragma omp parallel for num_threads(threads) reduction(^ : all) schedule(static, 1)
    for (int thread = 0; thread < threads; ++thread) {
        for (int part = 0; part < parts; ++part) {
            const int64_t lines = bytes[part] / line;
            const char* from = starts[part] + lines * thread / threads * line;
            const char* end = starts[part] + lines * (thread + 1) / threads * line;
            all ^= loops[kind].read(from, end);
        }
    }
    return all;
}
}
