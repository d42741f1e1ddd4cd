"""`bench compare SRC COMMAND ...`: runs a command with two versions of eqxjit, in turn.

`python -m bench compare ../base/src calls --only MLP` runs `bench calls --only MLP` several times
with the eqxjit in `../base/src` ("before") and with that of this environment ("after"). It prints
the best time of each row. The last column is the ratio of a time that doesn't depend on eqxjit,
such as the floor. It shows how much the machine itself has changed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..harness.printing import show
from ..harness.records import ROOT, Times

# Times that don't depend on eqxjit. The first that a row has is shown in the last column.
OTHERS = ("floor", "eqx", "jax.jit, closure")


def main(argv: list[str]) -> int:
    """Run the command with both versions, and print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m bench compare", description=__doc__)
    parser.add_argument("src", type=Path, help="the folder with the other `eqxjit`")
    parser.add_argument(
        "--times", type=int, default=3, help="how many times each version is run (3)"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="a command of bench, with its options"
    )
    args = parser.parse_args(argv)

    best: dict[str, list[Times]] = {}
    here = os.environ.get("PYTHONPATH", "")
    sides = (f"{args.src.resolve()}{os.pathsep}{here}", here)
    for turn in range(args.times):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            for row, times in _rows(_record(args.command, sides[side])):
                found = best.setdefault(row, [{}, {}])[side]
                found |= {way: min(us, found.get(way, us)) for way, us in times.items()}
    lines = [
        (f"{row}: {way}", before[way], after[way], after[way] / before[way], after[of] / before[of])
        for row, (before, after) in best.items()
        for of in [next((way for way in OTHERS if way in before and way in after), "eqxjit")]
        for way in before
        if way in after and way not in OTHERS and not way.startswith(("jit", "scan", "equinox"))
    ]
    columns = ("row", "before", "after", "after / before", "not eqxjit")
    show(" ".join(args.command), columns, lines)
    return 0


def _record(command: list[str], path: str) -> Any:
    """Run a command with this `PYTHONPATH`, and return the record that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "bench", *command, "--output", folder],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(next(Path(folder).glob("*.json")).read_text())


def _rows(record: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Times]]:
    """Yield each table of times in a record, however deep, with its name."""
    for key, value in record.items():
        if not isinstance(value, Mapping):
            continue
        # A list holds percentiles, of which the first is the median.
        times = {way: us[0] if isinstance(us, list) else us for way, us in value.items()}
        is_table = all(isinstance(us, float) for us in times.values())
        if is_table and any(way.startswith("eqxjit") for way in times):
            yield f"{name}: {key}".removeprefix(": "), times
        else:
            yield from _rows(value, f"{name}: {key}".removeprefix(": "))
