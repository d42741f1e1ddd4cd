"""Static objects that come in with a call and go out again are the caller's own."""

import collections
import dataclasses
import functools
import gc
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.helpers import SPECIALIZING
from tests.support.inside import n_specialized, specialize_nothing
from tests.support.models import Pair
from tests.support.sides import CALLS

X = jnp.arange(3.0)
SOME = 3
# No module holds it by a name: what holds it is never kept in the place of an equal object.
NAMELESS = [lambda: 3]


@dataclasses.dataclass(frozen=True)
class Config:
    """Compared by `==`; `ignored` tells two that are equal apart, and takes no part."""

    width: int = 3
    ignored: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(order=True, frozen=True)
class Key:
    name: str


class Model(eqx.Module):
    weight: Any
    config: Any = eqx.field(static=True)
    name: str = eqx.field(static=True, default="model")

    def __call__(self, x):
        return self, x * 2

    def method(self, x):
        return self, self.config, x * 2


class Wide(eqx.Module):
    """Doesn't go back as it came in: the output is put together of parts of it."""

    layers: Any
    extra: Any
    config: Any = eqx.field(static=True)


@jax.tree_util.register_pytree_node_class
class Registered:
    def __init__(self, child, data):
        self.child, self.data = child, data

    def tree_flatten(self):
        return (self.child,), self.data

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(*children, data)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    array: Any
    config: Any = dataclasses.field(metadata={"static": True})


CONFIGS = {
    "a list": lambda: [1, 2],
    "a dict": lambda: {"a": [1]},
    "a tuple with a list": lambda: (1, ["a"]),
    "a set": lambda: {1, 2},
    "a dataclass": lambda: Config(3, object()),
    "a tuple of dataclasses": lambda: (Config(3, object()), Config(4, object())),
    "a partial": lambda: functools.partial(max, [1]),
    "a tuple with a function": lambda: (*NAMELESS, 3),
    "a frozenset with a function": lambda: frozenset(NAMELESS),
}


def layers(config):
    """Some that are equal, so that code loops over them, each with an object of its own."""
    return [Model(X + i, config()) for i in range(6)]


#: How arguments are made of configs; what is done to them in the function.
FORMS = {
    "a field": (lambda c: Model(X, c()), lambda a: a),
    "a field, after a change of arrays": (
        lambda c: Model(X, c()),
        lambda a: eqx.tree_at(lambda m: m.weight, a, a.weight + 1),
    ),
    "a field, in another Module": (lambda c: Model(X, c()), lambda a: Wide(a, 1, a.config)),
    "a field, with another name": (lambda c: Model(X, c()), lambda a: Model(a, a.config, "other")),
    "two fields, swapped": (
        lambda c: (Model(X, c()), Model(X, c())),
        lambda a: (Model(X, a[1].config), Model(X, a[0].config)),
    ),
    "in a tuple": (lambda c: (X, Model(X, c())), lambda a: (a[1], a[0])),
    "in a named tuple": (lambda c: Pair(X, Model(X, c())), lambda a: a),
    "in a dict": (lambda c: {"b": Model(X, c()), "a": X}, lambda a: {"z": a["b"], "y": [a]}),
    "in an ordered dict": (
        lambda c: collections.OrderedDict(b=Model(X, c()), a=X),
        lambda a: [a, a["b"]],
    ),
    "in a default dict": (
        lambda c: collections.defaultdict(list, b=Model(X, c()), a=X),
        lambda a: [a, a["b"]],
    ),
    "nested": (lambda c: Wide([Model(Model(X, c()), c())], (), c()), lambda a: (a.layers[0], a)),
    "layers": (layers, lambda a: a),
    "layers in a Module": (lambda c: Wide(layers(c), X, c()), lambda a: Wide(a.layers, 1, 2)),
    "layers, reversed": (layers, lambda a: a[::-1]),
    "layers of layers": (
        lambda c: [Wide(layers(c), {"a": Model(X, c())}, c()) for _ in range(5)],
        lambda a: [a[0].layers[1], a[1:], a[2].extra],
    ),
    "layers in registered nodes": (
        lambda c: [Registered(Model(X + i, c()), "a") for i in range(6)],
        lambda a: [a[2].child, *a],
    ),
    "metadata": (lambda c: Registered(X, c()), lambda a: [a]),
    "metadata, of another node": (lambda c: Registered(X, c()), lambda a: Registered(1, a.data)),
    "metadata in a tuple": (lambda c: Registered(X, (1, c())), lambda a: Model(X, a.data[1])),
    "a dataclass": (lambda c: Data(X, c()), lambda a: (a, Model(X, a.config))),
    "a partial": (lambda c: eqx.Partial(Model(X, c()), X, y=1), lambda a: (a, a.func)),
}


