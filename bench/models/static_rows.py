"""The rows of `bench statics`: calls whose cost upstream's doesn't show in arrays, but in statics.

To add a row, write a function from a `filter_jit` to a `Case` and enter it in `ROWS`, or in
`SERIES` where it takes a size. The function to jit is made in there, for no other row.
"""

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ..harness.measure import Case

FilterJit = Callable[..., Any]
Row = Callable[[FilterJit], Case]


class Configured(eqx.Module):
    """A Module with a static value: the smallest that has one."""

    weight: jax.Array
    config: Any = eqx.field(static=True)


class Compared:
    """An object with an `==` of its own, and therefore without a hash."""

    def __init__(self, values: list[int]):
        self.values = values

    def __eq__(self, other: object) -> bool:
        return type(other) is Compared and self.values == other.values


@dataclasses.dataclass
class Settings:
    """A dataclass that can be changed, and holds what can be."""

    rates: dict[str, float]
    sizes: list[int]


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataclass that can be hashed: a static argument."""

    rate: float
    sizes: tuple[int, ...]


class Chain(eqx.Module):
    """A tree as deep as it has links."""

    weight: jax.Array
    rest: "Chain | None"


def _scale() -> Callable[..., Any]:
    return lambda model, x: model.weight * x


def _step() -> Callable[..., Any]:
    return lambda model, x: Configured(model.weight * x, model.config)


def _case(filter_jit: FilterJit, fun: Callable[..., Any], model: Any, target: str = "out") -> Case:
    """A call of `fun(model, x)`; with the target `model` the next call gets what this returns."""
    names = {"f": filter_jit(fun), "model": model, "x": jnp.ones(3)}
    return Case(f"{target} = f(model, x)", lambda: names, (target,))


def given(config: Any) -> Row:
    """The static value in a Module that goes in."""
    return lambda filter_jit: _case(filter_jit, _scale(), Configured(jnp.ones(3), config))


def in_and_out(config: Any) -> Row:
    """The static value in a Module that goes in and out."""
    return lambda filter_jit: _case(filter_jit, _step(), Configured(jnp.ones(3), config), "model")


def in_turn(make: Callable[[], Any]) -> Row:
    """Models with equal static values that aren't the same objects, called in turn."""
    models = [Configured(jnp.ones(3), make()) for _ in range(2)]
    return lambda filter_jit: _turns(filter_jit, models)


def _turns(filter_jit: FilterJit, models: list[Any]) -> Case:
    names = {"f": filter_jit(lambda model, x: model.weight * x), "models": models, "x": jnp.ones(3)}
    return Case("for model in models: out = f(model, x)", lambda: names)


def layers(count: int, make: Callable[[], Any]) -> Row:
    """A list of Modules, each with a static value of its own."""
    models = [Configured(jnp.ones(()), make()) for _ in range(count)]
    return lambda filter_jit: _case(filter_jit, lambda model, x: model[0].weight * x, models)


def fresh(expression: str, **names: Any) -> Row:
    """A static argument that each call makes anew."""

    def build(filter_jit: FilterJit) -> Case:
        given = {"f": filter_jit(lambda value, x: x + 1), "x": jnp.ones(3), **names}
        return Case(f"out = f({expression}, x)", lambda: given)

    return build


def closed_over(value: Any) -> Row:
    """The static value in the wrapped function itself: a Module's method, called warm."""

    def build(filter_jit: FilterJit) -> Case:
        model = Configured(jnp.ones(3), value)
        names = {"f": filter_jit(eqx.Partial(_scale(), model)), "x": jnp.ones(3)}
        return Case("out = f(x)", lambda: names)

    return build


def _dict(size: int) -> dict[str, float]:
    return {f"rate {i}": float(i) for i in range(size)}


def _list(size: int) -> list[float]:
    return [float(i) for i in range(size)]


