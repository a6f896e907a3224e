"""The page in a real Chromium: shades are the weights, choices change them, by mouse and by keyboard."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import clearhead.report.html as html
from clearhead.look.result import Look

from .conftest import painted
from .looks import EVIDENCE, EVIDENCE_URL, chat_look, long_look, small_look

pytestmark = pytest.mark.browser

SHADES = 16


def expected_shades(look: Look, query: int, layer: int | None = None, head: int | None = None) -> list[int]:
    """The shades that the legend promises, computed from the weights themselves."""
    rows = slice(None) if layer is None else slice(layer, layer + 1)
    columns = slice(None) if head is None else slice(head, head + 1)
    q = look.map_queries.index(query)
    weights = look.maps[rows, columns, q].astype(np.float64).mean(axis=(0, 1))
    sink = np.array([look.sources[i].role == "sink" for i in look.ids])
    top = weights[~sink].max()
    return [min(SHADES, int(np.floor(SHADES * np.sqrt(w / top) + 0.5))) for w in weights]


def shades(page: Any) -> list[int]:
    """The shade of every token, in the order of the prompt."""
    painted(page)
    classes = page.eval_on_selector_all("#panels .t", "all => all.map((t) => t.className)")
    return [int(c.removeprefix("t s")) for c in classes]


def close(got: list[int], wanted: list[int]) -> bool:
    """Equal but for weights that lie on the edge between two shades."""
    difference = np.abs(np.array(got) - np.array(wanted))
    return difference.max() <= 1 and (difference > 0).mean() <= 0.02


def colours(page: Any) -> list[str]:
    painted(page)
    return page.eval_on_selector_all(
        "#panels .t", "all => all.map((t) => getComputedStyle(t).backgroundColor)"
    )


def cell(page: Any, layer: int, head: int) -> Any:
    return page.locator(f'[data-at="{layer + 1},{head + 1}"]')


def test_the_tokens_stand_in_the_order_of_the_prompt(open_page):
    look = small_look()
    page = open_page(look)
    shown = page.eval_on_selector_all("#panels .t", "all => all.map((t) => t.textContent)")
    assert [s.replace("\u21b5", "").strip("\n") for s in shown] == [t.strip("\n") for t in look.tokens]


def test_the_first_picture_is_the_mean_of_all_heads_from_the_last_query(open_page):
    look = small_look()
    assert close(shades(open_page(look)), expected_shades(look, look.map_queries[-1]))


def test_a_click_on_a_head_changes_the_picture_to_that_head(open_page):
    look = small_look()
    page = open_page(look)
    before = colours(page)
    cell(page, 2, 1).click()
    assert close(shades(page), expected_shades(look, look.map_queries[-1], 2, 1))
    after = colours(page)
    assert sum(a != b for a, b in zip(after, before, strict=True)) > 20
    assert len(set(after)) > 8
    assert cell(page, 2, 1).get_attribute("aria-selected") == "true"
    assert page.locator("[aria-selected=true]").count() == 1


def test_a_click_on_a_layer_number_shows_the_mean_of_the_layer(open_page):
    look = small_look()
    page = open_page(look)
    page.locator('[data-at="2,0"]').click()
    assert close(shades(page), expected_shades(look, look.map_queries[-1], 1))
    page.locator('[data-at="0,0"]').click()
    assert close(shades(page), expected_shades(look, look.map_queries[-1]))


def test_a_head_in_the_table_is_chosen_by_a_click(open_page):
    look = small_look()
    page = open_page(look)
    layer, head, _ = look.sources[4].heads[0]
    page.get_by_role("button", name=f"Layer {layer}, head {head}:").first.click()
    assert close(shades(page), expected_shades(look, look.map_queries[-1], layer, head))
    assert page.locator("#layer").input_value() == str(layer)
    assert page.locator("#head").input_value() == str(head)


def test_layers_carry_their_own_numbers(open_page):
    look = small_look()
    sources = tuple(
        replace(s, heads=tuple((layer + 20, head, mass) for layer, head, mass in s.heads))
        for s in look.sources
    )
    page = open_page(replace(look, layers=(20, 21, 22, 23), sources=sources))
    layer, head, _ = look.sources[4].heads[0]
    page.get_by_role("button", name=f"Layer {layer + 20}, head {head}:").first.click()
    assert close(shades(page), expected_shades(look, look.map_queries[-1], layer, head))
    assert page.locator("#readout").text_content().startswith(f"layer {layer + 20}, head {head}")


def test_a_query_with_a_map_can_be_clicked_and_no_other_token(open_page):
    look = small_look()
    page = open_page(look)
    tokens = page.locator("#panels .t")
    assert page.locator("#panels .t[role=button]").count() == len(look.map_queries)
    tokens.nth(look.map_queries[0]).click()
    assert close(shades(page), expected_shades(look, look.map_queries[0]))
    tokens.nth(look.map_queries[0] + 5).click()
    assert close(shades(page), expected_shades(look, look.map_queries[0]))
    assert tokens.nth(look.map_queries[0]).get_attribute("aria-pressed") == "true"
    page.locator("#query").select_option(str(look.map_queries[1]))
    assert close(shades(page), expected_shades(look, look.map_queries[1]))


def test_pointing_at_a_token_tells_its_number(open_page):
    look = small_look()
    page = open_page(look)
    cell(page, 0, 0).click()
    position = int(look.maps[0, 0, -1, 1:].argmax()) + 1
    page.locator("#panels .t").nth(position).hover()
    weight = float(look.maps[0, 0, -1, position]) * 100
    said = page.locator("#readout strong").text_content()
    assert float(said.removesuffix("%")) == pytest.approx(weight, abs=0.051 if weight >= 10 else 0.0051)
    assert f"#{position}" in page.locator("#readout").text_content()


def test_the_strongest_tokens_are_listed_in_order_and_lead_to_their_place(open_page):
    look = small_look()
    page = open_page(look)
    cell(page, 3, 0).click()
    painted(page)
    order = np.argsort(-look.maps[3, 0, -1], kind="stable")[:8]
    said = [text.split("#")[1] for text in page.locator("#strongest .token-tag").all_text_contents()]
    assert said == [str(i) for i in order]
    page.locator("#strongest button").nth(2).click()
    assert f"#{order[2]}" in page.locator("#readout").text_content()
    assert page.evaluate("document.activeElement.className").startswith("t s")


def test_the_first_token_does_not_wash_out_the_others(open_page):
    look = small_look()
    maps = look.maps * 0.001
    maps[..., 0] = 0.999 - maps[..., 1:].sum(-1)
    page = open_page(replace(look, maps=maps))
    got = shades(page)
    assert max(got[1:]) == SHADES
    assert len(set(got[1:])) > 6
    assert page.locator("#panels .t[data-sink]").count() == 1
    assert "left out of the scale" in page.locator("#text-legend").text_content()


def test_the_grid_shows_the_chosen_source(open_page):
    look = small_look()
    page = open_page(look)
    for source in (1, 4):
        page.locator(f'#grid-source [data-shown="{source}"]').click()
        mass = look.mass[:, :, source].ravel().astype(np.float64)
        places = (mass - mass.min()) / (mass.max() - mass.min())
        wanted = [int(np.floor(SHADES * np.sqrt(place) + 0.5)) for place in places]
        got = page.eval_on_selector_all("#grid .cell", "all => all.map((c) => Number(c.className.slice(6)))")
        assert close(got, wanted)
        low, high = page.locator("#grid-legend .scale").text_content().removesuffix("%").split("%")
        assert float(low) == pytest.approx(mass.min() * 100, rel=0.05)
        assert float(high) == pytest.approx(mass.max() * 100, rel=0.05)
    page.locator('#grid-source [data-shown="entropy"]').click()
    assert f"{look.entropy[1, 2]:.2f} nats" in cell(page, 1, 2).get_attribute("aria-label")


def test_the_whole_page_can_be_used_by_keyboard(open_page):
    look = small_look()
    page = open_page(look)

    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("(s) => document.activeElement.matches(s)", selector):
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline == "solid", "the focus cannot be seen"
                return
        pytest.fail(f"Tab never reaches {selector}")

    tab_to("#theme")
    page.keyboard.press("Enter")
    assert page.locator("#theme").text_content() == "Theme: light"
    tab_to("#sources .chip")
    page.keyboard.press("Space")
    painted(page)
    assert page.locator("#sources .chip[aria-pressed=true]").count() >= 1
    tab_to("#grid-source .chip")
    page.keyboard.press("ArrowRight")
    tab_to("#grid .cell")
    for key in ("Home", "PageUp", "PageUp", "ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.dataset.at") == "2,2"
    assert close(shades(page), expected_shades(look, look.map_queries[-1], 1, 1))
    tab_to("#panels .t")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert close(shades(page), expected_shades(look, look.map_queries[0], 1, 1))
    page.keyboard.press("ArrowRight")
    assert f"#{look.map_queries[0] + 1}" in page.locator("#readout").text_content()
    page.keyboard.press("Control+Home")
    page.keyboard.press("ArrowLeft")
    assert "#0" in page.locator("#readout").text_content()


def test_the_grid_keeps_to_its_edges(open_page):
    page = open_page(small_look())
    cell(page, 3, 2).click()
    for key, at in (
        ("ArrowRight", "4,3"),
        ("ArrowDown", "4,3"),
        ("Home", "4,0"),
        ("End", "4,3"),
        ("PageUp", "1,3"),
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.at") == at
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.dataset.at") == "1,3"


def test_every_control_has_a_name_and_the_grid_its_roles(open_page):
    page = open_page(small_look())
    for role, number in (("grid", 1), ("gridcell", 12), ("rowheader", 5 + 4), ("radio", 6), ("table", 1)):
        assert page.get_by_role(role).count() == number, role
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, select, [role=gridcell], [role=radio]')].filter((e) =>
            !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label'))).length"""
    )
    assert unnamed == 0


