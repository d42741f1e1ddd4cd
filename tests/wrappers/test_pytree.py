"""The wrapper as a pytree: its leaves are the arrays of its function, and copies share entries."""

import copy
import functools
import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxjit
from tests.support.callables import every_callable
from tests.support.helpers import assert_same, outcome
from tests.support.inside import clear_tables
from tests.support.models import arrays
from tests.support.sides import CALLS, both


class Model(eqx.Module):
    weight: jax.Array
    bias: Any
    power: int = eqx.field(static=True, default=2)

    def __call__(self, x):
        traces.append(self.power)
        return (self.weight * x) ** self.power + self.bias

    def shifted(self, x, *, by=1.0):
        traces.append("shifted")
        return self.weight * x + by

    @eqxjit.filter_jit
    def jitted(self, x):
        return self.weight * x


#: The traces. A Module can't count them, and a wrapper around its call would be another function.
traces: list[Any] = []


@pytest.fixture(autouse=True)
def _no_traces():
    eqx.clear_caches()
    clear_tables()
    traces.clear()


def model(scale=1.0):
    return Model(scale * jnp.arange(1.0, 4.0), scale * jnp.ones(()))


def double(x):
    return 2 * x


def scale(weight, x):
    traces.append("scale")
    return weight * x


x = jnp.arange(3.0) + 1


COPIES = [
    lambda f: jtu.tree_unflatten(jtu.tree_structure(f), jtu.tree_leaves(f)),
    lambda f: eqx.combine(*eqx.partition(f, eqx.is_inexact_array)),
    copy.copy,
    copy.deepcopy,
]


@every_callable
def test_its_arrays_are_those_of_the_function_and_copies_share_entries(fun):
    wrapper, upstream = eqxjit.filter_jit(fun), eqx.filter_jit(fun)
    assert [*map(id, arrays(wrapper))] == [*map(id, arrays(fun))] == [*map(id, arrays(upstream))]
    expected = wrapper(x)
    assert_same(expected, upstream(x))
    compiled = wrapper.cache_info()[:3]
    for make_copy in COPIES:
        again = make_copy(wrapper)
        assert type(again) is type(wrapper)
        assert again is not wrapper
        for _ in range(CALLS):
            assert_same(again(x), expected)
        assert again == wrapper
        assert again.cache_info()[:3] == wrapper.cache_info()[:3] == compiled


@both
def test_tree_map_changes_what_it_computes_with(filter_jit):
    """New arrays of the same shapes need no trace, and the original wrapper stays as it was."""
    f = filter_jit(model())
    for i in range(CALLS):
        g = jax.tree.map(lambda leaf, i=i: leaf * i if eqx.is_array(leaf) else leaf, f)
        assert_same(g(x), model(float(i))(x))
        h = eqx.tree_at(lambda f: f.__wrapped__.weight, f, g.__wrapped__.weight)
        assert_same(h.__wrapped__.weight, i * model().weight)
        assert_same(f(x), model()(x))
        assert traces.count(2) == 1 + 2 * (i + 1)  # one trace, besides eager runs
    wider = jax.tree.map(lambda a: a[None] if eqx.is_array(a) else a, f)
    for _ in range(CALLS):
        assert_same(wider(x), model()(x)[None])
        assert f(x).shape == (3,)
    assert jtu.tree_structure(f) == jtu.tree_structure(filter_jit(model(3.0)))


@both
def test_gradients_through_it_and_vmap_over_it(filter_jit):
    """Its gradient is a wrapper of gradients; an ensemble of wrapped Modules is one wrapper."""

    def loss(f, x):
        return jnp.sum(f(x))

    f = filter_jit(model())
    ensemble = filter_jit(eqx.filter_vmap(lambda s: model(s))(jnp.arange(1.0, 5.0)))
    for i in range(CALLS):
        xs = x + i
        gradient = eqx.filter_grad(loss)(f, xs)
        expected = arrays(eqx.filter_grad(loss)(model(), xs))
        assert type(gradient) is type(f)
        assert_same(arrays(gradient), expected)
        _, jitted = eqx.filter_jit(eqx.filter_value_and_grad(loss))(f, xs)
        assert eqx.tree_equal(arrays(jitted), expected, rtol=1e-6)
        ours = eqx.filter_vmap(lambda f, x: f(x), in_axes=(eqx.if_array(0), None))(ensemble, xs)
        assert_same(ours, jnp.stack([model(s)(xs) for s in (1.0, 2.0, 3.0, 4.0)]))


class Holder(eqx.Module):
    fun: Any


@both
def test_it_goes_into_and_out_of_jitted_functions(filter_jit):
    """It can be an argument, an output, and a field of a Module."""

    @filter_jit
    def apply(holder, x):
        traces.append("apply")
        return holder.fun(x), jax.tree.map(lambda a: 2 * a if eqx.is_array(a) else a, holder)

    for i in range(CALLS):
        y, doubled = apply(Holder(filter_jit(model(i + 1.0))), x)
        assert_same(y, model(i + 1.0)(x))
        assert_same(doubled.fun(x), model(2.0 * (i + 1))(x))
    assert traces.count("apply") == 1


