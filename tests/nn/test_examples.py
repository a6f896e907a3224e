"""The examples run as they stand: a few steps of training lower the loss, and a picture is written."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of examples/, imported as `python examples/NAME.py` would."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "steps", "panels"), [("encoder", 30, 2), ("decoder", 12, 2), ("encoder_decoder", 30, 1)]
)
def test_a_few_steps_lower_the_loss_and_draw_a_picture(
    name: str,
    steps: int,
    panels: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture = tmp_path / "new" / "picture.svg"
    losses = example(name, monkeypatch).main(["--steps", str(steps), "--out", str(picture)])
    assert len(losses) == steps
    assert sum(losses[-5:]) / 5 < 0.97 * losses[0]
    svg = ET.parse(picture).getroot()
    frames = [r for r in svg.iter("{http://www.w3.org/2000/svg}rect") if r.get("class") == "f"]
    assert len(frames) == panels
    assert f"written: {picture}" in capsys.readouterr().out


def test_characters_of_a_text_cannot_break_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = example("picture", monkeypatch)
    panel = drawing.Panel("<b> & 'x'", torch.eye(3), ["<", "&", '"'], [" ", "\n", ">"])
    drawing.draw(tmp_path / "p.svg", [panel], 'a "caption" <script>')
    texts = [t.text for t in ET.parse(tmp_path / "p.svg").getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["<b> & 'x'", "␣", "⏎", ">", "<", "&", '"', 'a "caption" <script>']
