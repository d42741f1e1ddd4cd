"""Across processes (fork, spawn, pickles) and across the turns of one thread (asyncio, ...)."""

import asyncio
import copy
import gc
import pickle
import re

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support import picklable
from tests.support.helpers import assert_same
from tests.support.processes import run
from tests.support.sides import CALLS, both

X = jnp.arange(1.0, 4.0)


# --- Pickles ----------------------------------------------------------------------------------


THINGS = {
    "decorated": lambda: picklable.decorated,
    "with options": lambda: picklable.with_options,
    "under another name": lambda: picklable.elsewhere,
    "a method": lambda: picklable.Model.step,
    "a static method": lambda: picklable.Model.helper,
    "a bound method": lambda: picklable.Model(X).step,
    "a Module as function": lambda: eqxjit.filter_jit(picklable.Model(X, picklable.plain)),
    "a wrapper of a wrapper": lambda: eqxjit.filter_jit(picklable.decorated, donate="warn"),
}


@pytest.mark.parametrize("warm", [0, 1, CALLS])
@pytest.mark.parametrize("module", [pickle, cloudpickle, copy])
@pytest.mark.parametrize("name", THINGS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_copy_does_what_the_original_does(name, module, warm):
    thing = THINGS[name]()
    arguments = (picklable.Model(X), X) if name == "a method" else (X,)
    expected = thing(*jax.tree.map(jnp.copy, arguments))
    for _ in range(warm):
        thing(*jax.tree.map(jnp.copy, arguments))
    copied = copy.deepcopy(thing) if module is copy else pickle.loads(module.dumps(thing))
    assert type(copied) is type(thing)
    assert jax.tree.structure(copied) == jax.tree.structure(thing)
    for _ in range(CALLS):
        assert_same(copied(*jax.tree.map(jnp.copy, arguments)), expected)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_decorated_function_is_pickled_by_name(protocol):
    """As any function is. Upstream refuses, since the name now belongs to the wrapper."""
    assert pickle.loads(pickle.dumps(picklable.decorated, protocol)) is picklable.decorated
    assert pickle.loads(pickle.dumps(picklable.Model.step, protocol)) is picklable.Model.step
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(picklable.upstreams, protocol)


def test_options_and_entries_of_a_copy_in_this_process():
    # A new wrapper, since other tests clear caches, after which old ones have their tables alone.
    elsewhere = eqxjit.filter_jit(picklable.plain)
    elsewhere.clear_cache()
    for _ in range(CALLS):
        elsewhere(X)
    copied = pickle.loads(pickle.dumps(elsewhere))
    assert copied == elsewhere
    copied(X)
    # The same function under the same options: nothing is compiled twice.
    assert copied.cache_info() == elsewhere.cache_info()
    assert copied.cache_info()[:2] == (1, 1)
    changed = pickle.loads(pickle.dumps(eqxjit.filter_jit(picklable.plain, maxsize=3)))
    assert changed.cache_info().maxsize == 3


def test_what_was_compiled_stays_behind():
    for _ in range(CALLS):
        picklable.elsewhere(X)
        picklable.decorated(X)
    for thing in (picklable.elsewhere, picklable.decorated):
        assert len(pickle.dumps(thing)) < 500

    @eqxjit.filter_jit
    def local(x):
        return x * 2

    local(X)
    cold = len(cloudpickle.dumps(local))
    for _ in range(CALLS):
        local(X)
    assert len(cloudpickle.dumps(local)) == cold
    assert len(cloudpickle.dumps(local.__wrapped__)) < cold + 200


def test_modules_that_hold_a_wrapper():
    for model in (
        picklable.Model(X, picklable.decorated),
        picklable.Model(X, picklable.elsewhere, static=picklable.with_options),
        picklable.Model(X, static=(picklable.decorated, {"f": picklable.elsewhere})),
    ):
        copied = pickle.loads(pickle.dumps(model))
        assert eqx.tree_equal(copied, model)
        assert jax.tree.structure(copied) == jax.tree.structure(model)
        f = eqxjit.filter_jit(lambda model, x: model.weight * x)
        for _ in range(CALLS):
            f(model, X)
            f(copied, X)
        assert f.cache_info()[:2] == (1, 1)


# --- Other processes --------------------------------------------------------------------------


def test_a_fork_after_warm_up():
    """Nothing may be compiled in a forked child, by JAX itself; but what is warm is called."""
    program = """
        import os, warnings, jax.numpy as jnp
        from tests.support import picklable
        warnings.simplefilter("ignore")  # JAX warns of the fork.
        x = jnp.ones(3)
        model = picklable.Model(x)
        for calls in range(4):
            picklable.decorated(x)
            model.step(x)
            child = os.fork()
            if child == 0:
                # Specialised calls may well be made here for the first time.
                right = all(
                    picklable.decorated(x)[0].tolist() == [2, 2, 2]
                    and model.step(x).tolist() == [1, 1, 1]
                    for _ in range(4)
                )
                os._exit(0 if right else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert picklable.decorated(x)[0].tolist() == [2, 2, 2]
        print(picklable.decorated.cache_info().traces)
    """
    assert run(program) == "1\n"


# --- The turns of one thread ------------------------------------------------------------------


@both
def test_asyncio_tasks(filter_jit):
    @filter_jit
    def f(x, n):
        return x * n, n

    async def task(i):
        for step in range(10):
            n = (i + step) % 3
            y, m = f(X, n)
            await asyncio.sleep(0)
            np.testing.assert_array_equal(y, X * n)
            y, m = await asyncio.to_thread(f, X, n)
            np.testing.assert_array_equal(y, X * n)
            assert m == n

    async def main():
        await asyncio.gather(*[task(i) for i in range(5)])

    asyncio.run(main())


@both
def test_a_finaliser_that_calls_while_a_function_is_traced(filter_jit):
    inner = filter_jit(lambda x, n: (x * n, n))
    seen = []

    class Finalised:
        def __del__(self):
            with jax.ensure_compile_time_eval():
                seen.append(inner(X, 5)[0].tolist())

    @filter_jit
    def outer(x, n):
        garbage = Finalised()
        garbage.itself = garbage
        del garbage
        gc.collect()
        return inner(x, n)

    for n in range(CALLS):
        y, m = outer(X, n)
        assert_same(y, X * n)
        assert m == n
    assert seen == [(X * 5).tolist()] * CALLS


def test_pickles_refer_to_no_private_module():
    options = {"donate": "all", "maxsize": 3, "block": True}
    local = eqxjit.filter_jit(lambda x: x + 1)
    things = [
        eqxjit.filter_jit(picklable.plain, **options),
        eqxjit.filter_jit(picklable.plain, **options).__get__(1),
        picklable.decorated,
        eqxjit.pack((jnp.ones(3), "static"), optimizer=None),
        local,
    ]
    local(jnp.ones(3))
    for thing in things:
        data = cloudpickle.dumps(thing)
        assert b"eqxjit" in data or thing is picklable.decorated
        assert not re.search(rb"eqxjit\._", data), data
        assert type(pickle.loads(data)) is type(thing)
    assert pickle.loads(cloudpickle.dumps(local))(jnp.ones(3)).tolist() == [2, 2, 2]
