"""The size of a program: its equations, the lines and loops that create them, and large arrays.

JAX keeps with each equation the stack on which the equation was created: code objects, and the
offset of an instruction in each. If the bytecode of a code object jumps back over that instruction,
the instruction is in a loop. A loop counts as unrolled if one stack within it created equations
many times, with equations of other stacks in between, or created many equations of one kind.
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

# A program with fewer equations gets neither lines nor notes on loops.
_MANY_EQUATIONS = 200
# A loop gets a note if it ran this often, and created a quarter of the equations.
_MANY_PASSES = 8
# The arrays of one line and type are listed if they take `MANY_BYTES` in all. An array smaller than
# `_FEW_BYTES` isn't counted.
_FEW_BYTES = 2**10
_MAX_ARRAYS = 3

# Operations that can't write an output over an input of the same shape, because they read elements
# of the input again after they have written others of the output.
_NOT_IN_PLACE = {"dot_general", "conv_general_dilated", "sort", "gather"}
# The advice on an unrolled loop of the user's.
_SCAN = (
    "use `jax.lax.scan` or `jax.lax.fori_loop` (over layers: stack them by `eqx.filter_vmap`, and "
    "scan over that), or `jax.vmap` where the steps don't depend on each other"
)
_DIFFRAX = os.path.join("diffrax", "")
_INLINED = "inlined"
# The advice on a large loop in a library, by a part of the path of the library's file.
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
    """The temporary arrays of one type that one line of a program creates.

    - `type`: the dtype and shape of each array, such as `float32[2048,64]`.
    - `bytes`: the bytes that all these arrays take together.
    - `line`: the user's line that creates the arrays.
    - `number`: the number of these arrays.
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
    """The bytes of memory that a compiled program needs, as XLA reports them.

    - `arguments`: the bytes of the arguments.
    - `outputs`: the bytes of the outputs.
    - `donated`: the bytes that arguments and outputs share.
    - `temporaries`: the bytes of temporary arrays.
    """

    arguments: int
    outputs: int
    donated: int
    temporaries: int

    def __str__(self) -> str:
        arguments, outputs, _, temporaries = map(bytes_text, self)
        return f"{arguments} of arguments, {outputs} of outputs, {temporaries} of temporaries"


class Program(NamedTuple):
    """The size of a program.

    - `equations`: the number of equations in the jaxpr, nested equations included.
    - `lines`: the user's lines that create a tenth of the equations or more, each with the lines
        that call it, such as `"rollout:31 -> policy:12: 1,800 of 2,700"`; empty for small programs.
    - `loops`: where Python loops are unrolled, such as `"train.py:31"`.
    - `notes`: what to do about the program's size, and about large arrays that it closes over.
    - `largest_arrays`: the temporary arrays that take the most memory, summed by line and type. It
        is an estimate from the jaxpr, before XLA fuses operations.
    - `constants`: the arrays that the program closes over, the largest first.
    - `donation_saves`: how many bytes donation of the arguments would save, because outputs are new
        values of arguments with the same shape and dtype. Gradients don't count.
    - `calls_python`: whether the program has a host callback. JAX's persistent cache never holds
        such a program.
    - `memory`: the memory that the compiled program needs; `None` if XLA's figures can't be had
        without compiling again.
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
    """Return the memory that a lowered program needs; `None` if JAX hasn't compiled it."""
    sizes = memory_of(lowering)
    return Memory(*sizes) if sizes else None


