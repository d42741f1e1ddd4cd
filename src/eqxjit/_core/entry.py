"""One structure of a function's calls: its jitted form, and what its traces returned."""

import dataclasses
import functools
import itertools
import weakref
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._compat import native
from .._diagnostics import events
from .._diagnostics.description import ArrayPart, Description, describe
from .._diagnostics.trace import Trace
from .._spec.static_key import CONSTANTS
from .._spec.tree import Spec, count_arrays, split

# C reads the flags of a program where they lie.
_Flags: type = object if native is None else native.Flags
_numbers = itertools.count()


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a wrapper, taken apart.

    - `args`, `kwargs`: the arguments, bound to the function's parameters.
    - `spec`, `arrays`, `statics`: those of `(args, kwargs)`, as `split` returns them.
    - `is_staged`: whether it is lowered rather than run.
    - `traces`: those that JAX has made in it.
    - `is_recompiled`: whether JAX has compiled a program again in it, without a trace.
    """

    # A `Function` of `table.py`: it is without its arrays.
    function: Any
    fun_arrays: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Spec
    arrays: list[Any]
    statics: list[Any]
    is_staged: bool = False
    traces: list[Trace] = dataclasses.field(default_factory=list)
    is_recompiled: bool = False
    entry: "Entry" = dataclasses.field(init=False)

    @functools.cached_property
    def description(self) -> Description:
        """The parts of the arguments by their paths, as of before the function changed any."""
        return describe(self)

    def end_traces(self) -> Trace | None:
        """Return the last trace that was made in this call; None if none was."""
        traces, self.traces = self.traces, []
        if not traces:
            return None
        events.finish(self.entry)
        if traces[-1]._is_made:
            self.entry.latest_trace = traces[-1]
        return traces[-1]

    @property
    def array_paths(self) -> tuple[str, ...] | None:
        """The path of each array; None if the call can't be described."""
        paths = [row.path for row in self.description if isinstance(row.part, ArrayPart)]
        if self.function.keeps_arrays:
            # They are no part of the description, because they are always the same.
            paths += ["fun"] * len(self.fun_arrays)
        return tuple(paths) if len(paths) == len(self.flat) else None

    @property
    def flat(self) -> list[Any]:
        """All arrays, those of the arguments first."""
        return [*self.arrays, *self.fun_arrays]

    @property
    def all_statics(self) -> list[Any]:
        """The function's static objects, then those of the arguments: what slots number."""
        return [*self.function.statics, *self.statics]


class Out(NamedTuple):
    """The output of a trace, without its arrays.

    - `spec`: as of `split`.
    - `statics`: its static objects, None for each that came in.
    - `slots`: for each, the number of the static object that came in; -1 for one of the trace.
    """

    spec: Spec
    statics: tuple[Any, ...]
    slots: tuple[int, ...]

    def is_as(self, other: "Out") -> bool:
        """Return whether the other may stand for it."""
        if self.slots != other.slots or self.spec != other.spec:
            return False
        pairs = zip(self.statics, other.statics, strict=True)
        # Equal constants serve, because specs tell them apart by their types.
        return all(a is b or type(a) in CONSTANTS for a, b in pairs)


class Program(_Flags):
    """What one trace has made.

    The traced function returns it to JAX as the key of its arrays, so each output comes with the
    program that made it. JAX keeps it as long as that program. It holds nothing of the user's.

    - `number`: of its `Out` in the entry.
    - `unread`: whether it isn't known yet if the program can raise.
    - `must_wait`: whether calls wait, because the program can raise.
    """

    __slots__ = ("__weakref__",) if native else ("__weakref__", "must_wait", "number", "unread")

    def __repr__(self) -> str:
        # It goes into the program's text, which JAX caches.
        return "program"


#: What a traced function returns to JAX.
Output = dict[Program, list[Any]]


class Entry:
    """One structure of a function's calls.

    - `jitted`: `jax.jit` of a function of flat arrays.
    - `n_arrays`: how many arrays there are; `n_fun`: the last are those of the function.
    - `out`: what its first trace returned.
    - `outs`: what each program returns, by its number, as long as JAX keeps the program.
    - `why_dropped`: why it was dropped, if there is a reason; its traces share the list.
    """

    def __init__(self, spec: Spec, function: Any, n_fun: int):
        options = function.options
        self.spec = spec
        self.name = function.signature.name
        self.n_fun = n_fun
        self.n_arrays = count_arrays(spec) + n_fun
        self.out: Out
        #: Each with the weak reference that removes it.
        self.outs: dict[int, tuple[Out, Any]] = {}
        self.block = options.block
        self.hides_donation_warning = options.donate in ("all", "all-except-first")
        self.why_dropped: list[str] = []
        #: Weak references to static objects, which tell the table when those die.
        self.watches: list[weakref.ref[Any]] = []
        #: The greater, the later.
        self.last_used = 0
        #: The latest trace, which may be compiled in a later call.
        self.latest_trace: Trace | None = None

    def describe(self, out: Any, statics: list[Any]) -> Output:
        """Return the arrays of what the user's function returned for these; remember the rest."""
        spec, arrays, found = split(out, is_input=False)
        places: dict[int, list[int]] = {}
        for place, value in enumerate(statics):
            if type(value) not in CONSTANTS:
                places.setdefault(id(value), []).append(place)
        slots = []
        for value in found:
            # In another call equal objects may be in the places of one: each goes where it was, as
            # in a model that is passed and returned.
            here = places.get(id(value), [-1])
            slots.append(here.pop(0) if len(here) > 1 else here[0])
        new_ones = [v if slot < 0 else None for v, slot in zip(found, slots, strict=True)]
        new = Out(spec, tuple(new_ones), tuple(slots))
        # A program without an output could not be waited for.
        arrays = arrays or [jnp.zeros((), bool)]
        # Without a lock, because comparing specs may run a user's `==`; another thread may be
        # first.
        first = self.__dict__.setdefault("out", new)
        program = Program()
        program.number, program.unread, program.must_wait = next(_numbers), True, self.block
        outs, number = self.outs, program.number
        ref = weakref.ref(program, lambda _: outs.pop(number, None))
        outs[number] = (first if new.is_as(first) else new), ref
        return {program: arrays}
