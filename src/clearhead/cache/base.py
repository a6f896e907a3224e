"""What all caches here have in common: layers made when first used, and what a cache says of itself."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from clearhead.errors import ArgumentError, ModelError, ShapeError


class KeptLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a cache: what it was given and what it still has of that.

    A layer is usable by itself wherever a layer of transformers' caches is.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        #: How many tokens it was given.
        self.seen = 0
        self._fixed: tuple[int, int, int, int] | None = None  # (B, Hkv, d, dv) of what is in it

    # ------------------------------------------------------------------ what a kind of layer says

    @property
    @abstractmethod
    def held(self) -> int:
        """How many tokens of each row are kept."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of what is kept."""

    @abstractmethod
    def _select(self, rows: list[int]) -> None:
        """Keep these rows of the batch, in this order."""

    @abstractmethod
    def _clear(self) -> None:
        """Let go of everything."""

    # ------------------------------------------------------------------ what transformers asks for

    @property
    def is_initialized(self) -> bool:
        """Whether anything was given to it."""
        return self._fixed is not None

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first."""
        return -1 if self._fixed is None else self._fixed[0]

    @property
    def evicted(self) -> int:
        """How many tokens of each row were let go of."""
        return self.seen - self.held

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: what is needed is made when there is something to keep."""

    def get_seq_length(self) -> int:
        """How many tokens it was given; the position of the next one."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(how many keys the next `update` with so many tokens returns, where the first of them counts)."""
        return self.held + query_length, self.seen - self.held

    def get_max_length(self) -> int:
        """-1: there is no length at which it stops."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Take away the last -tokens_to_remove tokens. ModelError where what they drove out is gone."""
        if count := removed(tokens_to_remove):
            raise ModelError(
                f"{type(self).__name__} cannot take back {count} tokens: what it let go of for them is gone. "
                "Assisted decoding needs a cache that keeps everything, such as DynamicCache or PagedCache"
            )

    def reset(self) -> None:
        """Empty again, and usable with any batch and model."""
        self.seen, self._fixed = 0, None
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b goes on from what row beam_idx[b] has."""
        self._reselect(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; booleans say which."""
        chosen = torch.as_tensor(indices)
        self._reselect((chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        self._reselect([row for row in range(self.batch_size) for _ in range(repeats)])

    def _reselect(self, rows: list[int]) -> None:
        if self._fixed is None:
            return
        self._select(rows)
        self._fixed = (len(rows), *self._fixed[1:])

    # ------------------------------------------------------------------ what kinds of layers use

    def _check(self, keys: Tensor, values: Tensor) -> None:
        """Raise ShapeError if keys (B, Hkv, q, d) and values (B, Hkv, q, dv) do not go with what is held."""
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ShapeError(
                f"keys and values must be (B, Hkv, q, d) and (B, Hkv, q, dv), got {tuple(keys.shape)} and "
                f"{tuple(values.shape)}"
            )
        came = (*keys.shape[:2], keys.shape[3], values.shape[3])
        if self._fixed is not None and came != self._fixed:
            raise ShapeError(
                f"the cache holds (B, Hkv, d, dv) = {self._fixed} and was given {came}: it was filled by "
                "another model or batch; reset() it, or make a new one"
            )
        self._fixed = came


class WholeCache(Cache):  # type: ignore[misc]
    """A cache of a whole model; its layers are made when they are first used.

    config: the model's configuration, or None. With it the cache can say before anything is computed that
    the model's attention cannot read what the cache hands out.
    """

    layers: list[Any]
    #: Whether what `update` returns is more than tensors, which only clearhead's attention can read.
    _needs_clearhead = True

    def __init__(self, config: Any = None) -> None:
        if config is not None and not hasattr(config, "get_text_config"):
            raise ArgumentError(
                f"config must be a model's configuration (model.config) or None, got {type(config).__name__}"
            )
        Cache.__init__(self, layers=[])
        self.config = config
        self._check_attention()

    @abstractmethod
    def _layer(self, number: int) -> Any:
        """Return a new, empty layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept, over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def capacity(self) -> int | None:
        """How many tokens of a row are kept at most; None: all of them, however many."""
        return None

    @property
    def evicted(self) -> int:
        """How many tokens of each row were let go of."""
        return self.layers[0].evicted if self.layers else 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take keys (B, Hkv, q, d) and values (B, Hkv, q, dv); return those to attend to.

        Raises ShapeError for those of another model or batch, ModelError if the model's attention cannot
        read what would be returned.
        """
        if layer_idx >= len(self.layers):
            new = key_states.shape[2]
            if self.layers and self.layers[0].seen > new:
                raise ShapeError(
                    f"the cache holds {len(self.layers)} layers and was given keys of layer {layer_idx}: it "
                    "was filled by another model; reset() it, or make a new one"
                )
            self._check_attention()
            while len(self.layers) <= layer_idx:
                self.layers.append(self._layer(len(self.layers)))
        if kwargs and layer_idx:  # a model of transformers: all its layers get the same tokens
            due, here = self.layers[0].seen, self.layers[layer_idx].seen + key_states.shape[2]
            if due and here != due:
                raise ModelError(
                    f"layer {layer_idx} comes to {here} tokens and layer 0 to {due}: a forward before "
                    "this one stopped in the middle; take its tokens back with crop(), or reset() the cache"
                )
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def crop(self, tokens_to_remove: int) -> None:
        """Take away the last -tokens_to_remove tokens, also those of a forward that failed half-way.

        Raises ModelError for a cache that lets go of tokens.
        """
        length = max(self.get_seq_length() - removed(tokens_to_remove), 0)
        for layer in self.layers:
            layer.crop(-max(layer.seen - length, 0))

    def reset(self) -> None:
        """Empty again, and usable with any batch and model."""
        self.layers.clear()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no length at which it stops."""
        return -1

    def _check_attention(self) -> None:
        if self.config is None or not self._needs_clearhead:
            return
        text = self.config.get_text_config(decoder=True)
        name = getattr(text, "_attn_implementation", None)
        if name not in (None, "clearhead"):
            raise ModelError(
                f"{type(self).__name__} hands out keys that attn_implementation={name!r} cannot read; load "
                'the model with attn_implementation="clearhead"'
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.layers)} layers, {self.get_seq_length()} tokens seen)"


def removed(tokens_to_remove: int) -> int:
    """How many tokens a crop takes away. Raises ArgumentError for a positive number, a length of old."""
    if tokens_to_remove > 0:
        raise ArgumentError(
            f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}"
        )
    return -tokens_to_remove


def whole(name: str, value: int, least: int) -> int:
    """The value, if it is an integer of at least `least`; else ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value
