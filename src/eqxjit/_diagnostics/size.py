"""The size of a program: its equations, the lines and loops that make them, and its large arrays.

JAX keeps with each equation the stack on which it was made: code objects, and the offset of an
instruction in each. If the bytecode of a code object jumps back around that instruction, the
equation is in a loop. The loop was unrolled if one stack in it made equations many times, with
equations of other stacks in between, or many equations that are alike.
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

from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from .._compat import (
    has_host_callback,
    is_backward,
    memory_of,
    source_of,
    stack_of,
    traceback_of,
)
from .._places import is_users, line_of, location
from .._text import bytes_text
from .constants import MANY_BYTES, CapturedArray, note_on
from .description import array_text

# Programs of fewer equations have neither lines nor notes on loops.
_MANY_EQUATIONS = 200
# A loop gets a note if it ran so often and makes a quarter of the equations.
_MANY_PASSES = 8
# Arrays of one line and type are listed if they take `MANY_BYTES` in all. Smaller ones than
# `_FEW_BYTES` aren't counted.
_FEW_BYTES = 2**10
_MAX_ARRAYS = 3

# Operations that read their inputs while they write outputs of the same shape.
_NOT_IN_PLACE = {"dot_general", "conv_general_dilated", "sort", "gather"}
_SCAN = (
    "use `jax.lax.scan` or `jax.lax.fori_loop` (over layers: stack them by `eqx.filter_vmap`, and "
    "scan over that), or `jax.vmap` where the steps don't depend on each other"
)
_DIFFRAX = os.path.join("diffrax", "")
_INLINED = "inlined"
# What helps against a large loop in a library, by a part of the path of the library's file.
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
    """The temporary arrays of one type that one line of a program makes.

    - `type`: their dtype and shape, such as `float32[2048,64]`.
    - `bytes`: what all of them take.
    - `line`: the user's line that makes them.
    - `number`: how many they are.
    """

    type: str
    bytes: int
    line: str
    number: int = 1

    def __str__(self) -> str:
        if self.number == 1:
            return f"{self.type} ({bytes_text(self.bytes)}) at {self.line}"
        return f"{self.line} makes {self.number} x {self.type}, {bytes_text(self.bytes)}"


class Memory(NamedTuple):
    """The bytes that XLA takes for a program.

    - `arguments`: for the arguments.
    - `outputs`: for the outputs.
    - `donated`: how many bytes the arguments and the outputs share.
    - `temporaries`: for temporary arrays.
    """

    arguments: int
    outputs: int
    donated: int
    temporaries: int

    def __str__(self) -> str:
        arguments, outputs, _, temporaries = map(bytes_text, self)
        return f"{arguments} of arguments, {outputs} of outputs, {temporaries} of temporaries"


class Program(NamedTuple):
    """The size of what a trace has made.

    - `equations`: their number, nested ones included.
    - `lines`: the user's lines that make a tenth of them or more, each with those that call it, as
        `"rollout:31 -> policy:12: 1,800 of 2,700"`; empty for small programs.
    - `loops`: where loops in Python are unrolled, as `"train.py:31"`.
    - `notes`: what to do about its size, and about large arrays that it closes over.
    - `largest_arrays`: the temporary arrays that take most, summed by line and type, before XLA
        fuses operations.
    - `constants`: the arrays that it closes over, the largest first.
    - `donation_saves`: how many bytes of its outputs are new values of arguments of the same shape
        and dtype. Gradients aren't.
    - `calls_python`: whether it has a host callback, so that JAX's persistent cache never holds it.
    - `memory`: what XLA takes for it; `None` where that isn't there without compiling it again.
    """

    equations: int
    lines: tuple[str, ...]
    loops: tuple[str, ...]
    notes: tuple[str, ...]
    largest_arrays: tuple[MadeArray, ...]
    constants: tuple[CapturedArray, ...]
    donation_saves: int
    calls_python: bool
    memory: Memory | None


def memory_in(lowering: Any) -> Memory | None:
    """Return what XLA takes for a program, if JAX has compiled it."""
    found = memory_of(lowering)
    return Memory(*found) if found else None


def program_of(jaxpr: Any, lowering: Any, constants: tuple[CapturedArray, ...] = ()) -> Program:
    """Return the size of a jaxpr, with what is nested in it.

    What is nested twice counts twice, as it is compiled twice. `constants` are what it captured.
    """
    reader, calls_python = _Reader(jaxpr.jaxpr), has_host_callback(lowering)
    n = reader.n.total()
    lines = loops = notes = ()
    if n >= _MANY_EQUATIONS:
        lines, (loops, notes) = reader.lines(n), reader.notes(n, calls_python)
    if note := note_on(constants):
        notes = (*notes, note)
    return Program(
        equations=n,
        lines=lines,
        loops=loops,
        notes=notes,
        largest_arrays=reader.largest_arrays(),
        constants=constants,
        donation_saves=_donation_saves(jaxpr.jaxpr),
        calls_python=calls_python,
        memory=memory_in(lowering),
    )


def _donation_saves(jaxpr: Any) -> int:
    """Return how many bytes donation of all arguments would save.

    If no output is a new value of an argument, the function computes gradients, say: its caller
    goes on using the arguments. If one is, it is a step, which replaces all of its state.
    """
    if not any(_updated(jaxpr)):
        return 0
    ins, outs = [
        Counter([(str(v.aval), _bytes(v.aval)) for v in variables])
        for variables in (jaxpr.invars, jaxpr.outvars)
    ]
    return sum([count * size for (_, size), count in (ins & outs).items()])


def _updated(jaxpr: Any) -> list[frozenset[int]]:
    """Return for each output the numbers of the arguments of which it is a new value.

    It is computed from them element by element, and not in a backward pass, whose results are
    gradients.
    """
    numbers: dict[Any, frozenset[int]] = {v: frozenset((i,)) for i, v in enumerate(jaxpr.invars)}

    def of(variable: Any, like: Any) -> frozenset[int]:
        # A literal can't be hashed, and has no number.
        if not _is_variable(variable) or variable.aval.shape != like.aval.shape:
            return frozenset()
        return numbers.get(variable, frozenset())

    for equation in jaxpr.eqns:
        if is_backward(equation):
            continue
        nested = [*_nested(equation)]
        for i, out in enumerate(equation.outvars):
            if not nested:
                found = [of(each, out) for each in equation.invars]
            elif len(nested) == 1 and len(nested[0].invars) == len(equation.invars):
                inner = _updated(nested[0])[i : i + 1]
                found = [of(equation.invars[k], out) for each in inner for k in each]
            else:
                found = []
            numbers[out] = frozenset().union(*found)
    return [of(variable, variable) for variable in jaxpr.outvars]


def _bytes(aval: Any) -> int:
    # A token has no dtype, and a size may be a symbol.
    if not hasattr(aval, "dtype") or not {*map(type, aval.shape)} <= {int}:
        return 0
    return aval.dtype.itemsize * math.prod(aval.shape)


def _alive_at_peak(jaxpr: Any) -> list[tuple[Any, Any]]:
    """Return the temporary arrays that are alive when most bytes are, each with its equation.

    Equations run in their order, and an array is alive from its equation to the last one that uses
    it. XLA's order differs, and it fuses operations, so this is an estimate.
    """
    equations = jaxpr.eqns
    last_uses = {v: i for i, e in enumerate(equations) for v in e.invars if isinstance(v, Var)}
    # What a jaxpr returns is an output of the equation around it, if there is one.
    returned = {variable for variable in jaxpr.outvars if isinstance(variable, Var)}
    # Of each temporary array its first and its last equation.
    spans: dict[Any, tuple[int, int]] = {}
    n_bytes, peak, peak_at = 0, 0, 0
    for i, equation in enumerate(equations):
        dying = [
            v for v in {*filter(_is_variable, equation.invars)} & spans.keys() if last_uses[v] == i
        ]
        for variable in equation.outvars:
            size = _bytes(variable.aval)
            if size < _FEW_BYTES or variable in returned or variable not in last_uses:
                continue
            spans[variable] = i, last_uses[variable]
            n_bytes += size
            reused = next((v for v in dying if _takes_buffer(equation, v, variable)), None)
            if reused is not None:
                spans[reused] = spans[reused][0], i - 1
                dying.remove(reused)
                n_bytes -= size
        if n_bytes > peak:
            peak, peak_at = n_bytes, i
        n_bytes -= sum([_bytes(variable.aval) for variable in dying])
    return [
        (equations[start], variable)
        for variable, (start, stop) in spans.items()
        if start <= peak_at <= stop
    ]


def _is_variable(value: Any) -> bool:
    return isinstance(value, Var)


def _takes_buffer(equation: Any, old: Any, new: Any) -> bool:
    """Return whether XLA can write an output where an input was: element by element."""
    if equation.primitive.name in _NOT_IN_PLACE or any(True for _ in _nested(equation)):
        return False
    return old.aval.shape == new.aval.shape and _bytes(old.aval) == _bytes(new.aval)


def _nested(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, (ClosedJaxpr, Jaxpr)):
                yield getattr(each, "jaxpr", each)


# --- Stacks -----------------------------------------------------------------------------------

# The code of our function that calls the user's function while JAX traces it.
_outermost_code: types.CodeType | None = None


def begin_stacks_at(code: types.CodeType) -> None:
    """Begin the stacks of equations at calls of a function, given by its code.

    The core calls this at import, because this module may not import the core.
    """
    global _outermost_code
    _outermost_code = code


class _Stack(NamedTuple):
    """The user's lines that lead to an equation, and the loops and libraries around it.

    - `lines`: the user's lines, outermost first, such as `policy:12`. A function that calls itself
        has each of its lines once.
    - `where`: the innermost line, such as `train.py:12`.
    - `parts`: what the equation is in, outermost first, as pairs of a place and a kind. The kind is
        empty for the line where a loop begins, a key of `_IN_LIBRARIES` for the line that calls
        such a library, and `_INLINED` for the name of an inlined function.
    """

    lines: tuple[str, ...] = ()
    where: str = "a library"
    parts: tuple[tuple[str, str], ...] = ()

    def within(self, *parts: tuple[str, str]) -> "_Stack":
        return self._replace(parts=tuple(dict.fromkeys((*self.parts, *parts))))

    def call(self, kind: str, code: types.CodeType, offset: int) -> "_Stack":
        """Return the stack with one more call on it."""
        starts = [start for start, end in _loops_in(code) if start <= offset <= end]
        if kind:
            return self.within((self.where, kind)) if starts or kind == _DIFFRAX else self
        line, *loops = [line_of(code, each) for each in (offset, *starts)]
        name = f"{code.co_qualname.rpartition('<locals>.')[2]}:{line}"
        lines = self.lines if name in self.lines else (*self.lines, name)
        stack = _Stack(lines, location(code.co_filename, line), self.parts)
        return stack.within(*[(location(code.co_filename, loop), "") for loop in loops])


@functools.lru_cache(maxsize=1024)
def _loops_in(code: types.CodeType) -> list[tuple[int, int]]:
    """Return the first and last offset of each loop in the bytecode, outermost first."""
    ends: dict[int, int] = {}
    for each in dis.get_instructions(code):
        if "JUMP_BACKWARD" in each.opname:
            # If several jump to one place, as by `continue`, the last one ends the loop.
            ends[each.argval] = each.offset
    return sorted(ends.items(), key=lambda loop: loop[0] - loop[1])


class _Reader:
    """The equations of a jaxpr, by the stacks on which they were made."""

    def __init__(self, jaxpr: Any):
        self._calls: dict[tuple[_Stack, int, int], _Stack] = {}
        self.n: Counter[_Stack] = Counter()
        #: How many arrays of each type and size each line makes that are alive at one time.
        self._arrays: Counter[tuple[str, int, str]] = Counter()
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
        for equation, variable in _alive_at_peak(jaxpr):
            where = self._stack_in(around, traceback_of(equation), source).where
            text = array_text(variable.aval.dtype, variable.aval.shape)
            self._arrays[text, _bytes(variable.aval), where] += 1
        for traceback, group in itertools.groupby(jaxpr.eqns, traceback_of):
            equations = [*group]
            if traceback not in stacks:
                stacks[traceback] = self._stack_in(around, traceback, source)
            stack = stacks[traceback]
            self.n[stack] += n * len(equations)
            # The way back of a gradient goes through all lines again, and so does what
            # `jax.checkpoint` computes again.
            if not is_backward(equations[0]):
                visits[traceback] += 1
                # The parts of one operation have one stack, too, but are hardly all alike.
                alike = min(Counter([equation.primitive for equation in equations]).values())
                for loop in stack.parts[-1:]:
                    self._passes[loop] = max(self._passes[loop], visits[traceback], alike)
            for equation in equations:
                for each in _nested(equation):
                    # `jax.jit` names its equations, others that have a jaxpr don't.
                    nested[each, stack, "name" in equation.params] += n
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
                is_traced = code is _outermost_code
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

    def largest_arrays(self) -> tuple[MadeArray, ...]:
        """Return the temporary arrays that take most, summed by line and type."""
        made = [
            MadeArray(text, count * size, line, count)
            for (text, size, line), count in self._arrays.items()
            if count * size >= MANY_BYTES
        ]
        return tuple(sorted(made, key=lambda each: (-each.bytes, each.line))[:_MAX_ARRAYS])

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