def static_objects(tree):
    """All static values in a pytree that can be told from equal ones."""
    leaves, treedef = jax.tree.flatten(tree)
    found = [leaf for leaf in leaves if not eqx.is_array(leaf)]
    pending = [treedef]
    while pending:
        node = pending.pop()
        if node.node_data() is not None:
            kind, data = node.node_data()
            if kind is Registered and not isinstance(data, tuple):
                found.append(data)
            elif isinstance(data, (tuple, list)):
                found += data
            pending += node.children()
    plain = (str, int, type, type(None))
    return [
        value
        for value in found
        if not isinstance(value, plain)
        # Tuples of keys are put together anew.
        and not (type(value) is tuple and all(isinstance(part, plain) for part in value))
    ]


@pytest.fixture(params=["generic", "specialised"])
def path(request, monkeypatch):
    if request.param == "generic":
        specialize_nothing(monkeypatch)
    return request.param


def assert_same(out, expected):
    ours, theirs = static_objects(out), static_objects(expected)
    assert len(ours) == len(theirs)
    assert theirs
    for one, other in zip(ours, theirs, strict=True):
        assert one is other
    assert jax.tree.structure(out) == jax.tree.structure(expected)


@pytest.mark.parametrize(
    ("form", "config"),
    [(form, "a list") for form in FORMS] + [("a field", config) for config in CONFIGS],
)
def test_output_is_the_callers_own(form, config, path):
    make, action = FORMS[form]
    f = eqxjit.filter_jit(lambda a: action(a))
    arguments = [make(CONFIGS[config]) for _ in range(2)]
    for _ in range(CALLS):
        for argument in arguments:
            assert_same(f(argument), action(argument))
    assert len(f.traces()) == (2 if config == "a partial" else 1)
    # A specialised call that gives back another's objects is dropped: slower, and not seen above.
    if path == "specialised" and SPECIALIZING and eqxjit.native_enabled():
        assert n_specialized(f)


@pytest.mark.parametrize("form", ["a field", "in a dict", "nested", "layers", "metadata"])
def test_by_keyword_and_beside_others(form, path):
    make, action = FORMS[form]
    f = eqxjit.filter_jit(lambda x, *rest, a, **more: (x, action(more["b"]), action(a), rest))
    calls = [[make(CONFIGS["a list"]) for _ in range(3)] for _ in range(2)]
    for _ in range(CALLS):
        for a, b, c in calls:
            assert_same(f(X, c, a=a, b=b), (X, action(b), action(a), (c,)))
    assert len(f.traces()) == 1


def config_as_leaf(make):
    return Wide((make(), X), 1, "static")


@pytest.mark.parametrize(
    "form", ["nested", "layers", "metadata in a tuple", "a dataclass", "a leaf"]
)
def test_a_wrapped_module_returns_its_own(form, path):
    make, action = FORMS.get(form, (config_as_leaf, lambda a: (a.layers[0], a)))

    class Callable(eqx.Module):
        held: Any

        def __call__(self, x):
            return action(self.held), x

    held = [make(CONFIGS["a dataclass"]) for _ in range(2)]
    wrapped = [eqxjit.filter_jit(Callable(each)) for each in held]
    for _ in range(CALLS):
        for f, each in zip(wrapped, held, strict=True):
            assert_same(f(X)[0], action(each))


