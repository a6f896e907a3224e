// Decoding: a few query rows of one key/value head against many keys. Row r is query r % queries of head
// head + r / queries; all rows go through the keys together, so that each key and value is read once.
//
// The online softmax is that of softmax.h with [key][slot] in the lanes: a vector holds several keys of all rows,
// and its maximum is combined across keys by a few shuffles for all rows at once.
#pragma once

#include "answer.h"
#include "fewrows.h"
#include "scores.h"

namespace clearhead {
namespace {

constexpr int64_t decode_keys = 64;    // the most keys of a chunk
constexpr int64_t chunk_bytes = 8192;  // of K or V: the rows of two chunks stay in the first cache
constexpr int decode_groups = 2;       // of up to rows_at_once rows each, in a task
constexpr int few_rows = rows_at_once + rows_at_once / 2;  // with more, blocks of queries are faster

// One chunk of keys: where its rows lie, their factors, who sees them.
struct DecodeChunk {
    int64_t low = 0, count = 0;
    bool masked = false;
    const char* keys[decode_keys + W];  // the last row again behind the last key, so that tiles may be whole
    const char* values[decode_keys + W];
    float key_scale[decode_keys + W], value_scale[decode_keys + W];
    uint64_t words[decode_keys];
};

// Rows that go through a tile together.
struct DecodeGroup {
    int rows = 0, first = 0, slots = 1;
    float* queries = nullptr;  // [padded d / W][rows][W]
    float* scores[2];          // of the chunk whose turn it is, [key][slots], and of the one behind it
    float* out = nullptr;      // [rows][padded dv], relative to `peak`
    alignas(64) float peak[W], sum[W], fade[W];
    void (*score)(const char* const*, int64_t, int64_t, const float*, float*, RowsAhead) = nullptr;
    void (*mix[2])(const char* const*, int64_t, int64_t, const float*, int64_t, const float*, float*, RowsAhead) = {};
    float* exponents = nullptr;  // [key][slots], if any question is asked
};

// The products for a type and a number of rows that are known only at run time.
template <typename T, int R>
inline void choose_score(int rows, DecodeGroup& group) {
    if (rows == R) {
        group.score = score_rows<T, R>;
    } else if constexpr (R < rows_at_once) {
        choose_score<T, R + 1>(rows, group);
    }
}
template <typename T, int R>
inline void choose_mix(int rows, void (*&mix)(const char* const*, int64_t, int64_t, const float*, int64_t, const float*, float*, RowsAhead)) {
    if (rows == R) {
        mix = mix_rows<T, R>;
    } else if constexpr (R < mix_rows_at_once) {
        choose_mix<T, R + 1>(rows, mix);
    }
}

// Calls with(an element of the type).
template <class With>
CLEARHEAD_INLINE void with_type(Type type, const With& with) {
    switch (type) {
        case Type::f32: return with(float{});
        case Type::bf16: return with(Bf16{});
        case Type::f16: return with(F16{});
        case Type::i8: return with(int8_t{});
    }
}

// A task in progress.
struct Decoder {
    const Plan& plan;
    const Call& call;
    const Task& task;
    int64_t kv;
    Stream key, value;
    Scaling scaling;
    int groups = 0;
    DecodeGroup group[decode_groups];
    int64_t chunk_size;  // keys
    float *key_room, *value_room, *extra, *row;
    DecodeChunk* chunks;

    Decoder(const Plan& of, const Task& at, Scratch& scratch)
        : plan(of),
          call(*of.call),
          task(at),
          kv(at.head / (call.Hq / call.Hkv)),
          key(call.k, call.d),
          value(call.v, call.dv),
          scaling(call.scale) {
        const int64_t rows = task.heads * task.queries;
        for (int first = 0; first < rows; first += rows_at_once) {
            DecodeGroup& g = group[groups++];
            g.first = first;
            g.rows = static_cast<int>(rows - first < rows_at_once ? rows - first : rows_at_once);
            g.slots = slots_for(g.rows);
            g.queries = scratch.take<float>(g.rows * key.wide);
            g.out = scratch.take<float>(g.rows * value.wide);
            for (float*& scores : g.scores) scores = scratch.take<float>((decode_keys + W) * g.slots);
            with_type(key.type, [&](auto t) { choose_score<decltype(t), 1>(g.rows, g); });
            for (int r = 0; r < g.rows; r += mix_rows_at_once) {
                const int here = g.rows - r < mix_rows_at_once ? g.rows - r : mix_rows_at_once;
                with_type(value.type, [&](auto t) { choose_mix<decltype(t), 1>(here, g.mix[r / mix_rows_at_once]); });
            }
        }
        extra = scratch.take<float>(decode_keys);
        row = scratch.take<float>(key.wide);
        key_room = scratch.take<float>(key.staged ? decode_keys * key.wide : 0);
        value_room = scratch.take<float>(value.staged ? decode_keys * value.wide : 0);
        chunks = scratch.take<DecodeChunk>(3);
        const int64_t widest = key.row_bytes > value.row_bytes ? key.row_bytes : value.row_bytes;
        chunk_size = decode_keys;
        while (chunk_size > W && chunk_size * widest > chunk_bytes) chunk_size /= 2;
    }

