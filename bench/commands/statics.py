"""`bench statics`: times calls with large static values, many structures, or deep or large trees.

It compares eqxjit with Equinox by the CPU time of the calling thread, because the programs of these
calls compute almost nothing.
"""

import time
import warnings
from collections.abc import Callable

from ..harness.competitors import FILTER_JITS
from ..harness.environment import record
from ..harness.measure import Case, Race, agree, chosen, options
from ..harness.printing import progress, show
from ..models.static_rows import ROWS, Row


def main(argv: list[str]) -> int:
    """Check that both agree, time them in turn, print the times and write the record."""
    args = options("statics", __doc__, argv, rounds=15, seconds=0.02)
    warnings.filterwarnings("ignore", message="A JAX array is being set as static")

    builders = progress(chosen(ROWS, args).items(), "compiling, checking")
    clock = time.thread_time
    races = {name: Race(_cases(make), args.seconds, clock) for name, make in builders}
    # Each round times all rows, so that a slow minute of the machine spoils only one round of each.
    for _ in progress(range(args.rounds), "rounds"):
        for race in races.values():
            race.round()
    best = {name: race.microseconds() for name, race in races.items()}
    lines = [
        (name, row["eqx"], row["eqxjit"], row["eqxjit"] / row["eqx"]) for name, row in best.items()
    ]
    columns = ("row", "eqx", "eqxjit", "eqxjit / eqx")
    show("µs of CPU time, best round", columns, lines)
    record("statics", {"rounds": args.rounds, "best_us": best}, args)
    return 0


def _cases(make: Callable[[], Row]) -> dict[str, Case]:
    row = make()
    cases = {side: row(filter_jit) for side, filter_jit in FILTER_JITS.items()}
    agree(cases, "eqx", 3, rtol=0)
    return cases
