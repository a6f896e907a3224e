"""What several test modules need: the embedded real model, loaded once."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network

SETTINGS = {"deadline": None, "print_blob": True}


@pytest.fixture(scope="session")
def smollm2() -> Iterator[object]:
    """Return SmolLM2-135M-Instruct as `clearhead.models.load` gives it: do not change it in place."""
    from clearhead.models import load

    yield load("smollm2")
