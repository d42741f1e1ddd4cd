"""Structures that are specialised in their first call: no later one takes longer than others."""

import collections
import dataclasses
import functools
import gc
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.helpers import OF_FRAMELESS_CALLS, our_frames
from tests.support.hiding import reads_fields
from tests.support.inside import MOST_AT_ONCE, cache, entries, n_specialized, trial_order

pytestmark = [*OF_FRAMELESS_CALLS, reads_fields]

X = jnp.arange(3.0)


def at_module_level(x):
    return x


(IDENTITY, OPTIONAL, BY_NAME) = (lambda x: x, lambda x, y=1: y, lambda x, *, y=1: y)


def with_default(x, y=X):
    return x, y


class Held:
    """Compared by identity."""

    def method(self, x):
        return x


class Key(str):
    """A key that may hold anything."""


class Scales(collections.UserList):
    """Found in its module, by its name."""

    def __hash__(self):
        return hash(tuple(self))


SCALES = Scales()
SCALES.__qualname__ = "SCALES"


class Raises(Held):
    def __getattr__(self, name):
        raise ValueError(name)


class Layer(eqx.Module):
    weight: jax.Array
    static: object = eqx.field(static=True)


@dataclasses.dataclass
class Settings:
    scale: object
    note: object = dataclasses.field(default=None, compare=False)

    __hash__ = object.__hash__


@dataclasses.dataclass(unsafe_hash=True)
class Changing:
    scale: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: object


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    scale: object


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedNote:
    note: object = dataclasses.field(compare=False)


class InSlots(Frozen):
    __slots__ = ("held",)


@dataclasses.dataclass(frozen=True)
class AboveSlots(SlottedNote):
    scale: int = 1


@dataclasses.dataclass(frozen=True)
class SameSize:
    __slots__ = ("__dict__", "held")
    scale: object


@dataclasses.dataclass(frozen=True)
class Failure(Exception):
    scale: int


def holding_more():
    frozen = Frozen(1)
    object.__setattr__(frozen, "held", Held())
    return frozen


def with_keyword_default(held):
    function = types.FunctionType(BY_NAME.__code__, globals())
    function.__kwdefaults__ = {"y": held}
    return function


def with_attribute():
    function = types.FunctionType(IDENTITY.__code__, globals())
    function.held = Held()
    return function


def closure(held):
    return lambda x: (x, held)


STAYING = {
    "a number": lambda: 2,
    "a function of a module": lambda: at_module_level,
    "one with a default": lambda: with_default,
    "a jitted function of JAX's": lambda: jax.nn.gelu,
    "an activation in a field": lambda: Layer(X, jax.nn.relu),
    "a lambda at module level": lambda: IDENTITY,
    "a network": lambda: eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0)),
    "layers": lambda: [Layer(X, i) for i in range(200)],
    "floats": lambda: [float(i) for i in range(3_000)],
    "a dict": lambda: {"a": X, "b": {1: X, 2: 3}},
    "tuples in a field": lambda: Layer(X, ((1, 2), ("a", (jax.nn.relu, 0.0)))),
    "a convolution": lambda: eqx.nn.Conv2d(1, 2, 3, key=jax.random.key(0)),
    "a class": lambda: Layer(X, (Held, jnp.float32)),
    "a dataclass in a field": lambda: Layer(X, Frozen((1, 0.0, "a"))),
}

