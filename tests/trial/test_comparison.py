"""A trial compares results with Equinox's, and names each kind of difference with its path."""

import contextlib
import dataclasses
import functools
import gc
import random
import signal
import sys
import textwrap
import threading
import time
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optimistix
import pytest

import eqxjit
from tests.support.inside import interceptor_of
from tests.support.processes import python

X = jnp.ones(3)


class Under:
    """Tells in a trace whether eqxjit traces, which does so first, or Equinox."""

    def __init__(self):
        self.n_traces = 0

    def of_eqxjit(self):
        self.n_traces += 1
        return self.n_traces == 1


@contextlib.contextmanager
def timeouts(number):
    """Have a signal raise `TimeoutError`."""

    def time_out(*_):
        raise TimeoutError

    before = signal.signal(number, time_out)
    try:
        yield
    finally:
        signal.signal(number, before)


def tried(function, *args, n=3, **options):
    """Return the result for a function that is called a few times in a trial."""
    with eqxjit.trial() as trial:
        jitted = eqxjit.filter_jit(function, **options)
        for _ in range(n):
            jitted(*args)
    [row] = [row for row in trial.functions if row.function == function.__name__]
    return row, trial


FAULTS = {
    "a bit": (lambda x: x.at[1].set(jnp.nextafter(x[1], 2.0)), "output[0]['b'][1]"),
    "a value": (lambda x: x.at[2].set(5.0), "output[0]['b'][2]"),
    "a dtype": (lambda x: x.astype(jnp.float16), "dtype of output[0]['b']"),
    "a weak type": (lambda x: jax.lax.full_like(2.0, 1.0), "weak_type of output[0]['b']"),
    "a shape": (lambda x: x[:2], "shape of output[0]['b']"),
    "the structure": (lambda x: [x], "output[0]['b']"),
    "no array": (lambda x: None, "output[0]['b']"),
    "a static object": (lambda x: "relu", "output[0]['b']"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_wrong_result_is_named_by_path(kind, capsys):
    wrong, path = FAULTS[kind]
    under = Under()

    def step(x):
        right = jnp.ones(()) * 1 if kind == "a weak type" else x
        return ({"a": x, "b": wrong(x) if under.of_eqxjit() else right},)

    row, trial = tried(step, jnp.ones(3))
    [difference] = row.differences
    assert difference.startswith(f"{path}: ")
    is_rounding = kind == "a bit"
    assert ("within rounding" in difference) == is_rounding
    assert row.is_wrong == trial.is_wrong == (not is_rounding)
    assert f"{row.function}: {difference}" in capsys.readouterr().out


def test_a_wrong_key_is_named_by_its_index():
    under = Under()

    def step(keys):
        wrong = jax.random.wrap_key_data(jax.random.key_data(keys).at[1, 1].add(1))
        return wrong if under.of_eqxjit() else keys

    row, _ = tried(step, jax.random.split(jax.random.key(0), 3))
    [difference] = row.differences
    assert difference.startswith("output[1]: array([")
    assert row.is_wrong


def test_a_static_object_of_another_type_is_named():
    under = Under()

    def step(x):
        return x, 1 if under.of_eqxjit() else True

    row, _ = tried(step, jnp.ones(3))
    assert row.differences == ["output[1]: int 1 under eqxjit, bool True under Equinox"]


def test_a_static_field_is_named():
    under = Under()

    def step(x):
        return eqx.nn.Dropout(0.5, inference=under.of_eqxjit()), eqx.nn.Lambda(jax.nn.relu)

    row, _ = tried(step, jnp.ones(3))
    [difference] = row.differences
    assert "output[0]" in difference
    assert row.is_wrong


@pytest.mark.parametrize("first", [True, False])
def test_an_error_is_named(first):
    under = Under()

    def step(x):
        if under.of_eqxjit() == first:
            raise KeyError("oh")
        return x

    with eqxjit.trial() as trial:
        jitted = eqxjit.filter_jit(step)
        try:
            jitted(jnp.ones(3))
        except KeyError:
            assert first
    [row] = trial.functions
    [difference] = row.differences
    assert "KeyError: 'oh'" in difference
    assert "no error" in difference


def test_equal_errors_are_equal():
    def step(x):
        raise KeyError("oh")

    with eqxjit.trial() as trial:
        for _ in range(3):
            with pytest.raises(KeyError, match="oh"):
                eqxjit.filter_jit(step)(jnp.ones(3))
            with pytest.raises(TypeError):
                eqxjit.filter_jit(step)()
    assert [row.differences for row in trial.functions] == [[]]


def test_keys_numbers_and_modules_are_equal():
    def step(key, model, state, x):
        new, out = jax.random.split(key), jax.vmap(model)(x)
        return new, out, model, state, (1, "text", None, jnp.float32(2), lambda: 1)

    model = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    row, _ = tried(step, jax.random.key(0), model, (norm, state), np.ones((2, 3), np.float32))
    assert row.differences == []
    assert row.compared == 3


@pytest.mark.parametrize("donate", ["all", "all-except-first"])
def test_donated_arrays_are_copied_before_the_call(donate):
    @eqxjit.filter_jit(donate=donate)
    def step(x, state, key, batch):
        return state + x.sum() + batch.sum(), jax.random.split(key)[0]

    batch = np.ones(4, np.float32)
    with eqxjit.trial() as trial:
        state, key = jnp.arange(4.0), jax.random.key(0)
        for i in range(60):
            x, state_before = jnp.ones(3), state
            batch[:] = i
            state, key = step(x, state, key, batch)
            assert state_before.is_deleted()
    expected = 60 * 3 + 4 * np.arange(60).sum()
    np.testing.assert_allclose(np.asarray(state) - np.arange(4), expected, rtol=1e-5)
    [row] = [row for row in trial.functions if row.function.endswith("step")]
    assert row.calls == 60
    assert row.compared >= 3
    assert row.differences == []


# --- What is known to differ, and effects --------------------------------------------------------


def test_slow_functions_are_compared_less_often():
    @eqxjit.filter_jit
    def compute(x, n):
        return jax.lax.fori_loop(0, n, lambda _, x: x @ x / 300, x)

    x, n, seconds = jnp.ones((300, 300)), jnp.int32(50), 0.0
    while seconds < 0.7:
        n, begun = 2 * n, time.monotonic()
        jax.block_until_ready(compute(x, n))
        seconds = time.monotonic() - begun
    with eqxjit.trial() as trial:
        for _ in range(3):
            jax.block_until_ready(compute(x, n))
    [row] = trial.functions
    assert 1 <= row.compared <= 2
    assert row.differences == []


def test_what_equinox_returns_for_an_equal_value_is_a_known_difference():
    def step(x, n):
        return x, type(n).__name__

    with eqxjit.trial() as trial:
        jitted = eqxjit.filter_jit(step)
        for _ in range(60):
            assert jitted(jnp.ones(3), 1)[1] == "int"
        for _ in range(60):
            assert jitted(jnp.ones(3), True)[1] == "bool"
    [row] = trial.functions
    [difference] = row.differences
    assert difference.startswith("known difference: output[1]")
    assert not trial.is_wrong


class Config:
    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return isinstance(other, Config)

    def __hash__(self):
        return 0


def test_static_objects_of_the_first_caller_are_a_known_difference():
    def step(x, config):
        return x, config

    with eqxjit.trial() as trial:
        jitted = eqxjit.filter_jit(step)
        configs = [Config("a"), Config("b")]
        for config in configs:
            for _ in range(40):
                assert jitted(jnp.ones(3), config)[1] is config
    assert not trial.is_wrong


def test_a_function_that_calls_python_is_compared_once():
    calls = []

    def step(x):
        jax.debug.callback(lambda: calls.append(1))
        return x + 1

    row, _ = tried(step, jnp.ones(3), n=20)
    jax.effects_barrier()
    assert row.compared == 1
    assert "calls Python" in row.effects
    assert len(calls) == 21


def test_a_check_for_errors_is_no_effect():
    def step(x):
        x = eqx.error_if(x, x.sum() > 100, "too large")
        return eqx.error_if(x, jnp.isnan(x), "not a number")

    row, _ = tried(step, jnp.ones(3), n=5)
    assert row.verdict == f"{row.compared} calls compared: equal, bit for bit"
    assert row.compared >= 3


def test_a_function_that_prints_is_compared_once_and_prints_once(capsys):
    stream = sys.stdout

    def step(x):
        print("tracing")
        return x + 1

    row, _ = tried(step, jnp.ones(3), n=20)
    assert row.compared == 1
    assert "prints" in row.effects
    assert capsys.readouterr().out.count("tracing") == 1
    assert sys.stdout is stream


def _numbers():
    n = 0
    while True:
        yield (n := n + 1)


@pytest.mark.parametrize("source", [random.Random(0), np.random.default_rng(0), _numbers()])
@pytest.mark.parametrize("is_argument", [True, False])
def test_a_function_with_a_stateful_object_is_listed(source, is_argument):
    draw = {"random": "random", "Generator": "random"}

    def step(x, given):
        given = given or source
        name = {"Random": "random"}.get(type(given).__name__)
        name = name or draw.get(type(given).__name__, "__next__")
        return x + getattr(given, name)()

    row, _ = tried(step, jnp.ones(3), source if is_argument else None)
    assert row.compared <= 1
    assert type(source).__name__ in row.effects
    assert row.differences == []


def test_a_function_that_differs_from_trace_to_trace_is_listed():
    numbers = [0]

    def step(x):
        numbers[0] += 1
        return x + numbers[0]

    row, trial = tried(step, jnp.ones(3))
    assert row.verdict == "not compared: its results differ from trace to trace"
    assert (row.compared, row.differences) == (0, [])
    assert "from trace to trace" in row.effects
    assert not trial.is_wrong


# --- Which calls are tried ------------------------------------------------------------------------


def outcome(do):
    with eqxjit.trial() as trial:
        do()
    assert not trial.is_wrong
    return {row.function.rpartition(".")[2]: row for row in trial.functions}


def test_only_the_outermost_function_is_compared():
    @eqxjit.filter_jit
    def inner(x):
        return 2 * x

    @eqxjit.filter_jit
    def outer(x):
        return inner(x) + 1

    rows = outcome(lambda: [outer(jnp.ones(3)) for _ in range(5)])
    assert {*rows} == {"outer"}
    assert rows["outer"].compared >= 3


def test_while_equinox_traces_nested_functions_are_equinoxs_too():
    @eqxjit.filter_jit
    def inner(x, n):
        return x, type(n).__name__

    @eqxjit.filter_jit
    def outer(x):
        return inner(x, 1), inner(x, True)

    rows = outcome(lambda: [outer(jnp.ones(3)) for _ in range(5)])
    [difference] = rows["outer"].differences
    # Equinox returns what it has traced for `1`.
    assert difference.startswith("known difference: output[1][1]: 'bool' under eqxjit, 'int'")


def test_transformations_of_a_function_work_and_are_not_compared():
    @eqxjit.filter_jit
    def f(x):
        return jnp.sum(x**2)

    def do():
        for _ in range(4):
            np.testing.assert_array_equal(jax.vmap(f)(jnp.ones((2, 3))), [3.0, 3.0])
            np.testing.assert_array_equal(jax.grad(f)(jnp.ones(3)), [2.0, 2.0, 2.0])

    assert outcome(do) == {}


class Model(eqx.Module):
    linear: eqx.nn.Linear
    apply: object = None

    @eqxjit.filter_jit
    def step(self, x):
        return self.linear(x)


def test_a_part_of_another_program_is_not_compared_although_its_arguments_are_known():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    known = jnp.ones(5)
    n_calls = 0
    with eqxjit.trial() as trial:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            double(X)
            n_calls += 1
        result = jax.jit(lambda x: x + double(known).sum() + double(X).sum())(1.0)
        slope = jax.grad(lambda x: x * double(X).sum())(1.0)
    assert (result, slope) == (17, 6)
    [row] = trial.functions
    assert row.verdict.endswith("compared: equal, bit for bit")
    assert row.calls == n_calls


def test_a_call_within_another_jitted_function_is_not_counted_although_its_arguments_are_known():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    n_calls = 0
    with eqxjit.trial() as trial:
        for _ in range(10):
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                double(X)
                n_calls += 1
            eqxjit.filter_jit(lambda x: x + double(X))(X)
    assert [row.calls for row in trial.functions] == [n_calls, 10]


@pytest.mark.parametrize("donate", ["none", "all"])
def test_the_next_calls_of_a_new_shape_are_compared_too(donate):
    double = eqxjit.filter_jit(lambda x: 2 * x, donate=donate)
    with eqxjit.trial() as trial:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            double(jnp.ones(3))
        [before] = trial.functions
        for _ in range(4):
            double(jnp.ones(5))
        [after] = trial.functions
    assert after.compared - before.compared >= 3


def test_methods_partials_and_wrappers_in_modules_are_tried():
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    model = Model(linear, eqxjit.filter_jit(linear))
    leaves = jax.tree.leaves(model)

    def do():
        nonlocal model
        model = jax.tree.map(lambda x: x, model)
        for _ in range(4):
            x = model.step(jnp.ones(3))
            assert type(model.apply) is eqxjit.types.JitFunction
            np.testing.assert_array_equal(model.apply(jnp.ones(3)), x)
            functools.partial(model.step, jnp.ones(3))()

    rows = outcome(do)
    assert rows["step"].calls == 8
    assert rows["Linear"].calls == 4
    assert len(jax.tree.leaves(model)) == len(leaves)


def test_libraries_are_tried():
    @eqx.filter_jit
    def of_library(x):
        return x + 1

    rows = outcome(lambda: [of_library(jnp.ones(3)) for _ in range(4)])
    assert rows["of_library"].compared >= 3


def test_when_it_is_over_calls_are_eqxjits_alone():
    f = eqxjit.filter_jit(lambda x: x + 1)
    f(jnp.ones(3))
    hits = f.cache_info().hits
    with eqxjit.trial() as trial:
        for _ in range(200):
            f(jnp.ones(3))
    [row] = trial.functions
    for _ in range(10):
        f(jnp.ones(3))
    assert f.cache_info().traces == 1
    assert trial.functions[0].calls == row.calls == 200
    assert f.cache_info().hits >= hits + 10


def test_calls_of_other_threads_are_tried_and_sampled():
    f = eqxjit.filter_jit(lambda x: x + 1)

    def work():
        for _ in range(2000):
            f(jnp.ones(3))

    def do():
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()

    [row] = outcome(do).values()
    assert row.compared >= 3
    assert row.calls == 8_000


def test_a_few_other_threads_are_listed():
    def work():
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass

    with eqxjit.trial(compare=False) as trial:
        for _ in range(6):
            # A program may start a new thread in each step.
            thread = threading.Thread(target=work)
            thread.start()
            while thread.is_alive():
                time.sleep(0.001)
    assert 1 <= str(trial).count("\nThread ") <= 3


def test_in_a_program_of_several_processes_nothing_runs_twice(monkeypatch):
    # The processes would run a collective operation a different number of times.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    row, _ = tried(add_one, jnp.ones(3), n=200)
    assert row.compared == 0
    assert "processes" in row.verdict


def add_one(x):
    return x + 1


def test_figures_are_consistent():
    f = eqxjit.filter_jit(lambda x: x + 1)
    with eqxjit.trial() as trial:
        for _ in range(5000):
            float(f(jnp.ones(3))[0])
    names = "jitted calls", "tracing and compiling", "operations outside jit", "waiting"
    assert {*trial.shares} == {*names, "moving data", "Python"}
    assert abs(sum(trial.shares.values()) - 1) < 1e-6
    shares = [line.share for line in trial.lines]
    assert shares == sorted(shares, reverse=True)
    assert {line.kind for line in trial.lines} <= {*trial.shares}
    here = [line for line in trial.lines if line.line.filename == __file__]
    assert sum(line.share for line in here) > 0.5
    [row] = trial.functions
    assert row.calls == 5000
    assert row.seconds_equinox > 0
    assert row.seconds_eqxjit > 0
    assert trial.seconds >= trial.seconds_steady > 0
    assert "<table" in trial._repr_html_()


def test_without_a_comparison_nothing_runs_under_equinox():
    under = Under()

    def step(x):
        under.of_eqxjit()
        return x + 1

    f = eqxjit.filter_jit(step)
    with eqxjit.trial(compare=False) as trial:
        for _ in range(500):
            f(jnp.ones(3))
    [row] = trial.functions
    assert under.n_traces == 1
    assert row.compared == 0
    assert np.isnan(row.seconds_equinox)
    assert row.seconds_eqxjit > 0


def test_a_wrapper_that_was_tried_is_freed():
    f = eqxjit.filter_jit(lambda x: x + 1)
    with eqxjit.trial():
        for _ in range(5):
            f(jnp.ones(3))
    ref = weakref.ref(f)
    del f
    gc.collect()
    assert ref() is None


class Trainer:
    """An object that holds a wrapper of its own method."""

    def __init__(self):
        self.step = eqxjit.filter_jit(self.compute)

    def compute(self, x):
        return x + 1


def test_an_object_that_refers_to_its_wrapper_is_freed_during_a_trial():
    def trained():
        trainer = Trainer()
        trainer.step(jnp.ones(3))
        return weakref.ref(trainer)

    with eqxjit.trial(compare=False):
        ref = trained()
        gc.collect()
        assert ref() is None


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_an_alarm_of_the_program_comes_all_the_same():
    came = []
    handler = signal.signal(signal.SIGALRM, lambda *_: came.append(time.monotonic()))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.2)
    begun = time.monotonic()
    try:
        with eqxjit.trial():
            while time.monotonic() < begun + 0.5:
                time.sleep(0.01)
        assert [when - begun >= 0.15 for when in came] == [True]
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with eqxjit.trial():
            pass
        time.sleep(0.4)
        assert len(came) == 2
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
@pytest.mark.parametrize("asks", ["handler", "timer", "alarm", "keyword", "no"])
def test_a_program_that_uses_alarms_gets_them_as_they_are(asks, capsys):
    came = []

    def came_one(*_):
        came.append(time.monotonic())

    before = {name: getattr(signal, name) for name in ("signal", "alarm", "setitimer", "pause")}
    handler, timer = signal.signal(signal.SIGALRM, signal.SIG_DFL), signal.setitimer(0, 0)
    try:
        with eqxjit.trial():
            time.sleep(0.02)
            # Others aren't affected.
            signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))
            if asks == "timer":
                assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
            elif asks == "alarm":
                assert signal.alarm(0) == 0
            elif asks == "handler":
                assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
            if asks == "keyword":
                signal.signal(signalnum=signal.SIGALRM, handler=came_one)
            elif asks != "no":
                assert signal.signal(signal.SIGALRM, came_one) is signal.SIG_DFL
            # The program gets no timer signal of the trial.
            time.sleep(0.05)
            assert not came
            if asks != "no":
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                time.sleep(0.2)
                assert len(came) == 1
        assert ("Lines were sampled until" in capsys.readouterr().out) == (asks != "no")
        is_mine = signal.getsignal(signal.SIGALRM) is came_one
        assert is_mine == (asks != "no")
        assert all(getattr(signal, name) is each for name, each in before.items())
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


