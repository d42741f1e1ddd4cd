"""One structure of a function's calls: its jitted form, and what its traces returned."""

import dataclasses
import functools
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._compat import ArrayImpl, native, wrapped_by_tracer
from .._diagnostics import events
from .._diagnostics.description import ArrayPart, Description, describe
from .._diagnostics.trace import Trace
from .._spec.static_key import CONSTANTS
from .._spec.tree import Spec, arrays_of, count_arrays, split

# C reads the flags of an entry where they lie.
_Flags: type = object if native is None else native.Flags


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a wrapper, taken apart.

    - `args`, `kwargs`: the arguments, bound to the function's parameters.
    - `spec`, `arrays`, `statics`: those of `(args, kwargs)`, as `split` returns them.
    - `is_staged`: whether it is lowered rather than run.
    - `traces`: those that JAX has made in it.
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
    entry: "Entry" = dataclasses.field(init=False)

    @functools.cached_property
    def description(self) -> Description:
        """The parts of the arguments by their paths, as of before the function changed any."""
        return describe(self)

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


class OutKey:
    """The key of an `Out` in what a traced function returns, which JAX keeps as long as that.

    It holds nothing of the user's. `repr` goes into the program's text, which is cached.
    """

    __slots__ = ("__weakref__",)

    def __repr__(self) -> str:
        return "out"


#: What a traced function returns to JAX: its arrays, or the only one as it is, which saves a list.
#: Those of a trace whose `Out` isn't the entry's first come under the key of that.
Output = jax.Array | list[Any] | dict[OutKey, list[Any]]


class Entry(_Flags):
    """One structure of a function's calls.

    - `jitted`: `jax.jit` of a function of flat arrays.
    - `n_arrays`: how many arrays there are; `n_fun`: the last are those of the function.
    - `out`: what its first trace returned; `outs`: what others did, by the key of each.
    - `pending`: whether a program was traced or compiled that isn't finished yet: a call then goes
        through `finish_trace`.
    - `unclassified`: whether the next call with arrays does so, to find out if its program can
        raise; calls that an eager `vmap` or `grad` transforms can't.
    - `must_wait`: whether calls wait, because a program can raise.
    - `why_dropped`: why it was dropped, if there is a reason; its traces share the list.
    """

    def __init__(self, spec: Spec, function: Any, n_fun: int):
        options = function.options
        self.spec = spec
        self.name = function.signature.name
        self.n_fun = n_fun
        self.n_arrays = count_arrays(spec) + n_fun
        #: Nothing of these goes to JAX, which keeps the structure of outputs for good.
        self.out: Out
        self.outs: weakref.WeakKeyDictionary[OutKey, Out] = weakref.WeakKeyDictionary()
        self.must_wait = options.block
        self.hides_donation_warning = options.donate in ("all", "all-except-first")
        self.why_dropped: list[str] = []
        #: Weak references to static objects, which tell the table when those die.
        self.watches: list[weakref.ref[Any]] = []
        #: The greater, the later.
        self.last_used = 0
        #: The latest trace, which may be compiled in a later call.
        self.latest_trace: Trace | None = None
        #: How many traces aren't finished, in all threads.
        self._n_unfinished = 0
        self._lock = function.table.lock
        self.pending = self.unclassified = False
        #: Whether JAX has compiled a program again, without a trace.
        self.is_recompiled = False

    def begin(self, trace: Trace, call: Call) -> None:
        """Have all calls go through `finish_trace` until that of the trace has."""
        with self._lock:
            call.traces.append(trace)
            self._n_unfinished += 1
            self.pending = True

    def end(self, call: Call) -> Trace | None:
        """Return the trace that was made in a call, which is finished now; None if none was."""
        with self._lock:
            traces, call.traces = call.traces, []
            self._n_unfinished -= len(traces)
        if not traces:
            return None
        events.finish(self)
        if traces[-1]._is_made:
            # One that became part of an outer program has no program yet.
            self.unclassified = True
            self.latest_trace = traces[-1]
        return traces[-1]

    def classify(self, can_raise: bool | None) -> None:
        """Note whether a program can raise; None if there was none to be read."""
        with self._lock:
            if can_raise is not None:
                self.must_wait = self.must_wait or can_raise
                self.unclassified = False
            self.pending = self._n_unfinished > 0

    def wait_for(self, output: Output) -> None:
        """Wait until a program has run that can raise, so that its error is raised here."""
        pending: list[Any] = list(arrays_of(output))
        if {*map(type, pending)} == {ArrayImpl}:
            # All are there once one is.
            pending[0].block_until_ready()
            return
        while pending:
            array = pending.pop()
            if isinstance(array, Tracer):
                # Under an eager `vmap` or `grad` the program has run all the same, and may have
                # passed inputs on, which say nothing.
                pending.extend(wrapped_by_tracer(array))
            elif isinstance(array, jax.Array):
                array.block_until_ready()

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
        if new.is_as(self.__dict__.setdefault("out", new)):
            return arrays[0] if len(arrays) == 1 else arrays
        key = OutKey()
        self.outs[key] = new
        return {key: arrays}

    def out_of(self, output: Output) -> Out:
        return self.outs[next(iter(output))] if type(output) is dict else self.out
