"""`compile_report`: everything that is compiled is in one table, whoever compiles it."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.places import shown
from tests.support.sides import CALLS

X = jnp.arange(3.0)


def rows(report):
    return {row.function: row for row in report.rows}


def test_rows_of_nested_and_foreign_functions(capsys):
    @eqxjit.filter_jit
    def inner(x):
        return jnp.sin(x)

    @eqxjit.filter_jit
    def outer(x, n):
        return inner(x) * n

    @jax.jit
    def plain(x):
        return outer(x, 3) + 1

    with eqxjit.compile_report() as report:
        for n in (1, 2, 2):
            outer(X, n)
        for _ in range(CALLS):
            plain(X)
    found = rows(report)
    assert (found["outer"].traces, found["inner"].traces, found["plain"].traces) == (3, 1, 1)
    assert found["outer"].reason == "static value changed: n (2 times)"
    assert found["inner"].reason == ""
    # What is part of an outer program is lowered and compiled there.
    assert found["inner"].seconds.compiling == found["inner"].seconds.lowering == 0
    for name in ("outer", "plain"):
        assert min(found[name].seconds.lowering, found[name].seconds.compiling) > 0
    assert all(row.seconds.tracing > 0 for row in found.values())
    assert found["outer"].program.equations == 3
    assert found["inner"].program is found["plain"].program is None
    totals = [row.seconds.total for row in report.rows]
    assert totals == sorted(totals, reverse=True)
    assert sum(row.share for row in report.rows) == pytest.approx(1)
    assert report.total_seconds == pytest.approx(sum(totals))
    printed = capsys.readouterr().out
    # However wide the terminal is, and so wherever lines are folded.
    for text in ("outer", "inner", "plain", "compile s", "n (2 times)"):
        assert text in " ".join(printed.split())
    assert repr(report) == str(report)
    assert str(report).split() == printed.split()


def test_seconds_are_a_functions_own():
    """A nested function's time is in its own row, and once."""

    def sleeper(seconds):
        def sleep(x):
            time.sleep(seconds)
            return x

        return sleep

    def outer(x):
        time.sleep(0.1)
        return inner(x)

    for is_outer_ours in (True, False):
        inner = eqxjit.filter_jit(sleeper(0.3))
        jitted = eqxjit.filter_jit(outer) if is_outer_ours else jax.jit(outer)
        with eqxjit.compile_report() as report:
            start = time.perf_counter()
            jitted(X)
            elapsed = time.perf_counter() - start
        own = [rows(report)[name].seconds.tracing for name in ("sleep", "outer")]
        assert own[0] >= 0.3
        assert own[1] >= 0.1
        assert sum(own) <= elapsed
        if is_outer_ours:
            [trace] = jitted.traces()
            assert sum(own) == pytest.approx(trace.seconds.tracing, rel=0.01)


def test_ahead_of_time_and_jaxs_own_operations():
    f = eqxjit.filter_jit(lambda x: jnp.cos(x))
    before = f.lower(X)
    with eqxjit.compile_report() as report:
        before.compile()
        jnp.linspace(0, 1, 37).sum()
    found = rows(report)
    assert found["<lambda>"].seconds.tracing == 0
    assert found["<lambda>"].seconds.compiling > 0
    assert len(found) > 1


def test_nothing_outside_and_nothing_twice():
    f = eqxjit.filter_jit(lambda x, n: x * n)
    f(X, 1)
    with eqxjit.compile_report() as outer:
        f(X, 2)
        with eqxjit.compile_report() as inner:
            f(X, 3)
            f(X, 1)
        f(X, 4)
    f(X, 5)
    assert (rows(inner)["<lambda>"].traces, rows(outer)["<lambda>"].traces) == (1, 3)


def test_an_error_inside(capsys):
    f = eqxjit.filter_jit(lambda x: x * 2)
    g = eqxjit.filter_jit(lambda x: x @ jnp.ones(7))
    report = None

    def fail():
        nonlocal report
        with eqxjit.compile_report() as report:
            f(X)
            g(X)

    with pytest.raises(TypeError):
        fail()
    assert "<lambda>" in capsys.readouterr().out
    assert rows(report)["<lambda>"].traces == 1
    # The accounts of time are balanced again.
    assert all(0 <= row.seconds.total < 60 for row in report.rows)
    f(X[1:])
    assert f.traces()[1].seconds.total < 60


def test_programs_that_the_persistent_cache_never_holds(tmp_path):
    config = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in config}

    for is_on in (True, False):

        def check(x):
            return eqx.error_if(x, jnp.any(x < 0), "negative")

        jax.config.update("jax_enable_compilation_cache", is_on)
        for name, value in config.items():
            jax.config.update(name, value)
        try:
            with eqxjit.compile_report() as report:
                eqxjit.filter_jit(check)(X)
                eqxjit.filter_jit(lambda x: x + 1)(X)
            found = rows(report)
            assert [found[name].is_never_cached for name in ("check", "<lambda>")] == [is_on, False]
            notes = [note for note in report.notes if "never comes from" in note]
            assert [note.partition(":")[0] for note in notes] == ["check"] * is_on
            assert ("never" in str(report)) == is_on
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            for name, value in before.items():
                jax.config.update(name, value)


def setup(x):
    y = jnp.linspace(0, 1, 17) + jnp.cumsum(x)
    for k in range(3, 15):
        y = y + jnp.roll(x, k) * jnp.sum(x[:k])
    return jnp.linalg.norm(y)


def test_operations_outside_of_any_jit():
    with eqxjit.compile_report() as report:
        setup(jnp.arange(17.0))
    line = setup.__code__.co_firstlineno + 3
    [note] = report.notes
    assert "operations outside of any jit" in note
    assert f"most of all by {shown(__file__)}:{line} (`setup`)" in note

    @jax.jit
    def squares(x):
        return jnp.sum(x**2) + 3

    with eqxjit.compile_report() as report:
        for n in range(12):
            squares(np.ones(n + 3))
    assert not report.notes
