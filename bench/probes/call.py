"""One workload of `bench calls` in a process of its own: prints figures, in seconds a statement.

What other workloads left in memory would slow some competitors more than others: by half of the
floor, where 100 arrays go in and out.
"""

import argparse
import json
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
    race = Race({name: cases[name] for name in args.only or cases}, args.seconds)
    for _ in range(args.rounds):
        race.round()
    print(json.dumps(race.figures))


def _cases(workload: str) -> Cases:
    """Build the competitors; some calls of each must give what the floor gives."""
    build = WORKLOADS[workload].build
    cases = build()
    expected = _arrays(cases["floor"].run(CALLS))
    for name, case in cases.items():
        got = _arrays(case.run(CALLS))
        # nnx mutates its state instead of returning it: there only the last outputs compare.
        if not name.startswith("nnx") and len(got) != len(expected):
            raise SystemExit(f"{workload}: {name} returns {len(got)} arrays, not {len(expected)}")
        for ours, theirs in zip(got, expected[-len(got) :], strict=True):
            np.testing.assert_allclose(
                ours, theirs, rtol=1e-4, atol=1e-5, err_msg=f"{workload}: {name}"
            )
    return cases


def _arrays(outputs: Any) -> list[Any]:
    return jax.tree.leaves(eqx.filter(outputs, eqx.is_array))


if __name__ == "__main__":
    main()
