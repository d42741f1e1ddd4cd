"""The size of a program: its equations, the lines and loops that make them, and its large arrays.

Each equation knows the stack on which it was made: code objects, and an instruction of each. Where
the bytecode of one jumps back around the instruction, it is in a loop. That is unrolled if there
are equations from one stack in it many times, with others in between, or all alike.
"""

import dis
import functools
import itertools
import math
import os
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

from .._compat import has_host_callback, memory_of, source_of, stack_of
from .._places import OUR_FILES, is_users, location
from .._text import bytes_text
from .description import array_text

# Smaller programs have neither lines nor notes.
_MANY_EQUATIONS = 200
# A loop is unrolled if it is passed so often, and makes a quarter of the equations.
_MANY_PASSES = 8
#: Smaller arrays aren't listed, nor more of them.
MANY_BYTES = 2**20
_MAX_ARRAYS = 3

_SCAN = (
    "use `jax.lax.scan` or `jax.lax.fori_loop` (over layers: stack them by `eqx.filter_vmap`, and "
    "scan over that), or `jax.vmap` where the steps don't depend on each other"
)
_DIFFRAX = os.path.join("diffrax", "")
_INLINED = "inlined"
# By a part of the path of a library's file: what helps if its loop, or anything of it, is large.
_IN_LIBRARIES = {
    os.path.join("equinox", "nn", ""): (
        "runs one layer after the other: if they are alike, stack them by `eqx.filter_vmap`, and "
        "loop over them by `jax.lax.scan`"
    ),
    os.path.join("jax", "_src", "tree"): (
        "goes through the leaves of a tree: `eqxjit.pack` makes one array of many small ones"
    ),
    _DIFFRAX: "solves by Diffrax: a solver of fewer stages makes it smaller",
}


class MadeArray(NamedTuple):
    """An array that a program makes on the way: its type, its bytes, and the user's line."""

    type: str
    bytes: int
    line: str

    def __str__(self) -> str:
        return f"{self.type} ({bytes_text(self.bytes)}) at {self.line}"


class Memory(NamedTuple):
    """The bytes that XLA takes for a program.

    - `arguments`, `outputs`: for these; `donated`: how many are for both.
    - `temporaries`: for what it makes on the way.
    """

    arguments: int
    outputs: int
    donated: int
    temporaries: int

    def __str__(self) -> str:
        arguments, outputs, _, temporaries = map(bytes_text, self)
        return f"{arguments} of arguments, {outputs} of outputs, {temporaries} on the way"


class Program(NamedTuple):
    """The size of what a trace has made.

    - `equations`: their number, nested ones included.
    - `lines`: the user's lines that make a tenth of them or more, each with those that call it, as
        `"rollout:31 -> policy:12: 1,800 of 2,700"`; empty for small programs.
    - `loops`: where loops in Python are unrolled, as `"train.py:31"`.
    - `notes`: what to do about its size.
    - `largest_arrays`: the largest arrays that it makes on the way, before XLA fuses operations.
    - `donation_saves`: how many bytes of its outputs have the shape and dtype of an argument.
    - `calls_python`: whether it has a host callback, so that JAX's persistent cache never holds it.
    - `memory`: what XLA takes for it; `None` where that isn't there without compiling it again.
    """

    equations: int
    lines: tuple[str, ...]
    loops: tuple[str, ...]
    notes: tuple[str, ...]
    largest_arrays: tuple[MadeArray, ...]
    donation_saves: int
    calls_python: bool
    memory: Memory | None


def memory_in(lowering: Any) -> Memory | None:
    """Return what XLA takes for a program, if JAX has compiled it."""
    found = memory_of(lowering)
    return Memory(*found) if found else None


def program_of(jaxpr: Any, lowering: Any) -> Program:
    """Return what a jaxpr consists of, with what is nested in it.

    What is nested twice counts twice, as it is compiled twice.
    """
    reader = _Reader(jaxpr.jaxpr)
    n, calls_python = reader.n.total(), has_host_callback(lowering)
    lines = loops = notes = ()
    if n >= _MANY_EQUATIONS:
        lines, (loops, notes) = reader.lines(n), reader.notes(n, calls_python)
    arrays = sorted(reader.arrays, key=lambda each: (-each.bytes, each.line))[:_MAX_ARRAYS]
    ins, outs = [
        Counter([(str(v.aval), _bytes(v.aval)) for v in variables])
        for variables in (jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars)
    ]
    saves = sum([count * size for (_, size), count in (ins & outs).items()])
    what = n, lines, loops, notes, tuple(arrays), saves, calls_python
    return Program(*what, memory_in(lowering))


