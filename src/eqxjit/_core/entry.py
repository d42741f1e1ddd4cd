"""One structure of a function's calls: its jitted form, and what its traces returned."""

import itertools
import threading
import time
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._compat import ArrayImpl, native, wrapped_by_tracer
from .._diagnostics import events
from .._diagnostics.trace import Trace
from .._fast.signature import Signature
from .._spec.static_key import CONSTANTS
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


class OutKey:
    """The key of an `Out` in what a traced function returns, which JAX keeps as long as that.

    It holds nothing of the user's. `repr` goes into the program's text, which is cached.
    """

    __slots__ = ("__weakref__", "index")

    def __init__(self, index: int):
        self.index = index

    def __repr__(self) -> str:
        return str(self.index)


#: What a traced function returns to JAX: its arrays, or the only one as it is, which saves a list.
#: Those of a trace whose `Out` isn't the entry's first come under the key of that.
Output = jax.Array | list[Any] | dict[OutKey, list[Any]]


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
    - `outs`: what its traces returned, by index.
    - `aliases`: pairs of numbers of static objects that were one where it was traced and returned:
        it serves no call where they aren't.
    - `pending`: whether a program was traced or compiled that isn't finished yet: a call then goes
        through `finish_trace`.
    - `unclassified`: whether the next call with arrays does so, to find out if its program can
        raise; calls that an eager `vmap` or `grad` transforms can't.
    - `must_wait`: whether calls wait, because a program can raise.
    - `invalidations`: when and why it was dropped; its traces share the list.
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
        self.outs: dict[int, Out] = {}
        #: Weakly, the keys of all but the first, which has none.
        self._out_keys: dict[int, weakref.ref[OutKey]] = {}
        self._out_indices = itertools.count()
        self.aliases: tuple[tuple[int, int], ...] = ()
        self.must_wait = options.block
        self.hides_donation_warning = options.donate in ("all", "all-except-first")
        self.invalidations: list[tuple[float, str]] = []
        #: Weak references to static objects, which tell the table when those die.
        self.watches: list[weakref.ref[Any]] = []
        #: The greater, the later.
        self.last_used = 0
        self.was_traced = False
        #: The latest trace, which may be compiled in a later call.
        self.latest_trace: Trace | None = None
        #: Traces that aren't finished.
        self.traces: list[Trace] = []
        self._lock = threading.RLock()
        self.unclassified = False
        #: Whether JAX has compiled a program again, without a trace.
        self.is_recompiled = False

    def with_program(self, compiled: Any, must_wait: bool) -> "Entry":
        """Return the same for a program compiled ahead of time: nothing of it is pending."""
        entry = Entry.__new__(Entry)
        entry.__dict__.update(self.__dict__)
        entry.jitted, entry.must_wait = compiled, must_wait
        entry.pending = entry.unclassified = False
        return entry

    def invalidate(self, reason: str) -> None:
        """Note why it serves no call any more."""
        self.invalidations.append((time.perf_counter(), reason))

    def begin(self, trace: Trace) -> None:
        """Have all calls go through `finish_trace` until that has been finished."""
        with self._lock:
            self.traces.append(trace)
            self.pending = True

    def end(self) -> Trace | None:
        """Return the trace that this thread has made, for the call that needed it; None if none."""
        thread = threading.get_ident()
        with self._lock:
            # A function that calls itself has others under way.
            ended = [t for t in self.traces if t._thread == thread and t._is_made is not None]
            for trace in ended:
                self.traces.remove(trace)
        if not ended:
            return None
        events.finish(self, ended[-1])
        if ended[-1]._is_made:
            # One that became part of an outer program has no program yet.
            self.unclassified = True
            self.latest_trace = ended[-1]
        return ended[-1]

    def classify(self, can_raise: bool | None) -> None:
        """Note whether a program can raise; None if there was none to be read."""
        with self._lock:
            if can_raise is not None:
                self.must_wait = self.must_wait or can_raise
                self.unclassified = False
            self.pending = bool(self.traces)

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
        # Constants are left out, because an equal one may come in at many places.
        places: dict[int, list[int]] = {}
        for place, value in enumerate(statics):
            if not _is_constant(value):
                places.setdefault(id(value), []).append(place)
        slots = tuple([places.get(id(value), [-1])[0] for value in found])
        pairs = {
            (slot, place)
            for v, slot in zip(found, slots, strict=True)
            if slot >= 0
            for place in places[id(v)][1:]
        }
        self.aliases = tuple(sorted(pairs.union(self.aliases)))
        new_ones = tuple([v if i < 0 else None for v, i in zip(found, slots, strict=True)])
        new = Out(spec, new_ones, slots)
        key = self._key_of(new)
        # A program without an output could not be waited for.
        arrays = arrays or [jnp.zeros((), bool)]
        if key is not None:
            return {key: arrays}
        return arrays[0] if len(arrays) == 1 else arrays

    def out_of(self, output: Output) -> Out:
        return self.outs[next(iter(output)).index if type(output) is dict else 0]

    def serves(self, statics: list[Any]) -> bool:
        """Return whether a call's static objects are one where they were when it was traced."""
        return all(statics[i] is statics[j] for i, j in self.aliases)

    def _key_of(self, new: Out) -> OutKey | None:
        """Return the key of an `Out`, one that there is if it serves; None for the first."""
        with self._lock:
            # JAX has dropped the programs of keys that are gone.
            keys = {index: key for index, ref in self._out_keys.items() if (key := ref())}
            for index in self._out_keys.keys() - keys:
                del self.outs[index], self._out_keys[index]
            for index, old in self.outs.items():
                if old.slots == new.slots and old.spec == new.spec:
                    statics = zip(old.statics, new.statics, strict=True)
                    # Equal constants serve, because specs tell them apart by their types.
                    if all(a is b or type(a) in CONSTANTS for a, b in statics):
                        return keys.get(index)
            index = next(self._out_indices)
            key = OutKey(index) if index else None
            if key is not None:
                self._out_keys[index] = weakref.ref(key)
            self.outs[index] = new
            return key


def _is_constant(value: Any) -> bool:
    """Return whether a static object is as good as any that equals it."""
    kind = type(value)
    return kind in CONSTANTS or (kind is tuple and CONSTANTS.issuperset(map(type, value)))
