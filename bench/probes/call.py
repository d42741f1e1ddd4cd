"""One workload of `bench calls` in a process of its own: prints figures, in seconds a statement.

What other workloads left in memory would slow some competitors more than others: by half of the
floor, where 100 arrays go in and out.
"""

import argparse
import json
import time
import warnings
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ..harness.competitors import Cases
from ..harness.measure import Race
from ..models.workloads import WORKLOADS

CALLS = 12  # enough for a specialised call of any workload


def main() -> None:
    """Check that all competitors agree, and time them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("rounds", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--only", nargs="+", help="competitors to be timed")
    args = parser.parse_args()
    # Otherwise a blocked call of a tiny model is dominated by a thread switch.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
    cases = _cases(args.workload)
    # Virtual devices share few cores: by the clock on the wall a call mostly waits for threads.
    clock = time.thread_time if WORKLOADS[args.workload].devices > 1 else time.perf_counter
    race = Race({name: cases[name] for name in args.only or cases}, args.seconds, clock)
    for _ in range(args.rounds):
        race.round()
    print(json.dumps(race.figures))


def _cases(workload: str) -> Cases:
    """Build the competitors; some calls of each must give what the floor gives."""
    cases = WORKLOADS[workload].build()
    expected = _arrays(cases["floor"].run(CALLS))
    for name, case in cases.items():
        for ours, theirs in zip(_arrays(case.run(CALLS)), expected, strict=True):
            np.testing.assert_allclose(
                ours, theirs, rtol=1e-4, atol=1e-5, err_msg=f"{workload}: {name}"
            )
    return cases


def _arrays(outputs: Any) -> list[Any]:
    return jax.tree.leaves(eqx.filter(outputs, eqx.is_array))


if __name__ == "__main__":
    main()
