"""Text to tokens, so that what a segment says stays text.

A tokenizer turns the text `<|im_end|>` into the control token that ends a turn, whoever wrote it. In a web
page that is an attack. Here only the template's own control tokens become control tokens; the same
characters inside a segment are spelled out, as `split_special_tokens=True` would do it for the whole text.

How: the tokenizer's own model is used through a twin whose control tokens are called by private-use
characters instead of by their names. The template's occurrences are renamed to match, the segments' are
not, and the prompt is still encoded in one go, so nothing changes at the seams. On every use the twin is
compared with the tokenizer itself on the same prompt with the segments' control text defused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from clearhead.errors import MissingExtraError, PromptError
from clearhead.models.spans import Span, unused_characters


class ControlText(NamedTuple):
    """Characters inside a segment that would have become a control token."""

    segment: int
    text: str
    start: int  # first character, in the text that was encoded


class Encoded(NamedTuple):
    """A text as tokens."""

    ids: list[int]
    offsets: list[tuple[int, int]]  # characters of each token: start, end
    control: list[bool]  # True: a control token of the template
    added: list[bool]  # True: put there by the tokenizer, such as [CLS]; no characters of the text
    control_text: list[ControlText]  # spelled out, in the order of the text


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the control tokens of a tokenizer: text to id.

    These are its special tokens, and those of its other added tokens that the chat template itself writes
    (`<tool_call>`). Other added tokens, such as runs of spaces, are only vocabulary.
    """
    template = tokenizer.chat_template or ""
    if not isinstance(template, str):
        template = "\n".join(template.values())
    return {
        added.content: number
        for number, added in tokenizer.added_tokens_decoder.items()
        if added.special or (added.content.strip() and added.content in template)
    }


def encode(text: str, spans: Sequence[Span], tokenizer: Any, *, add_special_tokens: bool = False) -> Encoded:
    """Encode the text once, with the control text inside the spans as plain text.

    tokenizer: a fast tokenizer of transformers (one that gives offsets).
    add_special_tokens: let the tokenizer add its own, as encoders need.

    Raises PromptError for a tokenizer without offsets, and for one that cannot keep control text as text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise PromptError(
            f"the tokenizer must be a fast one, which knows the characters of each token, got "
            f"{type(tokenizer).__name__}"
        )
    control = control_tokens(tokenizer)
    own, inside = _find(text, spans, control)
    if not inside:
        result = _as_usual(text, tokenizer, add_special_tokens)
        if not _captured(text, spans, tokenizer, control, result):
            return _finish(text, spans, control, result, inside)
    encoding = _Twin(tokenizer, control, text, own)
    result = encoding(text, own, add_special_tokens)
    _check_twin(text, spans, tokenizer, control, inside, encoding, add_special_tokens)
    captured = _captured(text, spans, tokenizer, control, result)
    if captured:
        raise PromptError(
            f"the text {captured!r} in a segment cannot stay text: {_name(tokenizer)} makes a control token "
            "of it even when it is spelled out; remove it from the segment"
        )
    return _finish(text, spans, control, result, inside)


class _Result(NamedTuple):
    ids: list[int]
    offsets: list[tuple[int, int]]
    added: list[bool]


def _name(tokenizer: Any) -> str:
    return f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"


def _find(
    text: str, spans: Sequence[Span], control: dict[str, int]
) -> tuple[list[tuple[int, int]], list[ControlText]]:
    """Return the template's own control tokens (start, end), and the control text in the segments."""
    if not control:
        return [], []
    names = re.compile("|".join(re.escape(name) for name in sorted(control, key=len, reverse=True)))
    own: list[tuple[int, int]] = []
    at = 0
    for span in [*spans, Span(-1, len(text), len(text))]:
        own += [match.span() for match in names.finditer(text, at, max(at, span.start))]
        at = max(at, span.end)
    inside: list[ControlText] = []
    for match in names.finditer(text):
        for span in spans:
            if max(span.start, match.start()) < min(span.end, match.end()):
                inside.append(ControlText(span.segment, match.group(), match.start()))
                break
    return own, inside


def _as_usual(text: str, tokenizer: Any, add_special_tokens: bool) -> _Result:
    encoded = tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        split_special_tokens=False,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    added = [bool(flag) and add_special_tokens for flag in encoded["special_tokens_mask"]]
    return _Result(list(encoded["input_ids"]), [(a, b) for a, b in encoded["offset_mapping"]], added)


