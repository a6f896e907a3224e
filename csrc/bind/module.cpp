// The core as a Python module, clearhead._core: tuples of integers become the structs of call.h. No arithmetic.
//
// Addresses, sizes and strides come as flat tuples of ints in the order of the struct's fields (written out in
// src/clearhead/_core.pyi). They are read by hand through the C API: a call costs about a microsecond, and a
// wrong length, a value that is no int or a size below 1 is a ValueError or TypeError that names the tuple.
// Whether an address is right cannot be checked here: that is the backend's business.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <list>
#include <string>
#include <tuple>
#include <vector>

#include "call.h"

namespace nb = nanobind;

namespace {

using clearhead::Backward;
using clearhead::Bias;
using clearhead::Call;
using clearhead::Interrupt;
using clearhead::Mask;
using clearhead::Question;
using clearhead::RelativeBias;
using clearhead::Rows;
using clearhead::Status;
using clearhead::Type;

const int64_t zero = 0;

// Reads a tuple from left to right into fields of any type that an int can mean.
class Fields {
public:
    Fields(nb::handle tuple, const char* name) : tuple_(tuple.ptr()), name_(name) {
        if (!PyTuple_Check(tuple_)) {
            PyErr_Format(PyExc_TypeError, "%s must be a tuple, got %s", name_, Py_TYPE(tuple_)->tp_name);
            nb::raise_python_error();
        }
        size_ = PyTuple_GET_SIZE(tuple_);
    }

    Py_ssize_t size() const { return size_; }

    void expect(Py_ssize_t size) const {
        if (size_ != size) wrong_size(std::to_string(size).c_str());
    }

    [[noreturn]] void wrong_size(const char* allowed) const {
        PyErr_Format(PyExc_ValueError, "%s must have %s items, got %zd", name_, allowed, size_);
        nb::raise_python_error();
    }

    template <typename... Field>
    void read(Field&... fields) {
        (one(fields), ...);
    }

    nb::handle item() { return PyTuple_GET_ITEM(tuple_, next_++); }

private:
    int64_t integer() {
        PyObject* item = PyTuple_GET_ITEM(tuple_, next_);
        const long long value = PyLong_AsLongLong(item);
        if (value == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            PyErr_Format(PyExc_ValueError, "%s: item %zd must be an int of 64 bits, got %R", name_, next_, item);
            nb::raise_python_error();
        }
        ++next_;
        return value;
    }

    void one(int64_t& field) { field = integer(); }
    void one(bool& field) { field = integer() != 0; }

    void one(Type& field) {
        const int64_t type = integer();
        if (type < 0 || type > static_cast<int64_t>(Type::i8)) {
            PyErr_Format(PyExc_ValueError, "%s: a type must be one of 0 to 3, got %lld", name_,
                         static_cast<long long>(type));
            nb::raise_python_error();
        }
        field = static_cast<Type>(type);
    }

    template <typename Pointee>
    void one(Pointee*& field) {
        field = reinterpret_cast<Pointee*>(static_cast<intptr_t>(integer()));
    }

