"""Static containers: changes in place are seen, and looking for them costs no typed key."""

import collections
import contextlib
import copy
import copyreg
import dataclasses
import gc
import itertools
import math
import tracemalloc
import types
import weakref
import zlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqxjit
from eqxjit._trees import elements as _elements
from eqxjit._trees import key_cache as _key_cache
from eqxjit._trees import snapshot as _snapshot
from eqxjit._trees.key_cache import TracedObjects
from eqxjit._trees.partition import partition
from eqxjit._trees.static_key import iterated
from tests.support import inside
from tests.support.helpers import SPECIALIZING, Hooked
from tests.support.models import Pair
from tests.support.sides import CALLS, both

X = jnp.arange(3.0)


class Configured(eqx.Module):
    weight: Any
    config: Any = eqx.field(static=True)


def configured(weight, config):
    # Equinox sorts the keys of dicts that it is given, which these don't allow.
    model = Configured(weight, None)
    object.__setattr__(model, "config", config)
    return model


@dataclasses.dataclass
class Settings:
    rates: Any
    sizes: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: Any
    sizes: Any


class Compared:
    """Unhashable, with an `==` of its own."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Compared and self.value == other.value

    def __deepcopy__(self, memo):
        copies.append(self)
        return Compared(copy.deepcopy(self.value, memo))


copies = []


class Hashed:
    """Hashable, with an `==` of its own, and changeable."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Hashed and self.value == other.value

    def __hash__(self):
        return hash(self.value)


class Text(str):
    __slots__ = ()


class Items(list):
    """Its own `__iter__` says nothing of what it holds."""

    def __iter__(self):
        return iter(())


def text(value):
    """All that tells two static values apart."""
    kind = type(value).__name__
    if type(value) is float:
        return f"{kind} {value} {math.copysign(1, value)}"
    if isinstance(value, collections.OrderedDict):
        return f"{kind} {[(text(k), text(v)) for k, v in value.items()]}"
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", "")
        return f"{kind} {factory} {[(text(k), text(v)) for k, v in dict.items(value)]}"
    if isinstance(value, types.MappingProxyType):
        return f"{kind} {text(value.copy())}"
    if isinstance(value, (set, frozenset)):
        return f"{kind} {sorted(map(text, value))}"
    if isinstance(value, list):
        return f"{kind} {[*map(text, list.__iter__(value))]}"
    if isinstance(value, (tuple, collections.deque)):
        return f"{kind} {[*map(text, value)]} {getattr(value, 'maxlen', '')}"
    if isinstance(value, types.SimpleNamespace):
        return f"{kind} {text(vars(value))}"
    if isinstance(value, (Settings, Frozen)):
        fields = (value.rates, value.sizes) if kind == "Settings" else (value.rate, value.sizes)
        return f"{kind} {[*map(text, fields)]}"
    if isinstance(value, Configured):
        return f"{kind} {text(value.weight)} {text(value.config)}"
    if isinstance(value, (Compared, Hashed)):
        return f"{kind} {value.value!r}"
    if isinstance(value, np.ndarray):
        return f"{kind} {value.dtype} {value.shape} {value.tobytes()!r}"
    return f"{kind} {value!r}"


def number(value):
    """What a program computes with that was compiled for a static value."""
    return float(zlib.crc32(text(value).encode()) % 65_521)


def scaled(model, x):
    return x + number(model.config)


def stepped(model, x):
    return configured(model.weight + x, model.config), x + number(model.config)


@pytest.fixture(params=[True, False], ids=["specialised", "generic"])
def path(request, monkeypatch):
    """Calls on either path."""
    if not request.param:
        inside.specialize_nothing(monkeypatch)


# --- Changes at any depth -------------------------------------------------------------------------

ATOMS = st.sampled_from(
    [0, 1, True, False, 1.0, 0.0, -0.0, math.nan, None, 1_000, 1_000.5, 2j, "a", b"a", Text("a")]
)
DTYPES = st.sampled_from([np.dtype("float32"), np.float32(1), abs, len, Frozen(1, (2, True))])


def _containers(children):
    keys = st.sampled_from([0, 1, 1_000, 0.0, "a", "b", "c", (1, 2), (True, 2), None])
    dicts = st.dictionaries(keys, children, max_size=4)
    names = st.dictionaries(st.sampled_from("abc"), children, max_size=3)
    lists = st.lists(children, max_size=4)
    hashable = st.lists(st.one_of(ATOMS, st.just((1, "a"))), max_size=4)
    return st.one_of(
        lists,
        dicts,
        lists.map(tuple),
        hashable.map(set),
        hashable.map(frozenset),
        lists.map(collections.deque),
        lists.map(Items),
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(int, items)),
        dicts.map(types.MappingProxyType),
        names.map(lambda items: types.SimpleNamespace(**items)),
        st.dictionaries(keys, st.integers(0, 3), max_size=4).map(collections.Counter),
        st.builds(Settings, children, children),
        st.builds(configured, ATOMS, children),
        st.binary(max_size=4).map(bytearray),
        st.lists(st.integers(0, 2), max_size=3).map(lambda items: np.array(items, np.int32)),
        st.integers(0, 2).map(Compared),
        st.integers(0, 2).map(Hashed),
    )


VALUES = st.recursive(st.one_of(ATOMS, DTYPES), _containers, max_leaves=12)


def _changeable(value, found):
    """The objects in a value that can be changed in place."""
    if isinstance(value, types.MappingProxyType):
        for element in value.values():
            _changeable(element, found)
    elif isinstance(value, dict):
        found.append(value)
        for element in dict.values(value):
            _changeable(element, found)
    elif isinstance(value, (list, collections.deque, tuple)):
        if not isinstance(value, tuple):
            found.append(value)
        base = next(b for b in (list, collections.deque, tuple) if isinstance(value, b))
        for element in base.__iter__(value):
            _changeable(element, found)
    elif isinstance(value, (types.SimpleNamespace, Settings, Configured)):
        found.append(value)
        for element in vars(value).values():
            _changeable(element, found)
    elif isinstance(value, (set, bytearray, np.ndarray, Compared, Hashed)):
        found.append(value)
    return found