RANDOM = """
    import random, sys, threading, time
    import jax.numpy as jnp, numpy as np
    import eqxjit

    def drawn_after_a_call():
        random.seed(0)
        np.random.seed(0)
        eqxjit.filter_jit(lambda x: x + random.random() + np.random.rand())(jnp.ones(3))
        return random.random(), np.random.rand()

    def drawn_beside_calls():
        np.random.seed(0)
        calls = threading.Thread(target=lambda: [
            eqxjit.filter_jit(lambda x: time.sleep(0.02) or x + n)(jnp.ones(3)) for n in range(20)
        ])
        calls.start()
        drawn = []
        while calls.is_alive():
            drawn.append(np.random.rand())
            time.sleep(0.001)
        return drawn

    expected = drawn_after_a_call()
    with eqxjit.trial() as trial:
        assert drawn_after_a_call() == expected
        assert not trial.is_wrong
        drawn = drawn_beside_calls()
    np.random.seed(0)
    assert drawn == [*np.random.rand(len(drawn))]
    print("as without a trial", file=sys.stderr)
"""


def test_a_comparison_draws_none_of_the_programs_random_numbers():
    # In a process without other threads.
    result = python("-c", textwrap.dedent(RANDOM))
    assert result.stderr.endswith("as without a trial\n"), result.stderr


