"""Text classifiers that people use now (ProtectAI, PIGuard, Prompt Guard), through transformers."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from clearhead.errors import ArgumentError, ModelError

_BENIGN = {"safe", "benign", "legit", "legitimate", "no_injection", "normal", "label_0", "negative", "0"}
OVERLAP = 0.25
"""Share of a window that the next one repeats."""


class Classified(NamedTuple):
    """The part of a finding that a classifier gives."""

    score: float
    verdict: str
    tokens: int
    seconds: float
    spans: tuple[Any, ...] = ()


class Classifier:
    """A sequence classifier; long texts in windows of its length, the strongest of them counts.

    name: a name on the hub or a folder. The score is one minus the probability of the benign label, the
    threshold the customary .5. Code that comes with a model is not run.

    Raises ModelError where it cannot be loaded, ArgumentError where none of its labels is known as benign.
    """

    method = "classifier"
    localises = False
    calibrated = True

    def __init__(self, name: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(name)
            self.model: Any = AutoModelForSequenceClassification.from_pretrained(name, dtype=torch.float32)
        except Exception as error:
            raise ModelError(f"the classifier {name} cannot be loaded: {error}") from error
        self.model.eval()
        labels = {int(i): str(label) for i, label in self.model.config.id2label.items()}
        benign = [i for i, label in labels.items() if label.casefold() in _BENIGN]
        if len(benign) != 1 or len(labels) < 2:
            raise ArgumentError(
                f"the classifier {name} has the labels {', '.join(labels.values())}: exactly one must be a "
                f"benign one ({', '.join(sorted(_BENIGN))})"
            )
        self.benign, self.identity = benign[0], name
        longest = int(getattr(self.model.config, "max_position_embeddings", 512) or 512)
        # Some position tables begin after the padding token's number.
        self.length = max(8, min(512, longest - 2, int(self.tokenizer.model_max_length)))
        self.thresholds = _Half()
        self.preset = "default"

    def scan(self, instruction: str, sources: str) -> Classified:
        """Classify a text; the instruction is not looked at, as these classifiers don't."""
        import torch

        start = time.perf_counter()
        windows = self.tokenizer(
            sources,
            truncation=True,
            max_length=self.length,
            stride=int(self.length * OVERLAP),
            return_overflowing_tokens=True,
            padding=False,
        )["input_ids"]
        score = 0.0
        with torch.inference_mode():
            for ids in windows:
                logits = self.model(input_ids=torch.tensor([ids])).logits[0].float()
                score = max(score, 1 - float(torch.softmax(logits, 0)[self.benign]))
        verdict = "flag" if score >= self.thresholds.flag else "allow"
        return Classified(score, verdict, sum(map(len, windows)), time.perf_counter() - start)


class _Half(NamedTuple):
    flag: float = 0.5
