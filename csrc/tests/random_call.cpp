#include "random_call.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace tests {

using namespace clearhead;

namespace {

constexpr double most_work = 8e6;  // multiply-adds of one call: the reference should take milliseconds

const char* name_of(Type type) {
    const char* names[] = {"f32", "bf16", "f16", "i8"};
    return names[static_cast<int>(type)];
}

int64_t odd_length(Dice& dice, int64_t most) {
    if (dice.chance(0.5))
        return std::min(most, dice.one_of<int64_t>({1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 23, 31, 33, 47, 48, 49, 63, 64, 65, 95,
                                                    96, 97, 127, 128, 129, 191, 193, 255, 256, 257}));
    return dice.from(1, most);
}

int64_t head_size(Dice& dice) {
    if (dice.chance(0.2)) return dice.from(1, 256);
    return dice.one_of<int64_t>({1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 64, 65, 80, 96, 100, 128, 129,
                                 192, 255, 256});
}

uint16_t bfloat(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

uint16_t half(float x) {  // to the nearest by magnitude, never to infinity
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double size = std::min(std::abs(static_cast<double>(x)), 65504.0);
    int exponent = 0;
    std::frexp(size, &exponent);
    exponent = std::max(exponent - 1, -14);
    const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // 1024 … 2048
    return static_cast<uint16_t>(sign | (static_cast<uint32_t>(exponent + 14) * 1024 + steps));
}

void put(void* data, Type type, int64_t at, double x) {
    const auto value = static_cast<float>(x);
    switch (type) {
        case Type::f32: static_cast<float*>(data)[at] = value; break;
        case Type::bf16: static_cast<uint16_t*>(data)[at] = bfloat(value); break;
        case Type::f16: static_cast<uint16_t*>(data)[at] = half(value); break;
        case Type::i8:
            static_cast<int8_t*>(data)[at] = static_cast<int8_t>(std::max(-128.0, std::min(127.0, std::nearbyint(x))));
            break;
    }
}

}  // namespace

void RandomCall::say(const char* format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    description += text;
}

RandomCall::RandomCall(uint64_t of) : seed(of), dice(of) {
    draw_sizes();
    draw_types();
    draw_scores();
    const double density = dice.one_of<double>({0.0, 0.15, 0.3, 0.5});
    call.mask = draw_mask(true, density);
    if (dice.chance(0.2)) {
        further.push_back(draw_mask(false, density));
        if (dice.chance(0.3)) {
            further.push_back(draw_mask(false, density));
            further[0].next = &further[1];
        }
        call.mask.next = &further[0];
    }
    call.q = draw_rows(q_type, call.Hq, call.Lq, call.d, q_size, false);
    call.k = draw_rows(k_type, call.Hkv, call.Lk, call.d, k_size, true);
    call.v = draw_rows(v_type, call.Hkv, call.Lk, call.dv, dice.one_of<double>({0.01, 1, 1, 30}), true);
    draw_biases();
    draw_results();
    if (dice.chance(0.6)) draw_questions();
    draw_gradients();
    call.threads = static_cast<int>(dice.from(1, 8));
    memory.remember_inputs();
}

// ------------------------------------------------------------------ sizes and numbers

void RandomCall::draw_sizes() {
    call.B = dice.one_of<int64_t>({1, 1, 1, 2, 3, 5});
    call.Hkv = dice.one_of<int64_t>({1, 1, 2, 3});
    int64_t group = dice.one_of<int64_t>({1, 1, 1, 2, 3, 4, 7, 8});
    call.Lq = odd_length(dice, 300);
    call.Lk = dice.chance(0.3) ? call.Lq : odd_length(dice, 300);
    call.d = head_size(dice);
    call.dv = dice.chance(0.7) ? call.d : head_size(dice);
    const double kind = dice.uniform();
    if (kind < 0.25) {  // decoding
        call.Lq = dice.from(1, 4);
        call.Lk = odd_length(dice, dice.chance(0.3) ? 5000 : 300);
    } else if (kind < 0.32) {  // few queries and so many keys that they are split
        call.Lq = dice.from(1, 70);
        call.Lk = dice.from(1000, 5000);
    } else if (kind < 0.42) {  // many heads of short rows
        call.Lq = dice.from(1, 20);
        group = dice.from(1, 33);
    }
    auto work = [&] { return static_cast<double>(call.B * call.Hkv * group * call.Lq * call.Lk * (call.d + call.dv)); };
    while (work() > most_work) {
        int64_t* large = &call.d;
        for (int64_t* size : {&call.dv, &call.Lq}) {
            if (*size > *large) large = size;
        }
        if (call.B > 1 && dice.chance(0.4)) large = &call.B;
        if (call.Hkv > 1 && dice.chance(0.4)) large = &call.Hkv;
        if (group > 4 && dice.chance(0.4)) large = &group;
        if (call.Lk <= 300 && call.Lk > *large) large = &call.Lk;
        *large = std::max<int64_t>(1, *large * 2 / 3);
    }
    call.Hq = call.Hkv * group;
    say("B %ld Hq %ld Hkv %ld Lq %ld Lk %ld d %ld dv %ld", call.B, call.Hq, call.Hkv, call.Lq, call.Lk, call.d, call.dv);
}

void RandomCall::draw_types() {
    const Type type = dice.one_of<Type>({Type::f32, Type::f32, Type::bf16, Type::bf16, Type::f16});
    q_type = k_type = v_type = type;
    if (dice.chance(0.15)) q_type = dice.one_of<Type>({Type::f32, Type::bf16, Type::f16});
    if (dice.chance(0.1)) k_type = dice.one_of<Type>({Type::f32, Type::bf16, Type::f16, Type::i8});
    if (dice.chance(0.1)) v_type = dice.one_of<Type>({Type::f32, Type::bf16, Type::f16, Type::i8});
    if (dice.chance(0.1)) k_type = v_type = Type::i8;
    call.out_type = dice.chance(0.8) ? q_type : dice.one_of<Type>({Type::f32, Type::bf16, Type::f16});
    say(" q %s k %s v %s out %s", name_of(q_type), name_of(k_type), name_of(v_type), name_of(call.out_type));
}

void RandomCall::draw_scores() {
    // Scores are products of d normal numbers: about sqrt(d) · scale · sizes.
    const double spread = dice.one_of<double>({0.01, 0.3, 1, 1, 2, 5, 30, 300, 3000}), root = std::sqrt(static_cast<double>(call.d));
    q_size = dice.one_of<double>({0.1, 1, 1, 8});
    k_size = dice.one_of<double>({0.1, 1, 1, 8});
    call.scale = static_cast<float>(spread / (q_size * k_size * root));
    if (dice.chance(0.05)) call.scale = -call.scale;
    if (dice.chance(0.02)) call.scale = dice.one_of<float>({0.0f, 1e-35f});
    if (dice.chance(0.15)) call.softcap = dice.one_of<float>({0.7f, 5.0f, 30.0f, 50.0f});
    say(" scores %g scale %g", spread, static_cast<double>(call.scale));
    if (call.softcap > 0) say(" softcap %g", static_cast<double>(call.softcap));
}

int64_t RandomCall::present(int64_t b) const {
    int64_t count = call.Lk;
    for (const Mask* m = &call.mask; m != nullptr; m = m->next)
        if (m->lengths != nullptr) count = std::min(count, m->lengths[b]);
    return count;
}

// The table of a paged array: blocks in no order, sometimes shared; nothing in it where no key is.
void RandomCall::page(Rows& rows, int64_t heads, int64_t columns, Layout& layout, int64_t& blocks) {
    rows.page = dice.one_of<int64_t>({1, 3, 16, 16, 17, 32, 64, 128, 256});
    const int64_t pages = (call.Lk + rows.page - 1) / rows.page;
    blocks = call.B * pages + dice.from(0, 3);
    std::vector<int32_t> order(static_cast<size_t>(blocks));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[static_cast<size_t>(dice.from(0, static_cast<int64_t>(i)))]);
    rows.table_batch = dice.chance(0.2) ? 0 : pages + dice.from(0, 2);
    const int64_t own = rows.table_batch == 0 ? 1 : call.B;
    auto* table = memory.input<int32_t>((own - 1) * rows.table_batch + pages);
    int64_t longest = 0;
    for (int64_t b = 0; b < call.B; ++b) longest = std::max(longest, present(b));
    for (int64_t b = 0; b < own; ++b)
        for (int64_t p = 0; p < pages; ++p) {
            const bool there = p * rows.page < (own == 1 ? longest : present(b));
            table[b * rows.table_batch + p] = there ? order[static_cast<size_t>(b * pages + p)] : -1;
        }
    if (dice.chance(0.2) && present(0) > 0) table[0] = order.back();
    rows.table = table;
    layout = draw_layout(dice, {blocks, heads, rows.page, columns}, {0.2, 0, 0, 0.05});
    say(" page %ld", rows.page);
}

