"""The ROC at low false-alarm rates, as an SVG: the axis of false alarms is logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

import numpy as np

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.metrics import Bools, Curve, Floats, roc

WIDE, HIGH, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 40, 230, 50
LOWEST = 1e-3
COLOURS = ("#c2571a", "#1f6f8b", "#4b7f3f", "#7a4b9c", "#a33a3a", "#8a6d1d", "#444444", "#3b8ea5")


def roc_svg(curves: Mapping[str, tuple[Floats, Bools]], title: str) -> str:
    """Return the curves as one picture.

    curves: scores (n,) and labels (n,) by name. Only the part from 0.1% to 100% false alarms is drawn; a
    curve begins where its set has one false alarm, since below that nothing was measured.

    Raises ArgumentError where no curve has both classes.
    """
    parts = _frame(title)
    drawn = 0
    for name, (scores, attacked) in curves.items():
        try:
            curve = roc(scores, attacked)
        except ArgumentError:
            continue
        colour = COLOURS[drawn % len(COLOURS)]
        parts += _line(curve, int((~attacked).sum()), colour)
        y = TOP + 14 + 18 * drawn
        label = escape(f"{name}: {float(np.trapezoid(curve.tpr, curve.fpr)):.2f}")
        x = WIDE - RIGHT + 14
        parts.append(f'<path d="M{x} {y - 4}h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{label}</text>')
        drawn += 1
    if not drawn:
        raise ArgumentError("a ROC needs attacked and benign texts: no curve has both")
    return "\n".join([*parts, "</svg>", ""])


def _x(fpr: float) -> float:
    share = 1 - math.log(max(fpr, LOWEST)) / math.log(LOWEST)
    return round(LEFT + share * (WIDE - LEFT - RIGHT), 1)


def _y(tpr: float) -> float:
    return round(TOP + (1 - tpr) * (HIGH - TOP - BOTTOM), 1)


def _frame(title: str) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" font-family="sans-serif" '
        'font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDE}" height="{HIGH}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>',
        f'<text x="{WIDE - RIGHT + 14}" y="{TOP - 6}" fill="#555">AUROC</text>',
        f'<path d="M{LEFT} {TOP}V{_y(0)}H{WIDE - RIGHT}" fill="none" stroke="#555"/>',
    ]
    for fpr, label in ((0.001, "0.1%"), (0.01, "1%"), (0.05, "5%"), (0.1, "10%"), (1.0, "100%")):
        dash = ' stroke-dasharray="3 3"' if fpr in (0.01, 0.05) else ""
        parts.append(f'<path d="M{_x(fpr)} {TOP}V{_y(0)}" stroke="#ddd"{dash}/>')
        parts.append(f'<text x="{_x(fpr)}" y="{_y(0) + 16}" text-anchor="middle">{label}</text>')
    for tpr in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text x="{LEFT - 6}" y="{_y(tpr) + 4}" text-anchor="end">{tpr:.0%}</text>')
    middle = (LEFT + WIDE - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HIGH - 12}" text-anchor="middle">false alarms among benign texts</text>'
    )
    parts.append(f'<text x="{LEFT}" y="{TOP - 6}">attacks found</text>')
    return parts


def _line(curve: Curve, benign: int, colour: str) -> list[str]:
    seen = curve.fpr >= max(LOWEST, 1 / benign) - 1e-12
    points: list[str] = []
    before = float(curve.tpr[~seen].max()) if (~seen).any() else 0.0
    for fpr, tpr in zip(curve.fpr[seen], curve.tpr[seen], strict=True):
        points.append(f"{_x(float(fpr))},{_y(before)}")  # a step: nothing between two thresholds
        points.append(f"{_x(float(fpr))},{_y(float(tpr))}")
        before = float(tpr)
    kept = list(dict.fromkeys(points))
    return [f'<polyline points="{" ".join(kept)}" fill="none" stroke="{colour}" stroke-width="1.6"/>']