GOING = {
    "an object": Held,
    "an object without names": Raises,
    "a lambda": lambda: lambda x: x,
    "a closure": lambda: closure(Held()),
    "a default": lambda: types.FunctionType(OPTIONAL.__code__, globals(), "f", (Held(),)),
    "a keyword's default": lambda: with_keyword_default(Held()),
    "a partial": lambda: functools.partial(at_module_level, Held()),
    "a method": lambda: Held().method,
    "a closure at module level": lambda: types.FunctionType(
        IDENTITY.__code__.replace(co_freevars=("y",)), globals(), closure=(types.CellType(Held()),)
    ),
    "an attribute": with_attribute,
    "a namespace": lambda: types.FunctionType(IDENTITY.__code__, {"__name__": __name__}),
    "a class": lambda: type("Held", (), {}),
    "a class in a tuple": lambda: Layer(X, (1, (type("Held", (), {}),))),
    "a list in a field": lambda: Layer(X, [1, 2]),
    "a dataclass that holds more": holding_more,
    "a field that isn't compared": lambda: Settings(1, Held()),
    "a dataclass that can change": lambda: Changing(1),
    "an object in a dataclass": lambda: Frozen(Held()),
    "a list in a dataclass": lambda: Layer(X, Frozen([])),
    "slots": lambda: Slotted(1),
    "slots that aren't compared": lambda: SlottedNote(Held()),
    "slots below a dataclass": lambda: InSlots(1),
    "slots above a dataclass": lambda: AboveSlots(Held()),
    "a slot in the place of weak references": lambda: SameSize(1),
    "an exception": lambda: Failure(1),
    "a bytearray": lambda: Layer(X, bytearray(3)),
    "a Module in a field": lambda: Layer(X, Layer(None, 2)),
    "a key": lambda: {Key(): X},
    "a closure in a field": lambda: Layer(X, closure(Held())),
    "an object in a list in a field": lambda: Layer(X, [Held()]),
}


@pytest.mark.parametrize("kind", STAYING)
def test_a_second_call_runs_none_of_our_python(kind):
    f = eqxjit.filter_jit(lambda static, x: x * 2)
    static = STAYING[kind]()
    f(static, X)
    assert our_frames(lambda: f(static, X)) == []
    assert f(static, X).tolist() == (X * 2).tolist()
    assert f.cache_info().hits == 2


@pytest.mark.parametrize("kind", GOING)
def test_what_is_called_once_is_not_kept(kind):
    f = eqxjit.filter_jit(lambda static, x: x * 2)
    static = GOING[kind]()
    f(static, X)
    assert f.specialized_source() is None
    for _ in range(2):
        assert f(static, X).tolist() == (X * 2).tolist()
    assert f.specialized_source() is not None


def test_a_name_that_another_function_has_taken(monkeypatch):
    """Say, a cell of a notebook that was run again."""
    former = functools.update_wrapper(functools.partial(at_module_level), at_module_level)
    f = eqxjit.filter_jit(lambda static, x: x * 2)
    f(former, X)
    assert n_specialized(f) == 0
    monkeypatch.setitem(globals(), "at_module_level", former)
    eqxjit.filter_jit(lambda static, x: x)(former, X)
    g = eqxjit.filter_jit(lambda static, x: x * 3)
    g(former, X)
    assert n_specialized(g) == 1


def test_many_structures_that_are_called_once():
    f = eqxjit.filter_jit(lambda x, n: x * n)
    for n in range(MOST_AT_ONCE + 3):
        f(X, n)
    assert n_specialized(f) == MOST_AT_ONCE
    for n in range(MOST_AT_ONCE + 3):
        assert f(X, n).tolist() == (X * n).tolist()
    assert n_specialized(f) == MOST_AT_ONCE + 3


def test_a_wrapper_tries_its_own_structure_first():
    def fun(x, n):
        return x * n

    one, other = eqxjit.filter_jit(fun), eqxjit.filter_jit(fun)
    one(X, 1)
    other(X, 2)
    assert [f(X, n).tolist() for f, n in ((one, 1), (other, 2))] == [X.tolist(), (X * 2).tolist()]
    assert [trial_order(f)[0].key for f in (one, other)] == [each.key for each in entries(one)]


@pytest.mark.parametrize("around", [jax.jit, jax.vmap, eqx.filter_jit, jax.checkpoint])
def test_what_becomes_part_of_another_program(around):
    f = eqxjit.filter_jit(lambda x: x * 2)
    around(lambda x: f(x))(X)
    assert n_specialized(f) == 0
    for _ in range(3):
        assert f(X).tolist() == (X * 2).tolist()
    assert n_specialized(f) == 1


