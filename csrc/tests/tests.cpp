// Small named tests of the core's parts and promises. `core_tests [PART OF A NAME]`.
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bounds.h"
#include "call.h"
#include "check.h"
#include "plan.h"
#include "random_call.h"
#include "reference.h"

namespace {

using namespace clearhead;

constexpr const char* isas[] = {"portable", "v3", "v4", "v4bf16", "v4amx"};
const int64_t zero = 0;

// One head of float32 rows, contiguous, with results to write to.
struct Plain {
    Call call;
    std::vector<float> q, k, v, out, lse;

    Plain(int64_t B, int64_t heads, int64_t Lq, int64_t Lk, int64_t d) {
        call.B = B;
        call.Hq = call.Hkv = heads;
        call.Lq = Lq;
        call.Lk = Lk;
        call.d = call.dv = d;
        call.scale = 1 / std::sqrt(static_cast<float>(d));
        q = filled(B * heads * Lq * d, 1);
        k = filled(B * heads * Lk * d, 2);
        v = filled(B * heads * Lk * d, 3);
        out.assign(q.size(), NAN);
        lse.assign(static_cast<size_t>(B * heads * Lq), NAN);
        call.q = rows(q, heads, Lq, d);
        call.k = rows(k, heads, Lk, d);
        call.v = rows(v, heads, Lk, d);
        call.mask.offset = &zero;
        call.out = out.data();
        call.out_batch = heads * Lq * d;
        call.out_head = Lq * d;
        call.out_row = d;
        call.lse = lse.data();
    }

