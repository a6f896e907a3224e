"""The command line as a user types it, with a tiny model of random weights where the model does not matter."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from clearhead.cli import main
from clearhead.models.loading import LoadedModel

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' : ' + m.content + ' \n ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant :' }}{% endif %}"
)
WORDS = ["the", "animal", "didn't", "cross", "road", "because", "it", "was", "too", "tired", ".", ":"]


class Done(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run `clearhead ARGUMENTS` in this process, with bytes on standard input if given."""

    def run(*arguments: str, stdin: bytes | None = None) -> Done:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setattr(sys, "argv", ["clearhead", *arguments])
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        done = capsys.readouterr()
        assert "Traceback" not in done.err
        assert isinstance(stop.value.code, int)
        return Done(stop.value.code, done.out, done.err)

    return run


@pytest.fixture(scope="session")
def _tiny() -> tuple[Any, Any]:
    import torch
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    import clearhead  # noqa: F401  (registers the attention)

    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {w: i for i, w in enumerate(WORDS, 4)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    size = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**size, num_attention_heads=4, max_position_embeddings=256)
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation="clearhead").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model, fast


@pytest.fixture
def tiny(_tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model that is asked for is a tiny one of that name."""
    monkeypatch.setattr(
        "clearhead.models.loading.load", lambda name, progress=None: LoadedModel(*_tiny, name, "0")
    )


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model is an error: the mistake must have been found before."""

    def load(name: str, progress: Any = None) -> LoadedModel:
        raise AssertionError("a model was loaded before the input was checked")

    monkeypatch.setattr("clearhead.models.loading.load", load)