def test_every_map_has_its_evidence_line_and_link(open_page):
    page = open_page(small_look())
    for section in (".side", "#text", "header.top"):
        line = page.locator(f"{section} .evidence")
        assert EVIDENCE in line.text_content()
        assert line.locator("a").get_attribute("href") == EVIDENCE_URL


@pytest.mark.parametrize(
    "address", ["javascript:alert(1)", "data:text/html,x", " javascript:alert(1)", "docs/x.md", ""]
)
def test_only_a_web_address_becomes_a_link_others_lead_to_the_page_s_own_section(open_page, address):
    page = open_page(small_look(evidence_url=address))
    links = page.locator(".evidence a")
    assert {link.get_attribute("href") for link in links.all()} == {"#worth"}
    assert "not say why" in page.locator("#worth").text_content()
    assert address.strip() in page.locator("header.top .evidence").text_content()


def test_the_first_token_stands_apart_in_the_table(open_page):
    look = small_look()
    page = open_page(look)
    names = page.locator("#sources th .name").all_text_contents()
    assert names == [s.name for s in look.sources[1:]] + ["first token"]
    assert page.locator("#sources tbody.apart th .name").text_content() == "first token"
    assert "Apart" in page.locator("#sources tbody.apart").text_content()
    row = page.locator("#sources tbody tr", has_text="web page")
    assert "untrusted" in row.text_content()
    assert f"{look.sources[4].mass * 100:.1f}%" in row.text_content()