def _bytes(aval: Any) -> int:
    # A token has no dtype, and a size may be a symbol.
    if not hasattr(aval, "dtype") or not {*map(type, aval.shape)} <= {int}:
        return 0
    return aval.dtype.itemsize * math.prod(aval.shape)


def _nested(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, (ClosedJaxpr, Jaxpr)):
                yield getattr(each, "jaxpr", each)


# --- Stacks -----------------------------------------------------------------------------------


class _Frame(NamedTuple):
    """A line on a stack: of the user's, or of a library that there is advice for.

    Or a jitted function of the user's that is inlined there.
    """

    #: Empty for the user's lines, a key of `_IN_LIBRARIES`, or `_INLINED`.
    kind: str
    #: As `train.py:12`; empty for libraries.
    where: str
    #: As `policy:12`.
    name: str = ""
    #: Where the loops around it begin, outside in.
    loops: tuple[str, ...] = ()


_Stack = tuple[_Frame, ...]
_JUMPS_BACK = {code for name, code in dis.opmap.items() if "JUMP" in name and "BACKWARD" in name}


def _frame_at(code: types.CodeType, offset: int) -> _Frame | None:
    """Return the line of an instruction; None in other libraries."""
    filename, kind = code.co_filename, ""
    if not is_users(filename):
        kind = next((part for part in _IN_LIBRARIES if part in filename), None)
    if kind is None:
        return None
    starts = [start for start, end in _loops_in(code) if start <= offset <= end]
    loops = tuple([location(filename, _line_of(code, start)) for start in starts])
    if kind:
        return _Frame(kind, "", loops=loops)
    line, name = _line_of(code, offset), code.co_qualname.rpartition("<locals>.")[2]
    return _Frame("", location(filename, line), f"{name}:{line}", loops)


@functools.lru_cache(maxsize=1024)
def _loops_in(code: types.CodeType) -> list[tuple[int, int]]:
    """Return the offsets between which the bytecode jumps back, outside in."""
    ends: dict[int, int] = {}
    for each in dis.get_instructions(code):
        if each.opcode in _JUMPS_BACK:
            # Of several to one place, as by `continue`, the last is the end of the loop.
            ends[each.argval] = each.offset
    return sorted(ends.items(), key=lambda loop: loop[0] - loop[1])


def _line_of(code: types.CodeType, offset: int) -> int:
    lines = [line for start, end, line in code.co_lines() if start <= offset < end]
    return next(filter(None, lines), code.co_firstlineno)


def _parts(stack: _Stack) -> list[tuple[str, str]]:
    """Return the loops and libraries that a line is in, outside in: where each is, and its kind."""
    where, parts = "a library", list[tuple[str, str]]()
    for frame in stack:
        where = frame.where or where
        if frame.kind in (_DIFFRAX, _INLINED):
            parts.append((where, frame.kind))
        parts += [(where if frame.kind else loop, frame.kind) for loop in frame.loops]
    return parts


