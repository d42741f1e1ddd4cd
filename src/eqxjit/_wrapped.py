"""What all copies of one wrapper share: the function's static half, its parameters, its program."""

import functools
from collections.abc import Hashable
from typing import Any

from ._changeable import are_unchanged, changeable, is_frozen
from ._compat import MISSING
from ._errors import argument_error, not_callable
from ._options import Options
from ._partition import StaticHalf, partition
from ._program import Program, program_of


class WrappedFunction:
    """A function under `filter_jit`, without its arrays.

    - `fun`: the static half of the function.
    - `options`: how it is jitted.
    - `binding`: its parameters.
    - `program`: what is compiled for it.
    - `keeps_arrays`: whether its arrays stay, whatever is donated.
    - `attributes`: what a wrapper takes over from it, as with `functools.update_wrapper`.
    - `changeable`: the static objects in it that its user can change in place.
    """

    __slots__ = (
        "attributes",
        "binding",
        "changeable",
        "fun",
        "keeps_arrays",
        "options",
        "program",
    )

    def __init__(
        self, fun: Any, static: StaticHalf, options: Options, program: Program | None = None
    ):
        self.fun = static
        self.options = options
        self.keeps_arrays = program is not None
        self.program = program or program_of(fun, static.key, options)
        self.binding = self.program.binding
        self.attributes = {
            attribute: getattr(fun, attribute)
            for attribute in functools.WRAPPER_ASSIGNMENTS
            # Equinox's unflatten fills in its own mark where a Module has no such attribute.
            if getattr(fun, attribute, MISSING) is not MISSING
        }
        # What is frozen holds copies of its own.
        found = [] if self.keeps_arrays else changeable(static.treedef, static.leaves)
        self.changeable = [pair for pair in found if not is_frozen(pair.value)]

    def is_intact(self) -> bool:
        """Whether the static objects in the function are as they were when it was wrapped."""
        return are_unchanged(self.changeable)

    @property
    def _key(self) -> Hashable:
        return (self.options.key, self.fun.key if self.is_intact() else self.fun.current_key)

    # Copies of a wrapper that JAX unflattens compare by this, as metadata of a pytree node.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, WrappedFunction) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def wrap_function(fun: Any, options: Options) -> tuple[WrappedFunction, tuple[Any, ...]]:
    """A function as `filter_jit` sees it: its static half, and its arrays.

    **Raises:**

    - `TypeError`, if it can't be called.
    - `ValueError`, if it holds a static value that can't be hashed or compared.
    """
    if not callable(fun):
        raise not_callable(fun)
    try:
        leaves, static = partition(fun)
        return WrappedFunction(fun, static, options), tuple(leaves)
    except Exception as error:
        clearer = argument_error(error, [("fun", fun)])
        if clearer is not None:
            raise clearer from error
        raise
