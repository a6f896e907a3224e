"""A run resumes, a text that cannot be judged is counted, a report shows every figure with its count."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from clearhead.errors import ArgumentError, GuardError
from clearhead.guard.evaluate.evaluation import evaluate
from clearhead.guard.evaluate.figures import lowest
from clearhead.guard.evaluate.plots import roc_svg
from clearhead.guard.evaluate.report import markdown
from clearhead.guard.evaluate.scanning import scan_all
from clearhead.guard.samples import Sample


class Span(NamedTuple):
    start: int
    end: int


class Found(NamedTuple):
    score: float
    verdict: str
    spans: tuple[Span, ...]
    tokens: int
    seconds: float


class Limits(NamedTuple):
    flag: float = 0.5


class Fake:
    """Alarms at the word ORDER, points at its line, refuses the word STRANGE."""

    method, preset, thresholds, calibrated = "fake", "fpr_5", Limits(), True

    def __init__(self) -> None:
        self.scans = 0

    def scan(self, instruction: str, sources: str) -> Found:
        self.scans += 1
        if "STRANGE" in sources:
            raise GuardError("it holds half a character")
        at = sources.find("ORDER")
        score = 0.9 if at >= 0 else 0.1
        return Found(score, "flag" if at >= 0 else "allow", (Span(max(at, 0), max(at, 0) + 5),), 20, 0.01)


def sample(number: int, attacked: bool, **more: Any) -> Sample:
    text = f"Line {number} of a text.\nORDER" if attacked else f"Line {number} of a text.\nNothing else."
    start = text.index("\n") + 1
    return Sample(
        f"Do {number}.", text, "attack" if attacked else "none", start, len(text), "mail", "end",
        "order" if attacked else "statement", context=str(number // 2), source=more.get("source", "own"),
    )  # fmt: skip


SAMPLES = [sample(i, i % 2 == 0) for i in range(60)]


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    first, second = Fake(), Fake()
    scan_all(first, SAMPLES[:20], cache=tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text(kept.read_text() + '{"key": "half a li')  # killed while it wrote
    again = scan_all(second, SAMPLES, cache=tmp_path)
    assert (first.scans, second.scans) == (20, 40)
    assert again.scores.tolist() == scan_all(Fake(), SAMPLES).scores.tolist()
    assert scan_all(third := Fake(), SAMPLES, cache=tmp_path).scores.shape == (60,)
    assert third.scans == 0


def test_no_text_is_written_into_the_cache(tmp_path: Path) -> None:
    scan_all(Fake(), SAMPLES, cache=tmp_path)
    assert "ORDER" not in "".join(path.read_text() for path in tmp_path.iterdir())


def test_a_cache_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be used"):
        scan_all(Fake(), SAMPLES, cache=tmp_path / "file")


def test_what_cannot_be_judged_is_counted_and_not_lost() -> None:
    strange = Sample("Do.", "STRANGE", "attack", 0, 7, position="whole", source="own", context="s")
    scored = scan_all(Fake(), [strange, *SAMPLES])
    assert scored.unjudged.tolist() == [True] + [False] * 60
    assert scored.scores[0] == 0


def test_the_report_has_every_figure_with_its_count(tmp_path: Path) -> None:
    found = evaluate({"own": SAMPLES}, {"fake": Fake()}, learn_from=_others(), cache=tmp_path, resamples=100)
    (row, *_) = found.report["by_set"]
    assert row["auroc"]["value"] == row["tpr_5"]["value"] == row["hit_1"]["value"] == 1
    assert row["auroc"]["n"] == 60
    assert row["auroc"]["contexts"] == 30
    assert row["presets"]["fpr_5"]["fpr_by_family"]["statement"]["value"] == 0
    assert "100 benign texts at least, there are 30" in row["tpr_1"]["reason"]
    assert row["ece"] == pytest.approx(0.1)
    assert row["seconds_per_1k_p50"] == pytest.approx(0.5)
    assert found.report["cells"][0]["lowest"]["auroc"]["attacked"] == 30
    json.dumps(found.report, allow_nan=False)
    text = markdown(found.report)
    for part in ("(n 60)", "Leave one set out", "Leave one attack family out", "TF-IDF char", "keywords"):
        assert part in text
    assert found.svg is not None
    ET.fromstring(found.svg)


def test_a_set_of_benign_texts_alone_has_an_accuracy_and_no_auroc() -> None:
    benign = [s for s in SAMPLES if not s.attacked]
    found = evaluate({"own": benign}, {"fake": Fake()}, learn_from=_others(), resamples=100)
    row = found.report["by_set"][0]
    assert "both classes are needed" in row["auroc"]["reason"]
    assert "| 1.000 | 0 of 30 |" in markdown(found.report)
    assert found.svg is None


def test_nothing_and_too_few_resamples_are_refused() -> None:
    with pytest.raises(ArgumentError, match="nothing to judge"):
        evaluate({"own": []}, {})
    with pytest.raises(ArgumentError, match="resamples must be at least 100"):
        evaluate({"own": SAMPLES}, {}, resamples=10)


def test_names_of_a_set_are_text_in_the_report_and_in_the_picture() -> None:
    bad = "<script>alert(1)</script>|`x`"
    named = [sample(i, i % 2 == 0, source=bad) for i in range(60)]
    found = evaluate({bad: named}, {"fake": Fake()}, learn_from=_others(), resamples=100)
    assert "<script>" not in markdown(found.report)
    assert found.svg is not None
    assert "<script>" not in found.svg


def test_a_cell_of_a_handful_is_not_the_lowest() -> None:
    few = {"auroc": {"value": 0.1, "attacked": 3}}
    many = {"auroc": {"value": 0.7, "attacked": 30}}
    assert lowest([few, many, {"auroc": {"reason": "no"}}]) is many
    assert lowest([few]) is None


def test_the_picture_begins_where_something_was_measured() -> None:
    labels = np.arange(100) % 2 == 0
    svg = roc_svg({"x": (np.arange(100) / 100, labels)}, "title")
    assert svg.count("<polyline") == 1
    with pytest.raises(ArgumentError, match="no curve has both"):
        roc_svg({"x": (np.zeros(3), np.zeros(3, bool))}, "title")


def _others() -> list[Sample]:
    return [
        Sample(
            f"Say {i}.", f"Another text {i}, {'ORDER' if i % 2 else 'calm'}.", "attack" if i % 2 else "none",
            family="other" if i % 2 else "plain", context=str(i), source="others",
        )
        for i in range(40)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("classifier")
    words = {"[PAD]": 0, "[UNK]": 1, "calm": 2, "ORDER": 3}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(folder)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=4, max_position_embeddings=34, id2label={0: "SAFE", 1: "INJECTION"}, **size
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[3] += 3
    model.save_pretrained(folder)
    return folder


def test_a_classifier_reads_a_long_text_in_windows_to_its_end(classifier_folder: Path) -> None:
    from clearhead.guard.evaluate.classifier import Classifier

    judge = Classifier(str(classifier_folder))
    assert judge.length == 32
    calm, ordered = "calm " * 200, "calm " * 199 + "ORDER"
    assert judge.scan("", calm).score != judge.scan("", ordered).score
    assert judge.scan("", calm).tokens > 200
    scored = scan_all(judge, SAMPLES[:4], name="tiny")
    assert scored.spans is None
    assert scored.thresholds == {"default": 0.5}


def test_a_classifier_without_a_benign_label_and_one_that_is_not_there_are_refused(
    classifier_folder: Path, tmp_path: Path
) -> None:
    from clearhead.errors import ModelError
    from clearhead.guard.evaluate.classifier import Classifier

    with pytest.raises(ModelError, match="cannot be loaded"):
        Classifier(str(tmp_path))
    for file in classifier_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {"0": "cats", "1": "dogs"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match="labels cats, dogs"):
        Classifier(str(tmp_path))
