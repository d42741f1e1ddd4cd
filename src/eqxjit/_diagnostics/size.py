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
    reader, calls_python = _Reader(jaxpr.jaxpr), has_host_callback(lowering)
    n, arrays = reader.n.total(), sorted(reader.arrays, key=lambda each: (-each.bytes, each.line))
    lines = loops = notes = ()
    if n >= _MANY_EQUATIONS:
        lines, (loops, notes) = reader.lines(n), reader.notes(n, calls_python)
    ins, outs = [
        Counter([(str(v.aval), _bytes(v.aval)) for v in variables])
        for variables in (jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars)
    ]
    saves = sum([count * size for (_, size), count in (ins & outs).items()])
    what = n, lines, loops, notes, tuple(arrays[:_MAX_ARRAYS]), saves, calls_python
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


class _Stack(NamedTuple):
    """The user's lines that lead to an equation, and the loops and libraries that these are in."""

    #: As `policy:12`, outside in; of a function that calls itself, each once.
    lines: tuple[str, ...] = ()
    #: The innermost one, as `train.py:12`.
    where: str = "a library"
    #: Outside in: where a loop begins, with an empty kind; what is called for a kind of library; or
    #: the name of an inlined function, with `_INLINED`.
    parts: tuple[tuple[str, str], ...] = ()

    def within(self, *parts: tuple[str, str]) -> "_Stack":
        return self._replace(parts=tuple(dict.fromkeys((*self.parts, *parts))))

    def call(self, kind: str, code: types.CodeType, offset: int) -> "_Stack":
        """Return the stack with one more call on it."""
        starts = [start for start, end in _loops_in(code) if start <= offset <= end]
        if kind:
            return self.within((self.where, kind)) if starts or kind == _DIFFRAX else self
        line, *loops = [_line_of(code, each) for each in (offset, *starts)]
        name = f"{code.co_qualname.rpartition('<locals>.')[2]}:{line}"
        lines = self.lines if name in self.lines else (*self.lines, name)
        stack = _Stack(lines, location(code.co_filename, line), self.parts)
        return stack.within(*[(location(code.co_filename, loop), "") for loop in loops])


@functools.lru_cache(maxsize=1024)
def _loops_in(code: types.CodeType) -> list[tuple[int, int]]:
    """Return the offsets between which the bytecode jumps back, outside in."""
    ends: dict[int, int] = {}
    for each in dis.get_instructions(code):
        if "JUMP_BACKWARD" in each.opname:
            # Of several to one place, as by `continue`, the last is the end of the loop.
            ends[each.argval] = each.offset
    return sorted(ends.items(), key=lambda loop: loop[0] - loop[1])


def _line_of(code: types.CodeType, offset: int) -> int:
    lines = [line for start, end, line in code.co_lines() if start <= offset < end]
    return next(filter(None, lines), code.co_firstlineno)


