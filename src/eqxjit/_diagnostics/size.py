"""The size of a program: its equations, the lines and loops that make them, and its large arrays.

Each equation knows the stack on which it was made: code objects, and an instruction of each. Where
the bytecode of one jumps back around the instruction, it is in a loop. That is unrolled if the
stacks of successive equations go back to its beginning many times.
"""

import collections
import dis
import functools
import math
import os
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

from .._compat import source_of, stack_of
from .._places import OUR_FILES, is_users, location
from .._text import bytes_text, times
from .description import array_text

# Smaller programs have neither lines nor notes.
_MANY_EQUATIONS = 200
# A loop is unrolled if it is passed so often, and makes a quarter of the equations.
_MANY_PASSES = 8
# Of those lines that make a tenth, these are listed; and so many arrays, if they are so large.
_MAX_LINES = 5
_MAX_ARRAYS = 3
_MANY_BYTES = 2**20

_SCAN = (
    "use `jax.lax.scan` or `jax.lax.fori_loop` (over layers: stack them by `eqx.filter_vmap`, and "
    "scan over that), or `jax.vmap` where the steps don't depend on each other"
)
_UNROLLED = "loop", "recursion"
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
    _DIFFRAX: (
        "solves by Diffrax: a solver of fewer stages makes it smaller, and with `throw=False` "
        "JAX's persistent cache holds it"
    ),
}


class MadeArray(NamedTuple):
    """An array that a program makes on the way: its type, its bytes, and the user's line."""

    type: str
    bytes: int
    line: str

    def __str__(self) -> str:
        return f"{self.type} ({bytes_text(self.bytes)}) at {self.line}"


class Program(NamedTuple):
    """What a trace has made.

    - `equations`: their number, nested ones included.
    - `lines`: the user's lines that make a tenth of them or more, each with those that call it, as
        `"rollout:31 -> policy:12: 1,800 of 2,700"`; empty for small programs.
    - `loops`: where loops in Python are unrolled, as `"train.py:31"`.
    - `notes`: what to do about its size.
    - `largest_arrays`: the largest arrays that it makes on the way, before XLA fuses operations.
    - `donation_saves`: how many bytes of its outputs have the shape and dtype of an argument.
    """

    equations: int
    lines: tuple[str, ...]
    loops: tuple[str, ...]
    notes: tuple[str, ...]
    largest_arrays: tuple[MadeArray, ...]
    donation_saves: int


def program_of(jaxpr: Any) -> Program:
    """Return what a jaxpr consists of, with what is nested in it.

    What is nested twice counts twice, as it is compiled twice.
    """
    n, arrays = _count(jaxpr.jaxpr)
    lines = loops = notes = ()
    if n >= _MANY_EQUATIONS:
        reader = _Reader(jaxpr.jaxpr)
        lines, (loops, notes) = _listed(reader.lines, n), _notes(reader, n)
    ins, outs = [
        collections.Counter([(str(v.aval), _bytes(v.aval)) for v in variables])
        for variables in (jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars)
    ]
    saves = sum([count * size for (_, size), count in (ins & outs).items()])
    return Program(n, lines, loops, notes, arrays, saves)


def _count(jaxpr: Any) -> tuple[int, tuple[MadeArray, ...]]:
    """Return the number of equations, nested ones included, and the largest arrays."""
    n, arrays, outputs = 0, set[MadeArray](), {*map(id, jaxpr.outvars)}
    # It grows while it is gone through. Not by recursion, because loops may be nested deeply.
    parts: list[tuple[Any, Any]] = [(jaxpr, None)]
    for part, around in parts:
        n += len(part.eqns)
        source = source_of(part) if around else None
        for equation in part.eqns:
            nested = [*_nested(equation)]
            stack = equation.source_info.traceback, source, around
            parts += [(each, stack) for each in nested]
            # The outputs of others are those of an equation in them.
            makes = not nested or equation.primitive.name == "scan"
            for variable in equation.outvars if makes else ():
                size = _bytes(variable.aval)
                if size >= _MANY_BYTES and id(variable) not in outputs:
                    kind = array_text(variable.aval.dtype, variable.aval.shape)
                    arrays.add(MadeArray(kind, size, _line_of(stack)))
    return n, tuple(sorted(arrays, key=lambda array: (-array.bytes, array.line))[:_MAX_ARRAYS])


