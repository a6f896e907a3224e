"""A small model with random weights and a calibration made by hand: the guard without what it has learned."""

from typing import Any

import numpy as np
import pytest
import torch

ASK = "When does the museum open? Answer in one sentence."


def tiny_llama(tokenizer: Any, attention: str = "clearhead", **more: Any) -> Any:
    """Return a Llama of three layers with four heads, the same for every attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from clearhead.models.hook import install

    install()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), **sizes, num_key_value_heads=2, max_position_embeddings=2048,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, attn_implementation=attention, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder: Any) -> Any:
    """Return the tokenizer of SmolLM2, without its model. Shared: do not change it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="session")
def tiny(tokenizer: Any) -> Any:
    """Return a tiny Llama with the tokenizer and chat template of SmolLM2. Shared: do not change it."""
    from clearhead.models.loading import LoadedModel

    return LoadedModel(tiny_llama(tokenizer), tokenizer, "tiny", "7" * 64)


@pytest.fixture(scope="session")
def by_hand(tiny: Any) -> Any:
    """Return a calibration of the tiny model with weights that were drawn and never learned."""
    from clearhead.guard.calibration import PRESETS, Baseline, Calibration, template_hash
    from clearhead.guard.domain import Domain
    from clearhead.guard.finding import Thresholds
    from clearhead.guard.readout import Readout

    rng = np.random.default_rng(0)
    heads, hidden, layers = 12, 32, (1, 2)
    sizes = {"attention": 3 * heads + 1, "attention+hidden": 3 * heads + 2 * (hidden + 2) + 1}

    def drawn(*shape: int) -> Any:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    return Calibration(
        model=tiny.hash,
        template=template_hash(tiny.tokenizer.chat_template),
        name=tiny.name,
        layers=layers,
        window=160,
        overlap=24,
        readouts={k: Readout(tuple(k.split("+")), drawn(d, 2), drawn(2), 1.0, 0.0) for k, d in sizes.items()},
        thresholds={
            key: {
                preset: Thresholds(1 - share, 1 - other / 2, share, other / 2, 400, "nothing")
                for preset, (share, other) in PRESETS.items()
            }
            for key in sizes
        },
        reliability=dict.fromkeys(sizes, ((0.1, 0.2, 30), (0.9, 0.8, 30))),
        baseline=Baseline(drawn(heads), drawn(heads), np.full(heads, 0.5, np.float32), (-1.0, 0.1)),
        domain=Domain(np.zeros((1, hidden), np.float32), np.full(hidden, 1e6, np.float32), 1.0),
        mix={"nothing": {"none": 400}},
        version="0",
        made="2026-01-01",
    )


@pytest.fixture(scope="session")
def blind(tiny: Any, by_hand: Any) -> Any:
    """Return a detector that has learned nothing: fast, and with everything but sense."""
    from clearhead.guard.detector import InjectionDetector

    return InjectionDetector(tiny, by_hand)


@pytest.fixture(scope="session")
def detector(smollm2: Any) -> Any:
    """Return the detector of SmolLM2 with the calibration that comes with the package."""
    from clearhead.guard.detector import InjectionDetector

    return InjectionDetector.load(smollm2)
