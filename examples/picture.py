"""A picture of attention as an SVG file: a row per query, a column per key, darker where more weight lies."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

CELL, LEFT, TOP, GAP = 15, 30, 52, 44
STYLE = (
    "text{fill:#1b1f24}.s{fill:#57606a}.c{font-size:12.5px}.w{fill:#0969da}.f{fill:none;stroke:#8b949e}.m{text-anchor:middle}.e{text-anchor:end}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.w{fill:#58a6ff}}"
)


class Panel(NamedTuple):
    """One map: weights (queries, keys) with what stands at each query and key."""

    title: str
    weights: Tensor
    queries: Sequence[str]
    keys: Sequence[str]


def draw(path: Path, panels: Sequence[Panel], caption: str) -> None:
    """Write the panels side by side with the caption below. Weights below 1/200 are left out."""
    parts, x, height = [], LEFT, 0
    for panel in panels:
        rows, columns = panel.weights.shape
        parts.append(f'<text x="{x}" y="20" font-weight="600">{escape(panel.title)}</text>')
        parts += [
            f'<text class="s m" x="{x + CELL * j + CELL / 2}" y="{TOP - 6}">{shown(key)}</text>'
            for j, key in enumerate(panel.keys)
        ]
        parts += [
            f'<text class="s e" x="{x - 5}" y="{TOP + CELL * i + 11}">{shown(query)}</text>'
            for i, query in enumerate(panel.queries)
        ]
        parts.append(f'<rect class="f" x="{x}" y="{TOP}" width="{CELL * columns}" height="{CELL * rows}"/>')
        parts += [
            f'<rect class="w" x="{x + CELL * j}" y="{TOP + CELL * i}" width="{CELL}" height="{CELL}" '
            f'opacity="{weight:.2f}"/>'
            for i, row in enumerate(panel.weights.tolist())
            for j, weight in enumerate(row)
            if weight >= 0.005
        ]
        width = max(CELL * columns, 7 * len(panel.title))
        x, height = x + width + GAP, max(height, TOP + CELL * rows)
    width = max(x - GAP + 14, 440)
    lines = textwrap.wrap(caption, int(width / 7.2))
    parts += [
        f'<text class="c" x="8" y="{height + 24 + 17 * i}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    height += 30 + 17 * len(lines)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="{escape(caption)}">'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""]), encoding="utf-8")


def shown(character: str) -> str:
    """A character as it is drawn: blanks get a sign."""
    return escape({" ": "␣", "\n": "⏎"}.get(character, character))
