"""What the guard says, on the page: verdict and limits, sources, marked text, heads before and after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clearhead.errors import ArgumentError
from clearhead.report.payload import payload

from .conftest import HOSTILE, painted
from .looks import guarded_look, small_look
from .test_page import CONTRAST


def shades(page: Any) -> list[int]:
    classes = page.eval_on_selector_all("#grid .cell", "all => all.map((c) => c.className)")
    return [int(c.removeprefix("cell s")) for c in classes]


@pytest.mark.browser
def test_without_a_verdict_there_is_no_section(open_page):
    page = open_page(small_look())
    assert page.locator("#guard").is_hidden()
    assert page.locator("#grid-source .chip").all_text_contents()[-1] == "entropy"


@pytest.mark.browser
def test_the_verdict_stands_with_its_threshold_false_alarms_and_set(open_page):
    page = open_page(guarded_look())
    assert page.locator("#guard-verdict").text_content() == "blockscore 0.93"
    limits = page.locator("#guard-limits").text_content()
    for said in ("fpr_5", "flag from 0.50 (4.80% false alarms)", "block from 0.80 (0.90%)", "412 benign texts",
                 "benign texts of the calibration", "0123456789ab"):  # fmt: skip
        assert said in limits
    row = page.locator("#guard-sources tbody tr").first
    assert row.locator("th, td").all_text_contents() == [
        "web page",
        "block",
        "0.93",
        "100.0%",
        "31.4%",
        "22.1%",
    ]
    assert page.locator("#guard-notes li").all_text_contents() == ["1 place with hidden text"]


@pytest.mark.browser
def test_the_tokens_of_the_alarm_are_marked_and_no_others(open_page):
    look = guarded_look()
    page = open_page(look)
    marked = page.eval_on_selector_all(
        "#panels .t", "all => all.flatMap((t, i) => t.dataset.pull === undefined ? [] : [i])"
    )
    assert tuple(marked) == look.guard.spans[0].tokens
    page.locator('[data-at="2,2"]').click()  # a new choice of shades leaves the marks
    painted(page)
    assert page.locator(".t[data-pull]").count() == len(marked)
    items = page.locator("#guard-spans li")
    assert items.count() == 2
    assert page.locator("#guard-spans li.pulled").count() == 1
    assert "ignore all previous instructions" in items.first.text_content()
    assert "pull 0.91, 2.30× per token" in items.first.text_content()
    items.first.locator("button").click()
    assert page.evaluate("document.activeElement.textContent").strip() == "IMPORTANT:"


@pytest.mark.browser
def test_the_grid_shows_the_moves_before_and_after_on_one_scale(open_page):
    look = guarded_look()
    page = open_page(look)
    most = look.guard.before.max()
    for shown, moves in (("before", look.guard.before), ("after", look.guard.after)):
        page.locator(f'#grid-source [data-shown="{shown}"]').click()
        wanted = np.floor(16 * np.sqrt(np.clip(moves, 0, None).ravel() / most) + 0.5)
        assert np.abs(np.array(shades(page)) - wanted).max() <= 1
        assert page.locator("#grid .cell[data-moved]").count() == int((moves >= 2).sum())
        assert "standard deviations" in page.locator("#grid-legend").text_content()
        assert "+5.0" in page.locator("#grid-legend").text_content()
    assert "hidden" in page.locator("#grid-legend").text_content()
    page.locator('#grid-source [data-shown="entropy"]').click()
    assert page.locator("#grid .cell[data-moved]").count() == 0


@pytest.mark.browser
def test_a_head_that_moved_leads_to_its_cell(open_page):
    page = open_page(guarded_look())
    chips = page.locator("#guard-heads .chip")
    assert chips.all_text_contents() == ["L3 H2+5.0 → +2.5", "L3 H1+4.3 → +2.1"]
    chips.first.click()
    assert page.locator('[data-at="4,3"]').get_attribute("aria-selected") == "true"
    assert page.locator('#grid-source [data-shown="before"]').get_attribute("aria-checked") == "true"


@pytest.mark.browser
def test_without_an_after_there_is_one_grid_of_moves(open_page):
    look = guarded_look()
    page = open_page(replace(look, guard=replace(look.guard, after=None)))
    assert page.locator('#grid-source [data-shown="after"]').count() == 0
    assert page.locator("#guard-heads .chip").first.text_content() == "L3 H2+5.0"


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_section_can_be_read_in_both_themes_and_when_narrow(open_page, theme):
    page = open_page(guarded_look(), theme=theme, width=390)
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
def test_untrusted_text_in_every_place_of_the_verdict_is_text(open_page):
    for sample in HOSTILE["TEXTS"][:12]:
        if sample.text:
            open_page(guarded_look(sample.text))


def test_the_layers_looked_at_are_those_of_the_moves():
    look = guarded_look()
    some = replace(
        look, layers=(1, 3), mass=look.mass[[1, 3]], entropy=look.entropy[[1, 3]], maps=look.maps[[1, 3]]
    )
    assert payload(some)["guard"]["before"] == pytest.approx(
        look.guard.before[[1, 3]].ravel().tolist(), rel=1e-5
    )


def test_moves_and_tokens_that_do_not_fit_are_refused():
    look = guarded_look()
    with pytest.raises(ArgumentError, match=r"look\.guard\.after has shape \(4, 2\).*\(4 or more, 3\)"):
        payload(replace(look, guard=replace(look.guard, after=look.guard.after[:, :2])))
    beyond = replace(look.guard.spans[0], tokens=(145,))
    with pytest.raises(ArgumentError, match=r"look\.guard\.spans holds token 145"):
        payload(replace(look, guard=replace(look.guard, spans=(beyond,))))
