"""The size of a program: its equations, the lines and loops that make them, and its large arrays.

Each equation knows the stack on which it was made: code objects, and an instruction of each. Where
the bytecode of one jumps back around the instruction, it is in a loop. That is unrolled if the
stacks of successive equations go back to its beginning many times.
"""

import collections
import dis
import math
import os
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

from .._compat import has_host_callback, memory_of, source_of, stack_of
from .._places import JAX_FILES, OUR_FILES, is_users, location
from .._text import bytes_text, times
from .description import array_text

# Smaller programs have neither lines nor notes.
_MANY_EQUATIONS = 200
# A loop is unrolled if it is passed so often, and makes a quarter of the equations.
_MANY_PASSES = 8
# Of those lines that make a tenth, so many are listed.
_MAX_LINES = 5
#: Smaller arrays aren't listed, nor more of them.
MANY_BYTES = 2**20
_MAX_ARRAYS = 3

_SCAN = (
    "use `jax.lax.scan` or `jax.lax.fori_loop` (over layers: stack them by `eqx.filter_vmap`, and "
    "scan over that), or `jax.vmap` where the steps don't depend on each other"
)
_DIFFRAX = os.path.join("diffrax", "")
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
    n, n_bytes, parts, calls_python = 0, 0, [jaxpr.jaxpr], has_host_callback(lowering)
    # It grows while it is gone through. Not by recursion, because loops may be nested deeply.
    for part in parts:
        n += len(part.eqns)
        for equation in part.eqns:
            n_bytes = max([n_bytes, *[_bytes(v.aval) for v in equation.outvars]])
            parts += _nested(equation)
    arrays = lines = loops = notes = ()
    if n >= _MANY_EQUATIONS or n_bytes >= MANY_BYTES:
        reader = _Reader(jaxpr.jaxpr)
        arrays = reader.largest_arrays()
        if n >= _MANY_EQUATIONS:
            lines, (loops, notes) = reader.listed(n), reader.notes(n, calls_python)
    ins, outs = [
        collections.Counter([(str(v.aval), _bytes(v.aval)) for v in variables])
        for variables in (jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars)
    ]
    saves = sum([count * size for (_, size), count in (ins & outs).items()])
    what = n, lines, loops, notes, arrays, saves
    return Program(*what, calls_python, memory_in(lowering))


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


class _Code:
    """A code object on a stack, and the loops in it."""

    def __init__(self, code: types.CodeType):
        self.code = code
        self.name = code.co_qualname.rpartition("<locals>.")[2]
        self.is_users = is_users(code.co_filename)
        self.is_jax = code.co_filename.startswith(JAX_FILES)
        libraries = () if self.is_users else _IN_LIBRARIES
        self.library = next((part for part in libraries if part in code.co_filename), "")
        ends: dict[int, int] = {}
        if not _JUMPS_BACK.isdisjoint(code.co_code[::2]):
            for each in dis.get_instructions(code):
                if each.opcode in _JUMPS_BACK:
                    # Of several to one place, as by `continue`, the last is the end of the loop.
                    ends[each.argval] = each.offset
        #: How often it is on one stack, at most.
        self.n_calls = 0
        #: The offsets between which the bytecode jumps back, outside in.
        self.loops = sorted(ends.items(), key=lambda loop: loop[0] - loop[1])

    def loops_around(self, *offsets: int) -> list[int]:
        """Return where the loops begin that hold all of these, outside in."""
        return [start for start, end in self.loops if start <= min(offsets) and max(offsets) <= end]

    def line(self, offset: int) -> int:
        lines = [line for start, end, line in self.code.co_lines() if start <= offset < end]
        return next(filter(None, lines), self.code.co_firstlineno)

    def place(self, offset: int) -> str:
        return location(self.code.co_filename, self.line(offset))


_JUMPS_BACK = {code for name, code in dis.opmap.items() if "JUMP" in name and "BACKWARD" in name}


class _Line:
    """A place in the code, on the stack of the one that calls it, and its equations."""

    def __init__(self, around: Any, code: _Code, offset: int):
        self.around = around
        self.code = code
        self.offset = offset
        self.calls: dict[tuple[int, int], _Line] = {}
        self.n = 0
        #: The user's lines down to here, and the innermost one of them.
        self.path: tuple[str, ...] = around.path if around else ()
        self.where: str = around.where if around else "a library"
        if code.is_users:
            self.path += (f"{code.name}:{code.line(offset)}",)
            self.where = code.place(offset)


# A loop is the line around it, its code, and where it begins.
_Loop = tuple[_Line, _Code, int]


