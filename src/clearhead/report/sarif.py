"""Scans as SARIF 2.1.0, for code-scanning pages and editors.

OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0. Columns count code points.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from clearhead import __version__
from clearhead.guard.file_scan import FileResult, Hit
from clearhead.guard.hidden import KINDS

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
RULES = {"injection": "text that pulls the model's heads away from its instruction"} | KINDS
"""Rule ids and what they are."""
_SNIPPET = 500


def to_sarif(results: Sequence[FileResult], *, exit_code: int, notes: bool = False) -> dict[str, Any]:
    """Return the log of one run, as plain lists and dicts.

    A result per hit: level error for block, warning for flag and for text hidden without an honest use;
    hidden text of honest kinds (level note) only if `notes`. Files that could not be read or judged are
    notifications of the invocation. A log without hits has an empty list of results.
    """
    rules = list(RULES)
    found = []
    for result in results:
        seen: Counter[tuple[str, str]] = Counter()
        for hit in result.hits:
            if hit.level != "note" or notes:
                key = (hit.rule, hit.text)
                found.append(_result(result, hit, rules.index(hit.rule), seen[key]))
                seen[key] += 1
    driver = {
        "name": "clearhead",
        "version": __version__,
        "semanticVersion": __version__,
        "rules": [
            {
                "id": rule,
                "name": "".join(word.capitalize() for word in rule.split("-")),
                "shortDescription": {"text": said},
                "defaultConfiguration": {"level": "warning"},
                "properties": {"tags": ["security", "prompt-injection"]},
            }
            for rule, said in RULES.items()
        ],
    }
    invocation = {
        "executionSuccessful": not any(r.failed for r in results),
        "exitCode": exit_code,
        "toolExecutionNotifications": [_notification(r) for r in results if r.failed],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [invocation],
        "results": found,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(result: FileResult, hit: Hit, rule: int, occurrence: int) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": uri(result.name)}}}
    if result.kind != "pdf":  # the places of a PDF are places in its text, not in its file
        region: dict[str, Any] = {
            "startLine": hit.line,
            "startColumn": hit.column,
            "endLine": hit.end_line,
            "endColumn": hit.end_column,
            "charOffset": hit.start,
            "charLength": hit.end - hit.start,
            "snippet": {"text": _whole(hit.text[:_SNIPPET])},
        }
        location["physicalLocation"]["region"] = region
    where = [name for name in (hit.part, hit.label) if name]
    if where:
        location["logicalLocations"] = [{"fullyQualifiedName": _whole(" / ".join(where))}]
    return {
        "ruleId": hit.rule,
        "ruleIndex": rule,
        "level": hit.level,
        "message": {"text": _message(result, hit)},
        "locations": [location],
        "partialFingerprints": {"clearheadSpan/v1": _fingerprint(hit, occurrence)},
        "properties": {"pull": hit.pull, "attention": hit.attention, "score": result.score},
    }


def _message(result: FileResult, hit: Hit) -> str:
    said = _whole(" ".join(hit.said.split())[:_SNIPPET])
    if hit.rule != "injection" or result.finding is None:
        return f"{RULES[hit.rule]}: {said}"
    limits = result.finding.thresholds
    return (
        f"{RULES[hit.rule]} (pull {hit.pull:.2f}): {said}. Score {result.score:.2f}, verdict "
        f"{result.verdict}; flag from {limits.flag:.2f} ({limits.flag_fpr:.1%} false alarms), "
        f"block from {limits.block:.2f} ({limits.block_fpr:.1%}), "
        f"on {limits.benign} benign texts ({limits.fixed_on})."
    )


def _fingerprint(hit: Hit, occurrence: int) -> str:
    """Stays the same when lines are put in above: rule, the span's words, and which of equal ones it is."""
    words = " ".join(hit.said.split())
    return hashlib.sha256(f"{hit.rule}\n{occurrence}\n{words}".encode("utf-8", "replace")).hexdigest()[:32]


def _notification(result: FileResult) -> dict[str, Any]:
    said = result.error or "; ".join(result.notes) or result.verdict
    location = {"physicalLocation": {"artifactLocation": {"uri": uri(result.name)}}}
    return {"level": "error", "message": {"text": _whole(said)}, "locations": [location]}


def uri(name: str) -> str:
    """Return a file's name as a URI, relative to the current folder where it lies in it."""
    if name == "stdin":
        return "stdin"
    path = Path(os.path.normpath(os.path.join(os.getcwd(), name)))
    here = Path(os.getcwd())
    if path.is_relative_to(here):
        return quote(os.fsencode(path.relative_to(here).as_posix()))
    return "file://" + quote(os.fsencode(path.as_posix()))


def _whole(text: str) -> str:
    """Half characters, which JSON readers refuse, as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