scale = 2.0


def test_what_changed_since_a_trace_before_the_trial_is_no_fault():
    global scale
    f = eqxjit.filter_jit(lambda x: scale * x)
    f(jnp.ones(3))
    scale = 3.0
    with eqxjit.trial() as trial:
        for _ in range(5):
            assert f(jnp.ones(3))[0] == 2.0
    assert not trial.is_wrong
    [row] = trial.functions
    assert "traced before the trial" in row.differences[0]


@pytest.mark.parametrize("is_decayed_each_step", [True, False])
def test_what_changed_between_eqxjits_trace_and_equinoxs_is_no_fault(is_decayed_each_step):
    rate = 0.0

    @eqxjit.filter_jit(donate="all-except-first")
    def step(x, weight):
        return weight - rate * x.sum()

    weight = jnp.ones(())
    with eqxjit.trial() as trial:
        for n in range(1, 7):
            for i in range(50):
                if is_decayed_each_step or i == 1:
                    # It has no effect, because the function isn't traced again.
                    rate += 0.1
                weight = step(jnp.ones(n), weight)
    assert not trial.is_wrong
    [row] = trial.functions
    assert "traced earlier" in row.differences[0]


def test_a_call_that_gets_the_result_of_another_value_is_named():
    class Stale:
        """A wrapper whose guards take any value for 1."""

        def __init__(self, wrapper):
            self._wrapper = wrapper

        def __call__(self, x, n):
            return self._wrapper(x, 1)

        def __getattr__(self, name):
            return getattr(self._wrapper, name)

    scaled = eqxjit.filter_jit(lambda x, n: n * x)
    with eqxjit.trial() as trial:
        for _ in range(5):
            scaled(X, 1)
        interceptor = interceptor_of(scaled)
        interceptor.ours = Stale(interceptor.ours)
        for _ in range(5):
            scaled(X, 2)
    assert trial.is_wrong
    [row] = trial.functions
    assert row.differences == [
        "output[0]: np.float32(1.0) under eqxjit, np.float32(2.0) under Equinox"
    ]


