"""A look as plain JSON values, checked on the way.

Everything but the maps, which are too big for JSON (see `clearhead.report.maps`). A number that is not
finite, such as the attention per token of an empty source, becomes null and is shown as a dash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import ArgumentError
from clearhead.look.result import Look, Pull, Source


def payload(look: Look) -> dict[str, object]:
    """Return what the page needs to know about `look`, as values that JSON has.

    Raises:
        ArgumentError: the arrays of `look` do not fit together.
    """
    _check(look)
    return {
        "model": look.model,
        "hash": look.model_hash,
        "query": look.query,
        "command": look.command,
        "evidence": look.evidence,
        "evidenceUrl": look.evidence_url,
        "notes": list(look.notes),
        "tokens": list(look.tokens),
        "ids": [int(i) for i in look.ids],
        "sources": [_source(s) for s in look.sources],
        "layers": [int(layer) for layer in look.layers],
        "heads": int(look.mass.shape[1]),
        "mass": _numbers(np.moveaxis(look.mass, 2, 0)),  # (S, L, H) flat: one grid after the other
        "entropy": _numbers(look.entropy),
        "topTokens": [
            {"position": int(t.position), "source": int(t.source), "weight": _number(t.weight)}
            for t in look.top_tokens
        ],
        "guard": None if look.guard is None else _guard(look.guard, look.layers),
    }


def _source(source: Source) -> dict[str, object]:
    return {
        "name": source.name,
        "role": source.role,
        "trusted": bool(source.trusted),
        "tokens": int(source.tokens),
        "mass": _number(source.mass),
        "perToken": _number(source.per_token),
        "output": _number(source.output),
        "heads": [[int(layer), int(head), _number(mass)] for layer, head, mass in source.heads],
    }


def _guard(pull: Pull, layers: Sequence[int]) -> dict[str, object]:
    """What the guard says; of the moves those of the layers that the page shows, flat."""
    finding = pull.finding
    limits = finding.thresholds
    return {
        "verdict": finding.verdict,
        "score": _number(finding.score),
        "reason": finding.reason,
        "notes": list(finding.notes),
        "preset": finding.preset,
        "calibration": finding.calibration,
        "thresholds": {
            "flag": _number(limits.flag),
            "block": _number(limits.block),
            "flagFpr": _number(limits.flag_fpr),
            "blockFpr": _number(limits.block_fpr),
            "benign": int(limits.benign),
            "fixedOn": limits.fixed_on,
        },
        "sources": [
            {
                "name": s.name,
                "verdict": s.verdict,
                "score": _number(s.score),
                "read": _number(s.read),
                "mass": _number(s.mass),
                "baseline": _number(s.baseline),
            }
            for s in finding.sources
        ],
        "spans": [
            {
                "source": found.span.source,
                "line": int(found.span.line),
                "text": found.span.text,
                "pull": _number(found.span.pull),
                "attention": _number(found.span.attention),
                "tokens": [int(t) for t in found.tokens],
                "marked": bool(found.marked),
            }
            for found in pull.spans
        ],
        "heads": [[int(h.layer), int(h.head), _number(h.moved)] for h in finding.heads],
        "before": None if pull.before is None else _numbers(pull.before[list(layers)]),
        "after": None if pull.after is None else _numbers(pull.after[list(layers)]),
    }


def _number(value: float) -> float | None:
    value = float(value)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _numbers(values: NDArray[np.float32]) -> list[float | None]:
    return [_number(v) for v in values.ravel().tolist()]


def _check(look: Look) -> None:
    n, layers, sources = len(look.tokens), len(look.layers), len(look.sources)
    if look.ids.shape != (n,):
        raise ArgumentError(f"look.ids has shape {look.ids.shape}, but with {n} tokens it must be ({n},)")
    if n and not 0 <= int(look.ids.min()) <= int(look.ids.max()) < sources:
        raise ArgumentError(
            f"look.ids goes from {look.ids.min()} to {look.ids.max()}, "
            f"but there are {sources} sources: it must stay in 0..{sources - 1}"
        )
    if look.mass.ndim != 3 or look.mass.shape[0] != layers or look.mass.shape[2] != sources:
        raise ArgumentError(
            f"look.mass has shape {look.mass.shape}, but it must be (layers, heads, sources) "
            f"with {layers} layers and {sources} sources"
        )
    heads, queries = look.mass.shape[1], len(look.map_queries)
    if look.entropy.shape != (layers, heads):
        raise ArgumentError(
            f"look.entropy has shape {look.entropy.shape}; beside mass it must be ({layers}, {heads})"
        )
    if look.maps.shape != (layers, heads, queries, n) and (queries or look.maps.size):
        raise ArgumentError(
            f"look.maps has shape {look.maps.shape}: it must be (layers, heads, queries, tokens) = "
            f"({layers}, {heads}, {queries}, {n})"
        )
    for position in look.map_queries:
        if not 0 <= position < n:
            raise ArgumentError(f"look.map_queries holds position {position}: it must stay in 0..{n - 1}")
    if len(set(look.map_queries)) != queries:
        raise ArgumentError(f"look.map_queries holds a position twice: {look.map_queries}")
    for token in look.top_tokens:
        if not 0 <= token.position < n:
            raise ArgumentError(f"look.top_tokens holds position {token.position}: it must be in 0..{n - 1}")
    if look.guard is not None:
        _check_guard(look.guard, n, max(look.layers, default=-1) + 1, heads)


def _check_guard(pull: Pull, n: int, layers: int, heads: int) -> None:
    for name, moves in (("before", pull.before), ("after", pull.after)):
        if moves is not None and (moves.ndim != 2 or moves.shape[0] < layers or moves.shape[1] != heads):
            raise ArgumentError(
                f"look.guard.{name} has shape {moves.shape}, but it must be (layers, heads) of the model, "
                f"({layers} or more, {heads})"
            )
    for found in pull.spans:
        outside = [t for t in found.tokens if not 0 <= t < n]
        if outside:
            raise ArgumentError(f"look.guard.spans holds token {outside[0]}: it must be in 0..{n - 1}")