class _Reader:
    """The equations of a jaxpr, by the stacks on which they were made."""

    def __init__(self, jaxpr: Any):
        self._calls: dict[tuple[_Stack, int, int], _Stack] = {}
        self.n: Counter[_Stack] = Counter()
        #: The large ones.
        self.arrays: set[MadeArray] = set()
        # How often each loop is passed, and each jitted function of the user's is inlined.
        self._passes: Counter[tuple[str, str]] = Counter()
        self._n_inlined: Counter[str] = Counter()
        self._read(jaxpr, _Stack(), None, 1)

    def _read(self, jaxpr: Any, around: _Stack, source: Any, n: int) -> None:
        """Read a jaxpr that is used `n` times on a stack.

        `source` is the function that JAX traced for it: None for that under `filter_jit`.
        """
        stacks: dict[Any, _Stack] = {None: around}
        visits: Counter[Any] = Counter()
        nested: Counter[tuple[Any, _Stack, bool]] = Counter()
        for traceback, group in itertools.groupby(jaxpr.eqns, lambda e: e.source_info.traceback):
            equations = [*group]
            if traceback not in stacks:
                stacks[traceback] = self._stack_in(around, traceback, source)
            stack = stacks[traceback]
            self.n[stack] += n * len(equations)
            # The way back of a gradient goes through all lines again, and so does what
            # `jax.checkpoint` computes again.
            names = str(equations[0].source_info.name_stack)
            if "transpose(" not in names and "rematted" not in names:
                visits[traceback] += 1
                # The parts of one operation have one stack, too, but are hardly all alike.
                alike = min(Counter([equation.primitive for equation in equations]).values())
                for loop in stack.parts[-1:]:
                    self._passes[loop] = max(self._passes[loop], visits[traceback], alike)
            for equation in equations:
                for each in _nested(equation):
                    # `jax.jit` names its equations, others that have a jaxpr don't.
                    nested[each, stack, "name" in equation.params] += n
                for variable in equation.outvars:
                    size = _bytes(variable.aval)
                    # What a jaxpr returns is an output of the equation around, if of any.
                    if size >= MANY_BYTES and variable not in jaxpr.outvars:
                        text = array_text(variable.aval.dtype, variable.aval.shape)
                        self.arrays.add(MadeArray(text, size, stack.where))
        for (each, stack, is_jitted), count in nested.items():
            source = source_of(each)
            if is_jitted and source and is_users(source[1]):
                name = f"`{source[0]}` ({location(*source[1:])})"
                self._n_inlined[name] += count
                stack = stack.within((name, _INLINED))
            self._read(each, stack, source, count)

    def _stack_in(self, stack: _Stack, traceback: Any, source: Any) -> _Stack:
        """Return the stack of an equation within the function that JAX traced on a stack."""
        calls: list[tuple[types.CodeType, int]] = []
        for code, offset in stack_of(traceback):
            calls.append((code, offset))
            if source:
                is_traced = (code.co_filename, code.co_firstlineno) == source[1:]
            else:
                # Ours, which calls the function under `filter_jit`.
                is_traced = code.co_name == "_run" and code.co_filename.startswith(OUR_FILES)
            if is_traced:
                break
        else:
            # What JAX traced for an earlier call came from elsewhere.
            return stack
        for code, offset in reversed(calls):
            kinds = [""] if is_users(code.co_filename) else _IN_LIBRARIES
            for kind in [kind for kind in kinds if kind in code.co_filename]:
                # JAX's traceback keeps the code, and so its number.
                key = stack, id(code), offset
                if key not in self._calls:
                    self._calls[key] = stack.call(kind, code, offset)
                stack = self._calls[key]
        return stack

    # --- What is reported ---------------------------------------------------------------------

    def lines(self, n: int) -> tuple[str, ...]:
        """Return the lines that make most equations, each with those that call it."""
        tree: Counter[tuple[str, ...]] = Counter()
        for stack, count in self.n.items():
            for i in range(len(stack.lines)):
                tree[stack.lines[: i + 1]] += count
        large = [(path, count) for path, count in tree.most_common() if count * 10 >= n]
        below: Counter[tuple[str, ...]] = Counter()
        for path, count in large:
            below[path[:-1]] += count
        # Some calls of a line may stand out, and others not.
        shown = [(path, c) for path, c in large if not below[path] or (c - below[path]) * 4 > n]
        return tuple([f"{' -> '.join(path)}: {c:,} of {n:,}" for path, c in shown])

    def notes(self, n: int, calls_python: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return where loops of the user's are unrolled, and what to do about the size."""
        found: Counter[tuple[str, str]] = Counter()
        for stack, count in self.n.items():
            n_around = 1
            for where, kind in stack.parts:
                n_passes = self._passes[where, kind]
                # In each pass of the loop around it.
                if n_passes >= _MANY_PASSES * n_around or kind in (_DIFFRAX, _INLINED):
                    found[where, kind] += count
                n_around = n_around if kind else max(n_around, n_passes)
        loops: list[str] = []
        notes: list[str] = []
        # Of as many equations, the outer one comes first.
        for (where, kind), count in found.most_common():
            share, n_inlined = f"{count:,} of {n:,} equations", self._n_inlined[where]
            if not kind and count * 4 >= n:
                loops.append(where)
                notes.append(f"the loop at {where} is unrolled, and makes {share}: {_SCAN}.")
            elif kind in _IN_LIBRARIES and count * 2 >= n and not loops:
                also = ", and so does `throw=False`" if calls_python and kind == _DIFFRAX else ""
                notes.append(f"{where} makes {share}, and {_IN_LIBRARIES[kind]}{also}.")
            elif kind == _INLINED and count * 4 >= n and n_inlined >= _MANY_PASSES:
                notes.append(
                    f"{where} is inlined {n_inlined} times, and makes {share}: `jax.jit` within a "
                    "jitted function saves none."
                )
        return tuple(loops), tuple(notes)
