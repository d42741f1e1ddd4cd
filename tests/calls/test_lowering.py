"""Ahead of time: `f.lower(...)`, its `compile()`, and calls of what that returns."""

import logging
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.callables import every_callable
from tests.support.devices import about_cpus
from tests.support.helpers import Counted, assert_same
from tests.support.models import Scaled
from tests.support.processes import run as run_program
from tests.support.sides import CALLS, both

X = jnp.arange(1.0, 4.0)


class Stepping(eqx.Module):
    weight: jax.Array

    @eqxjit.filter_jit
    def step(self, x, n=1):
        return self.weight * x * n


def run(model, x, n=1, *, mode="sum"):
    y = model(x) * n
    return {"y": y.sum() if mode == "sum" else y, "model": model, "mode": mode, "f": run}


@about_cpus("other devices give no such analysis")
def test_jaxs_analysis_of_what_was_lowered_and_compiled():
    lowered = eqxjit.filter_jit(lambda a, b: a @ b).lower(jnp.ones((8, 16)), jnp.ones((16, 4)))
    compiled = lowered.compile()
    for stage in (lowered.lowered, compiled.compiled):
        assert stage.cost_analysis()["flops"] == 2 * 8 * 16 * 4
    memory = compiled.compiled.memory_analysis()
    n_bytes = 4 * (8 * 16 + 16 * 4), 4 * 8 * 4
    assert (memory.argument_size_in_bytes, memory.output_size_in_bytes) == n_bytes


def test_a_compiled_function_returns_what_a_call_returns():
    ours, arguments = eqxjit.filter_jit(run), (Scaled(X), X, 3)
    compiled, expected = (f.lower(*arguments).compile() for f in (ours, eqx.filter_jit(run)))
    for model in (Scaled(X), Scaled(-X), Scaled(X)) * 2:
        out = compiled(model, X, 3)
        assert_same(out, expected(model, X, 3))
        assert_same(out, ours(model, X, 3))
        assert out["f"] is run


@both
def test_what_a_compiled_function_refuses(filter_jit):
    """It rejects what JAX's compiled functions reject, because it holds only machine code."""
    compiled = filter_jit(lambda x: x * 2).lower(X).compile()
    with jax.disable_jit(), pytest.raises(ValueError, match="Disable jit is not supported"):
        compiled(X)
    for transformation in (jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())):
        with pytest.raises(TypeError, match="transformations"):
            transformation(compiled)(X)
    for _ in range(CALLS):
        for bad in (jnp.ones(5), X.astype(jnp.int32)):
            with pytest.raises(TypeError, match="compiled"):
                compiled(bad)
        assert_same(compiled(X), X * 2)


@both
def test_arguments_are_bound_as_in_a_call(filter_jit):
    f = filter_jit(run)
    compiled = f.lower(Scaled(X), x=X, mode="none", n=3).compile()
    for _ in range(CALLS):
        expected = run(Scaled(X), X, 3, mode="none")
        assert_same(compiled(Scaled(X), X, 3, mode="none"), expected)
        assert_same(compiled(mode="none", n=3, x=X, model=Scaled(X)), expected)
        with pytest.raises(TypeError):
            compiled(Scaled(X))
        with pytest.raises(TypeError):
            compiled(Scaled(X), X, 3, mode="none", other=1)


def test_other_static_arguments_are_an_error():
    """Equinox silently computes with the static arguments that it was lowered with."""
    old, compiled = (
        f(run).lower(Scaled(X), X, 2).compile() for f in (eqx.filter_jit, eqxjit.filter_jit)
    )
    assert_same(old(Scaled(X), X, 3)["y"], old(Scaled(X), X, 2)["y"])
    for _ in range(CALLS):
        for arguments, keywords, difference in [
            ((Scaled(X), X, 3), {}, "`n` was 2, is 3"),
            ((Scaled(X), X, 2.0), {}, "`n` was 2, is 2.0"),
            ((Scaled(X), X, X), {}, "`n` was 2, is float32["),
            ((Scaled(X), 2, 2), {}, "], is 2"),
            ((Scaled(X), X, 2), {"mode": "none"}, "`mode` was absent, is 'none'"),
            ((Scaled(X), X), {}, "`n` was 2, is absent"),
            ((Scaled(X, 3.0), X, 2), {}, "`model.scale` was 2.0, is 3.0"),
            (((X, X), X, 2), {}, "`model` was Scaled, is tuple of 2"),
        ]:
            with pytest.raises(
                ValueError, match="was lowered for other static arguments"
            ) as caught:
                compiled(*arguments, **keywords)
            assert difference in str(caught.value), str(caught.value)
        assert compiled(Scaled(X), X, 2)["y"] == (X * X * 4).sum()


@pytest.mark.parametrize("order", ["lower first", "call first"])
@both
def test_lowering_and_calling_share_one_trace(filter_jit, order):
    f = Counted(filter_jit, lambda model, x, n: model(x) * n)
    arguments = Scaled(X), X, 2
    for _ in range(CALLS):
        if order == "call first":
            f(*arguments)
        compiled = f.jitted.lower(*arguments).compile()
        f(*arguments)
        compiled(*arguments)
    assert f.traces == 1


