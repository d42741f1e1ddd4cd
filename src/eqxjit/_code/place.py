"""Finds lines of the user's: where a function is defined, and which line made a call."""

import builtins
import functools
import inspect
import os
import re
import sys
import types
from types import FrameType
from typing import Any, NamedTuple

import equinox as eqx
import jax

from .._interruptions import unless_it_raises
from .files import JAX_FILES, LIBRARY_FILES, OUR_FILES, is_users, is_users_module

# What IPython calls a cell where it doesn't write the cell to a file.
_IPYTHON_INPUT = re.compile(r"<ipython-input-(\d+)-")


class CallSite(NamedTuple):
    """A line of the user's: its file, and its number from 1."""

    filename: str
    line: int

    def __str__(self) -> str:
        return location(self.filename, self.line)


def call_site() -> CallSite:
    """Return the innermost line on the stack that is the user's, or at least isn't JAX's."""
    innermost: CallSite | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(LIBRARY_FILES):
            site = CallSite(filename, frame.f_lineno)
            if is_users(filename):
                return site
            innermost = innermost or site
        frame = frame.f_back
    return innermost or CallSite("<unknown>", 0)


def location(filename: str, line: int) -> str:
    """Return what to call a line: `src/train.py:31`, `Cell In[11], line 3`.

    The path is relative to the working directory; of a file elsewhere it is absolute, or begins
    with `~`.
    """
    cell = _cell(filename)
    return f"Cell {cell}, line {line}" if cell else f"{_path(filename)}:{line}"


def _cell(filename: str) -> str:
    """Return what IPython calls the cell that it gave this file name; empty if it is none."""

    def label() -> Any:
        # Not imported here: without IPython there is no cell.
        get_ipython = getattr(builtins, "get_ipython", None) or sys.modules["IPython"].get_ipython
        return get_ipython().compile.format_code_name(filename)[1]

    # No IPython, no session of it, no cell of it, or one of another release.
    found = unless_it_raises(label, None) if _may_have_cells() else None
    if found is not None:
        return found
    match = _IPYTHON_INPUT.match(filename)
    return f"In[{match[1]}]" if match else ""


def _may_have_cells() -> bool:
    return "IPython" in sys.modules or hasattr(builtins, "get_ipython")


def _path(filename: str) -> str:
    # It may have been removed.
    here = unless_it_raises(os.getcwd, "")
    return _path_from(here, os.path.expanduser("~"), filename)


@functools.lru_cache(maxsize=256)
def _path_from(here: str, home: str, filename: str) -> str:
    if not os.path.isabs(filename):
        return filename
    filename = os.path.normpath(filename)
    # The working directory comes without symbolic links.
    return (
        _below(here, filename, "")
        or _below(here, os.path.realpath(filename), "")
        or _below(home, filename, os.path.join("~", ""))
        or filename
    )


def _below(folder: str, filename: str, prefix: str) -> str:
    """Return the path from a folder to a file below it; empty for any other file."""
    start = folder + os.sep
    # All is below the root, which is no help.
    if os.path.dirname(folder) == folder or not filename.startswith(start):
        return ""
    return prefix + filename[len(start) :]


# --- Where a function is defined ------------------------------------------------------------------


def stub_at(site: CallSite) -> types.CodeType:
    """Return a code object that seems to be from a line, and holds nothing of what is there."""
    return _nothing.__code__.replace(co_filename=site.filename, co_firstlineno=site.line)


def _nothing() -> None:
    pass


def location_of(fun: Any) -> CallSite | None:
    """Return where the Python code below a callable is; None without such code of a user's."""
    # Objects may answer for attributes as they like.
    code = unless_it_raises(lambda: _code_of(fun), None)
    if code is None or code.co_filename.startswith(OUR_FILES):
        return None
    return CallSite(code.co_filename, code.co_firstlineno)


def _code_of(fun: Any) -> types.CodeType | None:
    for _ in range(100):
        if isinstance(fun, (functools.partial, eqx.Partial)):
            below = fun.func
        elif hasattr(fun, "__wrapped__"):
            below = fun.__wrapped__
        elif isinstance(getattr(fun, "__code__", None), types.CodeType):
            return fun.__code__
        else:
            below = type(fun).__call__
        if below is fun:
            break
        fun = below
    return None


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
