"""`bench statics`: configurations, structures in turn, deep and large trees, against Equinox.

Measured is the CPU time of the calling thread: none of these calls computes anything to speak of.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial

from ..harness.competitors import FILTER_JITS
from ..harness.environment import record
from ..harness.measure import Case, agree, chosen, effort, options, race_all
from ..harness.printing import show
from ..models.static_rows import ROWS, Row


def main(argv: list[str]) -> int:
    """Check that both agree, time them in turn, report and write."""
    args = options("statics", __doc__, argv, rounds=15)
    warnings.filterwarnings("ignore", message="A JAX array is being set as static")

    rounds, seconds = effort(args, 0.02)
    builders = {name: partial(_cases, make) for name, make in chosen(ROWS, args).items()}
    races = race_all(builders, rounds, seconds, time.thread_time)
    best = {name: race.microseconds() for name, race in races.items()}
    lines = [
        (name, row["eqx"], row["eqxjit"], row["eqxjit"] / row["eqx"]) for name, row in best.items()
    ]
    columns = ("row", "eqx", "eqxjit", "eqxjit / eqx")
    show("µs of CPU time, best round", columns, lines)
    record("statics", {"rounds": rounds, "best_us": best}, args)
    return 0


def _cases(make: Callable[[], Row]) -> dict[str, Case]:
    row = make()
    cases = {side: row(filter_jit) for side, filter_jit in FILTER_JITS.items()}
    agree(cases, "eqx", 3, rtol=0)
    return cases
