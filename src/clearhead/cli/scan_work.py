"""Many files, scanned one after the other or by several processes: the same results in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from clearhead.cli.scan_files import Target
from clearhead.errors import ClearheadError, EngineError, MissingExtraError
from clearhead.guard.file_scan import Detector, FileResult, scan_document
from clearhead.guard.reading import read_bytes, read_file
from clearhead.guard.reading.decoding import NotTextError


@dataclass(frozen=True)
class Settings:
    """What a process needs to scan a file as any other would.

    load: makes the detector; a function of a module, so that a new process can find it. arguments: its
    keywords. instruction: None for the default. threads: of torch; 0 leaves them as they are.
    """

    load: Callable[..., Detector]
    arguments: dict[str, Any]
    instruction: str | None
    confirm: bool
    most: int
    encoding: str | None
    kind: str | None
    scripts: bool
    threads: int = 0


def load_detector(model: str, preset: str) -> Detector:
    """Load the detector that the command line uses."""
    from clearhead.guard.detector import InjectionDetector

    return InjectionDetector.load(model, preset=preset)


def scan_target(detector: Detector, target: Target, settings: Settings, given: bytes | None) -> FileResult:
    """Read and scan one file; what cannot be read or judged is a result too."""
    name = "stdin" if target.path == "-" else target.path
    if target.error:
        return FileResult(name, "unread", error=f"{name} {target.error}")
    options: dict[str, Any] = {"most": settings.most, "encoding": settings.encoding, "kind": settings.kind}
    try:
        document = read_file(name, **options) if given is None else read_bytes(given, name, **options)
    except NotTextError as error:
        return FileResult(name, "skipped" if target.walked else "unread", error=str(error))
    except MissingExtraError:
        raise
    except ClearheadError as error:
        return FileResult(name, "unread", error=str(error))
    return scan_document(
        detector, document, settings.instruction, confirm=settings.confirm, everything=settings.scripts
    )


def scan_all(
    chosen: Sequence[Target],
    settings: Settings,
    jobs: int,
    given: bytes | None,
    *,
    load: Callable[[], Detector] | None = None,
) -> Iterator[FileResult]:
    """Yield the results in the order of the targets, each as soon as it and all before it are there.

    jobs: processes. They are processes and not threads because the detector watches the model's attention
    layers while it reads, and one model can be watched by one reader at a time. load: what makes the detector
    in this process instead of `settings.load`.
    """
    if jobs <= 1 or len(chosen) <= 1:
        detector = load() if load is not None else settings.load(**settings.arguments)
        for target in chosen:
            yield scan_target(detector, target, settings, given if target.path == "-" else None)
        return
    import multiprocessing
    import os
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    jobs = min(jobs, len(chosen))
    settings = replace(settings, threads=max(1, (os.cpu_count() or 1) // jobs))
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_start, initargs=(settings,)
    )
    waiting: deque[Future[FileResult]] = deque()
    left = iter(chosen)
    try:
        with pool:
            for target in left:
                waiting.append(pool.submit(_one, target, given if target.path == "-" else None))
                if len(waiting) >= 4 * jobs:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise EngineError("a process of --jobs ended before its file was scanned; try fewer") from error


_here: tuple[Detector, Settings] | None = None


def _start(settings: Settings) -> None:
    global _here
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to answer
    if settings.threads:
        import torch

        torch.set_num_threads(settings.threads)
    _here = settings.load(**settings.arguments), settings


def _one(target: Target, given: bytes | None) -> FileResult:
    assert _here is not None
    return scan_target(_here[0], target, _here[1], given)
