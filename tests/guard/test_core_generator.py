"""The texts of a calibration: the same for a seed, marked where they should be, and told apart by nothing but sense."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ArgumentError
from clearhead.guard.composing import insert
from clearhead.guard.generator import crossed, generate, packaged
from clearhead.guard.material import LANGUAGES
from clearhead.guard.samples import Sample, read_samples, write_samples

BENIGN = ("none", "imperative")


@pytest.fixture(scope="module")
def made() -> list[Sample]:
    return generate()


def test_the_same_seed_makes_the_same_texts(made: list[Sample]) -> None:
    assert generate(["de", "zh"]) == [s for s in made if s.language in ("de", "zh")]
    other = generate(["de"], seed=1)
    assert other != generate(["de"])
    assert len(generate(["de"], rounds=2)) == 2 * len(other)


def test_it_says_of_an_unknown_language_which_there_are() -> None:
    with pytest.raises(ArgumentError, match="language must be one of en, de, es, zh, got 'fr'"):
        generate(["fr"])


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_context_gives_six_texts_and_every_document_two(made: list[Sample], language: str) -> None:
    parts = packaged(language)
    of: dict[str, list[Sample]] = defaultdict(list)
    for s in made:
        if s.language == language:
            of[s.context].append(s)
    for context in parts.contexts:
        found = of.pop(context["id"])
        assert Counter(s.label for s in found) == {"none": 2, "imperative": 1, "attack": 3}
        assert sorted(s.position for s in found if s.attacked) == ["end", "middle", "start"]
        assert len({s.instruction for s in found}) == 1
        assert found[0].text == context["text"]
    for document in parts.documents:
        assert sorted(s.attacked for s in of.pop(document["id"])) == [False, True]
    assert all(len(found) == 1 and found[0].position == "whole" for found in of.values())
    assert len(of) == len(parts.prompts) + len(parts.direct)
    assert len(parts.contexts) >= 20
    assert len(parts.attacks) >= 10


def test_contexts_are_never_shared_between_languages(made: list[Sample]) -> None:
    languages = defaultdict(set)
    for s in made:
        languages[s.context].add(s.language)
    assert all(len(found) == 1 for found in languages.values())


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_marked_characters_are_the_insert(made: list[Sample], language: str) -> None:
    parts = packaged(language)
    pools = {
        "attack": {t.strip() for texts in parts.attacks.values() for t in texts} | {d["text"].strip() for d in parts.direct},
        "imperative": {item["text"].strip() for item in parts.imperatives},
        "none": {item["text"].strip() for item in parts.statements},
    }  # fmt: skip
    for s in made:
        if s.language == language and s.start is not None:
            assert s.text[s.start : s.end].strip() in pools[s.label]
            assert "{task}" not in s.instruction


def test_no_attack_stands_in_a_benign_text_and_every_family_is_used(made: list[Sample]) -> None:
    for language in LANGUAGES:
        parts = packaged(language)
        attacks = [t.strip() for texts in parts.attacks.values() for t in texts]
        for s in made:
            if s.language == language and s.label in BENIGN and s.family != "quote":
                assert not any(attack in s.text for attack in attacks), s.text[:200]
        used = {s.family for s in made if s.language == language and s.attacked}
        assert set(parts.attacks) <= used


def auroc(high: Any, low: Any) -> float:
    high, low = np.array(high)[:, None], np.array(low)[None]
    return float((high > low).mean() + 0.5 * (high == low).mean())


@pytest.mark.parametrize("language", LANGUAGES)
def test_length_does_not_tell_attacked_texts_from_those_with_a_harmless_insert(
    made: list[Sample], language: str
) -> None:
    own = [s for s in made if s.language == language and s.position in ("start", "middle", "end")]
    inserted = [s for s in own if s.family in ("statement", "imperative")]
    contexts = {s.context for s in inserted}
    attacked = [s for s in own if s.attacked and s.context in contexts]
    for measure in (lambda s: len(s.text), lambda s: s.text.count("\n")):
        assert 0.35 < auroc([measure(s) for s in attacked], [measure(s) for s in inserted]) < 0.65


def test_the_place_does_not_tell_attacks_from_harmless_inserts(made: list[Sample]) -> None:
    shares = {}
    for attacked in (True, False):
        own = [
            s
            for s in made
            if s.position in ("start", "middle", "end") and s.attacked == attacked and s.family != "quote"
        ]
        shares[attacked] = Counter(s.position for s in own)
        total = sum(shares[attacked].values())
        assert all(0.25 < count / total < 0.42 for count in shares[attacked].values())


def test_labels_are_balanced(made: list[Sample]) -> None:
    for language in LANGUAGES:
        labels = Counter(s.label for s in made if s.language == language)
        assert 0.4 < labels["attack"] / sum(labels.values()) < 0.6
        assert labels["imperative"] >= 0.1 * sum(labels.values())


def test_crossed_texts_use_the_contexts_and_the_attacks_of_both_sides() -> None:
    own = [
        Sample(
            "Summarise.",
            f"Given text number {n}. It has two sentences.",
            "none",
            kind="mail",
            context=f"g{n}",
            source="set",
        )
        for n in range(12)
    ]
    text = "Given attack: obey the fox."
    own += [
        Sample(
            "Summarise.",
            f"A page. {text}",
            "attack",
            8,
            8 + len(text),
            position="end",
            family="fox",
            context="g0",
            source="set",
        )
    ]
    found = crossed(own, seed=1)
    assert crossed(own, seed=1) == found
    assert {s.source for s in found} == {"crossed"}
    contexts = {s.context for s in found}
    assert {f"g{n}" for n in range(12)} <= contexts
    assert {c["id"] for c in packaged("en").contexts} <= contexts
    fox = [s for s in found if s.family == "fox"]
    assert fox
    assert all(s.text[s.start : s.end] == text for s in fox)
    assert any(s.context.startswith("g") and s.family != "fox" and s.attacked for s in found)
    assert all(s.instruction == "Summarise." for s in found if s.context.startswith("g"))
    assert Counter(Counter(s.context for s in found).values()) == {4: len(contexts)}


# --------------------------------------------------------------------------------------------- inserting


@settings(max_examples=300, deadline=None)
@given(
    st.text(st.sampled_from("ab. \n!。#`"), max_size=80),
    st.text(st.sampled_from("XY. \n"), min_size=1, max_size=30).filter(str.strip),
    st.sampled_from(["start", "middle", "end"]),
    st.integers(0, 5),
)
def test_an_insert_is_there_and_nothing_else_is_lost(text: str, piece: str, position: str, seed: int) -> None:
    found = insert(text, piece, position, random.Random(seed))
    assert found.text[found.start : found.end] == piece.strip()
    rest = found.text[: found.start] + found.text[found.end :]
    assert "".join(rest.split()) == "".join(text.split())
    outside = found.text[: found.start], found.text[found.end :]
    assert not outside[0].strip() or outside[0][-1].isspace()
    assert not outside[1].strip() or outside[1][0].isspace()


def test_an_insert_is_not_put_into_a_fenced_block_if_there_is_room_beside_it() -> None:
    for seed in range(50):
        text = "First line.\n```\na\nb\nc\n```\nMiddle line.\n```\nd\n```\nLast line."
        found = insert(text, "NEW", "middle", random.Random(seed))
        assert found.text[: found.start].count("```") % 2 == 0


# ------------------------------------------------------------------------------------------------ files


def test_samples_are_written_and_read_back(made: list[Sample], tmp_path: Any) -> None:
    odd = replace(made[0], text="a\u2028b\x85c\r\nd\x00 \ue000 😀", start=None, end=None)
    write_samples([*made[:50], odd], tmp_path / "a.jsonl")
    assert read_samples(tmp_path / "a.jsonl") == [*made[:50], odd]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("3", "line 2: an object with instruction, text and label is needed"),
        ('{"text": "a", "label": "none"}', "line 2: an object with instruction"),
        ('{"instruction": "", "text": "a", "label": "none", "colour": 1}', "line 2: unknown field 'colour'"),
        ('{"instruction": "", "text": "a", "label": "bad"}', "line 2: label must be one of none, imperative, attack, got 'bad'"),
        ('{"instruction": "", "text": 3, "label": "none"}', "line 2: text must be a str, got int"),
        ('{"instruction": "", "text": "a", "label": "attack", "start": 0, "end": 2}', "line 2: start and end must lie in the text of 1"),
        ('{"instruction": "", "text": "a", "label": "attack", "start": 0}', "line 2: start and end must both be given"),
        ('{"instruction": "", "text": "a", "label": "none", "position": "top"}', "line 2: position must be one of"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_sample_is_refused_with_its_number(tmp_path: Any, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"instruction": "", "text": "a", "label": "none"}\n' + line + "\n")
    with pytest.raises(ArgumentError, match=said):
        read_samples(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "a.jsonl", tmp_path, tmp_path / "none"):
        with pytest.raises(ArgumentError, match="cannot be read"):
            read_samples(path)
