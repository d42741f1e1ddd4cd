"""Tells user code from library code, finds call sites and places, and trims tracebacks."""

import contextlib
import functools
import os
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import equinox as eqx
import jax

from ._compat import exclude_from_locations, exclude_from_tracebacks
from ._text import comes_from_signal_handler

#: The folder that the names of generated files begin with, as if they were in a package.
GENERATED_FOLDER = "<eqxjit>"


def _folder_of(file: str) -> str:
    return os.path.join(os.path.dirname(file), "")


#: How the paths of our files begin, generated ones included.
OUR_FILES = _folder_of(__file__), GENERATED_FOLDER + "/"

for _path in OUR_FILES:
    exclude_from_tracebacks(_path)
    exclude_from_locations(_path)

_JAX_FILES = _folder_of(jax.__file__)

# How the paths of libraries' files begin: ours, JAX's, Equinox's, the standard library's, and
# source that was generated.
_LIBRARY_FILES = (
    *(*OUR_FILES, _JAX_FILES, _folder_of(eqx.__file__), _folder_of(os.__file__)),
    *("<frozen ", "<@beartype", "<attrs generated", "<decorator-gen", "<__array_function__"),
)

# The folders into which pip and distributions of Linux install packages.
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return whether a file is the user's: neither installed nor of the standard library."""
    # An imported file has an absolute path. Other names stand for a session, say.
    is_installed = os.path.isabs(filename) and _INSTALLED.search(filename)
    return not (is_installed or filename.startswith(_LIBRARY_FILES))


def is_jaxs(filename: str) -> bool:
    return filename.startswith(_JAX_FILES)


def is_users_module(name: str) -> bool:
    if not isinstance(name, str) or name in sys.builtin_module_names:
        return False
    filename = getattr(sys.modules.get(name), "__file__", None)
    # Without a file it is a session, a notebook, or one that the user made.
    return not isinstance(filename, str) or is_users(filename)


def is_of_users_code(error: BaseException) -> bool:
    """Return whether code that isn't ours raised an error which we handle.

    False for an error in our own code, and for one that a signal handler raised meanwhile.
    """
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_ours = all(filename.startswith(OUR_FILES) for filename in frames)
    return not is_ours and not comes_from_signal_handler(error)


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


def is_within_pmap() -> bool:
    """Return whether `jax.pmap` makes the call under way, maybe for `equinox.filter_pmap`."""
    with warnings.catch_warnings():
        # Releases of JAX may warn of its end.
        warnings.simplefilter("ignore")
        # What it returns is called by one code object, unless that is written in C++.
        code = getattr(jax.pmap(abs), "__code__", None)
    return any(frame.f_code is code for frame, _ in traceback.walk_stack(sys._getframe(1)))


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
    """Yield a callable and what it wraps, outermost first."""
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


@functools.lru_cache(maxsize=1024)
def public_name(site: CallSite | None, qualname: str) -> str:
    """Return how users call a library's function, such as `jax.lax.scan`; empty if it is private.

    `site` and `qualname` are where the function is defined. Methods have no public name.
    """
    if site is None or qualname.startswith(("_", "<")) or "." in qualname:
        return ""
    names: list[str] = []
    for name, module in [*sys.modules.items()]:
        if not any(part.startswith("_") for part in name.split(".")):
            # Not `getattr`, because some modules import others when they are asked for a name.
            code = code_of(getattr(module, "__dict__", {}).get(qualname))
            if code and (code.co_filename, code.co_firstlineno) == site[:2]:
                names.append(name)
    # The library's own name for it, not that of a user's module, or another library's.
    own = [name for name in names if _is_in(sys.modules[name], site.filename)]
    module = min(own or names, key=lambda name: (name.count("."), len(name)), default="")
    return f"{module}.{qualname}" if module else ""


def _is_in(module: types.ModuleType, filename: str) -> bool:
    package = sys.modules.get(module.__name__.partition(".")[0])
    file = getattr(package, "__file__", None)
    return bool(file) and filename.startswith(_folder_of(file))


def is_internal(place: Place) -> bool:
    """Return whether a function is a library's, and not one that users call by its name."""
    return not (place.is_users or place.module or is_public(place))


def is_public(place: Place) -> bool:
    """Return whether a library's function is one that users call by its name."""
    return not (place.is_users or place.module) and bool(public_name(place.site, place.qualname))


def line_of(code: types.CodeType, offset: int) -> int:
    """Return the line of an instruction."""
    lines = [line for start, end, line in code.co_lines() if start <= offset < end]
    return next(filter(None, lines), code.co_firstlineno)


def captured(fun: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the name and value of each variable that a function closes over.

    Defaults of parameters are among them: in a loop, `lambda x, n=n: x * n` is a closure over `n`.
    """
    # An empty cell raises a `ValueError`; `repr` of a cell runs nothing of the user's.
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    found = [(name, c.cell_contents) for name, c in cells if not repr(c).endswith(": empty>")]
    code, defaults = fun.__code__, fun.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return [*found, *zip(names, defaults, strict=True), *(fun.__kwdefaults__ or {}).items()]


def _codes_in(fun: types.FunctionType) -> list[types.CodeType]:
    """Return the code of a function, and of those that it captured."""
    functions = [value for _, value in captured(fun) if isinstance(value, types.FunctionType)]
    return [function.__code__ for function in (fun, *functions)]


def is_jax(fun: Any) -> TypeGuard[types.FunctionType]:
    """Return whether a value is a Python function that is defined in a file of JAX."""
    is_function = isinstance(fun, types.FunctionType)
    return is_function and fun.__code__.co_filename.startswith(_JAX_FILES)


def transformation_of(fun: types.FunctionType) -> str:
    """Return the name of the JAX transformation (`vmap`, `grad`, ...) that returned this function.

    Empty for any other function.
    """
    for code in _codes_in(fun) if "__wrapped__" in vars(fun) else ():
        name, _, rest = code.co_qualname.partition(".")
        if rest and hasattr(jax, name) and code.co_filename.startswith(_JAX_FILES):
            return name
    return ""
