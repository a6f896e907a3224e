"""What several test modules need: the embedded real model, loaded once."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

# A shell's background ignores Ctrl-C, and so would every process that a test starts there and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """Return SmolLM2-135M-Instruct as `clearhead.models.load` gives it. Shared: do not change it."""
    from clearhead.models import load

    return load("smollm2")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Return the folder with SmolLM2-135M-Instruct as safetensors, for tests that need only a part of it."""
    from clearhead.models.conversion import convert_once, default_cache_dir
    from clearhead.models.loading import _find

    source = _find("smollm2")
    assert source is not None
    return convert_once(source, default_cache_dir()).folder