Rows RandomCall::draw_rows(Type type, int64_t heads, int64_t length, int64_t columns, double amplitude, bool keys) {
    Rows rows;
    rows.type = type;
    Layout layout;
    int64_t items = call.B;
    if (keys && dice.chance(0.15)) {
        page(rows, heads, columns, layout, items);
    } else {
        layout = draw_layout(dice, {call.B, heads, length, columns}, {0.2, 0.05, 0.05, 0.07});
    }
    char* data = memory.input_of(dice, layout, bytes_of(type));
    rows.data = data;
    rows.batch = layout.stride[0];
    rows.head = layout.stride[1];
    rows.row = layout.stride[2];
    rows.column = layout.stride[3];
    Layout scales;
    float* scale = nullptr;
    if (type == Type::i8) {
        scales = draw_layout(dice, {layout.size[0], heads, layout.size[2], 1}, {0.2, 0.1, 0.05, 0});
        scale = reinterpret_cast<float*>(memory.input_of(dice, scales, 4));
        rows.scale = scale;
        rows.scale_batch = scales.stride[0];
        rows.scale_head = scales.stride[1];
        rows.scale_row = scales.stride[2];
    }
    // Rows that are not there stay NaN: whoever reads them is seen.
    for (int64_t b = 0; b < call.B; ++b)
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t j = 0; j < (keys ? present(b) : length); ++j) {
                int64_t item = b, row = j;
                if (rows.table != nullptr) {
                    item = rows.table[b * rows.table_batch + j / rows.page];
                    row = j % rows.page;
                }
                for (int64_t t = 0; t < columns; ++t)
                    put(data, type, item * rows.batch + h * rows.head + row * rows.row + t * rows.column,
                        type == Type::i8 ? 40 * dice.normal() : amplitude * dice.normal());
                if (scale != nullptr)
                    scale[item * rows.scale_batch + h * rows.scale_head + row * rows.scale_row] =
                        static_cast<float>(amplitude / 40 * (0.5 + dice.uniform()));
            }
    say(" (%ld %ld %ld %ld)", rows.batch, rows.head, rows.row, rows.column);
    return rows;
}

