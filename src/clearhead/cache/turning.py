"""Rotary positions of a model, so that a cache can take keys from one place to another.

Only differences of positions matter to rotary scores (Su et al. 2021, section 3.4.3), so a key can be turned
to another place. Angles are worked out in float64: a model's own are float32 and off by position · 2⁻²⁴.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from clearhead.errors import ArgumentError, ModelError

#: Kinds of rotary embedding whose angles depend on how long the text is: a key cannot be taken elsewhere.
_BY_LENGTH = ("dynamic", "longrope")


class Turner:
    """The rotation of one layer's keys.

    rotary: a module `rotary(x, position_ids) -> cos, sin` as transformers' models have one (then kind is the
    layer type, where the module has several), or a `clearhead.nn.Rotary`.
    Raises ModelError for rotations by length, of interleaved pairs, or that cannot be read.
    """

    def __init__(self, rotary: nn.Module, kind: str | None = None) -> None:
        self.rotary = rotary
        prefix = f"{kind}_" if kind is not None and hasattr(rotary, f"{kind}_inv_freq") else ""
        self.kind = kind if prefix else None
        steps = getattr(rotary, f"{prefix}inv_freq", None)
        if isinstance(steps, Tensor):
            named = getattr(rotary, "rope_type", "default")
            rope = named.get(kind, "default") if isinstance(named, dict) else named
            if rope in _BY_LENGTH:
                raise ModelError(
                    f"rotary embedding of type {rope!r} turns by angles that depend on the length of the "
                    "text: sinks cannot be taken along"
                )
            if not _in_halves(rotary):
                raise ModelError(
                    f"{type(rotary).__name__} does not turn feature i with feature i + d/2: its keys cannot "
                    "be turned to other places"
                )
            self._scaling = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
            self._steps = steps.detach().double()
        elif hasattr(rotary, "dim") and hasattr(rotary, "base"):
            dim, base = int(rotary.dim), float(rotary.base)  # type: ignore[arg-type]
            self._scaling, self._steps = 1.0, base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        else:
            raise ModelError(f"{type(rotary).__name__} has no inv_freq to read its angles from")
        #: How many of a head's features are turned, the first ones.
        self.dim = 2 * len(self._steps)
        self._known: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def turned(self, x: Tensor, first: int) -> Tensor:
        """Rows that were never turned, (B, H, n, d), turned to the places first, first + 1, …"""
        return _rotate(x, *self._remembered(("to", first, x.shape[2]), x))

    def turned_back(self, x: Tensor, first: int) -> Tensor:
        """Rows that the model has turned to these positions, as they were before; float64."""
        cos, sin = self._remembered(("own", first, x.shape[2]), x)
        return _rotate(x.double(), cos, -sin)

    def shifted(self, x: Tensor, by: int) -> Tensor:
        """Rows turned by one more common angle: each goes `by` places further (or back)."""
        return _rotate(x, *self._remembered(("to", by, 1), x))

    def moved(self, x: Tensor, first: int, to: int) -> Tensor:
        """Rows that the model has turned to first, first + 1, … as if they stood at to, to + 1, …

        The model's rounding of the angles is taken out with it.
        """
        return _rotate(x, *self._remembered(("moved", first, x.shape[2], to), x))

    def _remembered(self, key: tuple[Any, ...], x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (1, 1, n, dim) float64; the layers of a step ask alike."""
        key = (*key, x.device, x.dtype)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= 8:
                self._known.clear()
            with torch.inference_mode(False):
                known = self._known[key] = self._angles(key, x)
        return known

    def _angles(self, key: tuple[Any, ...], x: Tensor) -> tuple[Tensor, Tensor]:
        what, first, count = key[:3]
        if what == "own":
            return self._own(first, count, x)
        if what == "to":
            return self._exact(first, count, x)
        cos, sin = self._own(first, count, x)
        to_cos, to_sin = self._exact(key[3], count, x)
        return cos * to_cos + sin * to_sin, cos * to_sin - sin * to_cos

    def _exact(self, first: int, count: int, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(first, first + count, device=x.device, dtype=torch.float64)
        angles = places[:, None] * self._steps.to(x.device)
        angles = torch.cat((angles, angles), dim=-1)[None, None]
        return angles.cos(), angles.sin()

    def _own(self, first: int, count: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own cos and sin, with its rounding, without its scaling."""
        places = torch.arange(first, first + count, device=x.device)[None]
        like = torch.empty(0, dtype=x.dtype, device=x.device)
        with torch.no_grad():
            more = (self.kind,) if self.kind else ()
            cos, sin = self.rotary(like, places, *more)
        return cos[:, None].double() / self._scaling, sin[:, None].double() / self._scaling


def turners(model: Any) -> _Turners:
    """How a model turns its keys.

    model: a model of transformers, its configuration, a model or layer of `clearhead.nn`, a rotary module, or
    None: keys are not turned (ALiBi, or no positions).
    Raises ModelError for a model whose positions cannot be moved: learned ones, biases by distance.
    """
    if model is None:
        return _Turners(None, None)
    config = getattr(model, "config", model)
    if not isinstance(config, PreTrainedConfig):
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                "model must be a model, a configuration of transformers, a rotary module or None, got "
                f"{type(model).__name__}"
            )
        return _Turners(next((part for part in model.modules() if _is_rotary(part)), None), None)
    text = config.get_text_config(decoder=True)
    rotary = None
    if isinstance(model, nn.Module):
        named = [part for name, part in model.named_modules() if "vision" not in name and _is_rotary(part)]
        rotary = named[0] if named else None
    elif getattr(text, "rope_parameters", None) is not None:
        rotary = _from_config(text)
    if rotary is None:
        raise ModelError(
            f"{type(text).__name__}: the positions of this model are not turns of its keys (learned ones, or "
            "a bias by distance): a cache with sinks cannot give them new places"
        )
    return _Turners(rotary, getattr(text, "layer_types", None))


class _Turners:
    """A `Turner` for each layer; layers of one type share one."""

    def __init__(self, rotary: nn.Module | None, kinds: list[str] | None) -> None:
        self.rotary, self.kinds = rotary, kinds
        self._made: dict[str | None, Turner] = {}
        for number in range(len(kinds) if kinds else 1):
            self.layer(number)  # what cannot be turned is refused now

    def layer(self, number: int) -> Turner | None:
        """The turner of one layer; None where keys are not turned."""
        return self._of(self.kinds[number] if self.kinds else None)

    def _of(self, kind: str | None) -> Turner | None:
        if self.rotary is None:
            return None
        if kind not in self._made:
            self._made[kind] = Turner(self.rotary, kind)
        return self._made[kind]


def _is_rotary(module: nn.Module) -> bool:
    named = any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    return named or all(hasattr(module, name) for name in ("dim", "base", "turn"))  # clearhead.nn


def _from_config(config: Any) -> nn.Module:
    """The rotary module that the model of this configuration would make."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    modeling = import_module(name)
    classes = [c for c in vars(modeling) if c.endswith("RotaryEmbedding") and "Vision" not in c]
    if not classes:
        raise ModelError(
            f"{type(config).__name__}: no rotary embedding in {name}; give the model in its place"
        )
    made: nn.Module = getattr(modeling, classes[0])(config)
    return made


def _in_halves(rotary: nn.Module) -> bool:
    """Whether feature i is turned with feature i + d/2, as in Llama, and not with its neighbour."""
    rotate = getattr(sys.modules.get(type(rotary).__module__), "rotate_half", None)
    if rotate is None:
        return False
    return bool(torch.equal(rotate(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.tensor([-3.0, -4.0, 1.0, 2.0])))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first features, in float64 for float64 and float32 else; dtype and shape stay."""
    dim = cos.shape[-1]
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    part = x[..., :dim].to(wide)
    first, second = part.chunk(2, dim=-1)
    turned = (part * cos.to(wide) + torch.cat((-second, first), dim=-1) * sin.to(wide)).to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), dim=-1)
