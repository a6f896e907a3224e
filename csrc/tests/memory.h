// Memory for random calls: every array is a heap block of exactly its size, so that the address sanitizer sees a
// read of one element too many, and what lies between the rows of an array is NaN or a canary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "call.h"

namespace tests {

// Random numbers that are the same with every standard library.
class Dice {
public:
    explicit Dice(uint64_t seed) : engine_(seed * 0x9e3779b97f4a7c15u + 1) {}
    int64_t from(int64_t low, int64_t high) {  // low … high
        return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
    }
    bool chance(double p) { return uniform() < p; }
    double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
    double normal() {  // of twelve uniforms: close enough, and bounded by 6
        double sum = -6;
        for (int i = 0; i < 12; ++i) sum += uniform();
        return sum;
    }
    template <class T>
    T one_of(std::initializer_list<T> choices) {
        return choices.begin()[from(0, static_cast<int64_t>(choices.size()) - 1)];
    }

private:
    std::mt19937_64 engine_;
};

inline int64_t bytes_of(clearhead::Type type) {
    return type == clearhead::Type::f32 ? 4 : type == clearhead::Type::i8 ? 1 : 2;
}

// A heap block; `ours` marks the bytes that a call may write.
struct Block {
    std::unique_ptr<char[]> bytes;
    size_t size = 0;
    std::vector<bool> ours;
    std::vector<char> before;

    Block(size_t count, int fill) : bytes(new char[count]), size(count) { std::memset(bytes.get(), fill, count); }
};

constexpr int nothing = 0xff;  // as float, bfloat16 and half: NaN; as int64: -1

// Where the elements of an array of up to four axes lie.
struct Layout {
    int64_t size[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 0};
    int64_t low = 0, high = 0;  // the least and the largest offset of an element

    void find_ends() {
        low = high = 0;
        for (int a = 0; a < 4; ++a) (stride[a] < 0 ? low : high) += stride[a] * (size[a] - 1);
    }
    template <class Each>
    void for_each(const Each& each) const {
        for (int64_t b = 0; b < size[0]; ++b)
            for (int64_t h = 0; h < size[1]; ++h)
                for (int64_t j = 0; j < size[2]; ++j)
                    for (int64_t t = 0; t < size[3]; ++t)
                        each(b, h, j, t, b * stride[0] + h * stride[1] + j * stride[2] + t * stride[3]);
    }
};

struct Strangeness {
    double gaps = 0.2, zero = 0, negative = 0, split_column = 0;
};

// Draws how an array of these sizes lies in memory: which axis is innermost, gaps, shared and reversed axes.
inline Layout draw_layout(Dice& dice, std::initializer_list<int64_t> sizes, const Strangeness& how) {
    Layout layout;
    int axis = 0;
    for (const int64_t size : sizes) layout.size[axis++] = size;
    int order[4] = {3, 2, 1, 0};  // innermost first
    const int64_t usual = dice.from(0, 2);
    if (usual == 1) std::swap(order[1], order[2]);  // heads inside tokens
    if (usual == 2)
        for (int a = 3; a > 1; --a) std::swap(order[a], order[dice.from(1, a)]);
    if (dice.chance(how.split_column)) std::swap(order[0], order[dice.from(1, 3)]);
    int64_t extent = 1;
    for (const int a : order) {
        int64_t& stride = layout.stride[a];
        if (a != 3 || order[0] != 3) {
            if (dice.chance(how.gaps)) extent += dice.from(1, 40);
        }
        stride = extent;
        if (a != 3 && dice.chance(how.zero)) {
            stride = 0;
        } else {
            extent *= layout.size[a];
            if (a != 3 && dice.chance(how.negative)) stride = -stride;
        }
        if (layout.size[a] == 1 && a != 3 && dice.chance(0.1)) stride = 987654321;  // never multiplied by more than 0
    }
    layout.find_ends();
    return layout;
}

class Memory {
public:
    // An array of `count` elements that a call may only read.
    template <class T>
    T* input(int64_t count, int fill = nothing) {
        inputs_.emplace_back(static_cast<size_t>(count) * sizeof(T), fill);
        return reinterpret_cast<T*>(inputs_.back().bytes.get());
    }

    // Element 0 of an array that a call may only read, of the right size for `layout` and not a byte more.
    char* input_of(Dice& dice, const Layout& layout, int64_t element) {
        const int64_t lead = dice.from(0, 3);  // so that rows start at no round address
        char* start = input<char>((lead + layout.high - layout.low + 1) * element);
        return start + (lead - layout.low) * element;
    }

    // Element 0 of an array for results. Bytes that belong to no element are canaries.
    char* output_of(Dice& dice, const Layout& layout, int64_t element, int fill = nothing) {
        const int64_t guard = dice.chance(0.5) ? 0 : dice.from(1, 64);  // without: for the sanitizer
        const int64_t count = guard + layout.high + 1 + guard;
        outputs_.emplace_back(static_cast<size_t>(count * element), fill);
        Block& block = outputs_.back();
        block.ours.assign(block.size, false);
        layout.for_each([&](int64_t, int64_t, int64_t, int64_t, int64_t at) {
            for (int64_t i = 0; i < element; ++i) block.ours[static_cast<size_t>((guard + at) * element + i)] = true;
        });
        fills_.push_back(fill);
        return block.bytes.get() + guard * element;
    }

    void remember_inputs() {
        for (Block& block : inputs_) block.before.assign(block.bytes.get(), block.bytes.get() + block.size);
    }
    bool inputs_untouched() const {
        for (const Block& block : inputs_)
            if (std::memcmp(block.bytes.get(), block.before.data(), block.size) != 0) return false;
        return true;
    }

    void clear_outputs() {
        for (size_t i = 0; i < outputs_.size(); ++i) std::memset(outputs_[i].bytes.get(), fills_[i], outputs_[i].size);
    }
    bool canaries_alive() const {
        for (size_t i = 0; i < outputs_.size(); ++i)
            for (size_t k = 0; k < outputs_[i].size; ++k)
                if (!outputs_[i].ours[k] && outputs_[i].bytes[k] != static_cast<char>(fills_[i])) return false;
        return true;
    }
    std::vector<std::vector<char>> outputs() const {
        std::vector<std::vector<char>> all;
        for (const Block& block : outputs_) all.emplace_back(block.bytes.get(), block.bytes.get() + block.size);
        return all;
    }

private:
    std::vector<Block> inputs_, outputs_;
    std::vector<int> fills_;
};

}  // namespace tests
