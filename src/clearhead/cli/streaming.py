"""Show a text while it is generated: as plain text, with coloured strips, or as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from clearhead.cli.strip import CELL, Group, Painter
from clearhead.cli.terminal import cell, visible, write

if TYPE_CHECKING:
    from clearhead.generation.generating import Generation
    from clearhead.generation.result import Result, Token
    from clearhead.models.prompt import Prompt

#: ANSI colours: of texts that are trusted, of those that are not, of the template and of the new text.
TRUSTED, UNTRUSTED, TEMPLATE, OUTPUT = (36, 34, 32, 96, 94, 92), (33, 31, 35, 93, 91, 95), 90, 37


def groups_of(prompt: Prompt, sources: Sequence[str], *, by_role: bool = False) -> list[Group]:
    """One group per source of a prompt, or per role (of a long chat); those without tokens are left out.

    sources: the names that a generation gives its masses by: those of the prompt and the first token.
    """
    counts = [0] * len(sources)
    for number in prompt.segments.ids.tolist()[1:]:
        counts[number] += 1
    counts[-1] = 1
    kinds: dict[str, tuple[list[int], bool]] = {}
    for number, segment in enumerate(prompt.sources):
        kinds.setdefault(segment.role if by_role else segment.name, ([], segment.trusted))[0].append(number)
    groups = []
    palettes = {True: iter(TRUSTED * 99), False: iter(UNTRUSTED * 99)}
    for name, (members, trusted) in kinds.items():
        tokens = sum(counts[i] for i in members)
        if tokens:
            groups.append(Group(name, next(palettes[trusted]), tuple(members), tokens, trusted))
    n = len(sources)
    groups.append(Group("template", TEMPLATE, (n - 3,), counts[n - 3]))
    groups.append(Group("output", OUTPUT, (n - 2,), 0))
    groups.append(Group(sources[-1], 0, (n - 1,), 1, resting=True))
    return [g for g in groups if g.tokens or g.name == "output"]


class Screen(Protocol):
    """Where a text goes while it comes."""

    def add(self, text: str, token: Token | None) -> None:
        """Show some text; token: that it came with, None for what was held back."""

    def remark(self, text: str) -> None:
        """Say something on standard error."""

    def end(self, result: Result) -> None:
        """The text is complete, or was broken off."""


def screen(groups: Sequence[Group], *, as_json: bool, model: str) -> Screen:
    """What suits standard output."""
    from clearhead.cli.tables import console

    looked = Shares(groups)
    if as_json:
        return _Lines(looked, model)
    terminal = console()
    coloured = terminal.is_terminal and not terminal.no_color and not terminal.is_dumb_terminal
    return _Strips(looked, terminal.width) if coloured and groups else _Plain(looked)


def show(generation: Generation, where: Screen, *, every: int | None = None) -> Result:
    """Show a text to its end; figures go to standard error. Ctrl-C leaves the text so far and goes on.

    every: after so many tokens say how fast the latest were and what the cache and the process hold.
    """
    try:
        since, start = 1, 0.0
        for number, token in enumerate(generation, 1):
            where.add(token.text, token)
            if number == since:  # the prompt is read
                start = time.perf_counter()
            if every is not None and number % every == 0:
                now = time.perf_counter()
                where.remark(
                    f"[{number:,} tokens, {(number - since) / max(now - start, 1e-9):.1f} tokens/s, cache "
                    f"{size(generation.so_far().cache_bytes)}, process {size(memory())}]"
                )
                since, start = number, time.perf_counter()
    except KeyboardInterrupt:
        where.add(generation.stop(), None)
        _finish(generation, where)
        raise
    except BaseException:
        where.add(generation.stop(), None)
        where.end(generation.so_far())
        raise
    return _finish(generation, where)


def _finish(generation: Generation, where: Screen) -> Result:
    result = generation.so_far()
    where.end(result)
    print(figures(result), file=sys.stderr)
    return result


def figures(result: Result) -> str:
    """One line: how many tokens, why it ended, how fast it was."""
    parts = [f"{result.count} {'token' if result.count == 1 else 'tokens'} ({result.stopped})"]
    if result.first_token_s is not None:
        parts.append(f"first token after {result.first_token_s:.2f} s ({result.prompt_tokens} read)")
    if result.tokens_per_s is not None:
        parts.append(f"then {result.tokens_per_s:.1f} tokens/s")
    parts.append(f"cache {size(result.cache_bytes)}")
    if result.seed is not None:
        parts.append(f"seed {result.seed}")
    return ", ".join(parts)


def memory() -> int:
    """Bytes that this process holds now; where the system does not say, the most that it has held."""
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def size(number: float) -> str:
    """Bytes as 12.3 MB."""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


class Shares:
    """What the tokens looked at, by groups, and the mean over all of them."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self._sum = [0.0] * len(groups)
        self.count = 0

    def of(self, token: Token) -> list[float]:
        """The share of each group; counted in."""
        if token.mass is None:
            return []
        mass = token.mass.tolist()
        shares = [sum(mass[i] for i in group.members) for group in self.groups]
        self._sum = [a + b for a, b in zip(self._sum, shares, strict=True)]
        self.count += 1
        return shares

    @property
    def mean(self) -> list[float]:
        """The average over all tokens so far."""
        return [value / max(1, self.count) for value in self._sum]

    def named(self, shares: Sequence[float]) -> dict[str, float]:
        """By name."""
        return {group.name: round(share, 6) for group, share in zip(self.groups, shares, strict=True)}