    static int64_t bytes(const Call& call) {
        const int64_t rows = decode_groups * rows_at_once, d = padded(call.d), dv = padded(call.dv);
        const int64_t floats = rows * (d + dv) + 2 * (decode_keys + W) * rows + decode_keys * (1 + d + dv) + d;
        return floats * 4 + static_cast<int64_t>(3 * sizeof(DecodeChunk)) + (4 * decode_groups + 5) * 64;
    }

    // Head and query of row r.
    int64_t head_of(int r) const { return task.head + r / task.queries; }
    int64_t query_of(int r) const { return task.query + r % task.queries; }

    void start() {
        // A learned sink is a key without a value that is there from the start; of split keys, the first piece has it.
        const bool sink = call.sink_logits != nullptr && task.keys.low == 0;
        for (int i = 0; i < groups; ++i) {
            DecodeGroup& g = group[i];
            for (int r = 0; r < g.rows; ++r) {
                read_row(call.q, task.b, head_of(g.first + r), query_of(g.first + r), call.d, row);
                for (int64_t t = call.d; t < key.wide; ++t) row[t] = 0.0f;
                with_type(key.type, [&](auto type) { to_stream_order<decltype(type)>(row, key.wide); });
                for (int64_t t = 0; t < key.wide; t += W)
                    store(g.queries + t * g.rows + r * W, load(row + t) * scaling.query);
            }
            for (int64_t t = 0; t < g.rows * value.wide; t += W) store(g.out + t, vf{});
            for (int l = 0; l < W; ++l) {
                g.peak[l] = lowest;
                g.sum[l] = 0.0f;
                const int r = l % g.slots;
                if (!sink || r >= g.rows) continue;
                const float logit = call.sink_logits[head_of(g.first + r)] * log2_e;
                if (!(logit >= lowest)) continue;
                g.peak[l] = logit;
                if (l < g.slots) g.sum[l] = 1.0f;  // once, not for every key of the vector
            }
        }
    }

    // Softcap and biases, in the same steps as scores.h, where lanes are laid out differently.
    void finish_scores(const DecodeGroup& g, const DecodeChunk& chunk, float* scores) {
        const int64_t vectors = (chunk.count * g.slots + W - 1) / W;
        const vf cap = same(call.softcap * log2_e), into = same(scaling.factor / log2_e / call.softcap);
        if (key.scaled())
            for (int64_t j = 0; j < chunk.count; ++j)
                for (int r = 0; r < g.slots; ++r) scores[j * g.slots + r] *= chunk.key_scale[j];
        for (int64_t t = 0; t < vectors; ++t) {
            const vf x = load(scores + t * W);
            store(scores + t * W, call.softcap > 0 ? cap * tanh(x * into) : x * scaling.factor);
        }
        const Bias& bias = call.bias;
        for (int r = 0; r < g.rows && bias.data != nullptr; ++r) {
            const int64_t at = task.b * bias.batch + head_of(g.first + r) * bias.head + query_of(g.first + r) * bias.query;
            floats_of_type(bias.type, bias.data, at + chunk.low * bias.key, bias.key, chunk.count, extra);
            for (int64_t j = 0; j < chunk.count; ++j) {
                float& score = scores[j * g.slots + r];
                const float sum = score + extra[j] * log2_e;
                score = extra[j] == -__builtin_inff() ? extra[j] : sum < lowest ? lowest : sum;
            }
        }
        const RelativeBias& relative = call.relative;
        for (int r = 0; r < g.rows && relative.values != nullptr; ++r) {
            const int64_t position = call.mask.offset[task.b * call.mask.offset_batch] + query_of(g.first + r);
            const float* from = relative.values + head_of(g.first + r) * relative.head +
                                (position - call.mask.key_offset - chunk.low - relative.first);
            for (int64_t j = 0; j < chunk.count; ++j) scores[j * g.slots + r] += from[-j] * log2_e;
        }
    }

