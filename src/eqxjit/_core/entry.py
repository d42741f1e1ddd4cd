"""The records of programs, entries and calls: `Program`, `Out`, `Entry` and `Call`.

The state of one program is in its `Program`, and the state of one call is in its `Call`. An `Entry`
has what all calls with one spec share.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._compat import may_raise, native
from .._diagnostics.description import ArrayPart, Description
from .._spec.static_key import (
    CONSTANTS,
    changeable_keys,
    compare_changed_by_identity,
    interchangeable,
)
from .._spec.tree import Spec, count_arrays, split

# --- Programs -------------------------------------------------------------------------------------

# With the native back end the fields of a program are C fields, so that C reads them quickly.
_Base: type = object if native is None else native.Flags

_numbers = itertools.count()


class Program(_Base):
    """The program that one trace results in.

    The traced function returns this object to JAX as the key of its arrays, so each output tells
    which program computed it. JAX keeps the object exactly as long as the program, even if the
    program becomes a part of an outer program. The object refers to nothing of the user's, because
    JAX may keep it forever.

    - `number`: a number that no other program in this process has.
    - `unread`: whether `read` still has to find out if the program can raise.
    - `must_wait`: whether each call must wait until the program has run. That is so if the program
        can raise, or if the user asked for it by `block=True`.
    """

    __slots__ = ("__weakref__",) if native else ("__weakref__", "must_wait", "number", "unread")

    number: int
    unread: bool
    must_wait: bool

    def __init__(self, must_wait: bool):
        self.number = next(_numbers)
        self.unread = True
        self.must_wait = must_wait

    def __repr__(self) -> str:
        # All programs have the same `repr`, because JAX writes it into the text of a program, and
        # JAX's persistent cache finds programs by their text.
        return "program"

    def read(self, lowered: Any) -> None:
        """Find out from JAX's lowering of the program whether the program can raise.

        If the lowering is `None`, the program counts as one that can raise. Two threads may read a
        program at once, with the same result.
        """
        if lowered is None or may_raise(lowered.compiler_ir("stablehlo")):
            self.must_wait = True
        self.unread = False


#: What a traced function returns to JAX: one program, with all arrays of the user's output.
Output = dict[Program, list[Any]]


class Out(NamedTuple):
    """The part of a program's output that isn't arrays: its structure and its static objects.

    Some static objects of an output are objects that the call passed in. A later call may pass
    different objects in their places, and gets its own objects back.

    - `spec`: the spec of the output, as `split` returns it, but with `None` for each static key.
        So the `hash` and `==` of the user's static objects have no influence on outputs.
    - `statics`: the static objects of the output, with `None` for each that the call passed in.
    - `slots`: for each static object of the output, its index in `Call.all_statics` if the call
        passed it in, or else -1.
    """

    spec: Spec
    statics: tuple[Any, ...]
    slots: tuple[int, ...]

    def is_interchangeable_with(self, other: "Out") -> bool:
        """Return whether callers can't tell this `Out` from the other.

        Constants and tuples of constants are compared by value. Other static objects are compared
        by identity, because callers get the very object.
        """
        return (
            self.slots == other.slots
            and self.spec == other.spec
            and all(map(interchangeable, self.statics, other.statics))
        )


def _no_key(value: Any) -> None:
    """Return `None` as the key of a static object, for specs of outputs."""


# --- Entries --------------------------------------------------------------------------------------


class _Outs(dict[int, tuple[Out, Any]]):
    """The `outs` of an entry: a dict that supports weak references."""

    __slots__ = ("__weakref__",)


class Entry:
    """The state that all calls of a function with one spec share, such as the `jax.jit` they call.

    - `spec`: the spec of the arguments.
    - `name`: the name of the function.
    - `jitted`: the result of `jax.jit` for a function of flat arrays.
    - `n_arrays`: the number of arrays that `jitted` takes.
    - `n_fun`: how many of these arrays belong to the wrapped function. They come last.
    - `block`: whether each call waits for its program, because the user asked for it by
        `block=True`.
    - `hides_donation_warning`: whether JAX's warning about unusable donated buffers is hidden.
    - `out`: the `Out` of the first program. Missing until a trace has completed.
    - `outs`: the `Out` of each program, and a weak reference to the program, by its number. When
        JAX drops the program, the weak reference removes both.
    - `why_dropped`: the reason why the table dropped the entry, if there is one. The traces of the
        entry share this list, so they learn the reason, too.
    - `watches`: weak references to static objects. When an object dies, the table drops the entry.
    - `used`: the indices of the arrays that are used by the programs read so far. It only grows, so
        its length tells whether it has changed.
    - `n_hits`: how many calls of the slow path ran an existing program.
    - `last_used`: when the entry was last used, by the clock of the table, which counts uses.
    """

    jitted: Any
    out: Out

    def __init__(self, spec: Spec, function: Any, n_fun: int):
        self.spec = spec
        self._static_arrays = changeable_keys(spec)
        self.name: str = function.signature.name
        self.n_fun = n_fun
        self.n_arrays = count_arrays(spec) + n_fun
        self.block: bool = function.options.block
        self.hides_donation_warning = function.options.donate in ("all", "all-except-first")
        self.outs = _Outs()
        self.why_dropped: list[str] = []
        self.watches: list[weakref.ref[Any]] = []
        self.used: set[int] = set()
        self.n_hits = 0
        self.last_used = 0

    def read(self, program: Program, lowered: Any, jaxpr: Any) -> None:
        """Find out what a program uses, and whether it can raise, from its lowering and its jaxpr.

        Both are `None` if JAX can't find them again.
        """
        # First, because once the program is read, calls of it rely on `used`.
        self.used.update(range(self.n_arrays) if jaxpr is None else _used_inputs(jaxpr.jaxpr))
        program.read(lowered)

    def may_use_more(self, program: Program, n_used: int) -> bool:
        """Return whether a program may use more arrays than `used` had when it had this length."""
        return program.unread or len(self.used) != n_used

    def split_output(self, output: Any, came_in: list[Any]) -> Output:
        """Return a new program with the arrays of an output, and remember the program's `Out`.

        `came_in` are all static objects of the call (`Call.all_statics`).
        """
        # The user's function has just returned. If it, or another thread, has changed a static
        # array, the numbers that the program has compiled in may differ from those in the key.
        compare_changed_by_identity(self._static_arrays)
        spec, arrays, statics = split(output, is_input=False, key_of=_no_key)
        slots = _slots(statics, came_in)
        # Don't keep the objects that the call passed in, so that they can die before the program.
        kept = [v if slot < 0 else None for v, slot in zip(statics, slots, strict=True)]
        out = Out(spec, tuple(kept), slots)
        # `setdefault` is atomic, so it doesn't matter if another thread is first. If the new `Out`
        # is interchangeable with that of the first program, both programs get the same `Out`
        # object. So generated Python can compare them by identity.
        first = self.__dict__.setdefault("out", out)
        program = Program(self.block)
        self._remember(program, first if out.is_interchangeable_with(first) else out)
        # A call waits for its program by waiting for an array. So a program whose output has no
        # array returns an additional array, which the user doesn't get.
        return {program: arrays or [jnp.zeros((), bool)]}

    def _remember(self, program: Program, out: Out) -> None:
        """Keep the `Out` of a program until JAX drops the program."""
        number = program.number
        # A weak reference, because `outs` holds `forget`. A cycle would keep the user's objects
        # alive until garbage collection.
        outs_ref = weakref.ref(self.outs)

        def forget(_: Any) -> None:
            outs = outs_ref()
            if outs is not None:
                outs.pop(number, None)

        self.outs[number] = out, weakref.ref(program, forget)


def _used_inputs(jaxpr: Any) -> Iterator[int]:
    """Yield the indices of the inputs that a jaxpr mentions. JAX drops the others."""
    parts = [*jaxpr.outvars, *[part for equation in jaxpr.eqns for part in equation.invars]]
    # By `id`, because literals have no hash.
    ids = {*map(id, parts)}
    return (i for i, part in enumerate(jaxpr.invars) if id(part) in ids)


def _slots(statics: list[Any], came_in: list[Any]) -> tuple[int, ...]:
    """Return the `slots` of an `Out`: the index in `came_in` of each static object, or -1."""
    places: dict[int, list[int]] = {}
    for place, value in enumerate(came_in):
        if type(value) not in CONSTANTS:
            places.setdefault(id(value), []).append(place)
    slots = []
    for value in statics:
        # One object may have come in at several places, and a later call may pass several equal
        # objects there. Then each place in the output gets an object of its own: the first place in
        # the output gets the object from the first place in the call, and so on. So a model that is
        # passed and returned gets each object back in its own place.
        left = places.get(id(value), [-1])
        slots.append(left.pop(0) if len(left) > 1 else left[0])
    return tuple(slots)


# --- Calls ----------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a wrapper: its arguments, bound and split, and what is known of its program.

    - `function`: the called `Function` (see `table.py`), which is without its arrays.
    - `fun_arrays`: the arrays of that function.
    - `args`, `kwargs`: the arguments, bound to the function's parameters.
    - `spec`, `arrays`, `statics`: what `split` returns for `(args, kwargs)`.
    - `entry`: the entry of the spec.
    - `is_staged`: whether the function is only lowered or exported, rather than run.
    - `trace`: the diagnostics' record of the latest trace in this call; `None` if JAX traced
        nothing in it. The core doesn't read the record.
    - `is_traced`: whether the user's function returned in that trace.
    - `program`: the program that ran, or that was lowered; `None` until the program is known.
    - `jaxpr`, `lowered`: the program as JAX traced and lowered it, if this call has read it.
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
        """The parts of the arguments by path.

        A trace reads this before the user's function can change an argument.
        """
        return self.function.table.history.describe(self)

    @property
    def array_paths(self) -> tuple[str, ...] | None:
        """The path of each array in `flat`; `None` if the call can't be described."""
        paths = [row.path for row in self.description if isinstance(row.part, ArrayPart)]
        if self.function.keeps_arrays:
            # Such a function has the same arrays in every call, so the description omits them.
            paths += ["fun"] * len(self.fun_arrays)
        return tuple(paths) if len(paths) == len(self.flat) else None

    @property
    def flat(self) -> list[Any]:
        """All arrays, in the order in which JAX takes them: the arguments' arrays come first."""
        return [*self.arrays, *self.fun_arrays]

    @property
    def all_statics(self) -> list[Any]:
        """All static objects: first the function's, and then the arguments'.

        The slots of an `Out` are indices of this list.
        """
        return [*self.function.statics, *self.statics]
