"""Wrapped functions and Modules at module level, which `test_processes` sends elsewhere."""

import equinox as eqx
import jax

from eqxjit import filter_jit


@filter_jit
def decorated(x, n=2):
    return x * n, n


@filter_jit(donate="all", block=True, maxsize=7)
def with_options(x):
    return x + 1


def plain(x, n=2):
    return x * n, n


elsewhere = filter_jit(plain)


class Model(eqx.Module):
    weight: jax.Array
    activation: object = None
    static: object = eqx.field(static=True, default=None)

    @filter_jit
    def step(self, x):
        return self.weight * x

    @staticmethod
    @filter_jit
    def helper(x):
        return x - 1

    def __call__(self, x):
        return self.activation(self.weight * x)


@eqx.filter_jit
def upstreams(x):
    return x * 2
