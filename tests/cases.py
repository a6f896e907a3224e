"""Random attention calls that fit together: sizes, masks, memory layouts (hypothesis strategies)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from clearhead.mask import Mask


@st.composite
def fields(draw: st.DrawFn, B: int, H: int, Lq: int, Lk: int, *, frame: bool = True) -> dict[str, Any]:
    """Random fields of a mask that fit the sizes."""

    def ints(size: int, low: int, high: int) -> torch.Tensor:
        return torch.tensor(draw(st.lists(st.integers(low, high), min_size=size, max_size=size)))

    def maybe(odds: int = 2) -> bool:
        return draw(st.integers(0, odds)) == 0

    f: dict[str, Any] = {}
    documents = maybe() and Lq <= Lk
    if documents:
        f["documents"] = ints(Lk, 0, 2).sort().values if draw(st.booleans()) else ints(Lk, 0, 2)
    if draw(st.booleans()):
        f["causal"] = True
        if maybe():
            f["prefix"] = draw(st.integers(0, Lk)) if draw(st.booleans()) else ints(B, 0, Lk)
        if maybe(3) and Lq <= Lk:
            f["blocks"] = ints(Lk, -1, 1)
    if maybe():
        side = st.one_of(st.none(), st.integers(0, Lk))
        pair = (draw(side), draw(side))
        f["window"] = draw(st.integers(1, Lk + 1)) if draw(st.booleans()) or pair == (None, None) else pair
        f["sinks"] = draw(st.integers(0, 3))
    if maybe():
        if draw(st.booleans()):
            f["padding"] = ints(B, 0, Lk)
            f["padding_side"] = draw(st.sampled_from(["left", "right"]))
        else:
            f["padding"] = ints(B * Lk, 0, 1).reshape(B, Lk).bool()
    if maybe():
        f["chunk"] = draw(st.integers(1, Lk))
    if maybe(3):
        shape = [draw(st.sampled_from([1, size])) for size in (B, H, Lq, Lk)]
        f["dense"] = ints(int(torch.tensor(shape).prod()), 0, 1).bool().reshape(shape)
    if frame:
        if maybe(3):
            f["key_offset"] = draw(st.integers(0, 5))
        if maybe(3) and "documents" not in f and "blocks" not in f:
            f["offset"] = draw(st.integers(-2, Lk + 4)) if draw(st.booleans()) else ints(B, -2, Lk + 4)
        if maybe(3) and not documents:
            f["start"] = draw(st.integers(0, 4)) if draw(st.booleans()) else ints(B, 0, 4)
    return f


@dataclass(frozen=True)
class Case:
    """One attention call; keyword arguments of `attention` beside q, k, v."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    mask_fields: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Case:
        """The same call in another dtype (rounded once, so compare from there)."""
        options = {
            name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.options.items()
        }
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype), options=options)


LAYOUTS = ("contiguous", "heads inside", "sliced", "expanded batch", "strided last axis")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers in other memory."""
    if layout == "heads inside":  # (B, L, H, d) seen as (B, H, L, d), as transformers has it
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = torch.full(
            (*tensor.shape[:2], tensor.shape[2] + 3, tensor.shape[3] + 2), torch.nan, dtype=tensor.dtype
        )
        wide[:, :, 1:-2, 1:-1] = tensor
        return wide[:, :, 1:-2, 1:-1]
    if layout == "expanded batch":
        return tensor[:1].expand(tensor.shape[0], -1, -1, -1)
    if layout == "strided last axis":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    return tensor.contiguous()


@st.composite
def cases(draw: st.DrawFn, *, longest: int = 12, gradients: bool = False) -> Case:
    """A random call in float64: any sizes, grouped heads, dv ≠ d, every field of the mask, every option."""
    B, Hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    Hq = Hkv * group
    Lq, Lk = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    if draw(st.booleans()):
        Lq = Lk
    d = draw(st.sampled_from([1, 3, 8, 16]))
    dv = d if draw(st.booleans()) else draw(st.sampled_from([1, 5, 16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    def layout(tensor: Tensor) -> Tensor:
        return laid_out(tensor, draw(st.sampled_from(LAYOUTS)))

    options: dict[str, Any] = {}
    mask_fields: dict[str, Any] = {}
    kind = draw(st.sampled_from(["none", "causal", "fields", "fields", "fields", "two masks", "additive"]))
    if kind == "causal":
        mask_fields = {"causal": True}
        options["mask"] = Mask(causal=True)
    elif kind == "fields":
        mask_fields = draw(fields(B, Hq, Lq, Lk))
        options["mask"] = Mask(**mask_fields)
    elif kind == "two masks":
        one, two = (draw(fields(B, Hq, Lq, Lk, frame=False)) for _ in range(2))
        options["mask"] = Mask(**one) & Mask(**two)
    elif kind == "additive":
        mask = normal(B, 1, Lq, Lk)
        options["mask"] = mask.masked_fill(normal(B, 1, Lq, Lk) > 0.5, -torch.inf)
    if draw(st.integers(0, 2)) == 0:
        options["bias"] = normal(*(draw(st.sampled_from([1, n])) for n in (B, Hq, Lq, Lk)))
        if draw(st.booleans()) and not gradients:
            options["bias"] = options["bias"].masked_fill(options["bias"] > 1, -torch.inf)
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.sampled_from([0.5, 2.0, 30.0]))
    if draw(st.integers(0, 3)) == 0:
        options["sink_logits"] = normal(Hq)
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, 0.1, 1.0, -0.7, 4.0]))
    q, k, v = normal(B, Hq, Lq, d), normal(B, Hkv, Lk, d), normal(B, Hkv, Lk, dv)
    return Case(layout(q), layout(k), layout(v), options, mask_fields)
