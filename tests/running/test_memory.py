"""Dropped functions are freed with their programs, and so are structures beyond the bound."""

import functools
import gc
import math
import time
import tracemalloc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.devices import about_cpus
from tests.support.processes import run
from tests.support.sides import CALLS

X = jnp.arange(1.0, 4.0)

#: How many functions or objects of each kind are created. None may remain.
SOME = 4


class Model(eqx.Module):
    weight: jax.Array
    static: object = eqx.field(static=True, default=None)

    def __call__(self, x):
        return self.weight * x

    def method(self, x):
        return self.weight + x

    @eqxjit.filter_jit
    def step(self, x, n=1):
        return self.weight * x * n


class Owner:
    """A plain object with a method. It compares by identity."""

    def __init__(self, i):
        self.i = i

    def __call__(self, x):
        return x * self.i

    method = __call__


def executables():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def test_bounds_of_one_and_of_none():
    one, unbounded = (eqxjit.filter_jit(lambda x, n: x * n, maxsize=n) for n in (1, None))
    for n in (1, 2, 1, 1, 1, 1, 3, 3, 3, 3):
        assert one(X, n).tolist() == unbounded(X, n).tolist() == (X * n).tolist()
    assert one.cache_info() == (1, 4, 1, 6)
    assert unbounded.cache_info() == (3, 3, None, 7)


# --- Functions ------------------------------------------------------------------------------------


def _function(wrap=lambda filter_jit, f: filter_jit(f)):
    """Return a function that creates a function and its wrapper."""

    def make(filter_jit, i):
        def f(*args):
            return math.prod(args) * i

        return f, wrap(filter_jit, f)

    return make


def _returning(output):
    """Return the same for a function that returns a part of itself or of its wrapper."""

    def make(filter_jit, i):
        def f(x):
            return output(x, i, f, wrapper)

        wrapper = filter_jit(f)
        return f, wrapper

    return make


FUNCTIONS = {
    "plain": _function(),
    "with options": _function(
        lambda filter_jit, f: filter_jit(f, donate="all-except-first", inline=True, block=True)
    ),
    "wrapped twice": _function(lambda filter_jit, f: filter_jit(filter_jit(f))),
    "filter_grad": _function(
        lambda filter_jit, f: filter_jit(eqx.filter_grad(lambda x: f(x).sum()))
    ),
    "filter_vmap": _function(lambda filter_jit, f: filter_jit(eqx.filter_vmap(f))),
    "partial": _function(lambda filter_jit, f: filter_jit(functools.partial(f, 2))),
    "returning static objects": _returning(
        lambda x, i, f, wrapper: {"y": x * i, "static": Owner(i), "f": lambda: i, "n": i}
    ),
    "returning itself and its wrapper": _returning(
        lambda x, i, f, wrapper: (x * i, f, wrapper, Model(x, wrapper))
    ),
    "with a runtime check": _returning(
        lambda x, i, f, wrapper: eqx.error_if(x, x < 0, "negative") * i
    ),
    "with a callback": _returning(
        lambda x, i, f, wrapper: jax.pure_callback(lambda x: np.asarray(x) * i, x, x)
    ),
    "recursive": _returning(lambda x, i, f, wrapper: wrapper(x[1:]) if len(x) > 1 else x * i),
    "a method of an object": lambda filter_jit, i: (o := Owner(i), filter_jit(o.method)),
}


@pytest.mark.parametrize(
    ("name", "calls"),
    [*[(name, CALLS) for name in FUNCTIONS], ("plain", 0), ("plain", 1), ("plain", 2)],
)
def test_a_dropped_function_is_collected_with_its_programs(name, calls):
    make = FUNCTIONS[name]
    # Compile the parts that all of them share first, such as the jitted part of `error_if`.
    make(eqxjit.filter_jit, -1)[1](X)
    before = executables()
    alive = []
    for i in range(SOME):
        function, wrapper = make(eqxjit.filter_jit, i)
        alive.append(weakref.ref(function))
        for _ in range(calls):
            wrapper(X)
        del function, wrapper
    assert executables() <= before
    assert [ref() for ref in alive] == [None] * SOME


# --- Arguments ------------------------------------------------------------------------------------


