// Cuts a backward into tasks and adds up what they bring. A task is a stretch of queries of one head against a
// stretch of keys; what several of them add to the same rows is summed in a fixed order. How it is cut depends on
// sizes alone, never on the number of threads: the same call gives the same bits.
#include <algorithm>
#include <deque>
#include <vector>

#include "kernels.h"
#include "ordered_sum.h"
#include "parallel.h"

namespace clearhead {
namespace {

// Multiply-adds that are not worth waking a second thread for: about 10 µs of one thread's work.
constexpr double alone = 5e5;
// Keys, values and their gradients of a task should stay in the second-level cache: bytes of them.
constexpr int64_t near_bytes = int64_t{1} << 20;
// With fewer tasks than this, threads would idle: queries are cut into stretches, but not below so many of them
// (adding up the gradients of a stretch costs about 3% of its work at 1024 queries).
constexpr int64_t many_tasks = 32, enough_tasks = 12, long_stretch = 1024, short_stretch = 256;
// A call that is interrupted ends when its tasks end, so none may take long.
constexpr int64_t longest_stretch = 8192;

int64_t parts(int64_t size, int64_t step) { return (size + step - 1) / step; }

// Sizes of the stretches.
struct Steps {
    int64_t heads;  // of a group, side by side in the lanes: more than one if all queries of one leave room
    int64_t queries, keys;
};

Steps steps_of(const Call& call, int lanes) {
    const int64_t group = call.Hq / call.Hkv;
    Steps steps{std::min(group, std::max<int64_t>(1, lanes / call.Lq)), std::min(call.Lq, longest_stretch), 0};
    steps.keys = std::max<int64_t>(64, near_bytes / (8 * (call.d + call.dv)) / 64 * 64);
    steps.keys = std::min(steps.keys, call.Lk);
    auto tasks = [&] {
        return call.B * call.Hkv * parts(group, steps.heads) * parts(call.Lq, steps.queries) * parts(call.Lk, steps.keys);
    };
    // Halves `size` to a multiple of 64 while there are too few tasks.
    auto cut = [&](int64_t& size, int64_t shortest, int64_t wanted) {
        while (tasks() < wanted && size >= 2 * shortest) size = (size / 2 + 63) / 64 * 64;
    };
    cut(steps.queries, long_stretch, many_tasks);
    cut(steps.queries, short_stretch, enough_tasks);
    cut(steps.keys, short_stretch, enough_tasks);
    return steps;
}

struct Turn {
    Task task;
    int64_t queries_sum, queries_turn;  // which sum of dq it adds to, and when
    int64_t keys_sum, keys_turn;        // likewise of dk and dv
};

struct Cut {
    std::vector<Turn> turns;
    std::vector<int64_t> to_queries, to_keys;  // contributions to each sum
    double cost = 0;                           // multiply-adds, about
};

// The (query, key) pairs of a task, about; 0: nothing is visible.
double pairs_of(const Plan& plan, Task task, int64_t lanes) {
    double pairs = 0;
    const int64_t end = task.query + task.queries, step = lanes / task.heads;
    for (; task.query < end; task.query += step) {
        task.queries = std::min(step, end - task.query);
        pairs += static_cast<double>(keys_in(visible_ranges(plan, task)) * task.queries * task.heads);
    }
    return pairs;
}

Cut cut(const Plan& plan, const Steps& steps, int lanes) {
    const Call& call = *plan.call;
    const int64_t group = call.Hq / call.Hkv, head_parts = parts(group, steps.heads);
    const int64_t query_parts = parts(call.Lq, steps.queries), key_parts = parts(call.Lk, steps.keys);
    Cut all;
    all.to_queries.resize(static_cast<size_t>(call.B * call.Hkv * head_parts * query_parts));
    all.to_keys.resize(static_cast<size_t>(call.B * call.Hkv * key_parts));
    std::vector<double> pairs(static_cast<size_t>(key_parts * query_parts));
    for (int64_t b = 0; b < call.B; ++b) {
        Task task;
        task.b = b;
        auto at = [&](int64_t key_part, int64_t query_part) {
            task.keys = {key_part * steps.keys, std::min((key_part + 1) * steps.keys, call.Lk)};
            task.query = query_part * steps.queries;
            task.queries = std::min(steps.queries, call.Lq - task.query);
        };
        task.heads = steps.heads;  // what is visible does not depend on the head
        for (int64_t j = 0; j < key_parts; ++j)
            for (int64_t i = 0; i < query_parts; ++i) {
                at(j, i);
                pairs[static_cast<size_t>(j * query_parts + i)] = pairs_of(plan, task, lanes);
            }
        for (int64_t kv = 0; kv < call.Hkv; ++kv)
            for (int64_t j = 0; j < key_parts; ++j)
                for (int64_t h = 0; h < head_parts; ++h)
                    for (int64_t i = query_parts - 1; i >= 0; --i) {  // the longest first under a causal mask
                        const double cost = pairs[static_cast<size_t>(j * query_parts + i)];
                        if (cost == 0) continue;
                        at(j, i);
                        task.head = kv * group + h * steps.heads;
                        task.heads = std::min(steps.heads, group - h * steps.heads);
                        const int64_t queries_sum = ((b * call.Hkv + kv) * head_parts + h) * query_parts + i;
                        const int64_t keys_sum = (b * call.Hkv + kv) * key_parts + j;
                        all.turns.push_back({task, queries_sum, all.to_queries[static_cast<size_t>(queries_sum)]++,
                                             keys_sum, all.to_keys[static_cast<size_t>(keys_sum)]++});
                        all.cost += cost;
                    }
    }
    all.cost *= 2.5 * static_cast<double>(call.d + call.dv);
    return all;
}

// The gradients and the sums that make them up.
class Results {
  public:
    Results(const Call& call, const Backward& to, const Steps& steps, const Cut& work, int width)
        : dk_row_(parts(call.d, width) * width),
          dv_row_(parts(call.dv, width) * width),
          dv_offset_(steps.keys * dk_row_),
          plain_(dk_row_ == call.d && dv_row_ == call.dv),
          query_buffers_(steps.heads * steps.queries * call.d),
          key_buffers_(steps.keys * (dk_row_ + dv_row_)) {
        const int64_t group = call.Hq / call.Hkv;
        size_t sum = 0;
        for (int64_t pair = 0; pair < call.B * call.Hkv; ++pair)
            for (int64_t h = 0; h < group; h += steps.heads)
                for (int64_t i = 0; i < call.Lq; i += steps.queries) {
                    const int64_t rows = std::min(steps.queries, call.Lq - i) * std::min(steps.heads, group - h);
                    const SumPart part{to.dq + ((pair * group + h) * call.Lq + i) * call.d, rows, call.d, 0, call.d};
                    queries_.emplace_back().start(&part, 1, work.to_queries[sum++], &query_buffers_);
                    query_places_.push_back(part.to);
                }
        sum = 0;
        for (int64_t pair = 0; pair < call.B * call.Hkv; ++pair)
            for (int64_t j = 0; j < call.Lk; j += steps.keys) {
                const int64_t rows = std::min(steps.keys, call.Lk - j), row = pair * call.Lk + j;
                const SumPart two[] = {{to.dk + row * call.d, rows, call.d, 0, dk_row_},
                                       {to.dv + row * call.dv, rows, call.dv, dv_offset_, dv_row_}};
                keys_.emplace_back().start(two, 2, work.to_keys[sum++], &key_buffers_);
                key_places_.push_back({nullptr, two[0].to, two[1].to, call.d, call.dv});
            }
    }

