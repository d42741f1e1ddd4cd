"""Eight threads at once: no wrong result, no foreign exception, no process-global state touched."""

import contextlib
import gc
import logging
import os
import sys
import threading
import time
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.models import Scaled
from tests.support.sides import CALLS, both
from tests.support.threads import THREADS, race

X = jnp.arange(1.0, 4.0)


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# --- Calls ------------------------------------------------------------------------------------


@both
def test_one_wrapper_and_many_structures(filter_jit):
    @filter_jit
    def f(model, x, n):
        return {"y": model(x) * n, "n": n, "model": model}

    def work(i):
        for step in range(60):
            n, scale = (i + step) % 3, step % 2
            x = X + i
            out = f(Scaled(X, scale), x, n)
            np.testing.assert_array_equal(out["y"], X * x * scale * n)
            assert out["n"] == n
            assert out["model"].scale == scale

    race(work)


@both
def test_wrappers_made_anew_around_one_function(filter_jit):
    def loss(model, x):
        return model(x).sum()

    def work(i):
        for _ in range(20):
            gradient = filter_jit(eqx.filter_grad(loss))(Scaled(X + i, 2), X)
            np.testing.assert_array_equal(gradient.weight, X * 2)

    race(work)


@both
def test_donation(filter_jit):
    @filter_jit(donate="all")
    def f(x, n):
        return x + n

    def work(i):
        x = jnp.full(100, float(i))
        for step in range(50):
            old, x = x, f(x, 1 + step % 2)
            assert old.is_deleted()
        np.testing.assert_array_equal(x, np.full(100, i + 75.0, np.float32))

    race(work)


@both
def test_nested_wrappers_traced_at_once(filter_jit):
    inner = filter_jit(lambda x, n: (x * n, n))

    def work(i):
        @filter_jit
        def outer(x):
            y, n = inner(x, i % 3)
            return y + n

        for _ in range(CALLS):
            np.testing.assert_array_equal(outer(X), X * (i % 3) + i % 3)
            np.testing.assert_array_equal(jax.vmap(lambda x: inner(x, i % 3)[0])(X), X * (i % 3))

    race(work)


@both
def test_contexts_of_single_threads(filter_jit):
    """Configuration is a thread's own: one in x64 must not change the others' dtypes.

    Both are compiled before the race: first calls that race under different dtypes fail in one run
    of seven with `jax.jit` itself (jax 0.10.2, `RuntimeProgramInputMismatch`).
    """

    @filter_jit
    def f(x):
        return x * 2, jnp.linspace(0.0, 1.0, 3)

    numbers = np.linspace(0.0, 1.0, 7)

    def work(i, calls=20):
        wide = i % 2 == 0
        for _ in range(calls):
            with jax.enable_x64(True) if wide else contextlib.nullcontext():
                outputs = f(numbers)
            assert {output.dtype.itemsize for output in outputs} == {8 if wide else 4}

    work(0, calls=1)
    work(1, calls=1)
    race(work)


# --- Errors -----------------------------------------------------------------------------------


def checks(x, i):
    return eqx.error_if(x, x < 0, f"an error of thread {i}") * 2


def fails(x, i):
    if i:
        raise KeyError(f"an error of thread {i}")
    return x * 2


def takes_anything(x, tree):
    return x * 2


@both
@pytest.mark.parametrize(
    ("fun", "good", "bad", "message"),
    [
        (checks, lambda i: (X, i), lambda i: (-X, i), "an error of thread"),
        (fails, lambda i: (X, 0), lambda i: (X, i + 1), "an error of thread"),
        (takes_anything, lambda i: (X, [1]), lambda i: (X, [{1}]), "hash"),
    ],
)
def test_errors_in_half_of_the_calls(filter_jit, fun, good, bad, message):
    f = filter_jit(lambda *args: fun(*args))

    def work(i):
        for step in range(30):
            if (i + step) % 2:
                with pytest.raises((RuntimeError, KeyError, ValueError), match=message):
                    f(*bad(i))
            else:
                np.testing.assert_array_equal(f(*good(i)), X * 2)

    race(work)


def test_a_runtime_error_is_that_of_its_own_thread():
    """Upstream keeps the last error in one global variable: it may tell another thread's."""

    @eqxjit.filter_jit
    def f(x, i):
        return eqx.error_if(x, x < 0, f"an error of thread {i}!") * 2

    for i in range(THREADS):
        f(X, i)

    def work(i):
        for _ in range(40):
            with pytest.raises(eqx.EquinoxRuntimeError) as caught:
                f(-X, i)
            assert f"an error of thread {i}!" in str(caught.value)

    race(work)