def program_of(jaxpr: Any, lowering: Any, constants: tuple[CapturedArray, ...] = ()) -> Program:
    """Return the size of a program, from its jaxpr and JAX's lowering of it.

    A jaxpr that is nested in two equations counts twice, because it is compiled twice. `constants`
    are the arrays that the program captured.
    """
    reader = _Reader(jaxpr.jaxpr)
    calls_python = has_host_callback(lowering)
    n_equations = reader.n_equations.total()
    lines: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if n_equations >= _MANY_EQUATIONS:
        lines = reader.lines()
        loops, notes = reader.loops_and_notes(calls_python)
    note = note_on(constants)
    if note:
        notes = (*notes, note)
    return Program(
        equations=n_equations,
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

    If no output is a new value of an argument, the caller goes on using the arguments, as with a
    function that computes gradients. If at least one output is, the function is taken for a step
    that replaces all of its state, and every output counts that could use an argument's buffer.
    """
    if not any(_updated_arguments(jaxpr)):
        return 0
    arguments, outputs = [
        Counter([(str(v.aval), _bytes(v.aval)) for v in variables])
        for variables in (jaxpr.invars, jaxpr.outvars)
    ]
    shared = arguments & outputs
    return sum([count * size for (_, size), count in shared.items()])


def _updated_arguments(jaxpr: Any) -> list[frozenset[int]]:
    """Return for each output the indices of the arguments of which the output is a new value.

    An output is a new value of an argument if it has the argument's shape and is computed from it
    through values of that shape. Backward passes don't count, because they compute gradients.
    """
    # The indices of the arguments of which a variable is a new value, by the variable.
    sources: dict[Any, frozenset[int]] = {v: frozenset((i,)) for i, v in enumerate(jaxpr.invars)}

    def sources_of(variable: Any, result: Any) -> frozenset[int]:
        # A literal isn't hashable, and comes from no argument.
        if not _is_variable(variable) or variable.aval.shape != result.aval.shape:
            return frozenset()
        return sources.get(variable, frozenset())

    for equation in jaxpr.eqns:
        if is_backward(equation):
            continue
        nested = [*_nested_jaxprs(equation)]
        # The inputs of each result that the result may be a new value of.
        inputs_of: list[list[Any]] = []
        if not nested:
            inputs_of = [equation.invars] * len(equation.outvars)
        elif len(nested) == 1 and len(nested[0].invars) == len(equation.invars):
            # The inputs of the nested jaxpr are those of the equation, in the same order.
            inputs_of = [
                [equation.invars[i] for i in each] for each in _updated_arguments(nested[0])
            ]
        for result, inputs in zip(equation.outvars, inputs_of, strict=False):
            found = [sources_of(variable, result) for variable in inputs]
            sources[result] = frozenset().union(*found)
    return [sources_of(variable, variable) for variable in jaxpr.outvars]


def _bytes(aval: Any) -> int:
    """Return how many bytes an array takes; 0 if that is unknown."""
    # A token has no dtype, and a dimension may be symbolic.
    if not hasattr(aval, "dtype") or not {*map(type, aval.shape)} <= {int}:
        return 0
    return aval.dtype.itemsize * math.prod(aval.shape)


def _alive_at_peak(jaxpr: Any) -> list[tuple[Any, Any]]:
    """Return the temporary arrays that are alive when the most bytes are in use.

    Each comes as a pair: the equation that computes the array, and its variable. Equations are
    taken to run in the jaxpr's order, and an array to live from its equation to the last equation
    that uses it. XLA runs them in a different order and fuses some, so the result is an estimate.
    """
    equations = jaxpr.eqns
    last_uses = {v: i for i, e in enumerate(equations) for v in e.invars if _is_variable(v)}
    # Arrays that a jaxpr returns aren't temporary: they are outputs of the program, or of the
    # equation around the jaxpr.
    returned = {*filter(_is_variable, jaxpr.outvars)}
    # The indices of the first and last equations in the life of a temporary array, by its variable.
    spans: dict[Any, tuple[int, int]] = {}
    n_bytes = 0
    peak = 0
    peak_at = 0
    for i, equation in enumerate(equations):
        temporary_inputs = {*filter(_is_variable, equation.invars)} & spans.keys()
        dying = [variable for variable in temporary_inputs if last_uses[variable] == i]
        for variable in equation.outvars:
            size = _bytes(variable.aval)
            if size < _FEW_BYTES or variable in returned or variable not in last_uses:
                continue
            spans[variable] = i, last_uses[variable]
            n_bytes += size
            reused = next((v for v in dying if _can_reuse_buffer(equation, v, variable)), None)
            if reused is not None:
                # Two arrays in one buffer count once: the input's life ends an equation earlier.
                spans[reused] = spans[reused][0], i - 1
                dying.remove(reused)
                n_bytes -= size
        if n_bytes > peak:
            peak = n_bytes
            peak_at = i
        n_bytes -= sum([_bytes(variable.aval) for variable in dying])
    return [
        (equations[start], variable)
        for variable, (start, stop) in spans.items()
        if start <= peak_at <= stop
    ]


def _is_variable(value: Any) -> bool:
    return isinstance(value, Var)


def _can_reuse_buffer(equation: Any, operand: Any, result: Any) -> bool:
    """Return whether XLA can write the result of an equation over one of its operands."""
    if equation.primitive.name in _NOT_IN_PLACE or any(True for _ in _nested_jaxprs(equation)):
        return False
    is_same_shape = operand.aval.shape == result.aval.shape
    return is_same_shape and _bytes(operand.aval) == _bytes(result.aval)


def _nested_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs among an equation's parameters, such as the body of a scan."""
    for value in equation.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, (ClosedJaxpr, Jaxpr)):
                yield getattr(each, "jaxpr", each)


