"""The four steps on a real head: the numbers shown are those of the formula and of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.errors import ArgumentError, ModelError, PromptError, TraceError
from clearhead.look.steps import LONGEST, Steps, steps
from clearhead.models import Prompt, Segment, load
from clearhead.models.loading import LoadedModel

SENTENCE = "The animal didn't cross the road because it was too tired."


def plain(loaded: LoadedModel, text: str = SENTENCE) -> Prompt:
    return Prompt.plain([Segment("text", "user", text)], loaded.tokenizer)


def place(prompt: Prompt, token: str) -> int:
    """The position of the last token that reads like this."""
    return max(i for i, t in enumerate(prompt.tokens) if t.strip() == token)


@pytest.fixture(scope="module")
def found(smollm2: LoadedModel) -> Steps:
    return steps(smollm2, SENTENCE, token="it", on=["animal", "road"])


@pytest.fixture(scope="module")
def weights(eager_weights: Callable[[Prompt], Tensor], smollm2: LoadedModel) -> Tensor:
    return eager_weights(plain(smollm2))


# ---------------------------------------------------------------------- the animal and the road


@pytest.mark.model
def test_layer_13_head_8_puts_three_quarters_of_it_on_animal_and_a_hundredth_on_road(found: Steps) -> None:
    assert (found.layer, found.head) == (13, 8)
    row = {row.word: row.weight for row in found.rows}
    assert row["animal"] == pytest.approx(0.764, abs=0.005)
    assert row["road"] == pytest.approx(0.009, abs=0.002)
    animal = found.words[0]
    assert (animal.word, animal.layer, animal.head) == ("animal", 13, 8)
    assert animal.weight == animal.here == pytest.approx(row["animal"], abs=1e-6)
    assert [(other.word, round(other.weight, 3)) for other in animal.others] == [("road", 0.009)]


@pytest.mark.model
def test_without_being_told_it_finds_the_same_head(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.look.steps.DELETIONS", 0)  # two passes of the model for each word
    got = steps(smollm2, SENTENCE, token="it")
    assert (got.layer, got.head, got.words[0].word) == (13, 8, "animal")
    assert {w.word for w in got.words} == {"The", "animal", "didn't", "cross", "the", "road", "because"}
    telling = got.words[0].weight
    assert all(w.weight <= telling for w in got.words if w.word not in ("The", "because"))


@pytest.mark.model
def test_all_weights_are_those_of_the_eager_model(
    found: Steps, weights: Tensor, smollm2: LoadedModel
) -> None:
    prompt = plain(smollm2)
    it = place(prompt, "it")
    P = weights[:, :, it]  # (L, H, n)
    assert found.position == it
    assert found.total == pytest.approx(1, abs=1e-12)
    assert found.sink == 0
    assert found.error < 1e-5
    assert sum(row.weight for row in found.rows) == pytest.approx(1, abs=1e-9)
    assert found.entropy == pytest.approx(float(torch.special.entr(P[13, 8]).sum()), abs=1e-4)
    for look in found.words:
        column = P[:, :, place(prompt, look.word)]
        assert look.weight == pytest.approx(float(column.max()), abs=1e-5)
        assert look.mean == pytest.approx(float(column.mean()), abs=1e-5)
        assert [w for *_, w in look.heads] == pytest.approx(
            column.flatten().topk(5).values.tolist(), abs=1e-5
        )
        assert all(w == pytest.approx(float(column[layer, head]), abs=1e-5) for layer, head, w in look.heads)
    didnt = next(row for row in found.rows if row.word == "didn't")
    assert didnt.weight == pytest.approx(
        float(P[13, 8, place(prompt, "didn") : place(prompt, "'t") + 1].sum()), abs=1e-5
    )


@pytest.mark.model
def test_the_four_steps_follow_from_the_token_vectors_and_the_model_s_own_matrices(
    found: Steps, eager: Any, smollm2: LoadedModel
) -> None:
    """From hidden states and weight matrices alone: nothing of clearhead's attention is used."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    prompt, it = plain(smollm2), found.position
    with torch.no_grad():
        hidden = eager(**prompt.inputs, output_hidden_states=True).hidden_states[13]
        layer = eager.model.layers[13]
        x = layer.input_layernorm(hidden)
        n, attention = x.shape[1], layer.self_attn
        q = attention.q_proj(x).view(1, n, 9, 64).transpose(1, 2)
        k = attention.k_proj(x).view(1, n, 3, 64).transpose(1, 2)
        v = attention.v_proj(x).view(1, n, 3, 64).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *eager.model.rotary_emb(x, torch.arange(n)[None]))
    assert (found.key_head, found.d, found.scale) == (2, 64, 0.125)
    assert (found.softcap, found.biased) == (None, False)
    q1, k1, v1 = q[0, 8, it].double(), k[0, 2, : it + 1].double(), v[0, 2, : it + 1].double()
    score = k1 @ q1
    weight = (score / 8).softmax(0)
    undivided = score.softmax(0)
    for got, wanted in [
        (found.x, x[0, it]),
        (found.q, q1),
        (found.k, k1[it]),
        (found.v, v1[it]),
        (found.out, weight @ v1),
    ]:
        assert torch.tensor(got) == pytest.approx(wanted.float(), abs=1e-4)
    for row in found.rows:
        if row.word == "didn't":
            continue
        j = row.start
        assert prompt.tokens[j].strip() == row.word
        assert row.score == pytest.approx(float(score[j]), abs=2e-3)
        assert row.scaled == pytest.approx(float(score[j]) / 8, abs=3e-4)
        assert row.weight == pytest.approx(float(weight[j]), abs=1e-4)
        assert row.unscaled_weight == pytest.approx(float(undivided[j]), abs=1e-3)
        assert row.value == pytest.approx(float(v1[j].norm()), abs=1e-4)
        assert row.part == pytest.approx(float((weight[j] * v1[j]).norm()), abs=1e-4)
    assert found.unscaled_entropy == pytest.approx(float(torch.special.entr(undivided).sum()), abs=1e-3)


