"""The layer: projections around `clearhead.attention`, in every form that a model may want of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.bias import ALiBi
from clearhead.errors import ArgumentError, ShapeError
from clearhead.front_door import attention
from clearhead.mask import Mask, Window, as_mask
from clearhead.nn import checks
from clearhead.nn.caching import Kept
from clearhead.nn.positions import RelativePositions, Rotary, as_positions, checked_places
from clearhead.observables import Observable
from clearhead.stored import Held, Stored


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): self, masked and cross, as a layer.

    embed_dim: features of the queries and of the output. num_heads: query heads, Hq.
    num_kv_heads: key/value heads, Hkv: Hq (None) is multi-head, fewer grouped-query (Ainslie et al. 2023),
        1 multi-query (Shazeer 2019). head_dim: features of a head; default embed_dim / num_heads.
    kdim, vdim: features of the keys and values that come in (cross-attention); default embed_dim.
    bias: whether the projections have one; out_bias: that of the output alone, default as bias.
    causal: a query sees keys at its own position and before. window, sinks: as `Mask`.
    positions: "rotary", "alibi", "relative" (T5's, learned) or None; or a `Rotary` (partial: with a smaller
        dim), `ALiBi` or `RelativePositions`, which layers may share.
    sink_logits: True: one more learned logit per head that takes weight and has no value (gpt-oss), from 0.
    softcap: c: scores become c · tanh(s / c) (Gemma 2). scale: of the scores; default 1/√head_dim.
    qk_norm: RMS norm, with learned gains, of each head's queries and keys before they are turned (Qwen 3).
    dropout: of the weights, while training.
    batch_first: True: tensors are (B, L, features); False: (L, B, features). Unlike torch's layer the default
        is True. Tensors without a batch, (L, features), are taken either way.
    layer_idx: which layer of a whole cache this one is.

    Weights lie in q_proj, k_proj, v_proj and o_proj, named and laid out as in Llama of transformers.

    Raises ArgumentError, MaskError or ShapeError naming the argument for sizes that do not divide, a window
    below 1, sinks of a window or more, positions that do not fit the heads.

    >>> layer = MultiHeadAttention(64, 8, num_kv_heads=2, causal=True, positions="rotary")
    >>> layer(torch.randn(3, 10, 64)).shape
    torch.Size([3, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        causal: bool = False,
        window: Window | None = None,
        sinks: int = 0,
        positions: str | nn.Module | ALiBi | None = None,
        sink_logits: bool = False,
        softcap: float | None = None,
        scale: float | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
        batch_first: bool = True,
        layer_idx: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = checks.heads(
            embed_dim, num_heads, num_kv_heads, head_dim
        )
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else checks.whole("kdim", kdim)
        self.vdim = embed_dim if vdim is None else checks.whole("vdim", vdim)
        self.window = tuple(window) if isinstance(window, list) else window
        self.sinks, self.causal = sinks, causal
        #: What the layer itself hides.
        self.mask = checks.window_and_sinks(self.window, sinks, causal)
        self.softcap = checks.number("softcap", softcap, above=0)
        self.scale = checks.number("scale", scale)
        if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise ArgumentError(f"dropout must lie in 0 <= p < 1, got {dropout!r}")
        self.dropout, self.batch_first = float(dropout), batch_first
        self.layer_idx = checks.whole("layer_idx", layer_idx, least=0)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        inner, shared = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, inner, bias=bias, **made)
        self.k_proj = nn.Linear(self.kdim, shared, bias=bias, **made)
        self.v_proj = nn.Linear(self.vdim, shared, bias=bias, **made)
        self.o_proj = nn.Linear(inner, embed_dim, bias=bias if out_bias is None else out_bias, **made)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if qk_norm else None
        self.sink_logits = nn.Parameter(torch.zeros(self.num_heads, **made)) if sink_logits else None
        self.positions = as_positions(
            positions, self.num_heads, self.head_dim, bidirectional=not causal, **made
        )
        self.reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        # A mask that was used holds what was worked out of it: copies and files make it anew.
        return {name: value for name, value in self.__dict__.items() if name != "mask"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mask = checks.window_and_sinks(self.window, self.sinks, self.causal)

    def reset_parameters(self) -> None:
        """Draw the projections anew: Xavier's uniform distribution, biases 0, as torch's layer does."""
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    @classmethod
    def from_torch(cls, layer: nn.MultiheadAttention) -> MultiHeadAttention:
        """The same layer with the weights of torch's, on its device and in its dtype; outputs are equal.

        add_zero_attn becomes a sink logit that stays 0. Raises ArgumentError for add_bias_kv, which has no
        counterpart here. For torch's masks see `torch_masks`.
        """
        from clearhead.nn.torch_layer import from_torch  # which makes one of these

        return from_torch(cls, layer)

    def to_torch(self) -> nn.MultiheadAttention:
        """A torch layer with these weights. Raises ArgumentError for what torch's layer cannot do."""
        from clearhead.nn.torch_layer import to_torch

        return to_torch(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        cache: Any = None,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        observe: Sequence[Observable] | Observable = (),
        backend: str | None = None,
    ) -> Any:
        """Attention of `query` to itself, or to `key` and `value`.

        query: (B, Lq, embed_dim). key: (B, Lk, kdim): given, this is cross-attention; value: (B, Lk, vdim),
            default key. With batch_first=False (L, B, features); without a batch (L, features).
        mask: who may look beside what the layer hides itself: a `Mask`, booleans (True = may look) or
            additive floats that broadcast to (B, Hq, Lq, Lk). With a cache Lk counts all keys that it hands
            back.
        cache: what keeps keys and values: a layer of a cache or a whole one of transformers. In
            self-attention the new tokens are added to it, behind those it has seen. In cross-attention the
            first call fills it and later ones use what it has; `key` must be as long as then.
        positions, key_positions: (L,) or (B, L) integers, for rotary layers. By default query i sits at
            `mask.offset` + i or, without one, where the mask aligns it: behind what the cache has seen in
            self-attention, at the end of the keys in cross-attention. `key_positions` is for
            cross-attention. Biases by distance take their positions from the mask.
        observe: observables, as in `attention`. backend: as in `attention`.

        Returns out, of query's shape; with `observe` (out, seen), seen a tuple in the order asked for.
        Raises ShapeError, DTypeError, ArgumentError or MaskError naming the argument.
        """
        query, key, value, unbatched = self._arranged(query, key, value)
        B, L = query.shape[:2]
        who, added = as_mask(mask, query.dtype) if mask is not None else (None, None)
        bias = (
            added if self.positions is None or isinstance(self.positions, Rotary) else self._distances(added)
        )
        if not isinstance(self.positions, Rotary) and (positions is not None or key_positions is not None):
            raise ArgumentError(
                "positions and key_positions are for rotary layers; without positions, or with a bias by "
                "distance, tokens sit where the mask has them (Mask(offset=...))"
            )
        given = None if who is None else who.offset
        if key is None or value is None:
            if key_positions is not None:
                raise ArgumentError("key_positions is for cross-attention: in self-attention give positions")
            kept = None if cache is None else Kept(cache, self.layer_idx, cross=False)
            at = _places("positions", positions, given, 0 if kept is None else kept.seen, query)
            k, v, own = self._own(query, kept, at)
        else:
            first = 0 if who is None else who.key_offset
            k, v = self._cross(key, value, cache, key_positions, first)
            at = _places("positions", positions, given, first + k.shape[2] - L, query)
            own = self.mask
        q = self._split(self.q_proj(query), self.num_heads, self.q_norm)
        if isinstance(self.positions, Rotary):
            q = self.positions.turn(q, at)
        answer = attention(
            q,
            k,
            v,
            mask=own if who is None else own & who,
            scale=self.scale,
            softcap=self.softcap,
            bias=bias,
            sink_logits=self.sink_logits,
            dropout=self.dropout if self.training else 0.0,
            observe=observe,
            backend=backend,
        )
        out, seen = answer if isinstance(answer, tuple) else (answer, None)
        out = self.o_proj(out.transpose(1, 2).reshape(B, L, self.num_heads * self.head_dim))
        if unbatched:
            out = out[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out if seen is None else (out, seen)

    # ------------------------------------------------------------------ parts of forward

    def _arranged(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, bool]:
        """query, key and value as (B, L, features), and whether they came without a batch."""
        if key is None and value is not None:
            raise ArgumentError(
                "value was given without key: cross-attention needs key, and value if it differs"
            )
        value = key if value is None else value
        if key is None and (self.kdim, self.vdim) != (self.embed_dim, self.embed_dim):
            raise ArgumentError(
                f"key must be given: this layer takes keys of {self.kdim} and values of {self.vdim} features"
            )
        wide = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        axes = "(B, L, features)" if self.batch_first else "(L, B, features)"
        given: dict[str, Tensor | None] = {"query": query, "key": key, "value": value}
        for name, tensor in given.items():
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or tensor.ndim not in (2, 3):
                came = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ShapeError(f"{name} must have shape {axes} or (L, features), got {came}")
            if tensor.ndim != query.ndim:
                raise ShapeError(
                    f"query has {query.ndim} axes and {name} {tensor.ndim}: they must be as many"
                )
            if tensor.shape[-1] != wide[name]:
                same = " (the key, as no value was given)" if name == "value" and tensor is key else ""
                raise ShapeError(f"{name} must have {wide[name]} features, got {tuple(tensor.shape)}{same}")
            if 0 in tensor.shape:
                raise ShapeError(f"{name} is empty, shape {tuple(tensor.shape)}")
            if tensor.ndim == 2:
                given[name] = tensor[None]
            elif not self.batch_first:
                given[name] = tensor.transpose(0, 1)
        q, k, v = given["query"], given["key"], given["value"]
        assert q is not None
        if k is not None and v is not None:
            if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
                raise ShapeError(
                    f"query, key and value have batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]}: they "
                    "must be the same"
                )
            if k.shape[1] != v.shape[1]:
                raise ShapeError(f"key has length {k.shape[1]} and value {v.shape[1]}: they must be the same")
        return q, k, v, query.ndim == 2

    def _split(self, projected: Tensor, heads: int, norm: nn.RMSNorm | None) -> Tensor:
        """(B, L, heads · d) as (B, heads, L, d), normed if there is a norm."""
        split = projected.reshape(*projected.shape[:2], heads, self.head_dim)
        return (split if norm is None else norm(split)).transpose(1, 2)

    def _projected(self, key: Tensor, value: Tensor, at: Tensor | int) -> tuple[Tensor, Tensor]:
        """Keys, turned to their positions, and values: (B, Hkv, Lk, d)."""
        k = self._split(self.k_proj(key), self.num_kv_heads, self.k_norm)
        v = self._split(self.v_proj(value), self.num_kv_heads, None)
        return (self.positions.turn(k, at) if isinstance(self.positions, Rotary) else k), v

    def _own(
        self, query: Tensor, kept: Kept | None, at: Tensor | int
    ) -> tuple[Tensor | Stored | Held, Tensor | Stored, Mask]:
        """Keys, values and the layer's mask for self-attention, behind what a cache has kept."""
        k, v = self._projected(query, query, at)
        if kept is None:
            return k, v, self.mask
        if isinstance(self.positions, Rotary) and not kept.turns:
            raise ArgumentError(
                "cache moves keys to other places and was not told how this layer turns them: give it the "
                "model or the layer, as in SinkCache(model, window=…)"
            )
        seen, L = kept.seen, query.shape[1]
        first = kept.sizes(L)[1]
        if self.mask.sinks and first and getattr(kept.layer, "sinks", 0) < self.mask.sinks:
            raise ArgumentError(
                f"cache lets go of the first tokens, and this layer has sinks={self.mask.sinks} among them: "
                "use a cache that keeps as many sinks"
            )
        keys, values = kept.add(k, v)
        # A cache that hands back a whole buffer has empty places behind the last query.
        offset = None if first + keys.shape[2] == seen + L else seen
        if offset is None and not first:
            return keys, values, self.mask
        framed = _framed.__wrapped__ if torch.compiler.is_compiling() else _framed
        return keys, values, framed(self.mask, offset, first)

    def _cross(
        self, key: Tensor, value: Tensor, cache: Any, key_positions: Tensor | None, first: int
    ) -> tuple[Tensor | Stored, Tensor | Stored]:
        """Keys and values of cross-attention; from the cache if it has them."""
        kept = None if cache is None else Kept(cache, self.layer_idx, cross=True)
        if kept is None or not kept.seen:
            at = _places("key_positions", key_positions, None, first, key)
            new_k, new_v = self._projected(key, value, at)
            if kept is None:
                return new_k, new_v
            k, v = kept.add(new_k, new_v)
        else:
            k, v = kept.stored()
        if kept.seen != key.shape[1]:
            raise ShapeError(
                f"key has length {key.shape[1]}, and the cache holds {kept.seen} keys: it was filled from "
                "another text"
            )
        if isinstance(k, Held) or k.shape[2] != kept.seen:
            raise ArgumentError(
                "cache lets go of keys or hides some of them, and cross-attention looks at all: use one that "
                "keeps everything"
            )
        return k, v

    def _distances(self, added: Tensor | None) -> Any:
        """The layer's bias by distance."""
        if added is not None:
            raise ArgumentError(
                "mask holds additive floats, and this layer has a bias by distance already: give the mask as "
                "booleans or as a Mask"
            )
        return self.positions.bias() if isinstance(self.positions, RelativePositions) else self.positions

    def extra_repr(self) -> str:
        """What is not seen from its parts."""
        parts = [f"{self.embed_dim}, {self.num_heads}, num_kv_heads={self.num_kv_heads}", repr(self.mask)]
        parts += [f"{name}={value}" for name in ("softcap", "scale") if (value := getattr(self, name))]
        if isinstance(self.positions, ALiBi):
            parts.append(f"positions={self.positions!r}")
        if self.sink_logits is not None:
            parts.append("sink_logits")
        return ", ".join(parts)


@lru_cache(maxsize=64)
def _framed(mask: Mask, offset: int | None, first: int) -> Mask:
    """The layer's mask for keys of which the first sits at `first`; the layers of a model share it.

    What sits there counts as the start of the row: the sinks that a cache has kept.
    """
    return mask & Mask(offset=offset, key_offset=first, start=first if mask.sinks and first else None)


def _places(
    name: str, given: Tensor | None, offset: int | Tensor | None, start: int, tokens: Tensor
) -> Tensor | int:
    """Where tokens (B, L, features) sit: as given, from an offset of the mask, or in a row from `start`."""
    B, L = tokens.shape[:2]
    if given is not None:
        return checked_places(name, given, B, L)
    if isinstance(offset, Tensor):
        return offset.to(tokens.device)[:, None] + torch.arange(L, device=tokens.device)
    return start if offset is None else offset
