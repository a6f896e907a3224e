"""A Chromium for the tests of the page, watched closely.

Started once; every page comes from `open_page`, in a context of its own. At the end of a test each page must
have asked for nothing but its own file, run nothing that was not its own, and said nothing on the console.
"""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.look.result import Look
from clearhead.report import write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]

HOSTILE = runpy.run_path(str(Path(__file__).parents[1] / "hostile" / "texts.py"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The one Chromium of the session."""
    if CHROMIUM is None:
        pytest.skip("no Chromium found (looked for chromium, chromium-browser and google-chrome)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Watch:
    """Opens pages and writes down all they do that no page of ours may do."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.browser, self.folder = browser, folder
        self.contexts: list[Any] = []
        self.seen: list[str] = []

    def __call__(self, look: Look, *, width: int = 1280, theme: str = "light") -> Any:
        """The page of `look`, drawn, in a window of that width for a reader who likes that theme."""
        file = self.folder / f"look-{len(self.contexts)}.html"
        write(look, file)
        own, note = file.as_uri(), self.seen.append
        context = self.browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
        self.contexts.append(context)
        page = context.new_page()
        page.on("dialog", lambda dialog: (note(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("console", lambda message: note(f"console: {message.text}"))
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on("request", lambda request: request.url == own or note(f"request: {request.url}"))
        page.on("framenavigated", lambda frame: frame.url == own or note(f"went to: {frame.url}"))
        page.on("popup", lambda popup: note(f"popup: {popup.url}"))
        page.goto(own)
        painted(page)
        return page

    def close(self) -> None:
        for context in self.contexts:
            for page in context.pages:
                if page.evaluate(f"window.{HOSTILE['CANARY']}") is not None:
                    self.seen.append("the canary was set: text ran as script")
                if page.locator("#failure").is_visible():
                    self.seen.append(page.locator("#failure").text_content())
            context.close()


def painted(page: Any) -> None:
    """Wait until the shades on the page belong to the choice made last."""
    page.locator("html:not([aria-busy])").wait_for(state="attached")


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A `Watch`; at the end of the test it must have seen nothing."""
    watch = Watch(browser, tmp_path)
    yield watch
    watch.close()
    assert watch.seen == []