# --- Stacks -----------------------------------------------------------------------------------

# The code of our function that calls the user's function while JAX traces it.
_outermost_code: types.CodeType | None = None


def begin_stacks_at(code: types.CodeType) -> None:
    """Let the stacks of equations begin at our function with this code.

    The core calls this at import, because this module may not import the core.
    """
    global _outermost_code
    _outermost_code = code


class _Stack(NamedTuple):
    """The user's lines that lead to an equation, and the loops and libraries around it.

    - `lines`: the user's lines, outermost first, such as `policy:12`. A recursive function has each
        of its lines once.
    - `where`: the location of the innermost line, such as `train.py:12`.
    - `parts`: the parts of the program that contain the equation, outermost first, as pairs of a
        place and a kind. The kind is empty for a loop of the user's, whose place is the line where
        the loop begins. It is a key of `_IN_LIBRARIES` for a library, whose place is the user's
        line that calls the library. It is `_INLINED` for an inlined function, whose place is the
        function's name and location.
    """

    lines: tuple[str, ...] = ()
    where: str = "a library"
    parts: tuple[tuple[str, str], ...] = ()

    def within(self, *parts: tuple[str, str]) -> "_Stack":
        """Return the stack with more parts around the equation, innermost last."""
        return self._replace(parts=tuple(dict.fromkeys((*self.parts, *parts))))

    def call(self, kind: str, code: types.CodeType, offset: int) -> "_Stack":
        """Return the stack with one more call, at an instruction of a code object.

        `kind` is empty for code of the user's, and a key of `_IN_LIBRARIES` for code of a library.
        """
        starts = [start for start, end in _loops_in(code) if start <= offset <= end]
        if kind:
            # Diffrax counts without a loop, because its stages are a large program already.
            return self.within((self.where, kind)) if starts or kind == _DIFFRAX else self
        line = line_of(code, offset)
        name = f"{code.co_qualname.rpartition('<locals>.')[2]}:{line}"
        lines = self.lines if name in self.lines else (*self.lines, name)
        stack = _Stack(lines, location(code.co_filename, line), self.parts)
        loops = [location(code.co_filename, line_of(code, start)) for start in starts]
        return stack.within(*[(loop, "") for loop in loops])


@functools.lru_cache(maxsize=1024)
def _loops_in(code: types.CodeType) -> list[tuple[int, int]]:
    """Return the first and last offset of each loop in the bytecode, outermost first."""
    ends: dict[int, int] = {}
    for instruction in dis.get_instructions(code):
        if "JUMP_BACKWARD" in instruction.opname:
            # If several instructions jump to one place, as `continue` does, the last one ends the
            # loop.
            ends[instruction.argval] = instruction.offset
    return sorted(ends.items(), key=lambda loop: loop[0] - loop[1])


