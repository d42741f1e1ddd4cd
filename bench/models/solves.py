"""Small solves by Diffrax, Optimistix and Lineax, which wrap their functions by `filter_jit`.

`eqx` and `eqxjit` are the same call, without and with `eqxjit.install()`. All programs can raise at
runtime (`throw=True`), so both ways wait for the computation.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import lineax
import optimistix

import eqxjit

from ..harness.competitors import Cases, jitted
from ..harness.measure import Case

# A function, its arguments by name, and the field of its result that is the solution.
Solve = tuple[Callable[..., Any], dict[str, Any], str]


def _diffeqsolve() -> Solve:
    term = diffrax.ODETerm(lambda t, y, rate: -rate * y)
    solver, controller = diffrax.Tsit5(), diffrax.PIDController(rtol=1e-4, atol=1e-6)

    def solve(y0: jax.Array, rate: jax.Array) -> Any:
        return diffrax.diffeqsolve(
            term, solver, 0.0, 1.0, 0.1, y0, rate, stepsize_controller=controller
        )

    return solve, {"y0": jnp.arange(1.0, 4.0), "rate": jnp.array(0.7)}, "ys"


def _root_find() -> Solve:
    cube = lambda y, value: y**3 - value  # noqa: E731
    solver = optimistix.Newton(rtol=1e-5, atol=1e-5)

    def solve(y0: jax.Array, value: jax.Array) -> Any:
        return optimistix.root_find(cube, solver, y0, value)

    return solve, {"y0": jnp.ones(3), "value": jnp.arange(2.0, 5.0)}, "value"


def _least_squares() -> Solve:
    residuals = lambda y, points: y[0] * points + y[1] - jnp.sin(points)  # noqa: E731
    solver = optimistix.LevenbergMarquardt(rtol=1e-5, atol=1e-5)

    def solve(y0: jax.Array, points: jax.Array) -> Any:
        return optimistix.least_squares(residuals, solver, y0, points)

    return solve, {"y0": jnp.zeros(2), "points": jnp.linspace(0.0, 1.0, 8)}, "value"


def _linear_solve() -> Solve:
    def solve(operator: lineax.AbstractLinearOperator, vector: jax.Array) -> Any:
        return lineax.linear_solve(operator, vector)

    operator = lineax.MatrixLinearOperator(jnp.eye(4) + 0.1)
    return solve, {"operator": operator, "vector": jnp.arange(4.0)}, "value"


SOLVES: Mapping[str, Callable[[], Solve]] = {
    "diffeqsolve": _diffeqsolve,
    "root_find": _root_find,
    "least_squares": _least_squares,
    "linear_solve": _linear_solve,
}


def solve(name: str) -> Cases:
    """Return the cases of a solve.

    `eqx` and `eqxjit` call the library, which jits a part of the solve. The floor and `jax.jit`
    compile the whole solve. They wait for one of its outputs, because Equinox and eqxjit also wait.
    """
    fun, arguments, value = SOLVES[name]()

    def case(switch: Callable[[], object]) -> Case:
        def names() -> dict[str, Any]:
            eqxjit.uninstall()
            switch()
            return {"f": fun, **arguments}

        return Case(f"out = f({', '.join(arguments)})", names)

    waits = {"floor": "f_out[0].block_until_ready()", "jit": f"out.{value}.block_until_ready()"}
    compiled = {
        way: dataclasses.replace(case, statement=f"{case.statement}; {waits[way]}")
        for way, case in jitted(fun, arguments).items()
        if way in waits
    }
    return compiled | {"eqx": case(lambda: None), "eqxjit": case(eqxjit.install)}
