"""A prompt of named sources, and which of its tokens come from which.

Text enters as segments, each with a name, a role and whether it is trusted. The model's own chat template
lays them out; `Prompt` knows where every segment ended up. What the model does with it is not this file's
business, and nothing here runs anything that a segment says: the text of a segment is data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ArgumentError, PromptError
from clearhead.models.encoding import Encoded, encode
from clearhead.models.spans import Layout, Message, Ownership, Piece, Span, cut, locate, own, runs
from clearhead.segments import Segments

ROLES = ("system", "user", "assistant", "tool", "data")
"""Who speaks. `data` is text that somebody hands over: it is laid out inside the user's message."""

TRUSTED_ROLES = ("system", "user", "assistant")
"""The roles whose text is trusted unless a segment says otherwise."""

TEMPLATE = "template"
"""The name of what no segment wrote: the chat template's own text, separators, padding."""

OUTPUT = "output"
"""The name of what the model writes after the prompt."""

SEPARATOR = "\n\n"
"""Between two segments of one message."""


@dataclass(frozen=True, init=False)
class Segment:
    """A piece of a prompt that comes from one source.

    name: what reports call it; not empty, not "template", not "output".
    role: "system", "user", "assistant", "tool" or "data".
    text: what it says; may be empty.
    trusted: whether instructions in it are to be followed. None: yes for system, user and assistant, no for
        tool and data.

    Raises PromptError for anything else.
    """

    name: str
    role: str
    text: str
    trusted: bool

    def __init__(self, name: str, role: str, text: str, trusted: bool | None = None) -> None:
        if not isinstance(name, str) or not name.strip():
            raise PromptError(f"name must be a text that is not empty, got {name!r}")
        if name in (TEMPLATE, OUTPUT):
            raise PromptError(
                f"name must not be {TEMPLATE!r} or {OUTPUT!r}, which have a meaning of their own"
            )
        if role not in ROLES:
            raise PromptError(f"segment {name!r}: role must be one of {', '.join(ROLES)}, got {role!r}")
        if not isinstance(text, str):
            raise PromptError(f"segment {name!r}: text must be a str, got {type(text).__name__}")
        if trusted is not None and not isinstance(trusted, bool):
            raise PromptError(f"segment {name!r}: trusted must be True, False or None, got {trusted!r}")
        for what, value in (("name", name), ("text", text)):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise PromptError(
                    f"segment {name!r}: {what} holds half a character (a lone surrogate, "
                    f"{value[error.start]!r}) at position {error.start}, which no tokenizer can read"
                ) from None
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "trusted", role in TRUSTED_ROLES if trusted is None else bool(trusted))


class ControlTextNote(NamedTuple):
    """Text in a segment that reads like one of the model's control tokens. It was kept as text."""

    segment: str
    text: str
    start: int  # first character, in Prompt.text


@dataclass(frozen=True)
class Report:
    """What a reader should know about how the segments became tokens.

    border_tokens: positions of tokens that hold characters of more than one source (of two segments, or of
        one and the template); each was given to the segment with most of its characters.
    missing: segments that have text, none of which is in the prompt: the template drops it.
    empty: segments without text.
    swallowed: segments whose text is in the prompt, but only in tokens that belong to another segment.
    control_text: control-token text found inside segments.
    """

    border_tokens: tuple[int, ...]
    missing: tuple[str, ...]
    empty: tuple[str, ...]
    swallowed: tuple[str, ...]
    control_text: tuple[ControlTextNote, ...]

    def sentences(self) -> tuple[str, ...]:
        """Return the report as sentences, none if there is nothing to say."""
        out = [f"segment {name!r} is not in the prompt: the chat template drops it" for name in self.missing]
        out += [f"segment {name!r} is empty" for name in self.empty]
        out += [f"segment {name!r} has no token of its own" for name in self.swallowed]
        if self.border_tokens:
            count = len(self.border_tokens)
            out.append(
                f"{count} {'token crosses' if count == 1 else 'tokens cross'} a border between sources: "
                f"{'position' if count == 1 else 'positions'} {_shorten(self.border_tokens)}"
            )
        found: dict[tuple[str, str], int] = {}
        for note in self.control_text:
            found[note.segment, note.text] = found.get((note.segment, note.text), 0) + 1
        for (segment, text), count in found.items():
            times = "" if count == 1 else f" {count} times"
            out.append(f"segment {segment!r} contains the control text {text!r}{times}; it was kept as text")
        return tuple(out)


