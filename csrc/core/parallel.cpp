#include "parallel.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace clearhead {
namespace {

struct Freed {
    void operator()(char* memory) const { std::free(memory); }
};

constexpr int64_t kept_bytes = int64_t{64} << 20;  // a thread keeps at most this much between calls

struct Held {
    std::unique_ptr<char, Freed> memory;
    int64_t bytes = 0;
};

thread_local Held held;

// Passes the question on to the caller, not too often.
class Patience {
  public:
    explicit Patience(const Interrupt& interrupt) : interrupt_(interrupt) {}

    bool lost() {
        if (interrupt_.asked == nullptr) return false;
        const auto now = std::chrono::steady_clock::now();
        if (now - last_ < std::chrono::milliseconds(50)) return false;
        last_ = now;
        return interrupt_.asked(interrupt_.context);
    }

  private:
    const Interrupt& interrupt_;
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace

char* thread_scratch(int64_t bytes) {
    if (held.bytes < bytes || held.bytes > kept_bytes) {
        held = Held{};
        const int64_t whole = (bytes + 63) / 64 * 64;
        char* memory = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(whole)));
        if (memory == nullptr) throw std::bad_alloc();
        held = Held{std::unique_ptr<char, Freed>(memory), whole};
    }
    return held.memory.get();
}

Status run_tasks(int64_t count, int threads, const Interrupt& interrupt, const std::function<void(int64_t)>& work) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> stopped{false}, failed{false};
    auto member = [&](bool calling) {
        Patience patience(interrupt);
        for (int64_t i; !stopped.load(std::memory_order_relaxed) && (i = next.fetch_add(1)) < count;) {
            try {
                work(i);
            } catch (const std::bad_alloc&) {
                failed = true;
                stopped = true;
            }
            if (calling && patience.lost()) stopped = true;
        }
    };
    if (threads > count) threads = static_cast<int>(count);
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        member(omp_get_thread_num() == 0);
    } else {
        member(true);
    }
#else
    member(true);
#endif
    if (failed) return Status::no_memory;
    return stopped ? Status::interrupted : Status::done;
}

}  // namespace clearhead
