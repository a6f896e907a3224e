// Which instruction set's kernels run: the best that was built and that the processor has, unless one is chosen.
#include <atomic>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace clearhead {
namespace {

struct Entry {
    const char* name;
    const Kernels& (*kernels)();  // null if it was not built
    bool (*runs_here)();
};

#if defined(__x86_64__) || defined(__i386__)
bool has_v3() { return __builtin_cpu_supports("x86-64-v3"); }
bool has_v4() { return __builtin_cpu_supports("x86-64-v4"); }
bool has_v4bf16() {
    return has_v4() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
// The tile unit needs the kernel's permission, once per process: its registers are large.
bool has_v4amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!has_v4bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    if ((d & amx_bf16) == 0 || (d & amx_tile) == 0) return false;
    constexpr int request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#else
bool has_v4amx() { return false; }
bool has_v3() { return false; }
bool has_v4() { return false; }
bool has_v4bf16() { return false; }
#endif
bool always() { return true; }

#if defined(CLEARHEAD_HAS_V3)
constexpr auto v3 = kernels_v3;
#else
constexpr const Kernels& (*v3)() = nullptr;
#endif
#if defined(CLEARHEAD_HAS_V4)
constexpr auto v4 = kernels_v4;
#else
constexpr const Kernels& (*v4)() = nullptr;
#endif
#if defined(CLEARHEAD_HAS_V4AMX)
constexpr auto v4amx = kernels_v4amx;
#else
constexpr const Kernels& (*v4amx)() = nullptr;
#endif
#if defined(CLEARHEAD_HAS_V4BF16)
constexpr auto v4bf16 = kernels_v4bf16;
#else
constexpr const Kernels& (*v4bf16)() = nullptr;
#endif

const Entry entries[] = {  // best first
    {"v4amx", v4amx, has_v4amx},
    {"v4bf16", v4bf16, has_v4bf16},
    {"v4", v4, has_v4},
    {"v3", v3, has_v3},
    {"portable", kernels_portable, always},
};

const Entry* find(const char* name) {
    for (const Entry& entry : entries)
        if (std::strcmp(entry.name, name) == 0) return &entry;
    return nullptr;
}

// Intel's VDPBF16PS does half of what its float32 multiply-adds do (33 against 64 operations a cycle on Sapphire
// Rapids), AMD's twice as much: there bfloat16 is better widened to float32. It can still be chosen by name.
bool slow_here(const Entry& entry) {
#if defined(__x86_64__) || defined(__i386__)
    return entry.kernels == v4bf16 && __builtin_cpu_is("intel");
#else
    (void)entry;
    return false;
#endif
}

bool usable(const Entry& entry) { return entry.kernels != nullptr && entry.runs_here(); }

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* now = chosen.load(std::memory_order_acquire);
    if (now == nullptr) {
        for (const Entry& entry : entries) {
            if (!usable(entry) || slow_here(entry)) continue;
            now = &entry.kernels();
            break;
        }
        chosen.store(now, std::memory_order_release);
    }
    return *now;
}

const char* isa() { return kernels().name; }

bool isa_built(const char* name) {
    const Entry* entry = find(name);
    return entry != nullptr && entry->kernels != nullptr;
}

bool isa_available(const char* name) {
    const Entry* entry = find(name);
    return entry != nullptr && usable(*entry);
}

bool choose_isa(const char* name) {
    if (!isa_available(name)) return false;
    chosen.store(&find(name)->kernels(), std::memory_order_release);
    return true;
}

}  // namespace clearhead