class _Twin:
    """The tokenizer with its control tokens renamed to private-use characters. It shares the model."""

    def __init__(
        self, tokenizer: Any, control: dict[str, int], text: str, own: Sequence[tuple[int, int]]
    ) -> None:
        try:
            from tokenizers import AddedToken, Tokenizer
        except ImportError as error:  # pragma: no cover - a fast tokenizer came from there
            raise MissingExtraError("tokenizers is missing: pip install 'clearhead[models]'") from error
        backend = tokenizer.backend_tokenizer
        self.tokenizer = Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(backend, part) is not None:
                setattr(self.tokenizer, part, getattr(backend, part))
        used = sorted({text[start:end] for start, end in own})
        self.alias = dict(zip(used, unused_characters([text], len(used)), strict=True))
        tokens = [
            AddedToken(
                self.alias.get(added.content, added.content),
                single_word=added.single_word,
                lstrip=added.lstrip,
                rstrip=added.rstrip,
                normalized=added.normalized,
                special=False,
            )
            for added in tokenizer.added_tokens_decoder.values()
            if added.content in self.alias or added.content not in control
        ]
        self.tokenizer.add_tokens(tokens)
        self.number = {
            self.tokenizer.token_to_id(self.alias.get(added.content, added.content)): number
            for number, added in tokenizer.added_tokens_decoder.items()
            if added.content in self.alias or added.content not in control
        }

    def __call__(self, text: str, own: Sequence[tuple[int, int]], add_special_tokens: bool) -> _Result:
        """Encode the text, in which `own` are the places of the template's control tokens."""
        parts: list[str] = []
        origin: list[int] = []  # for each boundary of the renamed text, the boundary in the text
        at = 0
        for start, end in own:
            parts += text[at:start], self.alias[text[start:end]]
            origin += range(at, start + 1)
            at = end
        parts.append(text[at:])
        origin += range(at, len(text) + 1)
        encoded = self.tokenizer.encode("".join(parts), add_special_tokens=add_special_tokens)
        return _Result(
            [self.number.get(number, number) for number in encoded.ids],
            [(origin[start], origin[end]) for start, end in encoded.offsets],
            [bool(flag) and add_special_tokens for flag in encoded.special_tokens_mask],
        )


def _check_twin(
    text: str,
    spans: Sequence[Span],
    tokenizer: Any,
    control: dict[str, int],
    inside: Sequence[ControlText],
    twin: _Twin,
    add_special_tokens: bool,
) -> None:
    """Compare the twin with the tokenizer on the same text without control text in its segments."""
    names = set("".join(control))
    harmless_character = next(char for char in map(chr, range(ord("a"), 0xD800)) if char not in names)
    defused = list(text)
    for found in inside:
        place = next(
            max(found.start, span.start)
            for span in spans
            if max(found.start, span.start) < min(found.start + len(found.text), span.end)
        )
        defused[place] = harmless_character
    harmless = "".join(defused)
    own, still = _find(harmless, spans, control)
    if still:  # overlapping control texts: defuse what came to light
        return _check_twin(harmless, spans, tokenizer, control, still, twin, add_special_tokens)
    usual = _as_usual(harmless, tokenizer, add_special_tokens)
    if _captured(harmless, spans, tokenizer, control, usual):
        return None  # the tokenizer itself has no harmless reading: the caller checks what the twin made
    if twin(harmless, own, add_special_tokens).ids != usual.ids:
        raise PromptError(
            f"a segment contains the control text {inside[0].text!r}, and {_name(tokenizer)} cannot be made "
            "to encode it as text without changing the rest of the prompt; remove it from the segment"
        )
    return None


def _captured(
    text: str, spans: Sequence[Span], tokenizer: Any, control: dict[str, int], result: _Result
) -> str | None:
    """Return a control token that was made of text in a segment, None if there is none."""
    numbers = {number: name for name, number in control.items() if number != tokenizer.unk_token_id}
    for number, offset, added in zip(*result, strict=True):
        if added or number not in numbers:
            continue
        start, end = _core(text, offset, numbers[number])
        if any(max(span.start, start) < min(span.end, end) for span in spans):
            return numbers[number]
    return None


def _core(text: str, offset: tuple[int, int], name: str) -> tuple[int, int]:
    """Return the characters of a control token without the white space that it swallowed."""
    covered = text[slice(*offset)]
    at = covered.find(name)
    if at >= 0:
        return offset[0] + at, offset[0] + at + len(name)
    stripped = covered.strip()
    start = offset[0] + covered.find(stripped)
    return start, start + len(stripped)


def _finish(
    text: str,
    spans: Sequence[Span],
    control: dict[str, int],
    result: _Result,
    inside: list[ControlText],
) -> Encoded:
    numbers = set(control.values())
    is_control = [
        not added and number in numbers and not any(s.start <= a and b <= s.end and a < b for s in spans)
        for number, (a, b), added in zip(*result, strict=True)
    ]
    return Encoded(result.ids, result.offsets, is_control, result.added, inside)
