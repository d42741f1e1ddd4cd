"""The figures of a trial, on programs that spend their time in one known place."""

import contextlib
import dataclasses
import functools
import gc
import importlib
import math
import signal
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit

X = jnp.ones(3)


def is_here(line):
    return line.line.filename == __file__


def share_of(trial, kind):
    """The share of a kind of work by lines of this file."""
    return sum(line.share for line in trial.lines if line.kind == kind and is_here(line))


def test_time_between_calls_is_pythons():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    with eqxjit.trial() as trial:
        for _ in range(300):
            double(X)
            time.sleep(0.002)
    assert share_of(trial, "Python") > 0.6
    assert trial.seconds_steady > 0.5
    assert abs(trial.seconds - trial.seconds_startup - trial.seconds_steady) < 1e-6


def test_operations_and_moving_data_are_told_apart():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    data = np.ones((100, 100), np.float32)
    jnp.sin(X), jnp.asarray(data)
    with eqxjit.trial(compare=False) as trial:
        double(X)
        double(X)
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            jnp.sin(X)
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            jnp.asarray(data)
    assert share_of(trial, "operations outside jit") > 0.15
    assert share_of(trial, "moving data") > share_of(trial, "operations outside jit")


def test_tracing_again_is_apart_from_start_up_and_has_its_line():
    def step(x, n):
        time.sleep(0.03)
        return n * x

    jitted = eqxjit.filter_jit(step)
    with eqxjit.trial(compare=False) as trial:
        jitted(X, 0)
        jitted(X, 0)
        for n in range(1, 8):
            jitted(X, n)
    assert trial.seconds_startup > 0.03
    assert share_of(trial, "tracing and compiling") > 0.6
    assert "`n` was" in str(trial)


def test_all_of_a_call_that_is_traced_again_is_tracing():
    def make(k):
        def wave(x):
            for _ in range(k + 40):
                x = jnp.sin(x) * k
            return x

        return eqxjit.filter_jit(wave)

    functions = [make(k) for k in range(12)]
    with eqxjit.trial(compare=False) as trial:
        for function in functions:
            for _ in range(5):
                function(X)
    assert share_of(trial, "tracing and compiling") > 0.9
    assert "12 traces" in str(trial)


def test_all_of_a_functions_first_call_is_start_up():
    def new(function):
        @functools.wraps(function)
        def wave(x):
            # A gradient of a jitted function compiles in many steps.
            loss = jax.jit(lambda x: functools.reduce(lambda x, _: function(x), range(30), x).sum())
            return x - jax.grad(loss)(x)

        return eqxjit.filter_jit(wave)

    functions = [new(each) for each in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.arctan)]
    with eqxjit.trial(compare=False) as trial:
        for function in functions:
            for _ in range(5):
                function(X)
    assert trial.seconds > 0.1
    assert trial.seconds_steady < 0.03 * trial.seconds


def test_garbage_collection_is_pythons():
    """Once Python has collected garbage, it calls a function of JAX, which a tick may interrupt."""
    f = eqxjit.filter_jit(lambda x: x + 1)
    with eqxjit.trial(compare=False) as trial:
        kept = [[i] for i in range(100_000)]
        for _ in range(100):
            f(X)
            gc.collect()
    assert len(kept) == 100_000
    assert share_of(trial, "operations outside jit") < 0.05
    assert share_of(trial, "Python") > 0.8


@pytest.mark.parametrize("compare", [False, True])
def test_a_call_that_is_traced_is_no_warm_call(compare):
    f = eqxjit.filter_jit(lambda x: x + 1)
    with eqxjit.trial(compare=compare) as trial:
        f(jnp.ones(3))
    [row] = trial.functions
    assert row.calls == 1
    assert math.isnan(row.seconds_eqxjit)


def test_the_first_compilations_of_a_line_are_start_up():
    double = eqxjit.filter_jit(lambda x: 2 * x)

    def several(n):
        return [jnp.sin(jnp.ones(n + i)).sum() for i in range(5)]

    with eqxjit.trial(compare=False) as trial:
        double(X)
        double(X)
        begun = time.monotonic()
        several(201)
        assert trial.seconds_steady < 0.5 * (time.monotonic() - begun)
        first = trial.seconds_startup
        double(X)
        several(301)
    assert trial.seconds_startup == first
    assert share_of(trial, "tracing and compiling") > 0.5


