"""Calls in flight: which call JAX is making of a jitted function, found while it traces.

A static object that a trace compiles in is that of the call in flight, because an equal one of an
earlier caller may have changed since. With the native back end C keeps a stack of these calls for
each thread. Without it they are found by the frames that make them: an interrupt leaves nothing
behind in either.
"""

import dataclasses
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from .._compat import native
from .._fast.writer import CALLER_VARIABLE, ENTRY_VARIABLE
from .._spec.tree import Spec

if TYPE_CHECKING:
    from .entry import Entry
    from .function import Function


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a wrapper, taken apart.

    - `function`: the function, without its arrays; `fun_arrays`: its arrays.
    - `args`, `kwargs`: the arguments, bound to the function's parameters.
    - `spec`, `arrays`, `statics`: those of `(args, kwargs)`, as `split` returns them.
    - `entry`: the entry that serves it, once it is looked up.
    - `is_staged`: whether it is lowered rather than run.
    """

    function: "Function"
    fun_arrays: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Spec
    arrays: list[Any]
    statics: list[Any]
    entry: "Entry" = dataclasses.field(init=False)
    is_staged: bool = False

    @property
    def flat(self) -> list[Any]:
        """All arrays, in JAX's order."""
        # Upstream passes the first argument, the function, and the rest.
        n = self.entry.n_first
        return [*self.arrays[:n], *self.fun_arrays, *self.arrays[n:]]

    @property
    def all_statics(self) -> list[Any]:
        """The function's static objects, then those of the arguments: what slots number."""
        return [*self.function.statics, *self.statics]


if native is not None:
    make, in_flight = native.run, native.in_flight

else:

    def make(call: Call, action: Any, arrays: list[Any]) -> Any:
        """Call a jitted function, or its `lower`, with the arrays of a call in flight."""
        __tracebackhide__ = True
        return action(*arrays)

    # Not a stack of ours: a signal may come between a push and its pop.
    def in_flight(entry: "Entry | None" = None) -> Call | None:
        """Return this thread's innermost call in flight, of an entry or of any; or None."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found = frame.f_globals.get(ENTRY_VARIABLE)
            if frame.f_code is _MAKE:
                call = frame.f_locals["call"]
                if entry in (None, call.entry):
                    return call
            # The module that defines the variable's name isn't generated.
            elif CALLER_VARIABLE in frame.f_code.co_freevars and found and entry in (None, found):
                variables = frame.f_locals
                caller = variables[CALLER_VARIABLE]
                args, kwargs = caller.function.signature.arguments_among(variables)
                return caller.call_of(found, *args, **kwargs)
            frame = frame.f_back
        return None

    _MAKE = make.__code__
