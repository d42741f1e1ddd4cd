"""Calls whose function JAX doesn't trace: `disable_jit`, and constants that are folded eagerly."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.sides import both


@both
@pytest.mark.parametrize("n_before", [0, 3])
def test_without_arrays_under_ensure_compile_time_eval(filter_jit, n_before):
    squares = filter_jit(lambda n: jnp.arange(n) ** 2)
    for _ in range(n_before):
        squares(4)

    @jax.jit
    def add(x):
        with jax.ensure_compile_time_eval():
            table = squares(4)
        return x + table

    assert add(jnp.ones(4)).tolist() == [1, 2, 5, 10]
    assert squares(4).tolist() == [0, 1, 4, 9]


@both
@pytest.mark.parametrize("error", [TypeError("mine"), RuntimeError()])
def test_the_users_error_under_disable_jit(filter_jit, error):
    @filter_jit
    def fail(x, names):
        raise error

    with jax.disable_jit(), pytest.raises(type(error)) as raised:
        # JAX can't trace texts, which isn't what failed.
        fail(jnp.ones(2), np.array(["a", "b"]))
    assert raised.value is error
    assert raised.value.__cause__ is None


def test_no_lock_is_held_while_static_values_are_compared():
    """Or a lock that an `==` takes, as of an ORM, might wait for another caller without end."""
    f = eqxjit.filter_jit(lambda x, value: x * value.n)
    x = jnp.ones(2)
    finished = []

    class Value:
        def __init__(self, n, hashed=1):
            self.n = n
            self.hashed = hashed

        def __hash__(self):
            return self.hashed

        def __eq__(self, other):
            if threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=f, args=(x, Value(len(finished), 10)), daemon=True)
                thread.start()
                thread.join(60)
                finished.append(not thread.is_alive())
            return type(other) is Value and self.n == other.n

    for n in range(2):
        assert f(x, Value(n)).tolist() == [n, n]
    assert finished
    assert all(finished)


@both
def test_disable_jit_switched_within_a_call(filter_jit):
    depth = 0

    @filter_jit
    def f(x):
        nonlocal depth
        if not jax.config.jax_disable_jit or depth:
            return x * 2
        depth = 1
        with jax.disable_jit(False):
            return f(x) + 1

    x = jnp.arange(3.0)
    for _ in range(3):
        f(x)
    with jax.disable_jit():
        assert f(x).tolist() == [1, 3, 5]


@both
def test_disable_jit_in_one_of_two_threads(filter_jit):
    is_within, is_done = threading.Event(), threading.Event()

    @filter_jit
    def f(x):
        if jax.config.jax_disable_jit:
            is_within.set()
            is_done.wait(60)
        return {"twice": x * 2}

    def call_unjitted():
        with jax.disable_jit():
            results.append(f(x))

    x, results = jnp.arange(3.0), []
    for _ in range(3):
        f(x)
    thread = threading.Thread(target=call_unjitted)
    thread.start()
    is_within.wait(60)
    results.append(f(x))
    is_done.set()
    thread.join()
    assert [result["twice"].tolist() for result in results] == [[0, 2, 4]] * 2
