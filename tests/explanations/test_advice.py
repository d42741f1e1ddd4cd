"""Each remedy can be followed to the letter, and then prevents the trace."""

import collections
import dataclasses
import enum
import functools
import importlib.util
import io
import itertools
import random
import re
import sys
import textwrap
import threading
import types
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxjit
from eqxjit._diagnostics.advice import REMEDIES
from tests.support.helpers import assert_same
from tests.support.inside import forget_families
from tests.support.places import make_site_packages

X = jnp.arange(3.0)


class Model(eqx.Module):
    scale: object = 2.0
    config: object = eqx.field(static=True, default=None)
    rate: object = None

    def __call__(self, x):
        return x


def hint(f, *args, **kwargs):
    """Return the remedy for the trace that this call causes."""
    before = f.cache_info().traces
    f(*args, **kwargs)
    assert f.cache_info().traces == before + 1
    *_, trace = f.traces()
    return "; ".join(dict.fromkeys(d.remedy for d in trace.differences))


def expression(remedy):
    """Return the code in a remedy."""
    return next(code for code in remedy.split("`") if re.match(r"j?np\.\w+\(", code))


def assert_no_further_trace(f, calls, n_to_begin=1):
    """Check that calls that follow the remedy are traced only once."""
    for args in calls[:n_to_begin]:
        f(*args)
    before = f.cache_info().traces
    for args in calls:
        f(*args)
    assert f.cache_info().traces == before, f.traces()[-1].explanation


NUMBERS = {
    "ints": (1, 2, [3, 4, 5]),
    "floats": (1.0, 2.0, [0.5, -0.0, float("inf"), float("nan")]),
    "complex": (1j, 2j, [3j, 1.0]),
    "an int, then floats": (1, 0.5, [0.25, 2]),
}


@pytest.mark.parametrize(("first", "second", "more"), NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("where", ["argument", "in a dict", "field", "static field"])
def test_make_a_number_an_array(where, first, second, more):
    f = eqxjit.filter_jit(lambda x: X)
    wrap = {
        "argument": lambda n: n,
        "in a dict": lambda n: {"n": [n]},
        "field": lambda n: Model(scale=n),
        "static field": lambda n: Model(config={"rate": n}),
    }[where]
    f(wrap(first))
    remedy = hint(f, wrap(second))
    code = expression(remedy)
    assert ("in a field that isn't static" in remedy) == ("field" in where)
    names = {"np": np, "nan": float("nan"), "inf": float("inf")}
    # To the letter.
    arrays = [eval(code.replace("...", repr(n)), {**names, "x": wrap(n)}) for n in more]
    again = (lambda n: Model(rate=n)) if where == "static field" else wrap
    assert not any(jax.typeof(array).weak_type for array in arrays)
    assert_no_further_trace(f, [(again(array),) for array in arrays])
    # An array with a strong type needs no further trace, either.
    assert_no_further_trace(f, [(again(jnp.zeros((), arrays[0].dtype)),)], n_to_begin=0)


ARRAYS = {
    "float32": (jnp.float32(1), 2.0, 0),
    "bfloat16": (jnp.bfloat16(1), 2.5, 0),
    "uint8": (jnp.uint8(1), 2, 0),
    "weak": (jnp.asarray(1.0), 2.0, 1),
    "int32, then a float": (jnp.int32(1), 2.5, 1),
    "another shape": (X, 2.5, 1),
}


@pytest.mark.parametrize(("array", "number", "n_to_begin"), ARRAYS.values(), ids=ARRAYS)
def test_pass_an_array_again(array, number, n_to_begin):
    f = eqxjit.filter_jit(lambda x: x)
    f(array)
    code = expression(hint(f, number))
    passed = [eval(code, {"jnp": jnp, "np": np, "x": type(number)(i * number)}) for i in (1, 0, 1)]
    assert passed[0] == number
    assert_no_further_trace(f, [(each,) for each in passed], n_to_begin)


def test_a_remedy_of_two_differences_is_said_once():
    f = eqxjit.filter_jit(lambda x, y: x)
    f(jnp.ones(3), jnp.ones(5)), f(jnp.ones(4), jnp.ones(6))
    explanation = f.traces()[1].explanation
    assert "`y` was float32[5], is float32[6]" in explanation
    assert explanation.count("pad it to a few sizes") == 1


# --- Each remedy, for each kind of object -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    rate: object = 1.0


@dataclasses.dataclass(eq=False)
class ByIdentity:
    rate: object = 1.0


class Settings(dict):
    def __hash__(self):
        return 0


class ConfigModule(eqx.Module):
    rate: object


class Point(NamedTuple):
    rate: object


class Mode(enum.Enum):
    TRAIN, EVAL = 1, 2


class Holder(eqx.Module):
    forward: object

    def __call__(self, x):
        return self.forward(x)


class Stepper:
    def __init__(self, rate=2.0):
        self.rate = rate

    def __call__(self, x):
        return x * self.rate

    def step(self, x):
        return x * self.rate


class StepperModule(eqx.Module):
    rate: object = 2.0

    __call__, step = Stepper.__call__, Stepper.step


def loss(x, w=2.0):
    return (w * x**2).sum()


def decorated(fun):
    return functools.wraps(fun)(lambda x: fun(x) + 1)


def capturing(n):
    return lambda x: x * n


def times(n, x):
    return x * n


def times_n(params, x):
    return x * params["n"]


def with_default(n):
    return lambda x, n=n: x * n


def with_keyword(n):
    def fun(x, *, n=n):
        return x * n

    return fun


def calling(fun):
    return lambda x: fun(x)


def calling_with(params):
    return lambda x: times_n(params, x)


def own_activations():
    return [lambda x: x, lambda x: x + 1]


def chained(rate=1e-3):
    return optax.chain(optax.clip(1.0), optax.adam(rate))


def array(rate):
    return jnp.asarray(rate, jnp.float32)


LINEAR = eqx.nn.Linear(3, 3, key=jax.random.key(0))
BATCH = jnp.ones((2, 3))
ACTIVATIONS = own_activations()
LOCAL = capturing(2.0)
WITH_DEFAULT = with_default(2.0)
STEPPER, BY_IDENTITY, LOCK, DECORATED = Stepper(), ByIdentity(), threading.Lock(), decorated(loss)
PARTIALS = functools.partial(loss, w=2.0), functools.partial(LOCAL)
SCHEDULE = optax.cosine_decay_schedule(0.1, 10)
VMAPPED = jax.vmap(LOCAL)
JITTED = eqxjit.filter_jit(LOCAL)
ADAM = chained()
INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)


