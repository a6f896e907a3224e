"""Coloured cells under the words: which share of its attention a token gave to which source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells

from clearhead.cli.terminal import visible

#: What a cell of the strip is drawn with; it hangs from the word above.
CELL = "▀"


@dataclass(frozen=True)
class Group:
    """One colour of the strip. name: of the source. colour: an ANSI colour number. members: which sources.

    tokens: how many of the prompt. resting: the first token, which has no colour.
    """

    name: str
    colour: int
    members: tuple[int, ...]
    tokens: int
    trusted: bool = True
    resting: bool = False


class Painter:
    """Text as it comes, with a strip of cells below each line, brought up to date with every token.

    Returns what to write to a terminal of `width` cells: text made harmless, colours, and the movements of
    the cursor that draw the strip under the line that is being written and go back.
    """

    def __init__(self, groups: Sequence[Group], width: int) -> None:
        self._groups, self._width = groups, max(8, width - 1)
        self._column = 0
        self._cells: list[int] = []  # colours under the line
        self._owed = [0.0] * len(groups)  # how many cells a group should have had so far, and has not

    def add(self, text: str, shares: Sequence[float]) -> str:
        """Return what shows this text, which gave these shares to the groups."""
        if not text:
            return ""
        out = []
        for number, line in enumerate(visible(text).split("\n")):
            if number:
                out.append(self._break())
            while line:
                room = self._width - self._column
                piece = line if cell_len(line) <= room else chop_cells(line, room)[0] if room > 1 else ""
                whole_word = self._column and piece != line and cell_len(line) <= self._width
                if not piece or whole_word:
                    out.append(self._break())
                    continue
                out.append(piece)
                self._column += cell_len(piece)
                self._cells += self._colours(cell_len(piece), shares)
                line = line[len(piece) :]
        back = f"\x1b[A\r\x1b[{self._column}C" if self._column else "\x1b[A\r"
        return "".join((*out, "\n\r", self._strip(), back))

    def end(self) -> str:
        """Return what leaves the line and its strip behind."""
        return self._break() if self._column else "\n"

    def _break(self) -> str:
        line = f"\n\r{self._strip()}\n" if self._cells else "\n"
        self._column, self._cells = 0, []
        return line

    def _strip(self) -> str:
        parts, last = [], None
        for colour in self._cells:
            if colour != last:
                parts.append(f"\x1b[{colour}m")
                last = colour
            parts.append(CELL)
        return "".join(parts) + "\x1b[0m" if parts else ""

    def _colours(self, count: int, shares: Sequence[float]) -> list[int]:
        """A cell goes to the group that it is owed to most, so that over many tokens the shares are right."""
        shown = [i for i, group in enumerate(self._groups) if not group.resting]
        whole = sum(shares[i] for i in shown)
        if whole <= 0:
            return [90] * count
        chosen = []
        for _ in range(count):
            for i in shown:
                self._owed[i] += shares[i] / whole
            most = max(shown, key=lambda i: self._owed[i])
            self._owed[most] -= 1
            chosen.append(most)
        return [self._groups[i].colour for i in sorted(chosen)]
