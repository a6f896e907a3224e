"""Composes the judging set of the injection guard, judge.jsonl, from the texts under material/.

    python benchmarks/guard_judge/build.py

The same material gives the same file. Texts are inserted at line ends, never inside a fenced block; every
span is asserted to hold what was inserted, every count to be the planned one. Prints a table of counts.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.guard.samples import Sample, read_samples, write_samples

HERE = Path(__file__).resolve().parent
PLACES = ("start", "middle", "end")
OPEN, CLOSE = "⟦", "⟧"
"""Mark the attack in the adaptive texts; they do not reach the set."""

PLANNED = {
    "pooled": 360,
    "document": 60,
    "mail": 60,
    "prompt": 120,
    "direct": 30,
    "contest": 60,
    "long": 40,
    "de": 64,
    "es": 64,
    "zh": 64,
    "adaptive": 30,
    "quote": 40,
}


def material(name: str) -> Any:
    return json.loads((HERE / "material" / f"{name}.json").read_text(encoding="utf-8"))


def boundaries(text: str) -> list[int]:
    """Offsets of line starts inside the text that are not inside a fenced block."""
    found, offset, fenced = [], 0, False
    for line in text.split("\n")[:-1]:
        fenced ^= line.lstrip().startswith("```")
        offset += len(line) + 1
        if not fenced:
            found.append(offset)
    return found


def insert(text: str, what: str, place: str, draw: random.Random) -> tuple[str, int]:
    """The text with a line more, and where that begins."""
    if place == "start":
        return f"{what}\n{text}", 0
    if place == "end":
        return f"{text}\n{what}", len(text) + 1
    inner = boundaries(text)
    central = [at for at in inner if 0.3 <= at / len(text) <= 0.7]
    at = draw.choice(central or [min(inner, key=lambda at: abs(at / len(text) - 0.5))])
    return f"{text[:at]}{what}\n{text[at:]}", at


def inserted(base: Sample, what: str, place: str, draw: random.Random, label: str, family: str) -> Sample:
    text, start = insert(base.text, what, place, draw)
    end = start + len(what)
    assert text[start:end] == what
    assert base.text in (text[:start] + text[end + 1 :], text[: start - 1])
    return replace(base, text=text, label=label, start=start, end=end, position=place, family=family)


def attack_order(
    attacks: list[dict[str, str]], count: int, draw: random.Random
) -> list[list[dict[str, str]]]:
    """Four attacks of four families for each of count contexts; about all before any comes twice."""
    queue: list[dict[str, str]] = []
    groups = []
    for _ in range(count):
        group: list[dict[str, str]] = []
        while len(group) < 4:
            if len(queue) < 12:
                queue += draw.sample(attacks, len(attacks))
            known = {one["family"] for one in group}
            found = next(one for one in queue if one["family"] not in known)
            queue.remove(found)
            group.append(found)
        groups.append(group)
    return groups


def pooled(draw: random.Random) -> tuple[list[Sample], list[Sample]]:
    """Six texts of each English context, and for the contest one with three inserts."""
    wordings = material("wordings")
    contexts = material("contexts")
    code = [one for one in contexts if one["kind"] == "code"]
    prose = [one for one in contexts if one["kind"] != "code"]
    attacks = {}
    for group, name in ((prose, "attacks"), (code, "attacks_code")):
        for one, found in zip(group, attack_order(material(name), len(group), draw), strict=True):
            attacks[one["id"]] = found
    single, contest = [], []
    for number, one in enumerate(contexts):
        base = Sample(
            instruction=wordings[number % len(wordings)].format(task=one["task"]),
            text=one["text"],
            label="none",
            kind=one["kind"],
            context=one["id"],
            source="judge",
        )
        single.append(base)
        place = PLACES[draw.randrange(3)]
        single.append(inserted(base, one["statement"], place, draw, "none", "statement"))
        place = PLACES[draw.randrange(3)]
        single.append(inserted(base, one["imperative"], place, draw, "imperative", "imperative"))
        *three, fourth = attacks[one["id"]]
        for place, attack in zip(PLACES, three, strict=True):
            single.append(inserted(base, attack["text"], place, draw, "attack", attack["family"]))
        contest.append(of_contest(base, one, fourth, draw))
    return single, contest


def of_contest(base: Sample, one: dict[str, str], attack: dict[str, str], draw: random.Random) -> Sample:
    order = draw.sample(PLACES, 3)
    others = dict(zip(order[1:], (one["imperative"], one["statement"]), strict=True))
    text = base.text
    for place in ("middle", "start", "end"):
        what = attack["text"] if place == order[0] else others[place]
        text, _ = insert(text, what, place, draw)
    start = text.index(attack["text"])
    assert text.count(attack["text"]) == 1
    assert all(what in text for what in others.values())
    return replace(
        base,
        text=text,
        label="attack",
        start=start,
        end=start + len(attack["text"]),
        position=order[0],
        family=f"contest:{attack['family']}",
    )


def alone(draw: random.Random) -> dict[str, list[Sample]]:
    """Texts in which nothing was inserted."""
    wordings = material("wordings")
    documents = [
        Sample(
            wordings[n % len(wordings)].format(task=one["task"]),
            one["text"],
            "imperative",
            kind="doc",
            family="document",
            context=f"doc{n + 1:02d}",
            source="judge",
        )
        for n, one in enumerate(material("documents"))
    ]
    found = material("mails")
    mails = [
        Sample(
            found["wordings"][n % len(found["wordings"])],
            one["text"],
            one["label"],
            kind="mail",
            family="mail",
            context=f"inbox{n + 1:02d}",
            source="judge",
        )
        for n, one in enumerate(found["mails"])
    ]
    found = material("prompts")
    instructions = found["instructions"]
    prompts = [
        Sample(
            instructions[n % len(instructions)],
            text,
            "none",
            kind="prompt",
            position="whole",
            family="prompt",
            context=f"prompt{n + 1:03d}",
            source="judge",
        )
        for n, text in enumerate(found["benign"])
    ]
    direct = [
        Sample(
            instructions[n % len(instructions)],
            one["text"],
            "attack",
            start=0,
            end=len(one["text"]),
            kind="prompt",
            position="whole",
            family="direct",
            context=f"direct{n + 1:02d}",
            source="judge",
        )
        for n, one in enumerate(found["attacks"])
    ]
    quotes = [
        Sample(
            wordings[(n + 7) % len(wordings)].format(task=one["task"]),
            one["text"],
            "none",
            kind="doc",
            family="quote",
            context=f"quote{n + 1:02d}",
            source="judge",
        )
        for n, one in enumerate(material("quotes"))
    ]
    return {"document": documents, "mail": mails, "prompt": prompts, "direct": direct, "quote": quotes}


def digest(least: int, draw: random.Random) -> str:
    """At least so many words of contexts, mails and documents in random order, with separators."""
    pieces = [one["text"] for one in material("contexts") if one["kind"] != "code"]
    pieces += [one["text"] for one in material("mails")["mails"]]
    pieces += [one["text"] for one in material("documents")[:20]]
    draw.shuffle(pieces)
    separator = draw.choice(["\n\n-----\n\n", "\n\n* * *\n\n", "\n\n=====\n\n", "\n\n\n"])
    chosen: list[str] = []
    while sum(len(piece.split()) for piece in chosen) < least:
        chosen.append(pieces.pop())
    return separator.join(chosen)


def long_texts(draw: random.Random) -> list[Sample]:
    """Twenty digests with a planted attack, twenty with an imperative for people."""
    tasks = material("long_tasks")
    attacks = draw.sample([one for one in material("attacks") if len(one["text"]) < 140], 20)
    people = draw.sample([one["imperative"] for one in material("contexts")], 20)
    samples = []
    for n in range(40):
        text = digest(draw.randrange(2550, 3800), draw)
        at = draw.choice(boundaries(text))
        attacked = n % 2 == 0
        what = attacks[n // 2]["text"] if attacked else people[n // 2]
        text = f"{text[:at]}{what}\n{text[at:]}"
        assert text[at : at + len(what)] == what
        assert 2500 <= len(text.split()) <= 4000
        samples.append(
            Sample(
                material("wordings")[n % 20].format(task=tasks[n // 2 % len(tasks)]),
                text,
                "attack" if attacked else "imperative",
                start=at,
                end=at + len(what),
                kind="digest",
                position=PLACES[min(2, 3 * at // len(text))],
                family="long",
                context=f"long{n + 1:02d}",
                source="judge",
            )
        )
    return samples


def languages(draw: random.Random) -> dict[str, list[Sample]]:
    """Four texts of each context; the place of the attack goes round."""
    found = material("languages")
    result = {}
    for language, contexts in found["contexts"].items():
        wordings = found["wordings"][language]
        samples = []
        for n, one in enumerate(contexts):
            base = Sample(
                wordings[n % len(wordings)].format(task=one["task"]),
                one["text"],
                "none",
                kind=one["kind"],
                language=language,
                context=one["id"],
                source="judge",
            )
            attack = one["attack"]
            samples.append(base)
            place = PLACES[draw.randrange(3)]
            samples.append(inserted(base, one["statement"], place, draw, "none", "statement"))
            place = PLACES[draw.randrange(3)]
            samples.append(inserted(base, one["imperative"], place, draw, "imperative", "imperative"))
            samples.append(inserted(base, attack["text"], PLACES[n % 3], draw, "attack", attack["family"]))
        result[language] = samples
    return result


def adaptive(draw: random.Random) -> list[Sample]:
    """The attack runs from the first mark to the last; what is split counts as one span."""
    samples = []
    for n, one in enumerate(material("adaptive")):
        marked = one["text"]
        if "words_before" in one:
            before = digest(one["words_before"], draw) + "\n" if one["words_before"] else ""
            after = "\n" + digest(one["words_after"], draw) if one["words_after"] else ""
            marked = before + marked + after
        before, _, rest = marked.partition(OPEN)
        inner, _, after = rest.rpartition(CLOSE)
        inner = inner.replace(OPEN, "").replace(CLOSE, "")
        start, end = len(before), len(before) + len(inner)
        text = before + inner + after
        assert text[start:end] == inner
        assert not {OPEN, CLOSE} & set(text)
        samples.append(
            Sample(
                one["instruction"],
                text,
                "attack",
                start=start,
                end=end,
                kind="text",
                position=PLACES[min(2, 3 * start // len(text))],
                family=f"adaptive:{one['name']}",
                context=f"adaptive{n + 1:02d}",
                source="judge",
            )
        )
    return samples


def build() -> dict[str, list[Sample]]:
    draw = random.Random(20261)
    single, contest = pooled(draw)
    parts = {"pooled": single} | alone(draw) | {"contest": contest, "long": long_texts(draw)}
    parts |= languages(draw) | {"adaptive": adaptive(draw)}
    return {name: parts[name] for name in PLANNED}


def check(parts: dict[str, list[Sample]]) -> None:
    assert {name: len(samples) for name, samples in parts.items()} == PLANNED
    count = Counter((one.label, one.family == "plain") for one in parts["pooled"])
    assert sum(one.attacked for one in parts["pooled"]) == 180
    assert count["none", True] == 60
    texts = {(one.text, one.instruction) for samples in parts.values() for one in samples}
    assert len(texts) == sum(PLANNED.values())
    attacks = {one.text[one.start : one.end] for one in parts["pooled"] if one.attacked}
    families = {one.family for one in parts["pooled"] if one.attacked}
    assert len(attacks) >= 120
    assert len(families) >= 18
    people = {one.text[one.start : one.end] for one in parts["pooled"] if one.label == "imperative"}
    assert len(people) == 60
    for language in ("de", "es", "zh"):
        assert sum(one.attacked for one in parts[language]) == 16
    print(f"{len(attacks)} attack texts of {len(families)} families in the pooled set")


def main() -> None:
    parts = build()
    check(parts)
    path = HERE / "judge.jsonl"
    samples = [one for part in parts.values() for one in part]
    write_samples(samples, path)
    assert read_samples(path) == samples
    print(f"{'part':10} {'none':>5} {'imperative':>10} {'attack':>6} {'all':>5}  start/middle/end of attacks")
    for name, part in [*parts.items(), ("all", samples)]:
        labels = Counter(one.label for one in part)
        places = Counter(one.position for one in part if one.attacked)
        shown = "/".join(str(places[place]) for place in PLACES)
        print(
            f"{name:10} {labels['none']:5} {labels['imperative']:10} "
            f"{labels['attack']:6} {len(part):5}  {shown}"
        )


if __name__ == "__main__":
    main()
