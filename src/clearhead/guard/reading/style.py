"""What of a page's style hides text from readers: inline declarations and simple rules of `<style>`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

Colour = tuple[float, float, float, float]
WHITE: Colour = (1.0, 1.0, 1.0, 1.0)
BLACK: Colour = (0.0, 0.0, 0.0, 1.0)
UNKNOWN: Colour = (-9.0, -9.0, -9.0, 1.0)
"""Behind the text is a picture."""
CLOSE = 0.06
"""Colours whose parts all differ by less are one colour to the eye (15 of 255)."""
TINY = 2.0
"""Pixels: text of that size or less cannot be read."""

_SELECTOR = re.compile(r"^(\*|[a-zA-Z][\w-]*)?((?:[.#][\w-]+|\[hidden\])*)$")
_FAR = 500.0


class Rule(NamedTuple):
    """A rule of a style sheet: what an element must be, and its declarations in order."""

    tag: str
    ids: frozenset[str]
    classes: frozenset[str]
    declarations: tuple[tuple[str, str], ...]

    def fits(self, tag: str, element_id: str, classes: frozenset[str]) -> bool:
        """Whether an element is meant."""
        return self.tag in ("", "*", tag) and self.ids <= {element_id} and self.classes <= classes


@dataclass(frozen=True)
class Shown:
    """How the text inside an element is shown. why: what hides it, empty if nothing does."""

    why: str = ""
    invisible: bool = False
    size: float = 16.0
    colour: Colour = BLACK
    background: Colour = WHITE

    @property
    def reason(self) -> str:
        """Return what hides text here, in words; empty if nothing does."""
        if self.why:
            return self.why
        if self.invisible:
            return "visibility: hidden"
        if self.size <= TINY:
            return f"font-size: {self.size:g}px"
        if self.colour[3] < 0.05:
            return "transparent colour"
        if all(abs(a - b) < CLOSE for a, b in zip(self.colour[:3], self.background[:3], strict=True)):
            return "colour of the background"
        return ""


def declarations(style: str) -> tuple[tuple[str, str], ...]:
    """Return name and value of each declaration of `style="…"`."""
    import tinycss2

    found = tinycss2.parse_blocks_contents(style, skip_comments=True, skip_whitespace=True)
    kept = [d for d in found if d.type == "declaration"]
    kept.sort(key=lambda d: d.important)
    return tuple((d.lower_name, tinycss2.serialize(d.value).strip().lower()) for d in kept)


def rules(sheets: Iterable[str]) -> list[Rule]:
    """Return the simple rules of style sheets, weakest first.

    Simple: a tag, classes and ids of one element. Others (descendants, media, states) are passed over.
    """
    import tinycss2

    found: list[tuple[tuple[int, int, int, int], Rule]] = []
    for sheet in sheets:
        for rule in tinycss2.parse_stylesheet(sheet, skip_comments=True, skip_whitespace=True):
            if rule.type != "qualified-rule":
                continue
            said = declarations(tinycss2.serialize(rule.content))
            for selector in tinycss2.serialize(rule.prelude).split(","):
                match = _SELECTOR.match(selector.strip())
                if match is None or not selector.strip():
                    continue
                names = re.findall(r"[.#][\w-]+", match.group(2))
                ids = frozenset(n[1:] for n in names if n[0] == "#")
                classes = frozenset(n[1:] for n in names if n[0] == ".")
                tag = (match.group(1) or "").lower()
                weight = (len(ids), len(classes), int(tag not in ("", "*")), len(found))
                found.append((weight, Rule(tag, ids, classes, said)))
    return [rule for _, rule in sorted(found, key=lambda item: item[0])]


class Sheet:
    """The rules of a page, found by what they ask for. Rules of one selector are put together."""

    def __init__(self, sheets: Iterable[str]) -> None:
        self._by: dict[str, dict[tuple[str, frozenset[str], frozenset[str]], tuple[int, Rule]]] = {}
        for number, rule in enumerate(rules(sheets)):
            key = next((f"#{i}" for i in rule.ids), "") or next((f".{c}" for c in rule.classes), rule.tag)
            same = self._by.setdefault(key, {})
            place = (rule.tag, rule.ids, rule.classes)
            if place in same:
                merged = dict(same[place][1].declarations) | dict(rule.declarations)
                rule = rule._replace(declarations=tuple(merged.items()))
            same[place] = (number, rule)

    def said(self, tag: str, element_id: str, classes: frozenset[str]) -> dict[str, str]:
        """Return the declarations that an element gets, the stronger over the weaker."""
        keys = {tag, "*", "", f"#{element_id}", *(f".{c}" for c in classes)}
        meant = [
            item
            for key in keys & self._by.keys()
            for item in self._by[key].values()
            if item[1].fits(tag, element_id, classes)
        ]
        out: dict[str, str] = {}
        for _, rule in sorted(meant, key=lambda item: item[0]):
            out.update(rule.declarations)
        return out


def inside(outer: Shown, tag: str, attributes: Mapping[str, str | None], known: Sheet | None = None) -> Shown:
    """Return how text is shown inside an element, given how it is around it."""
    classes = frozenset((attributes.get("class") or "").split())
    said = known.said(tag, attributes.get("id") or "", classes) if known is not None else {}
    if attributes.get("bgcolor"):
        said.setdefault("background-color", attributes["bgcolor"] or "")
    if tag == "font" and attributes.get("color"):
        said.setdefault("color", attributes["color"] or "")
    said.update(declarations(attributes.get("style") or ""))
    shown = outer
    if "hidden" in attributes:
        shown = replace(shown, why=shown.why or "hidden")
    if not said:
        return shown
    painted = " ".join(said.get(name, "") for name in ("background-color", "background", "background-image"))
    background = _colour(painted, find=True)
    if "url(" in painted or "gradient(" in painted:
        shown = replace(shown, background=UNKNOWN)
    elif background is not None and background[3] > 0.5:
        shown = replace(shown, background=background)
    colour = _colour(said.get("color", ""))
    if colour is not None:
        shown = replace(shown, colour=colour)
    if said.get("visibility") in ("hidden", "collapse", "visible"):
        shown = replace(shown, invisible=said["visibility"] != "visible")
    size = _pixels(said.get("font-size", ""), shown.size, shown.size)
    if size is not None:
        shown = replace(shown, size=size)
    return replace(shown, why=shown.why or _hides(said))


def _hides(said: Mapping[str, str]) -> str:
    if said.get("display") == "none":
        return "display: none"
    opacity = re.match(r"^([\d.]+)(%?)$", said.get("opacity", ""))
    if opacity and _number(opacity.group(1)) / (100 if opacity.group(2) else 1) <= 0.05:
        return f"opacity: {opacity.group()}"
    away = said.get("position") in ("absolute", "fixed", "relative")
    for name in ("left", "right", "top", "bottom", "text-indent", "margin-left", "margin-top"):
        at = _pixels(said.get(name, ""), 16)
        placed = away if name in ("left", "right", "top", "bottom") else True
        if at is not None and placed and at <= -_FAR:
            return f"off-screen ({name}: {said[name]})"
    if re.search(r"rect\((?:\s*[01](?:px)?\s*,?){4}\)", said.get("clip", "")) or "inset(50%" in said.get(
        "clip-path", ""
    ):
        return "clipped away"
    if "inset(100%" in said.get("clip-path", "") or re.search(
        r"scale\(\s*0\s*[,)]", said.get("transform", "")
    ):
        return "clipped away"
    small = [_pixels(said.get(name, said.get(f"max-{name}", "")), 16) for name in ("width", "height")]
    if said.get("overflow") == "hidden" and any(s is not None and s <= 1 for s in small):
        return "a box of no size"
    return ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 1.0


_UNITS = {
    "px": 1.0,
    "": 1.0,
    "pt": 4 / 3,
    "rem": 16.0,
    "vw": 10.0,
    "vh": 8.0,
    "cm": 37.8,
    "mm": 3.78,
    "in": 96.0,
}


def _pixels(value: str, around: float, whole: float = 1000.0) -> float | None:
    match = re.match(r"^([+-]?(?:\d+\.?\d*|\.\d+))([a-z%]*)", value)
    if match is None:
        return None
    number, unit = float(match.group(1)), match.group(2)
    if unit in ("em", "ex", "ch"):
        return number * around
    if unit == "%":
        return number / 100 * whole
    return number * _UNITS[unit] if unit in _UNITS else None


@lru_cache(maxsize=4096)
def _colour(value: str, find: bool = False) -> Colour | None:
    from tinycss2.color4 import parse_color

    words = re.findall(r"#\w+|\w+\([^)]*\)|\w+", value) if find else [value]
    for word in words:
        found: Any = parse_color(word) if word and word != "currentcolor" else None
        if found is None or isinstance(found, str):
            continue
        try:
            red, green, blue = found.to("srgb").coordinates
        except (NotImplementedError, AttributeError, TypeError, ValueError):
            continue
        return float(red or 0), float(green or 0), float(blue or 0), float(found.alpha)
    return None
