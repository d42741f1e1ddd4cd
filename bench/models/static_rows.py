"""The rows of `bench statics`: calls with static values as real programs pass them.

A row is a function that takes a `filter_jit` and returns a `Case`. It creates the function to jit,
so that no two rows share a function.
"""

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ..harness.measure import Case
from .networks import batched, tree_of

FilterJit = Callable[..., Any]
Row = Callable[[FilterJit], Case]


class Configured(eqx.Module):
    """A Module with an array and a static value."""

    weight: jax.Array
    config: Any = eqx.field(static=True)


def unflattened(weight: jax.Array, config: Any) -> Configured:
    """Return a `Configured`, created as JAX does when it unflattens a tree.

    The constructor searches the static value for arrays, which would be most of the measured time.
    """
    model = object.__new__(Configured)
    object.__setattr__(model, "weight", weight)
    object.__setattr__(model, "config", config)
    return model


@dataclasses.dataclass
class Settings:
    """A mutable dataclass with mutable fields."""

    name: str
    rates: dict[str, float]
    sizes: list[int]


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass, which can be hashed."""

    name: str
    rate: float
    sizes: tuple[int, ...]


class Mode(enum.Enum):
    """An enumeration, as configurations hold them."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    EXPORT = "export"


class Chain(eqx.Module):
    """A Module that may hold another one."""

    weight: jax.Array
    rest: "Chain | None"


IN_MODULE, AS_ARGUMENT = "in a Module", "as an argument"
CHOICES = (*Mode, np.dtype("float32"), jnp.dtype("bfloat16"), jax.nn.relu, jax.nn.gelu, jnp.tanh)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of configuration.

    - `make`: returns a configuration with this many entries.
    - `copy`: returns an equal copy, as fast as possible.
    - `places`: where programs put such a configuration.
    """

    make: Callable[[int], Any]
    copy: Callable[[Any], Any]
    places: tuple[str, ...] = (IN_MODULE, AS_ARGUMENT)


def _rates(size: int) -> dict[str, float]:
    return {f"rate {i}": i / 2 for i in range(size)}


def _layers(size: int) -> dict[str, Any]:
    """Return nested dicts. Each layer counts as five entries."""
    layer = {"act": "relu", "dropout": 0.1, "bias": True}
    return {f"layer {i}": {**layer, "shape": [i, 3]} for i in range(size // 5)}


def _choices(size: int) -> dict[str, Any]:
    return _named([CHOICES[i % len(CHOICES)] for i in range(size)])


def _named(value: list[Any]) -> dict[str, Any]:
    return {f"name {i}": item for i, item in enumerate(value)}


KINDS: Mapping[str, Kind] = {
    "dict": Kind(_rates, dict),
    "nested dict": Kind(
        _layers,
        lambda c: {k: {**v, "shape": v["shape"].copy()} for k, v in c.items()},
    ),
    "list": Kind(lambda size: [i / 2 for i in range(size)], list),
    "dataclass": Kind(
        lambda size: Settings("name", _rates(size // 2), [*range(size // 2)]),
        lambda c: Settings(c.name, c.rates.copy(), c.sizes.copy()),
        (IN_MODULE,),  # it can't be hashed, so it can't be an argument
    ),
    "frozen dataclass": Kind(
        lambda size: Frozen("name", 0.5, tuple(range(size))),
        lambda c: Frozen(c.name, c.rate, (*[*c.sizes],)),
    ),
    "dict of enums, dtypes, functions": Kind(_choices, dict),
}


def _row(statement: str, make_fun: Callable[[], Callable[..., Any]], **names: Any) -> Row:
    """Return a row for a statement that calls `f`, which is a new function in each row."""
    target = statement.partition(" = ")[0].rpartition(": ")[2]

    def build(filter_jit: FilterJit) -> Case:
        given = {"f": filter_jit(make_fun()), **names}
        return Case(statement, lambda: given, (target,))

    return build


def _scaled() -> Callable[..., Any]:
    return lambda model, x: model.weight * x


def _stepped() -> Callable[..., Any]:
    return lambda model, x: Configured(model.weight * x, model.config)


def _ignored() -> Callable[..., Any]:
    return lambda argument, x: x + 1


def same(kind: Kind, place: str, size: int) -> Row:
    """Pass the same configuration in each call."""
    config = kind.make(size)
    if place == IN_MODULE:
        model = Configured(jnp.ones(3), config)
        return _row("out = f(model, x)", _scaled, model=model, x=jnp.ones(3))
    return passed(config)


def recreated(kind: Kind, place: str, size: int) -> Row:
    """Pass an equal copy of the configuration in each call."""
    names = {"copy": kind.copy, "config": kind.make(size), "x": jnp.ones(3)}
    if place == IN_MODULE:
        names |= {"made": unflattened, "weight": jnp.ones(3)}
        return _row("out = f(made(weight, copy(config)), x)", _scaled, **names)
    return _row("out = f(copy(config), x)", _ignored, **names)


def in_and_out(size: int) -> Row:
    """Pass a Module with a static dict that the call before returned."""
    model = Configured(jnp.ones(3), _rates(size))
    return _row("model = f(model, x)", _stepped, model=model, x=jnp.ones(3))


def passed(tree: Any) -> Row:
    """Pass an argument that the function doesn't use."""
    return _row("out = f(tree, x)", _ignored, tree=tree, x=jnp.ones(3))


def in_turn(values: list[Any], make_fun: Callable[[], Callable[..., Any]], x: jax.Array) -> Row:
    """Pass arguments of different structures in turn."""
    return _row("for value in values: out = f(value, x)", make_fun, values=values, x=x)