def test_the_self_of_a_method_is_its_own(path):
    class Jitted(Model):
        @eqxjit.filter_jit
        def step(self, x):
            return self, self.config, x

    for config in CONFIGS.values():
        models = [Jitted(X, config()) for _ in range(2)]
        bound = [eqxjit.filter_jit(model.method) for model in models]
        for _ in range(CALLS):
            for model, method in zip(models, bound, strict=True):
                assert model.step(X)[0].config is model.config
                assert method(X)[0].config is model.config


@dataclasses.dataclass(frozen=True)
class Leaf:
    value: int = 1


@pytest.mark.parametrize(
    "action",
    [
        lambda a: a,
        lambda a: [a["b"], X],
        lambda a: Model(X, a["b"]),
        lambda a: Model(a["b"], a["c"]),
    ],
)
def test_leaves_are_the_callers_own(action, path):
    f = eqxjit.filter_jit(lambda a: action(a))
    arguments = [{"b": Leaf(), "c": Leaf(2), "d": X} for _ in range(2)]
    for _ in range(CALLS):
        for argument in arguments:
            assert_same(f(argument), action(argument))
    assert len(f.traces()) == 1


def test_keys_are_the_callers_own(path):
    for kind in (dict, collections.OrderedDict):
        f = eqxjit.filter_jit(lambda a: (a, [a]))
        arguments = [kind([(Key("a"), X), (Key("b"), X)]) for _ in range(2)]
        for _ in range(CALLS):
            for argument in arguments:
                out, [again] = f(argument)
                for one, two, other in zip(out, again, argument, strict=True):
                    assert one is other
                    assert two is other


def test_another_traces_output_is_the_callers_own(path):
    """Its description differs with the shape."""
    f = eqxjit.filter_jit(lambda m, x: (m, x) if x.size > 3 else [x, Model(x, m.config)])
    models = [Model(X, [1, 2]) for _ in range(3)]
    for _ in range(CALLS):
        for x in (X, jnp.ones(5), jnp.ones(2)):
            for model in models:
                out = f(model, x)
                assert (out[0] if x.size > 3 else out[1]).config is model.config
    assert len(f.traces()) == 3


def test_a_shared_object_is_told_by_its_place(path):
    """In the traced call one object is in two places; later two objects are."""
    f = eqxjit.filter_jit(lambda a, b: (a, b, {"a": a, "b": b}))
    shared = [1, 2]
    for _ in range(CALLS):
        f(Model(X, shared), Model(X, shared))
        a, b = Model(X, [1, 2]), Model(X, [1, 2])
        first, second, _ = f(a, b)
        assert first.config is a.config
        assert second.config is b.config


def test_traces_in_which_different_objects_go_out(path):
    """A trace with one object in two places doesn't stand for one that tells them apart."""

    def swapped(a, b, x):
        return Model(x, b.config if x.size == 3 else a.config)

    f = eqxjit.filter_jit(swapped)
    for _ in range(CALLS):
        for x in (X, jnp.ones(4)):
            a, b = Model(X, [1, 2]), Model(X, [1, 2])
            assert f(a, b, x).config is swapped(a, b, x).config


@pytest.mark.parametrize(
    "both", [("k", ("k",)), (("k",), "k"), (None, (None,)), ((5,), 5), (1, True)]
)
def test_traces_whose_metadata_differs_in_form_alone(both, path):
    f = eqxjit.filter_jit(lambda x: Registered(x, both[x.ndim]))
    for _ in range(CALLS):
        for x in (jnp.ones(()), jnp.ones(2)):
            metadata = f(x).data
            assert (type(metadata), metadata) == (type(both[x.ndim]), both[x.ndim])


def test_a_change_in_place_is_no_one_elses(path):
    f = eqxjit.filter_jit(lambda m, x: (m, x * m.config[0]))
    first, second = Model(X, [1, 2]), Model(X, [1, 2])
    for _ in range(CALLS):
        f(first, X)
    first.config.append(3)
    for _ in range(CALLS):
        out, _ = f(second, X)
        assert out.config is second.config
        assert out.config == [1, 2]
    assert len(f.traces()) == 1
    out, _ = f(first, X)
    assert out.config is first.config
    assert len(f.traces()) == 2


