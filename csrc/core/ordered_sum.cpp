#include "ordered_sum.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace clearhead {

Floats64 BufferPool::take() {
    {
        const std::lock_guard<std::mutex> hold(mutex_);
        if (!free_.empty()) {
            Floats64 buffer = std::move(free_.back());
            free_.pop_back();
            return buffer;
        }
    }
    const int64_t bytes = (floats_ * 4 + 63) / 64 * 64;
    Floats64 buffer(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
    if (buffer == nullptr) throw std::bad_alloc();
    return buffer;
}

void BufferPool::give_back(Floats64 buffer) {
    const std::lock_guard<std::mutex> hold(mutex_);
    free_.push_back(std::move(buffer));
}

void OrderedSum::start(const SumPart* parts, int count, int64_t contributions, BufferPool* pool) {
    std::copy(parts, parts + count, part_);
    count_ = count;
    contributions_ = contributions;
    pool_ = pool;
    for (int i = 0; i < count && contributions == 0; ++i)
        std::memset(part_[i].to, 0, static_cast<size_t>(part_[i].rows * part_[i].columns) * 4);
}

void OrderedSum::add(int64_t turn, Floats64 buffer) {
    std::unique_lock<std::mutex> hold(mutex_);
    waiting_.emplace(turn, std::move(buffer));
    if (busy_) return;
    while (!waiting_.empty() && waiting_.begin()->first == next_) {
        Floats64 now = std::move(waiting_.begin()->second);
        waiting_.erase(waiting_.begin());
        busy_ = true;
        hold.unlock();
        add_now(now.get(), next_ == 0);
        pool_->give_back(std::move(now));
        hold.lock();
        busy_ = false;
        ++next_;
    }
}

void OrderedSum::add_now(const float* from, bool first) const {
    for (int i = 0; i < count_; ++i) {
        const SumPart& part = part_[i];
        for (int64_t row = 0; row < part.rows; ++row) {
            const float* source = from + part.offset + row * part.stride;
            float* to = part.to + row * part.columns;
            if (first) {
                std::memcpy(to, source, static_cast<size_t>(part.columns) * 4);
            } else {
                for (int64_t t = 0; t < part.columns; ++t) to[t] += source[t];
            }
        }
    }
}

}  // namespace clearhead