def test_a_function_that_can_be_traced_only_once_is_no_fault():
    cache = {}

    def step(x):
        # The mask is a tracer, which no second trace may use.
        mask = cache.setdefault("mask", jnp.arange(3.0) + x[0])
        return x * mask

    row, _ = tried(step, jnp.ones(3), n=5)
    [difference] = row.differences
    assert "UnexpectedTracerError" in difference
    assert "a new trace gives a different result" in difference
    assert not row.is_wrong


def test_the_traces_of_a_comparison_do_not_count_for_assert_max_traces():
    counted = eqx.debug.assert_max_traces(lambda x: 2 * x, max_traces=2)
    jitted = eqxjit.filter_jit(counted)
    with eqxjit.trial() as trial:
        for n in (3, 4, 3, 4):
            jitted(jnp.ones(n))
    [row] = trial.functions
    assert row.compared == 4
    assert not row.differences
    assert eqx.debug.get_num_traces(counted) == 2


@pytest.mark.parametrize("of", ["ref", "callback"])
def test_a_function_that_changes_something_in_each_run_is_not_compared(of):
    ref, calls = jax.new_ref(jnp.zeros(())), []

    def count(x):
        calls.append(1)
        return x

    def step(x):
        if of == "callback":
            return jax.experimental.io_callback(count, x, x)
        ref[...] += 1
        return x

    row, _ = tried(step, jnp.ones(()), n=5)
    jax.effects_barrier()
    assert (len(calls) if of == "callback" else int(ref[...])) == 5
    assert row.compared == 0
    assert "changes something" in row.verdict


