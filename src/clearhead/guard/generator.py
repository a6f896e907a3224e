"""Compose labelled texts from the package's material: what a calibration is made from.

From every context come texts that differ in one thing: nothing, a foreign statement, an imperative meant for
people, or an attack inserted. So neither the topic nor the length nor an inserted line tells the classes
apart, only what the line asks of whom.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clearhead.errors import ArgumentError
from clearhead.guard.composing import insert
from clearhead.guard.material import LANGUAGES, load
from clearhead.guard.samples import Sample

SOURCE = "generator"
#: Attacks that belong into code: their families' names begin with it.
CODE = "code"
_CODE_KINDS = ("code", "review")


@dataclass(frozen=True)
class Material:
    """What samples are composed of, in one language; the fields as in `material.load`."""

    language: str
    contexts: Sequence[Mapping[str, Any]]
    documents: Sequence[Mapping[str, Any]]
    attacks: Mapping[str, Sequence[str]]
    imperatives: Sequence[Mapping[str, Any]]
    statements: Sequence[Mapping[str, Any]]
    prompts: Sequence[Mapping[str, Any]]
    direct: Sequence[Mapping[str, Any]]
    system: Sequence[str]
    generic: Sequence[str]
    source: str = SOURCE


def packaged(language: str) -> Material:
    """Return the material that comes with the package. Raises ArgumentError for an unknown language."""
    if language not in LANGUAGES:
        raise ArgumentError(f"language must be one of {', '.join(LANGUAGES)}, got {language!r}")
    inserts = load(language, "inserts")
    attacks = dict(inserts["attacks"])
    if inserts.get("foreign_attacks"):
        attacks["in English"] = inserts["foreign_attacks"]
    instructions = load(language, "instructions")
    return Material(
        language,
        load(language, "contexts"),
        load(language, "documents"),
        attacks,
        inserts["imperatives"],
        inserts["statements"],
        inserts["prompts"],
        inserts["direct"],
        instructions["system"],
        instructions["generic"],
    )


def generate(languages: Iterable[str] = LANGUAGES, *, seed: int = 0, rounds: int = 1) -> list[Sample]:
    """Return samples of the packaged material, the same for the same seed.

    rounds: how often every context is used, each time with other inserts, tasks and wordings.
    """
    out: list[Sample] = []
    for language in languages:
        for number in range(rounds):
            out += compose(packaged(language), seed=seed + number)
    return out


def compose(parts: Material, *, seed: int = 0) -> list[Sample]:
    """Return the samples of one round over a material: six of every context, two of every document."""
    rng = random.Random(f"{seed} {parts.language} {parts.source}")
    draw = _Draw(parts, rng)
    out: list[Sample] = []
    for context in parts.contexts:
        out += _of_context(context, parts, draw, rng)
    for document in parts.documents:
        out += _of_document(document, parts, draw, rng)
    for number, prompt in enumerate(parts.prompts):
        out.append(_alone(prompt["text"], "none", "prompt", f"prompt {number}", parts, rng))
    for number, attack in enumerate(parts.direct):
        family = f"direct: {attack['family']}"
        out.append(_alone(attack["text"], "attack", family, f"direct {number}", parts, rng))
    return out


def crossed(given: Sequence[Sample], *, language: str = "en", seed: int = 0) -> list[Sample]:
    """Return samples of given texts with the packaged attacks and of the packaged texts with the given ones.

    given: samples of one or several sets. Their contexts are the texts of the family "plain", their attacks
    what stands between start and end. From every context come three attacked texts and one with an imperative
    for people, with the attacks of both sides drawn alike.
    """
    parts = packaged(language)
    attacks: dict[str, list[str]] = {family: list(texts) for family, texts in parts.attacks.items()}
    contexts = list(parts.contexts)
    seen: set[str] = set()
    for sample in given:
        if sample.attacked and sample.position != "whole":
            text = sample.text[sample.start : sample.end]
            if text not in attacks.setdefault(sample.family, []):
                attacks[sample.family].append(text)
        elif sample.family == "plain" and sample.context not in seen:
            seen.add(sample.context)
            contexts.append(
                {"id": sample.context, "kind": sample.kind, "text": sample.text, "as": sample.instruction}
            )
    whole = replace(parts, attacks=attacks, source="crossed")
    rng = random.Random(f"{seed} crossed {language}")
    draw = _Draw(whole, rng)
    out: list[Sample] = []
    for context in contexts:
        made = _of_context(context, whole, draw, rng)
        out += [s for s in made if s.attacked or s.family == "imperative"]
    return out


class _Draw:
    """Draw inserts evenly: every family and every text comes once before any comes again."""

    def __init__(self, parts: Material, rng: random.Random) -> None:
        self.parts, self.rng = parts, rng
        self.decks: dict[Any, list[Any]] = {}

    def attack(self, kind: str) -> tuple[str, str]:
        code = [name for name in self.parts.attacks if name.startswith(CODE)]
        prose = [name for name in self.parts.attacks if not name.startswith(CODE)]
        families = code if code and kind in _CODE_KINDS and self.rng.random() < 0.5 else prose
        family = self._next(("family", families is code), families)
        return family, self._next(("attack", family), self.parts.attacks[family])

    def benign(self, what: str, kind: str) -> str:
        pool: Sequence[Mapping[str, Any]] = getattr(self.parts, what)
        fitting = [item["text"] for item in pool if kind in item["fits"] or "any" in item["fits"]]
        return str(self._next((what, kind), fitting or [item["text"] for item in pool]))

    def _next(self, key: Any, pool: Sequence[Any]) -> Any:
        deck = self.decks.get(key)
        if not deck:
            deck = self.decks[key] = list(pool)
            self.rng.shuffle(deck)
        return deck.pop()


def _instruction(task: str, parts: Material, rng: random.Random) -> str:
    return rng.choice(parts.system).replace("{task}", task)


def _of_context(context: Mapping[str, Any], parts: Material, draw: _Draw, rng: random.Random) -> list[Sample]:
    kind, text = context["kind"], context["text"]
    own = context.get("as")  # the instruction that a context came with
    instruction = own or _instruction(rng.choice(context["tasks"]), parts, rng)

    def sample(text: str, label: str, family: str, position: str = "none", at: Any = None) -> Sample:
        start, end = at or (None, None)
        return Sample(
            instruction, text, label, start, end, kind, position, family, parts.language, context["id"],
            parts.source,
        )  # fmt: skip

    out = [sample(text, "none", "plain")]
    for what, label in (("statements", "none"), ("imperatives", "imperative")):
        position = rng.choice(("start", "middle", "end"))
        done = insert(text, draw.benign(what, kind), position, rng)
        out.append(sample(done.text, label, what[:-1], position, (done.start, done.end)))
    for position in ("start", "middle", "end"):
        family, attack = draw.attack(kind)
        base = text
        if rng.random() < 0.3:  # beside a harmless order or remark
            what = rng.choice(("imperatives", "imperatives", "statements"))
            base = insert(text, draw.benign(what, kind), rng.choice(("start", "middle", "end")), rng).text
        done = insert(base, attack, position, rng)
        out.append(sample(done.text, "attack", family, position, (done.start, done.end)))
    return out


def _of_document(
    document: Mapping[str, Any], parts: Material, draw: _Draw, rng: random.Random
) -> list[Sample]:
    instruction = _instruction(rng.choice(document["tasks"]), parts, rng)
    label = "none" if document["family"] == "quote" else "imperative"
    common = {
        "kind": document["kind"],
        "language": parts.language,
        "context": document["id"],
        "source": parts.source,
    }
    out = [Sample(instruction, document["text"], label, family=document["family"], **common)]
    position = rng.choice(("start", "middle", "end"))
    family, attack = draw.attack(document["kind"])
    done = insert(document["text"], attack, position, rng)
    out.append(
        Sample(
            instruction, done.text, "attack", done.start, done.end, position=position, family=family, **common
        )
    )
    return out


def _alone(text: str, label: str, family: str, context: str, parts: Material, rng: random.Random) -> Sample:
    attacked = label == "attack"
    return Sample(
        rng.choice(parts.generic), text, label, 0 if attacked else None, len(text) if attacked else None,
        kind="prompt", position="whole", family=family, language=parts.language,
        context=f"{parts.language} {context}", source=parts.source,
    )  # fmt: skip