class Batch(NamedTuple):
    """Several prompts as one padded batch.

    inputs: `input_ids` and `attention_mask`, both (B, L) and int64; for `model(**batch.inputs)`.
    segments: ids (B, L); the names are those of all prompts together. Padding counts as "template".
    """

    inputs: dict[str, Tensor]
    segments: Segments


class Prompt:
    """Segments laid out by a model's chat template, and where each of them lies in the tokens.

    segments: one or more `Segment`, in the order in which the model is to read them; names differ.
    tokenizer: a fast tokenizer of transformers, with a chat template.
    add_generation_prompt: end with the words that make the model answer.

    Neighbouring segments of the roles user and data make one user message, neighbouring system segments one
    system message, neighbouring assistant segments one assistant message, with a blank line between those
    that have text. Every tool segment is a message of its own. All else is the template's.

    A token belongs to the segment that most of its characters come from, to the later one on a tie, and to
    "template" if it has none of a segment's characters. Text that reads like a control token stays text if
    a segment says it (see `report.control_text`). Everything is computed when it is first asked for, once.

    Raises PromptError at once for no segments or equal names, and on first use for a tokenizer without a
    chat template, a template that refuses the roles, or one that changes a segment beyond recognition.
    """

    def __init__(
        self, segments: Sequence[Segment], tokenizer: Any, *, add_generation_prompt: bool = True
    ) -> None:
        self._sources = _check(segments)
        self.tokenizer = tokenizer
        self.add_generation_prompt = add_generation_prompt
        self._separator: str | None = None

    @classmethod
    def plain(cls, segments: Sequence[Segment], tokenizer: Any, *, separator: str = SEPARATOR) -> Prompt:
        """Return the segments one after the other without a chat template: for base models and encoders.

        separator: what stands between two segments that have text. It and the tokenizer's own special
        tokens ([CLS], <s>) are "template"; these stand in `text` and `tokens` by their names. Roles play no
        part. Raises PromptError as the class does.
        """
        if not isinstance(separator, str):
            raise PromptError(f"separator must be a str, got {type(separator).__name__}")
        prompt = cls(segments, tokenizer, add_generation_prompt=False)
        prompt._separator = separator
        return prompt

    @property
    def sources(self) -> tuple[Segment, ...]:
        """The segments that this prompt was made of."""
        return self._sources

    @property
    def names(self) -> tuple[str, ...]:
        """A name per segment number: those of the segments, then "template", then "output"."""
        return (*(segment.name for segment in self._sources), TEMPLATE, OUTPUT)

    @cached_property
    def text(self) -> str:
        """The whole prompt as the model gets it, control tokens by their names."""
        return self._parts[0].text

    @cached_property
    def input_ids(self) -> Tensor:
        """The tokens: (1, n), int64."""
        return torch.tensor([self._parts[1].ids])

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, both (1, n) and int64: for `model(**prompt.inputs)`."""
        return {"input_ids": self.input_ids, "attention_mask": torch.ones_like(self.input_ids)}

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """The text of each of the n tokens; joined they are `text` exactly.

        Where several tokens share a character (an emoji of many bytes) the first has it, the others are "".
        """
        return tuple(cut(self.text, self._parts[1].offsets))

    @cached_property
    def segments(self) -> Segments:
        """The segment of each token: ids (n,), `names`, and "output" for tokens that are generated later."""
        return Segments(torch.tensor(self._owners.ids), self.names, output=len(self._sources) + 1)

    @cached_property
    def spans(self) -> dict[str, list[tuple[int, int]]]:
        """For each segment and for "template", its runs of tokens: (first, one past the last).

        A segment without tokens has none; one that the template repeats has several.
        """
        names = self.names
        out: dict[str, list[tuple[int, int]]] = {name: [] for name in names[:-1]}
        for number, start, end in runs(self._owners.ids):
            out[names[number]].append((start, end))
        return out

    @cached_property
    def characters(self) -> dict[str, list[tuple[int, int]]]:
        """For each segment, where its text lies in `text`: (first, one past the last) character."""
        out: dict[str, list[tuple[int, int]]] = {segment.name: [] for segment in self._sources}
        for span in self._parts[0].spans:
            out[self._sources[span.segment].name].append((span.start, span.end))
        return out

    @cached_property
    def report(self) -> Report:
        """What is worth knowing about how the segments became tokens."""
        layout, encoded = self._parts
        present = {span.segment for span in layout.spans if span.end > span.start}
        owners = set(self._owners.ids)
        missing, empty, swallowed = [], [], []
        for number, segment in enumerate(self._sources):
            if not segment.text:
                empty.append(segment.name)
            elif number not in present:
                missing.append(segment.name)
            elif number not in owners:
                swallowed.append(segment.name)
        notes = (
            ControlTextNote(self._sources[found.segment].name, found.text, found.start)
            for found in encoded.control_text
        )
        return Report(
            tuple(self._owners.border), tuple(missing), tuple(empty), tuple(swallowed), tuple(notes)
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """`report` as sentences."""
        return self.report.sentences()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._parts[1].ids)

    def __repr__(self) -> str:
        return f"Prompt({', '.join(f'{s.name!r} ({s.role})' for s in self._sources)})"

    @staticmethod
    def batch(prompts: Sequence[Prompt], *, padding_side: str = "left") -> Batch:
        """Return the prompts as one batch, padded to the longest.

        padding_side: "left" for generation, "right" for encoders. Models with learned positions (GPT-2) read
        a left-padded row right only with `position_ids`, which `generate` derives from the mask by itself.

        Raises PromptError for no prompts, prompts of different tokenizers, or another padding_side.
        """
        if not prompts:
            raise PromptError("prompts must hold at least one prompt, got none")
        if padding_side not in ("left", "right"):
            raise PromptError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
        tokenizer = prompts[0].tokenizer
        if any(prompt.tokenizer is not tokenizer for prompt in prompts):
            raise PromptError("prompts must share one tokenizer, got several")
        sources = list(dict.fromkeys(name for prompt in prompts for name in prompt.names[:-2]))
        names = [*sources, TEMPLATE, OUTPUT]
        number = {name: i for i, name in enumerate(names)}
        pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        longest = max(len(prompt) for prompt in prompts)
        shape = (len(prompts), longest)
        input_ids = torch.full(shape, pad)
        mask = torch.zeros(shape, dtype=torch.long)
        ids = torch.full(shape, number[TEMPLATE])
        for row, prompt in enumerate(prompts):
            n = len(prompt)
            place = slice(longest - n, longest) if padding_side == "left" else slice(n)
            input_ids[row, place] = prompt.input_ids[0]
            mask[row, place] = 1
            numbers = torch.tensor([number[name] for name in prompt.names])
            ids[row, place] = numbers[prompt.segments.ids]
        segments = Segments(ids, names, output=number[OUTPUT])
        return Batch({"input_ids": input_ids, "attention_mask": mask}, segments)

    @cached_property
    def _parts(self) -> tuple[Layout, Encoded]:
        """The rendered text with the characters of each segment, and its tokens."""
        if self._separator is None:
            layout = _lay_out(self._sources, self.tokenizer, self.add_generation_prompt)
            encoded = encode(layout.text, layout.spans, self.tokenizer)
        else:
            message = _join(self._sources, range(len(self._sources)), self._separator)
            layout = Layout(message.content, tuple(Span(*piece) for piece in message.pieces))
            encoded = encode(layout.text, layout.spans, self.tokenizer, add_special_tokens=True)
            layout, encoded = _write_added_tokens(layout, encoded, self.tokenizer)
        if not encoded.ids:
            raise PromptError(
                "the prompt must have at least one token, got none: its segments are empty or dropped"
            )
        return layout, encoded

    @cached_property
    def _owners(self) -> Ownership:
        layout, encoded = self._parts
        control = [a or b for a, b in zip(encoded.control, encoded.added, strict=True)]
        return own(encoded.offsets, layout.spans, nobody=len(self._sources), control=control)


def check_length(length: int, config: Any, *, new_tokens: int = 0) -> None:
    """Raise PromptError if a prompt is longer than the positions that a model has.

    length: tokens of the prompt. config: the model's configuration. new_tokens: how many more are to be
    generated. A model whose configuration names no limit (T5) takes any length.
    """
    if length < 0 or new_tokens < 0:
        raise ArgumentError(f"length and new_tokens must be 0 or more, got {length} and {new_tokens}")
    limit = _positions(config)
    if limit is not None and length + new_tokens > limit:
        more = f" and {new_tokens} more to generate" if new_tokens else ""
        raise PromptError(
            f"the prompt is too long: it has {length} tokens{more}, and the model has {limit} positions; "
            "shorten a segment or choose a model with a longer context"
        )


OFFSET_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert")
"""Model types that count positions from padding_idx + 1 on, so that as many are lost."""


def _positions(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_target_positions"):
        limit = getattr(text, name, None)
        if isinstance(limit, int) and limit > 0:
            if getattr(text, "model_type", None) in OFFSET_POSITIONS:
                limit -= text.pad_token_id + 1
            return limit
    return None


def _check(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    segments = tuple(segments)
    if not segments:
        raise PromptError("segments must hold at least one segment, got none")
    for segment in segments:
        if not isinstance(segment, Segment):
            raise PromptError(f"segments must be Segment objects, got {type(segment).__name__}")
    names = [segment.name for segment in segments]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PromptError(f"segment names must differ, got {', '.join(map(repr, twice))} more than once")
    return segments


def _message_role(role: str) -> str:
    return "user" if role == "data" else role


def _join(sources: Sequence[Segment], numbers: Sequence[int], separator: str) -> Message:
    """Join segments to one message, with a separator between those that have text."""
    content = ""
    pieces = []
    for number in numbers:
        text = sources[number].text
        if content and text:
            content += separator
        pieces.append(Piece(number, len(content), len(content) + len(text)))
        content += text
    return Message(content, tuple(pieces))


def _messages(sources: Sequence[Segment]) -> tuple[list[str], list[Message]]:
    """Return the role and the content of every message."""
    roles: list[str] = []
    groups: list[list[int]] = []
    for number, segment in enumerate(sources):
        role = _message_role(segment.role)
        if roles and roles[-1] == role and role != "tool":
            groups[-1].append(number)
        else:
            roles.append(role)
            groups.append([number])
    return roles, [_join(sources, group, SEPARATOR) for group in groups]


def _lay_out(sources: Sequence[Segment], tokenizer: Any, add_generation_prompt: bool) -> Layout:
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__} has no chat "
            "template: set tokenizer.chat_template, or lay the segments out without one by "
            "Prompt.plain(segments, tokenizer)"
        )
    roles, messages = _messages(sources)

    def render(contents: Sequence[str]) -> str:
        chat = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        try:
            text = tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is somebody's program: it may raise anything
            raise PromptError(
                f"the chat template cannot lay out the roles {', '.join(roles)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return str(text)

    return locate(messages, render, [segment.name for segment in sources])


def _write_added_tokens(layout: Layout, encoded: Encoded, tokenizer: Any) -> tuple[Layout, Encoded]:
    """Write the tokens that the tokenizer added before and after the text into the text, by their names."""
    n = len(encoded.ids)
    first = next((i for i in range(n) if not encoded.added[i]), n)
    last = max((i + 1 for i in range(n) if not encoded.added[i]), default=n)
    pieces = [
        tokenizer.convert_ids_to_tokens(number) if encoded.added[i] else ""
        for i, number in enumerate(encoded.ids)
    ]
    before = "".join(pieces[:first])
    text = before + layout.text
    offsets: list[tuple[int, int]] = []
    at = 0
    for i, (start, end) in enumerate(encoded.offsets):
        if i < first:
            offsets.append((at, at + len(pieces[i])))
            at += len(pieces[i])
        elif i < last:
            offsets.append((start + len(before), end + len(before)))
        else:
            offsets.append((len(text), len(text) + len(pieces[i])))
            text += pieces[i]
    spans = tuple(Span(s.segment, s.start + len(before), s.end + len(before)) for s in layout.spans)
    found = [c._replace(start=c.start + len(before)) for c in encoded.control_text]
    return Layout(text, spans), encoded._replace(offsets=offsets, control_text=found)


def _shorten(positions: Sequence[int], most: int = 12) -> str:
    shown = ", ".join(map(str, positions[:most]))
    return shown if len(positions) <= most else f"{shown}, …"
