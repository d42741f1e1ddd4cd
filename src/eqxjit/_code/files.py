"""Tells whose a file is, by its folder, and leaves our frames out of tracebacks."""

import contextlib
import functools
import os
import re
import sys
import sysconfig
from typing import Any

import equinox
import jax

from .._compat import exclude_from_locations, exclude_from_tracebacks
from .source import GENERATED_FOLDER


def _below(*folders: str) -> tuple[str, ...]:
    """Return how the paths of files below folders begin: also where a folder is a link."""
    paths = {path for folder in folders for path in (folder, os.path.realpath(folder))}
    return tuple([os.path.join(path, "") for path in paths])


#: How the paths of our files begin, generated ones included.
OUR_FILES = (*_below(os.path.dirname(os.path.dirname(__file__))), GENERATED_FOLDER + "/")

for _path in OUR_FILES:
    exclude_from_tracebacks(_path)
    exclude_from_locations(_path)

#: How the paths of JAX's files begin.
JAX_FILES = _below(os.path.dirname(jax.__file__))

#: How the paths of files begin that are of JAX, Equinox or eqxjit.
LIBRARY_FILES = (
    *OUR_FILES,
    *JAX_FILES,
    *_below(os.path.dirname(equinox.__file__)),
    # By which some of our frames are entered.
    contextlib.__file__,
)

# The same with the standard library, and with source that was generated.
_ALL_LIBRARY_FILES = (
    *LIBRARY_FILES,
    *_below(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")),
    *("<frozen ", "<@beartype", "<attrs generated", "<decorator-gen", "<__array_function__"),
)

# Into which pip and distributions of Linux install packages.
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return whether a file is the user's: neither installed nor of the standard library."""
    # What is imported has a whole path. The rest is a session, say, or what the user compiled.
    is_installed = os.path.isabs(filename) and _INSTALLED.search(filename)
    return not (is_installed or filename.startswith(_ALL_LIBRARY_FILES))


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
