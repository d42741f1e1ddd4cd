"""Held: whether a static container holds what it held, asked of the native back end."""

import collections
import contextlib
import copy
import dataclasses
import gc
import os
import sys
import types
import weakref
from typing import Any

import equinox as eqx
import numpy as np
import pytest

import eqxjit
from eqxjit._trees.key_cache import learned_key, native_check_of
from eqxjit._trees.snapshot import native_check, snapshots_of
from tests.support.allocations import with_failing_allocation
from tests.support.helpers import Hooked

_native = pytest.importorskip("eqxjit._native")
pytestmark = pytest.mark.skipif(not eqxjit.native_enabled(), reason="it is switched off")


class Config(eqx.Module):
    rate: Any
    sizes: Any


@dataclasses.dataclass
class Settings:
    rate: Any
    sizes: Any


class Same:
    """Compared by identity."""


class Other(Same):
    pass


class Slots:
    __slots__ = ()


class OtherSlots:
    __slots__ = ()


class Point(tuple):
    __slots__ = ()


def checked(value):
    """It outlives the snapshot."""
    check: Any = native_check(snapshots_of(value).own)
    assert type(check) is _native.Held
    assert check(value) is True
    return check


class Changing:
    """A value with a hash of its own, which changes."""

    def __init__(self):
        self.number = 1

    def __hash__(self):
        return self.number

    def __eq__(self, other):
        return type(other) is Changing and other.number == self.number


class AlsoChanging(Changing):
    pass


REBUILT = {
    "a list": lambda n: [n, str(n), (n, "a")],
    "a dict": lambda n: {str(n): n},
    "a dict by numbers": lambda n: {n: "a"},
    "a counter": lambda n: collections.Counter({"a": n}),
    "a defaultdict": lambda n: collections.defaultdict(list, a=n),
    "a mapping proxy": lambda n: types.MappingProxyType({"a": n}),
    "a namespace": lambda n: types.SimpleNamespace(a=n),
    "a Module": lambda n: Config(n, (n, n)),
    "a dataclass": lambda n: Settings(n, (n, n)),
    "a tuple of a class": lambda n: Point((n, n)),
}


@pytest.mark.parametrize("kind", REBUILT)
def test_constants_in_a_rebuilt_container(kind):
    """They are told by type and content where all of them are kept."""
    make = REBUILT[kind]
    check = checked(make(1000))
    assert check(make(int("1000"))) is True
    assert check(make(1001)) is False
    assert check(make(1000.0)) is False
    for number in (0.0, float("nan")):
        assert checked(make(number))(make(float(str(number)))) is True
    assert checked(make(0.0))(make(-0.0)) is False


def test_what_is_looked_into_or_may_die_is_told_by_address():
    kept = Same()
    for value in ([1000, [1]], [1000, kept], [1000, Slots()]):
        check = checked(value)
        assert check([1000, value[1]]) is True
        assert check([int("1000"), value[1]]) is False


def test_a_dataclass_of_constants_has_a_check():
    value = Settings(1000, (0.0, "a"))
    check: Any = native_check_of(value, learned_key(value))
    assert type(check) is _native.Held
    assert check(value) is check(Settings(int("1000"), (0.0, "a"))) is True
    assert check(Settings(1000, (-0.0, "a"))) is check(Settings(1000.0, (0.0, "a"))) is False
    value.rate = 1001
    assert check(value) is False
    with pytest.raises(AttributeError):
        check(Settings.__new__(Settings))


def _reorder(entries):
    entries["a"] = entries.pop("a")


