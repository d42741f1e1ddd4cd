"""The function under a wrapper without its arrays, and where functions keep their tables."""

import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import equinox as eqx

from .._compat import MISSING, clear_with_equinox
from .._fast.signature import Signature
from .._places import place_of, wrapped_by
from .._spec.tree import Spec, combine
from .._text import short
from .errors import split_named
from .options import Options
from .table import Table, watch

T = TypeVar("T")


# --- Where tables are -----------------------------------------------------------------------------

# Under this name a function has its tables in its `__dict__`: a plain cycle, which Python
# frees, where a `WeakKeyDictionary` whose values refer to their key would keep it for good.
_ATTRIBUTE = "__eqxjit_tables__"

# How many differently wrapped forms of one function (`filter_grad(f)`, `partial(f, ...)`, other
# options), and how many functions that have no `__dict__`, share entries: a form has two keys.
_MAX_TABLES = 256


class _Tables:
    """The tables of one function, and what was read of it."""

    def __init__(self, owner: object | None):
        self.owner = None if owner is None else weakref.ref(owner)
        #: What was made for each key, the references that drop the key, and when it was last used.
        self.by_key: dict[Hashable, list[Any]] = {}
        _all_tables.add(weakref.ref(self, _all_tables.discard))

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made for a key, or is made now."""
        # Without a lock, because comparing keys may run a user's `==`.
        found = self.by_key.get(key)
        if found is None:
            # Another thread may be first.
            found = self.by_key.setdefault(key, [make(), watch(self, key), 0])
        found[2] = next(_clock)
        while len(self.by_key) > _MAX_TABLES:
            self.drop(min(list(self.by_key.items()), key=lambda item: item[1][2])[0])
        return found[0]

    def drop(self, key: Hashable) -> None:
        self.by_key.pop(key, None)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Reached when a function is pickled by value, and when its `__dict__` is copied: what was
        # compiled isn't copied.
        return type(None), ()


_clock = itertools.count()
_all_tables: set[weakref.ref[_Tables]] = set()
# Those of what has no function below it, such as a Module.
_shared = _Tables(None)


def clear_tables() -> None:
    """Have new wrappers compile again; as in Equinox, living ones keep what was compiled."""
    for ref in _all_tables.copy():
        tables = ref()
        if tables is not None:
            tables.by_key.clear()


clear_with_equinox(clear_tables)


def _tables_of(innermost: types.FunctionType | None) -> _Tables:
    """Return the tables of what has this function below it, which hold nothing at first."""
    if innermost is None:
        return _shared
    tables = vars(innermost).get(_ATTRIBUTE)
    # `functools.wraps` copies a function's `__dict__` to another one.
    if tables is None or tables.owner() is not innermost:
        made = _Tables(innermost)
        # Another thread may be first.
        tables = vars(innermost).setdefault(_ATTRIBUTE, made)
        if tables is None or tables.owner() is not innermost:
            tables = vars(innermost)[_ATTRIBUTE] = made
    return tables


def innermost_function(fun: Any) -> types.FunctionType | None:
    """Return the Python function below a callable, on which its tables lie."""
    return next((below for below in wrapped_by(fun) if type(below) is types.FunctionType), None)


# --- Functions ------------------------------------------------------------------------------------


class Function:
    """A function under `filter_jit`, taken apart when it is wrapped; a wrapper's copies share it.

    - `spec`, `statics`: its spec and its static objects.
    - `options`: how it is jitted.
    - `signature`: its parameters.
    - `keeps_arrays`: whether its arrays are never donated; it then shares no table.
    - `attributes`: what a wrapper takes over from it, as with `functools.update_wrapper`.
    """

    def __init__(
        self,
        fun: Any,
        spec: Spec,
        statics: Sequence[Any],
        options: Options,
        table: Table | None = None,
    ):
        self.spec = spec
        self.statics = tuple(statics)
        self.options = options
        self.keeps_arrays = table is not None
        if table is not None:
            self.table = table
        self._innermost = innermost_function(fun)
        self.signature: Signature
        if table is None:
            # Much code wraps where it calls, and reading a signature takes longer than such a call.
            self.signature, self._place = _tables_of(self._innermost).get(
                spec,
                lambda: (Signature(fun, *names_of(fun)), place_of(fun)),
            )
        else:
            # A frozen function's spec holds its arrays, which nothing else is to hold.
            self.signature, self._place = table.signature, table.place
        self.attributes = {
            attribute: getattr(fun, attribute)
            # Copied when it is wrapped: a wrapper lets its user set them.
            for attribute in functools.WRAPPER_ASSIGNMENTS
            # Equinox's unflatten fills in a mark where a Module has no such attribute.
            if getattr(fun, attribute, MISSING) is not MISSING
        }

    def __repr__(self) -> str:
        # It stands for the function in the structure of a wrapper, which JAX shows in its errors.
        return f"<{self.signature.qualname}{inspect.Signature(self.signature.parameters)}>"

    # Found at the first call, because much is wrapped that is never called.
    @functools.cached_property
    def table(self) -> Table:
        """The table of its entries, shared by all that wrap the function so."""
        tables, signature = _tables_of(self._innermost), self.signature
        key = self.spec, self.options.key, signature.name, signature.qualname
        return tables.get(key, lambda: Table(signature, self.options, self._place))

    def combine(self, arrays: Sequence[Any]) -> Any:
        return combine(self.spec, iter(arrays), iter(self.statics))

    @property
    def _key(self) -> Hashable:
        # Frozen functions hold arrays by identity.
        return self.options.key, self.spec

    # Copies of a wrapper that JAX unflattens compare by this, as metadata of a pytree node.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and (other is self or other._key == self._key)

    def __hash__(self) -> int:
        return hash(self._key)


def names_of(fun: Any) -> tuple[str, str]:
    """Return what to call a callable in programs and errors: the name of the function below it."""
    below = fun
    for below in wrapped_by(fun):
        # As upstream names it.
        if isinstance(below, eqx.Partial):
            break
    # An instance of a class is called by the name of that.
    named = below if hasattr(below, "__name__") and hasattr(below, "__qualname__") else type(below)
    return named.__name__, named.__qualname__


def take_apart(fun: Any, options: Options) -> tuple[Function, tuple[Any, ...]]:
    """Return a function as `filter_jit` sees it: without its arrays, and these."""
    if not callable(fun):
        hint = ""
        if isinstance(fun, (classmethod, property)):
            hint = f" Put `@{type(fun).__name__}` above `@filter_jit`."
        elif inspect.ismodule(fun):
            hint = " Name the function in the module."
        raise TypeError(f"`filter_jit` takes a callable; got {short(fun)}.{hint}")
    spec, arrays, statics = split_named(fun, lambda: [("fun", fun)])
    return Function(fun, spec, statics, options), tuple(arrays)
