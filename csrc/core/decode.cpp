#include "decode.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace clearhead {
namespace {

// Keys are split so that there are about this many tasks: enough for as many threads, with some left to even out
// what they do. A piece has at least `least_keys`, else starting and joining it would show.
constexpr int64_t wanted_tasks = 64, least_keys = 256, piece_step = 64;
// Nanoseconds of one thread's work, about, that are not worth waking a second thread for.
constexpr double alone = 8e3;

struct Joined {
    Task task;  // over all its keys
    int64_t first = 0, count = 0;
};

// What a call needs besides its results. Kept from call to call by the calling thread.
struct Kept {
    std::vector<Task> tasks;
    std::vector<Joined> joined;
    std::vector<float> pieces, exponents;
    std::unique_ptr<std::atomic<int64_t>[]> open;  // pieces that are not done yet, of each joined task
    int64_t open_count = 0;

    void release_if_large() {
        constexpr size_t most = size_t{16} << 20;  // floats
        if (pieces.capacity() > most) pieces = {};
        if (exponents.capacity() > most) exponents = {};
    }
};

thread_local Kept kept;

// About how long one thread takes over a key: what its row's bytes or the multiply-adds on it need.
double nanoseconds_of_a_key(const Call& call) {
    auto size = [](Type type) { return type == Type::f32 ? 4 : type == Type::i8 ? 1 : 2; };
    const auto bytes = static_cast<double>(call.d * size(call.k.type) + call.dv * size(call.v.type));
    const auto adds = static_cast<double>(call.Lq * (call.Hq / call.Hkv) * (call.d + call.dv));
    return std::max(bytes / 40, adds / 60);
}

// Cuts the visible keys of each item into pieces of equal numbers of keys. Depends on sizes and masks alone.
double cut(const Plan& plan, Kept& work) {
    const Call& call = *plan.call;
    const int64_t group = call.Hq / call.Hkv;
    work.tasks.clear();
    work.joined.clear();
    Task whole;
    whole.heads = group;
    whole.queries = call.Lq;
    whole.keys = {0, call.Lk};
    int64_t total = 0, pieces = 0;
    for (whole.b = 0; whole.b < call.B; ++whole.b) total += keys_in(visible_ranges(plan, whole)) * call.Hkv;
    const int64_t target = std::max(least_keys, (total / wanted_tasks + piece_step - 1) / piece_step * piece_step);
    for (whole.b = 0; whole.b < call.B; ++whole.b) {
        const Ranges ranges = visible_ranges(plan, whole);
        const int64_t keys = keys_in(ranges), count = std::max<int64_t>(1, (keys + target / 2) / target);
        const int64_t each = ((keys + count - 1) / count + piece_step - 1) / piece_step * piece_step;
        for (int64_t kv = 0; kv < call.Hkv; ++kv) {
            Task task = whole;
            task.head = kv * group;
            const int64_t first = static_cast<int64_t>(work.tasks.size());
            Joined joined{task, pieces, 0};
            // The first piece starts at key 0 (it brings the sink logits), the others where the one before ended.
            int64_t low = 0, taken = 0;
            for (int i = 0; i < ranges.count; ++i) {
                int64_t at = ranges.part[i].low;
                while (ranges.part[i].high - at > each - taken) {
                    at += each - taken;
                    task.keys = {low, at};
                    work.tasks.push_back(task);
                    low = at;
                    taken = 0;
                }
                taken += ranges.part[i].high - at;
            }
            task.keys = {low, call.Lk};
            work.tasks.push_back(task);
            joined.count = static_cast<int64_t>(work.tasks.size()) - first;
            if (joined.count > 1) {
                for (int64_t i = 0; i < joined.count; ++i) work.tasks[static_cast<size_t>(first + i)].piece = pieces++;
            }
            work.joined.push_back(joined);
        }
    }
    return static_cast<double>(total) * nanoseconds_of_a_key(call);
}

}  // namespace

bool is_decoding(const Call& call) { return kernels().decodes(call); }

Status decode(const Plan& plan) {
    const Call& call = *plan.call;
    const Kernels& k = kernels();
    Kept& work = kept;
    const double cost = cut(plan, work);
    const int threads = cost < alone ? 1 : call.threads;
    const int64_t heads = static_cast<int64_t>(work.joined.size()), rows = call.Lq * (call.Hq / call.Hkv);
    const int64_t piece_floats = k.decode_piece_floats(call), exponent_floats = 2 * rows * call.Lk;
    const int64_t scratch = k.decode_scratch(plan);
    int64_t pieces = 0;
    for (const Joined& joined : work.joined) pieces += joined.count > 1 ? joined.count : 0;
    if (work.open_count < heads) {
        work.open.reset(new std::atomic<int64_t>[static_cast<size_t>(heads)]);
        work.open_count = heads;
    }
    for (int64_t i = 0; i < heads; ++i)
        work.open[static_cast<size_t>(i)].store(work.joined[static_cast<size_t>(i)].count, std::memory_order_relaxed);
    if (static_cast<int64_t>(work.pieces.size()) < pieces * piece_floats) work.pieces.resize(static_cast<size_t>(pieces * piece_floats));
    const bool asked = call.question_count > 0;
    if (asked && static_cast<int64_t>(work.exponents.size()) < heads * exponent_floats)
        work.exponents.resize(static_cast<size_t>(heads * exponent_floats));
    auto one = [&](int64_t i) {
        const Task& task = work.tasks[static_cast<size_t>(i)];
        const int64_t head = task.b * call.Hkv + task.head / (call.Hq / call.Hkv);
        float* exponents = asked ? work.exponents.data() + head * exponent_floats : nullptr;
        k.decode(plan, task, thread_scratch(scratch), work.pieces.data() + std::max<int64_t>(task.piece, 0) * piece_floats, exponents);
        if (task.piece < 0) return;
        // Whoever finishes last joins the pieces, always in the same order.
        if (work.open[static_cast<size_t>(head)].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        const Joined& joined = work.joined[static_cast<size_t>(head)];
        k.decode_join(plan, joined.task, thread_scratch(scratch), work.pieces.data() + joined.first * piece_floats, joined.count, exponents);
    };
    const Status status = run_tasks(static_cast<int64_t>(work.tasks.size()), threads, call.interrupt, std::ref(one));
    work.release_if_large();
    return status;
}

}  // namespace clearhead
