"""The compiled core: addresses, sizes and strides, no tensors. Made from csrc/, used by `backends.native`.

Arrays are named by flat tuples of ints, in the order of the structs of csrc/core/call.h, where each field is
explained. Strides count elements, addresses are `Tensor.data_ptr()`, 0 is a null pointer, and a type is 0 for
float32, 1 for bfloat16, 2 for float16, 3 for int8. The caller keeps every tensor alive until the call returns
and answers for every address: nothing here can check them. The GIL is released meanwhile.
"""

from typing import TypeAlias

#: B, Hq, Hkv, Lq, Lk, d, dv
Sizes: TypeAlias = tuple[int, int, int, int, int, int, int]

#: data, type, stride of the batch, of the head, of the row, of the column;
#: for int8 four more: scale, its strides of the batch, of the head, of the row;
#: paged, three more after those (zeros for no scale): table, its stride of the batch, rows of a page.
Rows: TypeAlias = (
    tuple[int, int, int, int, int, int]
    | tuple[int, int, int, int, int, int, int, int, int, int]
    | tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]
)

#: data, type, strides of the batch, the head, the query, the key
Bias: TypeAlias = tuple[int, int, int, int, int, int]

#: values, stride of the head, the distance (query position - key position) of the first value
RelativeBias: TypeAlias = tuple[int, int, int]

#: 0 key_offset, 1 offset (0: starts at 0), 2 offset_batch, 3 causal (0 or 1), 4 prefix, 5 prefix_batch,
#: 6 block_query, 7 block_key, 8 block_query_batch, 9 block_key_batch, 10 left, 11 right (NO_LIMIT: none),
#: 12 sinks, 13 chunk, 14 document_query, 15 document_key, 16 document_query_batch, 17 document_key_batch,
#: 18 real, 19 real_batch, 20 lengths, 21 origin, 22 origin_batch, 23 dense, 24 dense_batch, 25 dense_head,
#: 26 dense_query, 27 dense_key, 28 next: another such tuple, or None
Mask: TypeAlias = tuple[int | Mask | None, ...]

#: data, type, strides of the batch, the head, the row
Out: TypeAlias = tuple[int, int, int, int, int]

#: kind (its number in `Question::Kind`), place, R, out, index, ids, ids_batch, segments, count, map_rows,
#: map_columns
Question: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int]

#: dq, dk, dv
Gradients: TypeAlias = tuple[int, int, int]

#: `left` and `right` of a mask without a window
NO_LIMIT: int
#: The compiler and its version, such as "GNU 12.2.0".
compiler: str
#: The sanitizers it was built with, such as "address,undefined"; "" for none.
sanitize: str

def forward(
    sizes: Sizes,
    q: Rows,
    k: Rows,
    v: Rows,
    mask: Mask | None,
    scale: float,
    softcap: float,
    bias: Bias | None,
    relative: RelativeBias | None,
    sink: int,
    out: Out,
    lse: int,
    questions: tuple[Question, ...] | None,
    threads: int,
) -> None:
    """Compute out, lse (0: not wanted) and the answers. softcap 0: none; sink: address of (Hq,) or 0.

    Raises ValueError or TypeError for a tuple that is not laid out as above, MemoryError where there is no
    room for scratch, and what a signal handler raises (KeyboardInterrupt) while it runs.
    """

def backward(
    sizes: Sizes,
    q: Rows,
    k: Rows,
    v: Rows,
    mask: Mask | None,
    scale: float,
    softcap: float,
    bias: Bias | None,
    relative: RelativeBias | None,
    sink: int,
    out: Rows,
    dout: Rows | None,
    lse: int,
    dlse: int,
    gradients: Gradients,
    threads: int,
) -> None:
    """Compute the gradients of a forward from its out and lse. dout None, dlse 0: none. Raises as forward."""

def isa() -> str:
    """The instruction set whose kernels run."""

def choose_isa(name: str) -> bool:
    """Run the kernels of that instruction set from now on; False if it is not built or cannot run here."""

def isas() -> list[tuple[str, bool, bool]]:
    """Every instruction set: its name, whether it was built, whether this processor can run it."""
