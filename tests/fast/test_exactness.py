"""Exactness: a warm call sees every change of its arguments, whatever the structure and the names.

Each test warms a call up until the specialised call serves it, changes one thing, and calls again.
"""

import collections
import dataclasses
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
from tests.support.models import Frozen, Pair, Thawed
from tests.support.sides import CALLS


def read(tree):
    """All that a program may depend on: the arrays, doubled, and the rest as it is."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) * 2 if eqx.is_array(leaf) else leaf, tree)


class Warm:
    """A jitted function that is called until its specialised call serves, and the plain one."""

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


def layer(**fields):
    return Layer(**{"weight": jnp.arange(2.0), **fields})


@jtu.register_pytree_node_class
class Fickle:
    """A registered node whose number of children depends on its content."""

    def __init__(self, items):
        self.items = items

    def tree_flatten(self):
        return (item for item in self.items if item is not None), [
            item is None for item in self.items
        ]

    @classmethod
    def tree_unflatten(cls, absent, children):
        children = iter(children)
        return cls([None if is_absent else next(children) for is_absent in absent])


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
        ("weight", jnp.ones(2)),
        ("weight", jnp.ones(3)),
        ("weight", jnp.ones(2, jnp.int32)),
        ("weight", np.ones(2, np.float32)),
        ("weight", None),
        ("weight", 2.0),
        ("weight", "static"),
        ("weight", [jnp.ones(2)]),
        ("weight", (jnp.ones(2), jnp.ones(3))),
        ("weight", Layer(jnp.ones(2))),
        ("bias", jnp.ones(2)),
        ("bias", "none"),
        ("bias", ()),
        ("rate", 0.25),
        ("rate", 0),
        ("rate", None),
        ("rate", "0.5"),
        ("modes", ("a",)),
        ("modes", []),
        ("modes", None),
    ],
)
def test_a_field_changed_by_setattr_is_seen(field, value):
    model, warm = layer(), Warm()
    warm(model)
    before = getattr(model, field)
    for new in (value, before, value):
        object.__setattr__(model, field, new)
        warm.check(model)


@pytest.mark.parametrize("field", ["weight", "bias", "rate", "modes"])
def test_a_field_deleted_from_the_instance_is_seen(field):
    """What is deleted falls back on the class's default, where there is one."""
    model = layer(bias=jnp.ones(2), rate=0.1, modes=("a",))

    def present(model):
        return [hasattr(model, name) for name in ("weight", "bias", "rate", "modes")], read(model)

    warm = Warm(present)
    warm(model)
    value = getattr(model, field)
    object.__delattr__(model, field)
    warm(model, specialized=False)
    object.__setattr__(model, field, value)
    warm.check(model)


def test_a_field_added_to_the_instance_does_not_disturb():
    """What is no field isn't part of the pytree: upstream's flatten leaves it out, too."""
    model, warm = layer(), Warm()
    warm(model)
    object.__setattr__(model, "note", "not a field")
    assert_same(warm.jitted(model), eqx.filter_jit(read)(model))
    object.__delattr__(model, "rate")  # as many entries in its `__dict__` as it has fields
    assert_same(warm.jitted(model), eqx.filter_jit(read)(model))
    assert_same(warm.jitted(model), eqx.filter_jit(read)(model))


@pytest.mark.parametrize("name", ["__doc__", "__name__", "__module__"])
def test_a_wrapper_field_added_to_the_instance_is_seen(name):
    """Equinox carries `__name__`, `__doc__`, ... of an instance through a call."""

    def named(model):
        return str(vars(model).get(name)), read(model)

    model, warm = layer(), Warm(named)
    warm(model)
    object.__setattr__(model, name, "first")
    warm(model, specialized=False)
    object.__setattr__(model, name, "second")
    warm.check(model)


