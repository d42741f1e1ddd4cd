"""Tells user code from library code, finds lines and definitions, and trims tracebacks."""

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

#: The prefix of the file names of generated functions, as if it were the folder of a package.
GENERATED_FOLDER = "<eqxjit>"


def _folder_of(file: str) -> str:
    return os.path.join(os.path.dirname(file), "")


#: The prefixes of the paths of eqxjit's files: its source files, and its generated ones.
OUR_FILES = _folder_of(__file__), GENERATED_FOLDER + "/"

for _path in OUR_FILES:
    exclude_from_tracebacks(_path)
    exclude_from_locations(_path)

_JAX_FILES = _folder_of(jax.__file__)

# The prefixes of the paths of library files: eqxjit, JAX, Equinox, the standard library, and the
# file names that libraries give to source that they generate.
_LIBRARY_FILES = (
    *OUR_FILES,
    _JAX_FILES,
    _folder_of(eqx.__file__),
    _folder_of(os.__file__),
    "<frozen ",
    "<@beartype",
    "<attrs generated",
    "<decorator-gen",
    "<__array_function__",
)

# The folders into which pip and Linux distributions install packages.
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return whether a file is the user's: neither installed nor in the standard library."""
    # Installed files have absolute paths. Other names belong to interactive sessions, for example.
    is_installed = os.path.isabs(filename) and _INSTALLED.search(filename)
    return not (is_installed or filename.startswith(_LIBRARY_FILES))


def is_jaxs(filename: str) -> bool:
    """Return whether a file belongs to JAX."""
    return filename.startswith(_JAX_FILES)


def is_users_module(name: str) -> bool:
    """Return whether a module, given by its name, is the user's."""
    # The `__module__` of a class may be any object.
    if not isinstance(name, str) or name in sys.builtin_module_names:
        return False
    filename = getattr(sys.modules.get(name), "__file__", None)
    # A module without a file is an interactive session, a notebook, or one that the user created.
    return not isinstance(filename, str) or is_users(filename)


# JAX's traceback filter isn't enough, because it works on printed tracebacks only, and users may
# switch it off.
def trim() -> None:
    """Remove eqxjit's frames from the traceback of the exception that the caller is handling.

    Two frames always stay: the caller's frame, which shows where the jitted call is, and the
    innermost frame, in which the error was raised.
    """
    error = sys.exception()
    assert error is not None
    entry = error.__traceback__
    while entry is not None and (below := entry.tb_next) is not None:
        is_innermost = below.tb_next is None
        if is_innermost or not below.tb_frame.f_code.co_filename.startswith(OUR_FILES):
            entry = below
        else:
            entry.tb_next = below.tb_next