// ------------------------------------------------------------------ masks

int64_t* RandomCall::numbers(int64_t length, int64_t& batch, int64_t low, int64_t high, bool runs) {
    const int64_t items = dice.chance(0.5) ? call.B : 1;
    batch = items == 1 ? 0 : length + (dice.chance(0.2) ? dice.from(0, 5) : 0);
    auto* all = memory.input<int64_t>((items - 1) * batch + length);
    for (int64_t b = 0; b < items; ++b) {
        int64_t number = dice.from(low, high);
        const double change = dice.one_of<double>({0.02, 0.1, 0.4});
        for (int64_t j = 0; j < length; ++j) {
            if (!runs || dice.chance(change)) number = dice.from(low, high);
            all[b * batch + j] = number;
        }
    }
    return all;
}

// Where rows or documents start: for each key its own number, constant for a row, or by documents.
void RandomCall::draw_starts(Mask& m) {
    m.origin_batch = dice.chance(0.5) ? call.Lk : 0;
    if (call.B == 1) m.origin_batch = 0;
    const int64_t items = m.origin_batch == 0 ? 1 : call.B;
    auto* origin = memory.input<int64_t>((items - 1) * m.origin_batch + call.Lk);
    const int64_t kind = m.document_key != nullptr ? 2 : dice.from(0, 2);
    for (int64_t b = 0; b < items; ++b) {
        const int64_t constant = m.key_offset + dice.from(0, call.Lk / 2);
        for (int64_t j = 0; j < call.Lk; ++j) {
            int64_t start = constant;
            if (kind == 1) start = m.key_offset + dice.from(0, call.Lk);
            if (kind == 2 && m.document_key != nullptr) {
                const int64_t* ids = m.document_key + b * m.document_key_batch;
                start = m.key_offset + (std::find(ids, ids + call.Lk, ids[j]) - ids);
            }
            origin[b * m.origin_batch + j] = start;
        }
    }
    m.origin = origin;
    say(" origin %ld", kind);
}