class _Reader:
    """The equations of a jaxpr, by the stacks on which they were made."""

    def __init__(self, jaxpr: Any):
        self.codes: dict[int, _Code] = {}
        #: Each after that which calls it. The first stands for all.
        self.lines = [_Line(None, _Code(dis.dis.__code__), 0)]
        # How often each loop began again, with which line.
        self.again: dict[_Loop, Any] = collections.defaultdict(collections.Counter)
        # Of jitted functions of the user's: how often each is used, and its equations.
        self.n_uses: collections.Counter[str] = collections.Counter()
        self.n_inlined: collections.Counter[str] = collections.Counter()
        self.made: dict[Any, tuple[Any, _Line]] = {}
        self.outputs = {*map(id, jaxpr.outvars)}
        parts: list[Any] = [(jaxpr, self.lines[0], (), 1)]
        for part in parts:
            parts += self._read(*part)

    def _read(self, jaxpr: Any, around: _Line, within: tuple[str, ...], n: int) -> list[Any]:
        """Read a jaxpr that is used `n` times; return the jaxprs in it, in the same way."""
        source = source_of(jaxpr) if around.around else None
        stacks: dict[Any, list[_Line]] = {}
        loops: dict[tuple[int, int], _Loop | None] = {}
        parts: collections.Counter[tuple[Any, ...]] = collections.Counter()
        # Of an equation without a traceback.
        before = stacks[None] = []
        primitive, run = None, 0
        for equation in jaxpr.eqns:
            traceback = equation.source_info.traceback
            stack = stacks.get(traceback)
            if stack is None:
                stack = stacks[traceback] = self._stack(traceback, around, source)
            pair = id(before), id(stack)
            if pair not in loops:
                loops[pair] = _loop_between(before, stack)
            loop = loops[pair]
            line = stack[-1] if stack else around
            # The parts of one operation have one stack, too, but are hardly so many alike.
            run = run + 1 if stack is before and equation.primitive is primitive else 0
            # The way back of a gradient goes through all lines again, from the last one.
            if loop and "transpose(" not in str(equation.source_info.name_stack):
                n_again = self.again[loop][line]
                self.again[loop][line] = max(n_again, run) if stack is before else n_again + 1
            before, primitive = stack, equation.primitive
            line.n += n
            nested = [*_nested(equation)]
            for each in nested:
                jitted = source_of(each) if "name" in equation.params else None
                inside = within
                if jitted and is_users(jitted[1]):
                    inside = (*within, f"`{jitted[0]}` ({location(*jitted[1:])})")
                    self.n_uses[inside[-1]] += n
                parts[each, line, inside] += n
            # The outputs of others are those of an equation in them.
            if not nested or primitive.name == "scan":
                for variable in equation.outvars:
                    if _bytes(variable.aval) >= MANY_BYTES:
                        self.made[id(variable)] = variable.aval, line
        for label in within:
            self.n_inlined[label] += n * len(jaxpr.eqns)
        return [(*part, count) for part, count in parts.items()]

    def _stack(self, traceback: Any, around: _Line, source: Any) -> list[_Line]:
        """Return the lines of a traceback, outside in, within the function that was traced."""
        stack, calls = [around], collections.Counter[_Code]()
        for code, offset in _below(stack_of(traceback), source):
            # Which keeps the code alive, and so its number.
            if id(code) not in self.codes:
                self.codes[id(code)] = _Code(code)
            shared = self.codes[id(code)]
            if shared.is_users:
                calls[shared] += 1
                shared.n_calls = max(shared.n_calls, calls[shared])
                # Of a function that calls itself, the innermost call.
                codes = [line.code for line in stack[1:]]
                stack = stack[: codes.index(shared) + 1] if shared in codes else stack
            calling = stack[-1]
            if (id(code), offset) not in calling.calls:
                calling.calls[id(code), offset] = _Line(calling, shared, offset)
                self.lines.append(calling.calls[id(code), offset])
            stack.append(calling.calls[id(code), offset])
        return stack[1:]

    # --- What is reported ---------------------------------------------------------------------

    def largest_arrays(self) -> tuple[MadeArray, ...]:
        made = [each for key, each in self.made.items() if key not in self.outputs]
        found = {
            MadeArray(array_text(aval.dtype, aval.shape), _bytes(aval), line.where)
            for aval, line in made
        }
        return tuple(sorted(found, key=lambda each: (-each.bytes, each.line))[:_MAX_ARRAYS])

    def listed(self, n: int) -> tuple[str, ...]:
        """Return the lines that make most equations, each with those that call it."""
        tree: collections.Counter[tuple[str, ...]] = collections.Counter()
        for line in self.lines:
            for i in range(len(line.path)):
                tree[line.path[: i + 1]] += line.n
        large = [(path, count) for path, count in tree.most_common() if count * 10 >= n]
        below: collections.Counter[tuple[str, ...]] = collections.Counter()
        for path, count in large:
            below[path[:-1]] += count
        # Some calls of a line may stand out, and others not.
        shown = [(path, c) for path, c in large if not below[path] or (c - below[path]) * 4 > n]
        return tuple([f"{' -> '.join(path)}: {c:,} of {n:,}" for path, c in shown[:_MAX_LINES]])

    def notes(self, n: int, calls_python: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return where loops of the user's are unrolled, and what to do about the size."""
        loops: list[str] = []
        notes: list[str] = []
        for (where, kind), count in self._claims().most_common():
            share = f"{count:,} of {n:,} equations"
            if kind not in _IN_LIBRARIES and count * 4 >= n and len(loops) < _MAX_LINES:
                loops.append(where)
                notes.append(f"the {kind} at {where} is unrolled, and makes {share}: {_SCAN}.")
            # A loop around that comes first.
            elif kind in _IN_LIBRARIES and count * 2 >= n and not loops:
                also = ", and so does `throw=False`" if calls_python and kind == _DIFFRAX else ""
                notes.append(f"{where} makes {share}, and {_IN_LIBRARIES[kind]}{also}.")
        for label, count in self.n_inlined.most_common():
            if self.n_uses[label] >= _MANY_PASSES and count * 4 >= n:
                notes.append(
                    f"{label} is inlined {times(self.n_uses[label])}, and makes {count:,} of "
                    f"{n:,} equations: `jax.jit` within a jitted function saves none."
                )
        return tuple(loops), tuple(notes)

    def _claims(self) -> "collections.Counter[tuple[str, str]]":
        """Return the equations of each place that has a kind of loop, or of a library."""
        found: collections.Counter[tuple[str, str]] = collections.Counter()
        # Of each line, with those around it; and how often it was passed.
        claims: dict[_Line, set[tuple[str, str]]] = {self.lines[0]: set()}
        passes = {self.lines[0]: 1}
        for line in self.lines[1:]:
            code, new, n_around = line.code, set[tuple[str, str]](), passes[line.around]
            for start in code.loops_around(line.offset):
                # By the equation with which it mostly begins: some begin again within a pass.
                again = self.again.get((line.around, code, start), {line: 0})
                n_passes = 1 + max(again.values())
                # In each pass of the loop around it.
                if n_passes >= _MANY_PASSES * n_around:
                    if code.is_users:
                        n_around = n_passes
                        new.add((code.place(start), "loop"))
                    elif code.library:
                        new.add((line.where, code.library))
            if code.n_calls >= _MANY_PASSES:
                new.add((code.place(0), "recursion"))
            if code.library == _DIFFRAX:
                new.add((line.where, code.library))
            passes[line], claims[line] = n_around, claims[line.around] | new
            for claim in claims[line] if line.n else ():
                found[claim] += line.n
        return found


def _below(stack: Any, source: tuple[str, str, int] | None) -> Any:
    """Return the part of a stack from the function with that source on, or from our call of it."""
    files = [(code.co_filename, code.co_firstlineno) for code, _ in stack]
    for i in range(len(stack) - 1, -1, -1):
        if stack[i][0].co_name == "_run" and files[i][0].startswith(OUR_FILES):
            stack, files = stack[i + 1 :], files[i + 1 :]
            break
    if source is None:
        return stack
    # What JAX traced for an earlier call came from elsewhere.
    return stack[files.index(source[1:]) :] if source[1:] in files else ()


def _loop_between(before: list[_Line], stack: list[_Line]) -> _Loop | None:
    """Return the innermost loop that began again between two equations, if the stacks show it."""
    both = [*zip(before, stack, strict=False)]
    depth = next((i for i, (old, new) in enumerate(both) if old is not new), len(both))
    candidates = [(line, [line.offset]) for line in stack[:depth]]
    for old, new in both[depth : depth + 1]:
        offsets = [new.offset]
        if old.code is new.code:
            # Of one call, if a loop holds both; otherwise it was called again, by a loop around it.
            offsets.append(old.offset)
            if new.offset > old.offset:
                return None
        candidates.append((new, offsets))
    is_of_jax = depth < len(both) and both[depth][1].code.is_jax
    for line, offsets in reversed(candidates):
        # It makes parts of an operation in whatever order, as for gradients.
        if is_of_jax and not line.code.is_jax:
            return None
        for start in line.code.loops_around(*offsets)[-1:]:
            return line.around, line.code, start
    return None