@pytest.fixture
def no_collection():
    """Disable the garbage collector, because no cycle may keep arrays alive."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_the_arrays_of_a_module_as_function_go_at_once():
    for calls in range(CALLS + 1):
        for function in (lambda model: model, lambda model: model.method):
            model = Model(X + calls)
            alive = weakref.ref(model.weight)
            wrapper = eqxjit.filter_jit(function(model))
            for _ in range(calls):
                wrapper(X)
            del wrapper, model
            assert alive() is None


@pytest.mark.usefixtures("no_collection")
def test_examples_of_what_is_lowered_or_frozen_go_at_once():
    before = len(jax.live_arrays())
    lowered = eqxjit.filter_jit(lambda model, x: model(x)).lower(Model(X + 1), X)
    eqxjit.freeze(Model(X * 3)).compile(X)
    assert len(jax.live_arrays()) <= before
    assert lowered.compile()(Model(X), X).tolist() == (X * X).tolist()


@pytest.mark.usefixtures("no_collection")
def test_arrays_passed_in_are_not_kept():
    before = len(jax.live_arrays())
    for calls in range(1, CALLS + 1):
        f = eqxjit.filter_jit(lambda model, x, *rest, **more: (model.weight * x, model, rest, more))
        alive = []
        for i in range(calls):
            model, x, y = Model(X + i), X + i, np.arange(3.0)
            alive += [weakref.ref(model.weight), weakref.ref(x), weakref.ref(y)]
            alive += [weakref.ref(leaf) for leaf in jax.tree.leaves(f(model, x, x + 1, k=[y, x]))]
        del model, x, y
        assert not any(ref() is not None for ref in alive)
    assert len(jax.live_arrays()) <= before


@about_cpus("other devices have memory of their own")
def test_one_copy_of_a_large_numpy_argument_is_alive_at_a_time():
    # Not aligned, so that it is copied.
    x = np.ones(2_500_001, np.float32)[1:]
    f = eqxjit.filter_jit(lambda x: x.sum())
    f(x).block_until_ready()
    tracemalloc.start()
    try:
        for _ in range(4):
            f(x).block_until_ready()
            # JAX drops its reference in a thread of its own.
            time.sleep(0.05)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1 <= peak / x.nbytes < 1.5


def test_arrays_of_calls_of_every_kind_are_not_kept():
    f = eqxjit.filter_jit(lambda model, x, n=1: {"y": eqx.error_if(x, x < 0, "no") * n, "n": n})
    donating = eqxjit.filter_jit(lambda x: x + 1, donate="all")

    def calls():
        model, x = Model(X + 1), X + 1
        f(model, x)
        f(model, x, n=2)
        model.step(x, n=3)
        eqxjit.filter_jit(model)(x)
        eqxjit.filter_jit(model.method)(x)
        jax.vmap(lambda x: f(model, x)["y"])(x)
        jax.grad(lambda x: model.step(x).sum())(x)
        f.lower(model, x).compile()(model, x)
        for bad in (-x, {"a": x, 1: x}, [x, {1}], "x"):
            with pytest.raises((RuntimeError, ValueError, TypeError)):
                f(model, bad)
        donating(x)
        return [weakref.ref(model.weight), weakref.ref(x)]

    for _ in range(2):
        calls()
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(CALLS):
        alive = calls()
        gc.collect()
        assert not any(ref() is not None for ref in alive)
        assert len(jax.live_arrays()) <= before


# --- Static values --------------------------------------------------------------------------------


def test_the_least_recently_used_entry_goes():
    traced = []
    f = eqxjit.filter_jit(lambda x, n: traced.append(n) or x * n, maxsize=3)
    for n in (1, 2, 3):
        f(X, n)
    # A structure that is used again and again stays, however many others come and go.
    for n in range(4, 12):
        for _ in range(CALLS):
            f(X, 1)
        f(X, n)
    f(X, 2)
    assert traced == [1, 2, 3, *range(4, 12), 2]


#: Static arguments that hold an object, which dies with its entry.
HOLDING = {
    "a lambda": lambda owner: lambda: owner,
    "a method": lambda owner: owner.method,
    "an object in a field": lambda owner: Model(X, owner),
    "a list in a field": lambda owner: Model(X, [owner]),
    "a key of a dict in a field": lambda owner: Model(X, {owner: 1}),
    "a lambda in tuples in a field": lambda owner: Model(X, (1, (lambda: owner, "a"))),
    "in a dict": lambda owner: {"a": lambda: owner, "b": Model(X, owner)},
}


@pytest.mark.parametrize("is_returned", [False, True])
@pytest.mark.parametrize("kind", HOLDING)
def test_an_entry_goes_with_the_object_that_it_was_made_for(kind, is_returned):
    f = eqxjit.filter_jit(lambda static, x: (static if is_returned else None, x * 2))
    alive = []
    for i in range(SOME):
        owner = Owner(i)
        alive.append(weakref.ref(owner))
        static = HOLDING[kind](owner)
        for x in (X, jnp.ones(4)):
            back, _ = f(static, x)
            assert not is_returned or jax.tree.structure(back) == jax.tree.structure(static)
    del owner, static, back
    gc.collect()
    assert [ref() for ref in alive] == [None] * SOME
    assert f.cache_info().entries == 0


def test_a_new_object_at_a_dead_ones_address_is_another():
    """Python reuses the `id` at once, so a stale entry would be found."""
    f = eqxjit.filter_jit(lambda static, x: x * static.i)
    for value in range(1, 20):
        static = Owner(value)
        for _ in range(2 if value % 2 else CALLS):
            assert f(static, X).tolist() == (X * value).tolist()
        del static


# --- The long run ---------------------------------------------------------------------------------


WARM_CALLS = """
    import gc, equinox as eqx, jax, jax.numpy as jnp, psutil
    import eqxjit
    from tests.running.test_memory import Model, X

    def allocated():
        gc.collect()
        # Pages of files come and go as the system likes.
        return psutil.Process().memory_full_info().uss

    big = Model(jnp.ones(1000), "static")
    f = eqxjit.filter_jit(lambda model, x, n: {"y": model(x) * n, "model": model, "n": n})

    def work():
        model = Model(X)
        for _ in range(20_000):
            f(model, X, 2)
            f(big, big.weight, 2)
            model.step(X)

    work()
    before = allocated()
    work()
    print((allocated() - before) / 2**20)
"""


@pytest.mark.slow
def test_warm_calls_take_no_memory():
    """A hundred bytes kept by each call would be 6 MiB here."""
    assert float(run(WARM_CALLS)) < 4
