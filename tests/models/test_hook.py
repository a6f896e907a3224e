"""`attn_implementation="clearhead"` is known in whichever order things are imported, at no cost before."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

INSTALL = "from clearhead.models.hook import install; install()"
BOTH = """
from transformers import AttentionInterface, AttentionMaskInterface
from clearhead.models.adapter import attention_function
from clearhead.models.carrier import mask_function
assert AttentionInterface._global_mapping["clearhead"] is attention_function
assert AttentionMaskInterface._global_mapping["clearhead"] is mask_function
"""


def fresh(code: str) -> str:
    """Run code in a new interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installing_imports_neither_torch_nor_transformers() -> None:
    fresh(
        f"""
        import sys
        {INSTALL}
        heavy = [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers", "numpy")]
        assert not heavy, heavy
        """
    )


@pytest.mark.parametrize(
    "order",
    [
        f"{INSTALL}\nimport transformers",
        f"{INSTALL}\nimport transformers.modeling_utils",
        f"{INSTALL}\nimport transformers.masking_utils",
        f"{INSTALL}\nfrom transformers import AutoModelForCausalLM",
        f"import transformers\n{INSTALL}",
        f"import transformers.modeling_utils\n{INSTALL}",
        f"import transformers.masking_utils\n{INSTALL}",
        f"{INSTALL}\nimport clearhead.models.adapter",
        f"{INSTALL}\n{INSTALL}",
    ],
)
def test_both_functions_are_registered_in_any_order_of_imports(order: str) -> None:
    fresh(f"{order}\n{BOTH}")


def test_a_model_can_be_built_by_name_and_its_modules_look_unwrapped() -> None:
    fresh(
        f"""
{INSTALL}
import inspect
import sys
from importlib.machinery import SourceFileLoader
from transformers import AutoModelForCausalLM, LlamaConfig, modeling_utils
model = AutoModelForCausalLM.from_config(
    LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1),
    attn_implementation="clearhead",
)
assert model.config._attn_implementation == "clearhead"
model.set_attn_implementation("sdpa")
model.set_attn_implementation("clearhead")
assert model.config._attn_implementation == "clearhead"
assert type(modeling_utils.__spec__.loader) is SourceFileLoader is type(modeling_utils.__loader__)
assert "class PreTrainedModel" in inspect.getsource(modeling_utils)
assert sum(type(finder).__module__ == "clearhead.models.hook" for finder in sys.meta_path) <= 1
"""
    )


def test_a_transformers_without_the_registries_is_left_alone() -> None:
    fresh(
        f"""
        import sys
        import types
        sys.modules["transformers.modeling_utils"] = types.ModuleType("transformers.modeling_utils")
        sys.modules["transformers.masking_utils"] = types.ModuleType("transformers.masking_utils")
        {INSTALL}
        """
    )
