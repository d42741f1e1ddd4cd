"""Whose a line is: files of libraries, places of functions, call sites, and trimmed tracebacks."""

import contextlib
import functools
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax

from ._compat import exclude_from_locations, exclude_from_tracebacks

#: Where generated files seem to be: in a folder, as those of a package are.
GENERATED_FOLDER = "<eqxjit>"


def _folder_of(file: str) -> str:
    return os.path.join(os.path.dirname(file), "")


#: How the paths of our files begin, generated ones included.
OUR_FILES = _folder_of(__file__), GENERATED_FOLDER + "/"

for _path in OUR_FILES:
    exclude_from_tracebacks(_path)
    exclude_from_locations(_path)

_JAX_FILES = _folder_of(jax.__file__)

# The same of eqxjit, JAX, Equinox, the standard library, and source that was generated.
_LIBRARY_FILES = (
    *(*OUR_FILES, _JAX_FILES, _folder_of(eqx.__file__), _folder_of(os.__file__)),
    *("<frozen ", "<@beartype", "<attrs generated", "<decorator-gen", "<__array_function__"),
)

# Into which pip and distributions of Linux install packages.
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return whether a file is the user's: neither installed nor of the standard library."""
    # What is imported has a whole path. The rest is a session, say, or what the user compiled.
    is_installed = os.path.isabs(filename) and _INSTALLED.search(filename)
    return not (is_installed or filename.startswith(_LIBRARY_FILES))


def is_jax(filename: str) -> bool:
    return filename.startswith(_JAX_FILES)


def is_users_module(name: str) -> bool:
    if not isinstance(name, str) or name in sys.builtin_module_names:
        return False
    filename = getattr(sys.modules.get(name), "__file__", None)
    # Without a file it is a session, a notebook, or one that the user made.
    return not isinstance(filename, str) or is_users(filename)


# JAX's filter is for printed tracebacks alone, and only where it isn't switched off.
def trim() -> None:
    """Trim the traceback of the exception that the caller handles, before `raise`.

    Of our frames two are left: the caller's, which stands for the jitted call, and the innermost.
    """
    error = sys.exception()
    assert error is not None
    entry = error.__traceback__
    while entry is not None and (below := entry.tb_next) is not None:
        if below.tb_next is None or not below.tb_frame.f_code.co_filename.startswith(OUR_FILES):
            entry = below
        else:
            entry.tb_next = below.tb_next


# Not a `contextmanager`, because its generator would add frames.
class _Trimming(contextlib.AbstractContextManager[None]):
    """A context whose exceptions leave it with a trimmed traceback."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            trim()


#: For functions that aren't generated.
trimming = _Trimming()


# --- Lines and functions --------------------------------------------------------------------------


class CallSite(NamedTuple):
    """A line of the user's: its file, its number from 1, and the function that it is in."""

    filename: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return location(self.filename, self.line)


def innermost_line(
    frame: types.FrameType | None, is_meant: Callable[[str], bool] = is_users
) -> CallSite | None:
    """Return the innermost line, from a frame outwards, in a file of the user's; None without."""
    for each, line in traceback.walk_stack(frame) if frame else ():
        code = each.f_code
        if is_meant(code.co_filename):
            return CallSite(code.co_filename, line, code.co_qualname)
    return None


def call_site() -> CallSite:
    """Return the innermost line on the stack that is the user's, or at least isn't JAX's."""
    here = sys._getframe(1)
    found = innermost_line(here) or innermost_line(here, lambda f: not f.startswith(_LIBRARY_FILES))
    return found or CallSite("<unknown>", 0)


def location(filename: str, line: int) -> str:
    """Return what to call a line: `src/train.py:31`, `/elsewhere/a.py:1`, `Cell In[11], line 3`."""
    # Not imported here, because without IPython there is no cell.
    ipython: Any = sys.modules.get("IPython")
    # No session of it, no cell of that, or another release.
    with contextlib.suppress(AttributeError, TypeError):
        return f"Cell {ipython.get_ipython().compile.format_code_name(filename)[1]}, line {line}"
    try:
        here = os.getcwd()
    except FileNotFoundError:
        # It was removed. Below the root is everything: no path begins with two slashes.
        here = os.sep
    return f"{os.path.normpath(filename).removeprefix(here + os.sep)}:{line}"


def wrapped_by(value: Any) -> Iterator[Any]:
    """Yield a callable and what it wraps, outside in."""
    # Not `inspect.unwrap`, which stops at a partial; wrappers that form a circle have an end here.
    for _ in range(100):
        yield value
        if isinstance(value, (functools.partial, eqx.Partial)):
            value = value.func
        elif isinstance(value, types.MethodType):
            value = value.__func__
        elif hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        else:
            return


def code_of(value: Any) -> types.CodeType | None:
    """Return the code of the function in all wrappers; None if that isn't written in Python."""
    *_, value = wrapped_by(value)
    code = getattr(value, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


class Place(NamedTuple):
    """The definition of the function under a wrapper.

    - `module`: of the class of whatever else is called; empty for a Python function, whose file
        says more.
    - `qualname`: of the function, or of that class.
    - `site`: where its Python code is; None without any that isn't ours.
    - `is_users`: whether it is the user's.
    - `code_hash`: tells functions apart whose lines have one name, as in a session, and what
        decorators wrap.
    """

    module: str
    qualname: str
    site: CallSite | None
    is_users: bool
    code_hash: int = 0


def place_of(fun: Any) -> Place:
    """Return where the function in all wrappers is defined."""
    *_, below = wrapped_by(fun)
    code = code_of(below) or code_of(type(below).__call__)
    site = None
    if code is not None and not code.co_filename.startswith(OUR_FILES):
        site = CallSite(code.co_filename, code.co_firstlineno)
    if isinstance(below, types.FunctionType):
        code = below.__code__
        codes = hash(tuple(_codes_in(below)))
        return Place("", code.co_qualname, site, is_users(code.co_filename), codes)
    # A transformed Module, or whatever else is called.
    kind: Any = type(below if isinstance(below, eqx.Module) else fun)
    return Place(kind.__module__, kind.__qualname__, site, is_users_module(kind.__module__))


def captured(fun: types.FunctionType) -> list[tuple[str, Any]]:
    # An empty cell raises a `ValueError`; `repr` of a cell runs nothing of the user's.
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    return [(name, c.cell_contents) for name, c in cells if not repr(c).endswith(": empty>")]


def _codes_in(fun: types.FunctionType) -> list[types.CodeType]:
    """Return the code of a function, and of those that it captured."""
    functions = [value for _, value in captured(fun) if isinstance(value, types.FunctionType)]
    return [function.__code__ for function in (fun, *functions)]


def transformation_of(fun: types.FunctionType) -> str:
    """Return the name of JAX's transformation that a function is; empty for another function."""
    for code in _codes_in(fun) if "__wrapped__" in vars(fun) else ():
        name, _, rest = code.co_qualname.partition(".")
        if rest and hasattr(jax, name) and code.co_filename.startswith(_JAX_FILES):
            return name
    return ""
