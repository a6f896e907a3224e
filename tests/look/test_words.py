"""Words are what people read; each has the tokens that hold its characters."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.look.words import Word, tokens_holding, words

FAMILY = "👩‍👩‍👧"
CASES = {
    "plain": (["The", " animal", " sat", "."], ["The", "animal", "sat", "."]),
    "a word of several tokens": (["un", "believ", "able", " luck"], ["unbelievable", "luck"]),
    "apostrophes": (["didn", "'t", " rock", "’", "n", "’", "roll"], ["didn't", "rock’n’roll"]),
    "quotes are no apostrophes": (["'", "hello", "'"], ["'", "hello", "'"]),
    "punctuation in one token": (["wait", "...", " no"], ["wait", "...", "no"]),
    "a mark joined to what follows": (["say", ' "', "-yes", '"'], ["say", '"', "-yes", '"']),
    "a mark joined to the first word": (['"Hello', " you"], ['"Hello', "you"]),
    "two words in one token": ([" New York", " is"], ["New York", "is"]),
    "control token": (["<s>", "Hello"], ["<s>", "Hello"]),
    "encoder": (["[CLS]", "hi", "[SEP]"], ["[CLS]", "hi", "[SEP]"]),
    "emoji of four bytes": (["ok ", "👍", "", "", " now"], ["ok", "👍", "now"]),
    "emoji family": (["a ", "👩", "", "\u200d", "👩", "\u200d", "👧", "!"], ["a", FAMILY, "!"]),
    "skin tone and heart": (["👍", "🏽", " ", "❤", "\ufe0f"], ["👍🏽", "❤\ufe0f"]),
    "flag": (["🇫", "🇷", "🇩", "🇪"], ["🇫🇷", "🇩🇪"]),
    "Chinese": (["我", "喜欢", "猫", "。"], ["我", "喜欢", "猫", "。"]),
    "Japanese": (["猫", "が", "好き"], ["猫", "が", "好き"]),
    "Thai vowel signs": (["ที่", "นี่"], ["ที่", "นี่"]),
    "Hindi": (["नम", "स्ते", " दुनिया"], ["नमस्ते", "दुनिया"]),
    "decomposed accents": (["cafe", "\u0301", " au", " lait"], ["cafe\u0301", "au", "lait"]),
    "Persian joiner": (["می", "\u200c", "روم"], ["می\u200cروم"]),
    "Hebrew": (["של", "ום", " עולם"], ["שלום", "עולם"]),
    "numbers and underscores": (["x", "_1", " = ", "42"], ["x_1", "=", "42"]),
    "only blanks": ([" ", "\n"], []),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", CASES)
def test_words_read_as_people_read_them(name: str) -> None:
    tokens, wanted = CASES[name]
    assert [word.text for word in words("".join(tokens), tokens)] == wanted


def test_a_word_has_all_its_tokens() -> None:
    tokens = ["un", "believ", "able", " luck", " 👍", "", "", "!"]
    assert words("".join(tokens), tokens) == [
        Word("unbelievable", 0, 3),
        Word("luck", 3, 4),
        Word("👍", 4, 7),
        Word("!", 7, 8),
    ]


def test_a_token_of_two_words_goes_to_the_one_with_more_of_its_letters() -> None:
    assert words("a bcd", ["a b", "cd"]) == [Word("a", 0, 1), Word("bcd", 1, 2)]
    assert words("ab cdef", ["a", "b cde", "f"]) == [Word("ab", 0, 1), Word("cdef", 1, 3)]


ALPHABET = st.sampled_from(
    [
        *"aZ9_ .-'’\n\t\x00",
        "é",
        "\u0301",
        "我",
        "が",
        "ท",
        "ี",
        "👍",
        "🏽",
        "\u200d",
        "\ufe0f",
        "🇫",
        "\u200b",
        "ש",
        "\ud800",
        "\U000e0041",
    ]
)
PIECES = st.lists(st.text(ALPHABET, max_size=4), max_size=12)


@given(PIECES)
@example(["", "a"])
@example(["\u200d\u200d", "\u0301a"])
@example(["", "", "👍", "", ""])
def test_every_token_is_in_at_most_one_word_and_words_come_in_order(tokens: list[str]) -> None:
    text = "".join(tokens)
    found = words(text, tokens)
    for word in found:
        assert 0 <= word.start < word.stop <= len(tokens)
        assert word.text
        assert word.text in text
    for one, next_ in pairwise(found):
        assert one.stop <= next_.start
    held = {t for word in found for t in range(word.start, word.stop)}
    for t, token in enumerate(tokens):
        assert not token.strip() or t in held, "a token with a character is in a word"
    shown = "".join(word.text for word in found)
    assert sorted("".join(shown.split())) == sorted("".join(text.split())), "no character is lost or doubled"


@given(PIECES, st.data())
def test_tokens_holding_a_place_are_those_that_overlap_it(tokens: list[str], data: st.DataObject) -> None:
    size = sum(map(len, tokens))
    marks = data.draw(st.lists(st.sampled_from([0, 1]), min_size=size, max_size=size))
    at, wanted = 0, []
    for t, token in enumerate(tokens):
        own = range(at, at + len(token)) if token else range(max(0, at - 1), at)
        if any(marks[i] for i in own):
            wanted.append(t)
        at += len(token)
    assert tokens_holding(tokens, marks) == wanted