#: An equal value of another type, or one of another sign.
TWINS = {"int": [bool, float], "bool": [int, float], "float": [int, bool], "str": [Text]}


def _twin(value, way):
    kinds = TWINS.get(type(value).__name__, [])
    if type(value) is float and value == 0:
        return -value
    for kind in kinds[way % max(1, len(kinds)) :]:
        with contextlib.suppress(Exception):
            if kind(value) == value:
                return kind(value)
    if type(value) is list:
        return tuple(value)
    return copy.copy(value)


def change(target, way, new):
    """Changes an object in place, in one of several ways; perhaps to the same as before."""
    with contextlib.suppress(Exception):
        if isinstance(target, (dict, types.SimpleNamespace, Settings)):
            items = target if isinstance(target, dict) else vars(target)
            keys = [*items]
            key = keys[way % len(keys)] if keys else "a"
            if way % 5 == 0:
                items[key] = new
            elif way % 5 == 1:
                items[key] = _twin(items[key], way)
            elif way % 5 == 2 and isinstance(target, dict):
                items[key] = items.pop(key)  # now the last
            elif way % 5 == 3 and isinstance(target, dict):
                value = items.pop(key)
                items[_twin(key, way)] = value
            elif isinstance(target, collections.OrderedDict):
                target.move_to_end(key)
            elif isinstance(target, collections.defaultdict):
                target.default_factory = [int, float][way % 2]
            elif isinstance(target, dict):
                items[f"new {way}"] = new
            elif isinstance(target, types.SimpleNamespace):
                items["z"] = new
        elif isinstance(target, (list, collections.deque)):
            elements = [*(list if isinstance(target, list) else collections.deque).__iter__(target)]
            at = way % max(1, len(elements))
            if way % 4 == 0:
                target[at] = new
            elif way % 4 == 1:
                target[at] = _twin(elements[at], way)
            elif way % 4 == 2:
                target.reverse()
            else:
                target.append(new)
        elif isinstance(target, set):
            element = sorted(target, key=text)[way % len(target)] if target else 1
            target.discard(element)
            if way % 2:
                target.add(_twin(element, way))
        elif isinstance(target, Configured):
            name, element = ("config", new) if way % 2 else ("weight", way % 3)
            if way % 3 == 0:
                element = _twin(getattr(target, name), way)
            object.__setattr__(target, name, element)
        elif isinstance(target, bytearray):
            target.append(way % 256)
        elif isinstance(target, np.ndarray):
            if way % 2:
                target[way % len(target)] += 1
            else:
                target.shape = (len(target), 1)
        else:
            target.value = way % 3


def fresh(value):
    """A deep copy, of mapping proxies, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(copyreg.dispatch_table, types.MappingProxyType, _reduced)
        return copy.deepcopy(value)


def _reduced(proxy):
    return types.MappingProxyType, (proxy.copy(),)


CHANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), VALUES), max_size=6)


@settings(max_examples=30)
@given(value=VALUES, changes=CHANGES, fun=st.sampled_from([scaled, stepped]))
def test_changes_at_any_depth_are_seen(value, changes, fun):
    """Each call's result is that of a fresh trace for what the static value is then."""
    traces = []

    def traced(model, x):
        traces.append(text(model.config))
        return fun(model, x)

    f = eqxjit.filter_jit(traced)
    model = configured(X, value)
    twin = configured(X, fresh(value))
    for place, way, new in [(0, 0, None), *changes]:
        if traces:
            targets = _changeable(value, [])
            if targets:
                change(targets[place % len(targets)], way, fresh(new))
        for called in (*[model] * CALLS, twin, model):
            expected = X + number(called.config)
            out = f(called, X)
            if fun is stepped:
                returned, out = out
                assert text(returned.config) == text(called.config)
            assert out.tolist() == expected.tolist(), (text(called.config), f.traces())
    # Not for `1` and then `Text`, and once for each. (The key of an object with a hash of its own
    # holds the object itself: once that is changed, the entry of what it was isn't found again.)
    if fun is scaled and "Hashed" not in "".join(traces):
        assert len(traces) == len({*traces})


@settings(max_examples=12)
@given(value=VALUES, changes=CHANGES)
def test_changes_in_the_function_itself_are_seen(value, changes):
    model = configured(X, value)
    f = eqxjit.filter_jit(eqx.Partial(scaled, model))
    for place, way, new in [(0, 0, None), *changes]:
        targets = _changeable(value, [])
        if targets:
            change(targets[place % len(targets)], way, fresh(new))
        for _ in range(CALLS):
            assert f(X).tolist() == (X + number(value)).tolist()


def _value_of(node):
    return (node.value,), None


def _registered(kind):
    """A class, which JAX is to know for one of nodes with the one child `value`."""
    jax.tree_util.register_pytree_node(kind, _value_of, lambda _, children: kind(*children))
    return kind


@_registered
class NodeByIdentity:
    def __init__(self, value):
        self.value = value


@_registered
class NodeOfBadEquality(NodeByIdentity):
    def __eq__(self, other):
        return type(other) is type(self)

    def __hash__(self):
        return 0


@_registered
@dataclasses.dataclass
class NodeUncompared:
    value: Any = dataclasses.field(compare=False)


@_registered
class NodeOfPair(Pair):
    """A named tuple by its base, but not for JAX."""

    value = 1


