"""The texts that calibration samples are composed of: own writing, as JSON, in four languages."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

LANGUAGES = ("en", "de", "es", "zh")


@cache
def load(language: str, part: str) -> Any:
    """Return a part of a language: "contexts", "documents", "inserts" or "instructions".

    contexts: list of {"id", "kind", "text", "tasks"}. documents: the same with "family", benign texts full
    of instructions or of quoted attacks. inserts: {"attacks": {family: texts}, "imperatives", "statements":
    [{"text", "fits"}], "prompts": [{"text"}], "direct": [{"text", "family"}]} and, but in English,
    "foreign_attacks". instructions: {"system": wordings with {task}, "generic": wordings without}.
    """
    return json.loads(files(__name__).joinpath(f"{language}_{part}.json").read_text(encoding="utf-8"))
