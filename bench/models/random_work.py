"""What `bench soak` does at random: trees, changes made to them in place, and functions of them.

All arrays hold small integers, so that sums and gradients are exact whatever the order of adding,
and results can be compared for equality.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxjit

from ..harness.competitors import passed

# Few entries a function, so that the soak goes through evictions and its memory has a bound.
filter_jit = partial(eqxjit.filter_jit, maxsize=32)

# Many are equal but for their type or sign: a stale program would show.
STATICS: tuple[Any, ...] = (
    *(0, 1, True, False, 1.0, 0.0, -0.0, float("nan"), "relu", "", b"", 1j),
    *(jax.nn.relu, jax.nn.tanh, jnp.float32, range(2), frozenset({1}), frozenset({True})),
)
BAD = "bad"  # the static value that `choosy` refuses
SHAPES = ((), (1,), (3,), (2, 3))
DTYPES = (np.float32, np.int32)


class Pair(eqx.Module):
    """Two subtrees and a static label."""

    first: Any
    second: Any
    label: Any = eqx.field(static=True)


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


class Net(eqx.Module):
    """A Module to call, to bind, and with a decorated method."""

    tree: Any

    def __call__(self, x: Any) -> Any:
        """Uses both what it holds and what it is given."""
        return {"held": bumped(self.tree), "sum": total(self.tree) + total(x)}

    @eqxjit.filter_jit(maxsize=32)
    def step(self, x: Any) -> Any:
        """The same, decorated."""
        return self(x)


def random_array(rng: random.Random) -> Any:
    """A JAX array, NumPy array or NumPy scalar of small integers."""
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    values = np.asarray(rng.choices(range(-4, 6), k=int(np.prod(shape))), dtype).reshape(shape)
    return rng.choice((jnp.asarray, jnp.asarray, np.asarray, lambda array: array.flat[0]))(values)


def random_leaf(rng: random.Random) -> Any:
    """An array, a static value or None."""
    drawn = rng.random()
    if drawn < 0.6:
        return random_array(rng)
    if drawn < 0.95:
        return rng.choice(STATICS)
    return BAD if drawn < 0.96 else None


def random_tree(rng: random.Random, depth: int = 3) -> Any:
    """Containers of containers of leaves."""
    if depth == 0 or rng.random() < 0.15:
        return random_leaf(rng)
    children = [random_tree(rng, depth - 1) for _ in range(rng.randint(2, 4))]
    names = [f"key{i}" for i in range(len(children))]
    makers: tuple[Callable[[], Any], ...] = (
        lambda: children,
        lambda: tuple(children),
        lambda: dict(zip(names, children, strict=True)),
        lambda: OrderedDict(zip(reversed(names), children, strict=True)),
        lambda: Point(*children[:2]),
        lambda: Pair(*children[:2], label=rng.choice(STATICS)),
        lambda: Pair(*children[:2], label=rng.choice(STATICS)),
    )
    return rng.choice(makers)()


def mutate(tree: Any, rng: random.Random) -> None:
    """Change something in place, somewhere in the tree; Modules by `object.__setattr__`."""
    nodes = [node for node in _nodes(tree) if isinstance(node, (list, dict, Pair))]
    if not nodes:
        return
    node = rng.choice(nodes)
    if isinstance(node, list):
        node[rng.randrange(len(node))] = random_leaf(rng)
    elif isinstance(node, dict):
        node[rng.choice(list(node))] = random_leaf(rng)
    elif rng.random() < 0.5:
        object.__setattr__(node, "label", rng.choice(STATICS))
    else:
        object.__setattr__(node, rng.choice(("first", "second")), random_leaf(rng))


def refill(tree: Any, rng: random.Random) -> None:
    """Overwrite the NumPy arrays in place."""
    for node in _nodes(tree):
        if isinstance(node, np.ndarray):
            node[...] = rng.randint(-4, 5)


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    children: Iterable[Any] = ()
    if isinstance(tree, Pair):
        children = (tree.first, tree.second)
    elif isinstance(tree, (list, tuple)):
        children = tree
    elif isinstance(tree, dict):
        children = tree.values()
    for child in children:
        yield from _nodes(child)


def total(tree: Any) -> jax.Array:
    """The sum of all elements of all arrays."""
    arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    return sum((jnp.sum(jnp.asarray(a, jnp.float32)) for a in arrays), start=jnp.zeros(()))


def bumped(tree: Any) -> Any:
    """One added to every array; the static values come back as they are."""
    return jax.tree.map(lambda leaf: leaf + 1 if eqx.is_array(leaf) else leaf, tree)


def described(tree: Any) -> Any:
    """A result that tells the static parts, with their types."""
    return {"sum": total(tree), "text": static_text(tree)}


def scaled(tree: Any, scale: Any = 2) -> Any:
    """Has a default; `scale` may be static or an array."""
    return [total(tree) * scale, (tree, static_text(scale))]


def checked(tree: Any) -> Any:
    """Raises while running where the sum is negative."""
    value = total(tree)
    return eqx.error_if(value, value < 0, "negative sum")


def choosy(tree: Any) -> Any:
    """Raises while tracing."""
    if any(isinstance(leaf, str) and leaf == BAD for leaf in jax.tree.leaves(tree)):
        raise ValueError("a bad static value")
    return total(tree)


def gradient(tree: Any) -> Any:
    """Gradients with respect to all floating arrays."""

    def loss(tree: Any) -> jax.Array:
        arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
        return sum((jnp.sum(array**2) for array in arrays), start=jnp.zeros(()))

    return eqx.filter_grad(loss)(tree)


def nested(bump: Callable[[Any], Any], tree: Any) -> Any:
    """Calls another function, several times."""
    return bump(tree), bump({"sum": total(tree)}), bump(bump(tree))


def static_text(tree: Any) -> str:
    """The structure and the static leaves, so that values of different types differ."""
    arrays, static = eqx.partition(tree, eqx.is_array)
    leaves = [
        f"{type(leaf).__name__} {getattr(leaf, '__name__', repr(leaf))}"
        for leaf in jax.tree.leaves(static)
    ]
    return f"{jax.tree.structure(arrays)} {leaves}"


@dataclass(frozen=True)
class Task:
    """A function to call, jitted and not."""

    name: str
    plain: Callable[..., Any]
    jitted: Callable[..., Any]
    arguments: Callable[[Any, random.Random], tuple[Any, ...]] = lambda tree, rng: (tree,)
    consumes: bool = False  # its arguments, by donation
    weight: float = 1.0
    clear_cache: Callable[[], object] = lambda: None

    def passed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments for one jitted call."""
        return passed(arguments, self.consumes)