Mask RandomCall::draw_mask(bool first, double density) {
    Mask m;
    say(first ? " | mask" : " | and");
    m.key_offset = dice.one_of<int64_t>({0, 0, 0, 0, 3, 1000, -7});
    if (dice.chance(0.02)) m.key_offset = int64_t{1} << 40;
    m.offset_batch = dice.chance(0.2) ? 1 : 0;
    auto* offset = memory.input<int64_t>(m.offset_batch == 1 ? call.B : 1);
    for (int64_t b = 0; b < (m.offset_batch == 1 ? call.B : 1); ++b)
        offset[b] = m.key_offset + (dice.chance(0.6) ? call.Lk - call.Lq : dice.from(-call.Lq - 3, call.Lk + 3));
    m.offset = offset;
    say(" key_offset %ld offset %ld", m.key_offset, offset[0]);
    if (dice.chance(0.5)) {
        m.causal = true;
        say(" causal");
        if (dice.chance(density)) {
            m.prefix_batch = dice.chance(0.5) ? 1 : 0;
            auto* prefix = memory.input<int64_t>(m.prefix_batch == 1 ? call.B : 1);
            for (int64_t b = 0; b < (m.prefix_batch == 1 ? call.B : 1); ++b) prefix[b] = m.key_offset + dice.from(0, call.Lk);
            m.prefix = prefix;
            say(" prefix %ld", prefix[0]);
        }
        if (dice.chance(density / 2)) {
            m.block_key = numbers(call.Lk, m.block_key_batch, -1, 4, true);
            m.block_query = numbers(call.Lq, m.block_query_batch, -1, 4, true);
            say(" blocks");
        }
    }
    if (dice.chance(density)) {
        if (dice.chance(0.8)) m.left = dice.one_of<int64_t>({0, 1, 2, 7, dice.from(0, call.Lk), dice.from(0, call.Lk / 4), 5000});
        if (dice.chance(0.5)) m.right = dice.one_of<int64_t>({0, 1, 5, dice.from(0, call.Lk), dice.from(0, call.Lk / 4), 5000});
        if (dice.chance(0.5)) m.sinks = dice.one_of<int64_t>({1, 4, dice.from(1, call.Lk)});
        if (dice.chance(0.02)) m.left = (int64_t{1} << 62) - 1;
        say(" left %ld right %ld sinks %ld", m.left, m.right, m.sinks);
    }
    if (dice.chance(density / 2)) {
        m.chunk = dice.from(1, call.Lk + 2);
        say(" chunk %ld", m.chunk);
    }
    if (dice.chance(density / 2)) {
        const int64_t most = dice.from(0, 6);
        m.document_key = numbers(call.Lk, m.document_key_batch, -2, most, dice.chance(0.8));
        m.document_query = numbers(call.Lq, m.document_query_batch, -2, most, dice.chance(0.8));
        say(" documents");
    }
    if (dice.chance(density / 2)) {
        const int64_t items = dice.chance(0.6) ? call.B : 1;
        m.real_batch = items == 1 ? 0 : call.Lk;
        auto* real = memory.input<uint8_t>(items * call.Lk);
        const double holes = dice.one_of<double>({0, 0.01, 0.3});
        for (int64_t b = 0; b < items; ++b) {
            const int64_t from = dice.chance(0.5) ? 0 : dice.from(0, call.Lk), to = dice.chance(0.5) ? call.Lk : dice.from(0, call.Lk);
            for (int64_t j = 0; j < call.Lk; ++j) real[b * call.Lk + j] = j >= from && j < to && !dice.chance(holes);
        }
        m.real = real;
        say(" real");
    }
    if (dice.chance(density / 2)) {
        auto* lengths = memory.input<int64_t>(call.B);
        for (int64_t b = 0; b < call.B; ++b) lengths[b] = dice.chance(0.1) ? 0 : dice.from(0, call.Lk);
        m.lengths = lengths;
        say(" lengths %ld", lengths[0]);
    }
    if ((m.sinks > 0 || m.chunk > 0 || m.prefix != nullptr) && dice.chance(0.4)) draw_starts(m);
    if (dice.chance(density / 2)) {
        const Layout layout = draw_layout(dice,
                                          {dice.chance(0.5) ? call.B : 1, dice.chance(0.5) ? call.Hq : 1,
                                           dice.chance(0.8) ? call.Lq : 1, dice.chance(0.9) ? call.Lk : 1},
                                          {0.2, 0, 0.05, 0.1});
        auto* dense = reinterpret_cast<uint8_t*>(memory.input_of(dice, layout, 1));
        const double seen = dice.one_of<double>({0.1, 0.5, 0.95});
        layout.for_each([&](int64_t, int64_t, int64_t, int64_t, int64_t at) { dense[at] = dice.chance(seen); });
        m.dense = dense;
        m.dense_batch = layout.size[0] == 1 ? 0 : layout.stride[0];
        m.dense_head = layout.size[1] == 1 ? 0 : layout.stride[1];
        m.dense_query = layout.size[2] == 1 ? 0 : layout.stride[2];
        m.dense_key = layout.size[3] == 1 ? 0 : layout.stride[3];
        say(" dense (%ld %ld %ld %ld)", m.dense_batch, m.dense_head, m.dense_query, m.dense_key);
    }
    return m;
}