def eager_without(eager: Any, prompt: Prompt, word: int, head: tuple[int, int] | None) -> Tensor:
    """Next-token probabilities by eager code with a mask of its own, in the one layer or in all, (n, V)."""
    n = len(prompt)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    hidden = causal.clone()
    hidden[:, word] = False
    hidden[word] = causal[word]
    additive = torch.zeros(1, 9, n, n).masked_fill(~causal, torch.finfo().min)
    which = slice(None) if head is None else head[1]
    additive[:, which] = torch.zeros(n, n).masked_fill(~hidden, torch.finfo().min)

    def swap(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": additive}

    layers = [eager.model.layers[head[0]]] if head is not None else eager.model.layers
    hooks = [layer.self_attn.register_forward_pre_hook(swap, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            after: Tensor = eager(**prompt.inputs).logits[0].double().softmax(-1)
    finally:
        for hook in hooks:
            hook.remove()
    return after


@pytest.mark.model
def test_deleting_a_word_moves_what_eager_code_with_its_key_masked_moves(
    found: Steps, eager: Any, smollm2: LoadedModel
) -> None:
    prompt, at = plain(smollm2), found.position
    with torch.no_grad():
        before = eager(**prompt.inputs).logits[0].double().softmax(-1)
    top = before[at].topk(5).indices
    for look in found.words:
        word = place(prompt, look.word)
        for deletion, head in ((look.one_head, (look.layer, look.head)), (look.every_head, None)):
            assert deletion is not None
            after = eager_without(eager, prompt, word, head)
            moved = (before - after).abs().sum(-1) / 2
            assert deletion.moved_at_token == pytest.approx(float(moved[at]), abs=2e-5)
            assert deletion.moved_at_end == pytest.approx(float(moved[-1]), abs=2e-5)
            assert [t.before for t in deletion.next_at_token] == pytest.approx(
                before[at, top].tolist(), abs=2e-5
            )
            assert [t.after for t in deletion.next_at_token] == pytest.approx(
                after[at, top].tolist(), abs=2e-5
            )
            assert deletion.moved_at_token > 0.01
    assert found.words[0].one_head is not None
    assert found.words[0].one_head.where == "layer 13 head 8"
    assert [t.text for t in found.words[0].one_head.next_at_token][:2] == [" was", " had"]


@pytest.mark.model
def test_the_result_is_json_as_it_is(found: Steps) -> None:
    plain_values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain_values["words"][0]["others"] == [{"word": "road", "weight": found.words[0].others[0].weight}]


# ---------------------------------------------------------------------- words


@pytest.mark.model
def test_the_same_word_twice_is_two_rows_and_the_last_is_meant(small: LoadedModel) -> None:
    got = steps(small, "A cat saw a cat and the cat ran", token="ran", on=["cat", "cat"], layer=1)
    assert [(row.word, row.start) for row in got.rows if row.word == "cat"] == [
        ("cat", 1),
        ("cat", 4),
        ("cat", 7),
    ]
    assert [(look.word, look.start) for look in got.words] == [("cat", 7)]
    assert got.layer == 1


@pytest.mark.model
def test_an_emoji_is_one_word_with_all_its_tokens(small: LoadedModel, small_weights: Any) -> None:
    text = "I like 👩‍🚀 and 猫 much"
    prompt = plain(small, text)
    got = steps(small, text, token="much", on=["👩‍🚀", "猫"], layer=1, head=4)
    P = small_weights(prompt)[1, 4, -1]
    low = min(i for i, t in enumerate(prompt.tokens) if "👩" in t)
    high = place(prompt, "and")
    assert high - low > 3
    assert got.words[0].here == pytest.approx(float(P[low:high].sum()), abs=1e-5)
    cat = next(i for i, t in enumerate(prompt.tokens) if "猫" in t)
    assert got.words[1].here == pytest.approx(float(P[cat : place(prompt, "much")].sum()), abs=1e-5)


def test_where_nobody_says_which_words_only_some_deletions_are_tried_and_a_note_says_so(
    tiny: Callable[[str], LoadedModel],
) -> None:
    got = steps(tiny("llama"), "the animal didn't cross road because it was too tired . dog", token="dog")
    tried = [look for look in got.words if look.one_head]
    assert (len(tried), len(got.words)) == (8, 11)
    assert tried == list(got.words[:8])
    assert "deletion was tried for 8 of 11 words: name others by --on" in got.notes


@pytest.mark.model
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"token": "zebra"},
            r"token must be a word of the text, got 'zebra'; there are: The, animal, didn't",
        ),
        ({"on": ["zebra"]}, r"on must be a word that the token can see, got 'zebra'; there are: The"),
        ({"on": ["tired"]}, r"on must be a word that the token can see, got 'tired'"),
        ({"on": ["it"]}, r"on must be a word that the token can see, got 'it'"),
        ({"layer": 2}, r"layer must lie in 0\.\.1, got 2"),
        ({"layer": -1}, r"layer must lie in 0\.\.1, got -1"),
        ({"head": 9}, r"head must lie in 0\.\.8, got 9"),
        ({"token": "The"}, "token must be a word that can see others; 'The' sees only itself"),
        ({"text": " \n"}, "text must not be empty"),
        ({"text": "word " * (LONGEST + 1)}, "text must have at most 1000 tokens, got"),
    ],
)
def test_bad_arguments_are_named(small: LoadedModel, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        steps(small, **({"text": SENTENCE, "token": "it"} | change))


# ---------------------------------------------------------------------- other models

TINY = "the animal didn't cross the road because it was too tired ."


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gemma3", "gpt-oss"])
def test_scale_softcap_and_sinks_are_those_of_the_model(
    tiny: Callable[[str], LoadedModel], name: str
) -> None:
    loaded = tiny(name)
    for layer in (0, 1):
        got = steps(loaded, TINY, token="it", on=["the", "because"], layer=layer, head=2)
        scale = {"gemma2": 13**-0.5, "gemma3": 13**-0.5, "gpt2": 8**-0.5 / (layer + 1)}.get(name, 8**-0.5)
        assert got.scale == pytest.approx(scale)
        assert got.softcap == (2.0 if name == "gemma2" else None)
        assert got.total + got.sink == pytest.approx(1)
        assert (got.sink > 1e-4) == (name == "gpt-oss")
        assert got.error < 1e-5
        for row in got.rows:
            capped = row.score * scale
            if name == "gemma2":
                capped = 2 * float(torch.tensor(capped / 2).tanh())
            assert row.scaled == pytest.approx(capped, abs=1e-6)
        eager = loaded.model
        eager.set_attn_implementation("eager")
        with torch.no_grad():
            P = eager(**plain(loaded, TINY).inputs, output_attentions=True).attentions[layer][0, 2]
        eager.set_attn_implementation("clearhead")
        for row in got.rows:
            assert row.weight == pytest.approx(float(P[got.position, row.start]), abs=1e-5)


def test_an_encoder_looks_both_ways_and_has_no_next_token() -> None:
    loaded = load("minilm")
    got = steps(loaded, SENTENCE, token="it", on=["tired", "animal"])
    assert [look.word for look in got.words] == ["tired", "animal"]
    assert all(look.one_head is None and look.every_head is None for look in got.words)
    assert "this model has no next-token distribution to compare" in got.notes
    assert got.total == pytest.approx(1)
    assert got.rows[0].word == "[CLS]"


def test_a_forward_that_keeps_all_logits_gives_the_same_answer(
    tiny: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny("llama")
    for text in (TINY, "the animal"):
        wanted = steps(loaded, text, token="animal", on=["the"])
        whole = loaded.model.forward

        def forward(input_ids: Tensor, attention_mask: Tensor, whole: Any = whole) -> Any:
            return whole(input_ids=input_ids, attention_mask=attention_mask)

        with monkeypatch.context() as patch:
            patch.setattr(loaded.model, "forward", forward)
            got = steps(loaded, text, token="animal", on=["the"])
        for a, b in (
            (wanted.words[0].one_head, got.words[0].one_head),
            (wanted.words[0].every_head, got.words[0].every_head),
        ):
            assert a is not None
            assert b is not None
            assert a.moved_at_token == pytest.approx(b.moved_at_token, abs=1e-6)
            assert a.moved_at_end == pytest.approx(b.moved_at_end, abs=1e-6)


def test_a_masked_language_model_has_no_next_token(tiny: Callable[[str], LoadedModel]) -> None:
    got = steps(tiny("bert"), TINY, token="it", on=["animal"])
    assert got.words[0].one_head is None


def test_an_encoder_decoder_is_refused_with_the_way_out(tiny: Callable[[str], LoadedModel]) -> None:
    with pytest.raises(ModelError, match=r"steps takes a model that reads one text .* is an encoder-decoder"):
        steps(tiny("t5"), TINY, token="it")


def test_layers_that_share_a_module_are_refused(tiny: Callable[[str], LoadedModel]) -> None:
    with pytest.raises(TraceError, match="models whose layers share their weights cannot be observed"):
        steps(tiny("albert"), TINY, token="it")


def test_steps_that_do_not_give_the_model_s_weights_are_not_shown(
    tiny: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead.look import steps as module

    monkeypatch.setattr(module, "scaled", lambda raw, scale, softcap, bias: raw * scale * 1.5)
    with pytest.raises(ModelError, match="the four steps give weights that differ by"):
        steps(tiny("llama"), TINY, token="it")


def test_a_text_beyond_the_positions_is_refused(tiny: Callable[[str], LoadedModel]) -> None:
    with pytest.raises(PromptError, match="the model has 64 positions"):
        steps(tiny("gpt2"), "road " * 65, token="road")