def test_the_first_compilations_of_a_line_are_start_up_while_other_threads_make_calls():
    double, is_over = eqxjit.filter_jit(lambda x: 2 * x), threading.Event()

    def work():
        while not is_over.wait(0.001):
            double(X)

    with eqxjit.trial(compare=False) as trial:
        double(X), double(X)
        thread = threading.Thread(target=work)
        thread.start()
        for i in range(10):
            jnp.cos(jnp.ones(401 + i)).sum()
        is_over.set()
        thread.join()
    assert share_of(trial, "tracing and compiling") == 0


def test_imports_are_no_operations(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    lines = "import time, jax.numpy as jnp", "end = time.monotonic() + 0.4", "x = jnp.ones(3)"
    loop = "while time.monotonic() < end: x = x + 1"
    (tmp_path / "site-packages" / "imported_slowly.py").write_text("\n".join([*lines, loop]))
    double = eqxjit.filter_jit(lambda x: 2 * x)
    with eqxjit.trial(compare=False) as trial:
        double(X)
        double(X)
        importlib.import_module("imported_slowly")
    assert share_of(trial, "Python") > 0.9


def test_all_of_a_call_that_fails_while_it_is_traced_is_tracing():
    @eqxjit.filter_jit
    def step(x):
        if len(x) > 3:
            time.sleep(0.5)
            raise ValueError("too long")
        return x + 1

    with eqxjit.trial(compare=False) as trial:
        # Many warm calls, so that the failing calls are only logged.
        for _ in range(3_000):
            step(X)
        for n in (4, 5):
            with pytest.raises(ValueError, match="too long"):
                step(jnp.ones(n))
    assert share_of(trial, "tracing and compiling") > 0.8


def test_a_call_that_fails_while_it_is_traced_is_in_no_span():
    def step(x, n):
        if n:
            time.sleep(0.1)
            raise ValueError("no")
        return x + 1

    jitted = eqxjit.filter_jit(step)
    with eqxjit.trial() as trial:
        end = time.monotonic() + 1
        n = 0
        while time.monotonic() < end:
            jitted(X, 0)
            n += 1
            if n % 500 == 0:
                with contextlib.suppress(ValueError):
                    jitted(X, n)
    # A call under eqxjit is faster. With 0.1 s for each 500 calls, it would seem to be slower.
    assert trial.seconds_steady_equinox > trial.seconds_steady


def test_a_speed_up_that_is_not_known_has_a_reason():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    with eqxjit.trial() as trial:
        for _ in range(5):
            double(X)
            time.sleep(0.1)
    assert "Equinox served too few calls" in str(trial)
    assert math.isnan(trial.seconds_steady_equinox)


def test_waiting_within_a_trace_is_a_part_of_the_trace():
    big = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, x: x @ x / 300, x))
    matrix = jnp.ones((300, 300))
    big(matrix).block_until_ready()

    def step(x, n):
        with jax.ensure_compile_time_eval():
            return n * x * float(big(matrix)[0, 0])

    jitted = eqxjit.filter_jit(step)
    with eqxjit.trial(compare=False) as trial:
        jitted(X, 0)
        jitted(X, 0)
        for n in range(1, 9):
            jitted(X, n)
    assert share_of(trial, "tracing and compiling") > 0.8
    assert share_of(trial, "waiting") < 0.1


def test_what_the_trial_does_itself_is_left_out():
    def slow_to_trace(x):
        time.sleep(0.3)
        return x + 1

    double = eqxjit.filter_jit(lambda x: 2 * x)
    with eqxjit.trial() as trial:
        for _ in range(10):
            double(X)
        # eqxjit traces it once, which is start-up, and Equinox once more.
        eqxjit.filter_jit(slow_to_trace)(X)
        time.sleep(0.2)
    assert trial.seconds_startup >= 0.3
    assert trial.seconds < trial.seconds_startup + 0.3
    assert share_of(trial, "Python") > 0.5


def new_computation():
    """A new function that computes for about a millisecond, and its argument."""

    @eqxjit.filter_jit
    def compute(x):
        for _ in range(8):
            x = x @ x / len(x)
        return x

    return compute, jnp.ones((300, 300))


