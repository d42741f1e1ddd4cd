"""`bench devices`: the cost of a call against the number of devices its arrays are spread over.

Measured is the CPU time of the calling thread. Virtual devices share few cores, so that by the
clock on the wall a call mostly waits for other threads: one and the same function then differs from
itself by half. "floor again" is such a repetition: what it differs by from "floor" is noise.
"""

import os
import time
from functools import partial
from statistics import median

from rich.console import Console
from rich.table import Table

COUNTS = (1, 2, 4, 8)

# Decided once per process, before JAX is imported.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(COUNTS)}"
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.random as jr  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from ..harness.competitors import Cases, jitted  # noqa: E402
from ..harness.environment import write  # noqa: E402
from ..harness.measure import options, race_all  # noqa: E402

CONTROL = "floor again"
Microseconds = dict[str, float]  # by competitor


def forward(devices: int) -> Cases:
    """An MLP of three layers on a batch that is split over so many devices, its weights on each.

    Nothing but dispatch grows with the devices: each computes one example, and tells no other.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), "batch")
    model = eqx.nn.MLP(4, 4, 32, depth=2, key=jr.key(0))
    model = eqx.filter_shard(model, NamedSharding(mesh, PartitionSpec()))
    x = jr.normal(jr.key(1), (devices, 4))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
    cases = jitted(lambda model, x: jax.vmap(model)(x), {"model": model, "x": x})
    cases[CONTROL] = cases["floor"]
    return cases


def main(argv: list[str]) -> int:
    """Check that all agree, time them in turn, report and write."""
    parser = options("devices", __doc__, rounds=45)
    parser.add_argument("--quick", action="store_true", help="3 rounds, written only to --output")
    args = parser.parse_args(argv)
    # As in `bench calls`; on one device the calling thread then computes as well.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    console = Console()

    rounds = 3 if args.quick else args.rounds
    builders = {f"{count} devices": partial(_checked, forward(count)) for count in COUNTS}
    races = race_all(builders, rounds, console, clock=time.thread_time)
    best, middle = (
        {count: race.microseconds(of) for count, race in zip(COUNTS, races.values(), strict=True)}
        for of in (min, median)
    )
    console.print(_table(best))
    if args.output or not args.quick:
        report = {"rounds": rounds, "best_us": best, "median_us": middle}
        written = write("devices", report, args.output)
        console.print(f"written: {written}")
    return 0


def _checked(cases: Cases) -> Cases:
    """All give the same, in the same place."""
    expected = jax.tree.leaves(cases["floor"].run(3))
    for name, case in cases.items():
        for ours, theirs in zip(jax.tree.leaves(case.run(3)), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
            if ours.sharding != theirs.sharding:
                raise SystemExit(f"{name} puts its output to {ours.sharding}")
    return cases


def _table(best: dict[int, Microseconds]) -> Table:
    names = list(next(iter(best.values())))
    table = Table(title="µs of the calling thread per call, best round")
    for column in ("devices", *names, "of floor", "of jit"):
        table.add_column(column, justify="right")
    for count, row in best.items():
        ours = row["eqxjit"]
        table.add_row(
            str(count),
            *(f"{row[name]:.1f}" for name in names),
            f"{ours / row['floor']:.2f}",
            f"{ours / row['jit']:.2f}",
        )
    return table
