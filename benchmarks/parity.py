"""Do 28 kinds of model compute the same through clearhead as with their own eager code?

    python benchmarks/parity.py [--quick]

The families of tests/models/families.py (decoder, encoder, encoder-decoder, vision, text attending to image
patches), tiny and with random weights, without padding and with padding left and right: the largest
difference of any output on real positions. The tests beside that file hold much more (caches, generation,
packed documents, training).
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor

from record import HERE, arguments, save, table

TARGET = 1e-5


def families() -> ModuleType:
    """The tests' own list of families."""
    path = HERE.parent / "tests" / "models" / "families.py"
    spec = importlib.util.spec_from_file_location("families", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["families"] = module
    spec.loader.exec_module(module)
    return module


def distance(wanted: Mapping[str, Any], got: Mapping[str, Any], inputs: dict[str, Tensor]) -> float:
    """The largest difference of two outputs, where the text is real."""
    mask, worst = inputs.get("attention_mask"), 0.0
    for name, value in wanted.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if name == "encoder_last_hidden_state" and "decoder_input_ids" not in inputs:
            continue
        apart = (got[name] - value).abs()
        if mask is not None and apart.shape[:2] == mask.shape:
            apart = apart[mask.bool()]
        worst = max(worst, float(apart.nan_to_num(torch.inf).max()))
    return worst


@torch.no_grad()
def compare(family: Any) -> dict[str, Any]:
    """One row of the table."""
    eager, ours = family.build("eager"), family.build("clearhead")
    worst, cases = 0.0, 0
    for side in family.sides:
        inputs = family.inputs(side)
        worst, cases = max(worst, distance(eager(**inputs), ours(**inputs), inputs)), cases + 1
    return {
        "family": family.name,
        "model": family.model,
        "kind": family.kind,
        "cases": cases,
        "difference": worst,
    }


def main() -> None:
    """Print the table and write the JSON."""
    options = arguments(__doc__).parse_args()
    warnings.filterwarnings("ignore")  # transformers' own, about tiny configurations
    transformers.logging.set_verbosity_error()
    chosen = families().FAMILIES
    rows = [compare(family) for family in (chosen[:3] if options.quick else chosen)]
    table(rows, "largest difference of any output from the model's own eager code")
    worst = max(row["difference"] for row in rows)
    print(f"{len(rows)} families, {sum(row['cases'] for row in rows)} cases: {worst:.2g} (target {TARGET:g})")
    kinds = {kind: sum(row["kind"] == kind for row in rows) for kind in sorted({row["kind"] for row in rows})}
    figures = {
        "families": len(rows),
        "cases": sum(row["cases"] for row in rows),
        "kinds": kinds,
        "largest_difference": worst,
        "target": TARGET,
    }
    save("parity", options, figures, families=rows)


if __name__ == "__main__":
    main()