STATE = eqx.nn.State(eqx.nn.BatchNorm(3, "batch", mode="batch"))


def updated_state(i):
    """Return a state as a checkpoint restores it, without weak types."""
    return jax.tree.map(lambda a: a.astype(a.dtype) + (i - 1), STATE)


def injected(rate):
    state = INJECTED.init(X)
    state.hyperparams["learning_rate"] = jnp.asarray(rate, jnp.float32)
    return INJECTED, state


def updated(optimizer):
    return optimizer[0].update(X, optimizer[0].init(X))[0]


def total(tree):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree) if not isinstance(leaf, str))


def rate_of(config):
    return X * config.rate


def applied(fun):
    return fun(X)


class Each(NamedTuple):
    """Calls that are traced each time, their remedy, and the same calls with the remedy."""

    remedy: str
    fun: object
    args: object
    followed: object
    followed_args: object


def copied(fun):
    arguments = fun.__globals__, fun.__name__, fun.__defaults__, fun.__closure__
    return types.FunctionType(fun.__code__, *arguments)


def passing(remedy, fun, args, followed_args, followed=None):
    """Return calls of one function with different arguments."""
    # Each function has programs of its own.
    jitted, others = eqxjit.filter_jit(copied(fun)), eqxjit.filter_jit(copied(followed or fun))
    return Each(remedy, lambda i: jitted, args, lambda i: others, followed_args)


def wrapping(remedy, fun, followed, followed_args=None):
    """Return calls of a function that is wrapped for each call."""
    return Each(
        remedy,
        lambda i: eqxjit.filter_jit(fun(i)),
        lambda i: (X,),
        lambda i: eqxjit.filter_jit(followed(i)),
        followed_args or (lambda i: (X,)),
    )


def drawing(make, draw):
    return passing(
        "iterator",
        lambda source: X * (source if eqx.is_array(source) else draw(source)),
        lambda i: (make(i),),
        lambda i: (array(draw(make(i))),),
    )