def test_the_trace_of_a_function_is_not_one_that_jax_makes_to_lower_it():
    """Lineax's solvers are jitted functions, which JAX traces when it lowers the whole function."""
    calls = []

    def solve(a, b):
        jax.experimental.io_callback(calls.append, None, b)
        solver = lineax.AutoLinearSolver(well_posed=False)
        return lineax.linear_solve(lineax.MatrixLinearOperator(a), b, solver).value

    with eqxjit.trial() as trial:
        jitted = eqxjit.filter_jit(solve)
        for n in (7, 7, 8, 8):
            jitted(jnp.eye(n), jnp.ones(n))
    jax.effects_barrier()
    assert len(calls) == 4
    [row] = trial.functions
    assert "changes something" in row.verdict
    assert "solve: 2 traces; shape: `a` was float32[7,7], is float32[8,8]" in str(trial)


def test_jaxprs_that_a_function_returns_are_compared():
    def fit(x):
        solver = optimistix.LevenbergMarquardt(1e-5, 1e-5)
        return optimistix.least_squares(lambda y, x: y - x, solver, jnp.zeros(3), args=x)

    def jaxpr(x):
        constant = 1.0 if under.of_eqxjit() else 2.0
        return jax.make_jaxpr(lambda x: x + constant)(x).jaxpr

    row, _ = tried(fit, X)
    assert row.compared == 3, row.verdict
    assert not row.differences
    under = Under()
    row, _ = tried(jaxpr, X)
    assert row.is_wrong


