"""Finds the arrays that a program captured: its constants, with their names in the user's code.

A function that reads an array from a closure or a global variable has that array as a constant. JAX
copies it into each program, and XLA may compute with it at compile time.
"""

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Var

from .._compat import fields_of, stack_of, traceback_of
from .._places import captured, is_users, is_users_module, line_of, location, wrapped_by
from .._spec.tree import ARRAY_CLASSES
from .._text import bytes_text, short
from .description import array_text

#: A note says what to do about captured arrays of so many bytes in all.
MANY_BYTES = 2**20
# The names of no more objects are looked up.
_MAX_OBJECTS = 10_000


class CapturedArray(NamedTuple):
    """An array that a program captured, as a constant.

    - `name`: what the user's code calls it, such as `optics.cube`; empty if that wasn't found.
    - `type`: its dtype and shape, such as `float32[256,256]`.
    - `bytes`: its size.
    - `line`: the user's line that uses it first, such as `train.py:31`; empty for a library's.
    """

    name: str
    type: str
    bytes: int
    line: str

    def __str__(self) -> str:
        name = f"`{self.name}` " if self.name else "an array "
        line = f", used at {self.line}" if self.line else ""
        return f"{name}{self.type} ({bytes_text(self.bytes)}{line})"


def note_on(constants: Iterable[CapturedArray]) -> str:
    """Return what to do about captured arrays; empty if they are small."""
    constants = [*constants]
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
    return f"closes over {'; '.join(shown)}: pass {what}, or each program holds a copy{used}."


def constants_of(jaxpr: Any, roots: Iterable[Any]) -> tuple[CapturedArray, ...]:
    """Return the arrays that a program captured, the largest first.

    `roots` are the objects among which the names are looked for: the function, and static
    arguments.
    """
    found: dict[int, tuple[Any, str]] = {}
    for array, equation in _captured_in(jaxpr):
        found.setdefault(id(array), (array, _line_of(equation)))
    if not found:
        return ()
    names = _Names(roots)
    made = [
        CapturedArray(
            names.of(array), array_text(array.dtype, array.shape), int(array.nbytes), line
        )
        for array, line in found.values()
    ]
    return tuple(sorted(made, key=lambda each: -each.bytes))


def _captured_in(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each constant with the first equation that uses it, or None."""
    pending: list[tuple[Any, Any]] = [(jaxpr, None)]
    while pending:
        closed, around = pending.pop()
        constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=False))
        for equation in closed.jaxpr.eqns:
            if constants:
                for variable in equation.invars:
                    # A literal can't be hashed.
                    if isinstance(variable, Var):
                        array = constants.pop(variable, None)
                        if array is not None and hasattr(array, "nbytes"):
                            yield array, equation
            for value in equation.params.values():
                for each in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(each, ClosedJaxpr):
                        pending.append((each, equation))
        # What is only returned.
        for array in constants.values():
            if hasattr(array, "nbytes"):
                yield array, around


def _line_of(equation: Any) -> str:
    for code, offset in stack_of(traceback_of(equation)):
        if is_users(code.co_filename):
            return location(code.co_filename, line_of(code, offset))
    return ""


class _Names:
    """The names of arrays in the variables that functions read."""

    def __init__(self, roots: Iterable[Any]):
        self._by_id: dict[int, str] = {}
        self._by_type: dict[str, set[str]] = {}
        self._seen: set[int] = set()
        # Closures first: they are the nearest.
        self._pending: list[tuple[str, Any]] = [("", root) for root in roots]
        while self._pending and len(self._seen) < _MAX_OBJECTS:
            self._visit(*self._pending.pop(0))

    def of(self, array: Any) -> str:
        """Return the name of a captured array; empty without one."""
        name = self._by_id.get(id(array))
        if name is None:
            # JAX keeps NumPy arrays as copies of its own.
            names = self._by_type.get(array_text(array.dtype, array.shape), set())
            name = min(names) if len(names) == 1 else ""
        return name

    def _visit(self, name: str, value: Any) -> None:
        """Look at what a variable holds. Runs no code of the user's, such as a flatten."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        kind = type(value)
        if kind in ARRAY_CLASSES or issubclass(kind, (np.ndarray, jax.Array)):
            self._by_id[id(value)] = name
            for text in _types_in_jax(value):
                self._by_type.setdefault(text, set()).add(name)
        elif issubclass(kind, eqx.Module):
            self._add_parts(name, [(f".{key}", part) for key, part in fields_of(value).items()])
            if is_users_module(kind.__module__) and "__call__" in dir(kind):
                self._pending.append(("", kind.__call__))
        elif issubclass(kind, dict):
            self._add_parts(name, [(f"[{short(key)}]", part) for key, part in dict.items(value)])
        elif issubclass(kind, (tuple, list)):
            names = [f".{key}" for key in getattr(kind, "_fields", ())]
            parts = [*(tuple if issubclass(kind, tuple) else list).__iter__(value)]
            names = names if len(names) == len(parts) else [f"[{i}]" for i in range(len(parts))]
            self._add_parts(name, zip(names, parts, strict=True))
        elif callable(value):
            self._add_callables(name, value)
        is_plain = is_users_module(kind.__module__) and not issubclass(kind, (eqx.Module, type))
        if is_plain and kind.__dictoffset__:
            attributes = object.__getattribute__(value, "__dict__")
            self._add_parts(name, [(f".{key}", part) for key, part in attributes.items()])

    def _add_parts(self, name: str, parts: Iterable[tuple[str, Any]]) -> None:
        self._pending += [((name + suffix).lstrip("."), part) for suffix, part in parts]

    def _add_callables(self, name: str, value: Any) -> None:
        for each in wrapped_by(value):
            if isinstance(each, types.MethodType):
                self._pending.append(("self", each.__self__))
            elif isinstance(each, types.FunctionType):
                self._pending += _variables_of(each)
            elif each is not value:
                self._pending.append((name, each))


def _types_in_jax(array: Any) -> set[str]:
    """Return the types that an array may have as a constant: its own, and the one JAX gives it."""
    texts = {array_text(array.dtype, array.shape)}
    if isinstance(array.dtype, np.dtype) and not array.dtype.hasobject:
        with contextlib.suppress(TypeError, ValueError):
            # JAX rejects some dtypes, such as text.
            texts.add(array_text(jax.dtypes.canonicalize_dtype(array.dtype), array.shape))
    return texts


def _variables_of(fun: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function of the user's reads from around it."""
    yield from captured(fun)
    if not is_users(fun.__code__.co_filename):
        return
    codes = [fun.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            value = fun.__globals__.get(name)
            if isinstance(value, types.ModuleType):
                # Of another module of the user's, what the function reads.
                if is_users_module(value.__name__):
                    for attribute in code.co_names:
                        if attribute in vars(value):
                            yield f"{name}.{attribute}", vars(value)[attribute]
            elif value is not None:
                yield name, value
