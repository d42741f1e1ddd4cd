# pyright: reportMissingImports=false, reportOptionalSubscript=false
"""Runs the workload of a package: `python -m bench.probes.downstream PACKAGE SIDE`.

SIDE is "equinox" or "eqxjit", which calls `eqxjit.install()` first. The environment has the
packages of `bench/downstream.txt`, and nothing else may be imported. Prints JSON: a digest of all
results, errors included, and how many calls Equinox's own `filter_jit` has served.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .equinox_examples import EXAMPLES

_REPEATS = 4


def quadax() -> Iterator[Any]:
    """Integrate by each rule with several parameters, and differentiate an integral."""
    import quadax as package

    def integrand(x: Any, a: Any) -> Any:
        return jnp.exp(-a * x**2) * jnp.cos(x)

    for i in range(_REPEATS):
        a = jnp.asarray(1.0 + i / _REPEATS)
        for rule in (package.quadgk, package.quadcc, package.quadts, package.romberg):
            yield rule(integrand, jnp.array([0.0, 2.0]), args=(a,))
        yield package.trapezoid(integrand(jnp.linspace(0, 2, 50), a), dx=2 / 49)
    yield jax.grad(lambda a: package.quadgk(integrand, jnp.array([0.0, 2.0]), args=(a,))[0])(1.0)


def flowjax() -> Iterator[Any]:
    """Fit a normalising flow to points, evaluate densities, and sample."""
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from flowjax.train import fit_to_data

    x = jr.normal(jr.key(0), (200, 2)) * jnp.array([1.0, 0.3]) + jnp.array([0.5, -0.2])
    flow = masked_autoregressive_flow(
        jr.key(1), base_dist=Normal(jnp.zeros(2)), flow_layers=2, nn_width=8
    )
    flow, losses = fit_to_data(
        jr.key(2), flow, data=x, max_epochs=5, batch_size=50, show_progress=False
    )
    yield losses
    for i in range(_REPEATS):
        yield eqx.filter_jit(flow.log_prob)(x[:10] + i)
    yield flow.sample(jr.key(3), (5,))


def distreqx() -> Iterator[Any]:
    """Compute densities, samples and divergences under `equinox.filter_jit`."""
    from distreqx import bijectors, distributions

    @eqx.filter_jit
    def evaluate(distribution: Any, x: Any, key: Any) -> Any:
        return distribution.log_prob(x), distribution.sample(key), distribution.entropy()

    @eqx.filter_jit
    def divergence(one: Any, other: Any) -> Any:
        return one.kl_divergence(other)

    for i in range(_REPEATS):
        x = jnp.asarray(i / _REPEATS)
        normal = distributions.Normal(jnp.asarray(0.0), 1.0 + x)
        yield evaluate(normal, x, jr.key(i))
        yield evaluate(distributions.Gamma(1.0 + x, jnp.asarray(2.0)), 0.5 + x, jr.key(i))
        yield divergence(normal, distributions.Normal(x, jnp.asarray(1.0)))
        logistic = distributions.Transformed(normal, bijectors.Sigmoid())
        yield eqx.filter_jit(logistic.log_prob)(0.1 + 0.8 * x)


def dlux() -> Iterator[Any]:
    """Compute a telescope's images for several aberrations."""
    import dLux as package
    import dLux.utils as utils

    coordinates = utils.pixel_coords(64, 1.0)
    basis = jnp.stack([utils.zernike(j, coordinates, 1.0) for j in range(1, 6)])
    yield basis
    layer = package.layers.BasisOptic(basis=basis, transmission=utils.circle(coordinates, 0.5))
    optics = package.AngularOpticalSystem(
        wf_npixels=64, diameter=1.0, layers=[("pupil", layer)], psf_npixels=16, psf_pixel_scale=0.1
    )

    @eqx.filter_jit
    def image(optics: Any) -> Any:
        return optics.propagate(jnp.array([1e-6]))

    for i in range(_REPEATS):
        yield image(eqx.tree_at(lambda o: o.layers["pupil"].basis, optics, basis * (1 + 0.01 * i)))


def quax() -> Iterator[Any]:
    """Train a low-rank adaptation of an MLP."""
    import quax as package
    from quax.examples import lora

    model = eqx.nn.MLP(4, 2, 16, 2, key=jr.key(0))
    model = lora.loraify(model, rank=2, scale=0.1, key=jr.key(1))
    x, y = jr.normal(jr.key(2), (32, 4)), jr.normal(jr.key(3), (32, 2))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model: Any) -> Any:
        return jnp.mean((jax.vmap(package.quaxify(model))(x) - y) ** 2)

    for _ in range(_REPEATS):
        value, gradients = loss(model)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients))
        yield value