    // Turns the chunk's scores into weights relative to the new peak, and keeps the exponents if they are asked for.
    template <int slots>
    void admit(DecodeGroup& g, const DecodeChunk& chunk, float* scores, float by, bool scale_keys) {
        constexpr int64_t K = W / slots;
        const int64_t tiles = (chunk.count + K - 1) / K;
        const vf nothing = same(-__builtin_inff()), factor = same(by);
        vf most = nothing;
        for (int64_t t = 0; t < tiles; ++t) {
            vf x = load(scores + t * W) * factor;
            if (scale_keys) x *= spread<slots>(chunk.key_scale + t * K);
            const bool cut = (t + 1) * K > chunk.count;
            if (cut || chunk.masked) {
                const int64_t here = cut ? chunk.count - t * K : K;
                uint64_t seen = first_bits(here * slots);
                if (chunk.masked) {
                    seen = 0;
                    for (int64_t k = 0; k < here; ++k)
                        seen |= (chunk.words[t * K + k] >> g.first & first_bits(slots)) << (k * slots);
                }
                x = choose(lanes_in(seen), x, nothing);
            }
            store(scores + t * W, x);
            most = larger(x, most);
        }
        if (g.exponents != nullptr)
            __builtin_memcpy(g.exponents + chunk.low * slots, scores, static_cast<size_t>(chunk.count * slots) * 4);
        const vf before = load(g.peak), peak = larger(largest_of_slots<slots>(most), before);
        const vf fade = exp2(before - peak);
        vf total{};
        for (int64_t t = 0; t < tiles; ++t) {
            const vf weight = exp2(load(scores + t * W) - peak);
            total += weight;
            store(scores + t * W, value.scaled() ? weight * spread<slots>(chunk.value_scale + t * K) : weight);
        }
        store(g.peak, peak);
        store(g.fade, fade);
        store(g.sum, load(g.sum) * fade + total);
    }

    void score(DecodeChunk& chunk, int turn) {
        key.stage(task.b, kv, chunk.low, chunk.count, chunk.keys, key_room);
        for (int i = 0; i < groups; ++i) {
            DecodeGroup& g = group[i];
            const int64_t at_once = W / g.slots;
            const RowsAhead ahead{chunk.values, i == 0 ? value.row_bytes : 0};
            g.score(chunk.keys, (chunk.count + at_once - 1) / at_once, key.wide / W, g.queries, g.scores[turn], ahead);
        }
    }

    void weigh(const DecodeChunk& chunk, int turn) {
        const bool extras = has_extras(call);
        const float by = extras ? 1.0f : scaling.factor;
        const bool scale_keys = !extras && key.scaled();
        for (int i = 0; i < groups; ++i) {
            DecodeGroup& g = group[i];
            float* scores = g.scores[turn];
            if (extras) finish_scores(g, chunk, scores);
            switch (g.slots) {
                case 1: admit<1>(g, chunk, scores, by, scale_keys); break;
                case 2: admit<2>(g, chunk, scores, by, scale_keys); break;
                case 4: admit<4>(g, chunk, scores, by, scale_keys); break;
                default:
                    if constexpr (W >= 8) admit<8>(g, chunk, scores, by, scale_keys);
            }
        }
    }

    void mix(DecodeChunk& chunk, int turn, const DecodeChunk* later) {
        value.stage(task.b, kv, chunk.low, chunk.count, chunk.values, value_room);
        for (int i = 0; i < groups; ++i) {
            DecodeGroup& g = group[i];
            for (int r = 0; r < g.rows; r += mix_rows_at_once) {
                RowsAhead ahead;
                if (i == 0 && r == 0 && later != nullptr) ahead = {later->keys, key.row_bytes};
                g.mix[r / mix_rows_at_once](chunk.values, chunk.count, value.wide / W, g.scores[turn] + r, g.slots, g.fade + r,
                                            g.out + r * value.wide, ahead);
            }
        }
    }

