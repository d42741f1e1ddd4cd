"""Exactness: a warm call sees every change of its arguments, whatever the structure and the names.

Each test warms a call up until the specialised call serves it, changes one thing, and calls again.
"""

import collections
import dataclasses
import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import Counted, Own, assert_same, assert_specialized, recursion_left
from tests.support.models import Frozen, Thawed
from tests.support.sides import CALLS


def read(tree):
    """Return all that a program may depend on: the arrays, doubled, and all other values."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) * 2 if eqx.is_array(leaf) else leaf, tree)


class Warm:
    """A jitted function that was called until its fast path serves it, and the plain function."""

    def __init__(self, fun=read):
        self.fun = fun
        self.jitted = Counted(eqxjit.filter_jit, fun)

    def __call__(self, *args, specialized=True):
        for _ in range(CALLS):
            self.check(*args)
        if specialized:
            assert_specialized(self.jitted.jitted)

    def check(self, *args):
        expected = self.fun(*args)
        result = self.jitted(*args)
        assert_same(result, expected)
        return result


class Layer(eqx.Module):
    weight: Any
    bias: Any = None
    rate: Any = eqx.field(static=True, default=0.5)
    modes: Any = eqx.field(static=True, default=())


class Text(str):
    """A string subclass that equals a plain string."""


def layer(**fields):
    return Layer(**{"weight": jnp.arange(2.0), **fields})


@jtu.register_pytree_node_class
class Labelled:
    """A registered node with a static part."""

    def __init__(self, item, label):
        self.item, self.label = item, label

    def tree_flatten(self):
        return (self.item,), self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label)


# --- Modules changed in place -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", jnp.ones(3)),
        ("weight", np.ones(2, np.float32)),
        ("weight", None),
        ("weight", 2.0),
        ("weight", Layer(jnp.ones(2))),
        ("bias", jnp.ones(2)),
        ("bias", "none"),
        ("rate", 0.25),
        ("modes", []),
    ],
)
def test_a_field_changed_by_setattr_is_seen(field, value):
    model, warm = layer(), Warm()
    warm(model)
    before = getattr(model, field)
    for new in (value, before, value):
        object.__setattr__(model, field, new)
        warm.check(model)


class OtherLayer(Layer):
    pass


DISTURBANCES = {
    "a field deleted": lambda model: object.__delattr__(model, "bias"),
    "a static field deleted": lambda model: object.__delattr__(model, "rate"),
    "a field added": lambda model: object.__setattr__(model, "note", "not a field"),
    # Equinox carries `__name__`, `__doc__`, ... of an instance through a call.
    "a wrapper field": lambda model: object.__setattr__(model, "__doc__", "first"),
    "another class": lambda model: object.__setattr__(model, "__class__", OtherLayer),
}


def shown(model):
    """Return the parts of a Module that a program can see. Only fields are part of the pytree."""
    names = [name for name in ("weight", "bias", "rate", "modes") if hasattr(model, name)]
    return type(model).__name__, names, str(vars(model).get("__doc__")), read(model.weight)


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_module_disturbed_in_place_is_seen(name):
    """The change is seen as by Equinox, which rebuilds Modules from their fields."""
    model, ours = layer(bias=jnp.ones(2), rate=0.1), Warm(shown)
    before = dict(vars(model))
    for _ in range(2):
        ours(model)
        DISTURBANCES[name](model)
        for _ in range(2):
            assert_same(ours.jitted(model), eqx.filter_jit(shown)(model))
        object.__setattr__(model, "__class__", Layer)
        object.__setattr__(model, "__dict__", dict(before))


# --- Containers changed in place --------------------------------------------------------------


def _replace(container, key, value):
    container[key] = value


CHANGES = {
    "list: item": (lambda: [jnp.zeros(2), 1], lambda c: _replace(c, 1, 2)),
    "list: order": (lambda: [jnp.zeros(2), 1], lambda c: c.reverse()),
    "long list: longer": (lambda: [jnp.zeros(2)] * 20, lambda c: c.append(jnp.ones(2))),
    "long list: static item": (lambda: [jnp.zeros(2)] * 20, lambda c: _replace(c, 7, 7)),
    "dict: key of another type": (lambda: {1: jnp.zeros(2)}, lambda c: _replace(c, True, c.pop(1))),
    "dict: text of another class": (
        lambda: {"a": jnp.zeros(2)},
        lambda c: _replace(c, Text("a"), c.pop("a")),
    ),
    "dict: order": (
        lambda: {"a": jnp.zeros(2), "b": jnp.ones(2)},
        lambda c: _replace(c, "a", c.pop("a")),
    ),
    "defaultdict: factory": (
        lambda: collections.defaultdict(list, a=jnp.zeros(2)),
        lambda c: setattr(c, "default_factory", dict),
    ),
    "static list: type": (lambda: layer(modes=[1, [2]]), lambda c: _replace(c.modes[1], 0, 2.0)),
    "static dict: first item": (lambda: layer(modes={}), lambda c: _replace(c.modes, "b", 2)),
    "static set": (lambda: layer(modes={1, 2}), lambda c: c.modes.add(3)),
    "static dataclass": (lambda: layer(modes=Thawed([1])), lambda c: c.modes.value.append(2)),
    "Module: dict in another order": (
        layer,
        lambda c: object.__setattr__(c, "__dict__", dict(reversed(vars(c).items()))),
    ),
}


def everything(tree):
    """Return what `read` returns, and the `repr` of static fields, which are the caller's own."""
    statics = [repr(node.modes) for node in [tree] if isinstance(node, Layer)]
    factories = [node.default_factory for node in [tree] if hasattr(node, "default_factory")]
    if isinstance(tree, Layer):
        tree = tree.weight
    keys = [(type(key).__name__, key) for key in tree] if isinstance(tree, dict) else None
    return statics, factories, keys, read(tree)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("name", CHANGES)
