"""Untrusted text in a real Chromium: nothing runs, nothing is fetched, and all of it can be seen.

Dialogs, requests, console messages and the canary are watched by `open_page` itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from .conftest import HOSTILE, painted
from .looks import hostile_look, small_look

pytestmark = pytest.mark.browser

TEXTS = HOSTILE["TEXTS"]
PLAIN = {sample.name: sample for sample in TEXTS if sample.text.isascii() and sample.text.isprintable()}


def token_text(page: Any, position: int) -> str:
    return page.locator("#panels .t").nth(position).text_content()


def test_all_samples_at_once_in_the_text(open_page):
    page = open_page(hostile_look([sample.text for sample in TEXTS], everywhere="quiet"))
    assert page.locator("#query-hint").text_content().startswith("Every token can be chosen")
    for i, sample in enumerate(TEXTS):
        if sample.name in PLAIN and sample.text:
            assert token_text(page, i + 2) == sample.text
        assert page.locator("#panels .t").nth(i + 2).bounding_box()["width"] > 0, sample.name
    page.locator('[data-at="2,2"]').click()
    painted(page)
    for i in range(len(TEXTS)):
        page.locator("#panels .t").nth(i + 2).dispatch_event("click")
        painted(page)
    assert (
        page.evaluate("document.querySelectorAll('img, iframe, svg, style, base, b').length") == 1
    )  # our style


@pytest.mark.parametrize(
    "name", ["script", "script end", "comment", "image", "javascript address", "override", "null"]
)
def test_a_sample_in_every_name_and_line(open_page, name):
    (sample,) = (s for s in TEXTS if s.name == name)
    page = open_page(hostile_look(["x"], everywhere=sample.text))
    for place in (
        "#facts dd",
        "#notes li",
        "#sources th .name",
        "#grid-source .chip",
        ".panel h3",
        ".evidence span",
    ):
        said = page.locator(place).all_text_contents()
        shown = sample.text.replace("\u202e", "U+202E").replace("\u202c", "U+202C").replace("\0", "U+0000")
        assert shown in said, place
    links = page.locator(".evidence a")
    assert {link.get_attribute("href") for link in links.all()} == {"#worth"}
    for element in page.locator("#sources button, #grid-source button, .ranks button").all():
        element.click()
    painted(page)


MARKED = {
    "null": "beforeU+0000after",
    "override": "userU+202Egnp.exeU+202C",
    "isolates": "aU+2067bU+2066cU+2068d",
    "zero width": "igU+200BnoU+200CreU+200D U+2060allU+FEFF",
    "soft hyphen": "passU+00ADword",
    "tags": "helloU+E006FU+E0062U+E0065U+E0079",
    "selectors": "\U0001f600\ufe0fU+FE0FU+E0101U+E0142",
    "fillers": "U+3164U+115FU+1160U+FFA0",
    "spaces": "aU+00A0bU+2003cU+3000d",
    "line separators": "aU+2028bU+2029c",
    "lone surrogate": "xU+D800yU+DFFF",
    "noncharacters": "U+FFFEU+FFFFU+10FFFF",
    "private use": "U+E000U+F8FF",
    "carriage return": "rm -rf /U+000Dls",
    "terminal title": "U+001B]0;ownedU+0007",
    "right to left": "שלום abc مرحبا",
}


def test_characters_without_a_shape_are_shown_by_their_number(open_page):
    samples = {sample.name: sample for sample in TEXTS}
    page = open_page(hostile_look([samples[name].text for name in MARKED], everywhere="quiet"))
    for i, (name, shown) in enumerate(MARKED.items()):
        assert token_text(page, i + 2) == shown, name
    override = page.locator("#panels .mark", has_text="U+202E")
    assert override.get_attribute("title") == "right-to-left override"
    assert page.locator("#panels .mark", has_text="U+E006F").get_attribute("title") == 'tag "o"'
    assert "hidden characters" in page.locator(".panel-head").first.text_content()


def test_a_tower_of_accents_is_taken_apart(open_page):
    (sample,) = (s for s in TEXTS if s.name == "accents")
    page = open_page(hostile_look([sample.text], everywhere="quiet"))
    text = token_text(page, 2)
    assert text.startswith("Z\u0301\u0302\u0303U+0310")
    assert text.count("U+") == 45


@pytest.mark.parametrize(
    "tokens", [["\u202eabc", "def", "\u2067", "ghi", "jkl"], ["mostly Latin", "שלום", "12", "עולם", "34"]]
)
def test_no_token_changes_the_order_of_the_others(open_page, tokens):
    page = open_page(hostile_look(tokens, everywhere="quiet"))
    boxes = [page.locator("#panels .t").nth(i).bounding_box() for i in range(2, 7)]
    lefts = [box["x"] for box in boxes if abs(box["y"] - boxes[0]["y"]) < 5]
    assert len(lefts) == 5
    assert lefts == sorted(lefts)


def test_a_line_of_mostly_hebrew_reads_from_the_right(open_page):
    page = open_page(hostile_look(["שלום", " עולם", "\n", "א", " do not", " obey", "\n"], everywhere="quiet"))
    first, second, _, alef, do_not, _, _ = (
        page.locator("#panels .t").nth(i).bounding_box() for i in range(2, 9)
    )
    assert second["x"] < first["x"]
    assert do_not["x"] > alef["x"]


def test_line_breaks_and_empty_tokens_can_be_pointed_at(open_page):
    page = open_page(hostile_look(["a\n", "\n\n", "b", "", "\t"], everywhere="quiet"))
    assert [token_text(page, i).strip() for i in range(2, 7)] == ["a↵", "↵\n↵", "b", "∅", "⇥"]
    assert all(page.locator("#panels .t").nth(i).bounding_box()["width"] > 0 for i in range(2, 7))


def test_the_policy_stops_script_that_gets_in_all_the_same(open_page):
    page = open_page(small_look())
    page.evaluate(
        """(run) => {
            const script = document.createElement('script');
            script.textContent = run;
            document.body.append(script);
            const image = document.createElement('img');
            image.setAttribute('onerror', run);
            image.src = 'http://clearhead.invalid/x.png';
            document.body.append(image);
        }""",
        HOSTILE["RUN"],
    )
    page.wait_for_timeout(200)
    assert page.evaluate(f"window.{HOSTILE['CANARY']}") is None
    assert sum("Content Security Policy" in line for line in open_page.seen) >= 2
    open_page.seen[:] = [line for line in open_page.seen if line.startswith("dialog")]


@pytest.mark.parametrize("width", [360, 1280])
def test_hostile_text_does_not_break_the_width(open_page, width):
    everywhere = "W" * 300
    look = hostile_look([sample.text for sample in TEXTS], everywhere=everywhere)
    look = replace(look, tokens=(*look.tokens[:5], "\u0645" * 500, *look.tokens[6:]))
    page = open_page(look, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