class _Reader:
    """The equations of a jaxpr, by the stacks on which they were made."""

    def __init__(self, jaxpr: Any):
        self._frames: dict[tuple[int, int], _Frame | None] = {}
        self.n: Counter[_Stack] = Counter()
        #: The large ones.
        self.arrays: set[MadeArray] = set()
        # How often each loop is passed.
        self._passes: Counter[tuple[str, str]] = Counter()
        # How often each jitted function of the user's is inlined.
        self._n_inlined: Counter[str] = Counter()
        self._read(jaxpr, (), None, 1)

    def _read(self, jaxpr: Any, around: _Stack, source: Any, n: int) -> None:
        """Read a jaxpr that is used `n` times on a stack.

        `source` is the function that JAX traced for it: None for that under `filter_jit`.
        """
        stacks: dict[Any, _Stack] = {None: around}
        visits: Counter[Any] = Counter()
        nested: Counter[tuple[Any, _Stack]] = Counter()
        for traceback, group in itertools.groupby(jaxpr.eqns, lambda e: e.source_info.traceback):
            equations = [*group]
            if traceback not in stacks:
                stacks[traceback] = around + self._own_stack(traceback, source)
            stack = stacks[traceback]
            self.n[stack] += n * len(equations)
            # The way back of a gradient goes through all lines again, and so does what
            # `jax.checkpoint` computes again.
            names = str(equations[0].source_info.name_stack)
            if "transpose(" not in names and "rematted" not in names:
                visits[traceback] += 1
                # The parts of one operation have one stack, too, but are hardly all alike.
                alike = min(Counter([equation.primitive for equation in equations]).values())
                for loop in _parts(stack)[-1:]:
                    self._passes[loop] = max(self._passes[loop], visits[traceback], alike)
            for equation in equations:
                for each in _nested(equation):
                    inlined, jitted = (), source_of(each) if "name" in equation.params else None
                    if jitted and is_users(jitted[1]):
                        inlined = (_Frame(_INLINED, f"`{jitted[0]}` ({location(*jitted[1:])})"),)
                        self._n_inlined[inlined[0].where] += n
                    nested[each, stack + inlined] += n
                for variable in equation.outvars:
                    size = _bytes(variable.aval)
                    # What a jaxpr returns is an output of the equation around, if of any.
                    if size >= MANY_BYTES and variable not in jaxpr.outvars:
                        text = array_text(variable.aval.dtype, variable.aval.shape)
                        lines = [frame.where for frame in stack if not frame.kind]
                        self.arrays.add(MadeArray(text, size, (lines or ["a library"])[-1]))
        for (each, stack), count in nested.items():
            self._read(each, stack, source_of(each), count)

    def _own_stack(self, traceback: Any, source: Any) -> _Stack:
        """Return the part of a traceback within the function that JAX traced, outside in."""
        frames: list[_Frame | None] = []
        for code, offset in stack_of(traceback):
            if (id(code), offset) not in self._frames:
                self._frames[id(code), offset] = _frame_at(code, offset)
            frames.append(self._frames[id(code), offset])
            if source:
                is_traced = (code.co_filename, code.co_firstlineno) == source[1:]
            else:
                # Ours, which calls the function under `filter_jit`.
                is_traced = code.co_name == "_run" and code.co_filename.startswith(OUR_FILES)
            if is_traced:
                return tuple([frame for frame in reversed(frames) if frame])
        # What JAX traced for an earlier call came from elsewhere.
        return ()

    # --- What is reported ---------------------------------------------------------------------

    def lines(self, n: int) -> tuple[str, ...]:
        """Return the lines that make most equations, each with those that call it."""
        tree: Counter[tuple[str, ...]] = Counter()
        for stack, count in self.n.items():
            # Each once, also of a function that calls itself.
            path = (*dict.fromkeys([frame.name for frame in stack if frame.name]),)
            for i in range(len(path)):
                tree[path[: i + 1]] += count
        large = [(path, count) for path, count in tree.most_common() if count * 10 >= n]
        below: Counter[tuple[str, ...]] = Counter()
        for path, count in large:
            below[path[:-1]] += count
        # Some calls of a line may stand out, and others not.
        shown = [(path, c) for path, c in large if not below[path] or (c - below[path]) * 4 > n]
        return tuple([f"{' -> '.join(path)}: {c:,} of {n:,}" for path, c in shown])

    def notes(self, n: int, calls_python: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return where loops of the user's are unrolled, and what to do about the size."""
        loops: list[str] = []
        notes: list[str] = []
        for (where, kind), count in self._claims().most_common():
            share, n_inlined = f"{count:,} of {n:,} equations", self._n_inlined[where]
            if not kind and count * 4 >= n:
                loops.append(where)
                notes.append(f"the loop at {where} is unrolled, and makes {share}: {_SCAN}.")
            # A loop around that comes first.
            elif kind in _IN_LIBRARIES and count * 2 >= n and not loops:
                also = ", and so does `throw=False`" if calls_python and kind == _DIFFRAX else ""
                notes.append(f"{where} makes {share}, and {_IN_LIBRARIES[kind]}{also}.")
            elif kind == _INLINED and count * 4 >= n and n_inlined >= _MANY_PASSES:
                notes.append(
                    f"{where} is inlined {n_inlined} times, and makes {share}: `jax.jit` within a "
                    "jitted function saves none."
                )
        return tuple(loops), tuple(notes)

    def _claims(self) -> Counter[tuple[str, str]]:
        """Return the equations of each unrolled loop, inlined function, and use of a library."""
        found: Counter[tuple[str, str]] = Counter()
        for stack, count in self.n.items():
            # Outside in, which is their order where one has as many equations as another.
            claims: dict[tuple[str, str], int] = {}
            n_around = 1
            for where, kind in _parts(stack):
                n_passes = self._passes[where, kind]
                # In each pass of the loop around it.
                if n_passes >= _MANY_PASSES * n_around or kind in (_DIFFRAX, _INLINED):
                    claims[where, kind] = count
                n_around = n_around if kind else max(n_around, n_passes)
            found.update(claims)
        return found