def generator(i):
    yield float(i)


def file(i):
    return io.StringIO(f"{i}\n")


ROWS = {
    # Numbers.
    "numbers in nested lists": passing(
        "numbers",
        lambda x: jnp.asarray(x).sum(),
        lambda i: ([[float(i), 2.0 * i], [3.0 * i, 4.0 * i]],),
        lambda i: (np.asarray([[float(i), 2.0 * i], [3.0 * i, 4.0 * i]]),),
    ),
    "numbers in a ragged list": passing(
        "numbers",
        total,
        lambda i: ([[float(i), 2.0 * i], [3.0 * i], [4.0 * i]],),
        lambda i: (jax.tree.map(np.asarray, [[float(i), 2.0 * i], [3.0 * i], [4.0 * i]]),),
    ),
    "numbers in dicts": passing(
        "numbers",
        total,
        lambda i: ({"a": [{"b": float(i), "c": i}] * 2},),
        lambda i: (jax.tree.map(np.asarray, {"a": [{"b": float(i), "c": i}] * 2}),),
    ),
    "wrapped Partial": wrapping(
        "argument",
        lambda i: eqx.Partial(loss, w=float(i)),
        lambda i: eqx.Partial(loss, w=array(i)),
    ),
    "Module": passing(
        "field",
        rate_of,
        lambda i: (ConfigModule(float(i)),),
        lambda i: (ConfigModule(array(i)),),
    ),
    "named tuple": passing(
        "field", rate_of, lambda i: (Point(float(i)),), lambda i: (Point(array(i)),)
    ),
    "vectorised Module": wrapping(
        "field",
        lambda i: eqx.filter_vmap(StepperModule(float(i))),
        lambda i: eqx.filter_vmap(StepperModule(array(i))),
    ),
    "static field": passing(
        "field",
        lambda model: X * (model.config if model.rate is None else model.rate),
        lambda i: (Model(config=float(i)),),
        lambda i: (Model(rate=array(i)),),
    ),
    "wrapped partial of a method": wrapping(
        "object",
        lambda i: functools.partial(Stepper(float(i)).step),
        lambda i: lambda_of_rate,
        followed_args=lambda i: (X, array(i)),
    ),
    "dataclass": passing(
        "object",
        lambda config, rate=None: X * (config.rate if rate is None else rate),
        lambda i: (Config(float(i)),),
        lambda i: (Config(), array(i)),
    ),
    "dict of a class that JAX doesn't take apart": passing(
        "object",
        lambda settings, rate=None: X * (settings["rate"] if rate is None else rate),
        lambda i: (Settings(rate=float(i)),),
        lambda i: (Settings(rate=0.0), array(i)),
    ),
    "partial": passing(
        "object",
        lambda fun, w=None: fun(X) if w is None else fun(X, w=w),
        lambda i: (functools.partial(loss, w=float(i)),),
        lambda i: (loss, array(i)),
    ),
    "numbers among others": passing(
        "numbers",
        lambda tree, numbers=(): total(tree) + total(numbers),
        lambda i: ([float(i)] * 4 + ["a", X],),
        lambda i: (["a", X], jnp.asarray([float(i)] * 4)),
    ),
    # Other values.
    "array in a static field": passing(
        "array",
        lambda model: X * (model.config if model.rate is None else model.rate),
        lambda i: (Model(config=np.float32(i)),),
        lambda i: (Model(rate=np.float32(i)),),
    ),
    "generator": drawing(generator, lambda source: next(source)),
    "iterator": drawing(lambda i: iter([float(i)]), lambda source: next(source)),
    "count": drawing(itertools.count, lambda source: next(source)),
    "zip": drawing(lambda i: zip([i], [i], strict=True), lambda source: next(source)[0]),
    "file": drawing(file, lambda source: float(next(source))),
    "NumPy's generator": drawing(np.random.default_rng, lambda source: source.normal()),
    "NumPy's state": drawing(np.random.RandomState, lambda source: source.normal()),
    "Python's generator": drawing(random.Random, lambda source: source.random()),
    "name": passing("label", lambda x, name="": x + 1, lambda i: (X, f"step {i}"), lambda i: (X,)),
    # Objects that are created again.
    "instance of a class that is defined again": passing(
        "instance",
        lambda settings: X,
        lambda i: (type("Settings", (), {"__module__": __name__})(),),
        lambda i: (STEPPER,),
    ),
    "closure over an array": passing(
        "closure",
        applied,
        lambda i: (capturing(array(i)),),
        lambda i: (eqx.Partial(times, array(i)),),
    ),
    "default that is an array": passing(
        "closure",
        applied,
        lambda i: (with_default(array(i)),),
        lambda i: (eqx.Partial(times, array(i)),),
    ),
    "keyword's default that is an array": passing(
        "closure",
        applied,
        lambda i: (with_keyword(np.float32(i)),),
        lambda i: (eqx.Partial(times, array(i)),),
    ),
    "default that is a number": passing(
        "object",
        lambda fun, n=None: fun(X) if n is None else fun(X, n),
        lambda i: (with_default(float(i)),),
        lambda i: (WITH_DEFAULT, array(i)),
    ),
    "closure over a Module": passing(
        "closure",
        applied,
        lambda i: (calling(StepperModule(array(i))),),
        lambda i: (eqx.Partial(times, array(i)),),
    ),
    "closure over a closure over arrays": passing(
        "closure",
        applied,
        lambda i: (calling(capturing(array(i))),),
        lambda i: (eqx.Partial(times, array(i)),),
    ),
    "closure over a dict of arrays": passing(
        "closure",
        applied,
        lambda i: (calling_with({"n": np.full(3, i, np.float32)}),),
        lambda i: (eqx.Partial(times_n, {"n": np.full(3, i, np.float32)}),),
    ),
    "lambda": passing("function", applied, lambda i: (capturing(2.0),), lambda i: (LOCAL,)),
    "jitted lambda": passing(
        "function",
        applied,
        lambda i: (Holder(eqxjit.filter_jit(capturing(2.0))),),
        lambda i: (Holder(JITTED),),
    ),
    "instance, made again": passing(
        "instance", applied, lambda i: (Stepper(),), lambda i: (STEPPER,)
    ),
    "dataclass by identity": passing(
        "instance", rate_of, lambda i: (ByIdentity(),), lambda i: (Config(),)
    ),
    "partial of a local function": passing(
        "partial",
        applied,
        lambda i: (functools.partial(capturing(2.0)),),
        lambda i: (PARTIALS[1],),
    ),
    "object of a library": passing(
        "made by a library", lambda lock: X, lambda i: (threading.Lock(),), lambda i: (LOCK,)
    ),
    "method, made again": passing(
        "instance", applied, lambda i: (Stepper().step,), lambda i: (StepperModule().step,)
    ),
    "wrapped method": wrapping("instance", lambda i: Stepper().step, lambda i: STEPPER.step),
    "optimizer": passing("optimizer", updated, lambda i: ((chained(),),), lambda i: ((ADAM,),)),
    "optimizer of another rate": passing(
        "optimizer",
        lambda optimizer: X,
        lambda i: (chained(1e-3 * i),),
        lambda i: injected(1e-3 * i),
        lambda optimizer, state: optimizer.update(X, state) and X,
    ),
    "schedule": passing(
        "optimizer",
        lambda schedule: schedule(X),
        lambda i: (optax.cosine_decay_schedule(0.1, 10),),
        lambda i: (SCHEDULE,),
    ),
    "partial, made once": passing(
        "partial",
        applied,
        lambda i: (functools.partial(loss, w=2.0),),
        lambda i: (PARTIALS[0],),
    ),
    "wrapped partial": wrapping(
        "partial",
        lambda i: functools.partial(jnp.dot, 2.0),
        lambda i: eqx.Partial(jnp.dot, 2.0),
    ),
    "functions of one call": passing(
        "function",
        lambda functions: functions[1](X),
        lambda i: (own_activations(),),
        lambda i: (ACTIVATIONS,),
    ),
    "transformed local function": passing(
        "transformed", applied, lambda i: (jax.vmap(capturing(2.0)),), lambda i: (VMAPPED,)
    ),
    "transformed function": passing(
        "transformed",
        applied,
        lambda i: (jax.grad(loss),),
        lambda i: (eqx.filter_grad(loss),),
    ),
    "wrapped function of a library": wrapping(
        "transformed", lambda i: jax.vmap(jnp.sin), lambda i: eqx.filter_vmap(jnp.sin)
    ),
    "transformed Module": passing(
        "transformed",
        lambda fun: fun(BATCH),
        lambda i: (jax.vmap(LINEAR),),
        lambda i: (eqx.filter_vmap(LINEAR),),
    ),
    "transformed method": passing(
        "transformed",
        lambda fun: fun(BATCH),
        lambda i: (jax.vmap(LINEAR.__call__),),
        lambda i: (LINEAR,),
        lambda linear: jax.vmap(linear)(BATCH),
    ),
    "wrapped lambda": wrapping(
        "object",
        lambda i: lambda x: x * i,
        lambda i: lambda_of_rate,
        followed_args=lambda i: (X, jnp.asarray(i)),
    ),
    "wrapped decorator": wrapping("wrapped again", lambda i: decorated(loss), lambda i: DECORATED),
    # Other structures.
    "None, then an array": passing(
        "None at first",
        lambda hidden=None: X if hidden is None else X + hidden,
        lambda i: (None if i == 1 else jnp.ones(3),),
        lambda i: (jnp.zeros((3,), dtype=jnp.float32) if i == 1 else jnp.ones(3),),
    ),
    "None, then a state": passing(
        "None at first",
        lambda state=None: total(state),
        lambda i: (None if i == 1 else ADAM.init(X),),
        lambda i: (ADAM.init(X),),
    ),
    "dict with another key": passing(
        "keys",
        total,
        lambda i: ({f"k{i}": X},),
        lambda i: ({f"k{k}": X * (k == i) for k in range(5)},),
    ),
    "list that grows": passing(
        "length", total, lambda i: ([X] * i,), lambda i: ([X] * i + [X * 0] * (5 - i),)
    ),
    "list of numbers that grows": passing(
        "length",
        total,
        lambda i: ([1.0] * i,),
        lambda i: (jnp.pad(jnp.stack([1.0] * i), (0, 8 - i)),),
    ),
    # Other arrays.
    "device": passing(
        "sharding or device",
        lambda x: x + 1,
        lambda i: (X if i == 1 else jax.device_put(X, jax.devices()[0]),),
        lambda i: (jax.device_put(X, jax.devices()[0]),),
    ),
    "size": passing(
        "size", total, lambda i: (jnp.ones(i),), lambda i: (jnp.pad(jnp.ones(i), (0, 16 - i)),)
    ),
    "weak type in a library's state": passing(
        "state",
        lambda state: total(state),
        lambda i: (STATE if i == 1 else updated_state(i),),
        lambda i: (jax.tree.map(lambda a: a.astype(a.dtype), updated_state(i)),),
    ),
    "weak type": passing(
        "weak type",
        lambda x: x + 1,
        lambda i: (jnp.asarray(1.0) if i == 1 else jnp.float32(i),),
        lambda i: (jnp.asarray(i, dtype=jnp.float32),),
    ),
}