def models_in_turn(count: int) -> Row:
    """Pass models of different widths in turn."""
    models = [_mlp(width) for width in range(1, count + 1)]
    return in_turn(models, lambda: lambda model, x: batched(model, x), jnp.ones((3, 2)))


def _mlp(width: int) -> Any:
    """Return an MLP whose weights are ones. Random weights would be compiled for each width."""
    model = eqx.filter_eval_shape(eqx.nn.MLP, 2, 2, width, 1, key=jr.key(0))
    is_array = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)  # noqa: E731
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.ones(leaf.shape, leaf.dtype)) if is_array(leaf) else leaf, model
    )


def modules_in_turn(count: int) -> Row:
    """Pass Modules that differ in a static number in turn."""
    return in_turn([Configured(jnp.ones(3), n) for n in range(count)], _scaled, jnp.ones(3))


def numbers_in_turn(count: int) -> Row:
    """Pass different static numbers in turn."""
    return in_turn([*range(count)], lambda: lambda n, x: x + n, jnp.ones(3))


def late_in_turn(large: Any, count: int) -> Row:
    """Pass pairs in turn that differ only in their last leaf."""
    return in_turn([(large, n) for n in range(count)], _ignored, jnp.ones(3))


def early_in_turn(large: Any, count: int) -> Row:
    """Pass pairs in turn that differ only in their first leaf."""
    return in_turn([(n, large) for n in range(count)], _ignored, jnp.ones(3))


def _ordered(size: int) -> Any:
    return collections.OrderedDict((f"name {i}", jnp.ones(3)) for i in range(size))


def _deep(depth: int, around: Callable[[Any], Any]) -> Any:
    tree: Any = jnp.ones(())
    for _ in range(depth):
        tree = around(tree)
    return tree


def _chain(rest: Any) -> Chain:
    return Chain(jnp.ones(()), rest if isinstance(rest, Chain) else None)


def _in_dict(tree: Any) -> dict[str, Any]:
    return {"inner": tree, "b": 1}


def layers(configs: list[Any]) -> Row:
    """Pass a list of Modules, each with a static value."""
    return passed([Configured(jnp.ones(()), config) for config in configs])


def bound(size: int) -> Row:
    """Call a wrapped partial that holds a model with a static dict."""
    model = Configured(jnp.ones(3), _rates(size))
    return _row("out = f(x)", lambda: eqx.Partial(_scaled(), model), x=jnp.ones(3))


def _nnx(layers: int) -> Any:
    """Return the two parts of a Flax NNX model: a `GraphDef`, which is static, and a `State`."""
    from flax import nnx

    return nnx.split(nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(layers)]))


def graphdef(layers: int) -> Row:
    """Pass the static part of a Flax NNX model."""
    return passed(_nnx(layers)[0])


def nnx_state(leaves: int) -> Row:
    """Pass the `State` of a Flax NNX model, which has two arrays in each layer."""
    return passed(_nnx(leaves // 2)[1])


SIZES, IN_TURN, DEPTHS = (5, 50, 1_000), (2, 8, 24, 64), (10, 100)

# Series of rows that differ only in size: a function that returns the row of a size, and the sizes.
_SERIES: Mapping[str, tuple[Callable[[int], Row], tuple[int, ...]]] = {
    **{
        f"{name} {place}{suffix}": (functools.partial(row, kind, place), SIZES)
        for name, kind in KINDS.items()
        for place in kind.places
        for suffix, row in (("", same), (", recreated", recreated))
    },
    "dict in a Module, in and out": (in_and_out, SIZES),
    "MLPs in turn": (models_in_turn, IN_TURN),
    "Modules in turn": (modules_in_turn, IN_TURN),
    "static numbers in turn": (numbers_in_turn, IN_TURN),
    "an OrderedDict of 50 and a number in turn": (lambda n: late_in_turn(_ordered(50), n), IN_TURN),
    "a number and an OrderedDict of 50 in turn": (
        lambda n: early_in_turn(_ordered(50), n),
        IN_TURN,
    ),
    "50 MLPs and a number in turn": (lambda n: late_in_turn([_mlp(4)] * 50, n), IN_TURN),
    "a number and 50 MLPs in turn": (lambda n: early_in_turn([_mlp(4)] * 50, n), IN_TURN),
    "layers of a flax GraphDef": (graphdef, (6, 12)),
    "leaves of a flax State": (nnx_state, (20, 200)),
    "depth of Modules": (lambda depth: passed(_deep(depth, _chain)), DEPTHS),
    "depth of lists": (lambda depth: passed(_deep(depth, lambda tree: [tree])), DEPTHS),
    "depth of dicts": (lambda depth: passed(_deep(depth, _in_dict)), DEPTHS),
}

#: A function that builds each row. Rows are built when they are timed, because some take seconds.
ROWS: Mapping[str, Callable[[], Row]] = {
    **{
        f"{series}: {size:,}": functools.partial(make, size)
        for series, (make, sizes) in _SERIES.items()
        for size in sizes
    },
    "one dict of 50 in 50 layers": lambda: layers([_rates(50)] * 50),
    "a dict of 20 in each of 50 layers": lambda: layers([_rates(20) for _ in range(50)]),
    "a bound model with a dict of 50": lambda: bound(50),
    "a string, recreated": lambda: _row(
        "out = f(' '.join(words), x)", _ignored, words=["a", "mode"], x=jnp.ones(3)
    ),
    "20 NumPy arrays": lambda: passed([np.ones(3) for _ in range(20)]),
    "a list of 10,000 arrays": lambda: passed([jnp.ones(())] * 10_000),
    "a model of 10,000 arrays": lambda: passed(tree_of(10_000)),
}
