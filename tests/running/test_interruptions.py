"""Exceptions and dying objects in the middle of eqxjit's own code leave nothing behind."""

import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import eqxjit

_FOLDER = str(Path(eqxjit.__file__).parent)
X = jnp.ones(3)


class Interrupted(Exception):
    """Raised like by a signal handler, between two calls of Python functions."""


def interrupted_at(number, action):
    """Run an action, and raise in eqxjit's `number`-th call. Return whether there were so many."""
    n_calls = 0

    def trace(frame, event, _):
        nonlocal n_calls
        if event == "call" and frame.f_code.co_filename.startswith(_FOLDER):
            n_calls += 1
            if n_calls == number:
                sys.settrace(None)
                raise Interrupted
        return

    sys.settrace(trace)
    try:
        action()
    except Interrupted:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("first", range(1, 8))
def test_an_interrupt_anywhere_in_a_first_call_leaves_no_trace_under_way(first):
    """Only the traces in `cache_info` count towards `max_traces`, and later calls are right."""
    reached = True
    number = first
    n_uncounted = 0
    while reached:
        strict = eqxjit.filter_jit(lambda x, n: x * n, max_traces=1)
        reached = interrupted_at(number, lambda f=strict: f(X, 2))
        if strict.cache_info().traces == 0:
            n_uncounted += 1
            assert jnp.array_equal(strict(X, 2), 2 * X)
        f = eqxjit.filter_jit(lambda x, n: x * n, max_traces=2)
        interrupted_at(number, lambda f=f: f(X, 2))
        for _ in range(3):
            assert jnp.array_equal(f(X, 2), 2 * X)
        assert f.cache_info().entries == 1
        number += 7
    assert n_uncounted > 5


def test_a_failed_trace_is_no_trace():
    fails = True

    @eqxjit.filter_jit(max_traces=1)
    def f(x):
        if fails:
            raise Interrupted
        return x + 1

    for _ in range(5):
        with pytest.raises(Interrupted):
            f(X)
    fails = False
    assert f(X)[0] == 2
    assert f.cache_info().traces == 1


class Last:
    """The last owner of some objects. When it dies, it waits for its peer, and then they die."""

    def __init__(self, barrier, held):
        self.barrier = barrier
        self.held = held

    def __del__(self):
        self.barrier.wait(30)
        self.held.clear()


def test_objects_of_two_functions_that_die_in_each_others_hands():
    """Each function's cache is cleared while the other's drops one of its static objects."""
    barrier = threading.Barrier(2)
    functions = [eqxjit.filter_jit(lambda x, fun, out: (fun(x), out.pop())) for _ in range(2)]
    # Closures are compared by identity, so an entry dies with each closure.
    closures = [[lambda x, i=i: x + i] for i in range(2)]
    popping = [Popping([Last(barrier, others)]) for others in closures[::-1]]
    # The cache keeps what a trace made and returned. What is traced first is dropped first.
    for f, values in zip(functions, popping, strict=True):
        f(X, jnp.sin, values)
    none = Popping([None] * 2)
    for f, [closure] in zip(functions, closures, strict=True):
        f(X, closure, none)
    del closure, closures
    threads = [threading.Thread(target=f.clear_cache, daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert [f.cache_info().entries for f in functions] == [0, 0]


class Popping:
    """A static object from which the traced function pops an item."""

    def __init__(self, values):
        self.pop = values.pop


@pytest.mark.parametrize(
    "error", [KeyError("gone"), NotImplementedError(), TypeError("moved")], ids=repr
)
def test_jax_that_finds_a_program_no_more_fails_no_call(monkeypatch, error):
    """The call has run, but it is unknown whether its program can raise."""
    f = eqxjit.filter_jit(lambda x: x + 1)
    f(X)
    n_asked = 0

    def lower(*_, **__):
        nonlocal n_asked
        n_asked += 1
        raise error

    monkeypatch.setattr(jax.stages.Traced, "lower", lower)
    x = jnp.ones(4)
    assert jnp.array_equal(f(x), x + 1)
    assert n_asked == 1
    assert jnp.array_equal(f(x), x + 1)
    assert n_asked == 1