# The name, file and first line of a function that JAX traced.
_Source = tuple[str, str, int]


class _Reader:
    """Counts the equations of a jaxpr by the stacks on which they were created.

    - `n_equations`: the number of equations for each stack.
    """

    def __init__(self, jaxpr: Any):
        self.n_equations: Counter[_Stack] = Counter()
        # The results of `_Stack.call`, by the stack, and by the code and offset of the added call.
        self._calls: dict[tuple[_Stack, int, int], _Stack] = {}
        # The number of arrays that are alive at the peak, by type, bytes of one array, and line.
        self._arrays: Counter[tuple[str, int, str]] = Counter()
        # How many passes through each loop or other part of a stack created equations.
        self._passes: Counter[tuple[str, str]] = Counter()
        # How many times each jitted function of the user's is inlined, by its name and location.
        self._n_inlined: Counter[str] = Counter()
        self._read(jaxpr, _Stack(), None, 1)

    def _read(self, jaxpr: Any, around: _Stack, source: _Source | None, n_uses: int) -> None:
        """Count what is in a jaxpr that is used `n_uses` times on the stack `around`.

        `source` is the function that JAX traced for the jaxpr; `None` for the outermost jaxpr.
        """
        self._count_arrays(jaxpr, around, source)
        stacks: dict[Any, _Stack] = {None: around}
        visits: Counter[Any] = Counter()
        # The number of uses of a nested jaxpr, by the jaxpr, the stack, and whether an equation of
        # `jax.jit` uses it.
        nested: Counter[tuple[Any, _Stack, bool]] = Counter()
        for traceback, group in itertools.groupby(jaxpr.eqns, traceback_of):
            equations = [*group]
            if traceback not in stacks:
                stacks[traceback] = self._stack_of(traceback, around, source)
            stack = stacks[traceback]
            self.n_equations[stack] += n_uses * len(equations)
            # A backward pass goes through all lines again. So does the forward pass that
            # `jax.checkpoint` repeats.
            if not is_backward(equations[0]):
                visits[traceback] += 1
                self._count_passes(stack, equations, visits[traceback])
            for equation in equations:
                for each in _nested_jaxprs(equation):
                    # Among equations with a jaxpr, only those of `jax.jit` have a name.
                    nested[each, stack, "name" in equation.params] += n_uses
        for (each, stack, is_jitted), count in nested.items():
            self._read_nested(each, stack, is_jitted, count)

    def _count_arrays(self, jaxpr: Any, around: _Stack, source: _Source | None) -> None:
        """Count the temporary arrays of a jaxpr that are alive at its peak."""
        for equation, variable in _alive_at_peak(jaxpr):
            where = self._stack_of(traceback_of(equation), around, source).where
            text = array_text(variable.aval.dtype, variable.aval.shape)
            self._arrays[text, _bytes(variable.aval), where] += 1

    def _count_passes(self, stack: _Stack, equations: list[Any], n_visits: int) -> None:
        """Note how many passes the innermost loop around some equations has made, as far as known.

        The equations follow one another on one stack, which has come up `n_visits` times so far.
        """
        # A loop over one operation creates equations that follow one another, as many of each kind
        # as it has passes. So does an operation that consists of several equations, but these are
        # rarely all of one kind.
        n_alike = min(Counter([equation.primitive for equation in equations]).values())
        for part in stack.parts[-1:]:
            self._passes[part] = max(self._passes[part], n_visits, n_alike)

    def _read_nested(self, jaxpr: Any, stack: _Stack, is_jitted: bool, n_uses: int) -> None:
        """Count what is in a jaxpr that is nested in equations of this stack."""
        source = source_of(jaxpr)
        if is_jitted and source and is_users(source[1]):
            name, filename, line = source
            inlined = f"`{name}` ({location(filename, line)})"
            self._n_inlined[inlined] += n_uses
            stack = stack.within((inlined, _INLINED))
        self._read(jaxpr, stack, source, n_uses)

    def _stack_of(self, traceback: Any, around: _Stack, source: _Source | None) -> _Stack:
        """Return the stack of an equation from JAX's traceback.

        `around` is the stack on which JAX traced the function that contains the equation, and
        `source` that function.
        """
        calls: list[tuple[types.CodeType, int]] = []
        for code, offset in stack_of(traceback):
            calls.append((code, offset))
            if source:
                is_traced_function = (code.co_filename, code.co_firstlineno) == source[1:]
            else:
                is_traced_function = code is _outermost_code
            if is_traced_function:
                break
        else:
            # JAX has traced the function in an earlier call, from elsewhere.
            return around
        stack = around
        for code, offset in reversed(calls):
            kinds = [""] if is_users(code.co_filename) else _IN_LIBRARIES
            for kind in [kind for kind in kinds if kind in code.co_filename]:
                # An `id` will do, because JAX's traceback keeps the code alive.
                key = stack, id(code), offset
                if key not in self._calls:
                    self._calls[key] = stack.call(kind, code, offset)
                stack = self._calls[key]
        return stack

    # --- What is reported ---------------------------------------------------------------------

    def largest_arrays(self) -> tuple[MadeArray, ...]:
        """Return the temporary arrays that take the most memory, summed by line and type."""
        arrays = [
            MadeArray(text, count * size, line, count)
            for (text, size, line), count in self._arrays.items()
            if count * size >= MANY_BYTES
        ]
        return tuple(sorted(arrays, key=lambda each: (-each.bytes, each.line))[:_MAX_ARRAYS])

    def lines(self) -> tuple[str, ...]:
        """Return the lines that create a tenth of the equations, with the lines that call them."""
        n = self.n_equations.total()
        # The number of equations for each path of lines. A path begins with the outermost line.
        counts: Counter[tuple[str, ...]] = Counter()
        for stack, count in self.n_equations.items():
            for i in range(len(stack.lines)):
                counts[stack.lines[: i + 1]] += count
        large = [(path, count) for path, count in counts.most_common() if count * 10 >= n]
        n_below: Counter[tuple[str, ...]] = Counter()
        for path, count in large:
            n_below[path[:-1]] += count
        # A path is left out if longer paths account for its equations, except for at most a quarter
        # of the program's equations.
        shown = [
            (path, count)
            for path, count in large
            if not n_below[path] or (count - n_below[path]) * 4 > n
        ]
        return tuple([f"{' -> '.join(path)}: {count:,} of {n:,}" for path, count in shown])

    def loops_and_notes(self, calls_python: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return where loops of the user's are unrolled, and what to do about the size.

        `calls_python` is whether the program has a host callback.
        """
        n = self.n_equations.total()
        loops: list[str] = []
        notes: list[str] = []
        # `most_common` returns parts with equally many equations in order, the outermost first.
        for (where, kind), count in self._repeated_parts().most_common():
            share = f"{count:,} of {n:,} equations"
            n_inlined = self._n_inlined[where]
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

    def _repeated_parts(self) -> Counter[tuple[str, str]]:
        """Return the parts of stacks that repeat equations, with the number of these equations."""
        repeated: Counter[tuple[str, str]] = Counter()
        for stack, count in self.n_equations.items():
            n_around = 1
            for where, kind in stack.parts:
                n_passes = self._passes[where, kind]
                # The passes of an inner loop are summed over all passes of the outer loop, so the
                # inner loop counts only if it has many passes in each pass of the outer loop.
                if n_passes >= _MANY_PASSES * n_around or kind in (_DIFFRAX, _INLINED):
                    repeated[where, kind] += count
                if not kind:
                    n_around = max(n_around, n_passes)
        return repeated