# Not a `contextlib.contextmanager`, because its generator would add frames to the traceback.
class _Trimming(contextlib.AbstractContextManager[None]):
    """A context manager that trims the traceback of an exception raised in its block."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            trim()


#: Used by functions that aren't generated. Generated functions call `trim` themselves.
trimming = _Trimming()


# --- Lines and functions --------------------------------------------------------------------------


class CallSite(NamedTuple):
    """A line of code, most often the user's.

    - `filename`: the path of the file, or the name of a notebook cell's source.
    - `line`: the number of the line, from 1.
    - `function`: the qualified name of the function that contains the line; empty if unknown.
    """

    filename: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return location(self.filename, self.line)


def innermost_line(
    frame: types.FrameType | None, is_wanted: Callable[[str], bool] = is_users
) -> CallSite | None:
    """Return the innermost line in a wanted file, from a frame outwards; None if there is none.

    `is_wanted` tells by a file's name whether the file is wanted. By default, that is a file of the
    user's.
    """
    for each, line in traceback.walk_stack(frame) if frame else ():
        code = each.f_code
        if is_wanted(code.co_filename):
            return CallSite(code.co_filename, line, code.co_qualname)
    return None


def call_site() -> CallSite:
    """Return the innermost line of user code on the stack.

    If there is no user code, return the innermost line of an installed package other than JAX,
    Equinox and eqxjit.
    """
    here = sys._getframe(1)
    site = innermost_line(here)
    if site is None:
        site = innermost_line(here, lambda filename: not filename.startswith(_LIBRARY_FILES))
    return site or CallSite("<unknown>", 0)


def is_within_pmap() -> bool:
    """Return whether `jax.pmap`, which `equinox.filter_pmap` calls, is on the stack."""
    with warnings.catch_warnings():
        # Some releases of JAX warn that `jax.pmap` is deprecated.
        warnings.simplefilter("ignore")
        # All functions that `jax.pmap` returns share one code object, if they are Python functions.
        code = getattr(jax.pmap(abs), "__code__", None)
    return any(frame.f_code is code for frame, _ in traceback.walk_stack(sys._getframe(1)))


def location(filename: str, line: int) -> str:
    """Return the name of a line, such as `src/train.py:31` or `Cell In[11], line 3`."""
    # IPython isn't imported here, because there are no cells unless it is imported already.
    ipython: Any = sys.modules.get("IPython")
    # Suppressed, because IPython may be missing, have no session, not know the file as a cell, or
    # have other names in a new release.
    with contextlib.suppress(AttributeError, TypeError):
        return f"Cell {ipython.get_ipython().compile.format_code_name(filename)[1]}, line {line}"
    try:
        here = os.getcwd()
    except FileNotFoundError:
        # The working directory was removed. The prefix is then `//`, with which no path begins, so
        # the path stays whole.
        here = os.sep
    return f"{os.path.normpath(filename).removeprefix(here + os.sep)}:{line}"


def wrapped_by(value: Any) -> Iterator[Any]:
    """Yield a callable and each callable that it wraps, outermost first."""
    # Not `inspect.unwrap`, which stops at a partial. The limit matters for wrappers that form a
    # cycle.
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
    """Return the code of the innermost wrapped function; None if that isn't written in Python."""
    *_, innermost = wrapped_by(value)
    code = getattr(innermost, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


class Place(NamedTuple):
    """The definition of the function, or other callable, under a wrapper.

    - `module`: the module of the callable's class; empty for a Python function, because its file
        says more.
    - `qualname`: the qualified name of the Python function, or of the callable's class.
    - `site`: the line where the callable's Python code begins; None if it has none, or only ours.
    - `is_users`: whether the function or class is the user's.
    - `code_hash`: a hash of the code of a Python function and of the functions that it closes over;
        0 for other callables. It tells apart functions that are defined at the same line of a
        session, and functions that one decorator returned.
    """

    module: str
    qualname: str
    site: CallSite | None
    is_users: bool
    code_hash: int = 0


def place_of(fun: Any) -> Place:
    """Return where a callable is defined. A wrapper is defined where the function in it is."""
    *_, innermost = wrapped_by(fun)
    code = code_of(innermost) or code_of(type(innermost).__call__)
    site = None
    if code is not None and not code.co_filename.startswith(OUR_FILES):
        site = CallSite(code.co_filename, code.co_firstlineno)
    if isinstance(innermost, types.FunctionType):
        code = innermost.__code__
        code_hash = hash(tuple(_codes_in(innermost)))
        return Place("", code.co_qualname, site, is_users(code.co_filename), code_hash)
    # A Module is named by its class, even if a transformation such as `vmap` wraps it. Any other
    # callable is named by the class of its outermost wrapper.
    cls: Any = type(innermost if isinstance(innermost, eqx.Module) else fun)
    return Place(cls.__module__, cls.__qualname__, site, is_users_module(cls.__module__))


@functools.lru_cache(maxsize=1024)
def public_name(site: CallSite | None, qualname: str) -> str:
    """Return the public name of a library's function, such as `jax.lax.scan`; empty without one.

    `site` is where the function is defined, and `qualname` its qualified name. Methods have no
    public name.
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
    # Prefer modules of the library that defines the function to other modules that import it.
    own = [name for name in names if _has_file(sys.modules[name], site.filename)]
    module = min(own or names, key=lambda name: (name.count("."), len(name)), default="")
    return f"{module}.{qualname}" if module else ""


def _has_file(module: types.ModuleType, filename: str) -> bool:
    """Return whether the top-level package of a module contains a file."""
    package = sys.modules.get(module.__name__.partition(".")[0])
    file = getattr(package, "__file__", None)
    return bool(file) and filename.startswith(_folder_of(file))


def is_internal(place: Place) -> bool:
    """Return whether a function is a library's, without a public name by which users call it."""
    return not (place.is_users or place.module or is_public(place))


def is_public(place: Place) -> bool:
    """Return whether a function is a library's, with a public name by which users call it."""
    return not (place.is_users or place.module) and bool(public_name(place.site, place.qualname))


def line_of(code: types.CodeType, offset: int) -> int:
    """Return the number of the line to which an instruction belongs.

    `offset` is the instruction's offset in the bytecode.
    """
    lines = [line for start, end, line in code.co_lines() if start <= offset < end]
    return next(filter(None, lines), code.co_firstlineno)


def captured(fun: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the name and value of each variable that a function closes over.

    Defaults of parameters are included, because `lambda x, n=n: x * n` is how one closes over the
    `n` of a loop.
    """
    code = fun.__code__
    cells = zip(code.co_freevars, fun.__closure__ or (), strict=True)
    # Leave out empty cells, because reading one would raise a `ValueError`. The `repr` of a cell
    # shows whether the cell is empty, and runs no code of the user's.
    closed_over = [(name, c.cell_contents) for name, c in cells if not repr(c).endswith(": empty>")]
    defaults = fun.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    keyword_defaults = fun.__kwdefaults__ or {}
    return [*closed_over, *zip(names, defaults, strict=True), *keyword_defaults.items()]


def _codes_in(fun: types.FunctionType) -> list[types.CodeType]:
    """Return the code of a function, and of the functions that it closes over."""
    functions = [value for _, value in captured(fun) if type(value) is types.FunctionType]
    return [function.__code__ for function in (fun, *functions)]


def is_jax_function(value: Any) -> TypeGuard[types.FunctionType]:
    """Return whether a value is a Python function that is defined in a file of JAX."""
    return isinstance(value, types.FunctionType) and is_jaxs(value.__code__.co_filename)


def transformation_of(fun: types.FunctionType) -> str:
    """Return the name of the JAX transformation (`vmap`, `grad`, ...) that returned this function.

    The name is empty for any other function.
    """
    if "__wrapped__" not in vars(fun):
        return ""
    for code in _codes_in(fun):
        # The function that JAX's transformation returns is nested in it: `vmap.<locals>.vmap_f`.
        name, _, rest = code.co_qualname.partition(".")
        if rest and hasattr(jax, name) and is_jaxs(code.co_filename):
            return name
    return ""