def diffrax() -> Iterator[Any]:
    """Train a neural differential equation, and solve it by several solvers. One solve fails."""
    import diffrax as package
    import optax

    field = eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=jr.key(0))
    y0, optimizer = jr.normal(jr.key(1), (8, 2)), optax.adam(1e-2)
    state = optimizer.init(eqx.filter(field, eqx.is_inexact_array))

    term = package.ODETerm(lambda t, y, field: field(y))

    def solve(field: Any, y0: Any, solver: Any = None) -> Any:
        controller = package.PIDController(rtol=1e-3, atol=1e-6)
        solver = package.Tsit5() if solver is None else solver
        return package.diffeqsolve(
            term, solver, 0.0, 1.0, 0.1, y0, field, stepsize_controller=controller
        ).ys[-1]

    @eqx.filter_jit
    def step(field: Any, state: Any) -> Any:
        loss, gradients = eqx.filter_value_and_grad(
            lambda field: jnp.mean(jax.vmap(solve, (None, 0))(field, y0) ** 2)
        )(field)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(field, updates), state, loss

    for _ in range(_REPEATS):
        field, state, loss = step(field, state)
        yield loss
    for solver in (package.Heun(), package.Dopri5()):
        for i in range(5):
            yield solve(field, y0[i], solver)
    try:
        yield package.diffeqsolve(
            package.ODETerm(lambda t, y, args: y**2), package.Tsit5(), 0.0, 2.0, 0.1,
            jnp.array(1.0), stepsize_controller=package.PIDController(rtol=1e-5, atol=1e-5),
            max_steps=16,
        )  # fmt: skip
    except Exception as error:
        yield type(error).__name__, "maximum number of solver steps" in str(error)


def optimistix() -> Iterator[Any]:
    """Solve least squares, find roots and minimise. One root search doesn't converge."""
    import optimistix as package

    def residual(y: Any, args: Any) -> Any:
        return jnp.stack([10 * (y[1] - y[0] ** 2), args - y[0]])

    def squares(y: Any, args: Any) -> Any:
        return jnp.sum(residual(y, args) ** 2)

    for i in range(_REPEATS):
        args, y0 = jnp.asarray(1.0 + i / _REPEATS), jnp.array([-1.2, 1.0])
        yield package.least_squares(
            residual, package.LevenbergMarquardt(1e-4, 1e-4), y0, args, max_steps=500
        ).value
        yield package.root_find(residual, package.Newton(1e-4, 1e-4), y0, args).value
        yield package.minimise(squares, package.BFGS(1e-4, 1e-4), y0, args, max_steps=1000).value
    try:
        yield package.root_find(lambda y, _: y**2 + 1, package.Newton(1e-6, 1e-6), jnp.array(1.0))
    except Exception as error:
        yield type(error).__name__


def lineax() -> Iterator[Any]:
    """Solve linear equations by several solvers. One operator is singular."""
    import lineax as package

    for i in range(_REPEATS):
        matrix = jr.normal(jr.key(i), (6, 6)) + 6 * jnp.eye(6)
        vector, plain = jnp.arange(6.0), package.MatrixLinearOperator(matrix)
        for solver in (package.LU(), package.QR(), package.SVD(), package.GMRES(1e-5, 1e-5)):
            yield package.linear_solve(plain, vector, solver).value
        tag = package.positive_semidefinite_tag
        definite = package.MatrixLinearOperator(matrix @ matrix.T, tag)
        for solver in (package.Cholesky(), package.CG(1e-5, 1e-5)):
            yield package.linear_solve(definite, vector, solver, throw=False).value
    try:
        singular = package.MatrixLinearOperator(jnp.zeros((3, 3)))
        yield package.linear_solve(singular, jnp.ones(3), package.LU())
    except Exception as error:
        yield type(error).__name__, "singular" in str(error)


WORK: dict[str, Callable[[], Iterator[Any]]] = {
    fun.__name__: fun
    for fun in (quadax, flowjax, distreqx, dlux, quax, diffrax, optimistix, lineax)
} | EXAMPLES


def run(work: Callable[[], Iterator[Any]]) -> tuple[str, int]:
    """Return a digest of all results, and how many calls Equinox's own wrapper has served.

    The digest includes all bits of arrays, and the `repr` of numbers, strings and bools.
    """
    state = hashlib.sha256()
    n_calls = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal n_calls
        code = frame.f_code
        is_call = event == "call" and code.co_name == "_call"
        n_calls += is_call and code.co_filename.endswith("equinox/_jit.py")

    sys.setprofile(see)
    try:
        leaves = jax.tree.leaves([*work()])
    finally:
        sys.setprofile(None)
    for leaf in leaves:
        if eqx.is_array(leaf):
            array = np.asarray(leaf)
            state.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        elif isinstance(leaf, bool | int | float | str):
            state.update(repr(leaf).encode())
    return state.hexdigest(), n_calls


def main(package: str, side: str) -> dict[str, Any]:
    """Run a package's workload twice, cold and warm."""
    if side == "eqxjit":
        import eqxjit

        eqxjit.install()
    # The warm run's calls count, because it has no calls within traces.
    (first, _), (again, n_calls) = run(WORK[package]), run(WORK[package])
    return {"digests": [first, again], "calls": n_calls}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
