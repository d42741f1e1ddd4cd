"""Static objects that Python compares by identity: methods, and objects without an `__eq__`.

The classes differ in whether they have weak references, by which most of them are compared.
"""

import dataclasses
import enum
import functools
import gc
import operator
import random
import weakref
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.sides import CALLS, both

X = jnp.arange(3)


class Tuple(NamedTuple):
    by: Any

    def scale(self, x):
        return x * self.by


class TupleChild(Tuple):
    """A tuple subclass, which has a `__dict__` but no weak references."""


@dataclasses.dataclass(slots=True, frozen=True)
class Slots:
    by: Any

    def scale(self, x):
        return x * self.by


@dataclasses.dataclass(slots=True, frozen=True)
class Uncompared:
    by: Any = dataclasses.field(compare=False)

    def scale(self, x):
        return x * self.by


@dataclasses.dataclass(frozen=True)
class Plain(Slots):
    pass


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Weak(Slots):
    pass


class AlwaysEqual:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def scale(self, x):
        return x * self.by


KINDS = [Tuple, TupleChild, Slots, Uncompared, Plain, Weak, AlwaysEqual]


@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("put", ["an argument", "a list", "a static field"])
def test_methods_of_equal_objects_are_told_apart(filter_jit, kind, put):
    f = filter_jit(lambda x, holder: get(holder)(x))
    wrap, get = {
        "an argument": (lambda method: method, lambda method: method),
        "a list": (lambda method: [method], lambda holder: holder[0]),
        "a static field": (Holder, lambda holder: holder.value),
    }[put]
    objects = [kind(2), kind(2.0), kind(True)]
    for _ in range(CALLS):
        found = [f(X, wrap(each.scale)).dtype.name for each in objects]
        assert found == ["int32", "float32", "int32"]


class Holder(eqx.Module):
    value: Any = eqx.field(static=True)


@pytest.mark.parametrize("kind", KINDS)
def test_methods_of_one_object_share_a_program(kind):
    f = eqxjit.filter_jit(lambda x, method: method(x))
    scaled = kind(2)
    for _ in range(CALLS):
        f(X, scaled.scale)
    assert f.cache_info().traces == 1


@both
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_object_where_another_was_is_another(filter_jit, kind):
    """The new object may have the `id` of an object that died."""
    f = filter_jit(lambda x, method: method(x))
    for i in range(30):
        by = [2, 2.0][i % 2]
        assert f(X, kind(by).scale).dtype.name == ["int32", "float32"][i % 2]
        gc.collect(0)


def test_objects_without_weak_references_are_kept_no_longer_than_their_entry():
    class Noted(list):
        """Has weak references, and is held by something that has none."""

    f = eqxjit.filter_jit(lambda x, method: x, maxsize=2)
    alive = []
    for _ in range(6):
        held = Noted()
        alive.append(weakref.ref(held))
        f(X, Tuple(held).scale)
        del held
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 2
    f.clear_cache()
    gc.collect()
    assert not any(ref() is not None for ref in alive)


@both
def test_an_unhashable_object_without_an_eq_is_rejected(filter_jit):
    class Unhashable:
        __slots__ = ()
        __hash__ = None

    with pytest.raises((TypeError, ValueError), match="hash"):
        filter_jit(lambda x, static: x)(X, Unhashable())


# --- Random objects -------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    def scale(self, x):
        return x * self.value


def double(x):
    return x * 2


@dataclasses.dataclass(eq=False)
class NoEq:
    by: Any


@dataclasses.dataclass(eq=False, slots=True)
class NoEqSlots:
    by: Any


#: Functions that create a static object from a number, which alone decides what traces read.
MAKERS = {
    "method of a named tuple": lambda n: Tuple(n).scale,
    "method of slots": lambda n: Slots(n).scale,
    "method that compares nothing": lambda n: Uncompared(n).scale,
    "method of a member": lambda n: [*Color][int(n) % 2].scale,
    "builtin method": lambda n: [n].copy,
    "method wrapper": lambda n: n.__add__,
    "method of a string": lambda n: str(n).upper,
    "partial": lambda n: functools.partial(operator.mul, n),
    "partial of a method": lambda n: functools.partial(Tuple(n).scale),
    "getter": lambda n: operator.itemgetter(n),
    "function": lambda n: lambda x: x * n,
    "member": lambda n: [*Color][int(n) % 2],
    "scalar": lambda n: n,
    "tuple": lambda n: (n, (n, "a")),
    "slots": Slots,
    "no ==": NoEq,
    "no ==, slots": NoEqSlots,
    "frozenset": lambda n: frozenset({n}),
    "structured scalar": lambda n: np.array([(n,)], dtype=[("a", "f4")])[0],
    "sentinel": lambda n: object(),
    "range": lambda n: range(int(n) % 5),
    "slice": lambda n: slice(n),
}

#: The objects that can't be hashed, or are arrays, and so can only be in static fields.
IN_FIELDS = {"slice", "structured scalar"}

NUMBERS = [0, 1, 2, 0.0, -0.0, 1.0, 2.0, True, False]


def shown(value):
    """Return what a trace can read from a static object."""
    if isinstance(value, functools.partial):
        return "partial", shown(value.func), [shown(v) for v in value.args]
    if hasattr(value, "__self__") and not isinstance(value.__self__, type(np)):
        return value.__name__, repr(value.__self__)
    if isinstance(value, type(double)):
        return "function", [repr(cell.cell_contents) for cell in value.__closure__ or ()]
    return type(value).__name__, "" if type(value) is object else repr(value)


@pytest.mark.parametrize("seed", range(6))
def test_random_static_objects(seed):
    """Each call sees its own objects, some of which are new.

    Equinox mistakes some objects for others, such as `1.0` for `1`. So the plain function's results
    are expected.
    """
    rng = random.Random(seed)
    seen: list[Any] = []
    reads: list[Any] = []

    def read(x, leaf, holder):
        reads[:] = [shown(leaf), shown(holder.value)]
        return x, reads[:]

    f = eqxjit.filter_jit(lambda *args: (read(*args)[0], Result(tuple(map(repr, reads)))))
    for _ in range(60):
        names = [name for name in MAKERS if name not in IN_FIELDS]
        name, other = rng.choice(names), rng.choice([*MAKERS])
        pair = MAKERS[name](rng.choice(NUMBERS)), MAKERS[other](rng.choice(NUMBERS))
        if seen and rng.random() < 0.5:
            pair = rng.choice(seen)
        seen.append(pair)
        # Some objects die, and others take their place in memory.
        if rng.random() < 0.3:
            seen.pop(rng.randrange(len(seen)))
        for _ in range(rng.choice([1, 3])):
            _, result = f(X, pair[0], Holder(pair[1]))
            assert result.text == (repr(shown(pair[0])), repr(shown(pair[1])))


class Result(eqx.Module):
    text: Any = eqx.field(static=True)