    static std::vector<float> filled(int64_t count, uint64_t seed) {
        tests::Dice dice(seed);
        std::vector<float> numbers(static_cast<size_t>(count));
        for (float& x : numbers) x = static_cast<float>(dice.normal());
        return numbers;
    }
    static Rows rows(const std::vector<float>& data, int64_t heads, int64_t length, int64_t columns) {
        Rows rows;
        rows.data = data.data();
        rows.batch = heads * length * columns;
        rows.head = length * columns;
        rows.row = columns;
        return rows;
    }
};

template <class Each>
void on_every_isa(const Each& each) {
    const std::string before = isa();
    for (const char* name : isas)
        if (choose_isa(name)) each();
    choose_isa(before.c_str());
}

bool always(void*) { return true; }
bool never(void* asked) {
    ++*static_cast<int*>(asked);
    return false;
}

// ------------------------------------------------------------------ dispatch

TEST(an_unknown_instruction_set_is_refused_and_nothing_changes) {
    const std::string before = isa();
    for (const char* name : {"", "v5", "V3", "portable ", "neon"}) {
        CHECK(!choose_isa(name));
        CHECK(!isa_built(name));
        CHECK(!isa_available(name));
    }
    CHECK(before == isa());
}

TEST(every_available_instruction_set_can_be_chosen) {
    CHECK(isa_available("portable"));
    on_every_isa([] { CHECK(isa_available(isa()) && isa_built(isa())); });
    for (const char* name : isas) CHECK(isa_available(name) == choose_isa(name));
}

// ------------------------------------------------------------------ what a call promises

TEST(one_visible_key_gives_its_value_and_score) {
    on_every_isa([] {
        Plain plain(1, 2, 37, 37, 24);
        plain.call.mask.left = plain.call.mask.right = 0;
        CHECK(forward(plain.call) == Status::done);
        // The weight is 1 up to the rounding of the score: of its product with log2 e against the largest of them.
        double off = 0;
        for (size_t i = 0; i < plain.out.size(); ++i) off = std::max(off, std::abs(static_cast<double>(plain.out[i] - plain.v[i])));
        for (int64_t h = 0; h < 2; ++h)
            for (int64_t i = 0; i < 37; ++i)
                off = std::max(off, std::abs(reference::look(plain.call, 0, h, i).lse - static_cast<double>(plain.lse[static_cast<size_t>(h * 37 + i)])));
        CHECK(off < 1e-5);
    });
}

TEST(a_query_that_sees_nothing_has_output_0_and_lse_minus_infinity) {
    const int64_t before_all_keys = -100;
    for (const int64_t Lq : {1, 3, 70})
        on_every_isa([&] {
            Plain plain(2, 3, Lq, 50, 16);
            plain.call.mask.offset = &before_all_keys;
            plain.call.mask.causal = true;
            CHECK(forward(plain.call) == Status::done);
            for (const float x : plain.out) CHECK(x == 0.0f);
            for (const float x : plain.lse) CHECK(x == -INFINITY);
        });
}

TEST(lse_may_be_left_out) {
    on_every_isa([] {
        for (const int64_t Lq : {1, 40}) {
            Plain with(1, 2, Lq, 90, 32), without(1, 2, Lq, 90, 32);
            without.call.lse = nullptr;
            CHECK(forward(with.call) == Status::done && forward(without.call) == Status::done);
            CHECK(with.out == without.out);
        }
    });
}

TEST(steep_scores_neither_overflow_nor_vanish) {
    on_every_isa([] {
        for (const int64_t Lq : {2, 65}) {
            Plain plain(1, 1, Lq, 300, 64);
            plain.call.scale = 1e6f;
            CHECK(forward(plain.call) == Status::done);
            for (const float x : plain.out) CHECK(std::isfinite(x) && std::abs(x) < 10);
            for (const float x : plain.lse) CHECK(std::isfinite(x) && std::abs(x) > 1e5f);
        }
    });
}

TEST(a_window_without_end_is_no_window) {
    on_every_isa([] {
        for (const int64_t limit : {Mask::no_limit, (int64_t{1} << 62) - 1, int64_t{1} << 40}) {
            Plain open(1, 1, 40, 40, 16), wide(1, 1, 40, 40, 16);
            wide.call.mask.left = wide.call.mask.right = limit;
            CHECK(forward(open.call) == Status::done && forward(wide.call) == Status::done);
            CHECK(open.out == wide.out);
        }
    });
}

// ------------------------------------------------------------------ powers of two

// With one column, two keys and lse as the result, exp2 and log2 can be looked at from outside:
// lse(0, -x) = log(1 + exp(-x)).
TEST(exp2_and_log2_are_exact_to_a_few_units_over_their_range) {
    constexpr int64_t n = 4096;
    on_every_isa([] {
        Plain plain(1, 1, n, 2, 1);
        plain.call.scale = 1;
        plain.k = {0.0f, -1.0f};
        plain.v = {0.0f, 1.0f};  // out: the weight of the second key
        for (int64_t i = 0; i < n; ++i) plain.q[static_cast<size_t>(i)] = static_cast<float>(i) * 86.0f / n;
        CHECK(forward(plain.call) == Status::done);
        double worst_lse = 0, worst_weight = 0;
        for (size_t i = 0; i < n; ++i) {
            const double x = plain.q[i], weight = std::exp(-x) / (1 + std::exp(-x));
            worst_lse = std::max(worst_lse, std::abs(static_cast<double>(plain.lse[i]) - std::log1p(std::exp(-x))));
            // x · log2 e is rounded at the size of x: half a unit of it, and exp2 itself
            const double allowed = (x + 6) * reference::unit + 1e-7;
            worst_weight = std::max(worst_weight, std::abs(static_cast<double>(plain.out[i]) / weight - 1) / allowed);
        }
        CHECK(worst_lse < 3e-7);
        CHECK(worst_weight < 2);
    });
}

// ------------------------------------------------------------------ ranges of keys

Ranges ranges_of(const Call& call, int64_t query, int64_t queries) {
    const OwnedPlan plan(call);
    Task task;
    task.query = query;
    task.queries = queries;
    task.keys = {0, call.Lk};
    return visible_ranges(plan, task);
}

TEST(a_window_with_sinks_leaves_two_short_ranges) {
    Plain plain(1, 1, 1000, 1000, 1);
    plain.call.mask.causal = true;
    plain.call.mask.left = 100;
    plain.call.mask.sinks = 4;
    const Ranges found = ranges_of(plain.call, 500, 64);
    CHECK(found.count == 2);
    CHECK(found.part[0].low == 0 && found.part[0].high == 4);
    CHECK(found.part[1].low == 400 && found.part[1].high == 564);
    CHECK(keys_in(found) == 168);
}

TEST(no_visible_key_lies_outside_the_ranges) {
    for (uint64_t seed = 50000; seed < 50150; ++seed) {
        const tests::RandomCall one(seed);
        const Call& call = one.call;
        const OwnedPlan plan(call);
        for (int64_t b = 0; b < call.B; ++b)
            for (int64_t query = 0; query < call.Lq; query += 24) {
                Task task;
                task.b = b;
                task.query = query;
                task.queries = std::min<int64_t>(24, call.Lq - query);
                task.keys = {0, call.Lk};
                const Ranges found = visible_ranges(plan, task);
                std::vector<bool> kept(static_cast<size_t>(call.Lk), false);
                int64_t end = 0;
                for (int i = 0; i < found.count; ++i) {
                    CHECK(found.part[i].low >= end && found.part[i].low < found.part[i].high && found.part[i].high <= call.Lk);
                    end = found.part[i].high;
                    for (int64_t j = found.part[i].low; j < found.part[i].high; ++j) kept[static_cast<size_t>(j)] = true;
                }
                bool lost = false;
                for (int64_t i = query; i < query + task.queries; ++i)
                    for (int64_t j = 0; j < call.Lk; ++j)
                        lost = lost || (!kept[static_cast<size_t>(j)] && reference::may_see(call.mask, b, 0, i, j));
                if (lost) std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), one.description.c_str());
                CHECK(!lost);
            }
    }
}

