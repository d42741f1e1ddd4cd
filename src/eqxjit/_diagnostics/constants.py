"""Finds the arrays that a program captured as constants, and their names in the user's code.

If a function reads an array from a closure or a global variable, the array becomes a constant of
the program. JAX copies it into each program, and XLA may compute with it at compile time.
"""

import contextlib
import math
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Var

from .._compat import fields_of, stack_of, traceback_of
from .._places import captured, is_users, is_users_module, line_of, location, wrapped_by
from .._spec.static_key import items_of
from .._spec.tree import ARRAY_CLASSES
from .._text import bytes_text, short
from .description import array_text

#: Arrays that take at least this many bytes together get a note that says what to do about them.
MANY_BYTES = 2**20
# The search for names stops after so many objects.
_MAX_OBJECTS = 10_000


class CapturedArray(NamedTuple):
    """An array that a program captured as a constant.

    - `name`: the array's name in the user's code, such as `optics.cube`; empty if none was found.
    - `type`: the array's dtype and shape, such as `float32[256,256]`.
    - `bytes`: the array's size in bytes.
    - `line`: the user's line that uses the array first, such as `train.py:31`; empty if no line of
        the user's does.
    """

    name: str
    type: str
    bytes: int
    line: str

    def __str__(self) -> str:
        name = f"`{self.name}` " if self.name else "an array "
        line = f", used at {self.line}" if self.line else ""
        return f"{name}{self.type} ({bytes_text(self.bytes)}{line})"


def note_on(constants: Sequence[CapturedArray]) -> str:
    """Return a note that says what to do about captured arrays; empty if they are small.

    `constants` are all captured arrays of a program, the largest first.
    """
    if sum([each.bytes for each in constants]) < MANY_BYTES:
        return ""
    large = [each for each in constants if each.bytes * 10 >= constants[0].bytes][:3]
    shown = [
        f"{f'`{each.name}` ' if each.name else ''}{each.type}, {bytes_text(each.bytes)}"
        for each in large
    ]
    what = "it as an argument" if len(large) == 1 else "them as arguments"
    lines = [*dict.fromkeys(each.line for each in large if each.line)]
    used = f" (used at {', '.join(lines)})" if lines else ""
    # The caller puts the function's name in front.
    return f"closes over {'; '.join(shown)}: pass {what}, or each program holds a copy{used}."


def constants_of(jaxpr: Any, roots: Iterable[Any]) -> tuple[CapturedArray, ...]:
    """Return the arrays that a program captured, the largest first.

    `roots` are the objects from which the search for names starts: the function and the static
    arguments.
    """
    first_lines: dict[int, tuple[Any, str]] = {}
    for array, equation in _captured_in(jaxpr):
        first_lines.setdefault(id(array), (array, _line_of(equation)))
    if not first_lines:
        return ()
    names = _Names(roots)
    constants: list[CapturedArray] = []
    for array, line in first_lines.values():
        text = array_text(array.dtype, array.shape)
        constants.append(CapturedArray(names.of(array), text, bytes_of(array), line))
    return tuple(sorted(constants, key=lambda each: -each.bytes))


def bytes_of(constant: Any) -> int:
    """Return the size of a constant in bytes; 0 for one that isn't an array."""
    # Not `nbytes`, which JAX's own class for NumPy arrays lacked in 0.8.
    if not hasattr(constant, "dtype") or not hasattr(constant, "shape"):
        return 0
    return math.prod(constant.shape) * constant.dtype.itemsize


