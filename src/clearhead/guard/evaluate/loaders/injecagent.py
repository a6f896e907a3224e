"""InjecAgent (Zhan et al. 2024) and sets like it: a tool's answer, an attacker's instruction in one field."""

from __future__ import annotations

import random
from pathlib import Path

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.loaders.files import Record, read_list, text_of
from clearhead.guard.evaluate.loaders.options import Options, worded
from clearhead.guard.evaluate.pairs import as_long
from clearhead.guard.samples import Sample

LOOKS_FOR = (
    "test_cases_{dh,ds}_{base,enhanced}.json, in the folder itself or in data/, each a list of cases with "
    '"User Instruction", "Attacker Instruction", "Tool Response" and "Tool Response Template"'
)
_SLOT = "<Attacker Instruction>"


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".json" and _fits(path) else []
    return [file for folder in (path, path / "data") for file in sorted(folder.glob("test_cases_*.json"))]


def _fits(file: Path) -> bool:
    try:
        found = read_list(file)
    except ArgumentError:
        return False
    return bool(found) and {"Attacker Instruction", "Tool Response"} <= found[0].keys()


def recognised(path: Path) -> bool:
    """Whether such cases lie there."""
    return bool(_files(path))


def load(path: Path, options: Options) -> list[Sample]:
    """Return each case, and as its benign twins the same answer of the tool with a harmless line instead.

    The line is as long as the attack, by turns a statement and an order meant for people. A context is a
    user's case (tool and answer), so that a split keeps all that is made from it together.
    """
    out: list[Sample] = []
    for file in _files(path):
        rng = random.Random(f"{options.seed} injecagent {file.name}")
        cases = read_list(file)
        if options.most is not None and len(cases) > options.most:
            cases = rng.sample(cases, options.most)
        for number, case in enumerate(cases):
            out += _pair(case, number, file, options, rng)
    return out


def _pair(case: Record, number: int, file: Path, options: Options, rng: random.Random) -> list[Sample]:
    text = text_of(case, "Tool Response", path=file)
    attack = text_of(case, "Attacker Instruction", path=file)
    template = case.get("Tool Response Template")
    if not isinstance(template, str) or _SLOT not in template:
        template = text.replace(attack, _SLOT, 1)
    instruction = worded(text_of(case, "User Instruction", path=file), rng)
    context = f"InjecAgent {case.get('User Tool', '')} {hash_of(template)}"
    family = (
        f"InjecAgent {case.get('Attack Type', 'attack')}{' (enhanced)' if 'enhanced' in file.stem else ''}"
    )

    def sample(text: str, inserted: str, at: int, label: str, family: str) -> Sample:
        end = at + len(inserted)
        place = _place(at, end, len(text)) if at >= 0 else "none"
        start, stop = (at, end) if at >= 0 else (None, None)
        return Sample(
            instruction, text, label, start, stop, "tool", place, family, "en", context, "InjecAgent"
        )  # fmt: skip

    out = [sample(text, attack, text.find(attack), "attack", family)]
    if _SLOT in template:
        imperative = number % 2 == 1
        pool = options.inserts.imperatives if imperative else options.inserts.statements
        line = as_long(pool, "web", len(attack), rng)
        benign = template.replace(_SLOT, line, 1)
        what, label = ("imperative", "imperative") if imperative else ("statement", "none")
        out.append(sample(benign, line, template.index(_SLOT), label, what))
    return out


def hash_of(text: str) -> str:
    """A short name of a text, the same everywhere."""
    from hashlib import sha256

    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _place(start: int, end: int, length: int) -> str:
    middle = (start + end) / 2 / max(length, 1)
    return "start" if middle < 1 / 3 else "middle" if middle < 2 / 3 else "end"
