"""Callables that are created and wrapped again are compared with the latest of their kind."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.inside import forget_families

X = jnp.ones(3)


@pytest.fixture(autouse=True)
def _forget():
    forget_families()


def loss(x, w):
    return jnp.sum(w * x**2)


class Solver:
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return loss(x, self.w)

    def step(self, x):
        return loss(x, self.w)


class Model(eqx.Module):
    weight: jax.Array
    temperature: float

    def __call__(self, x):
        return loss(x * self.weight, self.temperature)


class Static(eqx.Module):
    solver: Solver = eqx.field(static=True)

    def __call__(self, x):
        return loss(x, self.solver.w["a"][0])


def of_partial(w):
    return eqx.filter_grad(functools.partial(loss, w=w))


#: A callable that is created from a number, a call of it, and the remedy.
VARYING = {
    "partial": (
        lambda w: functools.partial(loss, w=w),
        "w",
        "pass `np.float32(w)` as a separate argument",
    ),
    "gradient of a partial": (
        of_partial,
        "w",
        "pass `np.float32(w)` as a separate argument",
    ),
    "instance": (Solver, "w", "as a separate argument"),
    "instance in a static field": (
        lambda w: Static(Solver({"a": [w]})),
        "solver.w['a'][0]",
        "as a separate argument",
    ),
    "Module": (
        lambda temperature: Model(X, temperature),
        "temperature",
        "make `temperature` an array, `np.float32(...)`",
    ),
}


@pytest.mark.parametrize("kind", VARYING)
def test_a_number_that_varies(kind, caplog):
    make, path, remedy = VARYING[kind]
    with eqxjit.explain_retraces(), eqxjit.compile_report() as report:
        for w in (1.0, 2.0):
            latest = eqxjit.filter_jit(make(w))
            latest(X)
    [trace] = latest.traces()
    [difference] = trace.differences
    assert difference[:4] == ("another callable", path, "1.0", "2.0")
    assert remedy in difference.remedy
    [message] = caplog.messages
    assert f"`{path}` was 1.0, is 2.0" in message
    [row] = [row for row in report.rows if row.function == trace.function]
    assert row.reason == f"another callable: {path}"


SAME = {
    "partial": (lambda: functools.partial(loss, w=1.0), "a different partial of loss"),
    "gradient of a partial": (lambda: of_partial(1.0), "a different partial of loss"),
    "instance": (lambda: Solver(1.0), "a different `Solver`"),
    "method": (lambda: Solver(1.0).step, "`Solver.step` of a different `Solver`"),
}


@pytest.mark.parametrize("kind", SAME)
def test_another_one_that_compares_by_identity(kind, caplog):
    make, text = SAME[kind]
    kept = [make() for _ in range(11)]
    for fun in kept:
        f = eqxjit.filter_jit(fun)
        f(X)
    assert f.traces()[0].reason == (
        f"another callable: {text}, which compares by identity, was traced before"
    )
    [message] = caplog.messages
    assert text in message
    assert "defined again" not in message
    eqxjit.filter_jit(kept[-1])(X)
    assert f.cache_info().traces == 1


def test_the_same_function_under_other_options_is_no_retrace(caplog):
    with eqxjit.explain_retraces():
        for options in ({}, {"max_traces": 3}, {"block": True}):
            f = eqxjit.filter_jit(functools.partial(Solver.step, Solver(1.0)), **options)
            eqxjit.filter_jit(loss, **options)(X, 1)
    assert [message for message in caplog.messages if "`loss`" in message] == []
    assert eqxjit.filter_jit(loss).traces()[0].reason == "first trace"
    del f


def test_a_function_and_its_gradient_are_two():
    for wrap in (lambda fun: fun, eqx.filter_grad, eqx.filter_value_and_grad):
        f = eqxjit.filter_jit(wrap(loss))
        f(X, 1.0)
        assert f.traces()[0].reason == "first trace"


def test_traces_with_many_calls_between_are_not_in_a_row(caplog):
    f = eqxjit.filter_jit(lambda x: x + 1)
    for n in range(1, 12):
        for _ in range(50):
            f(jnp.ones(n))
    [message] = caplog.messages
    assert "was traced 10 times with 441 other calls between, last for" in message


def test_a_number_in_a_closure_has_its_name(caplog):
    for i in range(11):
        f = eqxjit.filter_jit(lambda x: x * i)  # noqa: B023
        f(X)
    assert f.traces()[0].reason == "another callable: `i` was 9, is 10"
    [message] = caplog.messages
    assert "10 times, the last time: another callable: `i` was 9, is 10" in message
    assert "pass `np.int32(i)` as a separate argument" in message


def test_a_number_in_a_partial_of_a_library_function():
    for n in (2, 3):
        f = eqxjit.filter_jit(functools.partial(jnp.add, n))
        f(X)
    [difference] = f.traces()[0].differences
    assert str(difference) == "another callable: `args[0]` was 2, is 3"
    assert "pass `np.int32(args[0])` as a" in difference.remedy


def test_an_instance_of_another_class_is_another_static_value():
    f = eqxjit.filter_jit(lambda x, own: x)
    for name in ("One", "Other"):
        f(X, type(name, (), {})())
    [difference] = f.traces()[1].differences
    assert str(difference) == "static value changed: `own` was One object, is Other object"


def test_a_compilation_without_a_trace(caplog):
    f = eqxjit.filter_jit(lambda model, x: model.weight @ x)
    model = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    f(model, X)
    put = jax.device_put(model, jax.devices()[0])
    with eqxjit.explain_retraces(), eqxjit.compile_report() as report:
        f(put, X)
        f(put, X)
    [trace] = f.traces()
    assert [(d.category, d.path, d.new) for d in trace.recompiled] == [
        ("sharding or device", "model.weight", "cpu:0"),
        ("sharding or device", "model.bias", "cpu:0"),
    ]
    [message] = caplog.messages
    assert "was compiled again, without a trace" in message
    assert "jax.device_put" in message
    [row] = [row for row in report.rows if row.function == trace.function]
    assert (row.traces, row.reason) == (
        1,
        "sharding or device: model.weight; sharding or device: model.bias",
    )
    f.clear_cache()
    with eqxjit.compile_report() as report:
        f(put, X)
        f(put, X)
    assert not f.traces()[0].recompiled
