"""Prove that a model's attention goes through clearhead; refuse the model if it does not.

A configuration that says "clearhead" proves nothing: some families run their own softmax whatever it says.
So the model is run once on two made-up tokens (or a blank image, or silence), and every attention module that
ran must have called our attention function. Modules that the probe could not reach are watched until their
first real call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError, ModelError
from clearhead.models.active import ACTIVE, Call, Recorder
from clearhead.models.hook import NAME
from clearhead.observables import Observable


class Coverage(NamedTuple):
    """Which attention modules of a model go through clearhead, by name as in `model.named_modules()`."""

    ours: tuple[str, ...]  # called our attention function
    outside: tuple[
        str, ...
    ]  # ran, but not with us: torch's own nn.MultiheadAttention, or a sub-model that is
    # set to another implementation
    unseen: tuple[str, ...]  # did not run in the probe; `ensure_supported` watches their first real call
    reason: str | None  # why some inputs could not be made or some part not be run, if so


def ensure_supported(model: nn.Module) -> Coverage:
    """Check `model` once (`check`), remember the result, and watch what the probe could not reach.

    A module that the probe did not run (a cross-attention without its encoder, an unusual kind of input) is
    checked when it first runs: that forward raises ModelError if the module computes its attention by itself.
    Warns once (UserWarning) about modules that are not seen because they are torch's own
    nn.MultiheadAttention or belong to a sub-model set to another implementation.

    Returns the Coverage. Raises ModelError as `check` does.
    """
    root = _transformers_model(model)
    state = tuple(sub.config._attn_implementation for _, sub in _submodels(root))
    known = _CHECKED.get(root)
    if known is not None and known[0] == state:
        return known[1]
    coverage = check(root)
    _CHECKED[root] = (state, coverage)
    if coverage.outside:
        warnings.warn(
            f"{type(root).__name__}: the attention of {_listed(coverage.outside)} does not go through "
            "clearhead and is not seen",
            UserWarning,
            stacklevel=2,
        )
    for name in coverage.unseen:
        _watch(name, root.get_submodule(name))
    return coverage


_CHECKED: WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], Coverage]] = WeakKeyDictionary()


def check(model: nn.Module) -> Coverage:
    """Run a probe forward and return which attention modules go through clearhead.

    model: a transformers PreTrainedModel, or a module that wraps one. It is run without gradient in eval mode
    on two tokens, a blank image or silence, whatever it takes; its sub-models are tried one by one where that
    does not reach all of them. Training flags are restored. Your own forward hooks see the probe.

    Raises ModelError if the model's code does not use transformers' AttentionInterface, if no part of it is
    set to "clearhead", or if an attention module ran without calling our attention function.
    """
    root = _transformers_model(model)
    _refuse_own_code(root)
    _refuse_other_implementation(root)
    trace = _Trace(root)
    reason = None
    with trace.watching(), _quiet_eval(root):
        for name, sub in _submodels(root):
            if name and not trace.missing(inside=name):
                continue
            reason = _run(sub) or reason
    return trace.verdict(reason)


# ---------------------------------------------------------------------- refusals that need no probe


def _transformers_model(model: nn.Module) -> Any:
    from transformers import PreTrainedModel

    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                return module
    raise ModelError(
        f"model must be a transformers model (PreTrainedModel) or wrap one, got {type(model).__name__}"
    )


def _submodels(root: Any) -> list[tuple[str, Any]]:
    """The model itself, named "", and all transformers models inside it, outer ones first."""
    from transformers import PreTrainedModel

    return [(name, module) for name, module in root.named_modules() if isinstance(module, PreTrainedModel)]


def _refuse_own_code(root: Any) -> None:
    if not type(root)._can_set_attn_implementation():
        raise ModelError(
            f"{type(root).__name__} computes attention in its own code, not through transformers' "
            "AttentionInterface, so clearhead cannot see it. Allowed are models whose modelling file takes "
            "its attention function from ALL_ATTENTION_FUNCTIONS: Llama, Qwen, Mistral, Gemma, GPT-2, BERT, "
            "T5, ViT and most others"
        )


def _refuse_other_implementation(root: Any) -> None:
    found = {name or "the model": sub.config._attn_implementation for name, sub in _submodels(root)}
    if NAME not in found.values():
        set_to = next(iter(found.values()))
        raise ModelError(
            f'{type(root).__name__} is set to attn_implementation="{set_to}", clearhead sees only '
            f'"{NAME}": call model.set_attn_implementation("{NAME}"), or load it with '
            f'from_pretrained(..., attn_implementation="{NAME}")'
        )


# ---------------------------------------------------------------------- who ran, and who called us


class _Trace:
    """Which attention modules ran, and which modules called us while they did."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.names = {module: name for name, module in root.named_modules()}
        self.leaves = _attention_leaves(root)
        self.ran: set[str] = set()
        self.counter = _Counter(None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            module.register_forward_pre_hook(partial(self._note, name))
            for name, module in self.leaves.items()
        ]
        token = ACTIVE.set(self.counter)
        try:
            yield
        finally:
            ACTIVE.reset(token)
            for handle in handles:
                handle.remove()

    def _note(self, name: str, module: nn.Module, args: Any) -> None:
        self.ran.add(name)

    @property
    def called(self) -> set[str]:
        return {self.names[module] for module in self.counter.modules if module in self.names}

    def missing(self, inside: str) -> list[str]:
        """The attention modules inside this sub-model that have not run yet."""
        return [name for name in self.leaves if name.startswith(f"{inside}.") and name not in self.ran]

    def verdict(self, reason: str | None) -> Coverage:
        called = self.called
        own: list[str] = []
        outside: list[str] = []
        for name in self.leaves:
            if name not in self.ran or _reached(name, called):
                continue
            module = self.leaves[name]
            theirs = isinstance(module, nn.MultiheadAttention) or self._implementation(name) != NAME
            (outside if theirs else own).append(name)
        if own:
            kinds = sorted({type(self.leaves[name]).__name__ for name in own})
            raise ModelError(
                f"{type(self.root).__name__}: {_listed(own)} ({', '.join(kinds)}) ran in a probe without "
                "calling clearhead's attention function: this part computes attention in its own code. "
                "Allowed are models whose attention modules all go through transformers' AttentionInterface"
            )
        unseen = tuple(name for name in self.leaves if name not in self.ran)
        if not called and not unseen:
            raise ModelError(
                f"{type(self.root).__name__}: no attention call reached clearhead in a probe; allowed are "
                "models that take their attention from transformers' AttentionInterface"
            )
        order = [name for name in self.names.values() if name in called]
        return Coverage(tuple(order), tuple(outside), unseen, reason)

    def _implementation(self, name: str) -> str | None:
        """What this module, or the innermost transformers model around it, is set to."""
        config: Any = getattr(self.leaves[name], "config", None)
        if not hasattr(config, "_attn_implementation"):
            around = [(n, sub) for n, sub in _submodels(self.root) if not n or name.startswith(f"{n}.")]
            config = max(around, key=lambda pair: len(pair[0]))[1].config
        found: str | None = config._attn_implementation
        return found