@both
def test_a_compiled_function_outlives_the_cache(filter_jit):
    f = filter_jit(run)
    compiled = f.lower(Scaled(X), X, 2).compile()
    if filter_jit is eqxjit.filter_jit:
        f.clear_cache()
    jax.clear_caches()
    for _ in range(CALLS):
        assert compiled(Scaled(X), X, 2)["y"] == (X * X * 4).sum()
        assert f(Scaled(X), X, 2)["y"] == (X * X * 4).sum()


@both
def test_lowering_neither_runs_nor_donates(filter_jit):
    f = filter_jit(lambda x, y: (x + y, x * 2), donate="all")
    x, y = X + 0, X + 1
    compiled = f.lower(x, y).compile()
    assert not x.is_deleted()
    assert not y.is_deleted()
    assert_same(compiled(x, y), (X + X + 1, X * 2))
    assert x.is_deleted()


def test_bound_functions_and_methods():
    """If a method is called through its class, the instance is an ordinary argument."""
    bound = eqxjit.filter_jit(Scaled(X)).lower(X).compile()
    step = Stepping(X).step.lower(X, n=2).compile()
    of_class = Stepping.step.lower(Stepping(X), X, n=2).compile()
    for _ in range(CALLS):
        for out in (bound(X), step(X, n=2), of_class(Stepping(X), X, n=2)):
            assert_same(out, X * X * 2)


# --- The program: named after the function, the same text in every process --------------------


def _program_name(text):
    return re.search(r"^(?:HloModule |module @)([\w.<>-]+)", text, re.MULTILINE).group(1)


@every_callable
def test_the_program_is_named_as_upstreams(fun):
    ours, theirs = eqxjit.filter_jit(fun).lower(X), eqx.filter_jit(fun).lower(X)
    assert _program_name(ours.as_text()) == _program_name(theirs.as_text())
    assert "0x" not in ours.as_text()


def test_log_compiles_tells_the_name_once(caplog):
    """JAX logs the name once for each static value and each shape."""

    def logged(x, n):
        return x * n

    caplog.set_level(logging.WARNING)
    for filter_jit in (eqx.filter_jit, eqxjit.filter_jit):
        f, x, y = filter_jit(logged), X + 1, jnp.ones(2)
        with jax.log_compiles():
            for arguments in ((x, 1), (x, 2), (y, 1)):
                caplog.clear()
                for _ in range(CALLS):
                    f(*arguments)
                assert re.findall(r"Compiling (?:jit\()?([\w<>]+)\)?", caplog.text) == ["logged"]


PROGRAM = """
    import collections, hashlib, sys
    import equinox as eqx, eqxjit, jax, jax.numpy as jnp

    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))

    # Generated files are numbered; this process may have made others before.
    for n in range(int(sys.argv[1])):
        eqxjit.filter_jit(lambda: n)()

    x = jnp.arange(1.0, 4.0)
    mlp = eqx.nn.MLP(3, 3, 8, 2, key=jax.random.key(0))
    # What varies from process to process: addresses, the order of sets, ids in names.
    unordered = frozenset("abcdefgh")
    thing = object()

    def anything(tree, x, flag=None):
        return {"y": mlp(x), "tree": tree, "thing": thing, "made": eqx.Partial(lambda: x, x * 2)}

    def train(model, x):
        value, gradient = eqx.filter_value_and_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
        return value, eqx.apply_updates(model, gradient)

    wrapped = [
        (eqxjit.filter_jit(anything), ({"b": x, "a": [thing, unordered]}, x, lambda: 3)),
        (eqxjit.filter_jit(anything), ((x, x), x)),
        (eqxjit.filter_jit(train, donate="all-except-first"), (mlp, jnp.ones((5, 3)))),
        (eqxjit.filter_jit(mlp), (x,)),
        (eqxjit.freeze(mlp), (x,)),
        (eqxjit.filter_jit(lambda p, x: p.unpack()(x)), (eqxjit.pack(mlp, optimizer=None), x)),
    ]
    for f, arguments in wrapped:
        print(hashlib.sha256(f.lower(*arguments).as_text().encode()).hexdigest())
    ahead = eqxjit.filter_jit(lambda x: mlp(x) + 7)
    ahead.compile(jax.ShapeDtypeStruct((3,), x.dtype))
    for f, arguments in [*wrapped, (ahead, (x,))] * 4:
        f(*arguments)
    print(events["/jax/compilation_cache/cache_misses"])
"""


@pytest.mark.slow
def test_the_persistent_compilation_cache_hits_in_a_second_process(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    # A different seed changes the order of sets, and another import changes addresses.
    other = PROGRAM.replace("import", "import sqlite3,", 1)
    *first, first_misses = run_program(PROGRAM, "1", PYTHONHASHSEED="1", **cache).split()
    *second, second_misses = run_program(other, "7", PYTHONHASHSEED="2", **cache).split()
    assert second == first
    assert len({*first}) == 6
    assert int(first_misses) > 6
    assert second_misses == "0"
    assert any("anything" in path.name for path in tmp_path.iterdir())