// ------------------------------------------------------------------ what is added to scores

void RandomCall::draw_biases() {
    if (dice.chance(0.15)) {
        const Layout layout = draw_layout(dice,
                                          {dice.chance(0.5) ? call.B : 1, dice.chance(0.5) ? call.Hq : 1,
                                           dice.chance(0.8) ? call.Lq : 1, dice.chance(0.9) ? call.Lk : 1},
                                          {0.2, 0, 0.05, 0.1});
        Bias& bias = call.bias;
        bias.type = dice.one_of<Type>({Type::f32, Type::bf16, Type::f16});
        char* data = memory.input_of(dice, layout, bytes_of(bias.type));
        const double hidden = dice.one_of<double>({0, 0, 0.2}), amplitude = dice.one_of<double>({0.1, 3, 100});
        layout.for_each([&](int64_t, int64_t, int64_t, int64_t, int64_t at) {
            put(data, bias.type, at, amplitude * dice.normal());
            if (!dice.chance(hidden)) return;
            if (bias.type == Type::f16) reinterpret_cast<uint16_t*>(data)[at] = 0xfc00;
            else put(data, bias.type, at, -INFINITY);
        });
        bias.data = data;
        bias.batch = layout.size[0] == 1 ? 0 : layout.stride[0];
        bias.head = layout.size[1] == 1 ? 0 : layout.stride[1];
        bias.query = layout.size[2] == 1 ? 0 : layout.stride[2];
        bias.key = layout.size[3] == 1 ? 0 : layout.stride[3];
        say(" | bias %s (%ld %ld %ld %ld)%s", name_of(bias.type), bias.batch, bias.head, bias.query, bias.key, hidden > 0 ? " -inf" : "");
    }
    if (dice.chance(0.12)) {
        const Mask& m = call.mask;
        int64_t low = m.offset[0], high = m.offset[0];
        for (int64_t b = 0; b < (m.offset_batch == 1 ? call.B : 1); ++b) {
            low = std::min(low, m.offset[b]);
            high = std::max(high, m.offset[b]);
        }
        RelativeBias& relative = call.relative;
        relative.first = low - (m.key_offset + call.Lk - 1);
        const int64_t count = high + call.Lq - 1 - m.key_offset - relative.first + 1;
        relative.head = dice.chance(0.2) ? 0 : count;
        const int64_t all = relative.head == 0 ? count : call.Hq * count;
        auto* values = memory.input<float>(all);
        for (int64_t i = 0; i < all; ++i) values[i] = static_cast<float>(3 * dice.normal());
        relative.values = values;
        say(" | relative");
    }
    if (dice.chance(0.12)) {
        auto* logits = memory.input<float>(call.Hq);
        const double size = dice.one_of<double>({1, 20});
        for (int64_t h = 0; h < call.Hq; ++h) logits[h] = dice.chance(0.1) ? -INFINITY : static_cast<float>(size * dice.normal());
        call.sink_logits = logits;
        say(" | sink logits");
    }
}

// ------------------------------------------------------------------ results

void RandomCall::draw_results() {
    const Layout layout = draw_layout(dice, {call.B, call.Hq, call.Lq, call.dv}, {0.2, 0, 0, 0});
    call.out = memory.output_of(dice, layout, bytes_of(call.out_type));
    call.out_batch = layout.stride[0];
    call.out_head = layout.stride[1];
    call.out_row = layout.stride[2];
    if (dice.chance(0.9)) {
        Layout rows{{call.B, call.Hq, call.Lq, 1}, {call.Hq * call.Lq, call.Lq, 1, 1}};
        rows.find_ends();
        call.lse = reinterpret_cast<float*>(memory.output_of(dice, rows, 4));
    }
}

