"""Caches of keys and values: what is kept of a stream, in which form, and at which cost."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.cache.dynamic import DynamicCache as DynamicCache
    from clearhead.cache.heavy import HeavyHitterCache as HeavyHitterCache
    from clearhead.cache.int8 import Int8Cache as Int8Cache
    from clearhead.cache.paged import PagedCache as PagedCache
    from clearhead.cache.pool import BlockPool as BlockPool
    from clearhead.cache.sink import SinkCache as SinkCache
    from clearhead.cache.sliding import SlidingCache as SlidingCache

#: Public name -> the module that holds it; loaded when first used, as transformers comes with them.
_HOMES = {
    "BlockPool": "clearhead.cache.pool",
    "DynamicCache": "clearhead.cache.dynamic",
    "HeavyHitterCache": "clearhead.cache.heavy",
    "Int8Cache": "clearhead.cache.int8",
    "PagedCache": "clearhead.cache.paged",
    "SinkCache": "clearhead.cache.sink",
    "SlidingCache": "clearhead.cache.sliding",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'clearhead.cache' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
