"""Verifies a specialised call against JAX's registry, on the values at hand."""

import itertools
import types
from collections.abc import Callable
from typing import Any

from jax.tree_util import tree_flatten, tree_map

from .._compat import PyTreeDef
from .._trees.given import are_equal
from .._trees.out_spec import Output
from .build import Example
from .call_source import Links


def does_the_same(
    make: Callable[[Links], Callable[..., Any]],
    example: Example,
    expected: tuple[list[Any], PyTreeDef],
) -> bool:
    """Return whether a specialised call serves a call as it was served.

    It is called with the jitted function replaced: whether it passes on the very arrays that JAX's
    registry finds, and rebuilds the very output, which has the leaves and the structure `expected`.
    """
    passed: list[Any] = []

    def jitted(*arrays: Any) -> Output:
        passed.extend(arrays)
        # In a container of its own: what is called may change it.
        return tree_map(same, example.output)

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError

    def same(array: Any) -> Any:
        return array

    def ignore(_output: Output) -> None:
        pass

    links = Links(jitted, fail, fail, fail, fail, ignore, same, list, itertools.repeat(None))
    leaves, treedef = tree_flatten(make(links)(*example.args, **example.kwargs))
    expected_leaves, expected_treedef = expected
    return (
        identical(passed, example.flat)
        and identical(leaves, expected_leaves)
        and are_equal(treedef, expected_treedef, example.given)
    )


def identical(ours: list[Any], theirs: list[Any]) -> bool:
    """Return whether two lists hold the very same objects, methods of the same ones included."""
    return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))


def _is_same(ours: Any, theirs: Any) -> bool:
    # A method is made anew each time that it is read; its `==` compares objects by identity.
    return ours is theirs or (type(ours) is types.MethodType and ours == theirs)
