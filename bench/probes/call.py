"""Times one workload of `bench calls`, and prints seconds per statement, by competitor and round.

Each workload has a process of its own, because memory left by other workloads slows some
competitors more than others. With 100 arrays passed and returned, it added half of the floor's
time.
"""

import json
import math
import sys
import time
import warnings

import jax

from ..harness.measure import Race, agree
from ..models.workloads import WORKLOADS

CALLS = 12  # enough for any workload to take its fast path


def main(workload: str, rounds: str, seconds: str, *only: str) -> None:
    """Check that all competitors agree, and time them, or only those named in `only`."""
    is_asynchronous = WORKLOADS[workload].asynchronous
    # With asynchronous dispatch, most of the time of a call of a tiny model is a thread switch.
    jax.config.update("jax_cpu_enable_async_dispatch", is_asynchronous)
    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
    cases = WORKLOADS[workload].build()
    cases = {name: cases[name] for name in only or cases}
    agree(cases, "floor", CALLS, rtol=1e-4, atol=1e-5)
    # Virtual devices share few cores, so wall-clock time is mostly waiting for threads.
    clock = time.thread_time if WORKLOADS[workload].devices > 1 else time.perf_counter
    # Each asynchronous loop ends with a wait. Fewer but longer loops have fewer waits.
    longer, fewer = (10, 3) if is_asynchronous else (1, 1)
    race = Race(cases, float(seconds) * longer, clock)
    for _ in range(math.ceil(int(rounds) / fewer)):
        race.round()
    print(json.dumps(race.figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