def _task(fun: Callable[..., Any], *, consumes: bool = False, **other: Any) -> Task:
    jitted: Any = filter_jit(fun, donate="all" if consumes else "none")
    name = f"{fun.__name__}, donated" if consumes else fun.__name__
    return Task(name, fun, jitted, consumes=consumes, clear_cache=jitted.clear_cache, **other)


def _with_scale(tree: Any, rng: random.Random) -> tuple[Any, ...]:
    return rng.choice(((tree,), (tree, jnp.asarray(3)), (tree, rng.choice((1, True, 1.0, 2)))))


def _with_net(tree: Any, rng: random.Random) -> tuple[Any, ...]:
    return Net(tree), rng.choice((jnp.ones(()), np.ones(3, np.int32)))


_scaled, _bumped = filter_jit(scaled), filter_jit(bumped)

TASKS = (
    _task(bumped),
    _task(bumped, consumes=True),
    _task(described),
    _task(scaled, arguments=_with_scale),
    Task(
        "keywords",
        lambda tree, scale=2: scaled(tree, scale=scale),
        lambda tree, *scale: _scaled(tree=tree, **dict(zip(("scale",), scale, strict=False))),
        _with_scale,
    ),
    _task(checked),
    _task(choosy),
    _task(gradient),
    Task("nested", partial(nested, bumped), filter_jit(partial(nested, _bumped))),
    Task("method", lambda net, x: net(x), lambda net, x: net.step(x), _with_net),
    Task("bound", lambda net, x: net(x), lambda net, x: filter_jit(net)(x), _with_net),
    # A function of its own for each call: traced, compiled and dropped.
    Task("dropped", total, lambda tree: filter_jit(lambda tree: total(tree))(tree), weight=0.02),
)


@dataclass(frozen=True)
class Outcome:
    """What a call returned or raised."""

    value: Any = None
    error: Exception | None = None


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Make the call."""
    try:
        return Outcome(value=jax.block_until_ready(call()))
    except Exception as error:
        return Outcome(error=error)


def difference(expected: Outcome, got: Outcome) -> str | None:
    """How the outcomes differ, if they do."""
    if expected.error is not None or got.error is not None:
        same = type(expected.error) is type(got.error) and _message(expected) == _message(got)
        return None if same else f"expected {expected.error!r}, got {got.error!r}, {got.value!r}"
    texts = static_text(expected.value), static_text(got.value)
    if texts[0] != texts[1]:
        return f"expected the structure {texts[0]}, got {texts[1]}"
    arrays = (jax.tree.leaves(eqx.filter(o.value, eqx.is_array)) for o in (expected, got))
    for theirs, ours in zip(*arrays, strict=True):
        if not isinstance(ours, jax.Array):
            return f"expected a JAX array, got {type(ours)}"
        if theirs.dtype != ours.dtype or not np.array_equal(theirs, ours):
            return f"expected {theirs!r}, got {ours!r}"
    return None


def _message(outcome: Outcome) -> str:
    """The first line of an error, which holds its message; Equinox's go on with a stack."""
    return str(outcome.error).strip().partition("\n")[0]
