"""Eight threads at once: no wrong result, no foreign exception, no process-global state touched."""

import contextlib
import gc
import logging
import os
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

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
    f = filter_jit(lambda model, x, n: {"y": model(x) * n, "n": n, "model": model})

    def work(i):
        for step in range(30):
            n, scale = (i + step) % 3, step % 2
            out = f(Scaled(X, scale), X + i, n)
            np.testing.assert_array_equal(out["y"], X * (X + i) * scale * n)
            assert (out["n"], out["model"].scale) == (n, scale)

    race(work)
    assert filter_jit is eqx.filter_jit or f.cache_info().entries == 6


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


def test_functions_defined_again_by_all_threads():
    """One explanation counts the calls of all of them."""

    def work(i):
        for _ in range(10):
            f = eqxjit.filter_jit(lambda x: x + i)
            for _ in range(2):
                np.testing.assert_array_equal(f(X), X + i)

    race(work)


@both
def test_contexts_of_single_threads(filter_jit):
    """Each thread has its own configuration. A thread with x64 must not change others' dtypes."""
    f = filter_jit(lambda x: (x * 2, jnp.linspace(0.0, 1.0, 3)))
    numbers = np.linspace(0.0, 1.0, 7)

    def work(i, calls=20):
        wide = i % 2 == 0
        for _ in range(calls):
            with jax.enable_x64(True) if wide else contextlib.nullcontext():
                outputs = f(numbers)
            assert {output.dtype.itemsize for output in outputs} == {8 if wide else 4}

    # Trace before the race, because racing first calls with different dtypes can fail in JAX.
    work(0, calls=1)
    work(1, calls=1)
    race(work)


# --- Errors -----------------------------------------------------------------------------------


def test_a_runtime_error_is_that_of_its_own_thread():
    """Equinox keeps the last error in one global variable, so it may show another thread's."""

    @eqxjit.filter_jit
    def f(x, i, fails=False):
        if fails:
            raise KeyError(f"an error of thread {i}!")
        return eqx.error_if(x, x < 0, f"an error of thread {i}!") * 2

    for i in range(THREADS):
        f(X, i)

    def work(i):
        bad = [(-X, i), (X, i, True), (X, [i, {1}])]
        for step in range(12):
            with pytest.raises((eqx.EquinoxRuntimeError, KeyError, ValueError)) as caught:
                f(*bad[step % 3])
            assert f"an error of thread {i}!" in str(caught.value) or "hash" in str(caught.value)
            np.testing.assert_array_equal(f(X, i), X * 2)

    race(work)


# --- Caches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
def test_first_calls_of_one_structure_or_shape_trace_no_more_often_than_jax_jit(warm):
    def traces_in_a_race(jit):
        traces = []

        @jit
        def f(x):
            traces.append(1)
            time.sleep(0.01)
            return x * 2

        for _ in range(3 if warm else 0):
            f(X[1:])
        for result in race(lambda i: [f(X), f(X), f(X)]):
            np.testing.assert_array_equal(result, [X * 2] * 3)
        before = len(traces)
        f(X)
        assert len(traces) == before
        return before

    ours, theirs = (
        [traces_in_a_race(jit) for _ in range(4)] for jit in (eqxjit.filter_jit, jax.jit)
    )
    assert max(ours) <= max(theirs)


class Static:
    """Compares by identity."""


@pytest.mark.parametrize("clear", ["clear_cache", "jax", "equinox", "collect", "evict"])
def test_caches_cleared_in_between(clear):
    """Meanwhile functions with the same table are wrapped, and others are garbage-collected."""

    def fun(x, n):
        return {"y": x * n, "n": n}

    options = {"maxsize": 2} if clear == "evict" else {}
    f = eqxjit.filter_jit(fun, **options)
    clears = {"clear_cache": f.clear_cache, "jax": jax.clear_caches, "equinox": eqx.clear_caches}
    action = clears.get(clear, gc.collect)

    def work(i):
        for step in range(6):
            if i == 0:
                action()
                time.sleep(0.005)
                continue
            n = (i + step) % 5
            static = Static()
            for g in (f, eqxjit.filter_jit(fun, **options)):
                for _ in range(CALLS):
                    out = g(X, n)
                    np.testing.assert_array_equal(out["y"], X * n)
                    assert out["n"] == n
            # Its entry may be dropped with it, at any moment.
            assert f_of_statics(X, static) is static

    f_of_statics = eqxjit.filter_jit(lambda x, static: static)
    race(work)
    assert clear != "evict" or f.cache_info().entries <= 2


# --- Global state -----------------------------------------------------------------------------


