"""Fewer key/value heads for a model that has been trained with many: their mean (Ainslie et al. 2023)."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn

from clearhead.errors import ArgumentError
from clearhead.nn import checks
from clearhead.nn.layer import MultiHeadAttention

Module = TypeVar("Module", bound=nn.Module)


def mha_to_gqa(layer: Module, groups: int) -> Module:
    """A copy with `groups` key/value heads, each the mean of those it stands for; groups=1: multi-query.

    layer: a `MultiHeadAttention`, or a model of such layers (`Decoder`), all of which are converted.
    The projections of neighbouring heads, weights and biases, are mean-pooled (Ainslie et al. 2023, section
    2.1: better than taking one head or new ones). What comes out is a start for further training, 5% of the
    steps in the paper. Where the heads of a group are equal the outputs are, too.

    Raises ArgumentError if a layer's key/value heads are not a multiple of groups, or there is no layer.
    """
    made = copy.deepcopy(layer)
    found = [part for part in made.modules() if isinstance(part, MultiHeadAttention)]
    if not found:
        raise ArgumentError(f"layer must be or hold a MultiHeadAttention, got {type(layer).__name__}")
    for part in found:
        _check(groups, part.num_kv_heads)
    for part in found:
        part.k_proj = _pooled(part.k_proj, part.num_kv_heads, groups)
        part.v_proj = _pooled(part.v_proj, part.num_kv_heads, groups)
        part.num_kv_heads = groups
    return made


def llama_to_gqa(model: Module, groups: int) -> Module:
    """The same for a transformers model built like Llama; a copy, whose config says so.

    Converted are all parts with k_proj, v_proj and `num_key_value_groups` (Llama, Mistral, Qwen, Gemma …).
    Raises ArgumentError if there are none, or the key/value heads are not a multiple of groups.
    """
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "num_key_value_heads", None)
    found = [
        name
        for name, part in model.named_modules()
        if hasattr(part, "num_key_value_groups")
        and isinstance(getattr(part, "k_proj", None), nn.Linear)
        and isinstance(getattr(part, "v_proj", None), nn.Linear)
    ]
    if heads is None or not found:
        raise ArgumentError(
            "model must be a transformers model with config.num_key_value_heads and layers with k_proj, "
            f"v_proj and num_key_value_groups, got {type(model).__name__}"
        )
    _check(groups, heads)
    for name in found:
        given: Any = model.get_submodule(name)
        weight = getattr(getattr(given, "k_norm", None), "weight", None)
        if heads > 1 and weight is not None and len(weight) == given.k_proj.out_features:
            raise ArgumentError(
                f"model has a norm over the keys of all heads ({name}.k_norm): no mean of heads"
            )
    made = copy.deepcopy(model)
    for name in found:
        part: Any = made.get_submodule(name)
        part.k_proj, part.v_proj = _pooled(part.k_proj, heads, groups), _pooled(part.v_proj, heads, groups)
        part.num_key_value_groups *= heads // groups
    configured: Any = made.config
    configured.num_key_value_heads = groups
    return made


def _check(groups: Any, heads: int) -> None:
    checks.whole("groups", groups)
    if heads % groups:
        raise ArgumentError(f"groups is {groups}, and there are {heads} key/value heads: it must divide them")


def _pooled(projection: nn.Linear, heads: int, groups: int) -> nn.Linear:
    """A projection to `groups` heads, each the mean of heads / groups neighbours."""

    def mean(rows: Tensor) -> nn.Parameter:
        pooled = rows.detach().reshape(groups, heads // groups, -1, *rows.shape[1:]).mean(1).flatten(0, 1)
        return nn.Parameter(pooled, requires_grad=rows.requires_grad)

    weight = mean(projection.weight)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=projection.bias is not None, device="meta")
    made.weight = weight
    if projection.bias is not None:
        made.bias = mean(projection.bias)
    return made.train(projection.training)