def test_what_changes_something_is_known_from_a_trace_before_the_trial():
    ref = jax.new_ref(jnp.zeros(()))

    @eqxjit.filter_jit
    def step(x):
        ref[...] += 1
        return x

    step(jnp.ones(()))
    with eqxjit.trial() as trial:
        for _ in range(4):
            step(jnp.ones(()))
    [row] = trial.functions
    assert row.compared == 0
    assert int(ref[...]) == 5


def test_equal_parts_within_infinities_are_no_difference():
    under = Under()

    def step(x):
        end = jnp.nextafter(jnp.float32(1), 2.0) if under.of_eqxjit() else jnp.float32(1)
        return jnp.stack([jnp.float32(jnp.nan), -jnp.float32(jnp.inf), end])

    row, trial = tried(step, jnp.ones(3))
    assert not trial.is_wrong
    assert 0 < row.rounding < 1e-6


def test_functions_of_one_definition_share_a_row():
    def make():
        def inner(x):
            return x + 1

        return eqxjit.filter_jit(inner)

    rows = outcome(lambda: [make()(jnp.ones(3)) for _ in range(4)])
    assert rows["inner"].calls == 4
    assert rows["inner"].compared == 4


def test_a_trial_within_a_trial(capsys):
    f = eqxjit.filter_jit(lambda x: x + 1)
    with eqxjit.trial() as outer:
        with eqxjit.trial() as inner:
            for _ in range(5):
                f(jnp.ones(3))
        f(jnp.ones(3))
    assert not outer.is_wrong
    assert not inner.is_wrong
    assert inner.functions[0].calls == 5
    assert "SIGALRM" not in capsys.readouterr().out