def lambda_of_rate(x, rate):
    return x * rate


def fits(name, remedy):
    """Return whether a text is the remedy with this name."""
    return re.fullmatch(re.sub(r"\\\{\w+\\\}", ".*", re.escape(REMEDIES[name])), remedy)


def remedies_for(row, i):
    """Return the remedies for the trace, or the compilation, that a call causes."""
    f = row.fun(i)
    f(*row.args(i))
    trace = f.traces()[-1]
    assert len(trace.differences) <= 2, trace.explanation
    [remedy] = {d.remedy for d in [*trace.differences, *trace.recompiled]}
    return remedy


@pytest.mark.parametrize("name", ROWS)
def test_each_remedy_is_followed(name):
    row = ROWS[name]
    forget_families()
    row.fun(1)(*row.args(1))
    remedy = remedies_for(row, 2)
    assert (
        max((n for n in REMEDIES if fits(n, remedy)), key=lambda n: len(REMEDIES[n])) == row.remedy
    )
    if name.startswith("numbers in"):
        # To the letter.
        names = {"jax": jax, "np": np, "x": row.args(3)[0], "tree": row.args(3)[0]}
        code = remedy.split("`")[1 if "nested" in name else 3]
        assert_same((eval(code, names),), row.followed_args(3))
    # The rest differ as the first one does.
    calls = [(row.followed(i), row.followed_args(i)) for i in (1, 3, 4)]
    *_, n = [f(*args) is None or f.cache_info().hits for f, args in calls[:2]]
    f, args = calls[2]
    result = f(*args)
    assert f.cache_info().hits == n + 1
    expected = row.fun(4)(*row.args(4))
    assert all(map(np.allclose, jax.tree.leaves(result), jax.tree.leaves(expected)))