def test_another_class_of_the_instance_is_seen():
    class Other(Layer):
        pass

    model, warm = layer(), Warm(lambda model: (type(model).__name__, read(model)))
    warm(model)
    object.__setattr__(model, "__class__", Other)
    warm.check(model)
    warm.check(layer())


@pytest.mark.parametrize(
    "fields",
    [
        lambda old: dict(reversed(old.items())),
        lambda old: {**old, "weight": jnp.ones(2), "rate": 4},
    ],
    ids=["in another order", "of other values"],
)
def test_another_dict_of_the_instance_is_seen(fields):
    model, warm = layer(), Warm()
    warm(model)
    object.__setattr__(model, "__dict__", fields(vars(model)))
    warm.check(model)
    warm.check(layer())


# --- Containers changed in place --------------------------------------------------------------


def _replace(container, key, value):
    container[key] = value


CHANGES = {
    "list: item": (lambda: [jnp.zeros(2), 1], lambda c: _replace(c, 1, 2)),
    "list: array for static": (lambda: [jnp.zeros(2), 1], lambda c: _replace(c, 1, jnp.ones(2))),
    "list: static for array": (lambda: [jnp.zeros(2), 1], lambda c: _replace(c, 0, 0)),
    "list: longer": (lambda: [jnp.zeros(2)], lambda c: c.append(jnp.ones(2))),
    "list: shorter": (lambda: [jnp.zeros(2), jnp.ones(2)], lambda c: c.pop()),
    "list: order": (lambda: [jnp.zeros(2), 1], lambda c: c.reverse()),
    "long list: longer": (lambda: [jnp.zeros(2)] * 20, lambda c: c.append(jnp.ones(2))),
    "long list: static item": (lambda: [jnp.zeros(2)] * 20, lambda c: _replace(c, 7, 7)),
    "long list: string": (lambda: [jnp.zeros(2)] * 20, lambda c: _replace(c, 7, "seven")),
    "long list: None": (lambda: [jnp.zeros(2)] * 20, lambda c: _replace(c, 7, None)),
    "long list: nested": (lambda: [jnp.zeros(2)] * 20, lambda c: _replace(c, 7, [jnp.ones(2)])),
    "long list: NumPy": (lambda: [jnp.zeros(2)] * 20, lambda c: _replace(c, 7, np.float32(7))),
    "dict: item": (lambda: {"a": jnp.zeros(2), "b": 1}, lambda c: _replace(c, "b", "x")),
    "dict: added": (lambda: {"a": jnp.zeros(2)}, lambda c: _replace(c, "b", jnp.ones(2))),
    "dict: removed": (lambda: {"a": jnp.zeros(2), "b": 1}, lambda c: c.pop("b")),
    "dict: other key": (lambda: {"a": jnp.zeros(2)}, lambda c: _replace(c, "b", c.pop("a"))),
    "dict: key of another type": (lambda: {1: jnp.zeros(2)}, lambda c: _replace(c, True, c.pop(1))),
    "dict: one key of another type": (
        lambda: {0: jnp.zeros(2), 1: jnp.ones(2)},
        lambda c: _replace(c, True, c.pop(1)),
    ),
    "dict: order": (
        lambda: {"a": jnp.zeros(2), "b": jnp.ones(2)},
        lambda c: _replace(c, "a", c.pop("a")),
    ),
    "OrderedDict: order": (
        lambda: collections.OrderedDict(a=jnp.zeros(2), b=jnp.ones(2)),
        lambda c: c.move_to_end("a"),
    ),
    "defaultdict: factory": (
        lambda: collections.defaultdict(list, a=jnp.zeros(2)),
        lambda c: setattr(c, "default_factory", dict),
    ),
    "static list": (lambda: layer(modes=[1, [2]]), lambda c: c.modes[1].append(3)),
    "static list: type": (lambda: layer(modes=[1, [2]]), lambda c: _replace(c.modes[1], 0, 2.0)),
    "static list in a tuple": (lambda: layer(modes=(1, [2])), lambda c: c.modes[1].append(3)),
    "static dict": (lambda: layer(modes={"a": 1}), lambda c: _replace(c.modes, "b", 2)),
    "static dict: type": (lambda: layer(modes={"a": 1}), lambda c: _replace(c.modes, "a", True)),
    "static dict: key": (
        lambda: layer(modes={1: "a"}),
        lambda c: _replace(c.modes, 1.0, c.modes.pop(1)),
    ),
    "static dict: order": (
        lambda: layer(modes={"a": 1, "b": 2}),
        lambda c: _replace(c.modes, "a", c.modes.pop("a")),
    ),
    "static set": (lambda: layer(modes={1, 2}), lambda c: c.modes.add(3)),
    "static array": (
        lambda: layer(modes=[np.zeros(2)]),
        lambda c: _replace(c.modes[0], slice(None), 1.0),
    ),
    "static dataclass": (lambda: layer(modes=Thawed([1])), lambda c: c.modes.value.append(2)),
    "static frozen dataclass": (
        lambda: layer(modes=Frozen([1])),
        lambda c: object.__setattr__(c.modes, "value", (2,)),
    ),
    "static Module": (
        lambda: layer(modes=Layer("a")),
        lambda c: object.__setattr__(c.modes, "weight", "b"),
    ),
}


