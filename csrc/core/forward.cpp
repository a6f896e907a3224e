// Cuts a forward into tasks and runs them. How it is cut depends on sizes alone, never on the number of threads:
// the same call gives the same bits on any machine of an instruction set.
#include <algorithm>
#include <vector>

#include "decode.h"
#include "kernels.h"
#include "parallel.h"
#include "sums.h"

namespace clearhead {
namespace {

// Multiply-adds that are not worth waking a second thread for: about 10 µs of one thread's work.
constexpr double alone = 5e5;
// What starting and finishing a block takes, in multiply-adds.
constexpr double a_block = 6e4;
// Few blocks with many keys are split into pieces of this many keys.
constexpr int64_t piece_keys = 1024, few_blocks = 16;

struct Joined {
    Task task;
    int64_t first, count;
};

struct Cut {
    std::vector<Task> tasks;
    std::vector<Joined> joined;
    double cost = 0;        // multiply-adds, about
    int64_t most_keys = 0;  // that any task sees
};

Cut cut(const Plan& plan, int lanes) {
    const Call& call = *plan.call;
    const int64_t group = call.Hq / call.Hkv;
    // Few queries: the heads of a group lie side by side, so that each key and value is read once.
    const int64_t together = std::min(group, std::max<int64_t>(1, lanes / call.Lq));
    const int64_t queries = std::min<int64_t>(call.Lq, lanes / together);
    const int64_t blocks = call.B * call.Hkv * ((group + together - 1) / together) * ((call.Lq + queries - 1) / queries);
    const bool split = blocks < few_blocks && call.Lk >= 2 * piece_keys;
    Cut all;
    int64_t pieces = 0;
    // Blocks of one head follow each other, so that its keys and values stay in the cache. Later queries see more
    // keys under a causal mask: they go first, so that no thread is left alone with a long task at the end.
    for (int64_t b = 0; b < call.B; ++b) {
        for (int64_t head = 0, heads = 0; head < call.Hq; head += heads) {
            heads = std::min(together, group - head % group);  // do not reach over into the next group
            for (int64_t query = (call.Lq - 1) / queries * queries; query >= 0; query -= queries) {
                Task task;
                task.b = b;
                task.head = head;
                task.heads = heads;
                task.query = query;
                task.queries = std::min(queries, call.Lq - query);
                task.keys = {0, call.Lk};
                const int64_t first = pieces;
                for (int64_t low = 0; low < call.Lk; low += split ? piece_keys : call.Lk) {
                    if (split) {
                        task.keys = {low, std::min(low + piece_keys, call.Lk)};
                        task.piece = pieces++;
                    }
                    const int64_t keys = keys_in(visible_ranges(plan, task));
                    all.cost += static_cast<double>(keys * task.queries * task.heads);
                    all.most_keys = std::max(all.most_keys, keys);
                    all.tasks.push_back(task);
                }
                if (split) {
                    task.keys = {0, piece_keys};  // what the pieces have in common
                    all.joined.push_back({task, first, pieces - first});
                }
            }
        }
    }
    all.cost = all.cost * static_cast<double>(call.d + call.dv) + a_block * static_cast<double>(all.tasks.size());
    return all;
}

}  // namespace

Status forward(const Call& call) {
    OwnedPlan plan(call);
    SumsOverQueries sums(call);
    plan.sums = sums.places();
    plan.locks = sums.locks();
    const Kernels& k = kernels();
    if (is_decoding(call)) {
        const Status status = decode(plan);
        if (status == Status::done) sums.write();
        return status;
    }
    const Cut work = cut(plan, k.lanes);
    const int threads = work.cost < alone ? 1 : call.threads;
    const int64_t scratch = k.block_scratch(plan, work.most_keys);
    const size_t split = work.joined.empty() ? 0 : work.tasks.size();
    std::vector<float> results(split * static_cast<size_t>(piece_floats(call, k.lanes)));
    Pieces pieces;
    pieces.results = results.data();
    pieces.rows = piece_keys + 16;  // a tile may write beyond the last key
    std::vector<float> scores(call.question_count > 0 ? split * static_cast<size_t>(pieces.rows * k.lanes) : 0);
    pieces.scores = scores.data();
    Status status = run_tasks(static_cast<int64_t>(work.tasks.size()), threads, call.interrupt, [&](int64_t i) {
        k.block(plan, work.tasks[static_cast<size_t>(i)], thread_scratch(scratch), pieces);
    });
    if (status != Status::done) return status;
    status = run_tasks(static_cast<int64_t>(work.joined.size()), threads, call.interrupt, [&](int64_t i) {
        const Joined& joined = work.joined[static_cast<size_t>(i)];
        k.join(plan, joined.task, thread_scratch(scratch), pieces, joined.first, joined.count);
    });
    if (status == Status::done) sums.write();
    return status;
}

}  // namespace clearhead