@pytest.mark.parametrize(("n", "n_unread"), [(300, 0), (600, 29), (300, 300)])
def test_waiting_for_results_is_not_saved(n, n_unread):
    compute, x = new_computation()
    with eqxjit.trial() as trial:
        for i in range(n):
            x = compute(x)
            if i % (n_unread + 1) == n_unread:
                jax.block_until_ready(x)
        jax.block_until_ready(x)
    # The computation takes as long under Equinox. Counted twice, it would be twice as long.
    assert 0.5 < trial.seconds_steady_equinox / trial.seconds_steady < 1.6
    [row] = trial.functions
    assert row.seconds_ready > 0
    if not n_unread:
        assert share_of(trial, "waiting") + share_of(trial, "jitted calls") > 0.6


def test_calls_that_wait_for_computations_are_waiting():
    compute, x = new_computation()
    with eqxjit.trial(compare=False) as trial:
        # Nothing is read, but JAX lets only some computations be under way.
        for _ in range(400):
            y = compute(x)
    assert y.shape == x.shape
    assert share_of(trial, "waiting") > 2 * share_of(trial, "jitted calls")
    # Nothing is read, so to read it later wouldn't help.
    assert "read results later" not in str(trial)


def test_there_is_no_advice_on_what_the_trial_itself_waits_for():
    @eqxjit.filter_jit
    def compute(x):
        return jax.lax.fori_loop(0, 60, lambda _, x: x @ x / 300, x)

    x = jnp.ones((300, 300))
    with eqxjit.trial(compare=False) as trial:
        # So few calls that JAX lets all computations be under way.
        for _ in range(24):
            y = compute(x)
    assert y.shape == x.shape
    assert share_of(trial, "waiting") > 0.5
    assert "read results later" not in str(trial)


def test_the_figures_are_complete_whenever_the_trial_ends():
    double, ended = eqxjit.filter_jit(lambda x: 2 * x), []
    for n in range(15):
        with eqxjit.trial() as trial:
            double(X), double(X)
            end = time.monotonic() + 0.005 * n
            while time.monotonic() < end:
                double(X)
        ended.append((trial, trial.seconds))
    # Some of them have ended while Equinox served calls.
    assert [trial.seconds for trial, _ in ended] == [seconds for _, seconds in ended]


def test_a_short_program_is_timed():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    with eqxjit.trial() as trial:
        double(X)
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            double(X)
    [row] = trial.functions
    assert row.seconds_equinox > row.seconds_eqxjit > 0


def test_a_long_trace_does_not_keep_calls_from_being_timed():
    def slow_to_trace(x):
        time.sleep(0.3)
        return x + 1

    double, other = eqxjit.filter_jit(lambda x: 2 * x), eqxjit.filter_jit(slow_to_trace)
    with eqxjit.trial() as trial:
        for _ in range(5):
            double(X)
        other(X)
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            double(X)
    row = next(row for row in trial.functions if row.calls > 1)
    assert row.seconds_equinox > row.seconds_eqxjit > 0


def test_later_calls_are_compared_now_and_then():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    with eqxjit.trial() as trial:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            double(X)
    [row] = trial.functions
    assert row.compared > 3


# After 300 calls, Equinox usually serves the next one.
@pytest.mark.parametrize("n", [8, 300, 3000])
@pytest.mark.parametrize("usual", [None, jnp.ones(1)], ids=["structure", "shape"])
def test_a_single_call_of_a_new_structure_or_shape_is_compared(n, usual):
    traces = []

    def step(x, y):
        if y is None or len(y) == 1:
            return x
        traces.append(1)
        return x + (len(traces) == 1)

    jitted = eqxjit.filter_jit(step)
    with eqxjit.trial() as trial:
        for _ in range(n):
            jitted(X, usual)
        jitted(X, X)
    [row] = trial.functions
    assert row.is_wrong
    assert "output[0]" in row.differences[0]


class Config:
    """Equal to all others of its class, but a different object."""

    def __eq__(self, other):
        return isinstance(other, Config)

    def __hash__(self):
        return 0