def _line_of(stack: Any) -> str:
    """Return the user's innermost line of a stack, or else of those around it."""
    while stack is not None:
        traceback, source, stack = stack
        for code, offset in reversed(_below(stack_of(traceback), source)):
            if is_users(code.co_filename):
                return _Code(code).place(offset)
    return "a line of a library"


def _bytes(aval: Any) -> int:
    # A token has no shape, and a size may be a symbol.
    shape = getattr(aval, "shape", (0,))
    return aval.dtype.itemsize * math.prod(shape) if {*map(type, shape)} <= {int} else 0


class _Code:
    """A code object on a stack, and what each line of it needs."""

    def __init__(self, code: types.CodeType):
        self.code = code
        self.is_users = is_users(code.co_filename)
        self.library = "" if self.is_users else _library(code.co_filename)

    @functools.cached_property
    def loops(self) -> list[tuple[int, int]]:
        """The offsets between which the bytecode jumps back, outside in."""
        if _JUMPS.isdisjoint(self.code.co_code[::2]):
            return []
        jumps = [i for i in dis.get_instructions(self.code) if i.opcode in _JUMPS]
        # Of several jumps to one place, as by `continue`, the last is the end of the loop.
        ends = {each.argval: each.offset for each in jumps if each.argval < each.offset}
        return sorted(ends.items(), key=lambda loop: loop[0] - loop[1])

    def loops_around(self, *offsets: int) -> list[tuple[int, int]]:
        return [each for each in self.loops if each[0] <= min(offsets) <= max(offsets) <= each[1]]

    def place(self, offset: int) -> str:
        return location(self.code.co_filename, self.line(offset))

    def line(self, offset: int) -> int:
        lines = [line for start, end, line in self.code.co_lines() if start <= offset < end]
        return next(filter(None, lines), self.code.co_firstlineno)


# Those back: the others have other names.
_JUMPS = {code for name, code in dis.opmap.items() if "JUMP" in name and "BACKWARD" in name}


@functools.lru_cache(maxsize=4096)
def _library(filename: str) -> str:
    return next((part for part in _IN_LIBRARIES if part in filename), "")


class _Line:
    """A place in the code, on the stack of the one that calls it, and its equations."""

    __slots__ = ("around", "calls", "claims", "code", "depth", "n", "offset", "passes", "path")

    def __init__(self, around: "_Line | None", code: _Code, offset: int):
        self.around = around
        self.code = code
        self.offset = offset
        self.calls: dict[tuple[int, int], _Line] = {}
        self.n = 0
        #: Among those around it, how many are of the same function.
        self.depth = 0
        #: The user's lines down to here; of a function that calls itself the innermost one.
        self.path: tuple[str, ...] = () if around is None else around.path
        if code.is_users and around is not None:
            same = [line for line in self.all_around() if line.code is code]
            self.depth = len(same)
            outer = same[-1].around if same else around
            assert outer is not None
            name = code.code.co_qualname.rpartition("<locals>.")[2]
            self.path = (*outer.path, f"{name}:{code.line(offset)}")

    def loop(self, start: int) -> "_Loop":
        assert self.around is not None
        return self.around, self.code, start

    def all_around(self) -> "Iterator[_Line]":
        line = self.around
        while line is not None:
            yield line
            line = line.around

    @property
    def text(self) -> str:
        """The user's innermost line."""
        lines = (line for line in (self, *self.all_around()) if line.code.is_users)
        line = next(lines, None)
        return line.code.place(line.offset) if line else "a line of a library"


# A loop is the line around it, its code, and where it begins.
_Loop = tuple[_Line, _Code, int]