@pytest.mark.parametrize("kind", ["a list in a field", "an object of a module"])
def test_a_static_object_that_the_trace_changes(kind):
    """A specialised call that was made of it then would serve calls that it was not traced for."""
    config = [1] if kind == "a list in a field" else SCALES
    config[:] = [1]

    def fun(layer, x):
        scale = layer.static[-1]
        if len(config) == 1:
            config.append(5)
        return x * scale

    f = eqxjit.filter_jit(fun)
    outs = [f(Layer(X, config), X).tolist() for _ in range(4)]
    assert outs == [(X * scale).tolist() for scale in (1, 5, 5, 5)]


def test_a_dataclass_as_an_argument():
    """Whether its class was registered as one of nodes meanwhile is asked in Python."""
    f = eqxjit.filter_jit(lambda config, x: x * config.scale)
    f(Frozen(2), X)
    assert n_specialized(f) == 1
    assert f(Frozen(2), X).tolist() == (X * 2).tolist()
    assert f(Frozen(2.0), X).tolist() == (X * 2).tolist()
    assert f.cache_info().traces == 2


def test_a_dataclass_that_the_trace_changes():
    @dataclasses.dataclass
    class Config:
        scale: int

    def fun(layer, x):
        scale, layer.static.scale = layer.static.scale, 5
        return x * scale

    f = eqxjit.filter_jit(fun)
    layer = Layer(X, Config(1))
    assert [f(layer, X).tolist() for _ in range(4)] == [(X * n).tolist() for n in (1, 5, 5, 5)]


def test_a_dataclass_that_is_changed_between_calls():
    @dataclasses.dataclass
    class Config:
        scale: object

    f = eqxjit.filter_jit(lambda layer, x: x * layer.static.scale)
    layer = Layer(X, Config(1))
    for scale in (1, 2, 2.0, True, 0.0, -0.0, 1):
        layer.static.scale = scale
        for _ in range(2):
            out = f(layer, X)
            assert str(out) == str(X * scale)
            assert out.dtype == (X * scale).dtype


def test_a_function_that_waits_or_returns_what_can_change():
    waits = eqxjit.filter_jit(lambda x: x * 2, block=True)
    waits(X)
    returns = eqxjit.filter_jit(lambda x: (x, Layer(x, [1])))
    returns(X)
    assert n_specialized(waits) == n_specialized(returns) == 0


def test_a_first_call_that_fails_is_not_specialised():
    fails = True

    def fun(x):
        if fails:
            raise ValueError("now")
        return x

    f = eqxjit.filter_jit(fun)
    for _ in range(2):
        with pytest.raises(ValueError, match="now"):
            f(X)
    assert n_specialized(f) == 0
    fails = False
    assert f(X).tolist() == f(X).tolist() == X.tolist()
    assert n_specialized(f) == 1


def test_an_entry_that_was_dropped_gets_no_call():
    f = eqxjit.filter_jit(lambda x: x)
    f(X)
    [entry] = entries(f)
    call = entry.specialized
    f.clear_cache()
    cache(f).specialize(entry, call)
    assert n_specialized(f) == 0


def test_nothing_of_a_call_is_kept():
    f = eqxjit.filter_jit(lambda layer, x: (layer, x * 2))
    layer, x = Layer(jnp.ones(3), 1), jnp.ones(3)
    alive = [weakref.ref(each) for each in (layer, layer.weight, x)]
    f(layer, x)
    assert n_specialized(f) == 1
    del layer, x
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_a_wrapper_that_dies_in_its_first_call():
    def fun(x):
        wrappers.clear()
        return x * 2

    wrappers = [eqxjit.filter_jit(fun)]
    alive = weakref.ref(wrappers[0])
    assert wrappers[0](X).tolist() == (X * 2).tolist()
    gc.collect()
    assert alive() is None