    // Walks over the chunks of the visible keys. The scores of the next chunk are computed between the softmax of
    // this one and its values, so that neither product waits for the other's last results.
    void run() {
        const Ranges ranges = visible_ranges(plan, task);
        int part = 0;
        int64_t at = ranges.count > 0 ? ranges.part[0].low : 0;
        auto find = [&](DecodeChunk& chunk) {
            while (part < ranges.count) {
                const int64_t left = ranges.part[part].high - at;
                if (left <= 0) {
                    if (++part < ranges.count) at = ranges.part[part].low;
                    continue;
                }
                chunk.low = at;
                chunk.count = left < chunk_size ? left : chunk_size;
                at += chunk.count;
                chunk.masked = visible_words(plan, task, chunk.low, chunk.count, chunk.words);
                if (chunk.masked) {
                    uint64_t seen = 0;
                    for (int64_t j = 0; j < chunk.count; ++j) seen |= chunk.words[j];
                    if (seen == 0) continue;  // nobody sees anything here
                }
                key.find(task.b, kv, chunk.low, chunk.count, chunk_size, chunk.keys, chunk.key_scale);
                value.find(task.b, kv, chunk.low, chunk.count, chunk_size, chunk.values, chunk.value_scale);
                return true;
            }
            return false;
        };
        DecodeChunk *now = chunks, *next = chunks + 1, *later = chunks + 2;
        bool any = find(*now), more = any && find(*next);
        if (any) score(*now, 0);
        for (int turn = 0; any; turn ^= 1) {
            weigh(*now, turn);
            bool another = false;
            if (more) {
                another = find(*later);
                score(*next, turn ^ 1);
            }
            mix(*now, turn, another ? later : nullptr);
            DecodeChunk* done = now;
            now = next;
            next = later;
            later = done;
            any = more;
            more = another;
        }
    }

    // Out and lse from what was gathered: out / sum, and log sum + peak; 0 and -inf where a row saw nothing.
    // Expects the sums of all keys in the lanes of the first slots.
    void finish() {
        for (int i = 0; i < groups; ++i) {
            DecodeGroup& g = group[i];
            float share[W], lse[W];
            const vf total = load(g.sum);
            store(share, choose(total == 0.0f, same(0.0f), 1.0f / total));
            store(lse, (load(g.peak) + log2(total)) * ln_2);
            for (int r = 0; r < g.rows; ++r) {
                float* row = g.out + r * value.wide;
                for (int64_t t = 0; t < value.wide; t += W) store(row + t, load(row + t) * share[r]);
                with_type(value.type, [&](auto type) { to_natural_order<decltype(type)>(row, value.wide); });
                const int64_t head = head_of(g.first + r), query = query_of(g.first + r);
                write_floats(call.out_type, call.out, task.b * call.out_batch + head * call.out_head + query * call.out_row, call.dv, row);
                if (call.lse != nullptr) call.lse[(task.b * call.Hq + head) * call.Lq + query] = lse[r];
            }
        }
    }

    void gather_sums() {
        for (int i = 0; i < groups; ++i) {
            DecodeGroup& g = group[i];
            const vf sum = load(g.sum);
            switch (g.slots) {
                case 1: store(g.sum, sum_of_slots<1>(sum)); break;
                case 2: store(g.sum, sum_of_slots<2>(sum)); break;
                case 4: store(g.sum, sum_of_slots<4>(sum)); break;
                default: store(g.sum, sum_of_slots<8>(sum));
            }
        }
    }