def everything(tree):
    """As `read`, and the static fields in words: their objects are the caller's own."""
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
    # And what was first is still served rightly.
    warm.check(make(), 1)


#: Where a static value may be, with the way to find it there.
HIDING_PLACES = {
    "an argument": (lambda v: v, lambda t: t),
    "a tuple": (lambda v: (v, 1), lambda t: t[0]),
    "a static field": (lambda v: layer(rate=v), lambda t: t.rate),
    "a tuple in a static field": (lambda v: layer(rate=(v, 1)), lambda t: t.rate[0]),
    "a list in a static field": (lambda v: layer(rate=[v]), lambda t: t.rate[0]),
    "a dict in a static field": (lambda v: layer(rate={"k": v}), lambda t: t.rate["k"]),
    "a registered node": (lambda v: Labelled(jnp.ones(2), v), lambda t: t.label),
    "a frozen dataclass": (lambda v: Frozen((v,)), lambda t: t.value[0]),
}


@pytest.mark.parametrize("make", [Own, Thawed, Frozen])
@pytest.mark.parametrize("place", HIDING_PLACES)
def test_a_static_object_changed_in_place_is_seen(make, place):
    """Upstream returns what it was before: it finds the very same object (JAX 0.10.2)."""
    put, get = HIDING_PLACES[place]
    static = make(1)
    tree = put(static)
    warm = Warm(lambda tree: get(tree).value)
    warm(tree)
    for value in (2, 1, 2, 3):
        object.__setattr__(static, "value", value)
        warm.check(tree)
        warm.check(tree)


def test_a_numpy_array_changed_in_place_is_seen():
    array, warm = np.zeros(3, np.float32), Warm(lambda tree: jnp.sum(tree[0]["a"]) + tree[1])
    tree = [{"a": array}, np.float32(1)]
    warm(tree)
    for i in range(CALLS):
        array[i % 3] += 1
        assert warm.jitted(tree) == i + 2
    array.resize((2, 2), refcheck=False)
    assert warm.jitted(tree) == array.sum() + 1


# --- Several structures at one call site ------------------------------------------------------


