"""How the time of one layer grows with its length: measured points, and the drawing of them.

The drawing is SVG written by hand: logarithmic axes, one line per form, its name at the line's end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import clearhead as ch
from speed.case import Run, Setup
from speed.pairs import Budget, measure
from speed.prefill import Shape
from speed.training import written_down

Points = dict[str, list[tuple[int, float]]]  # form -> (tokens, milliseconds)

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 210, 40, 46
COLOURS = {
    "clearhead": "#2463c4",
    "clearhead, 16 segments + entropy": "#6d9be8",
    "clearhead, window 1024 + 4 sinks": "#0f8a6b",
    "torch SDPA": "#c4552d",
    "written down": "#8a6d1f",
    "multiply ceiling": "#888888",
}
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #333 }
.title { font-size: 14px; font-weight: 600 }
.grid { stroke: #ddd; stroke-width: 1 }
.line { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #444 } .paper { fill: #111 } }
"""


def measured(setup: Setup, sizes: Sequence[int], seconds: float) -> Points:
    """Milliseconds of causal attention at each length, (1, 9, 3, n, 64), float32."""
    points: Points = {}
    for n in sizes:
        shape = Shape(1, 9, 3, n, 64)
        found = measure(_forms(setup, shape), Budget(seconds, least=3))
        for name in found.seconds:
            scale = 1e3
            if name == "multiply ceiling":
                assert setup.ceilings is not None
                done = setup.ceilings.spin(setup.multiply, setup.threads)[1]
                scale *= shape.operations(n * (n + 1) // 2) / done
            points.setdefault(name, []).append((n, found.median(name) * scale))
    return points


def _forms(setup: Setup, shape: Shape) -> dict[str, Run]:
    q, k, v = shape.inputs()
    causal = ch.Mask(causal=True)
    window = ch.Mask(causal=True, window=1024, sinks=4)
    ids = torch.arange(shape.n) * 16 // shape.n
    asked = [ch.SegmentMass(ids), ch.Entropy()]
    forms: dict[str, Run] = {
        "clearhead": lambda: setup.attention(q, k, v, mask=causal),
        "clearhead, 16 segments + entropy": lambda: setup.attention(q, k, v, mask=causal, observe=asked),
        "torch SDPA": lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True),
    }
    if shape.n > 1024:
        forms["clearhead, window 1024 + 4 sinks"] = lambda: setup.attention(q, k, v, mask=window)
    if shape.n <= 4096:
        forms["written down"] = lambda: written_down(q, k, v, True)
    if setup.ceilings is not None and setup.multiply:
        forms["multiply ceiling"] = setup.ceilings.spin(setup.multiply, setup.threads)[0]
    return forms


def drawing(points: Mapping[str, Sequence[tuple[int, float]]], title: str) -> str:
    """The points as an SVG document."""
    sizes = sorted({n for line in points.values() for n, _ in line})
    times = [ms for line in points.values() for _, ms in line]
    decades = range(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))) + 1)

    def x(n: int) -> float:
        span = math.log2(sizes[-1] / sizes[0])
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(n / sizes[0]) / span

    def y(ms: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (HEIGHT - TOP - BOTTOM) * (math.log10(ms) - decades[0]) / (decades[-1] - decades[0])
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text class="title" x="{LEFT}" y="22">{title}</text>',
    ]
    for power in decades:
        at = y(10.0**power)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} ms</text>')
    for n in sizes:
        parts.append(
            f'<line class="grid" x1="{x(n):.1f}" x2="{x(n):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        )
        parts.append(f'<text x="{x(n):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{n}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">tokens</text>'
    )
    labels = _apart({name: y(line[-1][1]) for name, line in points.items()})
    for name, line in points.items():
        colour = COLOURS.get(name, "#333")
        path = " ".join(f"{x(n):.1f},{y(ms):.1f}" for n, ms in line)
        dashes = ' stroke-dasharray="5 4"' if name == "multiply ceiling" else ""
        parts.append(f'<polyline class="line" stroke="{colour}"{dashes} points="{path}"/>')
        end = f"{x(line[-1][0]):.1f},{y(line[-1][1]):.1f} {WIDTH - RIGHT + 8},{labels[name] - 4:.1f}"
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="0.7" points="{end}"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT + 12}" y="{labels[name]:.1f}" style="fill: {colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _apart(wanted: Mapping[str, float], gap: float = 16) -> dict[str, float]:
    """Heights of the names, close to the wanted ones and at least a line apart."""
    placed: dict[str, float] = {}
    lowest = TOP + 4.0
    for name, at in sorted(wanted.items(), key=lambda item: item[1]):
        placed[name] = max(at + 4, lowest)
        lowest = placed[name] + gap
    return placed
