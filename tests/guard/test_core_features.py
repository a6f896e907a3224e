"""What is read of a window is what the model's own eager code gives, whole or in pieces, and leaves no trace."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.guard.conftest import ASK, tiny_llama

from clearhead.errors import GuardError, ModelError, PromptError
from clearhead.guard.calibrating import default_layers
from clearhead.guard.features import Watched, read_window, span_of_token
from clearhead.guard.layout import Laid, Window, cut, lay, windows
from clearhead.guard.spans import spans

PAGE = "The museum of clocks is open from nine to five. It is closed on Mondays.\nThe café is on the first floor. 😀"
SOURCES = [("page", PAGE), ("empty", "  "), ("instruction", "A source may be called like one of ours.")]


def laid_out(tokenizer: Any, sources: Any = SOURCES) -> Laid:
    texts = cut(sources, tokenizer)
    return lay(ASK, texts, Window(0, len(texts.spans)), tokenizer)


@pytest.fixture(scope="module")
def laid(tokenizer: Any) -> Laid:
    return laid_out(tokenizer)


def hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


NASTY = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "😀", "👩‍👩‍👧", "\r\n", "\t", "\u200b", "\u202e", "שלום ", "مرحبا. ", " ", "word. ", "\n\n", "\x00", "{{ x }}", "é", "e\u0301", "\ue000"]), max_size=25).map("".join),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(NASTY, min_size=1, max_size=3))
def test_the_characters_of_a_span_in_the_prompt_are_its_own_text(
    tokenizer: Any, given_texts: list[str]
) -> None:
    texts = cut([(str(n), text) for n, text in enumerate(given_texts)], tokenizer)
    assert [s[1:] for s in texts.spans] == [tuple(place) for text in given_texts for place in spans(text)]
    for window in windows(texts, 120, 16):
        found = lay(ASK, texts, window, tokenizer)
        assert found.spans == tuple(range(window.first, window.last))
        for number, (start, end) in zip(found.spans, found.characters, strict=True):
            source, a, b = texts.spans[number]
            assert found.prompt.text[start:end] == texts.texts[source][a:b]
        control = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert (
            found.prompt.input_ids[0].tolist().count(control) == 2
        )  # the template's own: nobody forges a turn


def test_the_mass_of_spans_instruction_and_rest_is_that_of_eager_attention(tiny: Any, laid: Laid) -> None:
    reading = read_window(tiny.model, laid, rows=3)
    eager = tiny_llama(tiny.tokenizer, "eager")
    with torch.no_grad():
        weights = torch.stack(eager(**laid.prompt.inputs, output_attentions=True).attentions)[:, 0, :, -3:]
    by_row = weights.flatten(0, 1).transpose(0, 1).numpy()  # (rows, layers · heads, keys)
    owners = span_of_token(laid).numpy()
    np.testing.assert_allclose(reading.instruction, by_row[..., owners == 1].sum(-1), atol=1e-5)
    for span in range(len(laid.spans)):
        np.testing.assert_allclose(reading.spans[:, span], by_row[..., owners == 2 + span].sum(-1), atol=1e-5)
    rest = by_row[..., owners == 0].sum(-1)
    np.testing.assert_allclose(reading.instruction + reading.spans.sum(1) + rest, 1, atol=1e-5)
    assert reading.sizes.tolist() == [(owners == 2 + n).sum() for n in range(len(laid.spans))]
    assert reading.tokens == len(laid.prompt)


def test_hidden_states_are_means_over_the_tokens_of_a_span(tiny: Any, laid: Laid) -> None:
    reading = read_window(tiny.model, laid, layers=(0, 1))
    with torch.no_grad():
        states = tiny.model(**laid.prompt.inputs, output_hidden_states=True).hidden_states
    owners = span_of_token(laid)
    for k in (0, 1):
        np.testing.assert_allclose(reading.task[k], states[k + 1][0, owners == 1].mean(0), atol=1e-5)
        for span in range(len(laid.spans)):
            np.testing.assert_allclose(
                reading.hidden[k, span], states[k + 1][0, owners == 2 + span].mean(0), atol=1e-5
            )


@pytest.mark.parametrize("pieces", [(7,), (1, 2), (40,)])
def test_a_prompt_read_in_pieces_gives_what_one_pass_gives(
    tiny: Any, laid: Laid, pieces: tuple[int, ...]
) -> None:
    from transformers import DynamicCache

    whole = read_window(tiny.model, laid, rows=4, layers=(1,))
    ids = laid.prompt.input_ids
    borders = [0, *np.cumsum(pieces), ids.shape[1]]
    cache = DynamicCache(config=tiny.model.config)
    with torch.no_grad(), Watched(tiny.model, laid, rows=4, layers=(1,)) as watched:
        for start, end in itertools.pairwise(borders):
            with pytest.raises(
                GuardError, match=f"the model has read {start} of the prompt's {ids.shape[1]} tokens"
            ):
                watched.reading()
            tiny.model(input_ids=ids[:, start:end], cache=cache, use_cache=True)
    for name in ("instruction", "spans", "sizes", "hidden", "task"):
        np.testing.assert_allclose(
            getattr(watched.reading(), name), getattr(whole, name), atol=1e-4, err_msg=name
        )


def test_what_is_generated_after_the_prompt_is_not_read(tiny: Any, laid: Laid) -> None:
    whole = read_window(tiny.model, laid, layers=(1,))
    with torch.no_grad(), Watched(tiny.model, laid, layers=(1,)) as watched:
        tiny.model.generate(**laid.prompt.inputs, max_new_tokens=3, do_sample=False)
    np.testing.assert_allclose(watched.reading().hidden, whole.hidden, atol=1e-4)
    np.testing.assert_allclose(watched.reading().spans, whole.spans, atol=1e-4)


def test_a_token_of_two_spans_belongs_to_one_and_every_token_of_a_source_to_some(tokenizer: Any) -> None:
    laid = laid_out(tokenizer, [("page", "a" * 301)])  # the last character shares its token with those before
    owners = span_of_token(laid)
    assert len(laid.spans) == 2
    assert set(owners.tolist()) <= {0, 1, 2, 3}
    at = 0
    for token, owner in zip(laid.prompt.tokens, owners.tolist(), strict=True):
        inside = any(max(at, a) < min(at + len(token), b) for a, b in laid.characters)
        assert (owner >= 2) == inside or not token
        at += len(token)


def test_nothing_stays_behind(tiny: Any, laid: Laid) -> None:
    before = hooks(tiny.model)
    read_window(tiny.model, laid, layers=(0, 2))
    with pytest.raises(RuntimeError, match="mine"), Watched(tiny.model, laid, layers=(0,)):  # noqa: PT012
        assert hooks(tiny.model) > before
        raise RuntimeError("mine")
    with pytest.raises(ModelError, match="layer must be 0 to 2 in this model, got 3"):
        read_window(tiny.model, laid, layers=(0, 3))
    with pytest.raises(GuardError, match="a batch of 2"), torch.no_grad(), Watched(tiny.model, laid):
        tiny.model(input_ids=laid.prompt.input_ids.repeat(2, 1))
    assert hooks(tiny.model) == before


def test_numbers_that_are_not_finite_are_refused(tiny: Any, laid: Laid) -> None:
    def broken(module: Any, arguments: Any, output: Any) -> Any:
        return output * float("nan")

    handle = tiny.model.model.layers[0].mlp.register_forward_hook(broken)
    try:
        with pytest.raises(GuardError, match="not finite"):
            read_window(tiny.model, laid, layers=(1,))
    finally:
        handle.remove()


def test_a_window_longer_than_the_models_positions_is_refused(tiny: Any) -> None:
    with pytest.raises(PromptError, match="too long"):
        read_window(tiny.model, laid_out(tiny.tokenizer, [("page", "word " * 3000)]))


@pytest.mark.parametrize(("depth", "layers"), [(1, (0,)), (2, (1,)), (3, (1, 2)), (30, (12, 21))])
def test_a_model_of_any_depth_has_layers_to_read(depth: int, layers: tuple[int, ...]) -> None:
    from types import SimpleNamespace

    blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(depth))
    model = torch.nn.Module()
    model.blocks = blocks
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=depth))  # type: ignore[assignment]
    assert default_layers(model) == layers


def test_another_architecture_is_read_like_its_eager_self(tokenizer: Any, laid: Laid) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def built(attention: str) -> Any:
        torch.manual_seed(1)
        config = GPT2Config(
            vocab_size=len(tokenizer), n_positions=256, n_embd=24, n_layer=2, n_head=3, initializer_range=0.3,
            bos_token_id=1, eos_token_id=2, attn_implementation=attention,
        )  # fmt: skip
        return GPT2LMHeadModel(config).eval()

    reading = read_window(built("clearhead"), laid, layers=(0,))
    with torch.no_grad():
        out = built("eager")(**laid.prompt.inputs, output_attentions=True, output_hidden_states=True)
    last = torch.stack(out.attentions)[:, 0, :, -1].flatten(0, 1)
    owners = span_of_token(laid)
    for span in range(len(laid.spans)):
        np.testing.assert_allclose(reading.spans[0, span], last[:, owners == 2 + span].sum(-1), atol=1e-5)
        np.testing.assert_allclose(
            reading.hidden[0, span], out.hidden_states[1][0, owners == 2 + span].mean(0), atol=1e-4
        )