    PyObject* tuple_;
    const char* name_;
    Py_ssize_t size_ = 0, next_ = 0;
};

Rows rows_from(nb::handle tuple, const char* name) {
    Rows rows;
    Fields fields(tuple, name);
    if (fields.size() != 6 && fields.size() != 10 && fields.size() != 13) fields.wrong_size("6, 10 or 13");
    fields.read(rows.data, rows.type, rows.batch, rows.head, rows.row, rows.column);
    if (fields.size() >= 10) fields.read(rows.scale, rows.scale_batch, rows.scale_head, rows.scale_row);
    if (fields.size() == 13) fields.read(rows.table, rows.table_batch, rows.page);
    if (rows.type == Type::i8 && rows.scale == nullptr) {
        PyErr_Format(PyExc_ValueError, "%s: int8 needs the address of its scales, got 0", name);
        nb::raise_python_error();
    }
    if (rows.table != nullptr && rows.page < 1) {
        PyErr_Format(PyExc_ValueError, "%s: the rows of a page must be at least 1, got %lld", name,
                     static_cast<long long>(rows.page));
        nb::raise_python_error();
    }
    return rows;
}

Bias bias_from(nb::handle tuple) {
    Bias bias;
    if (tuple.is_none()) return bias;
    Fields fields(tuple, "bias");
    fields.expect(6);
    fields.read(bias.data, bias.type, bias.batch, bias.head, bias.query, bias.key);
    return bias;
}

RelativeBias relative_from(nb::handle tuple) {
    RelativeBias bias;
    if (tuple.is_none()) return bias;
    Fields fields(tuple, "relative");
    fields.expect(3);
    fields.read(bias.values, bias.head, bias.first);
    return bias;
}

// Further masks live in `kept`, whose elements do not move and which costs nothing while it is empty.
Mask mask_from(nb::handle tuple, std::list<Mask>& kept) {
    Mask mask;
    mask.offset = &zero;
    if (tuple.is_none()) return mask;
    if (kept.size() > 64) {
        PyErr_SetString(PyExc_ValueError, "mask: at most 64 masks can be joined");
        nb::raise_python_error();
    }
    Fields fields(tuple, "mask");
    fields.expect(29);
    fields.read(mask.key_offset, mask.offset, mask.offset_batch, mask.causal, mask.prefix, mask.prefix_batch,
                mask.block_query, mask.block_key, mask.block_query_batch, mask.block_key_batch, mask.left,
                mask.right, mask.sinks, mask.chunk, mask.document_query, mask.document_key,
                mask.document_query_batch, mask.document_key_batch, mask.real, mask.real_batch, mask.lengths,
                mask.origin, mask.origin_batch, mask.dense, mask.dense_batch, mask.dense_head, mask.dense_query,
                mask.dense_key);
    const nb::handle next = fields.item();
    if (mask.offset == nullptr) mask.offset = &zero;
    if (!next.is_none()) {
        kept.emplace_back();
        Mask& place = kept.back();
        place = mask_from(next, kept);
        mask.next = &place;
    }
    return mask;
}

Question question_from(nb::handle tuple) {
    Question question;
    Fields fields(tuple, "question");
    fields.expect(11);
    int64_t kind = 0;
    fields.read(kind, question.place, question.R, question.out, question.index, question.ids,
                question.ids_batch, question.segments, question.count, question.map_rows,
                question.map_columns);
    if (kind < 0 || kind > static_cast<int64_t>(Question::Kind::weights)) {
        PyErr_Format(PyExc_ValueError, "question: a kind must be one of 0 to %d, got %lld",
                     static_cast<int>(Question::Kind::weights), static_cast<long long>(kind));
        nb::raise_python_error();
    }
    question.kind = static_cast<Question::Kind>(kind);
    return question;
}

// The thread in which Python handles signals, noted when the module is loaded.
unsigned long main_thread = 0;

// Whether Python has a signal to handle (Ctrl-C). The handler runs here and may have raised: the error waits in
// the thread's state until the call is over.
bool signal_came(void*) {
    const nb::gil_scoped_acquire hold;
    return PyErr_CheckSignals() != 0;
}

// Other threads are not asked: Python would answer no, after they waited for the GIL.
Interrupt interrupt_here() {
    return PyThread_get_thread_ident() == main_thread ? Interrupt{signal_came, nullptr} : Interrupt{};
}

template <typename Work>
void run(Work work) {
    Status status;
    {
        const nb::gil_scoped_release release;
        status = work();
    }
    if (status == Status::no_memory) {
        PyErr_SetString(PyExc_MemoryError, "attention: not enough memory for the scratch space of the threads");
    } else if (status == Status::interrupted && !PyErr_Occurred()) {
        PyErr_SetNone(PyExc_KeyboardInterrupt);
    }
    if (status != Status::done) nb::raise_python_error();
}

// What a forward and a backward have in common.
void read_call(Call& call, std::list<Mask>& kept, nb::handle sizes, nb::handle q, nb::handle k, nb::handle v,
               nb::handle mask, double scale, double softcap, nb::handle bias, nb::handle relative,
               intptr_t sink, int threads) {
    Fields fields(sizes, "sizes");
    fields.expect(7);
    fields.read(call.B, call.Hq, call.Hkv, call.Lq, call.Lk, call.d, call.dv);
    for (const int64_t size : {call.B, call.Hq, call.Hkv, call.Lq, call.Lk, call.d, call.dv}) {
        if (size >= 1) continue;
        PyErr_Format(PyExc_ValueError, "sizes must be at least 1, got %R", sizes.ptr());
        nb::raise_python_error();
    }
    if (call.Hq % call.Hkv != 0) {
        PyErr_Format(PyExc_ValueError, "sizes: Hq must be a multiple of Hkv, got %R", sizes.ptr());
        nb::raise_python_error();
    }
    call.q = rows_from(q, "q");
    call.k = rows_from(k, "k");
    call.v = rows_from(v, "v");
    call.mask = mask_from(mask, kept);
    call.scale = static_cast<float>(scale);
    call.softcap = static_cast<float>(softcap);
    call.bias = bias_from(bias);
    call.relative = relative_from(relative);
    call.sink_logits = reinterpret_cast<const float*>(sink);
    if (threads < 1) {
        PyErr_Format(PyExc_ValueError, "threads must be at least 1, got %d", threads);
        nb::raise_python_error();
    }
    call.threads = threads;
    call.interrupt = interrupt_here();
}

void forward(nb::handle sizes, nb::handle q, nb::handle k, nb::handle v, nb::handle mask, double scale,
             double softcap, nb::handle bias, nb::handle relative, intptr_t sink, nb::handle out, intptr_t lse,
             nb::handle questions, int threads) {
    Call call;
    std::list<Mask> kept;
    read_call(call, kept, sizes, q, k, v, mask, scale, softcap, bias, relative, sink, threads);
    Fields fields(out, "out");
    fields.expect(5);
    fields.read(call.out, call.out_type, call.out_batch, call.out_head, call.out_row);
    call.lse = reinterpret_cast<float*>(lse);
    std::vector<Question> asked;
    if (!questions.is_none()) {
        Fields list(questions, "questions");
        asked.reserve(static_cast<size_t>(list.size()));
        for (Py_ssize_t i = 0; i < list.size(); ++i) asked.push_back(question_from(list.item()));
    }
    call.questions = asked.data();
    call.question_count = static_cast<int64_t>(asked.size());
    run([&] { return clearhead::forward(call); });
}

void backward(nb::handle sizes, nb::handle q, nb::handle k, nb::handle v, nb::handle mask, double scale,
              double softcap, nb::handle bias, nb::handle relative, intptr_t sink, nb::handle out,
              nb::handle dout, intptr_t lse, intptr_t dlse, nb::handle gradients, int threads) {
    Call call;
    std::list<Mask> kept;
    read_call(call, kept, sizes, q, k, v, mask, scale, softcap, bias, relative, sink, threads);
    Backward back;
    back.out = rows_from(out, "out");
    if (!dout.is_none()) back.dout = rows_from(dout, "dout");
    back.lse = reinterpret_cast<const float*>(lse);
    back.dlse = reinterpret_cast<const float*>(dlse);
    Fields fields(gradients, "gradients");
    fields.expect(3);
    fields.read(back.dq, back.dk, back.dv);
    run([&] { return clearhead::backward(call, back); });
}

constexpr const char* names[] = {"portable", "v3", "v4", "v4bf16", "v4amx"};

std::vector<std::tuple<std::string, bool, bool>> isas() {
    std::vector<std::tuple<std::string, bool, bool>> list;
    for (const char* name : names) {
        list.emplace_back(name, clearhead::isa_built(name), clearhead::isa_available(name));
    }
    return list;
}

}  // namespace

NB_MODULE(_core, module) {
    using nb::arg;
    main_thread = nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
    module.doc() = "The C++ core. Knows addresses and strides; `clearhead.backends` knows tensors.";
    module.def("forward", forward, arg("sizes"), arg("q"), arg("k"), arg("v"), arg("mask").none(), arg("scale"),
               arg("softcap"), arg("bias").none(), arg("relative").none(), arg("sink"), arg("out"), arg("lse"),
               arg("questions").none(), arg("threads"));
    module.def("backward", backward, arg("sizes"), arg("q"), arg("k"), arg("v"), arg("mask").none(),
               arg("scale"), arg("softcap"), arg("bias").none(), arg("relative").none(), arg("sink"), arg("out"),
               arg("dout").none(), arg("lse"), arg("dlse"), arg("gradients"), arg("threads"));
    module.def("isa", &clearhead::isa);
    module.def("choose_isa", &clearhead::choose_isa, arg("name"));
    module.def("isas", isas);
    module.attr("NO_LIMIT") = Mask::no_limit;
    module.attr("compiler") = CLEARHEAD_COMPILER;
    module.attr("sanitize") = CLEARHEAD_SANITIZE;
}