# --- Caches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_first_calls_of_one_structure_or_shape_trace_no_more_often_than_jax_jit(slow, warm):
    def traces_in_a_race(jit):
        traces = 0
        lock = threading.Lock()

        @jit
        def f(x):
            nonlocal traces
            with lock:
                traces += 1
            if slow:
                time.sleep(0.02)
            return x * 2

        for _ in range(3 if warm else 0):
            f(X[1:])
        for result in race(lambda i: [f(X), f(X), f(X)]):
            for y in result:
                np.testing.assert_array_equal(y, X * 2)
        before = traces
        for _ in range(CALLS):
            f(X)
        assert traces == before
        return traces

    rounds = 10
    ours = [traces_in_a_race(eqxjit.filter_jit) for _ in range(rounds)]
    theirs = [traces_in_a_race(jax.jit) for _ in range(rounds)]
    assert max(ours) <= max(theirs)


def test_racing_structures_become_one_entry_each():
    f = eqxjit.filter_jit(lambda x, n: x * n)
    race(lambda i: [f(X, n) for n in range(6) for _ in range(CALLS)])
    assert f.cache_info().entries == 6


@pytest.mark.parametrize("clear", ["clear_cache", "jax", "equinox"])
def test_caches_cleared_in_between(clear):
    f = eqxjit.filter_jit(lambda x, n: {"y": x * n, "n": n})
    clears = {"clear_cache": f.clear_cache, "jax": jax.clear_caches, "equinox": eqx.clear_caches}

    def work(i):
        for step in range(12):
            if i == 0:
                clears[clear]()
                time.sleep(0.005)
            else:
                n = (i + step) % 3
                for _ in range(CALLS):
                    out = f(X, n)
                    np.testing.assert_array_equal(out["y"], X * n)
                    assert out["n"] == n

    race(work)


@pytest.mark.slow
def test_wrappers_first_called_while_structures_come_and_go():
    """Each new wrapper enters a table that a change of the function's structures goes through."""

    def shared(x, n):
        return x * n

    kept = [eqxjit.filter_jit(shared, maxsize=2) for _ in range(300)]
    for f in kept:
        f(X, 0)

    def work(i):
        for step in range(100):
            f = eqxjit.filter_jit(shared, maxsize=2) if i % 2 else kept[i]
            if i == 0:
                f.clear_cache()
            np.testing.assert_array_equal(f(X, step % 3), X * (step % 3))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        race(work)
    finally:
        sys.setswitchinterval(interval)


def test_more_structures_than_the_cache_holds():
    f = eqxjit.filter_jit(lambda x, n: (x * n, n), maxsize=2)

    def work(i):
        for step in range(12):
            n = (i + step) % 5
            for _ in range(3):
                y, m = f(X, n)
                np.testing.assert_array_equal(y, X * n)
                assert m == n

    race(work)
    assert f.cache_info().entries <= 2


@both
@pytest.mark.slow
def test_functions_collected_while_others_are_called(filter_jit):
    kept = filter_jit(lambda x: x + 1)

    def work(i):
        for n in range(4):
            if i == 0:
                gc.collect()
            np.testing.assert_array_equal(filter_jit(lambda x, n=n: x * n)(X), X * n)
            np.testing.assert_array_equal(kept(X), X + 1)

    race(work)


# --- Global state -----------------------------------------------------------------------------


def _state():
    """What upstream changes for the time of a call, and what else a careless wrapper might."""
    logger = logging.getLogger("jax._src.callback")
    return (
        tuple(map(id, logger.filters)),
        id(warnings.filters),
        tuple(warnings.filters),
        id(warnings.showwarning),
        dict(os.environ),
        sys.getrecursionlimit(),
        gc.isenabled(),
    )


@pytest.mark.parametrize("donate", ["none", "all"])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_call_in_progress_changes_no_global_state(donate):
    """Seen from inside the program, by a callback: deterministic, unlike a look from outside."""
    seen = []

    def look(x):
        seen.append(_state())
        return np.asarray(x)

    changed = {}
    for filter_jit in (eqx.filter_jit, eqxjit.filter_jit):
        f = filter_jit(
            lambda x: jax.pure_callback(look, jax.ShapeDtypeStruct((3,), jnp.float32), x),
            donate=donate,
        )
        f(X + 0)
        changed[filter_jit] = []
        for _ in range(CALLS):
            seen.clear()
            x = X + 0
            before = _state()
            f(x)
            changed[filter_jit].append([now != before for now in seen])
    assert changed[eqx.filter_jit] == [[True]] * CALLS
    assert changed[eqxjit.filter_jit] == [[False]] * CALLS