    // The exponents that all pieces of this task's rows share: [Lk][slots] for each group.
    void keep_exponents(float* exponents) {
        for (int i = 0; i < groups; ++i) {
            group[i].exponents = exponents;
            exponents += call.Lk * group[i].slots;
        }
    }
};

int64_t decode_piece_floats(const Call& call) {
    return decode_groups * (2 * W + rows_at_once * padded(call.dv));
}

int64_t decode_bytes(const Plan& plan) {
    const Call& call = *plan.call;
    const int64_t asked = call.question_count == 0 ? 0 : Answers::bytes(call) + 4 * (2 * block_lanes + 2 * chunk_keys * block_lanes + chunk_keys * call.dv) + 5 * 64;
    return Decoder::bytes(call) + asked;
}

// Answers the questions about a task's rows, from its exponents and the final peaks and sums.
inline void answer_rows(const Plan& plan, const Task& task, const Decoder& decoder, Scratch& scratch) {
    const Call& call = *plan.call;
    float* peak = scratch.take<float>(block_lanes);
    float* sum = scratch.take<float>(block_lanes);
    float* exponents = scratch.take<float>(chunk_keys * block_lanes);
    float* weights = scratch.take<float>(chunk_keys * block_lanes);
    float* room = scratch.take<float>(chunk_keys * call.dv);
    for (int64_t lane = 0; lane < block_lanes; lane += W) {
        store(peak + lane, same(lowest));
        store(sum + lane, vf{});
    }
    for (int64_t j = 0; j < chunk_keys * block_lanes; j += W) store(exponents + j, same(-__builtin_inff()));
    for (int i = 0; i < decoder.groups; ++i) {
        const DecodeGroup& g = decoder.group[i];
        for (int r = 0; r < g.rows; ++r) {
            peak[g.first + r] = g.peak[r];
            sum[g.first + r] = g.sum[r];
        }
    }
    Answers answers(plan, task, peak, sum, scratch);
    const Ranges ranges = visible_ranges(plan, task);
    for (int k = 0; k < ranges.count; ++k)
        for (int64_t low = ranges.part[k].low, count; low < ranges.part[k].high; low += count) {
            const int64_t left = ranges.part[k].high - low;
            count = left < chunk_keys ? left : chunk_keys;
            for (int i = 0; i < decoder.groups; ++i) {
                const DecodeGroup& g = decoder.group[i];
                for (int64_t j = 0; j < count; ++j)
                    for (int r = 0; r < g.rows; ++r)
                        exponents[j * block_lanes + g.first + r] = g.exponents[(low + j) * g.slots + r];
            }
            answers.weigh(exponents, count, block_lanes, weights);
            Panel values{nullptr, 0};
            if (answers.needs_values()) values = stage(call.v, task.b, decoder.kv, low, count, call.dv, room);
            answers.take({low, count, exponents, weights, block_lanes}, values);
        }
    answers.close();
}

// Decodes one task; if task.piece >= 0 the unfinished result goes to `piece`. exponents: of this task's head, or null.
void decode_rows(const Plan& plan, const Task& task, char* memory, float* piece, float* exponents) {
    Scratch scratch{memory};
    Decoder decoder(plan, task, scratch);
    if (exponents != nullptr) {
        decoder.keep_exponents(exponents);
        for (int i = 0; i < decoder.groups; ++i) {
            const DecodeGroup& g = decoder.group[i];
            for (int64_t j = task.keys.low * g.slots; j < task.keys.high * g.slots; ++j) g.exponents[j] = -__builtin_inff();
        }
    }
    decoder.start();
    decoder.run();
    decoder.gather_sums();
    if (task.piece < 0) {
        decoder.finish();
        if (exponents != nullptr) answer_rows(plan, task, decoder, scratch);
        return;
    }
    for (int i = 0; i < decoder.groups; ++i) {
        const DecodeGroup& g = decoder.group[i];
        store(piece, load(g.peak));
        store(piece + W, load(g.sum));
        __builtin_memcpy(piece + 2 * W, g.out, static_cast<size_t>(g.rows * decoder.value.wide) * 4);
        piece += 2 * W + rows_at_once * decoder.value.wide;
    }
}

// Joins `count` pieces over disjoint keys, one behind the other, into the call's results. They combine exactly when
// each brings its maximum and sum (Dao et al. 2022, section 3.1).
void join_decoded(const Plan& plan, const Task& task, char* memory, const float* pieces, int64_t count, float* exponents) {
    const Call& call = *plan.call;
    Scratch scratch{memory};
    Decoder decoder(plan, task, scratch);
    if (exponents != nullptr) decoder.keep_exponents(exponents);
    const int64_t size = decode_piece_floats(call), wide = decoder.value.wide;
    for (int i = 0; i < decoder.groups; ++i) {
        DecodeGroup& g = decoder.group[i];
        const float* first = pieces + i * (2 * W + rows_at_once * wide);
        vf peak = same(lowest), total{};
        for (int64_t k = 0; k < count; ++k) peak = larger(load(first + k * size), peak);
        for (int64_t t = 0; t < g.rows * wide; t += W) store(g.out + t, vf{});
        for (int64_t k = 0; k < count; ++k) {
            const float* piece = first + k * size;
            const vf fade = exp2(load(piece) - peak);
            store(g.fade, fade);
            total += load(piece + W) * fade;
            for (int r = 0; r < g.rows; ++r)
                for (int64_t t = r * wide; t < (r + 1) * wide; t += W)
                    store(g.out + t, load(g.out + t) + load(piece + 2 * W + t) * g.fade[r]);
        }
        store(g.peak, peak);
        store(g.sum, total);
    }
    decoder.finish();
    if (exponents != nullptr) answer_rows(plan, task, decoder, scratch);
}

// Whether a call has so few rows to a key/value head that lanes are better filled with columns than with queries.
// Where blocks multiply bfloat16 pairs they win sooner.
bool decodes(const Call& call) {
    const int64_t rows = call.Lq * (call.Hq / call.Hkv);
    if (rows <= rows_at_once) return true;
#if defined(CLEARHEAD_PAIRS)
    if (runs_on_pairs(call, Scaling(call.scale))) return false;
#endif
    return rows <= few_rows;
}

}  // namespace
}  // namespace clearhead
