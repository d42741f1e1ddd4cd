"""The tree workloads by hand, without a single check: what Python itself makes of a tree's leaves.

Takes the arrays out of the tree of `networks.tree_of`, whose shape it knows, and puts them into a
new one, by the fastest ways that there are; a tree of any other shape would give a wrong result.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import equinox as eqx
import jax

from ..harness.measure import Case
from .networks import Affine

_PER_CONTAINER = 10  # children, or at the bottom arrays

# The C-level getter: `module.__dict__` runs Python.
_fields_of: Callable[[Any], dict[str, Any]] = vars(eqx.Module)["__dict__"].__get__


class _Fields(Hashable):
    """An object whose fields are stored at no cost, and which is then made a Module.

    Of the same base as `eqx.Module`: Python changes the class of an object only among such.
    """

    weight: jax.Array
    bias: jax.Array
    name: str
    __hash__ = object.__hash__


def unchecked(fun: Callable[[Any], Any], tree: Any, *, rebuild: bool) -> Case:
    """`fun(tree)`, with the arrays passed one by one; its output is such a tree, or one array."""
    arrays, treedef = jax.tree.flatten(eqx.filter(tree, eqx.is_array))
    static = eqx.filter(tree, eqx.is_array, inverse=True)
    levels = len(str(len(arrays))) - 1
    read, make = _reader(0, levels), _maker(0, levels)

    def on_arrays(*arrays: jax.Array) -> Any:
        out = fun(eqx.combine(jax.tree.unflatten(treedef, arrays), static))
        return jax.tree.leaves(eqx.filter(out, eqx.is_array))

    jitted = jax.jit(on_arrays, keep_unused=True)

    def call(tree: Any) -> Any:
        arrays: list[jax.Array] = []
        read(tree, arrays)
        out = jitted(*arrays)
        return make(out) if rebuild else out[0]

    return Case("out = f(tree)", lambda: {"f": call, "tree": tree})


def _reader(depth: int, levels: int) -> Callable[[Any, list[jax.Array]], None]:
    items: Callable[[Any], Iterable[Any]] = iter if depth % 2 else dict.values
    if levels > 1:
        read_child = _reader(depth + 1, levels - 1)

        def read(node: Any, arrays: list[jax.Array]) -> None:
            for child in items(node):
                read_child(child, arrays)
    else:

        def read(node: Any, arrays: list[jax.Array]) -> None:
            for module in items(node):
                fields = _fields_of(module)
                arrays.append(fields["weight"])
                arrays.append(fields["bias"])

    return read


def _maker(depth: int, levels: int) -> Callable[[list[jax.Array]], Any]:
    if levels > 1:
        make_child, size = _maker(depth + 1, levels - 1), _PER_CONTAINER ** (levels - 1)

        def make_children(arrays: list[jax.Array]) -> list[Any]:
            return [make_child(arrays[i : i + size]) for i in range(0, len(arrays), size)]
    else:
        name = f"level {depth + 1}"

        def make_children(arrays: list[jax.Array]) -> list[Any]:
            modules: list[Any] = []
            remaining = iter(arrays)
            for weight, bias in zip(remaining, remaining, strict=True):
                module: Any = _Fields()
                module.weight = weight
                module.bias = bias
                module.name = name
                module.__class__ = Affine
                modules.append(module)
            return modules

    if depth % 2:
        return make_children
    labels = [f"branch{i}" for i in range(_PER_CONTAINER)]
    return lambda arrays: dict(zip(labels, make_children(arrays), strict=False))
