"""What the guard says about a look's prompt: the verdict, the tokens that pulled, the heads that moved."""

from __future__ import annotations

from clearhead.errors import GuardError
from clearhead.guard.detector import InjectionDetector
from clearhead.guard.redacting import pulled
from clearhead.look.result import Pull, PulledSpan
from clearhead.look.words import tokens_holding
from clearhead.models.prompt import Prompt


def pull(detector: InjectionDetector, prompt: Prompt) -> Pull:
    """Scan the texts of a prompt that are not trusted, against its instruction, and mark what pulled.

    The instruction is the text of the trusted system segments and of the last trusted user segment. The texts
    are read in the detector's own layout, so that its calibration holds, not in the prompt's. One pass over
    them and one more over one window.

    Raises GuardError for a prompt without an instruction or without such texts, and as the detector does.
    """
    sources = {s.name: s.text for s in prompt.sources if not s.trusted}
    system = [s.text for s in prompt.sources if s.trusted and s.role == "system"]
    user = [s.text for s in prompt.sources if s.trusted and s.role == "user" and s.text.strip()]
    instruction = "\n\n".join(part for part in (*system, *user[-1:]) if part.strip())
    if not any(text.strip() for text in sources.values()):
        raise GuardError("the prompt has no untrusted text to judge")
    if not instruction:
        raise GuardError("the prompt has no instruction to judge its texts by: no system prompt, no question")
    finding, moves = detector.scan_moves(instruction, sources)
    marked = pulled(finding)
    return Pull(
        finding=finding,
        spans=tuple(
            PulledSpan(span, _tokens(prompt, span.source, span.start, span.end), span in marked)
            for span in finding.spans
        ),
        before=None if moves is None else moves.before,
        after=None if moves is None else moves.after,
    )


def _tokens(prompt: Prompt, source: str, start: int, end: int) -> tuple[int, ...]:
    """The prompt's tokens that hold characters of a span of a segment, wherever the template has it."""
    text = next(s.text for s in prompt.sources if s.name == source)
    marks = bytearray(len(prompt.text))
    for first, stop in prompt.characters[source]:
        offset = first - max(0, text.find(prompt.text[first:stop]))  # a template may strip white space
        low, high = max(first, start + offset), min(stop, end + offset)
        if low < high:
            marks[low:high] = b"\1" * (high - low)
    return tuple(tokens_holding(prompt.tokens, marks))