class _Counter:
    """A recorder that notes who calls, and passes everything on to the recorder behind it."""

    def __init__(self, behind: Recorder | None) -> None:
        self.behind = behind
        self.modules: set[nn.Module] = set()

    def observables(self, call: Call) -> Sequence[Observable]:
        self.modules.add(call.module)
        return () if self.behind is None else self.behind.observables(call)

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        if self.behind is not None:
            self.behind.record(call, observables, seen)


def _attention_leaves(root: nn.Module) -> dict[str, nn.Module]:
    """The innermost modules whose class is named after attention."""
    named = {n: m for n, m in root.named_modules() if n and "Attention" in type(m).__name__}
    inner = {name.rpartition(".")[0] for name in named}
    outer = {".".join(path.split(".")[:i]) for path in inner for i in range(1, path.count(".") + 2)}
    return {name: module for name, module in named.items() if name not in outer}


def _reached(name: str, called: set[str]) -> bool:
    """True if this module, one inside it or the one right around it called us."""
    parent = name.rpartition(".")[0]
    return name in called or parent in called or any(other.startswith(f"{name}.") for other in called)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# ---------------------------------------------------------------------- what the probe did not reach


def _watch(name: str, module: nn.Module) -> None:
    """Check this module the first time that it runs."""
    tokens: list[Any] = []
    counters: list[_Counter] = []

    def before(module: nn.Module, args: Any) -> None:
        counters.append(_Counter(ACTIVE.get()))
        tokens.append(ACTIVE.set(counters[-1]))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        ACTIVE.reset(tokens.pop())
        called = counters.pop().modules
        if output is None:  # the forward itself failed: it has its own error
            return
        for handle in handles:
            handle.remove()
        theirs = isinstance(module, nn.MultiheadAttention)
        if not theirs and torch._C._current_graph_task_id() == -1 and not called:
            raise ModelError(
                f"{name} ({type(module).__name__}) ran without calling clearhead's attention function: it "
                "computes attention in its own code and cannot be seen. Allowed are models whose attention "
                "modules all go through transformers' AttentionInterface"
            )

    handles = [
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    ]