    // Calls work(places), then adds up. Rows that one task alone writes are written where they belong.
    template <typename Work>
    void gather(const Turn& turn, const Work& work) {
        OrderedSum& queries = queries_[static_cast<size_t>(turn.queries_sum)];
        OrderedSum& keys = keys_[static_cast<size_t>(turn.keys_sum)];
        Floats64 for_queries, for_keys;
        GradientPlaces places = key_places_[static_cast<size_t>(turn.keys_sum)];
        if (keys.contributions() > 1 || !plain_) {
            for_keys = key_buffers_.take();
            places.dk = for_keys.get();
            places.dv = places.dk + dv_offset_;
            places.dk_row = dk_row_;
            places.dv_row = dv_row_;
        }
        places.dq = query_places_[static_cast<size_t>(turn.queries_sum)];
        if (queries.contributions() > 1) {
            for_queries = query_buffers_.take();
            places.dq = for_queries.get();
        }
        work(places);
        if (for_queries) queries.add(turn.queries_turn, std::move(for_queries));
        if (for_keys) keys.add(turn.keys_turn, std::move(for_keys));
    }

  private:
    const int64_t dk_row_, dv_row_, dv_offset_;
    const bool plain_;
    BufferPool query_buffers_, key_buffers_;
    std::deque<OrderedSum> queries_, keys_;
    std::vector<float*> query_places_;
    std::vector<GradientPlaces> key_places_;
};

}  // namespace

Status backward(const Call& call, const Backward& gradients) {
    const OwnedPlan plan(call);
    const Kernels& k = kernels();
    const Steps steps = steps_of(call, k.lanes);
    const Cut work = cut(plan, steps, k.lanes);
    Results results(call, gradients, steps, work, k.backward.width);
    const int64_t scratch = k.backward.bytes(call, steps.keys);
    const int threads = work.cost < alone ? 1 : call.threads;
    return run_tasks(static_cast<int64_t>(work.turns.size()), threads, call.interrupt, [&](int64_t i) {
        const Turn& turn = work.turns[static_cast<size_t>(i)];
        results.gather(turn, [&](const GradientPlaces& places) {
            k.backward.task(plan, gradients, turn.task, thread_scratch(scratch), places);
        });
    });
}

}  // namespace clearhead
