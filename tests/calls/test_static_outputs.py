"""Static objects in what a function returns: whose they are, and how long they live."""

import dataclasses
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.sides import CALLS

X = jnp.ones(2)


@dataclasses.dataclass(frozen=True)
class Config:
    n: int
    name: str = dataclasses.field(default="", compare=False)


RETURNED = {
    "the first": lambda x, a, b: (x * a.n, a),
    "the second": lambda x, a, b: (x * a.n, b),
    "both": lambda x, a, b: (x * a.n, b, a),
    "none": lambda x, a, b: x * a.n,
}


@pytest.mark.parametrize("which", RETURNED)
def test_each_argument_is_returned_as_the_function_does(which):
    """Also where it was traced with one object in two places."""
    body = RETURNED[which]
    f = eqxjit.filter_jit(body)
    same, one, two = Config(2, "same"), Config(2, "one"), Config(2, "two")
    for arguments in [(same, same), (one, two), (same, same), (two, one)]:
        for _ in range(CALLS):
            result, expected = f(X, *arguments), body(X, *arguments)
            for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
                assert got is want or isinstance(got, jax.Array)
    # Asked once more at most.
    assert f.cache_info().traces <= 2


def test_a_function_that_returns_its_own_object():
    class Model(eqx.Module):
        x: jax.Array
        config: Config = eqx.field(static=True)

        def __call__(self, config):
            return self.x * 2, config

    same, other = Config(2, "same"), Config(2, "other")
    f = eqxjit.filter_jit(Model(X, same))
    for config in (same, other):
        for _ in range(CALLS):
            assert f(config)[1] is config


def test_objects_shared_by_layers_do_not_cost_the_fast_path():
    class Layer(eqx.Module):
        x: jax.Array
        config: Config = eqx.field(static=True)

    config = Config(1)
    f = eqxjit.filter_jit(lambda layers: jax.tree.map(lambda x: x + 1, layers))
    layers = [Layer(X, config), Layer(X, config)]
    for _ in range(CALLS):
        layers = f(layers)
    assert f.cache_info().traces == 1
    assert layers[0].config is layers[1].config is config


def test_what_dropped_programs_returned_is_dropped():
    class Own:
        pass

    f = eqxjit.filter_jit(lambda x: (x, Own()))
    alive = []
    for _ in range(10):
        jax.clear_caches()
        f(X)
        alive.append(weakref.ref(f(X)[1]))
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 2
    assert f(X)[1] is alive[-1]()


def test_outputs_of_several_programs_take_turns():
    f = eqxjit.filter_jit(lambda x: [x] * x.shape[0] if x.shape[0] < 4 else (x, "many"))
    for _ in range(CALLS):
        for n in range(1, 7):
            result = f(jnp.ones(n))
            assert len(result) == (n if n < 4 else 2)
            assert type(result) is (list if n < 4 else tuple)
    assert f.cache_info().traces == 6