def structures(n):
    """Trees that differ in one thing each."""
    kinds = [
        lambda i: [jnp.ones(2)] * (i + 1),
        lambda i: {"a": jnp.ones(2), f"k{i}": i},
        lambda i: (jnp.ones(2), i),
        lambda i: layer(rate=i),
        lambda i: layer(modes=[i], bias=jnp.ones(i)),
        lambda i: (jnp.ones(2), float(i)),
        lambda i: (jnp.ones(2), str(i)),
        lambda i: eqx.Partial(max, jnp.ones(2), key=i),
    ]
    return [kinds[i % len(kinds)](i // len(kinds)) for i in range(n)]


@pytest.mark.parametrize("n", [2, 8, 64])
def test_a_call_site_that_alternates_between_structures(n):
    jitted = Counted(eqxjit.filter_jit, read)
    trees = structures(n)
    expected = [read(tree) for tree in trees]
    orders = [range(n), range(n), reversed(range(n)), *[range(n)] * 3, range(0, n, 3)]
    for order in orders:
        for i in order:
            assert_same(jitted(trees[i]), expected[i])
    for i in range(n):  # each warm, then the next
        for _ in range(3):
            assert_same(jitted(trees[i]), expected[i])
    rng = np.random.default_rng(0)
    for i in rng.integers(n, size=200):
        assert_same(jitted(trees[i]), expected[i])
    assert jitted.traces == jitted.jitted.cache_info().traces
    assert jitted.jitted.cache_info().entries == n


# --- Large and deep ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda xs: xs,
        lambda xs: [Layer(x, rate=i % 5) for i, x in enumerate(xs)],
    ],
    ids=["a list", "Modules"],
)
def test_a_tree_of_thousands_of_leaves(make):
    tree = make([np.float32(i) for i in range(3_000)])

    @eqxjit.filter_jit
    def f(tree):
        leaves = jtu.tree_leaves(eqx.filter(tree, eqx.is_array))
        return leaves[0] + leaves[-1], len(leaves), leaves[1]

    for i in range(CALLS):
        (tree[0],) = make([np.float32(i)])
        assert f(tree) == (i + 2_999, 3_000, 1)
    tree[1500] = None
    assert f(tree)[1] == 2_999


def _nested(kind, depth, leaf):
    for _ in range(depth):
        leaf = kind(leaf)
    return leaf


NESTINGS = {
    "tuple": lambda t: (t, 1),
    "list": lambda t: [t],
    "dict": lambda t: {"a": t},
    "Module": lambda t: Layer(t, 1),
}


@dataclasses.dataclass
class Owned:
    """Hashable by its content, and changeable."""

    content: list

    def __hash__(self):
        return hash(tuple(self.content))


#: Trees that hold a list which the caller can change in place, and the way to that list.
RETURNED = {
    "static field": (lambda items: layer(modes=items), lambda tree: tree.modes),
    "nested": (lambda items: layer(modes=("a", {"k": items})), lambda tree: tree.modes[1]["k"]),
    "registered node": (lambda items: Labelled(jnp.ones(2), items), lambda tree: tree.label),
    "static leaf": (lambda items: {"n": Owned(items)}, lambda tree: tree["n"].content),
    "many equal items": (
        lambda items: [layer(modes=items) for _ in range(6)],
        lambda tree: tree[4].modes,
    ),
}


@pytest.mark.parametrize("calls", [1, 2, CALLS])
@pytest.mark.parametrize("kind", RETURNED)
def test_a_returned_static_object_that_was_changed_by_its_owner(kind, calls):
    """What was traced returns the first caller's object, which is no longer the later one's equal.

    Found by the thorough property tests: the copy in the key still fits, the object doesn't.
    """
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
    # And an output that its receiver changes.
    find(f(make([1, 2]), jnp.ones(2))[0]).append(3)
    for _ in range(CALLS):
        assert find(f(make([1, 2]), jnp.ones(2))[0]) == [1, 2]
        assert find(f(first, jnp.ones(2))[0]) == [9, 2]