def test_a_container_changed_in_place_is_seen(name):
    make, change = CHANGES[name]
    container = make()

    def f(tree, other):
        return everything(tree), other

    # JAX sorts the keys of a plain dict.
    def eager(tree, other):
        return f(jax.tree.map(lambda leaf: leaf, tree), other)

    warm = Warm(f)
    warm.fun = eager
    warm(container, 1)
    change(container)
    warm.check(container, 1)
    warm(container, 1)
    # The first structure is still served correctly.
    warm.check(make(), 1)


HIDING_PLACES = {
    "a tuple": (lambda v: (v, 1), lambda t: t[0]),
    "a static field": (lambda v: layer(rate=v), lambda t: t.rate),
    "a list in a static field": (lambda v: layer(rate=[v]), lambda t: t.rate[0]),
    "a registered node": (lambda v: Labelled(jnp.ones(2), v), lambda t: t.label),
    "a frozen dataclass": (lambda v: Frozen((v,)), lambda t: t.value[0]),
}


@pytest.mark.parametrize("make", [Own, Thawed, Frozen])
@pytest.mark.parametrize("place", HIDING_PLACES)
def test_a_static_object_changed_in_place_is_seen(make, place):
    """Equinox returns the old value, because it finds the very same object (JAX 0.10.2)."""
    if make is Own and place in ("a list in a static field", "a frozen dataclass"):
        pytest.skip("in a container, the very object counts as unchanged, as for `==`")
    put, get = HIDING_PLACES[place]
    static = make(1)
    tree = put(static)
    warm = Warm(lambda tree: get(tree).value)
    warm(tree)
    for value in (2, 1, 2, 3):
        object.__setattr__(static, "value", value)
        warm.check(tree)
        warm.check(tree)


# --- Several structures at one call site ------------------------------------------------------


