"""The runtime without diagnostics: what is behaviour works, and nothing is explained or logged."""

import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from eqxjit._core import counter as _hooks
from tests.support.processes import run
from tests.support.sides import CALLS

X = jnp.arange(3.0)


@pytest.fixture(autouse=True)
def _without_diagnostics():
    installed = _hooks.install(_hooks.TraceHook)
    yield
    _hooks.install(installed)


class Model(eqx.Module):
    weight: jax.Array
    n: int = 2

    def __call__(self, x):
        return self.weight * x**self.n


def test_calls_and_retraces_are_counted(caplog):
    f = eqxjit.filter_jit(lambda model, x: model(x))
    for x in (X, jnp.ones(2), X):
        weight = jnp.ones(x.shape)
        for _ in range(CALLS):
            assert f(Model(weight), x).tolist() == (x**2).tolist()
    assert f(Model(X, 3), X).tolist() == (X**4).tolist()
    with eqxjit.explain_retraces():
        f(Model(jnp.ones(5)), jnp.ones(5))
    assert f.cache_info()[:2] == (2, 4)
    assert f.cache_info().hits == 3 * CALLS - 2
    assert f.traces() == caplog.messages == []


def test_the_limit_holds():
    f = eqxjit.filter_jit(lambda x: x + 1, max_traces=2)
    f(X), f(X[1:])
    with pytest.raises(eqxjit.TooManyTracesError, match=r"may be traced 2 times .* be trace 3\.\n"):
        f(X[2:])
    assert f(X).tolist() == [1, 2, 3]
    f.clear_cache()
    assert f(X[2:]).tolist() == [3]


def test_a_compilation_is_no_trace():
    f = eqxjit.filter_jit(lambda x: jnp.cos(x) * 2)
    lowered = f.lower(X)
    f(X)
    lowered.compile()
    g = eqxjit.filter_jit(lambda x: jnp.cos(x) * 3)
    jax.jit(lambda x: g(x))(X)
    g(X)
    assert f.cache_info().traces == g.cache_info().traces == 1
    assert repr(lowered) == "<Lowered <lambda>(...)>"
    with pytest.raises(TypeError, match=r"argument"):
        lowered.compile()(X, X)


def test_donation_and_errors():
    f = eqxjit.filter_jit(lambda x: x + 1, donate="all")
    x = X + 0
    assert f(x).tolist() == [1, 2, 3]
    assert x.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match="`x` has been deleted"):
        f(x)


def test_freezing():
    frozen = eqxjit.freeze(Model(X))
    frozen.compile(jax.ShapeDtypeStruct((3,), jnp.float32), other_shapes="raise")
    assert frozen(X).tolist() == (X**3).tolist()
    with pytest.raises(eqxjit.TooManyTracesError, match="compiled ahead of time"):
        frozen(jnp.ones((2, 3)))


def test_no_module_of_diagnostics_is_needed():
    program = """
        import sys, types

        package = sys.modules["eqxjit"] = types.ModuleType("eqxjit")
        package.__path__ = [sys.argv[1]]  # Without its `__init__`, which brings diagnostics in.

        import jax.numpy as jnp
        from eqxjit._core.counter import TooManyTracesError
        from eqxjit._core.wrapper import filter_jit

        for n_calls in (1, 4):
            f = filter_jit(lambda x, n: x * n, max_traces=2)
            x = jnp.arange(3.0)
            for size in (1, 2):
                for _ in range(n_calls):
                    f(jnp.ones(size), 2)
            info = f.cache_info()
            assert info.traces == 2 and info.hits == 2 * n_calls - 2, info
            try:
                f(jnp.ones(3), 2)
            except TooManyTracesError as error:
                assert "(`max_traces=2`), and the call at " in str(error)
            else:
                raise AssertionError("no error")
            for _ in range(4):
                assert f(jnp.ones(2), 2).tolist() == [2, 2]
        assert not [name for name in sys.modules if name.startswith("eqxjit._diagnostics")]
        print("done")
    """
    folder = str(pathlib.Path(eqxjit.__file__).parent)
    assert run(program, folder) == "done\n"