# --- Classes that become pytrees ------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 2, CALLS])
@pytest.mark.parametrize("place", ["argument", "in a list", "in many", "in a field"])
def test_a_class_that_is_registered_after_warm_calls(place, calls):
    class Box:
        def __init__(self, content):
            self.content = content

    places = {
        "argument": lambda box: box,
        "in a list": lambda box: [1, box],
        "in many": lambda box: [(jnp.ones(2), box)] * 20,
        "in a field": lambda box: layer(bias=box),
    }
    box = Box(jnp.ones(2))
    tree = places[place](box)

    def total(tree):
        boxes = jax.tree.leaves(tree, is_leaf=lambda node: type(node) is Box)
        return sum(2 * node.content for node in boxes if type(node) is Box)

    f = eqxjit.filter_jit(total)
    expected = total(tree)
    for _ in range(calls):
        assert_same(f(tree), expected)
    jtu.register_pytree_node(Box, lambda box: ((box.content,), None), lambda _, c: Box(*c))
    for i in range(CALLS):
        box.content = jnp.full(2, i)
        assert_same(f(tree), total(tree))


@pytest.mark.parametrize("depth", [60, 150, 500])
@pytest.mark.parametrize("kind", NESTINGS)
def test_nesting_500_deep(kind, depth):
    """In and out; and afterwards Python code may recurse as deep as before."""
    before = recursion_left()
    warm = eqxjit.filter_jit(read)
    for i in range(CALLS):
        tree = _nested(NESTINGS[kind], depth, jnp.float32(i))
        assert_same(jtu.tree_leaves(warm(tree)), jtu.tree_leaves(read(tree)))
        assert jtu.tree_structure(warm(tree)) == jtu.tree_structure(tree)
    assert recursion_left() == before


# --- Names ------------------------------------------------------------------------------------

#: What generated code might call something itself.
NAMES = """
    self cls fun func f call receive bind absent missing args kwargs args_2 kwargs_2 _ __
    jitted leaves out output token arrays array x x_2 otherwise retrace explain wait make
    make_call make_receiver guards_hold site entry type len dict list tuple map all frozenset
    isinstance Exception CacheMiss Array is_array fields_of has_key has_key_2 only_arrays
    flatten_one_level rebuild unflatten new_object new_tuple set_fields fun_array_0
    _absent x_fields x_key x_0 x_parts x_children int_1 out_0 object print exec locals globals
    tree_flatten jax eqxjit KeyError None_ match case __class__ __name__ __call__ __eqxjit__
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("", ", /"), ("*, ", ""), ("", ", *args, **kwargs"), ("", ", *jitted, **out")],
)
@pytest.mark.parametrize("default", ["", "=None"], ids=["required", "optional"])
@pytest.mark.parametrize("own", ["f", "out", "jitted", "type", "self"])
def test_all_parameter_names_that_could_clash(before, after, default, own):
    """One function that has them all."""
    variadic = re.findall(r"\w+", after)
    names = [name for name in NAMES.split() if name not in variadic]
    parameters = before + ", ".join(name + default for name in names) + after
    namespace: dict[str, Any] = {}
    exec(f"def {own}({parameters}):\n    return [{', '.join(names + variadic)}]", namespace)
    fun = namespace[own]
    kinds = [jnp.ones(2), layer(), 1, {"a": [jnp.ones(2)]}, None, "s"]
    arguments = [kinds[i % len(kinds)] for i in range(len(names))]
    args, kwargs = ([], dict(zip(names, arguments, strict=True))) if before else (arguments, {})
    if variadic:
        args, kwargs = [*args, 1, jnp.ones(3)], {"a": jnp.ones(2), "b": 2}
    jitted = eqxjit.filter_jit(fun)
    for _ in range(CALLS):
        assert_same(jitted(*args, **kwargs), fun(*args, **kwargs))
    assert_specialized(jitted)


def test_keyword_arguments_that_are_no_identifiers():
    def f(**kwargs):
        return {key: value * 2 for key, value in kwargs.items()}

    names = ["a b", "class", "", "1", "x²", "ﬁ", "fi", "é", "é", "\n", "'", '"', "{", "out"]
    kwargs = {name: jnp.float32(i) for i, name in enumerate(names)}
    statics = {name: i for i, name in enumerate(names)}
    jitted = eqxjit.filter_jit(f)
    for _ in range(CALLS):
        assert_same(jitted(**kwargs), f(**kwargs))
        assert_same(jitted(**statics), f(**statics))
        assert_same(jitted(**dict(reversed(kwargs.items()))), f(**kwargs))


@pytest.mark.parametrize(("one", "other"), [("\u00b5", "\u03bc"), ("ﬁ", "fi"), ("x₁", "x1")])
def test_names_that_are_one_identifier_to_python(one, other):
    """Python normalises identifiers: in source `µ` (micro) and `μ` (mu) are the same variable."""
    x, y = jnp.float32(1), jnp.float32(5)
    items, others = [layer(weight=x)] * 4, [layer(weight=y)] * 4
    warm = Warm()
    # The same arrays under both names while the specialised call is made.
    for a, b in [(x, y), ([x] * 4, [y] * 4), (items, others)]:
        warm({one: a, other: a})
        warm.check({one: a, other: b})
    keywords = eqxjit.filter_jit(lambda **kwargs: kwargs[one] - 2 * kwargs[other])
    for _ in range(CALLS):
        assert keywords(**{one: x, other: x}) == -1
    assert keywords(**{one: x, other: y}) == -9


def test_dict_keys_and_fields_that_are_no_identifiers():
    warm = Warm(lambda tree: read(tree))
    names = ["a b", "class", "", "1", "x²", "ﬁ", "fi", "é", "e\u0301", "\n", "'", '"', "{", "#"]
    warm(dict.fromkeys(names, jnp.ones(2)), specialized=False)
    warm({name: [i, jnp.float32(i)] for i, name in enumerate(names)}, specialized=False)
    for _ in range(CALLS):
        for name in names:
            warm.check({name: jnp.ones(2), "static": name})


TEXTS = ["a\nb\r\x0c", "# }", "'''", '"""', "{x}", "%s", "\\", "\0", "\udcff", "é" * 10**6]


