"""A mask function of transformers becomes a description that hides exactly the same, or dense booleans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as mu

from clearhead.mask import Mask
from clearhead.models.carrier import CarriedMask, mask_function
from clearhead.models.decode import Frame, decode

from .families import LLM

CAUSAL, ALL = mu.causal_mask_function, mu.bidirectional_mask_function
SQUARE = Frame(8, 8, 0, 0)
ZERO = torch.zeros(2, dtype=torch.long)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
IMAGES = torch.tensor([[-1, 0, 0, -1, 1, 1, 1, -1], [-1, -1, 0, 0, 0, -1, -1, -1]])


def packed(function: Callable[..., Any], positions: Tensor = POSITIONS) -> Callable[..., Any]:
    """`function` in packed documents, put together as transformers does."""
    remapped = mu.remap_positions_for_packed_sequence(function, positions)
    return mu.and_masks(remapped, mu.packed_sequence_mask_function(DOCUMENTS))


def frame(**fields: Any) -> Mask:
    """A mask in the frame SQUARE."""
    return Mask(offset=0, key_offset=0, **fields)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (CAUSAL, frame(causal=True)),
        (ALL, frame()),
        (mu.sliding_window_causal_mask_function(3), frame(causal=True, window=3)),
        (mu.sliding_window_overlay(3), frame(window=(2, None))),
        (mu.sliding_window_bidirectional_mask_function(3), frame(window=(3, 3))),
        (mu.chunked_causal_mask_function(3, ZERO), frame(causal=True, chunk=3, start=0)),
        (
            mu.chunked_causal_mask_function(3, torch.tensor([0, 2])),
            frame(causal=True, chunk=3, start=torch.tensor([0, 2])),
        ),
        (packed(CAUSAL), frame(causal=True, documents=DOCUMENTS)),
        (
            packed(mu.sliding_window_causal_mask_function(2)),
            frame(causal=True, window=2, documents=DOCUMENTS),
        ),
        (
            packed(mu.chunked_causal_mask_function(3, ZERO)),
            frame(causal=True, chunk=3, documents=DOCUMENTS),
        ),
        (mu.or_masks(CAUSAL, mu.blockwise_overlay(IMAGES)), frame(causal=True, blocks=IMAGES)),
        (mu.or_masks(ALL, mu.blockwise_overlay(IMAGES)), frame()),
        (
            mu.and_masks(mu.or_masks(CAUSAL, mu.blockwise_overlay(IMAGES)), mu.sliding_window_overlay(2)),
            frame(causal=True, blocks=IMAGES, window=(1, None)),
        ),
        (
            mu.or_masks(mu.sliding_window_causal_mask_function(3), mu.blockwise_overlay(IMAGES)),
            frame(causal=True, blocks=IMAGES, window=(2, None)),
        ),
    ],
)
def test_what_transformers_builds_is_read_back(function: Callable[..., Any], wanted: Mask) -> None:
    assert decode(function, SQUARE) == wanted


def stranger(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A user's own rule."""
    return (q + k) % 3 != 1


LATE = POSITIONS + 2


@pytest.mark.parametrize(
    "function",
    [
        stranger,
        mu.and_masks(CAUSAL, stranger),
        mu.or_masks(CAUSAL, stranger),
        mu.or_masks(CAUSAL, mu.sliding_window_bidirectional_overlay(1)),
        mu.or_masks(mu.sliding_window_causal_mask_function(2), mu.blockwise_overlay(IMAGES)),  # 3 > 2 tokens
        mu.or_masks(mu.chunked_causal_mask_function(3, ZERO), mu.blockwise_overlay(IMAGES)),
        mu.remap_positions_for_packed_sequence(mu.sliding_window_causal_mask_function(2), POSITIONS),
        packed(mu.chunked_causal_mask_function(3, ZERO), LATE),  # chunks would count from position 2
        packed(mu.sliding_window_causal_mask_function(2), POSITIONS * 2),
        mu.sliding_window_overlay(0),
    ],
)
def test_what_cannot_be_said_goes_dense_and_is_exact(function: Callable[..., Any]) -> None:
    assert decode(function, SQUARE) is None
    sizes = {"batch_size": 2, "q_length": 8, "kv_length": 8, "mask_function": function}
    carried = mask_function(**sizes)
    assert carried.mask.dense is not None
    assert torch.equal(
        carried.mask.to_dense(8, batch=2).expand(2, 1, 8, 8),
        mu.sdpa_mask(**sizes, allow_is_causal_skip=False),
    )


def test_a_stranger_with_a_known_name_is_still_a_stranger() -> None:
    def causal_mask_function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < q

    causal_mask_function.__qualname__ = "causal_mask_function"
    assert decode(causal_mask_function, SQUARE) is None


def test_positions_that_do_not_start_at_zero_matter_only_to_chunks() -> None:
    assert decode(packed(mu.sliding_window_causal_mask_function(2), LATE), SQUARE) is not None


def test_numbers_that_end_before_the_queries_are_not_guessed() -> None:
    blocks = mu.or_masks(CAUSAL, mu.blockwise_overlay(IMAGES))
    assert decode(blocks, Frame(1, 9, 8, 0)) is None


