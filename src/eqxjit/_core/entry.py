"""One structure of a function's calls: its jitted form, and what its traces returned."""

import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._compat import ArrayImpl, native, wrapped_by_tracer
from .._fast.signature import Signature
from .._interruptions import Weak
from .._spec.static import CONSTANTS
from .._spec.tree import Spec, count_arrays, split
from .options import Options

# C reads the flags of an entry where they lie.
_Flags: type = object if native is None else native.Flags


class Out(NamedTuple):
    """The output of a trace, without its arrays.

    - `spec`: as of `split`.
    - `statics`: its static objects, None for each that came in.
    - `slots`: for each, the number of the static object that came in; -1 for one of the trace.
    """

    spec: Spec
    statics: tuple[Any, ...]
    slots: tuple[int, ...]


#: What a traced function returns to JAX: its arrays, or the only one as it is, which saves a list.
#: Those of a trace whose `Out` isn't the entry's first come under the index of that.
Output = jax.Array | list[Any] | dict[int, list[Any]]


def arrays_of(output: Output) -> list[Any]:
    if type(output) is dict:
        return next(iter(output.values()))
    return output if type(output) is list else [output]


class Entry(_Flags):
    """One structure of a function's calls.

    - `spec`: that of the arguments, under which the table holds it.
    - `jitted`: `jax.jit` of a function of flat arrays.
    - `n_first`, `n_fun`, `n_arrays`: how many arrays come before the function's, how many these
        are, and how many there are in all.
    - `outs`: what its traces returned.
    - `pending`: whether a program was traced or compiled that isn't settled yet: a call then goes
        through `settle`.
    - `blocks`: whether calls wait, because a program can raise.
    - `invalidation_reasons`: why the table dropped it; its traces share the list.
    """

    def __init__(
        self, spec: Spec, signature: Signature, options: Options, n_first: int, n_fun: int
    ):
        self.spec = spec
        self.name = signature.name
        self.label = signature.label
        self.n_first = n_first
        self.n_fun = n_fun
        self.n_arrays = count_arrays(spec) + n_fun
        self.pending = False
        #: Nothing of it goes to JAX, which keeps the structure of outputs for good.
        self.outs: list[Out] = []
        self.blocks = options.block
        self.hides_donation_warning = options.donate in ("all", "all-except-first")
        self.invalidation_reasons: list[str] = []
        #: Weak references to static objects, which tell the table when those die.
        self.watches: list[weakref.ref[Any]] = []
        #: The greater, the later.
        self.last_used = 0
        self.was_traced = False
        #: The hook's record of the latest trace, which may be compiled in a later call.
        self.latest_record: Any = None
        #: Traces that aren't settled. An interrupt may keep one from it, but not alive.
        self.traces: Weak[Any] = Weak()
        #: Whether the next call is to find out if a program can raise.
        self.unclassified = False

    def with_program(self, compiled: Any, blocks: bool) -> "Entry":
        """Return the same for a program compiled ahead of time: nothing of it is pending."""
        entry = Entry.__new__(Entry)
        entry.__dict__.update(self.__dict__)
        entry.jitted, entry.pending, entry.blocks = compiled, False, blocks
        return entry

    def end(self, trace: Any, is_classified: bool) -> None:
        """Settle a trace, or a call without one; `is_classified` says that its program was read."""
        if trace is not None:
            self.traces.discard(trace)
            # One that became part of an outer program has no program yet.
            self.unclassified = True
            self.latest_record = trace.record
        if is_classified:
            self.unclassified = False
        self.pending = self.unclassified or len(self.traces) > 0

    @staticmethod
    def wait_for(output: Output) -> None:
        """Wait until a program has run, so that its error is raised here."""
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
        # Constants are left out, because an equal one may come in at many places.
        slots_by_id = {id(v): i for i, v in enumerate(statics) if type(v) not in CONSTANTS}
        slots = tuple([slots_by_id.get(id(value), -1) for value in found])
        new_ones = tuple([v if i < 0 else None for v, i in zip(found, slots, strict=True)])
        new = Out(spec, new_ones, slots)
        index = self._index_of(new)
        # A program without an output could not be waited for.
        arrays = arrays or [jnp.zeros((), bool)]
        if index:
            return {index: arrays}
        return arrays[0] if len(arrays) == 1 else arrays

    def _index_of(self, new: Out) -> int:
        for index, old in enumerate(self.outs):
            if old.slots == new.slots and old.spec == new.spec:
                statics = zip(old.statics, new.statics, strict=True)
                # Equal constants serve, because specs tell them apart by their types.
                if all(a is b or type(a) in CONSTANTS for a, b in statics):
                    return index
        self.outs.append(new)
        # Another thread may have appended one, too. No generator, as in `local_of_class`.
        [index] = [index for index, out in enumerate(self.outs) if out is new]
        return index