@dataclasses.dataclass(frozen=True)
class Named:
    """Equal to all others of its name, whatever their values are."""

    name: str
    value: float = dataclasses.field(compare=False)


@pytest.mark.parametrize(
    "configs", [(Config(), Config()), (Named("a", 1.0), Named("a", 2.0))], ids=["plain", "fields"]
)
def test_no_call_is_served_with_the_static_objects_of_an_earlier_call(configs):
    jitted = eqxjit.filter_jit(lambda x, config: (x, config))
    with eqxjit.trial() as trial:
        # Many calls with each object, so that some of them are due to be served by Equinox.
        for config in configs:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                assert jitted(X, config)[1] is config
    assert not trial.is_wrong


@pytest.mark.parametrize("first", [(), (Config(),)])
def test_no_call_is_served_with_an_equal_object_that_is_passed_differently(first):
    given, default = Config(), Config()

    @eqxjit.filter_jit
    def step(x, config=default):
        return x, config

    expected = first[0] if first else default
    with eqxjit.trial() as trial:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            assert step(X, *first)[1] is expected
            assert step(X, config=given)[1] is given
    assert not trial.is_wrong


def test_no_call_is_served_with_the_static_objects_of_another_function():
    class Tagged(eqx.Module):
        tag: object = eqx.field(static=True)

        def __call__(self, x):
            return x, self.tag

    configs = Config(), Config()
    jitted = [eqxjit.filter_jit(Tagged(config)) for config in configs]
    with eqxjit.trial() as trial:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            for each, config in zip(jitted, configs, strict=True):
                assert each(X)[1] is config
    assert not trial.is_wrong


def test_no_call_is_served_with_what_was_traced_for_a_call_that_failed():
    @eqxjit.filter_jit
    def step(x, n):
        x = eqx.error_if(x, x > 100, "too large")
        return x * (2 if n is True else 3)

    with eqxjit.trial() as trial:
        for _ in range(4):
            with pytest.raises(RuntimeError, match="too large"):
                step(jnp.float32(1000), 1)
        for _ in range(4):
            step(jnp.float32(0), True)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            assert step(jnp.float32(1), True) == 2
    assert not trial.is_wrong


class Flagged(eqx.Module):
    flag: object = eqx.field(static=True)


@pytest.mark.parametrize("values", [(1, True), (0.0, -0.0)])
@pytest.mark.parametrize("is_field", [True, False])
@pytest.mark.parametrize("compared", [1.0, 0.0])
def test_no_call_is_served_with_a_trace_for_an_equal_value(values, is_field, compared):
    @eqxjit.filter_jit
    def step(x, given):
        value = given.flag if is_field else given
        return x * (2.0 if repr(value) == repr(values[0]) else 3.0)

    given = [Flagged(value) if is_field else value for value in values]
    with eqxjit.trial() as trial:
        for each in given:
            for _ in range(10):
                # If the results are the same by chance, no comparison finds the difference.
                step(jnp.float32(compared), each)
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            assert step(jnp.float32(1.0), given[0]) == 2.0
            assert step(jnp.float32(1.0), given[1]) == 3.0
    assert not trial.is_wrong


def test_no_call_is_served_with_a_zero_of_the_other_sign():
    for _ in range(5):
        jitted = eqxjit.filter_jit(lambda x, zero: (x, math.copysign(1.0, zero)))
        jitted(X, 0.0), jitted(X, -0.0)
        with eqxjit.trial() as trial:
            # So few calls that Equinox still serves the first block.
            for _ in range(300):
                jitted(X, 0.0)
            assert jitted(X, -0.0)[1] == -1.0
        assert not trial.is_wrong


def test_a_numpy_array_is_not_served_with_what_was_traced_for_an_equal_value():
    @eqxjit.filter_jit
    def step(x, n):
        return x * (2 if n is True else 3)

    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    with eqxjit.trial() as trial:
        for _ in range(5):
            step(jnp.zeros(3), 1)
        for _ in range(5):
            step(zeros, True)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            assert float(step(ones, True)[0]) == 2.0
    assert not trial.is_wrong