def _state():
    """Return global state that Equinox, or a careless wrapper, changes during a call."""
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


@both
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_call_in_progress_changes_no_global_state(filter_jit):
    """A callback reads the state from inside the program, which is deterministic."""
    seen = []

    def look(x):
        seen.append(_state())
        return np.asarray(x)

    f = filter_jit(
        lambda x: jax.pure_callback(look, jax.ShapeDtypeStruct((3,), jnp.float32), x), donate="all"
    )
    f(X + 0)
    for _ in range(CALLS):
        seen.clear()
        before = _state()
        f(X + 0)
        # Upstream's do.
        assert [now != before for now in seen] == [filter_jit is eqx.filter_jit]


def test_a_trace_ends_while_another_thread_is_in_the_middle_of_one():
    """The other thread's program is still read, because it may raise."""
    is_begun, may_end = threading.Event(), threading.Event()

    @eqxjit.filter_jit
    def f(x):
        if x.shape == (3,):
            return x
        is_begun.set()
        assert may_end.wait(60)
        return eqx.error_if(x, x[0] < 0, "negative")

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(f, jnp.ones(2))
        assert is_begun.wait(60)
        f(jnp.ones(3))
        may_end.set()
        other.result()
    for trace in f.traces():
        assert trace.program.calls_python == (trace.summary == "x: float32[2]")


class Counting:
    """A pytree of one array that counts how often it is flattened."""

    n_flattened = 0

    def __init__(self, array):
        self.array = array


def _flatten(node):
    Counting.n_flattened += 1
    return (node.array,), None


jax.tree_util.register_pytree_node(Counting, _flatten, lambda _, children: Counting(*children))

#: The event that JAX sends at the end of a phase.
_AFTER = {"tracing": None, "lowering": "/jax/core/compile/jaxpr_to_mlir_module_duration"}


@pytest.mark.parametrize("phase", _AFTER)
@both
def test_warm_calls_do_no_more_while_another_thread_traces(filter_jit, phase):
    """The tracing thread is stopped in the user's function, or between lowering and compiling."""
    is_held_up, may_go_on = threading.Event(), threading.Event()
    traced_shapes = []

    def hold_up():
        is_held_up.set()
        assert may_go_on.wait(60)

    @filter_jit
    def f(node, x):
        traced_shapes.append(x.shape)
        if x.shape == (3,) and phase == "tracing":
            hold_up()
        return {"y": node.array * x[0], "node": node}

    def n_flattened_by_a_warm_call():
        before = Counting.n_flattened
        np.testing.assert_array_equal(f(node, jnp.ones(2))["y"], X)
        return Counting.n_flattened - before

    def on_end(event, seconds, **_):
        if event == _AFTER[phase] and threading.current_thread().name.startswith("held up"):
            hold_up()

    node = Counting(X)
    for _ in range(CALLS):
        f(node, jnp.ones(2))
    usual = n_flattened_by_a_warm_call()
    # It stays registered, because not every release of JAX can unregister a listener.
    jax.monitoring.register_event_duration_secs_listener(on_end)
    with ThreadPoolExecutor(1, "held up") as slow, ThreadPoolExecutor(1) as warm:
        other = slow.submit(f, node, jnp.ones(3))
        try:
            assert is_held_up.wait(60)
            for _ in range(CALLS):
                assert warm.submit(n_flattened_by_a_warm_call).result(60) == usual
            assert not other.done()
        finally:
            may_go_on.set()
        np.testing.assert_array_equal(other.result()["y"], X)
    assert traced_shapes == [(2,), (3,)]
    assert n_flattened_by_a_warm_call() == usual


@pytest.mark.parametrize("max_traces", [1, 2])
def test_traces_at_the_same_time_are_limited_together(max_traces):
    """None of the traces was counted when the others began."""
    barrier = threading.Barrier(3)

    @eqxjit.filter_jit(max_traces=max_traces)
    def f(x):
        barrier.wait(60)
        return x + 1

    def work(i):
        try:
            return f(jnp.ones(i + 2)).shape
        except eqxjit.TooManyTracesError:
            return None

    with ThreadPoolExecutor(3) as pool:
        shapes = [*pool.map(work, range(3))]
    assert len([shape for shape in shapes if shape]) == max_traces
    assert f.cache_info().traces == max_traces


def test_traces_within_each_other_are_limited_together():
    @eqxjit.filter_jit(max_traces=2)
    def total(x, n):
        return x if n == 0 else total(x, n - 1) + n

    assert total(jnp.zeros(()), 1) == 1
    total.clear_cache()
    with pytest.raises(eqxjit.TooManyTracesError, match="trace 3"):
        total(jnp.zeros(()), 2)