class _Reader:
    """The equations of a jaxpr, by the stacks on which they were made."""

    def __init__(self, jaxpr: Any):
        self.codes: dict[int, _Code] = {}
        root = _Line(None, _Code(_Reader.__init__.__code__), 0)
        #: Each after that which calls it.
        self.lines = [root]
        # How often each loop began again, by the stack of the equation with which it did.
        self.passes: dict[_Loop, collections.Counter[_Line]] = {}
        # Of jitted functions of the user's: how often each is used, and its equations.
        self.n_uses: collections.Counter[str] = collections.Counter()
        self.n_inlined: collections.Counter[str] = collections.Counter()
        parts: list[Any] = [(jaxpr, root, (), 1)]
        for part in parts:
            parts += self._read(*part)

    def _read(self, jaxpr: Any, around: _Line, within: tuple[str, ...], n: int) -> Iterable[Any]:
        """Read a jaxpr that is used `n` times; return the jaxprs in it, in the same way."""
        source = source_of(jaxpr) if around.around else None
        stacks: dict[Any, list[_Line]] = {}
        loops: dict[tuple[int, int], _Loop | None] = {}
        parts: collections.Counter[tuple[Any, ...]] = collections.Counter()
        before: list[_Line] = []
        primitive: Any = None
        for equation in jaxpr.eqns:
            traceback = equation.source_info.traceback
            stack = stacks.get(traceback)
            if stack is None:
                stack = stacks[traceback] = self._stack(traceback, around, source)
            # Of one stack are also the parts of one operation.
            elif stack is not before or equation.primitive is primitive:
                pair = id(before), id(stack)
                if pair not in loops:
                    loops[pair] = _loop_between(before, stack)
                loop = loops[pair]
                # The way back of a gradient goes through all lines again, from the last one.
                if loop and "transpose(" not in str(equation.source_info.name_stack):
                    self.passes.setdefault(loop, collections.Counter())[stack[-1]] += 1
            primitive = equation.primitive
            before, line = stack, stack[-1] if stack else around
            line.n += n
            for each in _nested(equation):
                jitted = source_of(each) if "name" in equation.params else None
                label = ""
                if jitted and is_users(jitted[1]):
                    label = f"`{jitted[0]}` ({location(*jitted[1:])})"
                    self.n_uses[label] += n
                parts[each, line, (*within, label) if label else within] += n
        for label in within:
            self.n_inlined[label] += n * len(jaxpr.eqns)
        return [(*part, count) for part, count in parts.items()]

    def _stack(self, traceback: Any, around: _Line, source: Any) -> list[_Line]:
        """Return the lines of a traceback, outside in, within the function that was traced."""
        stack: list[_Line] = []
        for code, offset in _below(stack_of(traceback), source):
            line = around.calls.get((id(code), offset))
            if line is None:
                if id(code) not in self.codes:
                    self.codes[id(code)] = _Code(code)
                line = around.calls[id(code), offset] = _Line(around, self.codes[id(code)], offset)
                self.lines.append(line)
            stack.append(line)
            around = line
        return stack

    def n_passes(self, loop: _Loop) -> int:
        # By the equation with which it mostly begins: some begin again within a pass.
        return 1 + max(self.passes.get(loop, {0: 0}).values())

    def claims(self) -> "collections.Counter[tuple[str, str]]":
        """Return the equations of each place that has a kind of loop, or of a library."""
        found: collections.Counter[tuple[str, str]] = collections.Counter()
        for line in self.lines:
            if line.around is None:
                line.claims, line.passes = frozenset(), 1
                continue
            line.claims, line.passes = line.around.claims, line.around.passes
            new = {*self._claims(line)}
            if new:
                line.claims = line.claims | new
            for claim in line.claims if line.n else ():
                found[claim] += line.n
        return found

    def _claims(self, line: _Line) -> Iterator[tuple[str, str]]:
        code, around = line.code, line.around
        assert around is not None
        for start in [*[start for start, _ in code.loops_around(line.offset)], line.offset]:
            n_passes = self.n_passes(line.loop(start))
            # In each pass of the loop around it.
            if n_passes >= _MANY_PASSES * line.passes:
                if code.is_users:
                    line.passes = n_passes
                    yield code.place(start), "loop"
                elif code.library:
                    yield around.text, code.library
        if code.is_users and line.depth >= _MANY_PASSES:
            yield code.place(line.offset), "recursion"
        if code.library == _DIFFRAX:
            yield around.text, code.library


