"""`install` and `uninstall`: use eqxjit instead of `equinox.filter_jit` in a whole process."""

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx

from .._compat import UpstreamWrapper, fields_of, upstream_donation, upstream_filter_jit
from .._core.wrapper import filter_jit

# Re-entrant, because garbage collection may run a finalizer that installs, in the same thread.
_lock = threading.RLock()
_installations: set["Installation"] = set()


class Installation(contextlib.AbstractContextManager["Installation"]):
    """The result of `install`. `equinox.filter_jit` is eqxjit's while any installation lasts."""

    def uninstall(self) -> None:
        """End this installation, but no other installation. A second call does nothing."""
        with _lock:
            _installations.discard(self)
            if not _installations:
                _undo.close()

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install() -> Installation:
    """Replace `equinox.filter_jit` by eqxjit's in the whole process, libraries included.

    A module that has imported `equinox.filter_jit` gets eqxjit's, too. Functions that Equinox
    wrapped before, such as `diffrax.diffeqsolve`, are called through eqxjit, unless they were
    wrapped with options of `jax.jit` such as `inline=True`. What is imported or wrapped while
    eqxjit is installed keeps using eqxjit afterwards. A spawned process has to call `install`
    itself.

    **Returns:**

    A context manager with a method `uninstall`. If `install` was called several times, eqxjit
    stays installed until each result has been uninstalled, or until `eqxjit.uninstall()`.

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
    """End all installations. A function that another tool has put in place since stays there."""
    with _lock:
        _installations.clear()
        _undo.close()


# --- Replacing and putting back ---------------------------------------------------------------

# The callbacks of this stack put back the values that were there before.
_undo = contextlib.ExitStack()


def _put_in_place() -> None:
    """Replace upstream's function wherever it is found, and the methods of upstream's wrappers."""
    # Another tool may have replaced upstream's function in this public place.
    public = eqx.filter_jit
    # Local, because the loop replaces the global variable of this module, too.
    upstream = upstream_filter_jit
    for module in tuple(sys.modules.values()):
        if issubclass(type(module), types.ModuleType):
            # Not `vars`, which would load a module that is imported lazily.
            namespace = object.__getattribute__(module, "__dict__")
            for name, value in tuple(namespace.items()):
                if value is public or value is upstream:
                    _replace(namespace, namespace.__setitem__, name, filter_jit)
    if UpstreamWrapper is not None:
        # Callbacks run in reverse order. So the twins are dropped after the methods that create
        # them have been put back.
        _undo.callback(_drop_twins)
        write = functools.partial(setattr, UpstreamWrapper)
        for name in ("__call__", "__get__", "lower"):
            _replace(vars(UpstreamWrapper), write, name, _redirecting(name))


def _replace(namespace: Any, write: Callable[[str, Any], None], name: str, value: Any) -> None:
    """Replace a value in a namespace by calling `write`. Have `_undo` put the old value back."""
    before = namespace[name]

    def put_back() -> None:
        # Another tool may have put a different value there since, which stays.
        if namespace.get(name) is value:
            write(name, before)

    _undo.callback(put_back)
    write(name, value)


# --- Upstream's wrappers ----------------------------------------------------------------------

# The attribute in a wrapper's `__dict__` that holds its `_Twin`. A function may refer to its own
# wrapper. A table from wrappers to twins would then keep both alive for good, but garbage
# collection frees a cycle through an attribute. The pickle of a wrapper contains this name, and may
# be loaded where eqxjit isn't installed.
_ATTRIBUTE = "__faster_twin__"

# All wrappers that have a twin, by their addresses.
_twinned: dict[int, weakref.ref[Any]] = {}


class _Twin:
    """Our wrapper of the function that a wrapper of upstream's holds.

    - `wrapper`: a weak reference to upstream's wrapper, whose copies have twins of their own.
    - `donate`: how upstream's wrapper donates; empty if it may have options that can't be read.
    - `jitted`: our wrapper; `None` if `donate` is empty, because upstream's wrapper then makes the
        calls itself.
    """

    __slots__ = ("donate", "jitted", "wrapper")

    def __init__(self, wrapper: Any, source: "_Twin | str | None"):
        """`source` is what the wrapper holds under `_ATTRIBUTE`; `None` if it holds nothing.

        A copy of a wrapper holds the twin of the original. A deep copy, or an unpickled wrapper,
        holds the `donate` of that twin.
        """
        key = id(wrapper)
        self.wrapper = _twinned[key] = weakref.ref(wrapper, lambda _: _twinned.pop(key, None))
        if source is None:
            # Only without a `source`, because this can't be read from a deep copy.
            source = upstream_donation(wrapper) or ""
        self.donate: Any = source.donate if isinstance(source, _Twin) else source
        self.jitted = filter_jit(wrapper.__wrapped__, donate=self.donate) if self.donate else None

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # A pickle or a deep copy of the wrapper holds this string instead of the twin.
        return str, (self.donate,)


def _drop_twins() -> None:
    """Replace each twin by the string that says how its wrapper donates."""
    for ref in list(_twinned.values()):
        wrapper = ref()
        fields = {} if wrapper is None else fields_of(wrapper)
        twin = fields.get(_ATTRIBUTE)
        if type(twin) is _Twin:
            # A later installation reads the string from deep copies of the wrapper.
            fields[_ATTRIBUTE] = twin.donate
    _twinned.clear()


def _redirecting(name: str) -> Callable[..., Any]:
    """Return a method for upstream's wrappers that calls the twin's method of the same name."""
    upstream: Any = getattr(UpstreamWrapper, name)

    def method(wrapper: Any, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        fields = fields_of(wrapper)
        twin = fields.get(_ATTRIBUTE)
        if type(twin) is not _Twin or twin.wrapper() is not wrapper:
            # Two threads may each create a twin. Both twins share the compiled programs.
            twin = fields[_ATTRIBUTE] = _Twin(wrapper, twin)
        # If a wrapper is read from a class, as in `Model.step`, the result is the wrapper itself.
        if twin.jitted is None or (name == "__get__" and args[0] is None):
            return upstream(wrapper, *args, **kwargs)
        return getattr(twin.jitted, name)(*args, **kwargs)

    return method