@dataclasses.dataclass(frozen=True)
class Rate:
    value: float


def test_equinox_serves_calls_with_static_objects_that_are_created_again():
    f = eqxjit.filter_jit(lambda x, rate: x * rate.value)
    with eqxjit.trial() as trial:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            f(jnp.ones(3), Rate(2.0))
    [row] = trial.functions
    assert row.seconds_equinox > 0


def test_an_array_that_was_donated_before_raises_the_same_error():
    jitted = eqxjit.filter_jit(lambda x: x + 1, donate="all")
    x = jnp.ones(3)
    jitted(x)
    errors = []

    def call():
        with pytest.raises(Exception, match="deleted") as caught:
            jitted(x)
        errors.append((caught.type, str(caught.value)))

    call()
    outcome(call)
    assert errors[0] == errors[1]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_a_timeout_within_a_comparison_reaches_the_program():
    traces = []

    def step(x):
        traces.append(1)
        if len(traces) > 1:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            time.sleep(1)
        return x

    with timeouts(signal.SIGALRM):
        try:
            with eqxjit.trial() as trial, pytest.raises(TimeoutError):
                eqxjit.filter_jit(step)(jnp.ones(3))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert not trial.is_wrong


# --- What must not differ from a run without a trial ----------------------------------------------


@pytest.mark.parametrize("n_shapes", [2, 6])
def test_equinox_serves_no_call_that_it_has_not_traced(n_shapes):
    traces = []

    def step(x):
        traces.append(x.shape)
        return x * len({*traces})

    f = eqxjit.filter_jit(step)
    with eqxjit.trial() as trial:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            f(jnp.ones(3))
        for n in range(4, 4 + n_shapes):
            assert f(jnp.ones(n))[0] == n - 2
    [row] = trial.functions
    assert len(row.differences) == 0
    assert not trial.is_wrong


def scaled_by(scale):
    return eqxjit.filter_jit(lambda x: (x * scale.factor).sum())


def test_each_shape_is_traced_when_the_program_first_calls_it():
    a, b = jnp.ones(3), jnp.ones(4)
    with eqxjit.trial() as trial:
        for _ in range(5):
            scale = Scale()
            f = scaled_by(scale)
            for _ in range(100):
                f(a)
            f(b)
            # Without effect, because both shapes are traced.
            scale.factor = 2.0
            assert {float(f(b if i % 2 else a)) for i in range(1_000)} == {3.0, 4.0}
    assert not trial.is_wrong


class Scale:
    factor = 1.0


def test_a_timeout_in_a_call_is_no_difference():
    def step(x):
        signal.raise_signal(signal.SIGUSR1)
        return x

    with timeouts(signal.SIGUSR1), eqxjit.trial() as trial, pytest.raises(TimeoutError):
        eqxjit.filter_jit(step)(jnp.ones(3))
    assert not trial.is_wrong
    assert trial.functions[0].compared == 0


def test_a_function_that_draws_in_its_trace_differs_from_trace_to_trace():
    def step(x):
        return x + np.random.rand()

    row, trial = tried(step, jnp.ones(3))
    assert "from trace to trace" in row.effects
    assert not trial.is_wrong


def test_a_function_that_always_fails_is_compared_a_few_times():
    def step(x):
        raise KeyError("oh")

    jitted = eqxjit.filter_jit(step)
    with eqxjit.trial() as trial:
        for _ in range(30):
            with pytest.raises(KeyError):
                jitted(jnp.ones(3))
    assert not trial.is_wrong
    assert trial.functions[0].compared <= 6


def test_a_result_that_the_program_drops_is_freed():
    f = eqxjit.filter_jit(lambda x: x + 1)
    n_alive = 0
    with eqxjit.trial():
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            ref = weakref.ref(f(X))
            n_alive += ref() is not None
    assert n_alive == 0


@pytest.mark.parametrize("compare", [True, False])
def test_the_arguments_of_a_call_that_fails_are_freed(compare):
    @eqxjit.filter_jit
    def f(x):
        raise ValueError("too large")

    def fails():
        x = jnp.ones(3)
        with contextlib.suppress(ValueError):
            f(x)
        return weakref.ref(x)

    gc.disable()
    try:
        with eqxjit.trial(compare=compare):
            assert [fails()() for _ in range(5)] == [None] * 5
    finally:
        gc.enable()


