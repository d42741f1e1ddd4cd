"""The output of a trace, without its arrays."""

from types import MethodType
from typing import Any

import jax
from jax.tree_util import tree_unflatten

from .._compat import PyTreeDef
from .given import Given, StaticOutput, are_equal, is_told_by_key
from .mutation import mutable_among
from .partition import DYNAMIC

#: What a traced function returns to JAX: its arrays, or its only one as it is, which saves a list.
#: Those of a trace whose output differs from the first one's in anything but arrays come under the
#: index of its `OutSpec` among its entry's.
Output = jax.Array | list[Any] | dict[int, list[Any]]


def output_of(index: int, arrays: list[Any]) -> Output:
    """Return the arrays of a trace as its traced function returns them."""
    if index:
        return {index: arrays}
    return arrays[0] if len(arrays) == 1 else arrays


def index_of(output: Output) -> int:
    """Return the index of an output's `OutSpec` among those of its entry."""
    return next(iter(output)) if type(output) is dict else 0


def arrays_of(output: Output) -> list[Any]:
    """Return the arrays of an output."""
    if type(output) is dict:
        return next(iter(output.values()))
    return output if type(output) is list else [output]


def with_arrays(static: tuple[Any, ...], arrays: list[Any]) -> list[Any]:
    """Return leaves with an array in the place of each `DYNAMIC`."""
    remaining = iter(arrays)
    return [next(remaining) if leaf is DYNAMIC else leaf for leaf in static]


class OutSpec(StaticOutput):
    """The output of a trace, without its arrays.

    - `mutable`: the static objects in it that can be changed in place, and didn't come in.
    """

    __slots__ = ("mutable",)

    def __init__(self, treedef: PyTreeDef, leaves: tuple[Any, ...], given: Given):
        super().__init__(treedef, leaves, given)
        # A method changes with its object, which compares by identity.
        found = mutable_among(self.own)
        self.mutable = [pair for pair in found if type(pair.value) is not MethodType]

    def rebuild(self, arrays: list[Any], given: Given | None) -> Any:
        """Return the output of a call. (A marker behind the last array isn't looked at.)"""
        static, treedef = self.resolve(given)
        return tree_unflatten(treedef, with_arrays(static, arrays))

    def describes(self, treedef: PyTreeDef, leaves: tuple[Any, ...], given: Given) -> bool:
        """Return whether another trace's output differs in its arrays alone."""
        try:
            own, own_treedef = self.resolve(given)
            if len(leaves) != len(own):
                return False
            if not all(ours is theirs for ours, theirs in zip(own, leaves, strict=True)):
                return False
            return are_equal(own_treedef, treedef, given, is_told_by_key)
        except Exception:
            # Metadata that can't be compared belongs to the one trace that made it.
            return False
