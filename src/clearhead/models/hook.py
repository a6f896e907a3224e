"""Make `attn_implementation="clearhead"` known to transformers, whenever that is imported, by anybody.

Imports neither torch nor transformers. If transformers is there already, both functions are registered at
once; if not, a finder waits for the two modules that hold transformers' registries and registers each half
when its module has been loaded. A transformers without these registries is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: The name of the implementation.
NAME = "clearhead"


def install() -> None:
    """Register attention and mask function now or as soon as transformers is imported. Can be repeated."""
    for name, register in _REGISTRARS.items():
        module = sys.modules.get(name)
        if module is not None:
            register(module)
    waiting = [name for name in _REGISTRARS if name not in sys.modules]
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register_attention(module: ModuleType) -> None:
    interface = getattr(module, "AttentionInterface", None)
    if interface is not None:
        from clearhead.models.adapter import attention_function

        interface.register(NAME, attention_function)
    if hasattr(module, "PreTrainedModel"):
        from clearhead.models.refuse import refuse_own_attention

        refuse_own_attention(module, NAME)


def _register_mask(module: ModuleType) -> None:
    interface = getattr(module, "AttentionMaskInterface", None)
    if interface is not None:
        from clearhead.models.carrier import mask_function

        interface.register(NAME, mask_function)


_REGISTRARS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.modeling_utils": _register_attention,
    "transformers.masking_utils": _register_mask,
}


class _Finder(MetaPathFinder):
    """Lets the other finders find the two modules, and puts `_Loader` in front of their loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRARS:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Finder) else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads as the loader behind it does, then registers; afterwards the module looks as if never wrapped."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        _REGISTRARS[module.__name__](module)