class _Plain:
    def __init__(self, looked: Shares) -> None:
        self._looked, self._at_start = looked, True

    def add(self, text: str, token: Token | None) -> None:
        if token is not None:
            self._looked.of(token)
        if text:
            self._at_start = text.endswith("\n")
            write(visible(text))

    def remark(self, text: str) -> None:
        if sys.stdout.isatty() and not self._at_start:
            write("\n")
            self._at_start = True
        print(text, file=sys.stderr)

    def end(self, result: Result) -> None:
        if not self._at_start:
            write("\n")
            self._at_start = True
        if self._looked.count:
            write("\n")
        legend(self._looked, coloured=False)


class _Strips:
    def __init__(self, looked: Shares, width: int) -> None:
        self._looked, self._painter = looked, Painter(looked.groups, width)
        self._waiting: list[list[float]] = []  # shares of tokens whose text has not come yet

    def add(self, text: str, token: Token | None) -> None:
        if token is not None:
            self._waiting.append(self._looked.of(token))
        if text:
            shares = self._waiting or [self._looked.mean]
            write(
                self._painter.add(text, [sum(column) / len(shares) for column in zip(*shares, strict=True)])
            )
            self._waiting = []

    def remark(self, text: str) -> None:
        write(self._painter.end())
        print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr)

    def end(self, result: Result) -> None:
        write(self._painter.end())
        legend(self._looked, coloured=True)


class _Lines:
    def __init__(self, looked: Shares, model: str) -> None:
        self._looked, self._model, self._rest = looked, model, ""

    def add(self, text: str, token: Token | None) -> None:
        if token is None:
            self._rest = text
            return
        line: dict[str, Any] = {"id": token.id, "text": text, "logprob": round(token.logprob, 6)}
        if self._looked.groups:
            line["looked_at"] = self._looked.named(self._looked.of(token))
        write(json.dumps(line) + "\n")

    def remark(self, text: str) -> None:
        print(text, file=sys.stderr)

    def end(self, result: Result) -> None:
        line: dict[str, Any] = {
            "model": self._model,
            "text": result.text,
            "stopped": result.stopped,
            "prompt_tokens": result.prompt_tokens,
            "tokens": result.count,
            "first_token_s": result.first_token_s,
            "tokens_per_s": result.tokens_per_s,
            "cache_bytes": result.cache_bytes,
            "seed": result.seed,
        }
        if self._looked.count:
            from clearhead.evidence import grade

            line |= {"looked_at": self._looked.named(self._looked.mean), "evidence": grade.UNTESTED}
        write(json.dumps(line) + "\n")


def legend(looked: Shares, *, coloured: bool) -> None:
    """Print which colour is which source, and what all new tokens together looked at."""
    if not looked.count:
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.tables import console, evidence_line, percent
    from clearhead.evidence import grade

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("source")
    table.add_column("tokens", justify="right")
    table.add_column("attention", justify="right")
    for group, share in zip(looked.groups, looked.mean, strict=True):
        name = Text.from_ansi(f"\x1b[{group.colour}m{CELL * 2}\x1b[0m " if not group.resting else "   ")
        if not coloured:
            name = Text()
        name.append(cell(group.name))
        if group.resting:
            name.append(
                " (resting place, not in the strips)" if coloured else " (resting place)", style="dim"
            )
        elif not group.trusted:
            name.append(" (untrusted)", style="yellow")
        tokens = looked.count if group.name == "output" and not group.tokens else group.tokens
        table.add_row(name, str(tokens), percent(share))
    terminal = console()
    number = f"{looked.count} new {'token' if looked.count == 1 else 'tokens'}"
    terminal.print(Text(f"what the {number} looked at while they were chosen, average over layers and heads"))
    terminal.print(table)
    terminal.print(evidence_line(grade.UNTESTED, grade.DOCS))
