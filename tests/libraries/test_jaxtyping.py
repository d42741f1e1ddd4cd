"""jaxtyping around functions, inside of them, and as an import hook."""

import importlib
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, TypeCheckError, install_import_hook, jaxtyped

import eqxjit
from tests.support.sides import CALLS, both

beartype = pytest.importorskip("beartype").beartype


def typed(fun):
    return jaxtyped(typechecker=beartype)(fun)


def add(x: Float[Array, " n"], y: Float[Array, " n"]) -> Float[Array, " n"]:
    return x + y


def test_jaxtyped_above():
    """jaxtyping reads attributes of a function that a wrapper of Equinox 0.13.8 lacks."""
    f = typed(eqxjit.filter_jit(add))
    for n in (3, 4) * CALLS:
        assert f(jnp.ones(n), jnp.ones(n)).shape == (n,)
        with pytest.raises(TypeCheckError, match="'y'"):
            f(jnp.ones(n), jnp.ones(n + 1))


@both
def test_jaxtyped_below(filter_jit):
    f = filter_jit(typed(add))
    for n in (3, 4) * CALLS:
        assert f(jnp.ones(n), jnp.ones(n)).shape == (n,)
        with pytest.raises(TypeCheckError, match="'y'"):
            f(jnp.ones(n), jnp.ones(n + 1))


@both
def test_a_shape_that_is_wrong_within_a_trace(filter_jit):
    """The return annotation is checked while the function is traced."""

    @filter_jit
    @typed
    def f(x: Float[Array, " n"]) -> Float[Array, " n"]:
        return x[:2]

    assert f(jnp.ones(2)).shape == (2,)
    for _ in range(CALLS):
        with pytest.raises(TypeCheckError, match="return"):
            f(jnp.ones(3))
        assert f(jnp.ones(2)).shape == (2,)


def test_warm_calls_check_nothing():
    checks = []

    def noting(fun):
        def checked(*args, **kwargs):
            checks.append(fun)
            return fun(*args, **kwargs)

        return checked

    f = eqxjit.filter_jit(jaxtyped(typechecker=noting)(add))
    f(jnp.ones(3), jnp.ones(3))
    n_checks = len(checks)
    assert n_checks
    for _ in range(CALLS):
        f(jnp.ones(3), jnp.ones(3))
    assert len(checks) == n_checks


SOURCE = """
    import equinox as eqx
    import eqxjit
    from jaxtyping import Array, Float

    class Linear(eqx.Module):
        weight: Float[Array, "out in"]

        @FILTER_JIT
        def __call__(self, x: Float[Array, " in"]) -> Float[Array, " out"]:
            return self.weight @ x

        @FILTER_JIT
        def wrong(self, x: Float[Array, " in"]) -> Float[Array, " in"]:
            return self.weight @ x

    @FILTER_JIT
    def apply(model, x: Float[Array, " n"]) -> Float[Array, " n"]:
        return x + model(x)
"""


@pytest.mark.parametrize("name", ["eqx.filter_jit", "eqxjit.filter_jit"])
def test_the_import_hook(tmp_path, monkeypatch, name):
    module = f"hooked_by_jaxtyping_{name[:3]}_{len(name)}"
    source = textwrap.dedent(SOURCE).replace("FILTER_JIT", name)
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with install_import_hook(module, "beartype.beartype"):
        hooked = importlib.import_module(module)
    monkeypatch.delitem(sys.modules, module)
    square, wide = hooked.Linear(jnp.ones((3, 3))), hooked.Linear(jnp.ones((2, 3)))
    for _ in range(CALLS):
        assert square(jnp.ones(3)).shape == square.wrong(jnp.ones(3)).shape == (3,)
        assert hooked.apply(square, jnp.ones(3)).shape == (3,)
        assert jax.vmap(wide)(jnp.ones((4, 3))).shape == (4, 2)
        with pytest.raises(TypeCheckError):
            wide(jnp.ones((3, 1)))
        with pytest.raises(TypeCheckError):
            wide.wrong(jnp.ones(3))
        with pytest.raises(TypeCheckError):
            hooked.Linear(jnp.ones(3))


def test_beartype_names_the_wrapper():
    f = beartype(eqxjit.filter_jit(add))
    with pytest.raises(Exception, match=r"JitFunction\.__call__\(\) parameter"):
        f("a", jnp.ones(3))
