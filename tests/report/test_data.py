"""What travels in a page: the weights come back, the numbers are JSON, what does not fit is refused."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ArgumentError
from clearhead.report.html import render
from clearhead.report.maps import STEPS, pack_maps
from clearhead.report.payload import payload

from .looks import small_look


def unpack(text: str, shape: tuple[int, ...]) -> np.ndarray:
    low, high = (
        np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(2, -1).astype(np.float64)
    )
    return (((low + 256 * high) / STEPS) ** 2).reshape(shape)


def test_packed_weights_come_back_within_the_stated_error():
    look = small_look()
    for q, packed in enumerate(pack_maps(look, budget=10**9)):
        true = look.maps[:, :, q].astype(np.float64)
        back = unpack(packed.base64, true.shape)
        assert packed.position == look.map_queries[q]
        assert np.all(np.abs(back - true) <= np.sqrt(true) / STEPS + 1e-9)
        assert np.abs(back - true).max() < 1.6e-5
        large = true > 2.4e-6
        assert np.all(np.abs(back - true)[large] <= 0.01 * true[large])


def test_weights_that_are_no_share_are_kept_in_bounds():
    look = small_look()
    maps = look.maps.copy()
    maps[0, 0, 0, :3] = [np.nan, -0.5, 1.5]
    packed = pack_maps(replace(look, maps=maps), budget=10**9)[0]
    assert unpack(packed.base64, maps[:, :, 0].shape)[0, 0, :3].tolist() == [0.0, 0.0, 1.0]


def test_a_small_budget_keeps_the_latest_queries():
    look = small_look()
    sizes = [len(p.base64) + 64 for p in pack_maps(look, budget=10**9)]
    assert [p.position for p in pack_maps(look, budget=sizes[2])] == [look.map_queries[2]]
    assert [p.position for p in pack_maps(look, budget=sizes[1] + sizes[2])] == list(look.map_queries[1:])
    assert pack_maps(look, budget=sizes[2] - 1) == []


def test_queries_out_of_order_come_sorted_with_their_own_weights():
    look = small_look()
    turned = replace(look, map_queries=look.map_queries[::-1], maps=look.maps[:, :, ::-1])
    assert pack_maps(turned, budget=10**9) == pack_maps(look, budget=10**9)


def test_numbers_that_are_not_finite_become_null():
    look = small_look()
    mass = look.mass.copy()
    mass[0, 0, 0] = np.nan
    source = replace(look.sources[1], per_token=float("inf"))
    data = payload(replace(look, mass=mass, sources=(look.sources[0], source, *look.sources[2:])))
    assert data["mass"][0] is None
    assert data["sources"][1]["perToken"] is None
    json.dumps(data, allow_nan=False)


def test_the_grid_of_each_source_lies_in_one_piece():
    look = small_look()
    layers, heads, sources = look.mass.shape
    flat = np.array(payload(look)["mass"]).reshape(sources, layers, heads)
    np.testing.assert_allclose(flat, np.moveaxis(look.mass, 2, 0), rtol=1e-5)


def embedded(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="look-data">(.*?)</script>', page, re.S)
    return json.loads(text)


@given(st.lists(st.text(st.characters(exclude_categories=[]), max_size=8), min_size=3, max_size=6))
def test_any_text_comes_back_as_it_was(texts):
    look = small_look()
    tokens = (*texts, *look.tokens[len(texts) :])
    back = embedded(render(replace(look, tokens=tokens)))["tokens"]
    assert [utf16(t) for t in back] == [utf16(t) for t in tokens]


def utf16(text: str) -> bytes:
    """The text as a browser holds it: two halves of a surrogate pair are one character there."""
    return text.encode("utf-16", "surrogatepass")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ids": np.zeros(3, np.int64)},
            r"look\.ids has shape \(3,\), but with 145 tokens it must be \(145,\)",
        ),
        ({"ids": np.full(145, 9)}, r"look\.ids goes from 9 to 9, but there are 5 sources"),
        ({"ids": np.full(145, -1)}, r"look\.ids goes from -1 to -1"),
        ({"mass": np.zeros((4, 3, 2))}, r"look\.mass has shape \(4, 3, 2\).*4 layers and 5 sources"),
        ({"mass": np.zeros((4, 3))}, r"look\.mass has shape \(4, 3\)"),
        ({"entropy": np.zeros((3, 4))}, r"look\.entropy has shape \(3, 4\); beside mass it must be \(4, 3\)"),
        ({"maps": np.zeros((4, 3, 2, 145))}, r"look\.maps has shape \(4, 3, 2, 145\).*\(4, 3, 3, 145\)"),
        ({"map_queries": (1, 2, 145)}, r"look\.map_queries holds position 145: it must stay in 0\.\.144"),
        ({"map_queries": (1, 1, 2)}, r"look\.map_queries holds a position twice"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(change, message):
    with pytest.raises(ArgumentError, match=message):
        payload(replace(small_look(), **change))


def test_a_top_token_beyond_the_prompt_is_refused():
    look = small_look()
    wrong = replace(look.top_tokens[0], position=145)
    with pytest.raises(ArgumentError, match=r"look\.top_tokens holds position 145"):
        payload(replace(look, top_tokens=(wrong,)))