def _nested_lists(size: int) -> list[list[int]]:
    return [[i, i + 1_000, 2, 3, 4] for i in range(size // 5)]


def _nested_dict(size: int) -> dict[str, Any]:
    return {f"layer {i}": {"size": i, "act": "relu", "shape": [i, 3]} for i in range(size // 4)}


def _tuples(size: int) -> tuple[Any, ...]:
    return tuple([(i, (i + 1_000, np.dtype("float32")), "same") for i in range(size // 4)])


def _constants(size: int) -> tuple[Any, ...]:
    return tuple([(i, (f"name {i}", i / 2)) for i in range(size // 3)])


def _activations(size: int) -> dict[str, Callable[[int], int]]:
    return {f"activation {i}": (lambda x, i=i: x + i) for i in range(size)}


def _mlps(count: int) -> Row:
    """Models of different structures, called in turn."""
    keys = jr.split(jr.key(0), count)
    models = [eqx.nn.MLP(2, 2, width, 1, key=keys[width - 1]) for width in range(1, count + 1)]

    def build(filter_jit: FilterJit) -> Case:
        names = {"f": filter_jit(lambda model, x: model(x)), "models": models, "x": jnp.ones(2)}
        return Case("for model in models: out = f(model, x)", lambda: names)

    return build


def _deep(depth: int) -> Row:
    chain: Any = None
    for _ in range(depth):
        chain = Chain(jnp.ones(()), chain)
    return lambda filter_jit: _case(filter_jit, lambda chain, x: chain.weight * x, chain)


def _deep_list(depth: int) -> Row:
    nested: Any = jnp.ones(())
    for _ in range(depth):
        nested = [nested]
    names = {"model": nested, "x": jnp.ones(3)}

    def build(filter_jit: FilterJit) -> Case:
        f = filter_jit(lambda model, x: x + 1)
        return Case("out = f(model, x)", lambda: {"f": f, **names})

    return build


def _deep_dict(depth: int) -> Row:
    nested: Any = jnp.ones(())
    for _ in range(depth):
        nested = {"inner": nested, "b": 1}
    return lambda filter_jit: _passed(filter_jit, nested)


def _passed(filter_jit: FilterJit, tree: Any) -> Case:
    names = {"f": filter_jit(lambda tree, x: x + 1), "tree": tree, "x": jnp.ones(3)}
    return Case("out = f(tree, x)", lambda: names)


def passed(tree: Any) -> Row:
    """An argument of which nothing is used."""
    return lambda filter_jit: _passed(filter_jit, tree)


def structures(trees: list[Any]) -> Row:
    """Arguments of different structures, called in turn."""

    def build(filter_jit: FilterJit) -> Case:
        names = {"f": filter_jit(lambda tree, x: x + 1), "trees": trees, "x": jnp.ones(3)}
        return Case("for tree in trees: out = f(tree, x)", lambda: names)

    return build


def _chains(count: int, length: int) -> list[Any]:
    """Lists of Modules that differ in their last one."""
    configs = range(length)
    return [[Configured(jnp.ones(()), i) for i in (*configs, length + n)] for n in range(count)]


def _nodes_in_turn(make: Callable[[jax.Array], Any]) -> Row:
    """Lists of nodes that aren't read natively, with a number that tells them apart."""
    nodes = [make(jnp.ones(())) for _ in range(20)]
    return structures([(nodes, n) for n in range(60)])


#: What costs against its size: a line each in the picture.
SERIES: Mapping[str, tuple[Callable[[int], Row], tuple[int, ...]]] = {
    "dict": (lambda size: given(_dict(size)), (10, 100, 1_000, 10_000)),
    "dict, in and out": (lambda size: in_and_out(_dict(size)), (10, 100, 1_000, 10_000)),
    "list": (lambda size: given(_list(size)), (10, 100, 1_000, 5_000, 20_000)),
    "nested lists": (lambda size: given(_nested_lists(size)), (10, 100, 1_000, 5_000, 20_000)),
    "nested dict": (lambda size: given(_nested_dict(size)), (10, 100, 1_000, 10_000)),
    "set": (lambda size: given({*range(size)}), (10, 100, 1_000, 10_000)),
    "set of texts": (lambda size: given({*_dict(size)}), (10, 100, 1_000, 5_000)),
    "list of objects with an ==": (
        lambda size: given([Compared([i]) for i in range(size)]),
        (10, 100, 1_000),
    ),
    "equal tuples in turn": (lambda size: in_turn(lambda: _tuples(size)), (10, 100, 1_000, 10_000)),
    "equal dicts in turn": (lambda size: in_turn(lambda: _dict(size)), (10, 100, 1_000, 10_000)),
    "NumPy array, elements": (lambda size: given(np.ones(size)), (10, 1_000, 10_000, 500_000)),
    "bytearray, bytes": (lambda size: given(bytearray(size)), (10, 1_000, 100_000, 4_000_000)),
}

ROWS: Mapping[str, Row] = {
    "deque of 1,000": given(collections.deque(range(1_000))),
    "Counter of 1,000": given(collections.Counter({i: i for i in range(1_000)})),
    "OrderedDict of 1,000": given(collections.OrderedDict(_dict(1_000))),
    "defaultdict of 1,000": given(collections.defaultdict(float, _dict(1_000))),
    "mappingproxy of 1,000": given(types.MappingProxyType(_dict(1_000))),
    "namespace of 500": given(types.SimpleNamespace(**{f"a{i}": i for i in range(500)})),
    "dataclass of containers": given(Settings(_dict(100), [*range(100)])),
    "dataclass of containers, in and out": in_and_out(Settings(_dict(100), [*range(100)])),
    "dict of 1,000 functions": given(_activations(1_000)),
    "dict of 1,000 dtypes": given({f"d{i}": np.dtype("float32") for i in range(1_000)}),
    "one dict in 50 layers": layers(50, functools.partial(lambda shared: shared, _dict(1_000))),
    "a dict of 20 in each of 50 layers": layers(50, lambda: _dict(20)),
    "an equal tuple in each of 200 layers": layers(200, lambda: _tuples(12)),
    "unhashable objects with an ==": given(Compared([*range(1_000)])),
    "unhashable objects with an ==, in and out": in_and_out(Compared([*range(1_000)])),
    "frozen dataclass made anew": fresh("Frozen(0.5, (1, 2, 3))", Frozen=Frozen),
    "frozenset made anew": fresh("frozenset(names)", names=[f"name {i}" for i in range(100)]),
    "equal nested tuples of 10,000 constants in turn": in_turn(lambda: _constants(10_000)),
    "frozenset of numbers made anew": fresh("frozenset(numbers)", numbers=[*range(300)]),
    "tuples made anew": fresh("tuple([(i, (name, 0.0)) for i in range(300)])", name="a"),
    "string made anew": fresh("' '.join(names)", names=[f"name {i}" for i in range(100)]),
    "partial with a static dict": closed_over(_dict(1_000)),
    "partial with nested lists": closed_over(_nested_lists(1_000)),
    "24 MLPs in turn": _mlps(24),
    "12 MLPs in turn": _mlps(12),
    "2 MLPs in turn": _mlps(2),
    "a tree 150 deep": _deep(150),
    "lists 150 deep": _deep_list(150),
    "lists 800 deep": _deep_list(800),
    "dicts 150 deep": _deep_dict(150),
    "8 models in turn that differ at their ends": structures(_chains(8, 30)),
    "24 models in turn that differ at their ends": structures(_chains(24, 30)),
    "64 small Modules in turn": structures([Configured(jnp.ones(()), n) for n in range(64)]),
    "200 small Modules in turn": structures([Configured(jnp.ones(()), n) for n in range(200)]),
    "60 lists of OrderedDicts in turn": _nodes_in_turn(lambda x: collections.OrderedDict(a=x)),
    "60 lists of Partials in turn": _nodes_in_turn(lambda x: jax.tree_util.Partial(jnp.sin, x)),
    "60 lists of dicts of pairs in turn": _nodes_in_turn(lambda x: {(1, 2): x, (2, 3): x}),
    "a list of 20,000 floats as an argument": passed(_list(20_000)),
    "1,000 complex numbers": passed([complex(i, 0) for i in range(1_000)]),
    "200 frozen dataclasses": passed([Frozen(i / 2, (i, i)) for i in range(200)]),
    "200 frozen dataclasses made anew": fresh(
        "[Frozen(i / 2, (i, i)) for i in range(200)]", Frozen=Frozen
    ),
    "200 dtypes": passed([jnp.float32, jnp.bfloat16] * 100),
    "20 NumPy arrays": passed([np.ones(3) for _ in range(20)]),
    "100 partials with an array": passed([jax.tree_util.Partial(jnp.sin, jnp.ones(()))] * 100),
    "20 defaultdicts": passed([collections.defaultdict(list, {"a": jnp.ones(())})] * 20),
    "2,000 Modules that differ": passed([Configured(jnp.ones(()), n) for n in range(2_000)]),
    "15,000 dicts, 45,000 nodes": passed([{"a": jnp.ones(()), "b": 1} for _ in range(15_000)]),
}