def test_no_call_is_served_with_a_trace_of_an_earlier_trial():
    @eqxjit.filter_jit
    def step(x, n):
        return x * (2 if n is True else 3)

    with eqxjit.trial():
        for _ in range(5):
            step(jnp.float32(0), True)
    with eqxjit.trial() as trial:
        for _ in range(5):
            step(jnp.float32(0), 1)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            assert float(step(jnp.float32(1), 1)) == 3.0
    assert not trial.is_wrong
    assert trial.functions[0].seconds_equinox > 0


def test_after_a_known_difference_equinox_serves_no_call():
    @eqxjit.filter_jit
    def step(x, n):
        return x * (2 if n is True else 3)

    with eqxjit.trial() as trial:
        for _ in range(5):
            step(X, 1)
        # The page on trials names such programs: Equinox now traces `True` first.
        jax.clear_caches()
        for _ in range(5):
            step(X, True)
        begun = time.monotonic()
        while time.monotonic() < begun + 1:
            right = float(step(X, 1)[0]) == 3.0
            assert right or time.monotonic() < begun + 0.8
    assert not trial.is_wrong
    assert trial.functions[0].verdict.endswith("a known difference")


@pytest.mark.parametrize("others", [np.zeros(3, np.float32), jnp.zeros(3)])
def test_no_call_is_served_with_a_trace_under_different_settings(others):
    @eqxjit.filter_jit
    def step(x, n):
        return x * (2 if n is True else 3)

    zeros = jnp.zeros(3)
    with eqxjit.trial() as trial:
        for _ in range(5):
            step(others, 1)
        for _ in range(5):
            step(zeros, True)
        with jax.default_matmul_precision("float32"):
            for _ in range(5):
                step(zeros, True)
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                assert float(step(X, 1)[0]) == 3.0
    assert not trial.is_wrong


def test_a_builtin_function_without_a_signature_runs_as_without_a_trial():
    with eqxjit.trial() as trial:
        assert eqxjit.filter_jit(max)(3, 4) == 4
    [row] = trial.functions
    assert "can't wrap it" in row.verdict


def test_an_error_of_max_traces_is_no_difference():
    jitted = eqxjit.filter_jit(lambda x, n: x + n, max_traces=1)
    with eqxjit.trial() as trial:
        jitted(X, 1)
        with pytest.raises(eqxjit.TooManyTracesError):
            jitted(X, 2)
    assert trial.functions[0].differences == []


def test_a_new_nan_is_no_reason_to_compile_in_the_steady_state():
    jitted = eqxjit.filter_jit(lambda x, n: x + n)
    with eqxjit.trial() as trial:
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            jitted(X, float("nan"))
    assert share_of(trial, "tracing and compiling") == 0


def test_wrappers_that_the_garbage_collector_no_longer_lists_are_tried():
    # The tests freeze all objects that exist when they begin, this module's function included.
    with eqxjit.trial() as trial:
        for _ in range(5):
            at_import(X)
    assert [row.function for row in trial.functions] == ["at_import"]


@eqxjit.filter_jit
def at_import(x):
    return x + 1


def test_a_program_of_few_slow_calls_is_timed():
    @eqxjit.filter_jit
    def compute(x):
        return jax.lax.fori_loop(0, 150, lambda _, x: x @ x / len(x), x)

    x = jnp.ones((300, 300))
    with eqxjit.trial() as trial:
        for _ in range(40):
            jax.block_until_ready(compute(x))
    [row] = trial.functions
    assert row.seconds_equinox > 0
    assert 0.5 < trial.seconds_steady_equinox / trial.seconds_steady < 1.6


def test_a_program_of_small_calls_gains_what_its_calls_gain():
    def seconds_of(double):
        double(X)
        begun = time.monotonic()
        for _ in range(20_000):
            double(X)
        return time.monotonic() - begun

    theirs, double = eqx.filter_jit(lambda x: 2 * x), eqxjit.filter_jit(lambda x: 2 * x)
    # Timed beside the trial, because on a busy machine Equinox loses more by waiting for results.
    before = seconds_of(theirs), seconds_of(double)
    with eqxjit.trial() as trial:
        for _ in range(200_000):
            double(X)
    after = seconds_of(theirs), seconds_of(double)
    times = (before[0] + after[0]) / (before[1] + after[1])
    gained = trial.seconds_steady_equinox - trial.seconds_steady
    assert 0.5 < gained / (trial.seconds_steady * (times - 1)) < 2
    assert gained > 0
    assert share_of(trial, "operations outside jit") < 0.02