def test_the_error_of_a_program_that_closes_its_output_stays():
    program = """
        import sys
        import eqxjit
        with eqxjit.trial():
            sys.stdout.close()
            raise KeyError("oh")
    """
    result = python("-c", textwrap.dedent(program))
    assert "KeyError: 'oh'" in result.stderr
    assert "no function under filter_jit was called" in result.stderr


def test_an_empty_trial_takes_no_negative_time():
    with eqxjit.trial() as trial:
        pass
    assert trial.seconds >= 0


@pytest.mark.parametrize(
    ("changes", "effects"), [(False, ""), (True, "its results differ from trace to trace")]
)
def test_partials_that_each_trace_creates_are_compared_by_their_parts(changes, effects):
    traces = []

    @eqxjit.filter_jit
    def activation(x):
        traces.append(x.shape)
        slope = 0.1 * len(traces) if changes else 0.1
        return x, functools.partial(jax.nn.leaky_relu, negative_slope=slope)

    with eqxjit.trial() as trial:
        activation(X)
    [row] = trial.functions
    assert (row.compared, row.differences, row.effects) == (int(not changes), [], effects)


def test_an_outer_trial_counts_the_calls_of_an_inner_one():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    n_calls = 0
    with eqxjit.trial() as outer:
        for _ in range(2):
            with eqxjit.trial(compare=False):
                end = time.monotonic() + 0.2
                while time.monotonic() < end:
                    double(X)
                    n_calls += 1
    [row] = outer.functions
    assert row.calls == n_calls


def test_after_an_inner_trial_the_outer_one_goes_on():
    f = eqxjit.filter_jit(lambda x: x + 1)
    with eqxjit.trial() as outer:
        with eqxjit.trial():
            f(X)
        for _ in range(5):
            f(X)
    assert outer.functions[0].calls >= 5


def test_trials_may_end_in_any_order():
    init = vars(type(eqxjit.filter_jit(lambda x: x)))["__init__"]
    f = eqxjit.filter_jit(lambda x: x + 1)
    with contextlib.ExitStack() as first:
        first.enter_context(eqxjit.trial())
        with eqxjit.trial() as second:
            first.close()
            g = eqxjit.filter_jit(lambda x: x + 2)
            for _ in range(5):
                f(X), g(X)
    assert [row.calls for row in second.functions] == [5, 5]
    assert vars(type(f))["__init__"] is init


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_a_program_may_replace_itself():
    program = """
        import os, sys, time
        import eqxjit
        with eqxjit.trial():
            code = "import time; time.sleep(0.1); print('went on')"
            os.execv(sys.executable, [sys.executable, "-c", code])
    """
    result = python("-c", textwrap.dedent(program))
    assert (result.returncode, result.stdout) == (0, "went on\n"), result.stderr


class Sleep(dict):
    """A configuration that raises if it is asked for an attribute that it hasn't."""

    __getattr__ = dict.__getitem__
    __call__ = staticmethod(time.sleep)


def test_no_error_of_the_sampler_reaches_the_program():
    f, sleep = eqxjit.filter_jit(lambda x: x + 1), Sleep()
    with eqxjit.trial() as trial:
        for _ in range(60):
            f(X)
            sleep(0.005)
    assert trial.functions[0].calls == 60


class Lazy:
    """An object that raises if it is asked for its class, as a weak proxy of a dead object does."""

    @property
    def __class__(self):
        raise ReferenceError


lazy: object = None


def test_no_object_of_the_program_is_asked_for_its_class(monkeypatch):
    monkeypatch.setitem(globals(), "lazy", Lazy())
    other = Lazy()
    f = eqxjit.filter_jit(lambda x, is_used=False: (lazy, other) if is_used else x)
    with eqxjit.trial() as trial:
        f(X)
    assert trial.functions[0].compared == 1


def test_errors_that_the_trial_handles_do_not_end_sampling():
    step = eqxjit.filter_jit(lambda x: x + 1, donate="all")
    reset = jax.jit(lambda x: 0 * x, donate_argnums=0)
    x = jnp.zeros(3)
    with eqxjit.trial() as trial:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            # The result of the last call of a block is deleted before the trial waits for it.
            x = reset(step(x))
    assert "sampled" not in str(trial)
    with eqxjit.trial() as trial:
        step(x), step(jnp.zeros(3))
        for _ in range(10):
            with pytest.raises(Exception, match="deleted"):
                step(x)
    assert "sampled" not in str(trial)