def test_queries_that_were_left_out_are_named(open_page, monkeypatch):
    look = small_look()
    monkeypatch.setattr(html, "FILE_LIMIT", len(html.render(look)) - 400)
    page = open_page(look)
    said = page.locator("#query-hint").text_content()
    assert f"1 earlier query (#{look.map_queries[0]})" in said
    assert "2 queries" in said
    assert page.locator("#panels .t[role=button]").count() == 2


def test_heads_that_are_all_alike_are_all_strongest_or_all_nothing(open_page):
    look = small_look()
    mass = look.mass.copy()
    mass[:, :, 1], mass[:, :, 2] = 0.25, 0.0
    page = open_page(replace(look, mass=mass))
    for source, wanted in ((1, "cell s16"), (2, "cell s0")):
        page.locator(f'#grid-source [data-shown="{source}"]').click()
        assert set(page.eval_on_selector_all("#grid .cell", "all => all.map((c) => c.className)")) == {wanted}


def test_a_browser_that_cannot_unpack_says_so(open_page):
    look = small_look()
    context = open_page.browser.new_context()
    context.add_init_script("delete window.DecompressionStream")
    file = open_page.folder / "old.html"
    html.write(look, file)
    page = context.new_page()
    page.goto(file.as_uri())
    page.locator("#failure").wait_for(state="visible")
    assert "DecompressionStream" in page.locator("#failure").text_content()
    assert page.locator("#sources tbody tr").count() == 6
    context.close()