class ModuleOfBadEquality(eqx.Module):
    value: Any

    __eq__ = NodeOfBadEquality.__eq__
    __hash__ = NodeOfBadEquality.__hash__


NODES = [NodeByIdentity, NodeOfBadEquality, NodeUncompared, NodeOfPair, ModuleOfBadEquality]

#: Modules as static values, in which such a node is.
HOLDING = {
    "field": lambda node: configured(node, None),
    "list": lambda node: [configured([1, node], (1,))],
    "tuple": lambda node: configured((1, (node,)), None),
    "dict": lambda node: {"a": configured({"b": [node]}, None)},
    "named tuple": lambda node: configured(Pair(1, node), None),
    "ordered": lambda node: configured(collections.OrderedDict(a=node), None),
    "module": lambda node: (configured(configured([node], {"c": 1}), [2]),),
    "node": lambda node: configured(NodeByIdentity([node]), None),
    "partial": lambda node: configured(jax.tree_util.Partial(max, node), abs),
    "static field": lambda node: configured(1, [configured(node, lambda: node)]),
    "deep": lambda node: nested(lambda value: [value], 100, configured(node, None)),
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("form", HOLDING)
def test_changes_in_the_nodes_of_a_static_module_are_seen(form, kind):
    def valued(model, x):
        traces.append(node.value)
        return x + node.value

    traces = []
    node = kind(1, 2) if kind is NodeOfPair else kind(1)
    model = configured(X, HOLDING[form](node))
    f, of_function = eqxjit.filter_jit(valued), eqxjit.filter_jit(eqx.Partial(valued, model))
    for value in (1, 2, 3, 1, 2.0):
        object.__setattr__(node, "value", value)
        for _ in range(CALLS):
            assert (f(model, X) == X + value).all()
            assert (of_function(X) == X + value).all()
    assert traces == [1, 1, 2, 2, 3, 3, 2.0, 2.0]


@pytest.mark.parametrize("kind", [NodeByIdentity, NodeOfBadEquality, NodeUncompared])
def test_the_key_of_what_is_nested_deeply_tells_nodes(kind):
    node = kind(1)
    value = nested(lambda value: [value], 600, configured(node, None))
    keys = [_elements.whole_key(value), _elements.whole_key(value)]
    node.value = 2
    assert keys[0] == keys[1] != _elements.whole_key(value)


#: Static values that hold a structured dtype, or an array that has it.
STRUCTURED = {
    "dtype": lambda dtype: dtype,
    "list": lambda dtype: [dtype],
    "tuple": lambda dtype: (1, (dtype, 2)),
    "frozenset": lambda dtype: frozenset({(dtype,)}),
    "dict": lambda dtype: {"a": [dtype]},
    "key": lambda dtype: {dtype: 1},
    "dataclass": lambda dtype: Frozen(dtype, 1),
    "module": lambda dtype: configured(dtype, (dtype,)),
    "field": lambda dtype: [np.dtype([("outer", dtype)])],
    "subarray": lambda dtype: (np.dtype((dtype, (2,))),),
    "deep": lambda dtype: [np.dtype([("a", [("b", (dtype, (2,)))])])],
    "array": lambda dtype: np.zeros(2, dtype),
    "array of fields": lambda dtype: [np.zeros(2, [("outer", dtype)])],
    "scalar": lambda dtype: (np.zeros(2, dtype)[0],),
    "objects": lambda dtype: [np.zeros(2, [("a", object), ("b", dtype)])],
}


def _objects(*elements):
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


#: Static values, ways to change them in place, and what a program may read of them.
READ = {
    "memoryview": (
        lambda: memoryview(bytearray(b"ab")),
        [lambda view: view.__setitem__(0, 1), lambda view: view.__setitem__(1, 2)],
        lambda view: view[0] + view[1],
    ),
    "part of one": (
        lambda: [memoryview(bytearray(b"abcd"))[::2]],
        [lambda views: views[0].__setitem__(1, 2)],
        lambda views: views[0][1],
    ),
    "released": (
        lambda: [3, memoryview(bytearray(b"ab"))],
        [lambda views: views[1].release(), lambda views: views.__setitem__(0, 4)],
        lambda views: views[0],
    ),
    "objects": (
        lambda: _objects(1, [2], 3.0),
        [
            lambda array: array.__setitem__(0, 5),
            lambda array: array[1].append(1),
            lambda array: array.__setitem__(1, np.arange(3)),
        ],
        lambda array: len(repr(array.tolist())) + array[0],
    ),
    "one object": (
        lambda: [_objects({1})],
        [lambda arrays: arrays[0][0].add(2), lambda arrays: arrays[0].__setitem__(0, [1, 2, 3])],
        lambda arrays: len(arrays[0][0]),
    ),
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("form", READ)
def test_changes_in_buffers_and_arrays_of_objects_are_seen(form):
    make, changes, read = READ[form]
    model = configured(X, make())
    f = eqxjit.filter_jit(lambda model, x: x + read(model.config))
    for change in (lambda value: None, *changes):
        change(model.config)
        for _ in range(CALLS):
            assert (f(model, X) == X + read(model.config)).all()


@both
def test_a_writable_memoryview_that_is_a_leaf_is_refused(filter_jit):
    f = filter_jit(lambda view, x: x + view[0])
    with pytest.raises((TypeError, ValueError), match="hash"):
        f(memoryview(bytearray(b"ab")), X)
    assert (f(memoryview(b"ab"), X) == X + 97).all()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("form", STRUCTURED)
def test_renamed_fields_of_a_dtype_are_seen(form):
    def named(model, x):
        names.append(text(model.config))
        return x + len(text(model.config))

    names = []
    dtype = np.dtype([("a", "i4")])
    model = configured(X, STRUCTURED[form](dtype))
    bound = eqx.Partial(named, model)
    f, of_function = eqxjit.filter_jit(named), eqxjit.filter_jit(bound)
    for name in ("a", "another", "the third", "a"):
        dtype.names = (name,)
        for _ in range(CALLS):
            expected = X + len(text(model.config))
            assert (f(model, X) == expected).all()
            assert (of_function(X) == expected).all()
            twin = configured(X, STRUCTURED[form](np.dtype([(name, "i4")])))
            assert (f(twin, X) == expected).all()
    # As there are names: one trace by each.
    assert sorted(names) == sorted([*{*names}] * 2)


@pytest.mark.parametrize("wrap", [lambda dtype: dtype, lambda dtype: (dtype, 1)])
def test_renamed_fields_of_a_dtype_that_is_a_leaf(wrap):
    inner = np.dtype([("a", "i4")])
    value = wrap(np.dtype([("outer", inner)]))
    f = eqxjit.filter_jit(lambda value, x: x + len(repr(value)))
    for name in ("a", "another", "the third", "a"):
        inner.names = (name,)
        for _ in range(CALLS):
            assert (f(value, X) == X + len(repr(value))).all()


def _pairs(n):
    return {f"key {i}": float(i) for i in range(n)}


CHANGED = {
    "a dict of 600": (lambda: _pairs(600), lambda d: d.update({"key 599": 599})),
    "a list of 2,000": (lambda: [1] * 2_000, lambda v: v.__setitem__(1_999, True)),
    "a default factory": (
        lambda: collections.defaultdict(list, _pairs(600)),
        lambda d: setattr(d, "default_factory", set),
    ),
    "a function in a dict of them": (
        lambda: {i: _function() for i in range(600)},
        lambda d: d.update({599: _function()}),
    ),
    "the last of a dict": (lambda: _pairs(600), lambda d: d.update({"key 599": 599})),
    "1 to True in a list": (lambda: [1] * 1_500, lambda v: v.__setitem__(1_234, True)),
    "0.0 to -0.0 in a list": (lambda: [0.0] * 1_500, lambda v: v.__setitem__(1_499, -0.0)),
    "the order of a dict": (lambda: _pairs(600), lambda d: d.update(k=d.pop("key 0"))),
    "in a list in a dict": (lambda: {"a": [[1, 2], 3]}, lambda d: d["a"][0].append(1)),
    "in a nested list with a dtype": (
        lambda: [np.dtype("f4"), [np.dtype("f4"), [1]]],
        lambda v: v[1][1].__setitem__(0, True),
    ),
    "a hashable object in a dict": (
        lambda: {"a": Hashed(1)},
        lambda d: setattr(d["a"], "value", 2),
    ),
    "an unhashable object in a list": (
        lambda: [Compared([1])],
        lambda v: v[0].value.append(2),
    ),
    "a class": (
        lambda: [type("A", (), {})()],
        lambda v: setattr(v[0], "__class__", type("B", (), {})),
    ),
    "an OrderedDict's order": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda d: d.move_to_end("a"),
    ),
    "a NumPy array": (lambda: np.zeros(2_000), lambda v: v.__setitem__(1_999, 1)),
    "a strided NumPy array": (lambda: np.zeros((9, 9))[:, ::2], lambda v: v.__setitem__(8, 1)),
    "an array's dtype": (
        lambda: np.zeros(4, np.int32),
        lambda v: setattr(v, "dtype", np.dtype("float32")),
    ),
    "an array of one integer": (lambda: np.array(3), lambda v: v.__setitem__((), 4)),
    "a frozen dataclass": (
        lambda: Frozen(1, ()),
        lambda v: object.__setattr__(v, "rate", True),
    ),
    "a dataclass in a mapping proxy": (
        lambda: types.MappingProxyType({"a": Settings(1, [])}),
        lambda v: v["a"].sizes.append(1),
    ),
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("fun", [scaled, stepped])
def test_a_change_below_the_bound_is_seen(name, fun):
    make, act = CHANGED[name]
    traces = []

    def traced(model, x):
        traces.append(1)
        return fun(model, x)

    f = eqxjit.filter_jit(traced)
    model = configured(X, make())
    for _ in range(CALLS):
        f(model, X)
    assert len(traces) == 1
    act(model.config)
    for _ in range(CALLS):
        f(model, X)
    assert len(traces) == 2


# --- What a warm call does ------------------------------------------------------------------------


@pytest.fixture
def keys_made(monkeypatch):
    """The values whose typed keys were made."""
    made = []
    original = _elements.typed_key

    def typed_key(value):
        made.append(value)
        return original(value)

    monkeypatch.setattr(_elements, "typed_key", typed_key)
    monkeypatch.setattr(_snapshot, "typed_key", typed_key)
    return made


def _function():
    return lambda x: x


def nested(wrap, depth, innermost=1):
    for _ in range(depth):
        innermost = wrap(innermost)
    return innermost


FORMS = {
    "dict": lambda: _pairs(100),
    "large dict": lambda: _pairs(10_000),
    "list": lambda: [float(i) for i in range(100)],
    "nested lists": lambda: [[i, [i + 1_000]] for i in range(100)],
    "large nested lists": lambda: [[i, [i + 1_000]] for i in range(5_000)],
    "nested tuples of dtypes": lambda: tuple([(i, (i + 1_000, np.dtype("f4"))) for i in range(99)]),
    "lists of dtypes": lambda: [[i, [np.dtype("f4")]] for i in range(10)],
    "set": lambda: {*range(1_000, 1_100)},
    "frozenset": lambda: frozenset(range(1_000, 1_100)),
    "deque": lambda: collections.deque(range(1_000, 1_100), maxlen=200),
    "Counter": lambda: collections.Counter("abcabc"),
    "OrderedDict": lambda: collections.OrderedDict(_pairs(100)),
    "defaultdict": lambda: collections.defaultdict(list, {"a": [1]}),
    "mapping proxy": lambda: types.MappingProxyType({"a": [1]}),
    "namespace": lambda: types.SimpleNamespace(a=[1], b={2}),
    "bytearray": lambda: bytearray(1_000),
    "dataclass": lambda: Settings({"a": 1.5}, [1, [2]]),
    "frozen dataclass": lambda: Frozen(1.5, (1_000, (2,))),
    "dict of functions": lambda: {i: _function() for i in range(10)},
    "dict of objects": lambda: {"a": Hashed(1), "b": Compared([1])},
    "NumPy array": lambda: np.arange(10.0),
    "large NumPy array": lambda: np.arange(500_000.0),
    "unhashable object": lambda: Compared([1]),
    "a Module": lambda: configured(X, configured(np.ones(2), [1, 2.5])),
    "a subclass of list": lambda: Items([1, [2]]),
    "NaN": lambda: [float("nan"), {"a": float("nan")}],
    "zeros": lambda: [0.0, -0.0, [0.0]],
}

# Those that are compared with one another by identity alone.
_IDENTICAL_ONLY = {"dict of functions"}


#: How deeply nested static values are made, which upstream takes down to some 900 levels, and how
#: many levels there are.
DEEP = {
    "lists": (lambda inner: [inner], 800),
    "tuples": (lambda inner: (inner,), 800),
    "dicts": (lambda inner: {"a": inner, "b": None}, 800),
    "sets": (lambda inner: frozenset({inner}), 800),
    "all of them": (lambda inner: [{1: (inner, 1)}], 100),
    "deques": (lambda inner: collections.deque([inner]), 800),
    "mapping proxies": (lambda inner: types.MappingProxyType({1: inner}), 800),
    "dataclasses": (lambda inner: Frozen(inner, 1), 330),
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("form", DEEP)
@pytest.mark.deep
def test_what_is_nested_deeply_is_taken(form):
    """By first calls and warm ones, in an output, and equal to another one."""
    f = eqxjit.filter_jit(lambda m, x: (m, x))
    for _ in range(2):
        model = configured(X, nested(*DEEP[form]))
        for _ in range(3):
            assert type(f(model, X)[0].config) is type(model.config)
    for innermost in (True, 1.0, 1, 2):
        f(configured(X, nested(*DEEP[form], innermost)), X)
    assert f.cache_info().traces == 4


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("depth", [230, 240, 250, 600])
@pytest.mark.deep
def test_a_change_deep_inside_is_seen(depth):
    innermost = [1]
    f = eqxjit.filter_jit(lambda m, x: repr(innermost))
    model = configured(X, nested(lambda inner: [inner], depth, innermost))
    for value in (1, 1, 1, True, True, 2, 1.0, 1.0):
        innermost[0] = value
        assert f(model, X) == repr([value])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fun", [scaled, stepped])
def test_no_typed_key_is_made_on_a_warm_call(form, fun, keys_made):
    f = eqxjit.filter_jit(fun)
    model = configured(X, FORMS[form]())
    for _ in range(CALLS):
        f(model, X)
    keys_made.clear()
    copies.clear()
    f(model, X)
    assert [type(value) for value in keys_made if not _is_simple(value)] == []
    assert copies == []


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("form", [list, lambda values: dict(enumerate(values))])
def test_an_object_with_a_hash_of_its_own_is_asked_for_it_alone(form, monkeypatch):
    values = [Hashed(i) for i in range(5)]
    model, f = configured(X, form(values)), eqxjit.filter_jit(lambda model, x: x + 1)
    for _ in range(CALLS):
        f(model, X)
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(Hashed, "__hash__", lambda self: asked.append("hash") or hash(self.value))
        inside.count_comparisons(patch, asked)
        f(model, X)
    assert asked == ["hash"] * 5
    values[2].value = 7
    f(model, X)
    assert f.cache_info().traces == 2


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("form", FORMS)
def test_none_in_the_wrapped_function(form, keys_made):
    f = eqxjit.filter_jit(eqx.Partial(scaled, configured(X, FORMS[form]())))
    for _ in range(CALLS):
        f(X)
    keys_made.clear()
    copies.clear()
    f(X)
    assert [type(value) for value in keys_made if not _is_simple(value)] == []
    assert copies == []


def test_of_equal_objects_in_functions_each_is_compared_with_itself():
    """By its own elements' addresses: to compare equal ones takes five times as long."""
    for _ in range(2):
        f = eqxjit.filter_jit(eqx.Partial(scaled, configured(X, {i: float(i) for i in range(99)})))
        f(X)
        assert [pair.key.is_learned(pair.value) for pair in inside.mutable(f)] == [True]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("form", sorted({*FORMS} - _IDENTICAL_ONLY))
def test_nor_for_equal_objects_in_turn(form, keys_made):
    """As of two models that were built alike."""
    f = eqxjit.filter_jit(lambda model, x: x + number(model.config))
    models = [configured(X, FORMS[form]()) for _ in range(3)]
    for _ in range(CALLS):
        for model in models:
            f(model, X)
    keys_made.clear()
    copies.clear()
    for model in models:
        f(model, X)
    assert [type(value) for value in keys_made if not _is_simple(value)] == []
    assert copies == []
    assert f.cache_info().traces == 1


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("size", [3, 4_000])
@pytest.mark.parametrize("other", [True, 1.0, 1 + 0j, Text("1")])
def test_an_equal_set_of_other_types_is_another(size, other):
    one = str(other) if type(other) is Text else 1
    f = eqxjit.filter_jit(lambda model, x: x + 1)
    sets = [{one, *range(2, size)} for _ in range(12)]
    for _ in range(CALLS):
        for value in sets:
            f(configured(X, value), X)
    assert f.cache_info().traces == 1
    mixed = {other, *range(2, size)}
    assert mixed == sets[0]
    f(configured(X, mixed), X)
    assert f.cache_info().traces == 2


def _is_simple(value):
    """What compares by identity; and an empty list is the names of the arguments by keyword."""
    return type(value).__eq__ is object.__eq__ or (type(value) is list and not value)


# Each once: the key of an equal container would be known already.
_sizes = itertools.count(20_011)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "make",
    [
        _pairs,
        lambda n: [[float(i), [i]] for i in range(n)],
        lambda n: collections.defaultdict(list, {i: [i] for i in range(n)}),
        lambda n: {i: jnp.sin if i % 2 else np.float32 for i in range(n)},
    ],
)
def test_of_a_large_container_one_typed_key_is_made(make, keys_made):
    f = eqxjit.filter_jit(lambda model, x: x + 1)
    model = configured(X, make(next(_sizes)))
    for _ in range(3):
        f(model, X)
    assert len([value for value in keys_made if value is model.config]) == 1


def test_objects_are_remembered_within_a_bound(monkeypatch):
    remembered = inside.bound_keys(monkeypatch, 8)
    values = [{"a": [i // 2]} for i in range(40)]
    for _ in range(2):
        keys = [_key_cache.static_key(value) for value in values]
        assert len(remembered) <= 8
        assert [keys.index(key) for key in keys] == [i // 2 * 2 for i in range(40)]
    del keys
    for i in range(40):
        _key_cache.static_key({"b": i})
    assert len(remembered) <= 8


def test_one_that_came_to_the_address_of_another_is_not_taken_for_it():
    """A snapshot tells by addresses what lives, and notes what died."""
    held = {i: _function() for i in range(100)}
    snapshot = _snapshot.snapshots_of(held).own
    assert snapshot.matches(held)
    held[50] = _function()
    # As if it had come where the dead one was.
    inside.take_for_living(snapshot, [*held, *held.values()])
    assert not snapshot.matches(held)


def test_an_object_is_looked_at_once_in_a_call(monkeypatch):
    """Though fifty layers share it, and it goes in and out."""
    if not SPECIALIZING:
        pytest.skip("the generic path looks at what comes out by itself")
    f = eqxjit.filter_jit(lambda layers, x: [configured(m.weight + x, m.config) for m in layers])
    shared = _pairs(10)
    layers = [configured(X, shared) for _ in range(50)]
    for _ in range(CALLS):
        layers = f(layers, X)
    looked_at = []
    matches = _key_cache.KnownKey.matches

    def counted(key, value):
        looked_at.append(value)
        return matches(key, value)

    monkeypatch.setattr(_key_cache.KnownKey, "matches", counted)
    f(layers, X)
    assert [value for value in looked_at if value is shared] == [shared]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("fun", [scaled, lambda model, x: (model.config, x + 1)])
def test_a_large_numpy_array_is_neither_copied_nor_compared(fun):
    f = eqxjit.filter_jit(lambda model, x: (model.config if fun is not scaled else None, x + 1))
    model = configured(X, np.arange(500_000.0))
    for _ in range(CALLS):
        f(model, X)
    tracemalloc.start()
    try:
        f(model, X)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "place", ["each in a field", "each in a list in a field", "all in one list"]
)
def test_of_many_unhashable_objects_each_is_compared_with_few(place):
    """They all have one hash, so that a dict would compare each with all others."""
    n_asked = itertools.count()

    class Counted(Compared):
        def __eq__(self, other):
            next(n_asked)
            return type(other) is Counted and self.value == other.value

        def __deepcopy__(self, memo):
            return Counted(self.value)

    n = 400
    values = [Counted(i) for i in range(n)]
    if place == "each in a list in a field":
        values = [[value] for value in values]
    models = [configured(X, values)]
    if place != "all in one list":
        models = [configured(X, value) for value in values]
    f = eqxjit.filter_jit(lambda models, x: x + 1)
    for _ in range(2):
        f(models, X)
    assert next(n_asked) < 40 * n
    assert f.cache_info().traces == 1


# --- The bound ------------------------------------------------------------------------------------


def bound(is_native=True):
    """So many elements are looked into."""
    is_native = is_native and eqxjit.native_enabled()
    return _snapshot.LARGEST * (_snapshot.NATIVE_ELEMENTS if is_native else 1)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("make", "is_native"),
    [
        (lambda n: dict.fromkeys(range(n // 8), 1), True),
        (lambda n: [1] * n, True),
        (lambda n: [[1] * (n // 4 - 22) for _ in range(4)], True),
        (lambda n: {i: [1] * (n // 4 - 28) for i in range(4)}, True),
        (lambda n: [1, Frozen(0, [1] * (n - 64))], True),
        (lambda n: collections.OrderedDict.fromkeys(range(n // 6), 1), False),
        (lambda n: np.ones(n * 16), False),
        (lambda n: bytearray(n * 128), False),
        (lambda n: [Hashed(i) for i in range(n // 15)], False),
        (lambda n: [Compared(i) for i in range(n // 28)], False),
    ],
)
@pytest.mark.parametrize("back_end", ["native", "python"])
def test_beyond_the_bound_an_object_is_compared_with_itself_by_identity(
    make, is_native, back_end, monkeypatch
):
    """And with others by what they hold."""
    if back_end == "python":
        monkeypatch.setenv("EQXJIT_NATIVE", "0")

    def put(value, new):
        while type(value[0]) is list:
            value = value[0]
        value[0] = new

    for size, is_seen in [(bound(is_native), True), (bound(is_native) * 8, False)]:
        f = eqxjit.filter_jit(lambda model, x: x + 1)
        value = make(size)
        for _ in range(CALLS):
            f(configured(X, value), X)
        put(value, 7)
        f(configured(X, value), X)
        assert f.cache_info().traces == 1 + is_seen
        other = make(size)
        put(other, 8)
        f(configured(X, other), X)
        assert f.cache_info().traces == 2 + is_seen


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("call", ["another function", "another shape", "cleared"])
def test_a_trace_looks_into_large_objects(call):
    """What identity stands for in warm calls is no key for other objects."""
    size = bound() + 1
    f = g = eqxjit.filter_jit(lambda model, x: x * model.config[0])
    value = [1] * size
    for _ in range(CALLS):
        f(configured(X, value), X)
    value[0] = 8
    y = jnp.ones(7) if call == "another shape" else X
    if call == "another function":
        g = eqxjit.filter_jit(lambda model, x: x * model.config[0] + 0)
    elif call == "cleared":
        f.clear_cache()
    for each, expected in [(value, 8), ([1] * size, 1), (value, 8), ([8] + [1] * (size - 1), 8)]:
        for _ in range(CALLS):
            assert (g(configured(X, each), y) == expected * y).all()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("make", [list, lambda pairs: dict(enumerate(pairs))])
def test_only_what_was_traced_is_compared_by_identity(make):
    f = eqxjit.filter_jit(lambda model, x: (x * model.config[0], configured(x, (model.config,))))
    numbers = [1] * (bound() + 1)
    traced, other = make(numbers), make(numbers)
    for value in (traced, other) * CALLS:
        f(configured(X, value), X)
    other[0] = 8
    for value, expected in [(other, 8), (make(numbers), 1), (other, 8)]:
        scaled_x, returned = f(configured(X, value), X)
        assert (scaled_x == expected * X).all()
        assert returned.config[0][0] == expected


#: Constants that are large, with some number at the end.
LARGE_CONSTANTS = {
    "tuple": lambda n: (*range(1_000, 5_000), n),
    "tuples": lambda n: tuple([(i, (i,)) for i in (*range(1_000, 3_000), n)]),
    "tuple in tuples": lambda n: ("a", ("b", (*range(1_000, 5_000), n))),
    "frozenset": lambda n: frozenset([*range(1_000, 5_000), n]),
    "frozen dataclass": lambda n: Frozen(1, (*range(1_000, 5_000), n)),
    "dataclass": lambda n: Settings(1, (*range(1_000, 5_000), n)),
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kind", LARGE_CONSTANTS)
def test_large_constants_are_told_by_what_they_hold(kind):
    make = LARGE_CONSTANTS[kind]
    f = eqxjit.filter_jit(lambda model, x: (x + ("7777" in repr(model.config)), model))
    values = [make(n) for n in (7777, 8888, 7777, True, 1)]
    for value, n_found in [*zip(values, (1, 0, 1, 0, 0), strict=True)] * CALLS:
        out, returned = f(configured(X, value), X)
        assert (out == X + n_found).all()
        assert returned.config is value or type(value) in (tuple, frozenset)
        assert returned.config == value
    assert f.cache_info().traces == 4


def test_a_large_object_in_two_arguments_is_specialized():
    if not SPECIALIZING:
        pytest.skip("nothing is specialised")
    f = eqxjit.filter_jit(lambda one, other: one.weight + other.weight)
    shared = [*range(bound() * 2)]
    for _ in range(CALLS):
        f(configured(X, shared), configured(X, shared))
    assert f.specialized_source() is not None


@pytest.mark.usefixtures("path")
def test_another_field_of_a_dataclass_of_large_constants():
    """It is noticed, as no other change of what is large."""
    f = eqxjit.filter_jit(lambda model, x: x * model.config.rates)
    value = Settings(1, tuple(range(bound() * 2)))
    for rate in (1, 2, 3, 1):
        value.rates = rate
        for _ in range(CALLS):
            assert (f(configured(X, value), X) == X * rate).all()


@pytest.mark.parametrize("kind", LARGE_CONSTANTS)
def test_large_constants_that_were_traced_are_not_gone_through(kind, monkeypatch):
    traced, value = TracedObjects(), LARGE_CONSTANTS[kind](1.5)
    _, static = partition(configured(X, value), traced)
    _ = static.key
    static.prepare_trace()
    looked_at = []
    monkeypatch.setattr(_key_cache, "content_key", looked_at.append)
    _, again = partition(configured(X, value), traced)
    assert again.key == static.key
    assert value not in looked_at


@pytest.mark.parametrize("holds_object", [False, True])
def test_a_trace_keeps_no_object_in_a_large_tuple(holds_object):
    """What holds one that may die is looked into instead, whatever its size."""
    traced, held = TracedObjects(), _Dies() if holds_object else Compared
    value = (held, *range(bound() * 2))
    _, static = partition(configured(X, value), traced)
    _ = static.key
    static.prepare_trace()
    assert len(traced) == 1 - holds_object


@pytest.mark.usefixtures("path")
def test_a_large_object_at_the_address_of_a_dead_one_is_no_other():
    f = eqxjit.filter_jit(lambda model, x: x * model.config[0])
    value = np.ones(_snapshot.LARGEST * 17)
    f(configured(X, value), X)
    reused = 0
    for i in range(2, 12):
        # Equal, so that the first one stays and this one goes; traced for its shape.
        same, y = value.copy(), jnp.ones(i)
        f(configured(X, same), y)
        address = id(same)
        del same
        other = np.full_like(value, i)
        reused += id(other) == address
        assert (f(configured(X, other), y) == i * y).all()
    assert reused


@pytest.mark.usefixtures("path")
def test_a_trace_looks_into_large_objects_of_the_function():
    class Scale(eqx.Module):
        config: list = eqx.field(static=True)

        def __call__(self, x):
            return x * self.config[0]

    size = bound() + 1
    model = Scale([1] * size)
    f, y = eqxjit.filter_jit(model), jnp.ones(7)
    for _ in range(CALLS):
        f(X)
    model.config[0] = 8
    for _ in range(CALLS):
        assert (f(y) == 8 * y).all()
        assert (eqxjit.filter_jit(Scale([1] * size))(y) == y).all()
    assert "`fun.config` is another list" in f.traces()[-1].reason


# --- Changed during a call ------------------------------------------------------------------------


class _Dies:
    """Compared by identity, and weakly referable."""


#: Static values of which one object is replaced whenever `Hooked` is asked for its hash.
DYING = {
    "list": lambda dies, hooked: [dies, hooked],
    "dict": lambda dies, hooked: {"a": dies, "b": hooked},
    "deque": lambda dies, hooked: collections.deque([dies, hooked]),
    "nested": lambda dies, hooked: [[(1, dies)], {"a": hooked}],
    "method": lambda dies, hooked: [types.MethodType(abs, dies), hooked],
    "closure": lambda dies, hooked: [lambda: dies, hooked],
    "treedef": lambda dies, hooked: [jax.tree_util.tree_structure(Configured(1, dies)), hooked],
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("form", DYING)
def test_what_dies_while_a_key_is_made(form, monkeypatch):
    """As another thread may have it: a dead weak reference in a key has a hash, too."""
    hooked = Hooked()
    value = DYING[form](_Dies(), hooked)

    def replace():
        value.clear()
        new = DYING[form](_Dies(), hooked)
        (value.update if isinstance(value, dict) else value.extend)(new)

    f = eqxjit.filter_jit(lambda model, x: x + 1)
    monkeypatch.setattr(Hooked, "hook", staticmethod(replace))
    for _ in range(CALLS):
        assert (f(configured(X, value), X) == X + 1).all()
    assert f.traces()


READINGS = {
    "set": ({1, 2}, set.__iter__, set.add),
    "deque": (collections.deque([1, 2]), collections.deque.__iter__, collections.deque.append),
    "dict": ({1: 1, 2: 2}, dict.items, dict.setdefault),
}


@pytest.mark.parametrize("form", READINGS)
def test_a_container_that_changes_while_it_is_read_is_read_again(form):
    made, read, add = READINGS[form]
    value = made.copy()

    def elements(value):
        iterator = iter(read(value))
        if len(value) == 2:
            add(value, 3)
        return iterator

    assert iterated(elements, value) == [*read(value)]
    assert len(value) == 3


# --- Nothing kept alive ---------------------------------------------------------------------------


KEEPING = {
    "dict": lambda o: {"a": o},
    "nested": lambda o: [1, {"a": [o, (o, 2)]}],
    "tuple": lambda o: (1, (o,)),
    "set": lambda o: {o},
    "deque": lambda o: collections.deque([o]),
    "namespace": lambda o: types.SimpleNamespace(a=o),
    "dataclass": lambda o: Settings(o, [o]),
    "many": lambda o: dict.fromkeys(range(5000), o),
    "closure": lambda o: [lambda: o],
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("form", KEEPING)
def test_snapshots_keep_no_objects_alive(form):
    f = eqxjit.filter_jit(lambda model, x: x + 1)
    refs = []
    # Fewer than specialised calls, which refer to it through no snapshot.
    for _ in range(5):
        target = _Dies()
        refs.append(weakref.ref(target))
        model = configured(X, KEEPING[form](target))
        f(model, X)
        f.cache_info()
        for _ in range(CALLS):
            _key_cache.static_key(model.config)
        del target, model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5
    assert f.cache_info().entries == 0


def test_snapshots_go_with_the_function():
    value = Items([1, 2])  # weakly referable, as builtin containers aren't
    holder = (Items([3]), 1_000)
    refs = [weakref.ref(value), weakref.ref(holder[0])]
    f = eqxjit.filter_jit(lambda model, x: x + 1)
    for _ in range(CALLS):
        f(configured(X, value), X)
        f(configured(X, holder), X)
    del f, value, holder
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


# --- Many objects with one key ------------------------------------------------------------------


def test_metadata_that_is_made_anew_is_known(monkeypatch):
    """The registry makes that of a `defaultdict` from it, each time."""
    f = eqxjit.filter_jit(lambda dicts: X)

    def dicts():
        return [collections.defaultdict(list, {"a": X, "b": X}) for _ in range(20)]

    for _ in range(CALLS):
        f(dicts())
    taken = inside.count_snapshots(monkeypatch)
    for _ in range(20):
        f(dicts())
    assert taken == []
    assert f.cache_info().traces == 1
    f([collections.defaultdict(tuple, {"a": X, "b": X}) for _ in range(20)])
    assert f.cache_info().traces == 2


def test_the_oldest_snapshots_are_dropped(monkeypatch):
    inside.bound_elements(monkeypatch, 100)
    values = [[1, 2, (max, [3])] for _ in range(60)]
    key = _key_cache.learned_key(values[0])
    for value in values[1:]:
        assert _key_cache.learned_key(value) is key
    # Again: it is the latest then.
    key.learn(values[-8])
    learned = [key.is_learned(value) for value in values]
    assert learned == [False] * (60 - sum(learned)) + [True] * sum(learned)
    assert 8 <= sum(learned) < 40
    for _ in range(100):
        # One that is there already takes no more room.
        key.learn(values[-1])
    assert [key.is_learned(value) for value in values] == learned
    for value in values:
        key.learn(value)
        assert key.is_learned(value)
    assert sum([key.is_learned(value) for value in values]) == sum(learned)