def test_warm_calls_that_fail_are_counted():
    @eqxjit.filter_jit
    def checked(x):
        return eqx.error_if(x, x > 1, "too large")

    values = [jnp.float32(0.0), jnp.float32(2.0)]
    n_failed = 0
    with eqxjit.trial() as trial:
        for n in range(3_000):
            try:
                checked(values[n % 10 == 0])
            except RuntimeError:
                n_failed += 1
    [row] = trial.functions
    assert n_failed == 300
    assert row.calls == 3_000
    assert not row.differences


def test_what_eqxjit_serves_in_a_block_of_equinoxs_is_not_taken_for_equinoxs_calls():
    step = eqxjit.filter_jit(lambda x, n: x + 1)
    with eqxjit.trial() as trial:
        for _ in range(4):
            step(X, 1)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            # Equinox would take this for the call above.
            step(X, n=True)
    assert trial.seconds_steady_equinox != trial.seconds_steady_equinox


def test_rare_long_work_is_not_taken_for_a_part_of_calls():
    double, theirs = eqxjit.filter_jit(lambda x: 2 * x), eqx.filter_jit(lambda x: 2 * x)
    theirs(X)
    begun = time.monotonic()
    for _ in range(3_000):
        theirs(X)
    slowest = 0.75 + time.monotonic() - begun
    with eqxjit.trial() as trial:
        for i in range(3_000):
            double(X)
            if i % 1_000 == 999:
                # A checkpoint, for example.
                end = time.monotonic() + 0.25
                while time.monotonic() < end:
                    pass
    assert 0.7 < trial.seconds_steady < 1.2
    # In a block of Equinox's, one checkpoint would count like a hundred.
    assert 0.9 * trial.seconds_steady < trial.seconds_steady_equinox < 1.5 * slowest
    assert share_of(trial, "Python") > 0.7


def eager(n):
    """Operations that take long, and aren't compiled again."""
    del n
    float(jnp.linalg.svd(jnp.eye(400) + 1.0)[1][0])


def evaluate(n):
    """Many short operations, whose results the program awaits."""
    del n
    for _ in range(20):
        float((jnp.eye(300) @ jnp.eye(300))[0, 0])


def grow(n):
    """Operations that are compiled again, as those on a growing list of losses."""
    float(jnp.cumsum(jnp.sin(jnp.zeros(n)) * 2 + 1).mean())


@pytest.mark.parametrize(("work", "every"), [(eager, 200), (grow, 200), (evaluate, 50)])
def test_rare_operations_are_not_taken_for_a_part_of_calls(work, every):
    def double(tree):
        return jax.tree.map(lambda x: 2 * x, tree)

    # Equinox takes long for many arrays, so a short block has few calls.
    tree = [jnp.full(3, i) for i in range(60)]
    ours, theirs = eqxjit.filter_jit(double), eqx.filter_jit(double)
    theirs(tree), work(1)
    begun = time.monotonic()
    for _ in range(4_000):
        theirs(tree)
    slowest = time.monotonic() - begun
    with eqxjit.trial() as trial:
        for i in range(4_000):
            ours(tree)
            if i % every == every - 1:
                work(i)
    assert 0 < trial.seconds_steady_equinox - trial.seconds_steady < 3 * slowest


def test_a_function_that_equinox_never_served_is_not_taken_for_another():
    def wait(x):
        time.sleep(0.01)
        return x

    double = eqxjit.filter_jit(lambda x: 2 * x)
    # Each run of it may change something, so it isn't compared.
    slow = eqxjit.filter_jit(lambda x: jax.experimental.io_callback(wait, x, x))
    with eqxjit.trial() as trial:
        for _ in range(60):
            slow(double(X))
    assert any(row.seconds_equinox > 0 for row in trial.functions)
    assert trial.seconds_steady_equinox != trial.seconds_steady_equinox


def test_a_function_that_another_calls_first_is_timed_under_equinox_too():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    outer = eqxjit.filter_jit(lambda x: double(x) + 1)
    with eqxjit.trial() as trial:
        for _ in range(5):
            outer(X)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            double(X), outer(X)
    assert all(row.seconds_equinox > 0 for row in trial.functions)
    assert len(trial.functions) == 2


