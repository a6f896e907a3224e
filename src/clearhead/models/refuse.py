"""Refuse at the door: a model with attention code of its own never gets attn_implementation="clearhead".

transformers would leave such a model on its own path, with at most a line in the log. Three entries of
`PreTrainedModel` are wrapped, when transformers is imported, to raise instead; for every other
implementation, and for models that use the attention interface, they do what they did.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from clearhead.errors import ModelError


def refuse_own_attention(modeling_utils: ModuleType, implementation: str) -> None:
    """Wrap from_pretrained, _from_config and set_attn_implementation of PreTrainedModel. Can be repeated.

    implementation: the name that models without the interface must not be given.
    """
    base = modeling_utils.PreTrainedModel
    if getattr(base, "_clearhead_refuses", False):
        return
    base._clearhead_refuses = True
    for name in ("from_pretrained", "_from_config"):
        setattr(base, name, classmethod(_checked(getattr(base, name).__func__, implementation)))
    base.set_attn_implementation = _checked(base.set_attn_implementation, implementation)


def _checked(method: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    @wraps(method)
    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("attn_implementation", args[0] if args else None)
        if asked == implementation and not model._can_set_attn_implementation():
            name = model.__name__ if isinstance(model, type) else type(model).__name__
            raise ModelError(
                f"{name} has attention code of its own and does not use transformers' attention interface: "
                f'attn_implementation="{implementation}" changes nothing; "eager" can be used, unobserved'
            )
        return method(model, *args, **kwargs)

    return checked