def _nested(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def _below(stack: Any, source: tuple[str, str, int] | None) -> Any:
    """Return the part of a stack from the function with that source on, or from our call of it."""
    start = 0
    for i, (code, _) in enumerate(stack):
        if code.co_name == "_run" and code.co_filename.startswith(OUR_FILES):
            start = i + 1
    if source is None:
        return stack[start:]
    for i in range(start, len(stack)):
        code = stack[i][0]
        if code.co_firstlineno == source[2] and code.co_filename == source[1]:
            return stack[i:]
    # Another release of JAX, or a function of C: what is certain is the innermost line.
    of_user = [i for i, (code, _) in enumerate(stack) if is_users(code.co_filename)]
    return stack[of_user[-1] :] if of_user else ()


def _loop_between(before: list[_Line], stack: list[_Line]) -> _Loop | None:
    """Return the innermost loop that began again between two equations, the latter's not first."""
    both = [*zip(before, stack, strict=False)]
    depth = next((i for i, (old, new) in enumerate(both) if old is not new), len(both))
    if depth < len(both):
        old, new = both[depth]
        offsets = {new.offset}
        if old.code is new.code:
            offsets.add(old.offset)
            if new.offset > old.offset:
                return None
        for start, _ in new.code.loops_around(*offsets)[-1:]:
            return new.loop(start)
    # What is there was called again.
    for line in reversed(stack[:depth]):
        for start, _ in line.code.loops_around(line.offset)[-1:]:
            return line.loop(start)
    # By `functools.reduce`, say: C runs a function of the user's within another.
    for line, called in zip(stack[:depth][::-1], stack[1 : depth + 1][::-1], strict=False):
        if line.code.is_users and called.code.is_users:
            return line.loop(line.offset)
    return None


# --- What is reported -------------------------------------------------------------------------


def _listed(lines: list[_Line], n: int) -> tuple[str, ...]:
    """Return the lines that make most equations, each with those that call it."""
    tree: collections.Counter[tuple[str, ...]] = collections.Counter()
    for line in lines:
        for i in range(len(line.path)):
            tree[line.path[: i + 1]] += line.n
    large = [(path, count) for path, count in tree.most_common() if count * 10 >= n]
    below: collections.Counter[tuple[str, ...]] = collections.Counter()
    for path, count in large:
        below[path[:-1]] += count
    # Some calls of a line may stand out, and others not.
    shown = [(path, c) for path, c in large if not below[path] or (c - below[path]) * 4 > n]
    return tuple([f"{' -> '.join(path)}: {c:,} of {n:,}" for path, c in shown[:_MAX_LINES]])


def _notes(reader: _Reader, n: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return where loops of the user's are unrolled, and what to do about the size."""
    loops: list[str] = []
    notes: list[str] = []
    for (where, kind), count in reader.claims().most_common():
        share = f"{count:,} of {n:,} equations"
        if kind in _UNROLLED and count * 4 >= n and len(loops) < _MAX_LINES:
            loops.append(where)
            notes.append(f"the {kind} at {where} is unrolled, and makes {share}: {_SCAN}.")
        # A loop around that comes first.
        elif kind in _IN_LIBRARIES and count * 2 >= n and not loops:
            notes.append(f"{where} makes {share}, and {_IN_LIBRARIES[kind]}.")
    for label, count in reader.n_inlined.most_common():
        if reader.n_uses[label] >= _MANY_PASSES and count * 4 >= n:
            notes.append(
                f"{label} is inlined {times(reader.n_uses[label])}, and makes {count:,} of {n:,} "
                "equations: `jax.jit` within a jitted function saves none."
            )
    return tuple(loops), tuple(notes)