# ---------------------------------------------------------------------- any frame, any combination


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    """A prefill, a step with a cache, a static buffer longer than what is written, a sliding cache."""
    seen, q = draw(st.integers(0, 6)), draw(st.integers(1, 6))
    dropped = draw(st.integers(0, seen))
    spare = draw(st.integers(0, 3)) if not dropped else 0
    return Frame(q, seen - dropped + q + spare, seen, dropped)


@st.composite
def functions(draw: st.DrawFn) -> Callable[..., Any]:
    """Conjunctions and unions of transformers' parts over up to 16 positions and two rows."""
    row = st.lists(st.integers(-1, 2), min_size=16, max_size=16)
    blocks = mu.blockwise_overlay(torch.tensor([draw(row), draw(row)]))
    window, chunk = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    padding = torch.tensor([draw(st.integers(0, 4)), draw(st.integers(0, 4))])
    base = draw(
        st.sampled_from(
            [
                CAUSAL,
                ALL,
                mu.sliding_window_causal_mask_function(window),
                mu.sliding_window_bidirectional_mask_function(window),
                mu.chunked_causal_mask_function(chunk, padding),
                mu.and_masks(CAUSAL, stranger),
            ]
        )
    )
    if draw(st.booleans()):
        base = mu.or_masks(base, blocks)
    if draw(st.booleans()):
        base = mu.and_masks(base, mu.sliding_window_overlay(draw(st.integers(1, 8))))
    return base


@settings(max_examples=150, deadline=None, print_blob=True)
@given(function=functions(), where=frames(), data=st.data())
def test_any_mask_function_hides_what_sdpa_mask_hides(
    function: Callable[..., Any], where: Frame, data: st.DataObject
) -> None:
    total = where.q_offset + where.q_length
    attention_mask = None
    if data.draw(st.booleans()):
        row = st.lists(st.booleans(), min_size=total, max_size=total)
        attention_mask = torch.tensor([data.draw(row), data.draw(row)])
    static = data.draw(st.booleans())
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "q_length": where.q_length,
        "kv_length": where.kv_length,
        "q_offset": torch.tensor(where.q_offset) if static else where.q_offset,
        "kv_offset": where.kv_offset,
        "mask_function": function,
        "attention_mask": attention_mask,
    }
    carried = mask_function(**arguments, allow_is_bidirectional_skip=True, local_size=3, dtype=torch.float32)
    wanted = mu.sdpa_mask(**arguments, allow_is_causal_skip=False)
    got = carried.mask.to_dense(where.q_length, where.kv_length, batch=2)
    assert torch.equal(got.expand_as(wanted), wanted)


# ---------------------------------------------------------------------- padding, offsets, the carrier


def carried(**changes: Any) -> Mask:
    """What our mask function makes of a causal mask over 8 tokens in two rows."""
    arguments = {"batch_size": 2, "q_length": 8, "kv_length": 8, "mask_function": CAUSAL}
    return mask_function(**{**arguments, **changes}).mask


def test_a_padding_mask_that_hides_nothing_is_no_padding() -> None:
    assert carried(attention_mask=torch.ones(2, 8, dtype=torch.bool)).padding is None


def test_the_unwritten_end_of_a_static_buffer_is_no_padding_under_a_causal_mask() -> None:
    ones = torch.ones(2, 8, dtype=torch.bool)
    assert carried(kv_length=20, attention_mask=ones).padding is None
    both_ways = carried(kv_length=20, attention_mask=ones, mask_function=ALL).padding
    assert both_ways is not None
    assert both_ways.sum(1).tolist() == [8, 8]


def test_padding_is_cut_to_the_keys_that_a_sliding_cache_holds() -> None:
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :6] = False
    kept = carried(q_length=1, kv_length=8, q_offset=11, kv_offset=4, attention_mask=mask).padding
    assert kept is not None
    assert kept.tolist() == mask[:, 4:].tolist()


def test_an_offset_that_is_changed_later_in_place_was_taken_at_once() -> None:
    seen = torch.tensor(3)
    mask = carried(q_length=1, kv_length=8, q_offset=seen)
    seen.add_(1)
    assert mask.offset == 3


def test_a_causal_mask_is_never_none_and_never_quadratic() -> None:
    long = mask_function(batch_size=1, q_length=10**6, kv_length=10**6, mask_function=CAUSAL)
    assert long.mask == Mask(causal=True, offset=0)
    assert long.shape == (1, 1, 10**6, 10**6)


def test_the_carrier_looks_like_a_mask_that_models_pass_on() -> None:
    mask = mask_function(batch_size=2, q_length=3, kv_length=3, mask_function=CAUSAL)
    assert isinstance(mask, CarriedMask)
    assert (mask.ndim, mask.dim(), len(mask.shape), mask.size(), mask.size(-1)) == (4, 4, 4, (2, 1, 3, 3), 3)
    assert mask.to("cpu") is mask.contiguous() is mask


def test_a_user_s_rule_in_create_causal_mask_is_exact() -> None:
    masks = {}
    for name in ("clearhead", "sdpa"):
        config = tf.LlamaConfig(**LLM, attn_implementation=name)
        masks[name] = mu.create_causal_mask(
            config,
            torch.zeros(2, 8, 32),
            None,
            None,
            and_mask_function=lambda b, h, q, k: (q - k) % 2 == 0,
        )
    assert torch.equal(masks["clearhead"].mask.to_dense(8, batch=2), masks["sdpa"])
