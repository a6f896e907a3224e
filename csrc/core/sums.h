// Answers that are sums (or maxima) over queries, which several tasks add to.
#pragma once

#include <cstdint>
#include <vector>

#include "call.h"

namespace clearhead {

// Sums are kept in fixed point, 2^40 to the unit, so that they come to the same bits in whatever order threads add.
// Clears the results that tasks write to only in part.
class SumsOverQueries {
  public:
    explicit SumsOverQueries(const Call& call);
    int64_t* const* places() const { return places_.data(); }
    int32_t* locks() { return locks_.data(); }
    void write() const;  // turns the sums into the questions' results

  private:
    const Call& call_;
    std::vector<std::vector<int64_t>> sums_;
    std::vector<int64_t*> places_;
    std::vector<int32_t> locks_;
};

}  // namespace clearhead
