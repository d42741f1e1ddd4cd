"""Finds where the function under a wrapper is defined, and whether the user wrote it."""

import functools
import inspect
import types
from typing import Any, NamedTuple

import equinox as eqx
import jax

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
    - `transformation`: JAX's, if what is called is one of a function or a Module; else empty.
    - `owner`: the class of the object of which it is a method; else empty.
    - `is_loaded`: whether it is read from a file, by code of a library: its line says nothing.
    """

    module: str
    qualname: str
    site: CallSite | None
    code_hash: int = 0
    is_partial: bool = False
    transformation: str = ""
    owner: str = ""
    is_loaded: bool = False

    @property
    def is_users(self) -> bool:
        """True where the user wrote what is there."""
        return is_users(self.site.filename) if self.site else is_users_module(self.module)


def place_of(fun: Any, home: types.FunctionType | None) -> Place:
    """Return where a function is defined; `home` is the Python function below it, if any."""
    # Decorators have one code for all that they decorate.
    below: Any = None if home is None else unless_it_raises(lambda: inspect.unwrap(home), None)
    is_partial = type(fun) is functools.partial
    transformation, target = ("", None) if home is None else transformation_of(home)
    owner = _owner(fun)
    if isinstance(target, types.MethodType):
        below, owner = target.__func__, target.__self__
    if isinstance(target, eqx.Module) or not isinstance(below, types.FunctionType):
        kind: Any = type(fun if target is None else target)
        is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
        return Place(
            kind.__module__, kind.__qualname__, None, 0, is_partial, transformation, "", is_ours
        )
    code = below.__code__
    site = CallSite(code.co_filename, code.co_firstlineno)
    is_loaded = site.filename.startswith(OUR_FILES) or (
        isinstance(fun, types.MethodType) and site.filename.startswith(LIBRARY_FILES)
    )
    key = hash((code, *[function.__code__ for function in _captured_functions(below)]))
    of: str = "" if owner is None else type(owner).__qualname__
    return Place("", code.co_qualname, site, key, is_partial, transformation, of, is_loaded)


def _owner(fun: Any) -> Any:
    """Return the object of which a callable is a method; None for any other."""
    if isinstance(fun, types.MethodType):
        return fun.__self__
    # Equinox's bound methods are Modules.
    return vars(fun).get("__self__") if isinstance(fun, eqx.Module) else None


def captured(fun: types.FunctionType) -> list[tuple[str, Any]]:
    """Return what a function captured, by the names."""
    # An empty cell raises a `ValueError`; `repr` of a cell runs nothing of the user's.
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    return [(name, c.cell_contents) for name, c in cells if not repr(c).endswith(": empty>")]


def _captured_functions(fun: types.FunctionType) -> list[types.FunctionType]:
    return [value for _, value in captured(fun) if isinstance(value, types.FunctionType)]


def transformation_of(fun: types.FunctionType) -> tuple[str, Any]:
    """Return the name of JAX's transformation that a function is, and what it transforms.

    That is a Module also where it is one's method. An empty name and None for other functions.
    """
    below = vars(fun).get("__wrapped__")
    if below is None:
        return "", None
    for function in (fun, *_captured_functions(fun)):
        code = function.__code__
        name, _, rest = code.co_qualname.partition(".")
        if rest and hasattr(jax, name) and code.co_filename.startswith(JAX_FILES):
            target = unless_it_raises(lambda: inspect.unwrap(fun), None)
            if isinstance(below, types.MethodType) and isinstance(below.__self__, eqx.Module):
                target = below.__self__
            return name, target
    return "", None
