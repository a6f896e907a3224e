// Random calls against the reference, on every instruction set that runs here.
//
//   core_fuzz [--count N] [--from SEED] [--seed SEED] [--isa NAME] [--forward-only]
//
// Checks the output, lse, all answers and gradients within bounds derived from float32 rounding (bounds.h); that
// nothing outside the results is written and no input touched; that 1, 2, 3 and more threads give the same bits,
// and that questions change none of the output. A failing case is named by its seed, and --seed runs it alone.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <unistd.h>

#include "bounds.h"
#include "call.h"
#include "random_call.h"
#include "reference.h"

namespace {

using namespace clearhead;
using reference::Near;
using tests::RandomCall;

constexpr const char* isas[] = {"portable", "v3", "v4", "v4bf16", "v4amx"};

// The case that a crash or a sanitizer's report belongs to.
uint64_t current_seed = 0;

void name_current_seed() {
    std::fprintf(stderr, "seed %llu on %s:\n", static_cast<unsigned long long>(current_seed), isa());
}

void crashed(int signal) {
    name_current_seed();
    std::signal(signal, SIG_DFL);
    std::raise(signal);
}

// What is wrong with a case on an instruction set: the first few things.
class Verdict {
public:
    void fault(const char* format, ...) __attribute__((format(printf, 2, 3))) {
        if (++faults_ > 4) return;
        char line[400];
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(line, sizeof line, format, arguments);
        va_end(arguments);
        text_ += std::string("    ") + line + "\n";
    }

    // A number within its bound. `n`: what the sum over it counts as; `rounding`: of its terms, relative.
    void near(const char* what, int64_t at, double got, const Near& wanted, double n, double rounding, Type stored) {
        const double size = wanted.size + wanted.blur;
        const double bound = wanted.blur + (n * reference::unit + rounding) * size +
                             reference::storing_blur(stored, std::abs(wanted.value) + wanted.blur) + 1e-30;
        const double off = std::abs(got - wanted.value);
        if (off <= bound) {
            worst_ = std::max(worst_, off / bound);
            return;
        }
        fault("%s[%ld] is %.9g, should be %.9g: off by %.3g, allowed %.3g", what, at, got, wanted.value, off, bound);
    }

    int faults() const { return faults_; }
    const std::string& text() const { return text_; }
    double worst() const { return worst_; }

private:
    int faults_ = 0;
    std::string text_;
    double worst_ = 0;
};

constexpr const char* kind_names[] = {"segment_mass", "entropy", "max_weight", "mean_distance", "top_keys", "key_mass",
                                      "pooled_mean", "pooled_max", "segment_output", "segment_norm", "weights"};

// What the reference says about a case, once for all instruction sets.
struct Expected {
    reference::Weights weights;
    std::vector<Near> out;
    std::vector<std::vector<Near>> answers;
    // The gradients depend on how far the stored output may be off, which most instruction sets have in common.
    std::vector<double> out_blur;
    reference::Gradients gradients;