@pytest.mark.parametrize("text", [*TEXTS, None, ValueError("no")], ids=type)
def test_static_values_whose_text_could_break_generated_code(text):
    """Of a value, or of what its `repr` returns or raises."""

    class Loud:
        def __repr__(self):
            if isinstance(text, BaseException):
                raise text
            return text

    warm = Warm(lambda x, *rest: (read(x), rest))
    warm(jnp.ones(2), Loud())
    if isinstance(text, str):
        warm(jnp.ones(2), text, {"k": text}, layer(rate=text, modes=[text]), {text: 1})


# --- Nodes that could defeat generated code ---------------------------------------------------


class Tagged(tuple):
    """A named tuple to JAX, made by hand: its `__new__` does more than make the tuple."""

    _fields = ("a", "b")

    def __new__(cls, a, b):
        self = super().__new__(cls, (a, b))
        self.made = "by hand"
        return self

    def __getnewargs__(self):
        return tuple(self)


class Backwards(Pair):
    def __iter__(self):
        return reversed(tuple(self[i] for i in range(2)))


@pytest.mark.parametrize("make", [Tagged, Pair, Backwards])
def test_named_tuples_with_a_will_of_their_own(make):
    f = eqxjit.filter_jit(lambda t: make(t[1] * 2, t[0]))
    upstream = eqx.filter_jit(lambda t: make(t[1] * 2, t[0]))
    for i in range(CALLS):
        argument = make(jnp.float32(i), jnp.float32(7))
        ours, theirs = f(argument), upstream(argument)
        assert_same(ours, theirs)
        assert getattr(ours, "made", None) == getattr(theirs, "made", None)


def test_a_node_whose_flatten_looks_at_its_content():
    node = Fickle([jnp.ones(2), None, jnp.zeros(2)])
    warm = Warm(lambda node: Fickle(list(node.items)))
    warm(node)
    for items in ([None, jnp.ones(2), jnp.zeros(2)], [], [None], [jnp.ones(2), None, 3]):
        node.items = items
        warm.check(node)
        warm.check(node)
