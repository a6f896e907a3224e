"""Real models: prompts of named sources, loading, and attention through transformers' interface.

Names are resolved when they are first used, so that importing this package loads no transformers.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Segment": "prompt",
    "Prompt": "prompt",
    "Batch": "prompt",
    "check_length": "prompt",
    "read_chat": "chat",
    "read_text": "chat",
    "LoadedModel": "loading",
    "load": "loading",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
