"""Make the calibration that comes with the package, for SmolLM2, on its own texts and BIPIA's training split.

    python benchmarks/guard_calibration.py --bipia FOLDER [--read I/N]

The texts: every one that `clearhead.guard.generator.generate` makes, six of every context of BIPIA's training
split (50 mails, 50 programming questions, 70 tables), and both crossed: BIPIA's contexts with the package's
attacks and the other way round. No test split, nothing of benchmarks/guard_judge. What was read of each text
is kept in build/guard, so a run can be broken off; --read 1/2 and --read 2/2 in two processes read half each
and make nothing, a run without it then makes the file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import clearhead as ch
from clearhead.guard.calibrating import calibrate, default_layers, read_or_kept
from clearhead.guard.evaluate.loaders import Options, load_set
from clearhead.guard.generator import crossed, generate
from clearhead.guard.samples import Sample

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "src" / "clearhead" / "guard" / "calibrations" / "smollm2.json"
KEPT = ROOT / "build" / "guard"
TABLES = 70


def samples_of(folder: Path) -> list[Sample]:
    """All texts of the calibration."""
    given = load_set(folder, "bipia", Options(most=TABLES, split="train"))
    return [*generate(), *given, *crossed(given, seed=1)]


def main() -> None:
    """Read, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bipia", type=Path, required=True, help="folder of BIPIA's training split")
    parser.add_argument("--read", metavar="I/N", help="only read part I of N, with one thread")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write")
    options = parser.parse_args()
    samples = samples_of(options.bipia)
    loaded = ch.load("smollm2")

    def said(done: int, of: int) -> None:
        if done % 100 == 0 or done == of:
            print(f"{done} of {of} texts", file=sys.stderr, flush=True)

    if options.read:
        part, parts = (int(n) for n in options.read.split("/"))
        torch.set_num_threads(1)
        own = samples[part - 1 :: parts]
        for number, sample in enumerate(own):
            read_or_kept(loaded, sample, default_layers(loaded.model), KEPT)
            said(number + 1, len(own))
        return
    made = calibrate(loaded, samples, folder=KEPT, progress=said)
    made.save(options.out)
    print(f"{options.out}: {made.id}, {made.mix}")


if __name__ == "__main__":
    main()
