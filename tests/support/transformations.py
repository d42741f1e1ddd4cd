"""Ways in which JAX and Equinox call a function: transformations, loops and other jitted functions.

Each way takes a function from an array of three numbers to a number, and four such arrays.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import eqxjit

try:
    shard_map = jax.shard_map
except AttributeError:
    from jax.experimental.shard_map import shard_map  # pyright: ignore


def points():
    return jnp.linspace(0.5, 2.0, 12).reshape(4, 3)


def _custom_vjp(f, xs):
    @jax.custom_vjp
    def g(x):
        return f(x)

    g.defvjp(lambda x: (f(x), x), lambda x, t: (t * f(x) * x,))
    return jax.value_and_grad(g)(xs[0])


def _shard_map(f, xs):
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    spec = PartitionSpec("i")
    return jax.jit(shard_map(jax.vmap(f), mesh=mesh, in_specs=spec, out_specs=spec))(xs)


TRANSFORMATIONS = {
    "jit": lambda f, xs: jax.jit(f)(xs[0]),
    "vmap": lambda f, xs: jax.vmap(f)(xs),
    "grad": lambda f, xs: jax.grad(f)(xs[0]),
    "jvp": lambda f, xs: jax.jvp(f, (xs[0],), (xs[1],)),
    "vjp": lambda f, xs: jax.vjp(f, xs[0])[1](jnp.ones(())),
    "scan": lambda f, xs: jax.lax.scan(lambda c, x: (c + f(x), f(x)), 0.0, xs),
    "cond": lambda f, xs: jax.lax.cond(xs[0, 0] < 9, f, jnp.sum, xs[0]),
    "while_loop": lambda f, xs: jax.lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, state[1] * f(state[1])), (0, xs[0])
    ),
    "custom_vjp": _custom_vjp,
    "shard_map": _shard_map,
    "ensure_compile_time_eval": lambda f, xs: jax.jit(
        lambda: _at_compile_time(functools.partial(f, xs[0]))
    )(),
    "jit of vmap of grad": lambda f, xs: jax.jit(jax.vmap(jax.grad(f)))(xs),
    "grad of scan of jit": lambda f, xs: jax.grad(
        lambda c: jax.lax.scan(lambda c, x: (jax.jit(f)(x * c), None), c, xs)[0]
    )(1.0),
    "filter_jit": lambda f, xs: eqx.filter_jit(f)(xs[0]),
    "eqxjit.filter_jit": lambda f, xs: eqxjit.filter_jit(f)(xs[0]),
    "filter_vmap": lambda f, xs: eqx.filter_vmap(f)(xs),
    "filter_grad": lambda f, xs: eqx.filter_grad(f)(xs[0]),
    "filter_checkpoint": lambda f, xs: eqx.filter_grad(eqx.filter_checkpoint(f))(xs[0]),
}


def _at_compile_time(f):
    with jax.ensure_compile_time_eval():
        return f()
