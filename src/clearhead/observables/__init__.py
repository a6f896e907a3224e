"""What can be observed in an attention call, one class per question."""

from clearhead.observables.base import (
    Account,
    LinearObservable,
    Observable,
    Rows,
    Setting,
    Tile,
    resolve_rows,
)
from clearhead.observables.maps import PooledMap, Weights
from clearhead.observables.mass import KeyMass, SegmentMass, SegmentOutput
from clearhead.observables.spread import Entropy, MaxWeight, MeanDistance
from clearhead.observables.top import Top, TopKeys

__all__ = [
    "Account",
    "Entropy",
    "KeyMass",
    "LinearObservable",
    "MaxWeight",
    "MeanDistance",
    "Observable",
    "PooledMap",
    "Rows",
    "SegmentMass",
    "SegmentOutput",
    "Setting",
    "Tile",
    "Top",
    "TopKeys",
    "Weights",
    "resolve_rows",
]
