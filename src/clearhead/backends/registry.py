"""Which backends there are, and which one answers a request.

Ours are registered the way a stranger's would be. The first in order that supports a request gets it.
"""

from __future__ import annotations

from clearhead.backends.base import Backend, Request
from clearhead.backends.cpu import Cpu
from clearhead.backends.reference import Reference
from clearhead.backends.sdpa import Sdpa
from clearhead.errors import ArgumentError, BackendError

_BACKENDS: dict[str, Backend] = {}


def register(backend: Backend, *, first: bool = False) -> None:
    """Add a backend, last in the order of choice, or first. Raises ArgumentError if the name is taken."""
    if backend.name in _BACKENDS:
        raise ArgumentError(f"a backend named {backend.name!r} is registered already")
    rest = dict(_BACKENDS)
    if first:
        _BACKENDS.clear()
    _BACKENDS[backend.name] = backend
    _BACKENDS.update(rest)


def unregister(name: str) -> None:
    """Remove a backend. Raises ArgumentError if there is none of that name."""
    get(name)
    del _BACKENDS[name]


def names() -> tuple[str, ...]:
    """The registered names, in the order in which they are asked."""
    return tuple(_BACKENDS)


def get(name: str) -> Backend:
    """Return a backend by name. Raises ArgumentError listing the names there are."""
    if name not in _BACKENDS:
        raise ArgumentError(f"backend must be one of {', '.join(_BACKENDS)} or None, got {name!r}")
    return _BACKENDS[name]


def choose(request: Request, name: str | None = None) -> Backend:
    """Return the named backend, or the first that supports the request and does not decline it.

    Raises BackendError with the reasons if the named one, or all of them, refuse.
    """
    if name is not None:
        backend = get(name)
        reason = backend.supports(request)
        if reason is not None:
            raise BackendError(f"{name}: {reason}")
        return backend
    for backend in _BACKENDS.values():
        if backend.supports(request) is None and getattr(backend, "declines", _never)(request) is None:
            return backend
    for backend in _BACKENDS.values():  # nobody wants it: whoever can has to
        if backend.supports(request) is None:
            return backend
    reasons = (f"{backend.name}: {backend.supports(request)}" for backend in _BACKENDS.values())
    raise BackendError("no backend supports this request; " + "; ".join(reasons))


def _never(request: Request) -> None:
    """A backend without `declines` takes everything that it supports."""


register(Cpu())
register(Sdpa())
register(Reference())