def test_reading_arrays_within_a_function_of_jax_is_waiting():
    @eqxjit.filter_jit
    def compute(x):
        return jax.lax.fori_loop(0, 60, lambda _, x: x @ x / 300, x).sum()

    x = jnp.ones((300, 300))
    with eqxjit.trial(compare=False) as trial:
        for _ in range(40):
            jax.tree.map(float, {"result": compute(x)})
    assert share_of(trial, "operations outside jit") < 0.3
    assert share_of(trial, "waiting") + share_of(trial, "jitted calls") > 0.6


def test_what_happens_before_the_first_warm_call_is_in_no_share():
    double, other = eqxjit.filter_jit(lambda x: 2 * x), eqxjit.filter_jit(lambda x: x + 1)
    with eqxjit.trial() as trial:
        double(X)
        other(X)
        time.sleep(0.5)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            double(X)
    assert share_of(trial, "Python") < 0.6


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="lines are sampled by a timer")
def test_the_shares_are_those_of_the_time_before_the_program_uses_an_alarm():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    with eqxjit.trial() as trial:
        for i in range(400_000):
            double(X)
            if i == 20_000:
                signal.alarm(0)
    assert share_of(trial, "jitted calls") > 0.2
    with eqxjit.trial() as trial:
        for _ in range(20_000):
            double(X)
        signal.alarm(0)
        # What is traced after it belongs to no share.
        for _ in range(2):
            eqxjit.filter_jit(lambda x: time.sleep(0.3) or x)(X)
    assert share_of(trial, "tracing and compiling") == 0


def test_time_counts_for_the_line_that_took_it_not_for_a_function_that_is_called_next():
    def note(_):
        pass

    numbers = np.ones((400, 400), np.float32)
    double = eqxjit.filter_jit(lambda x: 2 * x)
    with eqxjit.trial(compare=False) as trial:
        double(X), double(X)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            product = numbers @ numbers
            note(product)
    beginning = note.__code__.co_firstlineno
    lines = [line.line.line for line in trial.lines if line.share > 0.3 and is_here(line)]
    assert lines
    assert beginning not in lines


def test_start_up_ends_with_the_first_warm_call_after_many_traces():
    functions = [eqxjit.filter_jit(lambda x, n=n: n * x) for n in range(60)]
    with eqxjit.trial(compare=False) as trial:
        for function in functions:
            function(X)
        for _ in range(100):
            functions[0](X)
            time.sleep(0.004)
    assert trial.seconds_steady > 0.35


def test_the_time_before_the_first_warm_call_is_start_up():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    with eqxjit.trial() as trial:
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            pass
        for _ in range(5_000):
            double(X)
    assert trial.seconds_startup > 0.38
    assert share_of(trial, "Python") < 0.5


def test_a_long_call_into_c_has_all_its_time():
    double = eqxjit.filter_jit(lambda x: 2 * x)
    numbers = list(range(2_000_000))
    with eqxjit.trial() as trial:
        double(X)
        double(X)
        for _ in range(3):
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                pass
            for _ in range(10):
                sum(numbers)
    lines = [line for line in trial.lines if line.kind == "Python" and is_here(line)]
    with open(__file__) as file:
        source = ["", *file]
    in_c = sum(line.share for line in lines if "sum(numbers)" in source[line.line.line])
    assert in_c > 0.2


def test_calls_that_c_makes_are_calls():
    add = eqxjit.filter_jit(lambda x, y: x + y)
    with eqxjit.trial(compare=False) as trial:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            functools.reduce(add, [X] * 1_000)
    shares = share_of(trial, "jitted calls") + share_of(trial, "waiting")
    assert shares > 0.6


def test_generated_code_counts_for_the_line_that_calls_it():
    namespace = {}
    exec(compile("def work():\n    for _ in range(9999): pass", "<generated>", "exec"), namespace)
    double = eqxjit.filter_jit(lambda x: 2 * x)
    with eqxjit.trial() as trial:
        double(X)
        double(X)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            namespace["work"]()
    assert share_of(trial, "Python") > 0.6
    assert "<generated>" not in str(trial)