def test_without_maps_the_page_says_so_and_keeps_the_rest(open_page):
    look = small_look()
    page = open_page(replace(look, map_queries=(), maps=look.maps[:, :, :0]))
    assert "No token can be chosen" in page.locator("#query-hint").text_content()
    assert page.locator("#query").is_disabled()
    cell(page, 1, 1).click()
    assert set(shades(page)) == {0}
    assert page.locator("#sources tbody tr").count() == 6


def test_a_source_without_tokens_has_a_row_with_a_dash(open_page):
    look = small_look()
    empty = replace(look.sources[2], name="nothing", tokens=0, mass=0.0, per_token=float("nan"), heads=())
    mass = np.concatenate([look.mass, np.zeros_like(look.mass[:, :, :1])], axis=2)
    page = open_page(replace(look, sources=(*look.sources, empty), mass=mass))
    assert "\u2013" in page.locator("#sources tr", has_text="nothing").text_content()
    page.locator('#grid-source [data-shown="5"]').click()
    assert set(page.eval_on_selector_all("#grid .cell", "all => all.map((c) => c.className)")) == {"cell s0"}


CONTRAST = """() => {
  const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = (colour, under) => {
    for (const c of [under, colour]) { context.fillStyle = c; context.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => {
      v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ratio = (element) => {
    let ground = element, layers = [];
    for (; ground; ground = ground.parentElement) layers.unshift(getComputedStyle(ground).backgroundColor);
    const paper = layers.reduce((under, c) => (c === 'rgba(0, 0, 0, 0)' ? under : c), 'white');
    const a = light(getComputedStyle(element).color, paper), b = light(paper, 'white');
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
  return [...document.querySelectorAll('.t, .mark:not(.faint), p, dd, dt, th, td, button, .badge, .label, .number, .dim, a')]
    .filter((e) => e.textContent.trim() && e.checkVisibility()).map((e) => [ratio(e), e.className + ' ' + e.textContent.slice(0, 30)])
    .filter(([r]) => r < 4.5);
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_stands_out_from_its_ground(open_page, theme):
    look = small_look()
    maps = look.maps.copy()
    maps[0, 0, -1] = 0
    maps[0, 0, -1, 5 : 5 + 17] = (np.arange(17) / 16) ** 2  # every shade there is
    page = open_page(replace(look, maps=maps), theme=theme)
    cell(page, 0, 0).click()
    assert set(shades(page)) == set(range(17))
    assert page.evaluate(CONTRAST) == []


def test_shades_grow_steadily_lighter_or_darker(open_page):
    for theme, direction in (("light", -1), ("dark", 1)):
        page = open_page(small_look(), theme=theme)
        lightness = page.evaluate(
            """() => [...document.querySelectorAll('#text-legend .ramp span')].slice(1).map((e) => {
                const [r, g, b] = getComputedStyle(e).backgroundColor.match(/[0-9.]+/g).map(Number);
                return 0.2126 * r ** 2.2 + 0.7152 * g ** 2.2 + 0.0722 * b ** 2.2; })"""
        )
        assert len(lightness) == SHADES
        assert all((b - a) * direction > 0 for a, b in pairwise(lightness))


def test_dark_and_light_follow_the_system_and_the_button(open_page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(small_look(), theme="light"), open_page(small_look(), theme="dark")
    white, black = light.evaluate(ground), dark.evaluate(ground)
    assert white != black
    light.locator("#theme").click()
    assert light.evaluate(ground) == white
    light.locator("#theme").click()
    assert light.evaluate(ground) == black
    dark.locator("#theme").click()
    assert dark.evaluate(ground) == white


OVERFLOW = """() => [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() &&
    !e.closest('.skip, thead') && e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map((e) => e.tagName + '.' + e.className + ' ' + e.textContent.slice(0, 40)).slice(0, 5)"""


@pytest.mark.parametrize("width", [320, 360, 768, 1024, 1920])
def test_no_width_needs_a_horizontal_scroll(open_page, width):
    look = small_look()
    names = ("a-very-long-name-without-a-break" * 4, "https://clearhead.invalid/" + "x" * 200)
    sources = tuple(replace(s, name=n) for s, n in zip(look.sources[3:], names, strict=True))
    page = open_page(replace(look, sources=(*look.sources[:3], *sources)), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOW) == []


@pytest.mark.parametrize("width", [360, 1280])
def test_a_model_of_many_heads_still_fits(open_page, width):
    page = open_page(chat_look(layers=40, heads=64, queries=(-1,)), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOW) == []
    cell(page, 39, 63).click()
    painted(page)
    assert page.locator("#readout").text_content().startswith("layer 39, head 63")


def test_eight_thousand_tokens_open_and_answer(open_page):
    look = long_look(queries=3)
    page = open_page(look)
    assert page.locator("#panels .t").count() == len(look.tokens)
    cell(page, 17, 4).click()
    assert close(shades(page), expected_shades(look, look.map_queries[-1], 17, 4))
    page.locator("#query").select_option(str(look.map_queries[0]))
    assert close(shades(page), expected_shades(look, look.map_queries[0], 17, 4))


def test_the_overview_of_a_long_text_shows_where_the_attention_lies(open_page):
    look = long_look(2000, layers=2, heads=2, queries=1)
    start, end = (f(np.flatnonzero(look.ids == 4)) for f in (min, max))
    strongest = int(start + 0.71 * (end - start))
    maps = np.full_like(look.maps, 1e-6)
    maps[..., strongest] = 0.5
    page = open_page(replace(look, maps=maps))
    painted(page)
    strip = page.eval_on_selector_all(".overview span", "all => all.map((c) => Number(c.className.slice(1)))")
    assert len(strip) == 80
    assert [i for i, shade in enumerate(strip) if shade == SHADES] == [56]
    page.locator(".overview span").nth(56).click()
    assert f"#{strongest}" in page.locator("#readout").text_content()
    box, panel = (
        page.locator("#panels .t").nth(strongest).bounding_box(),
        page.locator(".untrusted").bounding_box(),
    )
    assert panel["y"] < box["y"] < panel["y"] + panel["height"]


def test_short_texts_need_no_overview(open_page):
    assert open_page(small_look()).locator(".overview").count() == 0


def test_motion_stops_for_those_who_ask(browser, open_page):
    page = open_page(small_look())
    page.emulate_media(reduced_motion="reduce")
    moving = page.evaluate(
        "[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e).transitionDuration !== '0s').length"
    )
    assert moving == 0
