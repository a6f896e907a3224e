"""A chat history, as several clients write it, becomes an instruction and the texts that tools brought."""

from __future__ import annotations

from typing import Any

import pytest

from clearhead.errors import ArgumentError
from clearhead.guard.messages import split_messages

CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "fetch", "arguments": "{}"}}]}  # fmt: skip


def test_tool_results_are_called_by_the_tool_that_was_asked() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Use metres."},
        {"role": "user", "content": "Old question?"},
        {"role": "user", "content": [{"type": "text", "text": "How high"}, "is it?"]},
        CALL,
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "828"}, {"type": "text", "text": "m"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "again"},
        {"role": "tool", "tool_call_id": "unknown", "content": "who?"},
        {"role": "function", "name": "old_style", "content": "x"},
        {"role": "data", "content": None},
    ]
    instruction, sources = split_messages(messages)
    assert instruction == "Be brief.\n\nUse metres.\n\nHow high\nis it?"
    assert sources == {"fetch": "828\nm", "fetch 2": "again", "tool": "who?", "old_style": "x", "data": ""}


def test_only_the_tools_that_were_named_are_taken() -> None:
    messages = [
        CALL,
        {"role": "tool", "tool_call_id": "c1", "content": "a"},
        {"role": "tool", "name": "other", "content": "b"},
    ]
    assert split_messages(messages, ["fetch"]) == (None, {"fetch": "a"})
    assert split_messages(messages, []) == (None, {})


def test_no_text_is_lost_where_names_collide() -> None:
    names = ["a", "a 2", "a", "a", "a 2"]
    _, sources = split_messages([{"role": "tool", "name": n, "content": str(i)} for i, n in enumerate(names)])
    assert list(sources.values()) == ["0", "1", "2", "3", "4"]
    _, many = split_messages([{"role": "tool", "content": str(i)} for i in range(20_000)])
    assert len(many) == 20_000


@pytest.mark.parametrize(
    "content", [None, 3, [{"type": "refusal", "refusal": "No."}], [{"type": "tool_use"}]]
)
def test_what_the_model_said_itself_is_not_looked_at(content: Any) -> None:
    assert split_messages([{"role": "assistant", "content": content}]) == (None, {})


def test_calls_of_odd_shapes_name_nothing() -> None:
    for calls in (
        None,
        "x",
        3,
        [3],
        [{}],
        [{"id": ["a"], "function": {"name": "f"}}],
        [{"id": "c", "function": {"name": 3}}],
    ):
        messages = [
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": ["a"], "content": "t"},
        ]
        assert split_messages(messages) == (None, {"tool": "t"})


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("text", "messages must be a list of messages, got str"),
        ({"role": "user"}, "messages must be a list of messages, got dict"),
        (None, "messages must be a list of messages, got NoneType"),
        ([3], "message 0 must be a mapping with a role, got 3"),
        ([{"content": "a"}], "message 0 must be a mapping with a role"),
        ([{"role": 3}], "message 0 must be a mapping with a role"),
        ([{"role": "tool", "content": 3}], "message 0: content must be text or text parts, got int"),
        ([{"role": "tool", "content": [{"type": "image_url"}]}], "message 0: content must be text, got a part"),
        ([{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}], "message 0: content must be text, got a part"),
    ],
)  # fmt: skip
def test_messages_of_other_shapes_are_refused(messages: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        split_messages(messages)


def test_one_tool_is_no_list_of_tools() -> None:
    with pytest.raises(ArgumentError, match="tools must be a list of names, got 'fetch'"):
        split_messages([], "fetch")


def test_a_chat_is_scanned_as_its_parts_are(blind: Any) -> None:
    messages = [
        {"role": "user", "content": "When?"},
        CALL,
        {"role": "tool", "tool_call_id": "c1", "content": "Open from nine to five."},
    ]
    assert blind.scan_chat(messages).score == blind.scan("When?", {"fetch": "Open from nine to five."}).score
    assert blind.scan_chat(messages).sources[0].name == "fetch"
    assert blind.scan_chat([]).notes == ("no source has any text",)
