"""Finds where the function under a wrapper is defined, and whether the user wrote it."""

import functools
import inspect
import types
from typing import Any, NamedTuple

import equinox as eqx

from .._interruptions import unless_it_raises
from .call_site import CallSite
from .files import JAX_FILES, LIBRARY_FILES, OUR_FILES, is_users, is_users_module


class Place(NamedTuple):
    """The definition of the function under a wrapper.

    - `module`, `qualname`: of the function, or of the class of whatever else is called. (A Python
        function's file says more than its module.)
    - `site`: the line of a Python function; None for anything else.
    - `code_hash`: tells functions apart whose lines have one name, as in a session, and those that
        wrap other functions.
    - `is_partial`: whether it is called through a `functools.partial`.
    - `transformation`: JAX's, if what is called is one of a Module; else empty.
    - `is_loaded`: whether it is read from a file, by code of a library: its line says nothing.
    """

    module: str
    qualname: str
    site: CallSite | None
    code_hash: int = 0
    is_partial: bool = False
    transformation: str = ""
    is_loaded: bool = False

    @property
    def is_users(self) -> bool:
        """True where the user wrote what is there."""
        return is_users(self.site.filename) if self.site else is_users_module(self.module)


def place_of(fun: Any, home: types.FunctionType | None) -> Place:
    """Return where a function is defined; `home` is the Python function below it, if any."""
    # Decorators have one code for all that they decorate.
    below = None if home is None else unless_it_raises(lambda: inspect.unwrap(home), None)
    is_partial = type(fun) is functools.partial
    transformation, module = ("", None) if home is None else transformation_of(home)
    if transformation or not isinstance(below, types.FunctionType):
        kind = type(fun if module is None else module)
        is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
        return Place(
            kind.__module__, kind.__qualname__, None, 0, is_partial, transformation, is_ours
        )
    code = below.__code__
    site = CallSite(code.co_filename, code.co_firstlineno)
    is_loaded = site.filename.startswith(OUR_FILES) or (
        isinstance(fun, types.MethodType) and site.filename.startswith(LIBRARY_FILES)
    )
    key = hash((code, *[function.__code__ for function in _captured_functions(below)]))
    return Place("", code.co_qualname, site, key, is_partial, is_loaded=is_loaded)


def captured(fun: types.FunctionType) -> list[tuple[str, Any]]:
    """Return what a function captured, by the names."""
    # An empty cell raises a `ValueError`; `repr` of a cell runs nothing of the user's.
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    return [(name, c.cell_contents) for name, c in cells if not repr(c).endswith(": empty>")]


def _captured_functions(fun: types.FunctionType) -> list[types.FunctionType]:
    return [value for _, value in captured(fun) if isinstance(value, types.FunctionType)]


def transformation_of(fun: types.FunctionType) -> tuple[str, Any]:
    """Return the name of JAX's transformation of a Module, and that; empty and None for others."""
    # Or of a method of the Module, or of another transformation.
    module = unless_it_raises(lambda: inspect.unwrap(fun), None)
    below = getattr(fun, "__wrapped__", None)
    if isinstance(below, types.MethodType):
        module = below.__self__
    if not isinstance(module, eqx.Module):
        return "", None
    for function in (fun, *_captured_functions(fun)):
        name, _, rest = function.__code__.co_qualname.partition(".")
        if rest and name != "api_boundary" and function.__code__.co_filename.startswith(JAX_FILES):
            return name, module
    return "", None
