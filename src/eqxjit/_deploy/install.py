"""`install` and `uninstall`: eqxjit in the place of `equinox.filter_jit`, in a whole process."""

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx

from .._compat import UpstreamWrapper, fields_of, upstream_donation, upstream_filter_jit
from .._core.wrapper import filter_jit

# Garbage collection may run what installs as well, in the same thread.
_lock = threading.RLock()
_installations: set["Installation"] = set()


class Installation(contextlib.AbstractContextManager["Installation"]):
    """An installation, made by `install`: while one lasts, `equinox.filter_jit` is eqxjit's."""

    def uninstall(self) -> None:
        """End this installation, and leave others in place; do nothing if it has ended."""
        with _lock:
            _installations.discard(self)
            if not _installations:
                _undo.close()

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install() -> Installation:
    """Replace `equinox.filter_jit` by eqxjit's in the whole process, libraries included.

    It is eqxjit's wherever a module looks it up or has imported it. Functions that Equinox wrapped
    before, such as `diffrax.diffeqsolve`, use eqxjit, too. (Not those with options of `jax.jit`
    such as `inline=True`, which can't be read back.) A module that imports or wraps something
    meanwhile keeps using eqxjit permanently. Spawned processes have to install for themselves.

    **Returns:**

    A context manager with a method `uninstall`. eqxjit is installed until all of these have ended,
    or until `eqxjit.uninstall()`.

    !!! example

        ```python
        >>> import equinox as eqx
        >>> import eqxjit
        >>> with eqxjit.install():
        ...     eqx.filter_jit is eqxjit.filter_jit
        True

        ```
    """
    with _lock:
        if not _installations:
            _put_in_place()
        installation = Installation()
        _installations.add(installation)
        return installation


def uninstall() -> None:
    """End all installations; leave in place what another tool has put there since."""
    with _lock:
        _installations.clear()
        _undo.close()


# --- What is replaced -------------------------------------------------------------------------

# Puts back what was there before.
_undo = contextlib.ExitStack()


def _put_in_place() -> None:
    # Another one than upstream's, if another tool has put one in the public place.
    public = eqx.filter_jit
    for module in tuple(sys.modules.values()):
        if issubclass(type(module), types.ModuleType):
            # Not `vars`, by which a module that waits for its first use would be loaded.
            namespace = object.__getattribute__(module, "__dict__")
            for name, value in tuple(namespace.items()):
                if value is public or value is upstream_filter_jit:
                    _replace(namespace, namespace.__setitem__, name, filter_jit)
    if UpstreamWrapper is not None:
        # Past Equinox's metaclass.
        write = functools.partial(type.__setattr__, UpstreamWrapper)
        for name in ("__call__", "__get__", "lower"):
            _replace(vars(UpstreamWrapper), write, name, _redirecting(name))


def _replace(namespace: Any, write: Callable[[str, Any], None], name: str, value: Any) -> None:
    before = namespace[name]

    def put_back() -> None:
        # Unless another tool has put something else there since.
        if namespace.get(name) is value:
            write(name, before)

    _undo.callback(put_back)
    write(name, value)


# --- Wrappers of upstream's -------------------------------------------------------------------

# The name of a wrapper's twin in its `__dict__`. A function may refer to its wrapper: there that is
# a plain cycle, and in a table from wrapper to twin it would keep both alive.
_TWIN = "__eqxjit_twin__"


def _redirecting(name: str) -> Callable[..., Any]:
    """Return a method of upstream's wrappers that calls the twin's of this name."""
    upstream: Any = getattr(UpstreamWrapper, name)

    def method(wrapper: Any, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        fields = fields_of(wrapper)
        if _TWIN not in fields:
            donate = upstream_donation(wrapper)
            # None if upstream goes on serving it. Another thread may have been first: their twins
            # share what is compiled.
            fields[_TWIN] = donate and filter_jit(wrapper.__wrapped__, donate=donate)
        twin = fields[_TWIN]
        # An attribute of a class is the wrapper itself.
        if twin is None or (name == "__get__" and args[0] is None):
            return upstream(wrapper, *args, **kwargs)
        return getattr(twin, name)(*args, **kwargs)

    return method
