"""Files and chats that come from outside are read as data, and refused with a reason."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import PromptError
from clearhead.models import read_chat, read_text
from clearhead.models.chat import decode
from clearhead.models.prompt import ROLES


def test_text_is_read_as_it_stands(tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_bytes("\ufeffשלום 😀\r\n<|im_end|>\x00".encode())
    assert read_text(page) == "שלום 😀\r\n<|im_end|>\x00"
    assert read_text(str(page)) == read_text(page)
    page.write_bytes(b"")
    assert read_text(page) == ""


def test_files_that_are_no_text(tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(PromptError, match=r"page\.txt is not UTF-8 text: byte 3 is 0xe9 \(invalid"):
        read_text(page)
    with pytest.raises(PromptError, match=r"missing\.txt cannot be read: No such file"):
        read_text(tmp_path / "missing.txt")
    with pytest.raises(PromptError, match=r"^\S+ is a folder: a text file is needed$"):
        read_text(tmp_path)
    with pytest.raises(PromptError, match="cannot be read: embedded null"):
        read_text("a\0b")
    with pytest.raises(PromptError, match=r"page\.txt is too large: at most 4 bytes"):
        read_text(page, largest=4)
    page.chmod(0)
    if not os.access(page, os.R_OK):  # root reads everything
        with pytest.raises(PromptError, match="cannot be read: Permission denied"):
            read_text(page)
    with pytest.raises(PromptError, match=r"standard input is not UTF-8 text: byte 0 is 0xff"):
        decode(b"\xff\xfe", "standard input")


CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "text", "text": "it up."}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    {"role": "tool", "content": "<script>", "tool_call_id": "1", "name": "search"},
    {"role": "user", "content": "So?"},
]


def test_a_chat_becomes_named_segments(tmp_path: Path) -> None:
    segments = read_chat(json.dumps(CHAT))
    assert [(s.name, s.role, s.text, s.trusted) for s in segments] == [
        ("system", "system", "Be kind.", True),
        ("user 1", "user", "Look it up.", True),
        ("assistant", "assistant", "", True),
        ("tool", "tool", "<script>", False),
        ("user 2", "user", "So?", True),
    ]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(CHAT), encoding="utf-8")
    assert read_chat(file) == segments
    assert read_chat('[{"role": "developer", "content": "x"}]')[0].role == "system"


def test_a_text_is_never_taken_for_a_path(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(CHAT), encoding="utf-8")
    with pytest.raises(PromptError, match="the chat is not JSON"):
        read_chat(str(file))


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ("[", r"the chat is not JSON: .* at line 1, column"),
        ("", "the chat is not JSON: Expecting value at line 1, column 1"),
        ("[" * 100_000, "the chat is JSON that cannot be read: "),
        ("9" * 5000, "the chat is JSON that cannot be read: "),
        ({"role": "user"}, r"must be a JSON list of messages, .* got an object"),
        ([], "at least one message, got an empty list"),
        (["hello"], "message 0 must be an object with role and content, got a text"),
        ([CHAT[0], {"content": "x"}], "message 1 has no role: it must be one of system, user"),
        (
            [CHAT[0], {"role": "boss", "content": "x"}],
            "message 1: role must be one of system, user, assistant, tool, data, got 'boss'",
        ),
        ([{"role": ["user"], "content": "x"}], r"message 0: role must be one of .*, got \['user'\]"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "user", "content": 3}], "message 0: content must be a text or a list .* got a number"),
        ([{"role": "user", "content": True}], "got true or false"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "message 0: part 0 of content .* got type 'image'",
        ),
        ([{"role": "user", "content": ["x"]}], "part 0 of content must be .* got a text"),
        ('[{"role": "user", "content": "\\ud83d"}]', "holds half a character"),
    ],
)
def test_chats_that_are_refused(chat: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read_chat(chat if isinstance(chat, str) else json.dumps(chat))


@given(
    st.lists(st.tuples(st.sampled_from(ROLES), st.text(st.characters(exclude_categories=["Cs"]))), min_size=1)
)
def test_names_differ_and_texts_survive(chat: list[tuple[str, str]]) -> None:
    segments = read_chat(json.dumps([{"role": role, "content": text} for role, text in chat]))
    assert [(s.role, s.text) for s in segments] == chat
    assert len({s.name for s in segments}) == len(chat)
    assert all(s.trusted == (s.role not in ("tool", "data")) for s in segments)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["role", "user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_read_or_refused(value: Any) -> None:
    try:
        segments = read_chat(json.dumps(value))
    except PromptError:
        return
    assert segments
    assert len(segments) == len(value)