def test_what_the_function_made_itself_is_still_watched(path):
    f = eqxjit.filter_jit(lambda m, x: (m, Model(x, [7])))
    model = Model(X, [1])
    for _ in range(CALLS):
        back, made = f(model, X)
        assert back.config is model.config
    made.config.append(8)
    for _ in range(CALLS):
        assert f(model, X)[1].config == [7]


def test_ahead_of_time():
    f = eqxjit.filter_jit(lambda m, x: (m, Model(x, m.config)))
    compiled = f.lower(Model(X, [1]), X).compile()
    for _ in range(CALLS):
        model = Model(X, [1])
        back, other = compiled(model, X)
        assert back.config is model.config
        assert other.config is model.config


def test_under_transformations():
    f = eqxjit.filter_jit(lambda m, x: (m, x * 2))
    for _ in range(CALLS):
        model = Model(X, [1])
        config, _ = eqx.filter_vmap(lambda m, x: (f(m, x)[0].config is m.config, x))(model, X)
        assert config is True


class Owner:
    def method(self): ...


HELD = {
    "a list with a lambda": lambda owner: [lambda: owner],
    "a dict with a lambda": lambda owner: {"a": (lambda: owner)},
    "a tuple with a list with a lambda": lambda owner: (1, [lambda: owner]),
    "a dataclass with a lambda": lambda owner: Config(lambda: owner),
    "a partial": lambda owner: functools.partial(max, owner),
    "a lambda": lambda owner: lambda: owner,
    "a jax partial": lambda owner: jax.tree_util.Partial(lambda: owner),
}


@pytest.mark.parametrize("changed", [False, True], ids=["as it is", "in another node"])
@pytest.mark.parametrize("held", HELD)
def test_entries_go_with_what_is_held(held, changed):
    f = eqxjit.filter_jit(lambda m, x: (Model(x, m.config, "new") if changed else m, x * 2))
    alive = []
    for _ in range(SOME):
        owner = Owner()
        alive.append(weakref.ref(owner))
        model = Model(X, HELD[held](owner))
        for x in (X, jnp.ones(4)):
            out, _ = f(model, x)
            assert out.config is model.config
    del owner, model, out
    gc.collect()
    assert sum([ref() is not None for ref in alive]) == 0


def test_entries_go_with_keys_that_they_return():
    class Named:
        pass

    f = eqxjit.filter_jit(lambda d: (d, [d]))
    alive = []
    for _ in range(SOME):
        key = Named()
        alive.append(weakref.ref(key))
        out, again = f({key: X})
        own = next(iter(out)) is key
        assert own
    del key, out, again
    gc.collect()
    assert sum([ref() is not None for ref in alive]) == 0


PARTS = {
    "in a tuple": (lambda owner: ("a", (owner,)), lambda config: config[1][0]),
    "in a list": (lambda owner: [owner], lambda config: config[0]),
    "in a tuple of the function's": (lambda owner: [owner], lambda config: ("b", config[0])),
    "a method": (lambda owner: owner, lambda config: config.method),
}


@pytest.mark.parametrize("part", PARTS)
def test_entries_go_with_a_part_of_what_came_in(part, monkeypatch):
    """One that came in deep inside a static value has no position; it isn't kept alive either."""
    specialize_nothing(monkeypatch)
    make, read = PARTS[part]
    f = eqxjit.filter_jit(lambda m, x: (read(m.config), Model(x, read(m.config)), x * 2))
    alive = []
    for _ in range(SOME):
        owner = Owner()
        alive.append(weakref.ref(owner))
        model = Model(X, make(owner))
        for _ in range(CALLS):
            leaf, out, _ = f(model, X)
            assert leaf == out.config == read(model.config)
    del owner, model, leaf, out
    gc.collect()
    assert sum([ref() is not None for ref in alive]) == 0