    explicit Expected(const Call& call) : weights(reference::look_everywhere(call)), out(reference::out_of(weights)) {
        for (int64_t i = 0; i < call.question_count; ++i)
            answers.push_back(reference::answer_to(weights, call.questions[i]));
    }
};

template <class Each>
void for_rows(const Call& call, const Each& each) {
    for (int64_t b = 0; b < call.B; ++b)
        for (int64_t h = 0; h < call.Hq; ++h)
            for (int64_t i = 0; i < call.Lq; ++i) each(b, h, i);
}

// Compares out and lse; returns the bound of each element of out.
std::vector<double> check_output(const Call& call, const Expected& expected, Verdict& verdict) {
    const double rounding = reference::weight_rounding(call, isa()), n = reference::terms(call.Lk);
    std::vector<double> blur;
    for_rows(call, [&](int64_t b, int64_t h, int64_t i) {
        const size_t row = expected.weights.index(b, h, i);
        for (int64_t t = 0; t < call.dv; ++t) {
            const auto at = row * static_cast<size_t>(call.dv) + static_cast<size_t>(t);
            const Near& wanted = expected.out[at];
            const double got = reference::stored(call.out, call.out_type, b * call.out_batch + h * call.out_head + i * call.out_row + t);
            verdict.near("out", static_cast<int64_t>(at), got, wanted, n, rounding, call.out_type);
            blur.push_back(wanted.blur + (n * reference::unit + rounding) * wanted.size +
                           reference::storing_blur(call.out_type, std::abs(wanted.value)));
        }
        if (call.lse == nullptr) return;
        const double got = call.lse[row], wanted = expected.weights.rows[row].lse;
        if (std::isinf(wanted)) {
            if (got != wanted) verdict.fault("lse[%zu] is %g, should be -inf: the query sees nothing", row, got);
        } else {
            verdict.near("lse", static_cast<int64_t>(row), got, {wanted, expected.weights.lse_blur[row], 0}, 0, 0, Type::f32);
        }
    });
    return blur;
}

// The keys that top_keys names: each once, in range, with the weight that it says.
void check_top_keys(const Call& call, const Question& question, const Expected& expected, Verdict& verdict) {
    for_rows(call, [&](int64_t b, int64_t h, int64_t i) {
        if (question.place[i] < 0) return;
        const size_t row = expected.weights.index(b, h, i);
        const int64_t first = ((b * call.Hq + h) * question.R + question.place[i]) * question.count;
        std::vector<bool> named(static_cast<size_t>(call.Lk), false);
        for (int64_t k = first; k < first + question.count; ++k) {
            const double weight = question.out[k];
            const int64_t key = question.index[k];
            if (k > first && weight > static_cast<double>(question.out[k - 1])) verdict.fault("top_keys[%ld]: heavier than the one before", k);
            if ((key < 0) != (weight == 0) || key < -1 || key >= call.Lk) {
                verdict.fault("top_keys[%ld]: key %ld with weight %g", k, key, weight);
            } else if (key >= 0) {
                if (named[static_cast<size_t>(key)]) verdict.fault("top_keys[%ld]: key %ld twice", k, key);
                named[static_cast<size_t>(key)] = true;
                const double wanted = expected.weights.weight(row, key);
                verdict.near("weight of top key", key, weight, {wanted, expected.weights.off(row, key), wanted}, 8, 0, Type::f32);
            }
        }
    });
}

void check_answers(const Call& call, const Expected& expected, Verdict& verdict) {
    for (int64_t q = 0; q < call.question_count; ++q) {
        const Question& question = call.questions[q];
        const auto& wanted = expected.answers[static_cast<size_t>(q)];
        const char* name = kind_names[static_cast<int>(question.kind)];
        const double n = reference::terms(call.Lk) + reference::terms(question.R);
        for (size_t at = 0; at < wanted.size(); ++at)
            verdict.near(name, static_cast<int64_t>(at), question.out[at], wanted[at], n, 0, Type::f32);
        if (question.kind == Question::Kind::top_keys) check_top_keys(call, question, expected, verdict);
    }
}

void check_gradients(const RandomCall& one, Expected& expected, const std::vector<double>& out_blur, Verdict& verdict) {
    const Call& call = one.call;
    if (expected.out_blur != out_blur) {
        expected.gradients = reference::gradients_of(expected.weights, one.back, out_blur);
        expected.out_blur = out_blur;
    }
    const reference::Gradients& wanted = expected.gradients;
    auto compare = [&](const char* name, const float* got, const std::vector<Near>& all, int64_t count) {
        for (size_t at = 0; at < all.size(); ++at)
            verdict.near(name, static_cast<int64_t>(at), got[at], all[at], reference::terms(count) + 8, 0, Type::f32);
    };
    const int64_t queries = call.Lq * (call.Hq / call.Hkv);
    compare("dq", one.back.dq, wanted.dq, call.Lk);
    compare("dk", one.back.dk, wanted.dk, queries);
    compare("dv", one.back.dv, wanted.dv, queries);
}

struct Options {
    bool forward_only = false;
    const char* isa = nullptr;
};

bool differs(const std::vector<std::vector<char>>& a, const std::vector<std::vector<char>>& b, size_t first, size_t last) {
    for (size_t i = first; i < last; ++i)
        if (a[i] != b[i]) return true;
    return false;
}

void check_on_isa(RandomCall& one, Expected& expected, const Options& options, Verdict& verdict) {
    const bool gradients = one.differentiable && !options.forward_only;
    auto run = [&](int threads, int64_t questions) {
        Call call = one.call;
        call.threads = threads;
        call.question_count = questions;
        one.memory.clear_outputs();
        if (forward(call) != Status::done) verdict.fault("forward with %d threads did not end well", threads);
        if (gradients && backward(call, one.back) != Status::done) verdict.fault("backward with %d threads did not end well", threads);
    };
    run(1, one.call.question_count);
    const auto alone = one.memory.outputs();
    const std::vector<double> blur = check_output(one.call, expected, verdict);
    check_answers(one.call, expected, verdict);
    if (gradients) check_gradients(one, expected, blur, verdict);
    if (!one.memory.canaries_alive()) verdict.fault("something outside the results was written");
    for (const int threads : {2, 3, one.call.threads}) {
        run(threads, one.call.question_count);
        if (differs(alone, one.memory.outputs(), 0, alone.size())) verdict.fault("%d threads give other bits than one", threads);
        if (!one.memory.canaries_alive()) verdict.fault("something outside the results was written by %d threads", threads);
    }
    if (one.call.question_count > 0) {  // out and lse are the first results that were made
        run(1, 0);
        if (differs(alone, one.memory.outputs(), 0, one.call.lse != nullptr ? 2 : 1)) verdict.fault("questions change the output");
    }
    if (!one.memory.inputs_untouched()) verdict.fault("an input was written to");
}

// Returns whether the case passes everywhere.
bool check(uint64_t seed, const Options& options, double& worst) {
    current_seed = seed;
    RandomCall one(seed);
    Expected expected(one.call);
    std::string report;
    for (const char* name : isas) {
        if (options.isa != nullptr && std::strcmp(options.isa, name) != 0) continue;
        if (!choose_isa(name)) continue;
        Verdict verdict;
        check_on_isa(one, expected, options, verdict);
        worst = std::max(worst, verdict.worst());
        if (verdict.faults() == 0) continue;
        report += std::string("  ") + name + ": " + std::to_string(verdict.faults()) + " faults\n" + verdict.text();
    }
    if (report.empty()) return true;
    std::printf("seed %llu: %s\n%s", static_cast<unsigned long long>(seed), one.description.c_str(), report.c_str());
    std::fflush(stdout);
    return false;
}

}  // namespace