// ------------------------------------------------------------------ threads and interrupts

TEST(a_long_call_ends_soon_after_it_is_interrupted) {
    for (const int threads : {1, 2}) {
        Plain plain(1, 8, 6000, 6000, 64);
        plain.call.threads = threads;
        plain.call.interrupt = {always, nullptr};
        const auto start = std::chrono::steady_clock::now();
        CHECK(forward(plain.call) == Status::interrupted);
        CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));
    }
}

TEST(a_long_call_asks_and_goes_on_if_told_so) {
    int asked = 0;
    Plain plain(1, 2, 3000, 3000, 64);
    plain.call.interrupt = {never, &asked};
    choose_isa("portable");
    CHECK(forward(plain.call) == Status::done);
    CHECK(asked > 0);
}

TEST(calls_from_eight_threads_at_once_give_the_same_bits) {
    std::vector<std::unique_ptr<tests::RandomCall>> alone;
    for (uint64_t seed = 70000; seed < 70012; ++seed) {
        alone.push_back(std::make_unique<tests::RandomCall>(seed));
        CHECK(forward(alone.back()->call) == Status::done);
    }
    std::atomic<int> different{0};
    std::vector<std::thread> team;
    for (int t = 0; t < 8; ++t)
        team.emplace_back([&, t] {
            for (size_t n = 0; n < alone.size(); ++n) {
                const size_t which = (n + static_cast<size_t>(t)) % alone.size();
                tests::RandomCall mine(alone[which]->seed);
                for (int again = 0; again < 3; ++again) {
                    mine.memory.clear_outputs();
                    if (forward(mine.call) != Status::done || mine.memory.outputs() != alone[which]->memory.outputs()) ++different;
                }
            }
        });
    for (std::thread& one : team) one.join();
    CHECK(different == 0);
}

}  // namespace

int main(int count, char** words) { return tests::run(count > 1 ? words[1] : nullptr); }
