"""The detector: which spans of the texts pull the model's heads away from the instruction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from clearhead.errors import ArgumentError
from clearhead.guard.calibration import PRESETS, Calibration, read_calibration, shipped
from clearhead.guard.confirming import confirm_span, read_without
from clearhead.guard.features import Reading, check_causal, read_window
from clearhead.guard.finding import Finding, HeadMoves, Thresholds
from clearhead.guard.focus import FocusDetector
from clearhead.guard.judging import Judged, judge, moves, unread
from clearhead.guard.layout import Laid, Texts, cut, lay, windows
from clearhead.guard.messages import split_messages
from clearhead.guard.plain import made_plain
from clearhead.guard.readout import ROWS, VIEWS, Readout, check_views
from clearhead.guard.scannable import Sources, checked
from clearhead.models.loading import LoadedModel, load


class InjectionDetector:
    """Scan untrusted texts for instructions to the model that its user did not give.

    The model reads the instruction and the texts once; a calibrated read-out looks at how much attention the
    tokens that open the answer give to each sentence (after Hung et al. 2024, Attention Tracker, section 3:
    the last token's attention moves from the instruction to the injected one), and at the hidden states of
    the sentences. `InjectionDetector.load` makes one. Not thread-safe across threads that share the model's
    settings; scans themselves keep no state.

    loaded: the model. calibration: for it. preset: "fpr_5", "fpr_1" or "fpr_0.1", by the share of benign
    texts that are flagged. views: what is looked at, ("attention",) or ("attention", "hidden").

    Raises GuardError for a calibration of another model or chat template, ModelError for a model that is not
    causal, ArgumentError for unknown presets and views.
    """

    method = "readout"

    def __init__(
        self,
        loaded: LoadedModel,
        calibration: Calibration,
        *,
        preset: str = "fpr_5",
        views: Sequence[str] = VIEWS,
    ) -> None:
        check_causal(loaded.model)
        calibration.check(loaded.hash, loaded.tokenizer.chat_template)
        if preset not in PRESETS:
            raise ArgumentError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
        key = "+".join(check_views(views))
        if key not in calibration.readouts:
            raise ArgumentError(
                f"views must be one of those calibrated ({', '.join(calibration.readouts)}), got {views!r}"
            )
        self.loaded, self.calibration, self.preset = loaded, calibration, preset
        self.readout: Readout = calibration.readouts[key]
        self.thresholds: Thresholds = calibration.thresholds[key][preset]
        self.views = self.readout.views

    @overload
    @classmethod
    def load(
        cls,
        model: str | LoadedModel = ...,
        *,
        calibration: str | Path | Calibration | None = ...,
        preset: str = ...,
        views: Sequence[str] = ...,
        method: Literal["readout"] = ...,
    ) -> InjectionDetector: ...

    @overload
    @classmethod
    def load(cls, model: str | LoadedModel = ..., *, method: Literal["focus"]) -> FocusDetector: ...

    @classmethod
    def load(
        cls,
        model: str | LoadedModel = "smollm2",
        *,
        calibration: str | Path | Calibration | None = None,
        preset: str = "fpr_5",
        views: Sequence[str] = VIEWS,
        method: str = "readout",
    ) -> InjectionDetector | FocusDetector:
        """Return a detector.

        model: a name as `clearhead.load` takes it, or a loaded model. calibration: a file or a calibration;
        None: the one in the package for that name. method: "readout", or "focus" for a `FocusDetector`, which
        has no calibration, presets or views. Raises as the class does, and as `load` does.
        """
        if method not in ("readout", "focus"):
            raise ArgumentError(f"method must be readout or focus, got {method!r}")
        loaded = load(model) if isinstance(model, str) else model
        if method == "focus":
            return FocusDetector(loaded)
        if calibration is None:
            calibration = shipped(loaded.name)
        elif not isinstance(calibration, Calibration):
            calibration = read_calibration(calibration)
        return cls(loaded, calibration, preset=preset, views=views)

    def scan(
        self,
        instruction: str | None,
        sources: Sources,
        *,
        confirm: bool = False,
        deadline: float | None = None,
    ) -> Finding:
        """Scan texts that come with an instruction.

        instruction: what the user or the operator asks for; None: `NO_INSTRUCTION`. sources: one text, texts
        by name, or segments (those that are not trusted are scanned). Long texts are read in windows that
        overlap, all of them. confirm: look a second time at a suspicious span, hidden from attention
        (`Finding.confirmation`); it does not change the verdict. deadline: seconds after which no further
        window is begun; what was not read is said, and an allow becomes "unjudged".

        Hidden and disguised characters are made plain for the model; offsets are those of the texts as given.

        Raises ArgumentError for arguments of other types and a deadline that is not positive, GuardError for
        an empty instruction, for more than `LARGEST` characters and for a model whose numbers are not finite,
        PromptError for an instruction that the model has no room for. A text without a word in it is allowed,
        with a note.
        """
        return self._scan(instruction, sources, confirm, deadline)[0]

    def scan_moves(self, instruction: str | None, sources: Sources) -> tuple[Finding, HeadMoves | None]:
        """Scan as `scan` does, and say how far every head moved, as read and with the strongest span hidden.

        The moves are None where no source has any text. One more pass over one window. Raises as `scan` does.
        """
        finding, texts, judged = self._scan(instruction, sources, False, None)
        if judged is None:
            return finding, None
        laid = self._laid(checked(instruction, sources)[0], texts, judged.window)
        sizes, place, baseline = judged.reading.sizes, judged.place, self.calibration.baseline
        shape = (-1, int(self.loaded.model.config.get_text_config().num_attention_heads))
        after = None
        if sizes.sum() > sizes[place]:
            reading = read_without(self.loaded.model, laid, place)
            after = moves(reading, baseline, hidden=float(sizes[place])).reshape(shape)
        return finding, HeadMoves(moves(judged.reading, baseline).reshape(shape), after)

    def scan_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[str] | None = None,
        *,
        confirm: bool = False,
        deadline: float | None = None,
    ) -> Finding:
        """Scan the tool results (and messages of the role "data") of a chat history.

        messages: {"role", "content"} as chat clients have them; the instruction is the system's and the last
        user's text. tools: names of the tools whose results are scanned; None: all. Sources are called by
        their tool's name, or "tool", the second of a name "tool 2".

        Raises ArgumentError for messages of another shape, and as `scan` does.
        """
        instruction, sources = split_messages(messages, tools)
        return self.scan(instruction, sources, confirm=confirm, deadline=deadline)

    def _scan(
        self, instruction: str | None, sources: Sources, confirm: bool, deadline: float | None
    ) -> tuple[Finding, Texts, Judged | None]:
        start = time.perf_counter()
        instruction, named = checked(instruction, sources)
        if deadline is not None and (isinstance(deadline, str | bool) or not deadline > 0):
            raise ArgumentError(f"deadline must be positive seconds, got {deadline!r}")
        plain = made_plain(named)
        texts = cut(plain.texts, self.loaded.tokenizer)
        if not texts.spans:
            empty = unread(self, texts, "no source has any text", time.perf_counter() - start)
            return plain.mapped(empty), texts, None
        every = windows(texts, self.calibration.window, self.calibration.overlap)
        readings: list[tuple[Sequence[int], Reading]] = []
        for window in every:
            if deadline is not None and readings and time.perf_counter() - start > deadline:
                break
            laid = lay(instruction, texts, window, self.loaded.tokenizer)
            readings.append((laid.spans, self._read(laid)))
        judged = judge(self, texts, readings, late=len(readings) < len(every))
        finding = plain.mapped(judged.finding)
        if confirm and finding.spans and (judged.finding.alarmed or judged.finding.score > 0.5):
            finding = replace(finding, confirmation=self._confirm(instruction, texts, judged, finding))
        return replace(finding, seconds=time.perf_counter() - start), texts, judged

    def _read(self, laid: Any) -> Reading:
        return read_window(self.loaded.model, laid, rows=ROWS, layers=self.calibration.layers)

    def _confirm(self, instruction: str, texts: Texts, judged: Judged, finding: Finding) -> Any:
        laid = self._laid(instruction, texts, judged.window)
        return confirm_span(self.loaded.model, laid, judged.place, finding.spans[0])

    def _laid(self, instruction: str, texts: Texts, window: int) -> Laid:
        every = windows(texts, self.calibration.window, self.calibration.overlap)
        return lay(instruction, texts, every[window], self.loaded.tokenizer)