// The sanitizers call these before they report.
extern "C" void __asan_on_error() { name_current_seed(); }
extern "C" void __ubsan_on_report() { name_current_seed(); }

int main(int count_of_words, char** words) {
    // Waiting threads would spin, on processors that others need. OpenMP reads this when the program starts.
    if (std::getenv("OMP_WAIT_POLICY") == nullptr) {
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", words);  // where there is no such file it goes on, only slower
    }
    uint64_t count = 10000, from = 0;
    Options options;
    bool describe = false;
    for (int i = 1; i < count_of_words; ++i) {
        auto next = [&]() -> const char* {
            if (i + 1 >= count_of_words) {
                std::fprintf(stderr, "%s needs a value\n", words[i]);
                std::exit(2);
            }
            return words[++i];
        };
        const std::string word = words[i];
        if (word == "--count") {
            count = std::strtoull(next(), nullptr, 10);
        } else if (word == "--from") {
            from = std::strtoull(next(), nullptr, 10);
        } else if (word == "--seed") {
            from = std::strtoull(next(), nullptr, 10);
            count = 1;
            describe = true;
        } else if (word == "--isa") {
            options.isa = next();
        } else if (word == "--forward-only") {
            options.forward_only = true;
        } else {
            std::fprintf(stderr, "core_fuzz [--count N] [--from SEED] [--seed SEED] [--isa NAME] [--forward-only], got %s\n", words[i]);
            return 2;
        }
    }
    if (options.isa != nullptr && !isa_available(options.isa)) {
        std::fprintf(stderr, "--isa: %s was not built or does not run here\n", options.isa);
        return 2;
    }
    if (describe) std::printf("%s\n", RandomCall(from).description.c_str()), std::fflush(stdout);
    for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) std::signal(signal, crashed);
    uint64_t failed = 0;
    double worst = 0;
    for (uint64_t seed = from; seed < from + count; ++seed) failed += !check(seed, options, worst);
    std::printf("%llu cases from seed %llu, %llu failed; largest error %.2f of its bound\n", static_cast<unsigned long long>(count),
                static_cast<unsigned long long>(from), static_cast<unsigned long long>(failed), worst);
    return failed > 0;
}
