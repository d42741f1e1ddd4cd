"""One workload of `bench calls` in a process of its own: prints figures, in seconds a statement.

What other workloads left in memory would slow some competitors more than others: by half of the
floor, where 100 arrays go in and out.
"""

import json
import math
import sys
import time
import warnings

import jax

from ..harness.measure import Race, agree
from ..models.workloads import WORKLOADS

CALLS = 12  # enough for a specialised call of any workload


def main(workload: str, rounds: str, seconds: str, *only: str) -> None:
    """Check that all competitors agree, and time them, or some alone."""
    is_asynchronous = WORKLOADS[workload].asynchronous
    # Otherwise a blocked call of a tiny model is dominated by a thread switch.
    jax.config.update("jax_cpu_enable_async_dispatch", is_asynchronous)
    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
    cases = WORKLOADS[workload].build()
    cases = {name: cases[name] for name in only or cases}
    agree(cases, "floor", CALLS, rtol=1e-4, atol=1e-5)
    # Virtual devices share few cores: by the clock on the wall a call mostly waits for threads.
    clock = time.thread_time if WORKLOADS[workload].devices > 1 else time.perf_counter
    # Long loops, because each ends with a wait, but fewer.
    longer, fewer = (10, 3) if is_asynchronous else (1, 1)
    race = Race(cases, float(seconds) * longer, clock)
    for _ in range(math.ceil(int(rounds) / fewer)):
        race.round()
    print(json.dumps(race.figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
