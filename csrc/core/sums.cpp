#include "sums.h"

#include <algorithm>
#include <limits>

namespace clearhead {
namespace {

constexpr double unit = 0x1p40;
constexpr int64_t not_a_number = int64_t{1} << 62;

float from_fixed(int64_t sum, double share) {
    if (sum & not_a_number) return std::numeric_limits<float>::quiet_NaN();
    return static_cast<float>(static_cast<double>(sum) / unit * share);
}

int64_t edge(int64_t i, int64_t length, int64_t bins) { return i * length / bins; }

}  // namespace

SumsOverQueries::SumsOverQueries(const Call& call) : call_(call) {
    const int64_t heads = call.B * call.Hq;
    if (call.question_count > 0) locks_.assign(static_cast<size_t>(heads), 0);
    sums_.resize(static_cast<size_t>(call.question_count));
    for (int64_t i = 0; i < call.question_count; ++i) {
        const Question& question = call.questions[i];
        auto& sums = sums_[static_cast<size_t>(i)];
        const int64_t cells = heads * question.map_rows * question.map_columns;
        if (question.kind == Question::Kind::key_mass) sums.assign(static_cast<size_t>(heads * call.Lk), 0);
        if (question.kind == Question::Kind::pooled_mean) sums.assign(static_cast<size_t>(cells), 0);
        if (question.kind == Question::Kind::pooled_max) std::fill_n(question.out, cells, 0.0f);
        if (question.kind == Question::Kind::weights) std::fill_n(question.out, heads * question.R * call.Lk, 0.0f);
        places_.push_back(sums.data());
    }
}

void SumsOverQueries::write() const {
    for (int64_t i = 0; i < call_.question_count; ++i) {
        const Question& question = call_.questions[i];
        const auto& sums = sums_[static_cast<size_t>(i)];
        if (question.kind == Question::Kind::key_mass)
            std::transform(sums.begin(), sums.end(), question.out, [](int64_t sum) { return from_fixed(sum, 1.0); });
        if (question.kind != Question::Kind::pooled_mean) continue;
        const int64_t rows = question.map_rows, columns = question.map_columns;
        for (size_t cell = 0; cell < sums.size(); ++cell) {
            const int64_t c = static_cast<int64_t>(cell) % columns, r = static_cast<int64_t>(cell) / columns % rows;
            const int64_t area = (edge(r + 1, question.R, rows) - edge(r, question.R, rows)) *
                                 (edge(c + 1, call_.Lk, columns) - edge(c, call_.Lk, columns));
            question.out[cell] = area > 0 ? from_fixed(sums[cell], 1.0 / static_cast<double>(area)) : 0.0f;
        }
    }
}

}  // namespace clearhead
