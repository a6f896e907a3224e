// Random calls of the core: sizes, types, layouts, masks, biases, questions and gradients, all from one seed.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "call.h"
#include "memory.h"

namespace tests {

// A call and everything that it points to.
struct RandomCall {
    explicit RandomCall(uint64_t seed);
    RandomCall(const RandomCall&) = delete;

    uint64_t seed;
    clearhead::Call call;
    clearhead::Backward back;
    bool differentiable = false;  // `back` is filled in (its `out` and `lse` are those of the call)
    std::vector<clearhead::Question> questions;
    Memory memory;
    std::string description;

private:
    void draw_sizes();
    void draw_types();
    void draw_scores();
    clearhead::Mask draw_mask(bool first, double density);
    void draw_biases();
    void draw_results();
    void draw_questions();
    void draw_gradients();
    clearhead::Rows draw_rows(clearhead::Type type, int64_t heads, int64_t length, int64_t columns, double amplitude,
                              bool keys);
    void page(clearhead::Rows& rows, int64_t heads, int64_t columns, Layout& layout, int64_t& blocks);
    void draw_starts(clearhead::Mask& mask);
    int64_t* numbers(int64_t length, int64_t& batch, int64_t low, int64_t high, bool runs);
    int64_t present(int64_t b) const;  // keys of item b that are there at all
    void say(const char* format, ...) __attribute__((format(printf, 2, 3)));

    Dice dice;
    clearhead::Type q_type{}, k_type{}, v_type{};
    double q_size = 1, k_size = 1;
    std::deque<clearhead::Mask> further;
};

}  // namespace tests