def test_each_remedy_has_a_row():
    assert {*REMEDIES} == {row.remedy for row in ROWS.values()}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Mode.TRAIN, Mode.EVAL),
        (True, False),
        (jnp.float32, jnp.int32),
        (jnp.sin, jnp.cos),
        (capturing("a"), capturing("b")),
        (Stepper("a"), Stepper("b")),
        (functools.partial(max, "a"), functools.partial(max, "b")),
        (Config("a"), Config("b")),
        (frozenset({1}), frozenset({2})),
        (Model(config=collections.deque([1])), Model(config=collections.deque([2]))),
        # In these cases no remedy would help.
        (1, 2**31),
        (1.0, 1e39),
        (jax.random.key(0), 1),
        (X, "text"),
        (X, X[None]),
        (X, X.astype(int)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_where_nothing_is_to_be_made_once_there_is_no_remedy(old, new):
    f = eqxjit.filter_jit(lambda x: X)
    f({"a": [old]})
    assert hint(f, {"a": [new]}) == ""
    [difference] = f.traces()[-1].differences
    assert difference.old != difference.new


def test_a_remedy_belongs_to_its_category():
    """An array that differs in several ways has the remedy of each."""
    f = eqxjit.filter_jit(lambda x: X)
    f(jnp.ones(3)), f(jax.device_put(jnp.ones(4, "int32"), jax.devices()[0]))
    remedies = {d.category: d.remedy for d in f.traces()[-1].differences}
    assert fits("size", remedies["shape"])
    assert remedies["dtype"] == ""
    assert fits("sharding or device", remedies["sharding or device"])
    f(jnp.ones((2, 2), "int32")), f(jnp.asarray(1.0))
    assert {d.category: d.remedy for d in f.traces()[-1].differences}["shape"] == ""


def test_a_capture_that_is_the_same_is_no_cause():
    f = eqxjit.filter_jit(lambda x, fun: fun(x))
    same = array(2.0)
    f(X, capturing(same)), f(X, capturing(same))
    assert fits("function", f.traces()[-1].differences[0].remedy)

    def two(other):
        return lambda x: x * same + other

    f(X, two(array(1.0))), f(X, two(array(2.0)))
    [difference] = f.traces()[-1].differences
    assert difference.remedy.startswith("It closes over the array `other`, which differs: pass")


def test_the_state_of_a_model_is_named_as_in_the_model():
    class Net(eqx.Module):
        bn: eqx.nn.BatchNorm

    _, state = eqx.nn.make_with_state(lambda: Net(eqx.nn.BatchNorm(3, "b", mode="batch")))()
    f = eqxjit.filter_jit(lambda state: X)
    f(state), f(jax.tree.map(lambda a: a.astype(a.dtype), state))
    [difference] = f.traces()[-1].differences
    assert difference.path == "state[bn.batch_counter]"
    assert "`state = jax.tree.map(lambda a: a.astype(a.dtype), state)`" in difference.remedy


def test_several_kinds_of_differences_have_a_remedy_each():
    f = eqxjit.filter_jit(lambda batch, step, model: X)
    f({"x": jnp.ones(3)}, 1, Holder(capturing(1)))
    remedy = hint(f, {"x": jnp.ones(4)}, 2, Holder(capturing(1)))
    for part in ("pad it to a few sizes", "`np.int32(step)`", "different object of the same code"):
        assert part in remedy


# --- A library's ------------------------------------------------------------------------------


LIBRARY = """
    import dataclasses, functools
    import equinox as eqx, jax.numpy as jnp, jax, eqxjit

    @eqxjit.filter_jit
    def solve(x, max_steps=10, opts=None, fun=None):
        return x

    @eqxjit.filter_jit
    def _private(x):
        return 0

    of_private = _private

    class Solver(eqx.Module):
        tol: float = 1.0
        order: int = eqx.field(static=True, default=3)
        fun: object = None
        ys: object = None

    class Identity:
        pass

    @dataclasses.dataclass(frozen=True)
    class Options:
        tol: float

    def make_callable():
        return lambda x: x

    def make_partial():
        return functools.partial(jnp.clip, min=0)

    def define_and_call():
        eqxjit.filter_jit(lambda x: x)(jnp.ones(3))

    evicting = eqxjit.filter_jit(lambda x, n: x, maxsize=1)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Import a module from a folder of installed packages."""
    path = make_site_packages(tmp_path_factory.mktemp("lib")) / "a_library.py"
    path.write_text(textwrap.dedent(LIBRARY))
    spec = importlib.util.spec_from_file_location("a_library", path)
    module = sys.modules["a_library"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["a_library"]


OF_LIBRARY = {
    "an argument of its private function": lambda lib, i: lib.of_private(i),
    "a size for its function": lambda lib, i: lib.solve(jnp.ones(i + 3)),
    "a field of its class": lambda lib, i: OWN(lib.Solver(tol=float(i))),
    "a static field": lambda lib, i: OWN(lib.Solver(order=i)),
    "its options": lambda lib, i: OWN(lib.Options(float(i))),
    "a weak type in its class, in its function": lambda lib, i: lib.of_private(
        lib.Solver(ys=jnp.asarray(1.0) if i else jnp.float32(1))
    ),
    "its lambda for its function": lambda lib, i: lib.solve(X, fun=lib.make_callable()),
    "Equinox's layer": lambda lib, i: OWN(eqx.nn.Dropout(0.1 * (i + 1))),
}


@eqxjit.filter_jit
def OWN(model):
    """A function of the user's."""
    return X


@pytest.mark.parametrize("call", OF_LIBRARY.values(), ids=OF_LIBRARY)
def test_no_advice_about_what_a_library_made(call, library):
    functions = OWN, library.solve, library.of_private
    for f in functions:
        f.clear_cache()
    for i in range(2):
        call(library, i)
    [f] = [f for f in functions if f.traces()]
    *_, trace = f.traces()
    assert trace.differences
    assert [d.remedy for d in trace.differences if d.remedy] == []


OF_USER = {
    "a lambda for its function": (lambda lib: lib.solve(X, fun=lambda x: x), "make it once"),
    # The user's line calls the library, which creates the object.
    "its lambda": (lambda lib: OWN(lib.make_callable()), "make `model` once"),
    "its partial in its class": (
        lambda lib: OWN(lib.Solver(fun=lib.make_partial())),
        "Partials compare by identity",
    ),
    "its object": (lambda lib: OWN(lib.Identity()), "make `model` once"),
    "JAX's callable": (lambda lib: OWN(jax.jit(jnp.linalg.norm)), "make `model` once"),
}


def test_a_number_that_the_user_passes_to_a_librarys_function(library):
    f = library.solve
    f.clear_cache()
    for n in (1.0, 2.0):
        f(X, max_steps=n)
    assert (
        f.traces()[-1]
        .differences[0]
        .remedy.startswith("If it varies, pass `np.float32(max_steps)`")
    )
    assert_no_further_trace(f, [(X, np.float32(n)) for n in (1.0, 2.0)])
    for n in (1.0, 2.0):
        f(X, opts={"n": [n]})
    assert "pass `np.float32(opts['n'][0])`" in f.traces()[-1].differences[0].remedy


@pytest.mark.parametrize(("call", "advice"), OF_USER.values(), ids=OF_USER)
def test_advice_about_what_the_user_gave_to_a_library(call, advice, library):
    for f in (OWN, library.solve):
        f.clear_cache()
    call(library), call(library)
    [f] = [f for f in (OWN, library.solve) if f.traces()]
    assert advice in f.traces()[-1].differences[0].remedy


def test_a_librarys_functions_that_are_traced_again_and_again(library, caplog):
    for n in range(12):
        library.evicting(X, "ab"[n % 2])
        library.define_and_call()
    messages = "\n".join(caplog.messages)
    assert messages.count("was traced 10 times") == 2
    assert not any(advice in messages for advice in ("raise", "wrap it", "pass"))
