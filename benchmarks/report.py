"""How long a page takes to make, to open and to answer a click, and how big it is, from 512 to 8192 tokens.

    python benchmarks/report.py

A made-up look of 30 layers and 9 heads with six queries, once with weights as attention has them and once
with noise, which does not compress: the worst case. Times are medians over fresh loads and over clicks on
heads, from the click until the next frame has been drawn. Prints a table and writes
benchmarks/results/report.json.
"""

from __future__ import annotations

import json
import os
import platform
import runpy
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

from clearhead.look.result import Look
from clearhead.report import write

HERE = Path(__file__).parent
LONG_LOOK = runpy.run_path(str(HERE.parent / "tests" / "report" / "looks.py"))["long_look"]
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")
LENGTHS = (512, 2048, 8192)
LOADS = 5
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]

OPENED = """() => {
  const navigation = performance.getEntriesByType("navigation")[0];
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  return [navigation.loadEventEnd, paint ? paint.startTime : navigation.loadEventEnd];
}"""

SETTLED = """async () => {
  while (document.documentElement.hasAttribute("aria-busy")) await new Promise((go) => setTimeout(go, 0));
  await new Promise((go) => requestAnimationFrame(() => setTimeout(go, 0)));
  return performance.now();
}"""

CLICKS = """async () => {
  const settled = async () => {
    while (document.documentElement.hasAttribute("aria-busy")) await new Promise((go) => setTimeout(go, 0));
    await new Promise((go) => requestAnimationFrame(() => setTimeout(go, 0)));
  };
  const times = [];
  const cells = [...document.querySelectorAll("#grid .cell")];
  for (let i = 0; i < 20; i++) {
    const start = performance.now();
    cells[(i * 53 + 7) % cells.length].click();
    await settled();
    times.push(performance.now() - start);
  }
  return times;
}"""

QUERY = """async () => {
  const list = document.getElementById("query");
  const start = performance.now();
  list.selectedIndex = 0;
  list.dispatchEvent(new Event("change"));
  while (document.documentElement.hasAttribute("aria-busy")) await new Promise((go) => setTimeout(go, 0));
  await new Promise((go) => requestAnimationFrame(() => setTimeout(go, 0)));
  return performance.now() - start;
}"""


def noisy(look: Look) -> Look:
    """The same look with weights that zlib cannot make smaller."""
    rng = np.random.default_rng(1)
    maps = rng.random(look.maps.shape, dtype=np.float32)
    return replace(look, maps=maps / maps.sum(axis=-1, keepdims=True))


def measure(browser: Any, look: Look, file: Path) -> dict[str, float]:
    """Figures of one look: seconds to write, megabytes, milliseconds in the browser."""
    start = time.perf_counter()
    write(look, file)
    written = time.perf_counter() - start
    loads, paints, ready, clicks, queries, kept = [], [], [], [], [], 0
    for _ in range(LOADS):
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        page = context.new_page()
        page.goto(file.as_uri())
        ready.append(page.evaluate(SETTLED))
        load, paint = page.evaluate(OPENED)
        loads.append(load)
        paints.append(paint)
        clicks += page.evaluate(CLICKS)
        queries.append(page.evaluate(QUERY))
        kept = page.locator("#query option").count()
        context.close()
    return {
        "queries_kept": kept,
        "file_mb": file.stat().st_size / 1e6,
        "write_s": written,
        "first_paint_ms": statistics.median(paints),
        "load_ms": statistics.median(loads),
        "coloured_ms": statistics.median(ready),
        "coloured_worst_ms": max(ready),
        "head_click_ms": statistics.median(clicks),
        "head_click_worst_ms": max(clicks),
        "new_query_ms": statistics.median(queries),
    }


def machine(browser_version: str) -> dict[str, object]:
    """What the figures depend on."""
    flags, model = set(), platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                flags |= set(value.split())
            if name.strip() == "model name":
                model = value.strip()
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "chromium": browser_version,
        "python": platform.python_version(),
    }


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium found (looked for chromium, chromium-browser and google-chrome)")
    rows = []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        about = machine(browser.version)
        for n in LENGTHS:
            look = LONG_LOOK(n)
            for weights, each in (("attention", look), ("noise", noisy(look))):
                row = {"tokens": len(look.tokens), "weights": weights}
                rows.append(row | measure(browser, each, Path(folder) / "look.html"))
        browser.close()
    print(", ".join(f"{name}: {value}" for name, value in about.items()))
    head = list(rows[0])
    print("  ".join(f"{name:>{max(9, len(name))}}" for name in head))
    for row in rows:
        cells = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values())
        print("  ".join(f"{cell:>{max(9, len(name))}}" for name, cell in zip(head, cells, strict=True)))
    results = {"command": "python benchmarks/report.py", "machine": about, "rows": rows}
    target = HERE / "results" / "report.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