void RandomCall::draw_questions() {
    const int64_t count = dice.one_of<int64_t>({1, 1, 2, 3, 6});
    say(" | questions");
    for (int64_t n = 0; n < count; ++n) {
        Question question;
        question.kind = static_cast<Question::Kind>(dice.from(0, static_cast<int64_t>(Question::Kind::weights)));
        auto* place = memory.input<int32_t>(call.Lq);
        const int64_t which = dice.from(0, 3), only = dice.from(0, call.Lq - 1);
        for (int64_t i = 0; i < call.Lq; ++i) {
            const bool chosen = which == 0 || (which == 1 && i == call.Lq - 1) || (which >= 2 && (i == only || dice.chance(which == 2 ? 0.5 : 0.05)));
            place[i] = chosen ? static_cast<int32_t>(question.R++) : -1;
        }
        question.place = place;
        int64_t width = 1, rows = question.R;
        auto segments = [&] {
            question.segments = dice.one_of<int64_t>({1, 2, 5, 16, 17});
            const int64_t items = dice.chance(0.5) ? call.B : 1;
            question.ids_batch = items == 1 ? 0 : call.Lk;
            auto* ids = memory.input<int32_t>(items * call.Lk);
            const bool runs = dice.chance(0.6);
            for (int64_t b = 0; b < items; ++b) {
                int64_t number = dice.from(0, question.segments - 1);
                for (int64_t j = 0; j < call.Lk; ++j) {
                    if (!runs || dice.chance(0.1)) number = dice.from(0, question.segments - 1);
                    ids[b * call.Lk + j] = static_cast<int32_t>(number);
                }
            }
            question.ids = ids;
            width = question.segments;
        };
        switch (question.kind) {
            case Question::Kind::segment_mass:
            case Question::Kind::segment_norm: segments(); break;
            case Question::Kind::segment_output:
                segments();
                width = question.segments * call.dv;
                break;
            case Question::Kind::top_keys: width = question.count = std::min<int64_t>(dice.one_of<int64_t>({1, 2, 8, 40}), call.Lk + 3); break;
            case Question::Kind::key_mass:
                rows = 1;
                width = call.Lk;
                break;
            case Question::Kind::pooled_mean:
            case Question::Kind::pooled_max:
                rows = question.map_rows = dice.from(1, std::min<int64_t>(question.R + 3, 40));
                width = question.map_columns = dice.from(1, std::min<int64_t>(call.Lk + 3, 40));
                break;
            case Question::Kind::weights: width = call.Lk; break;
            default: break;
        }
        Layout layout{{call.B, call.Hq, rows, width}, {call.Hq * rows * width, rows * width, width, 1}};
        layout.find_ends();
        question.out = reinterpret_cast<float*>(memory.output_of(dice, layout, 4));
        if (question.kind == Question::Kind::top_keys)
            question.index = reinterpret_cast<int64_t*>(memory.output_of(dice, layout, 8, 0x7b));
        say(" %d:R%ld", static_cast<int>(question.kind), question.R);
        questions.push_back(question);
    }
    call.questions = questions.data();
    call.question_count = static_cast<int64_t>(questions.size());
}

void RandomCall::draw_gradients() {
    const bool stored = k_type == Type::i8 || v_type == Type::i8 || call.k.table != nullptr || call.v.table != nullptr;
    if (stored || call.lse == nullptr || dice.chance(0.5)) return;
    differentiable = true;
    back.out.data = call.out;
    back.out.type = call.out_type;
    back.out.batch = call.out_batch;
    back.out.head = call.out_head;
    back.out.row = call.out_row;
    back.lse = call.lse;
    if (dice.chance(0.9)) back.dout = draw_rows(call.out_type, call.Hq, call.Lq, call.dv, dice.one_of<double>({0.1, 1, 10}), false);
    if (back.dout.data == nullptr || dice.chance(0.3)) {
        auto* dlse = memory.input<float>(call.B * call.Hq * call.Lq);
        for (int64_t i = 0; i < call.B * call.Hq * call.Lq; ++i) dlse[i] = static_cast<float>(dice.normal());
        back.dlse = dlse;
    }
    auto result = [&](int64_t heads, int64_t length, int64_t columns) {
        Layout layout{{call.B, heads, length, columns}, {heads * length * columns, length * columns, columns, 1}};
        layout.find_ends();
        return reinterpret_cast<float*>(memory.output_of(dice, layout, 4));
    };
    back.dq = result(call.Hq, call.Lq, call.d);
    back.dk = result(call.Hkv, call.Lk, call.d);
    back.dv = result(call.Hkv, call.Lk, call.dv);
    say(" | gradients%s%s", back.dout.data != nullptr ? " dout" : "", back.dlse != nullptr ? " dlse" : "");
}

}  // namespace tests
