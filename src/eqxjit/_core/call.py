"""One call of a wrapper, taken apart."""

import dataclasses
import functools
from typing import Any

from .._diagnostics.description import ArrayPart, Description
from .._spec.tree import Spec
from .entry import Entry
from .program import Program


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a wrapper, taken apart.

    - `function`: the `Function` of `table.py` that is called, without its arrays.
    - `fun_arrays`: the arrays of that function.
    - `args`, `kwargs`: the arguments, bound to the function's parameters.
    - `spec`, `arrays`, `statics`: what `split` returns for `(args, kwargs)`.
    - `entry`: the entry of the spec.
    - `is_staged`: whether the function is lowered rather than run.
    - `trace`: the diagnostics' record of the latest trace that JAX has made in this call; `None` if
        JAX has made none.
    - `is_traced`: whether the user's function returned in that trace.
    - `program`: the program that ran, or that was lowered; `None` until that is known.
    - `jaxpr`, `lowered`: that program as JAX traced and lowered it, if it was read in this call.
    """

    function: Any
    fun_arrays: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Spec
    arrays: list[Any]
    statics: list[Any]
    entry: Entry
    is_staged: bool = False
    trace: Any = None
    is_traced: bool = False
    program: Program | None = None
    jaxpr: Any = None
    lowered: Any = None

    @functools.cached_property
    def description(self) -> Description:
        """The parts of the arguments by path. Made before the user's function can change any."""
        return self.function.table.history.describe(self)

    @property
    def array_paths(self) -> tuple[str, ...] | None:
        """The path of each array; `None` if the call can't be described."""
        paths = [row.path for row in self.description if isinstance(row.part, ArrayPart)]
        if self.function.keeps_arrays:
            # The description leaves these arrays out, because they are the same in every call.
            paths += ["fun"] * len(self.fun_arrays)
        return tuple(paths) if len(paths) == len(self.flat) else None

    @property
    def flat(self) -> list[Any]:
        """All arrays in JAX's order: first those of the arguments, then those of the function."""
        return [*self.arrays, *self.fun_arrays]

    @property
    def all_statics(self) -> list[Any]:
        """All static objects: first those of the function, then those of the arguments.

        The slots of an `Out` are indices into this list.
        """
        return [*self.function.statics, *self.statics]