# ---------------------------------------------------------------------- the probe's inputs


@contextmanager
def _quiet_eval(root: nn.Module) -> Iterator[None]:
    """Without gradient, warnings or training behaviour; training flags are restored."""
    flags = [(module, module.training) for module in root.modules()]
    root.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, flag in flags:
            module.training = flag


def _run(model: Any) -> str | None:
    """Run one (sub-)model on the first of the made-up inputs that it takes; return why none did, if so."""
    reason = None
    for inputs in _inputs(model):
        try:
            model(**inputs)
        except ClearheadError:
            raise
        except Exception as problem:  # made-up inputs may be wrong in any way; what did not run is watched
            shown = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
            first_line = (str(problem).splitlines() or [""])[0]
            reason = f"{type(model).__name__} on {shown}: {type(problem).__name__}: {first_line}"
        else:
            return None
    return reason


def _inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Small inputs of the kind this model takes, plain ones first."""
    config, takes = model.config, set(signature(model.forward).parameters)
    main = model.main_input_name
    made: dict[str, Tensor] = {}
    if main in takes and main in _MAKERS:
        made[main] = _MAKERS[main](config)
    if "decoder_input_ids" in takes and getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = _ids(config)
    if "encoder_hidden_states" in takes and getattr(config, "add_cross_attention", False):
        width = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
        made["encoder_hidden_states"] = torch.zeros(1, 2, width)
    place = next(iter(model.parameters()), torch.zeros(()))
    choices = [made]
    if "pixel_values" in takes and "pixel_values" not in made:
        image = _pixels(config)
        choices += [
            made | {"pixel_values": image},
            made | {"pixel_values": image[None]},
        ]  # or a list of images
    for inputs in choices:
        yield {
            name: value.to(place.device, place.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
        }


def _ids(config: Any) -> Tensor:
    """Two tokens, (1, 2), none of which the configuration gives a meaning of its own."""
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None) or 3
    special = {
        value
        for source in (config, text)
        for name, value in vars(source).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    plain = [number for number in range(min(size, len(special) + 16)) if number not in special]
    first, second = (plain or [0])[0], (plain or [0])[-1]
    return torch.tensor([[first, second]])


def _pixels(config: Any) -> Tensor:
    """A blank image, (1, channels, height, width)."""
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.zeros(1, getattr(vision, "num_channels", 3), height, width)


def _spectrogram(config: Any) -> Tensor:
    """Silence as a spectrogram, (1, mel bins, frames), at the length that Whisper's encoder insists on."""
    return torch.zeros(
        1, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 50)
    )


def _wave(config: Any) -> Tensor:
    """A tenth of a second of silence at 16 kHz, (1, 1600)."""
    return torch.zeros(1, 1600)


_MAKERS = {
    "input_ids": _ids,
    "pixel_values": _pixels,
    "input_features": _spectrogram,
    "input_values": _wave,
}
