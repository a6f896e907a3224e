"""Run every benchmark in order, then write docs/claims.md.

    python benchmarks/run_all.py [--quick] [NAME ...]

With --quick nothing is written. Ends with 1 if one of them fails, after having run the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("mechanism", "parity", "animal", "exactness", "memory", "cost_of_looking")  # timing comes last


def main() -> None:
    """Run them."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: {', '.join(NAMES)})")
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    options = parser.parse_args()
    for name in options.names:
        if name not in NAMES:
            parser.error(f"NAME must be one of {', '.join(NAMES)}, got {name!r}")
    failed = []
    for name in options.names or NAMES:
        print(f"\n======== {name}", flush=True)
        start = time.perf_counter()
        command = [sys.executable, str(HERE / f"{name}.py"), *(["--quick"] if options.quick else [])]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    if not options.quick:
        subprocess.run([sys.executable, str(HERE / "claims.py")], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
