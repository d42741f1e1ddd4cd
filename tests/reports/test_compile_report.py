"""`compile_report` shows in one table what `filter_jit`, `jax.jit` and operations compile."""

import importlib.util
import sys
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxjit
from eqxjit._reports import operations
from tests.support.places import make_site_packages, shown
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
    # A part of an outer program is lowered and compiled with that program.
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
    # Lines may be folded anywhere, depending on the terminal's width.
    for text in ("outer", "inner", "plain", "compile s", "n (2 times)"):
        assert text in " ".join(printed.split())
    assert repr(report) == str(report)
    assert str(report).split() == printed.split()


def test_seconds_are_a_functions_own():
    """The time of a nested function is counted once, in its own row."""

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
    # The times are consistent again.
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
    assert "of the compile time went into" in note
    assert "operations outside of any jit" in note
    assert f"most of it at {shown(__file__)}:{line} (`setup`)" in note

    @jax.jit
    def squares(x):
        return jnp.sum(x**2) + 3

    with eqxjit.compile_report() as report:
        for n in range(12):
            squares(np.ones(n + 3))
    assert not report.notes


def search(x, target):
    return jax.lax.while_loop(lambda x: x**2 > target, lambda x: x * 0.5, x)


def count(x, target):
    return jax.lax.fori_loop(0, jnp.int32(target), lambda i, x: x + i, x)


def scanned(x, target):
    return jax.lax.scan(lambda c, v: (c * v, c), x, jnp.ones(3))


def choose(x, target):
    return jax.lax.cond(x > target, lambda x: x + 1, lambda x: x - 1, x)


def mapped(x, target):
    return jax.lax.map(lambda v: v * x, jnp.ones(3))


EAGER = {
    search: "jax.lax.while_loop",
    count: "jax.lax.fori_loop",
    scanned: "jax.lax.scan",
    # JAX 0.8 compiles the branches of an eager `cond` alone.
    **({choose: "jax.lax.cond"} if jax.__version_info__ >= (0, 9) else {}),
    mapped: "jax.lax.map",
}


@pytest.mark.parametrize("fun", EAGER, ids=lambda fun: fun.__name__)
def test_an_eager_operation_with_a_new_function_each_time(fun):
    x = jnp.array(8.0)
    fun(x, 0.5)
    with eqxjit.compile_report() as report:
        for i in range(12):
            fun(x, 1.0 + i)
    [row] = [row for row in report.rows if EAGER[fun] in row.function]
    line = f"{shown(__file__)}:{fun.__code__.co_firstlineno + 1}"
    assert row.function.endswith(f" at {line}")
    assert row.traces >= 12
    of_operations, functions = report.notes
    assert "operations outside of any jit" in of_operations
    assert f"at {line} (`{fun.__name__}`)" in of_operations
    assert functions.startswith(f"`{EAGER[fun]}` at {line} is compiled for each call, because each")


def test_an_eager_operation_with_one_function_has_no_such_note():
    def body(c, v):
        return c * v, c

    with eqxjit.compile_report() as report:
        for n in range(1, 13):
            jax.lax.scan(body, 1.0, jnp.ones(n))
    assert not any("new function" in note for note in report.notes)


def test_operations_have_the_names_that_users_know():
    key = jax.random.key(0)
    tree = {"a": jnp.ones((7, 3)), "b": jnp.ones(13)}
    with eqxjit.compile_report() as report:
        start = test_operations_have_the_names_that_users_know.__code__.co_firstlineno
        jax.random.laplace(key, (3, 7, 11))
        optax.global_norm(tree)
        jnp.sinh(tree["b"])
        jnp.cosh(tree["b"]), jnp.arctan(tree["b"])
    names = {row.function for row in report.rows}
    here = shown(__file__)
    assert {
        f"jax.random.laplace at {here}:{start + 5}",
        f"optax.global_norm at {here}:{start + 6}",
        f"jax.numpy.sinh at {here}:{start + 7}",
    } <= names
    assert any(
        "jax.numpy.cosh" in name and "jax.numpy.arctan" in name and name.endswith(f"{start + 8}")
        for name in names
    )
    assert all(span.operation for span in report.spans)


def test_a_release_of_jax_that_does_not_tell_what_it_jits(monkeypatch):
    """Operations then have rows with JAX's names, and no note."""
    monkeypatch.setattr(operations, "jitted_in", lambda frame: None)
    with eqxjit.compile_report() as report:
        jnp.cumsum(jnp.arange(19.0))
    assert "cumsum" in rows(report)
    assert report.notes == []


