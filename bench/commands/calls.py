"""`bench calls`: the cost of a warm call, against every competitor, over many workloads."""

import argparse
import math
import warnings
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean, median
from typing import Any

import equinox as eqx
import jax
import numpy as np
from rich.table import Table

from ..harness import pictures
from ..harness.competitors import Cases
from ..harness.environment import write
from ..harness.measure import options, race_all
from ..harness.printing import met_or_missed, wide_console
from ..models.workloads import WORKLOADS, Workload

TARGETS = {"floor": 1.20, "jit": 0.75, "eqx": 1 / 3.8}  # eqxjit's geometric mean ratios to them
LEAF_TARGET = 0.15  # microseconds above the floor, per leaf
NOISE = 1.05  # compute-bound workloads

Microseconds = dict[str, float]  # by competitor


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, report, write and draw."""
    parser = options("calls", __doc__, rounds=45)
    parser.add_argument("--quick", action="store_true", help="3 short rounds, no 10,000 leaves")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="workloads whose names have this")
    args = parser.parse_args(argv)
    # Otherwise a blocked call of a tiny model is dominated by a thread switch.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
    console = wide_console(150)

    rounds = 3 if args.quick else args.rounds
    chosen = {name: w for name, w in WORKLOADS.items() if _chosen(name, w, args)}
    builders = {name: partial(_cases, name, workload) for name, workload in chosen.items()}
    races = race_all(builders, rounds, console, seconds=0.005 if args.quick else 0.03)

    def microseconds(name: str, of: Callable[[list[float]], float]) -> Microseconds:
        row = races[name].microseconds(of)
        return {competitor: us / chosen[name].calls for competitor, us in row.items()}

    times = {name: microseconds(name, min) for name in races}
    console.print(_table(times))
    if _by_leaves(times, chosen):
        console.print(_leaf_table(times, chosen))
    for line in _verdicts(times, chosen):
        console.print(line)

    complete = not (args.quick or args.only)
    if args.output or complete:
        report = {
            "rounds": rounds,
            "geometric_means": _means(times, chosen),
            "workloads": {
                name: {
                    "group": chosen[name].group,
                    "best_us": times[name],
                    "median_us": microseconds(name, median),
                }
                for name in races
            },
        }
        written = write("calls", report, args.output)
        platform = jax.default_backend()
        pictures.overview(times, written.with_name(f"overview-{platform}.png"))
        pictures.ratios(times, written.with_name(f"ratios-{platform}.png"))
        pictures.leaves(_by_leaves(times, chosen), written.with_name(f"leaves-{platform}.png"))
        console.print(f"written: {written} and three pictures beside it")
    return 0


def _chosen(name: str, workload: Workload, args: argparse.Namespace) -> bool:
    if args.only:
        return any(part.lower() in name.lower() for part in args.only)
    return not (args.quick and (workload.leaves or 0) >= 10_000)


def _cases(workload: str, built: Workload) -> Cases:
    """Build the competitors; three calls of each must give what the floor gives."""
    cases = built.build()
    expected = _arrays(cases["floor"].run(3))
    for name, case in cases.items():
        got = _arrays(case.run(3))
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


def _means(times: dict[str, Microseconds], chosen: dict[str, Workload]) -> dict[str, float]:
    """eqxjit's geometric mean ratio to each target's competitor, over the small models."""
    small = [times[name] for name, workload in chosen.items() if workload.group == "small"]
    if not small:
        return {}
    return {to: geometric_mean(row["eqxjit"] / row[to] for row in small) for to in TARGETS}


def _table(times: dict[str, Microseconds]) -> Table:
    competitors = list(dict.fromkeys(name for row in times.values() for name in row))
    table = Table(title="µs per call, best round", row_styles=["", "dim"])
    table.add_column("workload", no_wrap=True)
    for name in (*competitors, "of floor", "of jit", "eqx over eqxjit"):
        table.add_column(name, justify="right")
    for workload, row in times.items():
        ours = row["eqxjit"]
        table.add_row(
            workload,
            *(_short(row.get(name)) for name in competitors),
            f"{ours / row['floor']:.2f}",
            f"{ours / row['jit']:.2f}",
            f"{row['eqx'] / ours:.2f}x",
        )
    return table


def _short(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    decimals = max(0, 2 - math.floor(math.log10(microseconds)))
    return f"{microseconds:,.{decimals}f}"


def _by_leaves(
    times: dict[str, Microseconds], chosen: dict[str, Workload]
) -> dict[str, dict[int, Microseconds]]:
    """Times of the tree workloads, by group and number of leaves."""
    groups: dict[str, dict[int, Microseconds]] = {}
    for name, workload in chosen.items():
        if workload.leaves is not None:
            groups.setdefault(workload.group, {})[workload.leaves] = times[name]
    return groups


def _leaf_table(times: dict[str, Microseconds], chosen: dict[str, Workload]) -> Table:
    table = Table(title="µs per leaf above the floor")
    names = ("jit", "eqx", "eqxjit", "unchecked")
    for column in ("tree", "leaves", *names):
        table.add_column(column, justify="right")
    for group, rows in _by_leaves(times, chosen).items():
        for leaves, row in rows.items():
            above = ((row[name] - row["floor"]) / leaves for name in names)
            table.add_row(group, f"{leaves:,}", *(f"{value:.3f}" for value in above))
    return table


def _verdicts(times: dict[str, Microseconds], chosen: dict[str, Workload]) -> list[str]:
    """A line for each target: what it is, what came out."""
    lines = [
        _verdict(f"small models, geometric mean of eqxjit / {to}", mean, TARGETS[to])
        for to, mean in _means(times, chosen).items()
    ]
    for kind, compute_bound, limit in (("dispatch", False, 1.0), ("compute", True, NOISE)):
        against_jit = {
            name: times[name]["eqxjit"] / times[name]["jit"]
            for name, workload in chosen.items()
            if workload.compute_bound == compute_bound
        }
        if against_jit:
            worst = max(against_jit, key=against_jit.__getitem__)
            what = f"{kind}-bound workloads, worst eqxjit / jit ({worst})"
            lines.append(_verdict(what, against_jit[worst], limit))
    for group, rows in _by_leaves(times, chosen).items():
        for leaves, row in rows.items():
            if leaves >= 100:
                above = (row["eqxjit"] - row["floor"]) / leaves
                lines.append(
                    _verdict(f"{leaves:,} leaves {group[5:]}, µs a leaf", above, LEAF_TARGET)
                )
    return lines


def _verdict(what: str, value: float, target: float) -> str:
    verdict = met_or_missed(value <= target)
    return f"{verdict}: {what} is {value:.3f}, at most {target:.3f}"
