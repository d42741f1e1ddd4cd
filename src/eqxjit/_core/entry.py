"""What a call runs: programs, the entry of each structure, and the call itself.

What belongs to a program is on the `Program`, what belongs to a call is on the `Call`. An `Entry`
has what all calls of one structure share.
"""

import dataclasses
import functools
import itertools
import weakref
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._compat import may_raise, native
from .._diagnostics.description import ArrayPart, Description
from .._spec.static_key import CONSTANTS, changeable, check_unchanged, interchangeable
from .._spec.tree import Spec, count_arrays, split

# --- Programs -------------------------------------------------------------------------------------

# C reads the fields of a program without a look-up.
_Base: type = object if native is None else native.Flags

_numbers = itertools.count()


class Program(_Base):
    """What one trace became.

    The traced function returns it to JAX as the key of its arrays, so that each output comes with
    the program that made it. JAX keeps it exactly as long as the program, also as a part of outer
    programs. It holds nothing of the user's, because JAX may keep it for good.

    - `number`: the program's number, unique in this process.
    - `unread`: whether nobody knows yet if the program can raise.
    - `must_wait`: whether each call waits until the program has run, because it can raise.
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
        # JAX writes it into the program's text, by which its persistent cache finds programs.
        return "program"

    def read(self, lowered: Any) -> None:
        """Note whether the program can raise, from JAX's lowering of it.

        Two threads may both do so, with the same result. Without a lowering (`None`) the program
        counts as one that can.
        """
        if lowered is None or may_raise(lowered.compiler_ir("stablehlo")):
            self.must_wait = True
        self.unread = False


#: What a traced function returns to JAX: the program, and all arrays of the user's output.
Output = dict[Program, list[Any]]


class Out(NamedTuple):
    """What a program returns besides arrays.

    - `spec`: the spec of the output, as `split` returns it, but without keys: the user's `hash` and
        `==` of static objects have no say in outputs.
    - `statics`: the static objects of the output, with `None` for each that came in.
    - `slots`: for each of them, the index of the static object that came in (see
        `Call.all_statics`); -1 for one that the trace made.
    """

    spec: Spec
    statics: tuple[Any, ...]
    slots: tuple[int, ...]

    def is_as(self, other: "Out") -> bool:
        """Return whether the other may stand for it.

        A static object is compared by identity, because callers get that very object. A constant
        and a tuple of constants are compared by value.
        """
        return (
            self.slots == other.slots
            and self.spec == other.spec
            and all(map(interchangeable, self.statics, other.statics))
        )


def _no_key(value: Any) -> None:
    """Stands for `static_key` in outputs."""


# --- Entries --------------------------------------------------------------------------------------


class _Outs(dict[int, tuple[Out, Any]]):
    """A dict to which weak references can refer."""

    __slots__ = ("__weakref__",)


class Entry:
    """One structure of a function's calls.

    - `spec`: the spec of the arguments.
    - `name`: the name of the function.
    - `jitted`: `jax.jit` of a function of flat arrays.
    - `n_arrays`: how many arrays that function takes.
    - `n_fun`: how many of them belong to the function. They come last.
    - `block`: whether each call waits for its program, as the user asked by `block=True`.
    - `out`: what the first program returned besides arrays.
    - `outs`: what each program returns besides arrays, by the program's number, together with the
        weak reference that removes it when JAX drops the program.
    - `why_dropped`: why the table dropped the entry, if there is a reason. The traces of the entry
        share this list.
    - `watches`: weak references to static objects. They tell the table when an object dies.
    - `n_hits`: how many calls of the slow path ran a program that was there.
    - `last_used`: the time of the latest use on the table's clock.
    """

    jitted: Any
    out: Out

    def __init__(self, spec: Spec, function: Any, n_fun: int):
        self.spec = spec
        self._static_arrays = changeable(spec)
        self.name: str = function.signature.name
        self.n_fun = n_fun
        self.n_arrays = count_arrays(spec) + n_fun
        self.block: bool = function.options.block
        self.hides_donation_warning = function.options.donate in ("all", "all-except-first")
        self.outs = _Outs()
        self.why_dropped: list[str] = []
        self.watches: list[weakref.ref[Any]] = []
        self.n_hits = 0
        self.last_used = 0

    def split_output(self, output: Any, came_in: list[Any]) -> Output:
        """Return a new program with the arrays of an output, and remember the rest of the output.

        `came_in` are all static objects of the call.
        """
        # The trace is over, so what it read of the arrays that its program compiled in is known.
        check_unchanged(self._static_arrays)
        spec, arrays, statics = split(output, is_input=False, key_of=_no_key)
        places: dict[int, list[int]] = {}
        for place, value in enumerate(came_in):
            if type(value) not in CONSTANTS:
                places.setdefault(id(value), []).append(place)
        slots = []
        for value in statics:
            # One object may have come in at several places, where another call has several equal
            # ones. Each goes back to its own place, as in a model that is passed and returned.
            here = places.get(id(value), [-1])
            slots.append(here.pop(0) if len(here) > 1 else here[0])
        made_here = [v if slot < 0 else None for v, slot in zip(statics, slots, strict=True)]
        out = Out(spec, tuple(made_here), tuple(slots))
        # Another thread may be first.
        first = self.__dict__.setdefault("out", out)
        program = Program(self.block)
        self._remember(program, first if out.is_as(first) else out)
        # A program without an output could not be waited for.
        return {program: arrays or [jnp.zeros((), bool)]}

    def _remember(self, program: Program, out: Out) -> None:
        outs_ref, number = weakref.ref(self.outs), program.number

        # It refers weakly to what holds it: a cycle would keep the user's objects until garbage
        # collection.
        def forget(_: Any) -> None:
            outs = outs_ref()
            if outs is not None:
                outs.pop(number, None)

        self.outs[number] = out, weakref.ref(program, forget)


# --- Calls ----------------------------------------------------------------------------------------


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
