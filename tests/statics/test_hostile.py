"""Classes that lie about themselves: a clear error or a correct result, never a stale one."""

import dataclasses
import functools
import inspect
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import outcome
from tests.support.sides import CALLS

X = jnp.arange(1.0, 4.0)
BOTH = eqx.filter_jit, eqxjit.filter_jit


# --- Static values: each has a number, whatever its class says -----------------------------------


class Numbered:
    __slots__ = ("__dict__", "__weakref__", "number")

    def __init__(self, number):
        Numbered.number.__set__(self, number)


def number_of(value):
    return Numbered.number.__get__(value) if issubclass(type(value), Numbered) else value


def _raise(*_):
    raise RuntimeError("hostile")


def _same_number(self, other):
    return type(other) is type(self) and number_of(self) == number_of(other)


def _kind(**members):
    return type("Kind", (Numbered,), members)


def _one(self):
    return 1


_turns = itertools.count()

VALUES = {
    "hash and == raise": _kind(__eq__=_raise, __hash__=_raise),
    "== raises": _kind(__eq__=_raise, __hash__=object.__hash__),
    "== recurs": _kind(__eq__=lambda self, other: self == other, __hash__=_one),
    "== is never true": _kind(__eq__=lambda *_: False, __hash__=_one),
    "== returns an array": _kind(__eq__=lambda *_: np.array([True, False]), __hash__=_one),
    "== of the plain number": _kind(
        __eq__=lambda self, other: number_of(self) == number_of(other),
        __hash__=lambda self: hash(number_of(self)),
    ),
    "hash changes": _kind(__eq__=_same_number, __hash__=lambda self: next(_turns)),
    # Mocks and proxies do this.
    "getattr answers anything": _kind(__getattr__=lambda self, name: lambda *_, **__: self),
    "says that it is an array": _kind(__class__=jax.Array),
    "says that it is a Module": _kind(__class__=eqx.Module),
    "says that it is a tuple": _kind(__class__=tuple),
    "repr raises": _kind(__repr__=_raise),
    # Equinox doesn't treat it as an array, although NumPy could convert it.
    "is an array to NumPy": _kind(__array__=lambda *_, **__: np.ones(3)),
}


class StaticHolder(eqx.Module):
    x: jax.Array
    value: object = eqx.field(static=True)


PLACES = {
    "itself": (lambda v: v, lambda tree: tree),
    "a static field": (lambda v: StaticHolder(X, v), lambda tree: tree.value),
    "a list in a static field": (lambda v: StaticHolder(X, [v]), lambda tree: tree.value[0]),
}


def is_right(result, number):
    return isinstance(result, jax.Array) and result.tolist() == (X * number).tolist()


def is_clear(result):
    """Return whether a result is the user's own error, or an error that says where to look."""
    # A RecursionError comes from an endless `==`.
    return isinstance(result, RecursionError) or (
        isinstance(result, Exception)
        and any(part in str(result) for part in ("hostile", "`tree", "truth value"))
    )


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", VALUES)
def test_a_hostile_static_value(name, place):
    (put, find), kind = PLACES[place], VALUES[name]
    theirs, ours = [jit(lambda tree, x: x * number_of(find(tree))) for jit in BOTH]
    two, three, other_two = kind(2), kind(3), kind(2)
    for value in (two, two, two, two, three, two, other_two, three):
        result = outcome(lambda v: ours(put(v), X), value)
        assert is_right(result, number_of(value)) or is_clear(result), result
        # The first call may raise an error although Equinox's doesn't.
        if name != "hash and == raise" and is_right(
            outcome(lambda v: theirs(put(v), X), value), number_of(value)
        ):
            assert is_right(result, number_of(value)), result
    # After that, a good call still works.
    for _ in range(CALLS):
        assert is_right(outcome(ours, put(4), X), 4)


# --- Modules and functions -----------------------------------------------------------------------


def _ten_times(self, name):
    value = object.__getattribute__(self, name)
    return 10 * value if name == "scale" else value


@pytest.mark.parametrize(
    "members",
    [{"__getattribute__": _ten_times}, {"__eq__": _raise, "__hash__": _raise}],
    ids=", ".join,
)
def test_a_hostile_module_in_and_out(members):
    """The result, and the Module that is returned, are those of Equinox."""
    fields = {"__annotations__": {"x": jax.Array, "scale": int}, "scale": eqx.field(static=True)}
    kind = type(eqx.Module)("Hostile", (eqx.Module,), {"__module__": __name__, **fields, **members})
    theirs, ours = [jit(lambda tree: (tree.x * tree.scale, tree)) for jit in BOTH]
    for scale in (2, 2, 2, 2, 3, 2, 3):
        result, expected = ours(kind(X, scale)), theirs(kind(X, scale))
        assert result[0].tolist() == expected[0].tolist()
        assert type(result[1]) is kind
        assert str(vars(result[1])) == str(vars(expected[1]))


def _renamed(**attributes):
    def f(x, n=2):
        return x * n

    for name, value in attributes.items():
        setattr(f, name, value)
    return f


def _strange(**members):
    """Return an object whose class has these members."""
    return type("Strange", (), {"__call__": lambda self, x, n=2: x * n, **members})()


_POSITIONAL = inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD)

FUNCTIONS = {
    "annotations that aren't types": lambda: _renamed(__annotations__={"x": "1 +", "n": _raise}),
    "a signature that lies": lambda: _renamed(__signature__=inspect.Signature([_POSITIONAL])),
    "a call that is a property": lambda: _strange(__call__=property(lambda _: _renamed())),
    "lru_cache": lambda: functools.lru_cache(lambda x, n=2: x * n),
    "singledispatch": lambda: functools.singledispatch(_renamed()),
    "parameters in Greek": lambda: eval("lambda x, λ=2, été=1: x * λ"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_hostile_function(name):
    function = FUNCTIONS[name]()
    expected = outcome(lambda: eqx.filter_jit(function)(X))
    for _ in range(CALLS):
        result = outcome(lambda: eqxjit.filter_jit(function)(X))
        if isinstance(expected, Exception):
            assert isinstance(result, Exception) or is_right(result, 2)
            assert not isinstance(result, (AssertionError, NameError, SyntaxError))
        else:
            assert is_right(result, 2), result
            assert isinstance(repr(eqxjit.filter_jit(function)), str)


class Odd(list):
    def __iter__(self):
        return (item for item in list.__iter__(self) if item % 2)


class OddTuple(tuple):
    __iter__ = Odd.__iter__


@dataclasses.dataclass(frozen=True)
class Compared:
    n: int


class Borrowing:
    __eq__, __hash__ = Compared.__eq__, Compared.__hash__

    def __init__(self, n):
        self.n = n


@pytest.mark.parametrize("jit", BOTH)
@pytest.mark.parametrize(
    ("make", "last"),
    [
        (lambda n: StaticHolder(X, Odd([1, n])), lambda holder: holder.value[-1]),
        (lambda n: OddTuple([1, n]), lambda value: value[-1]),
        (Borrowing, lambda value: value.n),
    ],
)
def test_what_a_class_changes_of_its_bases_counts_as_upstream(jit, make, last):
    f = jit(lambda value, x: x * last(value))
    for n in (2, 4, 2, 2, 4, 6):
        assert f(make(n), X).tolist() == (X * n).tolist()
