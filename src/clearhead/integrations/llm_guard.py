"""llm-guard: an input and an output scanner. llm-guard is not imported: its interface is a protocol."""

from __future__ import annotations

from clearhead.guard.policy import WHOLE, Decision, Guarded


class InjectionScanner:
    """An input scanner for `llm_guard.scan_prompt`: prompts that are data, judged against an instruction.

    `scan(prompt)` returns the text, whether it is valid and the risk, as llm-guard's own scanners do: −1.0
    for an empty text; otherwise below 0 under the flag threshold and above it up to 1. A text that is
    redacted or refused is not valid, one that is only flagged is. An unjudged text has risk 0, 1 if refused.
    """

    def __init__(self, guarded: Guarded, *, instruction: str) -> None:
        self.guarded, self.instruction = guarded, instruction

    def scan(self, prompt: str) -> tuple[str, bool, float]:
        """Judge a prompt."""
        return _scanned(self.guarded, self.instruction, prompt)


class InjectionOutputScanner:
    """An output scanner for `llm_guard.scan_output`: the model's output as data for whoever reads it next.

    The instruction is what is given here, else the prompt. Values as in `InjectionScanner`.
    """

    def __init__(self, guarded: Guarded, *, instruction: str | None = None) -> None:
        self.guarded, self.instruction = guarded, instruction

    def scan(self, prompt: str, output: str) -> tuple[str, bool, float]:
        """Judge an output."""
        return _scanned(self.guarded, prompt if self.instruction is None else self.instruction, output)


def _scanned(guarded: Guarded, instruction: str, text: str) -> tuple[str, bool, float]:
    if not text.strip():
        return text, True, -1.0
    decision = guarded.decide(instruction, {WHOLE: text})
    left = decision.texts.get(WHOLE, text)
    return left, decision.action == "pass", _risk(decision)


def _risk(decision: Decision) -> float:
    finding = decision.finding
    if decision.unjudged:
        return 1.0 if decision.action == "refuse" else 0.0
    score, threshold = finding.score, finding.thresholds.flag
    room = threshold if score <= threshold else 1 - threshold
    return round(max(-1.0, min(1.0, (score - threshold) / room)), 2) if room > 0 else 1.0
