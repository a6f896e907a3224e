"""clearhead: attention you can see through, at fused-kernel speed.

The public names are loaded when they are first used, so that `import clearhead` costs nothing and does not
bring in torch or transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clearhead.models.hook import install

if TYPE_CHECKING:
    from clearhead.bias import ALiBi as ALiBi
    from clearhead.bias import RelativeBias as RelativeBias
    from clearhead.errors import ClearheadError as ClearheadError
    from clearhead.front_door import attention as attention
    from clearhead.generation.conversation import Conversation as Conversation
    from clearhead.generation.engine import Engine as Engine
    from clearhead.generation.generating import generate as generate
    from clearhead.mask import Mask as Mask
    from clearhead.models import load as load
    from clearhead.models.prompt import Prompt as Prompt
    from clearhead.models.prompt import Segment as Segment
    from clearhead.observables import Entropy as Entropy
    from clearhead.observables import KeyMass as KeyMass
    from clearhead.observables import LinearObservable as LinearObservable
    from clearhead.observables import MaxWeight as MaxWeight
    from clearhead.observables import MeanDistance as MeanDistance
    from clearhead.observables import Observable as Observable
    from clearhead.observables import PooledMap as PooledMap
    from clearhead.observables import SegmentMass as SegmentMass
    from clearhead.observables import SegmentOutput as SegmentOutput
    from clearhead.observables import TopKeys as TopKeys
    from clearhead.observables import Weights as Weights
    from clearhead.segments import Segments as Segments
    from clearhead.stored import Int8Rows as Int8Rows
    from clearhead.stored import Pages as Pages
    from clearhead.trace.observe import observe as observe
    from clearhead.trace.trace import Trace as Trace

__version__ = "0.1.0"

#: Public name -> the module that holds it.
_HOMES = {
    "ALiBi": "clearhead.bias",
    "ClearheadError": "clearhead.errors",
    "Conversation": "clearhead.generation.conversation",
    "Engine": "clearhead.generation.engine",
    "Entropy": "clearhead.observables",
    "Int8Rows": "clearhead.stored",
    "KeyMass": "clearhead.observables",
    "LinearObservable": "clearhead.observables",
    "Mask": "clearhead.mask",
    "MaxWeight": "clearhead.observables",
    "MeanDistance": "clearhead.observables",
    "Observable": "clearhead.observables",
    "Pages": "clearhead.stored",
    "PooledMap": "clearhead.observables",
    "RelativeBias": "clearhead.bias",
    "SegmentMass": "clearhead.observables",
    "SegmentOutput": "clearhead.observables",
    "Segments": "clearhead.segments",
    "TopKeys": "clearhead.observables",
    "Weights": "clearhead.observables",
    "Prompt": "clearhead.models.prompt",
    "Segment": "clearhead.models.prompt",
    "Trace": "clearhead.trace.trace",
    "attention": "clearhead.front_door",
    "generate": "clearhead.generation.generating",
    "load": "clearhead.models",
    "observe": "clearhead.trace.observe",
}

#: Parts of the package that hold their public names themselves: `clearhead.nn.MultiHeadAttention`.
_ROOMS = ("cache", "guard", "nn")

__all__ = ["__version__", *_HOMES]


install()


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"clearhead.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
