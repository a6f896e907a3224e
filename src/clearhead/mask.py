"""Who may look at whom, as a description and not as a matrix.

A `Mask` is a handful of fields: causal, window, sinks, padding, documents … It knows nothing of tensors to
be masked; `clearhead.visibility` evaluates it, tile by tile, for given sizes. An n × n boolean exists only
where a user brings one (`dense=`) or asks for one (`to_dense`).

Positions. Key j of the tensor sits at position key_offset + j, query i at offset + i. Without an `offset`
the queries are aligned with the last keys (offset = key_offset + Lk - Lq), which is what a cache needs.

Rows and documents. A row starts at its first visible key (behind left padding), a document at its first
token. Sinks, chunks and prefixes count from there, so a padded or packed text is masked exactly as it would
be alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from clearhead.errors import ArgumentError, DTypeError, MaskError, ShapeError, SizeError
from clearhead.shapes import unexpanded

Window = int | tuple[int | None, int | None]
Ids = Tensor | Sequence[int] | tuple[Tensor, Tensor]

#: `to_dense` refuses more entries than this (one byte each): it is for looking, not for computing.
DENSE_LIMIT = 2**28


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Mask:
    """An immutable description of which queries see which keys; every field narrows, `&` combines.

    causal: a query sees keys at its own position and before.
    window: an int W: keys less than W positions away (with `causal`: the last W keys, the query's own among
        them, as Mistral and transformers count). A pair (left, right): from `left` positions before the
        query to `right` after it, both inclusive, None for no limit (as FlashAttention counts).
    sinks: the first `sinks` keys of the row or document stay visible outside the window
        (Xiao et al. 2023, StreamingLLM); needs a window.
    padding: (B,) real lengths, or (B, Lk) booleans, True where the key is real.
    padding_side: where the pads are when `padding` is lengths: "right" or "left".
    documents: (L,) or (B, L) integers: a query sees only keys with its own number (packed documents). Where
        queries are not the last keys of the same text, a pair (query numbers, key numbers).
    prefix: the first `prefix` keys of a row or document are visible from everywhere in it, whatever `causal`
        says (prefix language model); int or (B,); needs `causal`.
    blocks: like `documents`, -1 for none: tokens with the same number see each other both ways, whatever
        `causal` says (images inside a text); needs `causal`.
    chunk: a query sees only keys of its own chunk of `chunk` positions (Llama 4).
    offset: position of the first query, int or (B,); default: queries are aligned with the last keys.
    key_offset: position of the first key (a cache that has let go of the beginning).
    start: position where each row starts, int or (B,), when it cannot be seen from `padding`: without it a
        row starts at its first real key, or at 0 where key 0 is real.
    dense: a boolean tensor that broadcasts to (B, Hq, Lq, Lk), True = may look.

    Raises MaskError, ShapeError, DTypeError or ArgumentError when a field is out of range or two fields
    contradict each other.

    >>> Mask(causal=True, window=2, sinks=1).to_dense(4).int()[0, 0]
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 0, 1, 1]], dtype=torch.int32)
    >>> Mask(causal=True) & Mask(padding=torch.tensor([2, 3]))
    Mask(causal=True, padding=[2, 3])
    """

    causal: bool
    window: tuple[int | None, int | None] | None
    sinks: int
    padding: Tensor | None
    padding_side: Literal["right", "left"]
    documents: Tensor | tuple[Tensor, Tensor] | None
    prefix: int | Tensor | None
    blocks: Tensor | tuple[Tensor, Tensor] | None
    chunk: int | None
    offset: int | Tensor | None
    key_offset: int
    start: int | Tensor | None
    dense: Tensor | None
    also: tuple[Mask, ...]  # further masks that must hold too, where `&` could not fold them into the fields

    def __init__(
        self,
        *,
        causal: bool = False,
        window: Window | None = None,
        sinks: int = 0,
        padding: Tensor | Sequence[int] | None = None,
        padding_side: Literal["right", "left"] = "right",
        documents: Ids | None = None,
        prefix: int | Tensor | None = None,
        blocks: Ids | None = None,
        chunk: int | None = None,
        offset: int | Tensor | None = None,
        key_offset: int = 0,
        start: int | Tensor | None = None,
        dense: Tensor | None = None,
    ) -> None:
        if padding_side not in ("right", "left"):
            raise MaskError(f"padding_side must be 'right' or 'left', got {padding_side!r}")
        if not causal and (prefix is not None or blocks is not None):
            which = "prefix" if prefix is not None else "blocks"
            raise MaskError(f"{which} lifts the causal rule, so it needs causal=True")
        if not isinstance(causal, bool):
            raise MaskError(f"causal must be True or False, got {causal!r}")
        bidirectional_part = prefix is not None or blocks is not None
        values = {
            "causal": causal,
            "window": _window(window, causal=causal and not bidirectional_part),
            "sinks": _count("sinks", sinks, least=0),
            "padding": _padding(padding),
            "padding_side": padding_side,
            "documents": _ids("documents", documents),
            "prefix": None if prefix is None else _per_row("prefix", prefix, least=0),
            "blocks": _ids("blocks", blocks),
            "chunk": None if chunk is None else _count("chunk", chunk, least=1),
            "offset": None if offset is None else _per_row("offset", offset),
            "key_offset": _count("key_offset", key_offset, least=0),
            "start": None if start is None else _per_row("start", start, least=0),
            "dense": _dense(dense),
            "also": (),
        }
        if sinks and window is None:
            raise MaskError(f"sinks={sinks} keeps keys visible outside a window, so it needs window=")
        if values["window"] is None:
            values["sinks"] = 0  # a window without limits hides nothing that a sink could keep
        for name, value in values.items():
            object.__setattr__(self, name, value)

    # ------------------------------------------------------------------ algebra

    def __and__(self, other: Mask) -> Mask:
        """Return the mask under which a query sees a key only if both masks let it.

        Sinks, prefixes and chunks of one count from the starts that padding and documents of the other give.
        """
        if not isinstance(other, Mask):
            return NotImplemented
        return _fold(self, other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in _DEFAULTS)

    def __hash__(self) -> int:
        return hash((self.causal, self.window, self.sinks, self.chunk, self.key_offset, len(self.also)))

    def __repr__(self) -> str:
        shown = []
        for f in fields(self):
            value, default = getattr(self, f.name), _DEFAULTS[f.name]
            if f.name == "also" or _same(value, default):
                continue
            if f.name == "padding_side" and (self.padding is None or self.padding.ndim != 1):
                continue
            text = self._shown_window() if f.name == "window" else _shown(value)
            shown.append(f"{f.name}={text}")
        text = f"Mask({', '.join(shown)})"
        return " & ".join([text, *(repr(part) for part in self.also)])

    def _shown_window(self) -> str:
        assert self.window is not None
        left, right = self.window
        plain = self.causal and self.prefix is None and self.blocks is None
        short = left is not None and right == (None if plain else left)
        return str(left + 1) if short and left is not None else f"({left}, {right})"

    # ------------------------------------------------------------------ questions

    @property
    def is_trivial(self) -> bool:
        """True if no field hides anything, at any size."""
        return (
            not self.causal
            and self.window is None
            and self.padding is None
            and self.documents is None
            and self.chunk is None
            and self.dense is None
            and not self.also
        )

    def to_dense(self, Lq: int, Lk: int | None = None, *, batch: int = 1, heads: int = 1) -> Tensor:
        """Return the booleans, True = may look: (batch | 1, heads | 1, Lq, Lk), for small sizes.

        Axes along which the mask does not vary have size 1. Lk defaults to Lq. Raises SizeError above
        2**28 entries; MaskError or ShapeError where the mask does not fit the sizes.
        """
        from clearhead.visibility import Visibility  # the floor mate that evaluates; no cycle at import

        Lk = Lq if Lk is None else Lk
        for name, size in (("Lq", Lq), ("Lk", Lk), ("batch", batch), ("heads", heads)):
            _count(name, size, least=1)
        if batch * heads * Lq * Lk > DENSE_LIMIT:
            raise SizeError(
                f"to_dense would make {batch} x {heads} x {Lq} x {Lk} = {batch * heads * Lq * Lk} booleans, "
                f"more than {DENSE_LIMIT}; attention() takes the Mask itself"
            )
        bound = Visibility(self, batch, heads, Lq, Lk, torch.device("cpu"))
        seen = bound.tile(slice(0, Lq), slice(0, Lk))
        return torch.ones(1, 1, Lq, Lk, dtype=torch.bool) if seen is None else seen.clone()

    def to(self, device: torch.device | str) -> Mask:
        """Return the mask with its tensors on `device`."""
        moved = {f.name: _moved(getattr(self, f.name), device) for f in fields(self)}
        return _replace(self, **moved)


_DEFAULTS: dict[str, object] = {
    "causal": False,
    "window": None,
    "sinks": 0,
    "padding": None,
    "padding_side": "right",
    "documents": None,
    "prefix": None,
    "blocks": None,
    "chunk": None,
    "offset": None,
    "key_offset": 0,
    "start": None,
    "dense": None,
    "also": (),
}


# ---------------------------------------------------------------------- checks of one field each


def _count(name: str, value: int, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MaskError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def _per_row(name: str, value: int | Tensor, *, least: int | None = None) -> int | Tensor:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.dtype == torch.bool:
            raise DTypeError(f"{name} must be integers, got {value.dtype}")
        if value.ndim > 1:
            raise ShapeError(f"{name} must be an int or have shape (B,), got {tuple(value.shape)}")
        if value.ndim == 0:
            return _per_row(name, int(value), least=least)
        known = value.numel() > 0 and not torch.compiler.is_compiling()  # whether values can be looked at
        if least is not None and known and int(value.min()) < least:
            raise MaskError(f"{name} must be at least {least}, got {int(value.min())}")
        return value.detach().long().clone()
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "an integer" if least is None else f"an integer of at least {least}"
        raise MaskError(f"{name} must be {bound} or a tensor of shape (B,), got {value!r}")
    return value


def _window(window: Window | None, *, causal: bool) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise MaskError(f"window must be an int or a pair (left, right), got {window!r}")
        for side in window:
            if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
                raise MaskError(f"window=(left, right) must be at least 0 or None each, got {window!r}")
        left, right = window
    else:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise MaskError(f"window must be at least 1 (a query sees itself), got {window!r}")
        left = right = window - 1
    if causal:
        right = None  # nothing after the query is visible anyway: one spelling for one meaning
    return None if left is None and right is None else (left, right)


def _padding(padding: Tensor | Sequence[int] | None) -> Tensor | None:
    if padding is None:
        return None
    tensor = _tensor("padding", padding)
    if tensor.dtype == torch.bool:
        if tensor.ndim != 2:
            raise ShapeError(f"boolean padding must have shape (B, Lk), got {tuple(tensor.shape)}")
        return tensor.detach().clone()
    if tensor.is_floating_point() or tensor.is_complex():
        raise DTypeError(f"padding must be integer lengths or booleans, got {tensor.dtype}")
    if tensor.ndim != 1:
        raise ShapeError(
            f"padding must be lengths of shape (B,) or booleans of shape (B, Lk), got integers of shape "
            f"{tuple(tensor.shape)}; a 0/1 mask becomes booleans with .bool()"
        )
    if tensor.numel() and not torch.compiler.is_compiling() and int(tensor.min()) < 0:
        raise MaskError(f"padding lengths must be at least 0, got {int(tensor.min())}")
    return tensor.detach().long().clone()


def _ids(name: str, ids: Ids | None) -> Tensor | tuple[Tensor, Tensor] | None:
    if ids is None:
        return None
    if isinstance(ids, tuple) and len(ids) == 2 and all(isinstance(part, Tensor) for part in ids):
        query, key = ids
        return _one_ids(name, query), _one_ids(name, key)  # type: ignore[arg-type]
    return _one_ids(name, _tensor(name, ids))


def _tensor(name: str, value: object) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MaskError(
            f"{name} must be a tensor or a list of numbers, got {value!r:.60}: {error}"
        ) from error


def _one_ids(name: str, ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DTypeError(f"{name} must be integers, got {ids.dtype}")
    if ids.ndim not in (1, 2):
        raise ShapeError(f"{name} must have shape (L,) or (B, L), got {tuple(ids.shape)}")
    return ids.detach().long().clone()


def _dense(dense: Tensor | None) -> Tensor | None:
    if dense is None:
        return None
    if not isinstance(dense, Tensor) or dense.dtype != torch.bool:
        what = dense.dtype if isinstance(dense, Tensor) else type(dense).__name__
        raise DTypeError(
            f"dense must be a boolean tensor (True = may look), got {what}; an additive float mask goes "
            "straight to attention(mask=...), a float bias to attention(bias=...)"
        )
    if not 2 <= dense.ndim <= 4:
        raise ShapeError(f"dense must broadcast to (B, Hq, Lq, Lk), got shape {tuple(dense.shape)}")
    return dense.detach()


# ---------------------------------------------------------------------- folding two masks into one


def _parts(mask: Mask) -> tuple[Mask, ...]:
    return (_replace(mask, also=()), *mask.also)


def _replace(mask: Mask, **changes: object) -> Mask:
    new = object.__new__(Mask)
    for name in _DEFAULTS:
        object.__setattr__(new, name, changes.get(name, getattr(mask, name)))
    return new


def _fold(a: Mask, b: Mask) -> Mask:
    """Return one mask with the fields of both, or, where one field cannot say both, one beside the other."""
    if _is_default(b):
        return a
    if _is_default(a):
        return b
    frame = {}  # fields that say where things are, not what is hidden: they must agree
    for name in ("offset", "key_offset", "start"):
        left, right = getattr(a, name), getattr(b, name)
        if not _same(left, right) and not (_same(left, _DEFAULTS[name]) or _same(right, _DEFAULTS[name])):
            raise MaskError(f"masks with different {name} cannot be combined: {left!r} and {right!r}")
        frame[name] = right if _same(left, _DEFAULTS[name]) else left
    groups = (_fold_direction, _fold_window, _fold_padding, _fold_documents, _fold_chunk, _fold_dense)
    merged = [group(a, b) for group in groups]
    if all(part is not None for part in merged):
        changes = {name: value for part in merged if part is not None for name, value in part.items()}
        also = tuple(_replace(part, **frame) for part in (*a.also, *b.also))
        return _tidied(_replace(a, **frame, **changes, also=also))
    also = tuple(_replace(part, **frame) for part in (*a.also, *_parts(b)))
    return _replace(a, **frame, also=also)


def _is_default(mask: Mask) -> bool:
    return all(_same(getattr(mask, name), default) for name, default in _DEFAULTS.items())


def _tidied(mask: Mask) -> Mask:
    """Give a window its one spelling again after a causal rule came in."""
    if mask.causal and mask.prefix is None and mask.blocks is None and mask.window is not None:
        left = mask.window[0]
        sinks = 0 if left is None else mask.sinks
        return _replace(mask, window=None if left is None else (left, None), sinks=sinks)
    return mask


def _fold_direction(a: Mask, b: Mask) -> dict[str, object] | None:
    for one, other in ((a, b), (b, a)):
        if not one.causal:
            return {"causal": other.causal, "prefix": other.prefix, "blocks": other.blocks}
    if _same(a.prefix, b.prefix) and _same(a.blocks, b.blocks):
        return {"causal": True, "prefix": a.prefix, "blocks": a.blocks}
    for one in (a, b):
        if one.prefix is None and one.blocks is None:  # plainly causal is the narrower of the two
            return {"causal": True, "prefix": None, "blocks": None}
    return None


def _fold_window(a: Mask, b: Mask) -> dict[str, object] | None:
    # A window leans on the causal rule of its own mask only where that was used to leave `right` open,
    # which the direction of the result keeps: causal in either makes the result causal.
    for one, other in ((a, b), (b, a)):
        if one.window is None:
            return {"window": other.window, "sinks": other.sinks}
    assert a.window is not None
    assert b.window is not None
    if a.sinks or b.sinks:
        return {"window": a.window, "sinks": a.sinks} if (a.window, a.sinks) == (b.window, b.sinks) else None
    sides = zip(a.window, b.window, strict=True)
    left, right = (min((s for s in side if s is not None), default=None) for side in sides)
    return {"window": (left, right), "sinks": 0}


def _fold_padding(a: Mask, b: Mask) -> dict[str, object] | None:
    for one, other in ((a, b), (b, a)):
        if one.padding is None:
            return {"padding": other.padding, "padding_side": other.padding_side}
    assert a.padding is not None
    assert b.padding is not None
    if a.padding.shape != b.padding.shape:
        return None
    if a.padding.ndim == 1:
        if a.padding_side != b.padding_side:
            return None
        return {"padding": torch.minimum(a.padding, b.padding), "padding_side": a.padding_side}
    return {"padding": a.padding & b.padding, "padding_side": "right"}


def _fold_documents(a: Mask, b: Mask) -> dict[str, object] | None:
    for one, other in ((a, b), (b, a)):
        if one.documents is None:
            return {"documents": other.documents}
    return {"documents": a.documents} if _same(a.documents, b.documents) else None


def _fold_chunk(a: Mask, b: Mask) -> dict[str, object] | None:
    if a.chunk is not None and b.chunk is not None and a.chunk != b.chunk:
        return None
    return {"chunk": b.chunk if a.chunk is None else a.chunk}


def _fold_dense(a: Mask, b: Mask) -> dict[str, object] | None:
    if a.dense is None or b.dense is None:
        return {"dense": b.dense if a.dense is None else a.dense}
    try:
        return {"dense": a.dense & b.dense}
    except RuntimeError as reason:
        raise ShapeError(
            f"dense masks of shapes {tuple(a.dense.shape)} and {tuple(b.dense.shape)} do not broadcast"
        ) from reason


# ---------------------------------------------------------------------- small help for values


def _same(a: object, b: object) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a.to(b.device), b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return a == b


def _moved(value: object, device: torch.device | str) -> object:
    if isinstance(value, Tensor | Mask):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    return value


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        if value.numel() <= 8 and value.ndim == 1:
            return str(value.tolist())
        kind = "bool" if value.dtype == torch.bool else "int"
        return f"<{kind} {' x '.join(map(str, value.shape))}>"
    if isinstance(value, tuple):
        return f"({', '.join(_shown(part) for part in value)})"
    return repr(value)


def as_mask(mask: Mask | Tensor | None, floor: torch.dtype) -> tuple[Mask, Tensor | None]:
    """Split what a caller gave as `mask` into who may look (a Mask) and how much (a bias, or None).

    A boolean tensor is a dense mask, True = may look. A float tensor is additive, as in torch's
    scaled_dot_product_attention: -inf and the most negative number of its dtype or of `floor` (the dtype
    of the query) hide the key, the rest is added to the scores.

    Raises MaskError for NaN, DTypeError for other dtypes, ShapeError for ranks outside 2..4.
    """
    if mask is None:
        return Mask(), None
    if isinstance(mask, Mask):
        return mask, None
    if not isinstance(mask, Tensor):
        raise ArgumentError(f"mask must be a Mask, a tensor or None, got {type(mask).__name__}")
    if mask.layout != torch.strided:
        raise DTypeError(f"mask must be a dense tensor, got layout {mask.layout}")
    if mask.dtype == torch.bool:
        return Mask(dense=mask), None
    if not mask.is_floating_point():
        raise DTypeError(
            f"mask must be a Mask, booleans (True = may look) or additive floats, got {mask.dtype}"
        )
    if not 2 <= mask.ndim <= 4:
        raise ShapeError(f"mask must broadcast to (B, Hq, Lq, Lk), got shape {tuple(mask.shape)}")
    mask = unexpanded(mask)
    wrong = ~(mask.detach() < torch.inf)  # NaN or +inf
    if bool(wrong.any()):
        count = int(wrong.sum())
        raise MaskError(
            f"mask holds NaN or +inf in {count} of {mask.numel()} places; allowed are -inf and numbers"
        )
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(floor).min)
    hidden = mask <= lowest
    bias = mask.masked_fill(hidden, 0.0)
    dense = Mask(dense=~hidden) if bool(hidden.any()) else Mask()
    return dense, bias if mask.requires_grad or bool((bias != 0).any()) else None
