// Adds contributions of several tasks to shared rows in a fixed order, whatever order they arrive in, so that the
// sums have the same bits at any number of threads. Knows nothing of attention.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace clearhead {

struct FreedFloats {
    void operator()(float* memory) const { std::free(memory); }
};

using Floats64 = std::unique_ptr<float, FreedFloats>;  // 64-byte aligned

// Buffers of one size that are handed out again and again. As many come to be as are in use at once.
class BufferPool {
  public:
    explicit BufferPool(int64_t floats) : floats_(floats) {}
    Floats64 take();  // throws std::bad_alloc
    void give_back(Floats64 buffer);

  private:
    const int64_t floats_;
    std::mutex mutex_;
    std::vector<Floats64> free_;
};

// One matrix of a sum: rows x columns at `to`, contiguous; in a contribution from `offset` on, `stride` apart.
struct SumPart {
    float* to = nullptr;
    int64_t rows = 0, columns = 0, offset = 0, stride = 0;
};

class OrderedSum {
  public:
    // Once, before any contribution. With no contributions to come, the rows are zero.
    void start(const SumPart* parts, int count, int64_t contributions, BufferPool* pool);

    int64_t contributions() const { return contributions_; }

    // Contribution number `turn` (each of 0 … contributions - 1 once). It is added now if its turn has come, and
    // those that waited for it after it; else it waits. No thread ever does.
    void add(int64_t turn, Floats64 buffer);

  private:
    void add_now(const float* from, bool first) const;

    SumPart part_[2];
    int count_ = 0;
    int64_t contributions_ = 0;
    BufferPool* pool_ = nullptr;
    std::mutex mutex_;
    int64_t next_ = 0;
    bool busy_ = false;
    std::map<int64_t, Floats64> waiting_;
};

}  // namespace clearhead
