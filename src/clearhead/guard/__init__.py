"""The guard: which text pulled which heads away from the instruction, with its false alarms measured."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.guard.allow import AllowList as AllowList
    from clearhead.guard.calibrating import calibrate as calibrate
    from clearhead.guard.calibration import Calibration as Calibration
    from clearhead.guard.calibration import read_calibration as read_calibration
    from clearhead.guard.detector import InjectionDetector as InjectionDetector
    from clearhead.guard.finding import Finding as Finding
    from clearhead.guard.finding import Span as Span
    from clearhead.guard.focus import FocusDetector as FocusDetector
    from clearhead.guard.generator import generate as generate
    from clearhead.guard.host import InjectionBlockedError as InjectionBlockedError
    from clearhead.guard.host import watch as watch
    from clearhead.guard.policy import Decision as Decision
    from clearhead.guard.policy import Guarded as Guarded
    from clearhead.guard.redacting import redact as redact
    from clearhead.guard.samples import Sample as Sample
    from clearhead.guard.samples import read_samples as read_samples
    from clearhead.guard.samples import write_samples as write_samples

#: Public name -> the module that holds it; loaded when first used, as torch comes with some of them.
_HOMES = {
    "AllowList": "clearhead.guard.allow",
    "Calibration": "clearhead.guard.calibration",
    "Decision": "clearhead.guard.policy",
    "Finding": "clearhead.guard.finding",
    "FocusDetector": "clearhead.guard.focus",
    "Guarded": "clearhead.guard.policy",
    "InjectionBlockedError": "clearhead.guard.host",
    "InjectionDetector": "clearhead.guard.detector",
    "Sample": "clearhead.guard.samples",
    "Span": "clearhead.guard.finding",
    "calibrate": "clearhead.guard.calibrating",
    "generate": "clearhead.guard.generator",
    "read_calibration": "clearhead.guard.calibration",
    "read_samples": "clearhead.guard.samples",
    "redact": "clearhead.guard.redacting",
    "watch": "clearhead.guard.host",
    "write_samples": "clearhead.guard.samples",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'clearhead.guard' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