# --- Equality and hash ------------------------------------------------------------------------


PAIRS = {
    "the same function": lambda jit: (jit(double), jit(double)),
    "other functions": lambda jit: (jit(double), jit(jnp.tanh)),
    "other donation": lambda jit: (jit(double), jit(double, donate="all")),
    "equal Modules": lambda jit: (jit(model()), jit(model())),
    "other arrays": lambda jit: (jit(model()), jit(model(2.0))),
    "other shapes": lambda jit: (jit(model()), jit(Model(jnp.ones(2), jnp.ones(())))),
    "other statics": lambda jit: (jit(model()), jit(Model(x, x, 3))),
    "array and NumPy": lambda jit: (
        jit(eqx.Partial(scale, x)),
        jit(eqx.Partial(scale, np.array(x))),
    ),
    "Module and its method": lambda jit: (jit(model()), jit(model().shifted)),
    "wrapper and function": lambda jit: (jit(double), double),
    "copy": lambda jit: (f := jit(model()), copy.copy(f)),
    "NaN": lambda jit: (f := jit(model(float("nan"))), f),
    "upstream's": lambda jit: (eqxjit.filter_jit(double), eqx.filter_jit(double)),
}


def shown(action, *args):
    """Return the text of an action's result, or the type of the error that it raises."""
    result = outcome(action, *args)
    return type(result) if isinstance(result, Exception) else repr(result)


@pytest.mark.parametrize("name", PAIRS)
def test_equality_and_hash_are_upstreams(name):
    ours, upstream = PAIRS[name](eqxjit.filter_jit), PAIRS[name](eqx.filter_jit)
    for operation in (operator.eq, operator.ne):
        assert shown(operation, *ours) == shown(operation, *upstream)
        assert shown(operation, *reversed(ours)) == shown(operation, *reversed(upstream))
    for f, g in zip(ours, upstream, strict=True):
        hashable = not isinstance(shown(hash, g), type)
        assert (not isinstance(shown(hash, f), type)) == hashable
    same_hash = shown(hash, upstream[0]) == shown(hash, upstream[1])
    assert (shown(hash, ours[0]) == shown(hash, ours[1])) == same_hash


# --- Wrapping again ---------------------------------------------------------------------------


def counting():
    """Return a new function, and a counter of its traces."""
    count = []

    def fun(x, *rest):
        count.append(1)
        return jnp.sum(x**2)

    return fun, count


REWRAPPED = {
    "the function": lambda fun: fun,
    "filter_value_and_grad": eqx.filter_value_and_grad,
    "filter_vmap": eqx.filter_vmap,
    "jax Partial": lambda fun: jtu.Partial(fun, x),
    "eqx.Partial of filter_grad": lambda fun: eqx.Partial(eqx.filter_grad(fun), x),
    "filter_jit": eqxjit.filter_jit,
}


@both
@pytest.mark.parametrize("name", REWRAPPED)
def test_wrapping_anew_each_iteration_does_not_retrace(filter_jit, name):
    fun, count = counting()
    for i in range(CALLS):
        f = filter_jit(REWRAPPED[name](fun))
        for _ in range(3):
            assert_same(f(x + i), REWRAPPED[name](fun)(x + i)) if i == 0 else f(x + i)
        if i == 0:
            count.clear()
    assert count == []


def test_wrapping_twice_shares_entries():
    fun, count = counting()
    first, second = eqxjit.filter_jit(fun), eqxjit.filter_jit(fun)
    for f in (first, second, copy.copy(first)):
        for _ in range(CALLS):
            f(x)
        assert f.cache_info()[:3] == (1, 1, 1024)
    second(x, 1)
    assert first.cache_info().entries == 2
    first.clear_cache()
    assert second.cache_info()[:3] == (0, 0, 1024)
    second(x)
    assert len(count) == 3


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("options", [{"donate": "warn"}, {"inline": True}, {"max_traces": 3}])
def test_other_options_have_entries_of_their_own(options):
    fun, _ = counting()
    plain, other = eqxjit.filter_jit(fun), eqxjit.filter_jit(fun, **options)
    for _ in range(CALLS):
        plain(x + 0)
    assert other.cache_info().entries == 0
    other(x + 0)
    assert other.cache_info().entries == 1


# --- What other code copies -------------------------------------------------------------------


@both
def test_functools_wraps_copies_no_compiled_code(filter_jit):
    """`functools.wraps` copies a function's `__dict__`, but the copy must hold no programs."""

    def double(x):
        return 2 * x

    jitted = filter_jit(double)
    for _ in range(CALLS):
        assert_same(jitted(x), 2 * x)
    triple = functools.wraps(double)(lambda x: 3 * x)
    fourfold = functools.wraps(jitted)(lambda x: 4 * x)
    wrappers = [filter_jit(double), filter_jit(triple), filter_jit(fourfold)]
    for _ in range(CALLS):
        assert [float(f(x)[0]) for f in wrappers] == [2, 3, 4]