def _captured_in(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each constant of a jaxpr or a nested jaxpr, with the first equation that uses it.

    A constant that is only returned comes with the equation around its jaxpr, or with `None`.
    """
    pending: list[tuple[Any, Any]] = [(jaxpr, None)]
    while pending:
        closed, around = pending.pop()
        # The constants that no equation has used so far.
        unused = dict(zip(closed.jaxpr.constvars, closed.consts, strict=False))
        for equation in closed.jaxpr.eqns:
            # Literals are left out, because they aren't hashable.
            variables = [v for v in equation.invars if isinstance(v, Var)] if unused else []
            for variable in variables:
                array = unused.pop(variable, None)
                if array is not None and bytes_of(array):
                    yield array, equation
            for value in equation.params.values():
                for each in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(each, ClosedJaxpr):
                        pending.append((each, equation))
        for array in unused.values():
            if bytes_of(array):
                yield array, around


def _line_of(equation: Any) -> str:
    """Return the user's innermost line on the stack of an equation; empty if there is none."""
    for code, offset in stack_of(traceback_of(equation)):
        if is_users(code.co_filename):
            return location(code.co_filename, line_of(code, offset))
    return ""


class _Names:
    """The names of the arrays that can be reached from some objects.

    Arrays in containers, in objects, and in the variables that functions read are reached. The
    search is breadth first, so an array gets the name with the fewest steps.
    """

    def __init__(self, roots: Iterable[Any]):
        # The name of each array by its `id`, and the names of all arrays of a type by the type.
        self._by_id: dict[int, str] = {}
        self._by_type: dict[str, set[str]] = {}
        self._seen: set[int] = set()
        self._pending: list[tuple[str, Any]] = [("", root) for root in roots]
        while self._pending and len(self._seen) < _MAX_OBJECTS:
            self._visit(*self._pending.pop(0))

    def of(self, array: Any) -> str:
        """Return the name of a captured array; empty if none was found."""
        name = self._by_id.get(id(array))
        if name is None:
            # The constant may be JAX's copy of a NumPy array. Its type identifies that array, if no
            # other array has the same type.
            names = self._by_type.get(array_text(array.dtype, array.shape), set())
            name = min(names) if len(names) == 1 else ""
        return name

    def _visit(self, name: str, value: Any) -> None:
        """Note the name of an array, or add the contents of any other value to the search.

        This runs no code of the user's, such as a flatten, except the `repr` of a dict's keys.
        """
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        cls = type(value)
        if cls in ARRAY_CLASSES or issubclass(cls, (np.ndarray, jax.Array)):
            self._by_id[id(value)] = name
            for text in _types_in_jax(value):
                self._by_type.setdefault(text, set()).add(name)
        elif issubclass(cls, eqx.Module):
            self._add_contents(name, [(f".{key}", each) for key, each in fields_of(value).items()])
            if is_users_module(cls.__module__) and "__call__" in dir(cls):
                self._pending.append(("", cls.__call__))
        elif issubclass(cls, dict):
            items = dict.items(value)
            self._add_contents(name, [(f"[{short(key)}]", each) for key, each in items])
        elif issubclass(cls, (tuple, list)):
            items = items_of(value)
            suffixes = [f".{key}" for key in getattr(cls, "_fields", ())]
            if len(suffixes) != len(items):
                suffixes = [f"[{i}]" for i in range(len(items))]
            self._add_contents(name, zip(suffixes, items, strict=True))
        elif callable(value):
            self._add_callables(name, value)
        is_plain = is_users_module(cls.__module__) and not issubclass(cls, (eqx.Module, type))
        if is_plain and cls.__dictoffset__:
            attributes = object.__getattribute__(value, "__dict__")
            self._add_contents(name, [(f".{key}", each) for key, each in attributes.items()])

    def _add_contents(self, name: str, contents: Iterable[tuple[str, Any]]) -> None:
        """Add the contents of a container to the search, each with the suffix of its name."""
        self._pending += [((name + suffix).lstrip("."), each) for suffix, each in contents]

    def _add_callables(self, name: str, value: Any) -> None:
        """Add a function's variables to the search, or the contents of any other callable."""
        for each in wrapped_by(value):
            if isinstance(each, types.MethodType):
                self._pending.append(("self", each.__self__))
            elif isinstance(each, types.FunctionType):
                self._pending += _variables_of(each)
            elif each is not value:
                self._pending.append((name, each))


def _types_in_jax(array: Any) -> set[str]:
    """Return the types that an array may have as a constant.

    One is the array's own type. The other has the dtype to which JAX converts the array's, such as
    `float32` for `float64`.
    """
    texts = {array_text(array.dtype, array.shape)}
    if isinstance(array.dtype, np.dtype) and not array.dtype.hasobject:
        # JAX rejects some dtypes, such as those of strings.
        with contextlib.suppress(TypeError, ValueError):
            texts.add(array_text(jax.dtypes.canonicalize_dtype(array.dtype), array.shape))
    return texts


def _variables_of(fun: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each variable that a function closes over.

    If the user wrote the function, also yield the global variables that it may read.
    """
    yield from captured(fun)
    if not is_users(fun.__code__.co_filename):
        return
    codes = [fun.__code__]
    while codes:
        code = codes.pop()
        # Functions that are defined within this one read variables, too.
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            value = fun.__globals__.get(name)
            if isinstance(value, types.ModuleType):
                # If the user's code reads `module.attribute`, both names are among `co_names`.
                if is_users_module(value.__name__):
                    for attribute in code.co_names:
                        if attribute in vars(value):
                            yield f"{name}.{attribute}", vars(value)[attribute]
            elif value is not None:
                yield name, value