CHANGES = {
    "an item": (lambda: [1, [2, 3]], lambda v: v.__setitem__(0, True)),
    "one more": (lambda: [1, [2, 3]], lambda v: v.append(1)),
    "one less": (lambda: [1, [2, 3]], lambda v: v.pop()),
    "an item below": (lambda: [1, [2, 3]], lambda v: v[1].__setitem__(1, 3.0)),
    "a list below": (lambda: [1, [2, 3]], lambda v: v.__setitem__(1, [2, 3])),
    "in a tuple": (lambda: (1, [2, 3]), lambda v: v[1].clear()),
    "in a tuple of a class": (lambda: Point((1, [2])), lambda v: v[1].clear()),
    "an entry": (lambda: {"a": 1, "b": [2]}, lambda v: v.update(a=1.0)),
    "a list in a dict": (lambda: {"a": 1, "b": [2]}, lambda v: v["b"].append(2)),
    "a key": (lambda: {"a": 1, "b": [2]}, lambda v: (v.pop("b"), v.update(c=[2]))),
    "a key alone": (lambda: {"a": 1, "b": 2}, lambda v: v.update(c=v.pop("b"))),
    "the order": (lambda: {"a": 1, "b": [2]}, _reorder),
    "a count": (lambda: collections.Counter("aab"), lambda v: v.update("b")),
    "a set": (lambda: [{1, 2, 3}], lambda v: v[0].add(4)),
    "another in a set": (lambda: [{1, 2, 3}], lambda v: (v[0].remove(1), v[0].add(1.0))),
    "a Module": (lambda: Config(1, [2]), lambda v: object.__setattr__(v, "rate", 1.0)),
    "in a Module": (lambda: Config(1, [2]), lambda v: v.sizes.append(1)),
    "a field more": (lambda: Config(1, [2]), lambda v: object.__setattr__(v, "more", 1)),
    "a field less": (lambda: Config(1, [2]), lambda v: object.__delattr__(v, "rate")),
    "a dataclass": (lambda: Settings(1, [2]), lambda v: setattr(v, "rate", True)),
    "in a dataclass": (lambda: Settings(1, [2]), lambda v: v.sizes.append(2)),
    "a namespace": (lambda: types.SimpleNamespace(a=1), lambda v: setattr(v, "a", True)),
    "in a namespace": (lambda: types.SimpleNamespace(a=[1]), lambda v: v.a.append(1)),
    "a hash": (lambda: [Changing()], lambda v: setattr(v[0], "number", 2)),
    "an array": (lambda: [np.ones(3)], lambda v: v[0].fill(2)),
    "a defaultdict": (lambda: collections.defaultdict(list, a=1), lambda v: v.update(a=2)),
    "a key of a defaultdict": (lambda: collections.defaultdict(list), lambda v: v["a"]),
    "a list in a defaultdict": (
        lambda: collections.defaultdict(float, {"a": 1, "b": [2]}),
        lambda v: v["b"].append(3),
    ),
    "a default": (
        lambda: collections.defaultdict(list, a=1),
        lambda v: setattr(v, "default_factory", dict),
    ),
    "no default": (
        lambda: collections.defaultdict(lambda: 1, a=[1]),
        lambda v: setattr(v, "default_factory", None),
    ),
    "a deque": (lambda: [collections.deque([1])], lambda v: v[0].append(1)),
    "an object": (lambda: [Same(), 1], lambda v: v.__setitem__(0, Same())),
    "a class": (lambda: [1, Same()], lambda v: setattr(v[1], "__class__", Other)),
    "a class, of an object that can't be referred to weakly": (
        lambda: [1, Slots()],
        lambda v: setattr(v[1], "__class__", OtherSlots),
    ),
    "a class, with the same hash": (
        lambda: [Changing()],
        lambda v: setattr(v[0], "__class__", AlsoChanging),
    ),
    "a function": (lambda: {"a": lambda: 1}, lambda v: v.update(a=lambda: 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change):
    make, action = CHANGES[change]
    value = make()
    check = checked(value)
    action(value)
    with contextlib.suppress(AttributeError):
        assert check(value) is False


@pytest.mark.parametrize("change", CHANGES)
def test_another_object_matches_if_it_holds_the_same(change):
    make, _ = CHANGES[change]
    value = make()
    check = checked(value)
    assert check(copy.copy(value)) is True
    assert check(object()) is check(None) is False


def test_a_view_of_a_dict():
    shown = {"a": 1, "b": [2]}
    view = types.MappingProxyType(shown)
    check = checked(view)
    assert check(types.MappingProxyType({**shown})) is True
    assert check(shown) is False
    for other in ({"a": 1, "b": [2]}, {"a": 1}, {}, collections.OrderedDict(shown), {"a": 2}):
        assert check(types.MappingProxyType(other)) is False
    shown["b"].append(3)
    assert check(view) is False
    shown["b"].pop()
    assert check(view) is True
    shown["c"] = 1
    assert check(view) is False
    # Not a dict below, which Python reads.
    assert native_check(snapshots_of(types.MappingProxyType(collections.ChainMap({}))).own) is None


def test_an_object_at_the_address_of_a_dead_one_is_no_other():
    n_there = 0
    # Which of them come there differs between versions of Python.
    for make in (Same, lambda: lambda: 1):
        value = [make(), 1]
        check, address = checked(value), id(value[0])
        value[0] = None
        others = [make() for _ in range(1_000)]
        there = [other for other in others if id(other) == address]
        n_there += len(there)
        for value[0] in there:
            assert check(value) is False
    # Sanitizers see to it that none does.
    assert n_there or "PYTHONMALLOC" in os.environ
    # What is told by its hash alone is kept.
    value = [Changing()]
    check, ref = checked(value), weakref.ref(value[0])
    del value
    assert ref() is not None
    del check
    assert ref() is None
    # A number that is kept has its address for itself.
    value = [int("1000000000"), [1]]
    check, address = checked(value), id(value[0])
    del value[0]
    others = [int("1000000000") + i for i in range(1_000)]
    assert address not in map(id, others)
    assert check([others[0], value[0]]) is False


@pytest.mark.parametrize("make", [Same, lambda: lambda: 1])
def test_a_death_in_the_garbage_that_it_is_in_itself(make):
    """Garbage collection calls no callback of a weak reference that is garbage, too."""
    answers = []

    def last(check, value, address):
        try:
            yield
        finally:
            value[0] = None
            others = [make() for _ in range(1_000)]
            for value[0] in [other for other in others if id(other) == address]:
                answers.append(check(value))

    for _ in range(20):
        value = [make(), 1]
        value[0].cycle = [value]
        cycle = [checked(value), snapshots_of(value).own.matches]
        for check in cycle:
            value[0].cycle.append(generator := last(check, value, id(value[0])))
            next(generator)
        value[0].cycle.append(cycle)
        del value, cycle, check, generator
        gc.collect()
    assert True not in answers


def test_it_says_no_before_it_is_whole():
    value, answers = [[i] for i in range(50)], []

    def look(phase, _):
        found = [each for each in gc.get_objects() if type(each) is _native.Held]
        answers.extend(held(value) for held in found)

    parts = tuple((i, list) for i in range(50))
    thresholds = gc.get_threshold()
    gc.callbacks.append(look)
    try:
        gc.set_threshold(1)
        for n in range(8):
            # So that a collection comes at each of its allocations.
            others = [[] for _ in range(n)]
            held = _native.Held(list, 0, (), tuple(value), parts, others[n:], None, None)
    finally:
        gc.callbacks.remove(look)
        gc.set_threshold(*thresholds)
    assert held(value)


MUTATIONS = {
    "a list": (lambda h: [h, [1], h, 2], list.clear),
    "a tuple": (lambda h: ([h, [1]], [h, [1]]), lambda v: [each.clear() for each in v]),
    "a dict": (lambda h: {"a": h, "b": [1], "c": h}, dict.clear),
    "a growing dict": (
        lambda h: {"a": h, "b": [1], "c": h},
        lambda v: v.update({str(i): 1 for i in range(99)}),
    ),
    "a set": (lambda h: [{h, 1, 2}], lambda v: v[0].clear()),
    "a Module": (lambda h: Config(h, [h]), lambda v: vars(v).clear()),
    "a dataclass": (lambda h: Settings(h, [h]), lambda v: vars(v).clear()),
}


@pytest.mark.parametrize("form", MUTATIONS)
def test_containers_that_change_while_they_are_compared(form, hook):
    """What is found then isn't promised, but that Python survives."""
    make, action = MUTATIONS[form]
    for number in range(1, 5):
        value = make(Hooked())
        check = checked(value)
        left = [number]

        def strike(value=value, left=left):
            left[0] -= 1
            if left[0] == 0:
                action(value)
                gc.collect()

        hook(strike)
        with contextlib.suppress(Exception):
            check(value)
        hook(lambda: None)
        if left[0] <= 0:
            with contextlib.suppress(AttributeError):
                assert check(value) is False


def test_what_comparing_raises_is_raised(hook):
    check = checked(value := [Hooked()])
    hook(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check(value)


def test_references_are_counted():
    value = {"a": [Config(1, [2]), Settings((1, [2]), {3})], "b": Same(), "c": [Changing()]}
    check = checked(value)
    objects = [value, value["a"], *value["a"], value["b"], value["c"], value["c"][0], check]
    objects += [value["a"][0].sizes, value["a"][1].rate, Config, Settings, True, False]
    before = [sys.getrefcount(each) for each in objects]
    for changed in (False, True):
        if changed:
            value["c"][0].number = 2
        for _ in range(1_000):
            assert check(value) is not changed
    after = [sys.getrefcount(each) for each in objects]
    assert all(abs(b - a) < 20 for b, a in zip(before, after, strict=True)), (before, after)


def test_every_allocation_may_fail():
    value = {"a": [1, {2}], "b": Settings(1, [2])}
    check = checked(value)
    arguments = (list, 0, (), (1, [2]), ((1, check),), [], None, None)
    for action in (lambda: check(value), lambda: _native.Held(*arguments)):
        for n in range(60):
            result = with_failing_allocation(n, action)
            if n > 40:
                assert result


def test_wrong_arguments_are_refused():
    right = (list, 0, (), (1, [2]), ((1, bool),), [], None, None)
    held = _native.Held(*right)
    assert held([]) is False
    for arguments, more in [((), {}), (([], []), {}), (([],), {"value": 1})]:
        with pytest.raises(TypeError):
            held(*arguments, **more)
    wrong = {0: [1], 1: [6, -1, "0"], 2: [["a"]], 3: [[1]], 5: [()], 6: [1]}
    wrong[4] = [((2, bool),), ((-1, bool),), ((1, bool), (1, bool)), (1,), ((1,),), [(1, bool)]]
    for place, values in wrong.items():
        for value in values:
            arguments = [*right]
            arguments[place] = value
            with pytest.raises((TypeError, ValueError)):
                _native.Held(*arguments)
    for part in [(list,), (list, "1"), (1, 2, 3)]:
        with pytest.raises(TypeError):
            _native.Held(list, 0, (), (value := [],), ((0, part),), [], None, None)([value])
    for reading, names in [(2, ()), (3, ()), (4, ()), (5, ("a",)), (2, ("a",)), (2, ("a",) * 3)]:
        # A part that is a key, or another number of names than of attributes.
        with pytest.raises(ValueError, match="out of"):
            _native.Held(dict, reading, names, (1, 2), ((0, bool),), [], None, None)
    with pytest.raises(TypeError):
        _native.Held(*right, more=1)


def test_cycles_are_collected():
    held = []
    gc.collect()
    n_before = sum(type(each) is _native.Held for each in gc.get_objects())
    held.append(_native.Held(list, 0, (), (1,), ((0, held.append),), held, None, None))
    del held
    gc.collect()
    assert sum(type(each) is _native.Held for each in gc.get_objects()) == n_before


def test_nesting_that_is_too_deep_raises():
    value, check = [1], _native.Held(list, 0, (), (1,), (), [], None, None)
    for _ in range(100_000):
        value = [value]
        check = _native.Held(list, 0, (), (value[0],), ((0, check),), [], None, None)
    with pytest.raises(RecursionError):
        check(value)
    # Taken apart from outside: Python frees lists in lists without a stack of its own.
    while type(value) is list:
        value = value[0]