def test_a_function_of_the_users_is_no_operation():
    """This holds even if it has the name of a primitive or of one of JAX's functions."""

    def named(name):
        def fun(x):
            return x + 1

        fun.__name__ = fun.__qualname__ = name
        return fun

    for wrap in (jax.jit, eqxjit.filter_jit, lambda fun: jax.jit(jax.vmap(fun))):
        with eqxjit.compile_report() as report:
            for name in ("while", "sin", "_private", "scan"):
                wrap(named(name))(np.ones(3))
        assert {row.function for row in report.rows} == {"while", "sin", "_private", "scan"}
        assert {span.operation for span in report.spans} == {""}


def test_a_row_names_each_cause_of_a_tenth_of_its_traces():
    f = eqxjit.filter_jit(lambda x, n, mode: x)
    with eqxjit.compile_report(print=False) as report:
        for n in range(10):
            f(X, n, "a")
        for n in range(4):
            f(jnp.ones(n + 20), 9, "a")
        f(jnp.ones(3), 9, "b")
    [row] = [row for row in report.rows if row.function.endswith("<lambda>")]
    assert row.reason == "static value changed: n (9 times); shape: x (4 times)"


def test_threads_add_up_and_have_a_wall_time(capsys):
    def sleeping(x):
        time.sleep(0.3)
        return x

    functions = [eqxjit.filter_jit(sleeping), eqxjit.filter_jit(lambda x: sleeping(x))]
    with eqxjit.compile_report() as report:
        threads = [threading.Thread(target=f, args=(X,)) for f in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert report.total_seconds >= 0.6
    assert 0.3 <= report.wall_seconds < report.total_seconds
    assert " in 2 threads, " in capsys.readouterr().out.splitlines()[0]
    with eqxjit.compile_report() as report:
        functions[0](jnp.ones(2))
    assert report.wall_seconds == pytest.approx(report.total_seconds)
    assert "thread" not in capsys.readouterr().out.splitlines()[0]


def test_max_traces_says_that_pmap_traces_twice():
    f = eqxjit.filter_jit(lambda x: x * 2, max_traces=1)
    with pytest.raises(eqxjit.TooManyTracesError) as raised:
        eqx.filter_pmap(f)(jnp.ones((1, 3)))
    if hasattr(jax.pmap(abs), "__code__"):
        assert "`equinox.filter_pmap` trace twice: allow twice as many" in str(raised.value)
    f = eqxjit.filter_jit(lambda x, n: x * n, max_traces=1)
    f(X, 1)
    with pytest.raises(eqxjit.TooManyTracesError) as raised:
        f(X, 2)
    assert "pmap" not in str(raised.value)


def test_a_report_that_is_not_printed(capsys):
    with eqxjit.compile_report(print=False) as report:
        jax.jit(lambda x: x + 3)(X)
    assert report.rows
    assert capsys.readouterr().out == ""


def test_what_a_library_calls_for_itself_has_no_row(tmp_path, caplog):
    """It is part of another program, and users don't know its name."""
    path = make_site_packages(tmp_path) / "a_solver.py"
    path.write_text(
        "import eqxjit\n"
        "@eqxjit.filter_jit\n"
        "def _step(x, n):\n"
        "    return x * n\n"
        "@eqxjit.filter_jit\n"
        "def solve(x):\n"
        "    return _step(x, 2) + _step(x, 3)\n"
    )
    spec = importlib.util.spec_from_file_location("a_solver", path)
    module = sys.modules["a_solver"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        with eqxjit.compile_report() as report, eqxjit.explain_retraces():
            jitted = eqxjit.filter_jit(lambda x: module.solve(x))
            jitted(X)
            jitted(jnp.ones(5))
        assert {row.function.rpartition(".")[2] for row in report.rows} >= {"<lambda>", "solve"}
        assert "_step" not in str(report)
        assert not any("_step" in message for message in caplog.messages)
        assert any("<lambda>` was traced again" in message for message in caplog.messages)
        # If it is called by itself, it has a row like other programs.
        with eqxjit.compile_report() as report:
            module._step(jnp.ones(7), 4)
        assert "_step" in rows(report)
    finally:
        del sys.modules["a_solver"]
