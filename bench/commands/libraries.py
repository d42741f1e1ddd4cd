"""`bench libraries`: small solves by diffrax, optimistix and lineax, before and after `install`.

Each solve is one call of a function that its library wrapped when it was imported. Results must be
the same to the last bit. All can raise at runtime (`throw=True`), so that both sides wait for them;
on the CPU the computation is in the figures of both.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optimistix
from rich.table import Table

import eqxjit

from ..harness.environment import write
from ..harness.measure import Case, options, race_all
from ..harness.printing import wide_console

SIDES = ("equinox", "eqxjit")

Names = dict[str, Any]
Solve = tuple[str, Names]  # a statement, and the names in it


def _decay(t: Any, y: jax.Array, rate: jax.Array) -> jax.Array:
    return -rate * y


def _line(coefficients: jax.Array, points: jax.Array) -> jax.Array:
    return coefficients[0] * points + coefficients[1] - jnp.sin(points)


def _cube(y: jax.Array, value: jax.Array) -> jax.Array:
    return y**3 - value


def _ode(controller: Any) -> Solve:
    return "solve(term, solver, 0.0, 1.0, 0.1, y0, args=rate, stepsize_controller=controller)", {
        "solve": diffrax.diffeqsolve,
        "term": diffrax.ODETerm(_decay),
        "solver": diffrax.Tsit5(),
        "y0": jnp.arange(1.0, 4.0),
        "rate": jnp.array(0.7),
        "controller": controller,
    }


def _root() -> Solve:
    return "solve(fn, solver, y0, args=value)", {
        "solve": optimistix.root_find,
        "fn": _cube,
        "solver": optimistix.Newton(rtol=1e-5, atol=1e-5),
        "y0": jnp.ones(3),
        "value": jnp.arange(2.0, 5.0),
    }


def _least_squares() -> Solve:
    return "solve(fn, solver, y0, args=points)", {
        "solve": optimistix.least_squares,
        "fn": _line,
        "solver": optimistix.LevenbergMarquardt(rtol=1e-5, atol=1e-5),
        "y0": jnp.zeros(2),
        "points": jnp.linspace(0.0, 1.0, 8),
    }


def _linear() -> Solve:
    return "solve(operator, vector)", {
        "solve": lineax.linear_solve,
        "operator": lineax.MatrixLinearOperator(jnp.eye(4) + 0.1),
        "vector": jnp.arange(4.0),
    }


SOLVES: dict[str, Callable[[], Solve]] = {
    "diffeqsolve, fixed steps": lambda: _ode(diffrax.ConstantStepSize()),
    "diffeqsolve, adaptive steps": lambda: _ode(diffrax.PIDController(rtol=1e-4, atol=1e-6)),
    "root_find": _root,
    "least_squares": _least_squares,
    "linear_solve": _linear,
}


def main(argv: list[str]) -> int:
    """Compare results, time each solve under both, report, write."""
    parser = options("libraries", __doc__, rounds=25)
    parser.add_argument("--quick", action="store_true", help="3 short rounds, nothing written")
    args = parser.parse_args(argv)
    # Read when the first array is made.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    console = wide_console(120)

    rounds = 3 if args.quick else args.rounds
    builders = {name: partial(_cases, name, make) for name, make in SOLVES.items()}
    races = race_all(builders, rounds, console, seconds=0.005 if args.quick else 0.05)
    eqxjit.uninstall()

    table = Table(title="µs a call, best round")
    table.add_column("")
    for column in (*SIDES, "times as fast"):
        table.add_column(column, justify="right")
    best = {name: race.microseconds() for name, race in races.items()}
    for name, row in best.items():
        table.add_row(name, *(f"{row[side]:.1f}" for side in SIDES), f"{_gain(row):.2f}")
    console.print(table)
    for name, row in best.items():
        verdict = "[green]faster[/]" if _gain(row) > 1 else "[red]not faster[/]"
        console.print(f"{verdict}: {name}, {_gain(row):.2f} times as fast, results the same")

    if args.output or not args.quick:
        middle = {name: race.microseconds(median) for name, race in races.items()}
        solves = {name: {"best_us": best[name], "median_us": middle[name]} for name in best}
        written = write("libraries", {"rounds": rounds, "solves": solves}, args.output)
        console.print(f"written: {written}")
    return 0


def _cases(name: str, make: Callable[[], Solve]) -> dict[str, Case]:
    """The same statement for both sides; making its names is what switches, outside the timing."""
    call, names = make()

    def fresh(side: str) -> Callable[[], Names]:
        def switch() -> Names:
            eqxjit.uninstall()
            if side == "eqxjit":
                eqxjit.install()
            return names

        return switch

    cases = {side: Case(f"out = {call}", fresh(side)) for side in SIDES}
    # Both must return the same arrays, to the last bit, from cold to warm.
    expected = _arrays(cases["equinox"].run(2))
    for times in (1, 2, 3):
        if _arrays(cases["eqxjit"].run(times)) != expected:
            raise SystemExit(f"{name}: the results differ")
    return cases


def _arrays(outputs: Any) -> list[Any]:
    arrays = jax.tree.leaves(eqx.filter(outputs, eqx.is_array))
    return [(str(array.dtype), array.shape, np.asarray(array).tobytes()) for array in arrays]


def _gain(row: dict[str, float]) -> float:
    return row["equinox"] / row["eqxjit"]