def structures(n):
    """Return trees that each differ from the others in one thing."""
    kinds = [
        lambda i: [jnp.ones(2)] * (i + 1),
        lambda i: {"a": jnp.ones(2), f"k{i}": i},
        lambda i: (jnp.ones(2), i),
        lambda i: layer(modes=[i], bias=jnp.ones(i)),
        lambda i: eqx.Partial(max, jnp.ones(2), key=i),
    ]
    return [kinds[i % len(kinds)](i // len(kinds)) for i in range(n)]


@pytest.mark.parametrize("n", [2, 66])
def test_a_call_site_that_alternates_between_structures(n):
    jitted = Counted(eqxjit.filter_jit, read)
    trees = structures(n)
    expected = [read(tree) for tree in trees]
    each_warm = np.repeat(range(n), 3)
    at_random = np.random.default_rng(0).integers(n, size=66)
    for i in [*range(n), *reversed(range(n)), *range(n), *each_warm, *at_random]:
        assert_same(jitted(trees[i]), expected[i])
    assert jitted.traces == jitted.jitted.cache_info().traces
    assert jitted.jitted.cache_info().entries == n


# What may be in one place of an argument, in calls that come in turn.
PARTS = [
    lambda: jnp.ones(2),
    lambda: np.ones(2),
    lambda: None,
    lambda: 1,
    lambda: 2,
    lambda: 1.0,
    lambda: "text",
    lambda: Own(1),
    lambda: Own(2),
    lambda: [jnp.ones(2)],
    lambda: [jnp.ones(2), 1],
    lambda: (jnp.ones(2), 1),
    lambda: {"a": jnp.ones(2)},
    lambda: {"b": 1, "a": jnp.ones(2)},
    lambda: {"b": 2, "a": jnp.ones(2)},
    lambda: layer(bias=1),
    lambda: layer(bias=2),
    lambda: layer(rate=2.0),
    lambda: Thawed(1),
    lambda: collections.OrderedDict(a=jnp.ones(2), b=1),
    lambda: collections.OrderedDict(a=jnp.ones(2), b=2),
]

# Where this place is. `x` is the part.
PLACES = {
    "an argument": lambda x: ((x,), {}),
    "a keyword argument": lambda x: ((jnp.ones(2),), {"k": x}),
    "a list": lambda x: (([jnp.ones(2), x],), {}),
    "a dict": lambda x: (({"c": x, "b": 1},), {}),
    "a Module": lambda x: ((layer(bias=x, modes=[1]),), {}),
    "deep": lambda x: (({"c": [(jnp.ones(1), layer(bias={"d": x}))]},), {"k": 1}),
    "very deep": lambda x: ((functools.reduce(lambda x, _: [jnp.ones(1), x], range(30), x),), {}),
    "a registered node": lambda x: ((collections.OrderedDict(a=jnp.ones(2), b=[x]),), {}),
}


@pytest.mark.parametrize("place", PLACES)
def test_calls_in_turn_that_differ_in_one_place(place):
    """Each call may differ from the ones before at the same place, above it or below it."""
    jitted = Counted(eqxjit.filter_jit, lambda *args, **kwargs: read((args, kwargs)))
    at_random = np.random.default_rng(0).integers(len(PARTS), size=300)
    for i in [*range(len(PARTS)), *at_random]:
        args, kwargs = PLACES[place](PARTS[i]())
        assert_same(jitted(*args, **kwargs), read((args, kwargs)))
    # JAX traces once for an array and a NumPy array.
    assert jitted.traces == jitted.jitted.cache_info().entries == len(PARTS) - 1


def test_calls_in_turn_that_differ_in_two_places():
    jitted = Counted(eqxjit.filter_jit, read)
    pairs = [(i, j) for i in range(4) for j in range(4)]
    for n in [*range(16), *np.random.default_rng(0).integers(16, size=200)]:
        i, j = pairs[n]
        tree = {"first": [jnp.ones(2), i], "second": layer(bias=jnp.ones(2), rate=j)}
        assert_same(jitted(tree), read(tree))
    assert jitted.traces == 16


# --- Static objects that are returned ---------------------------------------------------------


@dataclasses.dataclass
class Owned:
    """A mutable object whose hash depends on its content."""

    content: list

    def __hash__(self):
        return hash(tuple(self.content))


RETURNED = {
    "static field": (lambda items: layer(modes=items), lambda tree: tree.modes),
    "nested": (lambda items: layer(modes=("a", {"k": items})), lambda tree: tree.modes[1]["k"]),
    "registered node": (lambda items: Labelled(jnp.ones(2), items), lambda tree: tree.label),
    "static leaf": (lambda items: {"n": Owned(items)}, lambda tree: tree["n"].content),
    "in two places": (lambda items: [layer(modes=items)] * 2, lambda tree: tree[1].modes),
}


@pytest.mark.parametrize("calls", [1, CALLS])
@pytest.mark.parametrize("kind", RETURNED)
def test_a_returned_static_object_that_was_changed_by_its_owner(kind, calls):
    """The copy in the key still equals a later object, but the traced call's object doesn't."""
    make, find = RETURNED[kind]
    f = eqxjit.filter_jit(lambda tree, x: (tree, x))
    first = make([1, 2])
    for _ in range(calls):
        f(first, jnp.ones(2))
        f(first, jnp.ones(3))
    find(first)[0] = 9
    for i in range(CALLS):
        for size in (2, 3):
            tree, x = f(make([1, 2]), jnp.full(size, i))
            assert find(tree) == [1, 2]
            assert_same(x, jnp.full(size, i))
    # Here the receiver of an output changes the output.
    find(f(make([1, 2]), jnp.ones(2))[0]).append(3)
    for _ in range(CALLS):
        assert find(f(make([1, 2]), jnp.ones(2))[0]) == [1, 2]
        assert find(f(first, jnp.ones(2))[0]) == [9, 2]


# --- Large and deep ---------------------------------------------------------------------------


NESTINGS = {
    "tuple": lambda t: (t, 1),
    "list": lambda t: [t],
    "dict": lambda t: {"a": t},
    "Module": lambda t: Layer(t, 1),
}


@pytest.mark.parametrize("kind", NESTINGS)
def test_deep_nestings(kind):
    """Deep trees can be passed and returned, and don't change how deep Python code may recurse."""
    before = recursion_left()
    warm = eqxjit.filter_jit(read)
    for depth in (150, 300):
        for i in range(CALLS):
            tree = jnp.float32(i)
            for _ in range(depth):
                tree = NESTINGS[kind](tree)
            out = warm(tree)
            assert_same(jtu.tree_leaves(out), jtu.tree_leaves(read(tree)))
            assert jtu.tree_structure(out) == jtu.tree_structure(tree)
    assert recursion_left() == before


# --- Names ------------------------------------------------------------------------------------

NAMES = """
    self cls fun func f call receive bind absent missing args kwargs args_2 kwargs_2 _ __
    jitted leaves out output token arrays array x x_2 otherwise retrace make site entry type len
    dict list tuple map all isinstance Exception Array is_array fields_of has_key rebuild unflatten
    new_object _absent x_fields x_key x_0 x_parts x_children int_1 out_0 object print exec locals
    globals jax eqxjit KeyError None_ match case __class__ __name__ __call__ __eqxjit__
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("", ", /"), ("*, ", ""), ("", ", *args, **kwargs"), ("", ", *jitted, **out")],
)
@pytest.mark.parametrize(("name", "default"), [("f", ""), ("out", "=None"), ("self", "=None")])
def test_all_parameter_names_that_could_clash(before, after, default, name):
    """One function has all these parameters."""
    variadic = re.findall(r"\w+", after)
    names = [each for each in NAMES.split() if each not in variadic]
    parameters = before + ", ".join(each + default for each in names) + after
    namespace: dict[str, Any] = {}
    exec(f"def {name}({parameters}):\n    return [{', '.join(names + variadic)}]", namespace)
    fun = namespace[name]
    kinds = [jnp.ones(2), layer(), 1, {"a": [jnp.ones(2)]}, None, "s"]
    arguments = [kinds[i % len(kinds)] for i in range(len(names))]
    args, kwargs = ([], dict(zip(names, arguments, strict=True))) if before else (arguments, {})
    if variadic:
        args, kwargs = [*args, 1, jnp.ones(3)], {"a": jnp.ones(2), "b": 2}
    jitted = eqxjit.filter_jit(fun)
    for _ in range(CALLS):
        assert_same(jitted(*args, **kwargs), fun(*args, **kwargs))
    assert_specialized(jitted)


@pytest.mark.parametrize("name", ["nul\0byte", "two\nlines", "", "class", "<lambda>", "µ"])
def test_functions_and_classes_of_any_name(name):
    def fun(x, n=1):
        return x * n, kind

    fun.__name__ = fun.__qualname__ = name
    # Python can't create a class whose name contains a NUL.
    kind = type(Layer)(name.replace("\0", ""), (Layer,), {})
    f, of_class = eqxjit.filter_jit(fun), eqxjit.filter_jit(lambda odd: odd)
    for n in (1, 2):
        for _ in range(CALLS):
            assert_same(f(jnp.ones(2), n), (jnp.full(2, n, jnp.float32), kind))
            assert type(of_class(kind(jnp.ones(2)))) is kind
    with pytest.raises(TypeError):
        f()


def test_keys_that_are_no_identifiers():
    names = ["a b", "class", "", "1", "x²", "ﬁ", "fi", "é", "e\u0301", "\n", "'", '"', "{", "out"]
    kwargs = {name: jnp.float32(i) for i, name in enumerate(names)}
    statics = {name: i for i, name in enumerate(names)}

    def f(**kwargs):
        return {key: value * 2 for key, value in kwargs.items()}

    jitted, of_dicts = eqxjit.filter_jit(f), eqxjit.filter_jit(lambda tree: f(**tree))
    for _ in range(CALLS):
        for given in (kwargs, statics, dict(reversed(kwargs.items()))):
            assert_same(jitted(**given), f(**given))
            assert_same(of_dicts(given), f(**given))


TEXTS = ["a\nb\r\x0c", "# }", "'''", '"""', "{x}", "%s", "\\", "\0", "\udcff", "é" * 10**6]


@pytest.mark.parametrize("text", [*TEXTS, None, ValueError("no")], ids=type)
def test_static_values_whose_text_could_break_generated_code(text):
    """The text is that of a value, or what its `repr` returns or raises."""

    class Loud:
        def __repr__(self):
            if isinstance(text, BaseException):
                raise text
            return text

    warm = Warm(lambda x, *rest: (read(x), rest))
    warm(jnp.ones(2), Loud())
    if isinstance(text, str):
        warm(jnp.ones(2), text, {"k": text}, layer(rate=text, modes=[text]), {text: 1})
