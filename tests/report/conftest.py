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
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()

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


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that writes a look and opens it; what must never happen is checked at the end."""
    contexts, seen = [], []

    def open_it(look: Look, *, width: int = 1280, theme: str = "light") -> Any:
        file = tmp_path / f"look-{len(contexts)}.html"
        write(look, file)
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        own = file.as_uri()
        page.on("dialog", lambda dialog: (seen.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("console", lambda message: seen.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        page.on("request", lambda request: request.url == own or seen.append(f"request: {request.url}"))
        page.on("framenavigated", lambda frame: frame.url == own or seen.append(f"went to: {frame.url}"))
        page.on("popup", lambda popup: seen.append(f"popup: {popup.url}"))
        page.goto(own)
        if look.map_queries:
            page.wait_for_function("document.documentElement.dataset.painted")
        return page

    yield open_it
    for context in contexts:
        for page in context.pages:
            if page.evaluate(f"window.{HOSTILE['CANARY']}") is not None:
                seen.append("the canary was set: text ran as script")
        context.close()
    assert seen == []
