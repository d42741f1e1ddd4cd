"""What `filter_jit` keeps for a function: the `Function`, without its arrays, and its `Table`."""

import collections
import contextlib
import copy
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import equinox as eqx

from .._compat import MISSING
from .._diagnostics.history import History
from .._fast.signature import Signature
from .._places import Place, place_of, wrapped_by
from .._signals import suppressed
from .._spec.static_key import changeable_keys, referents, static_key
from .._spec.tree import Parts, Spec, combine, split
from .._text import short
from .entry import Entry
from .errors import raise_instead, split_error
from .options import Options

#: A function has at most this many fast paths. The slow path serves its other structures.
MAX_FAST = 64

# If a function has more structures than fast paths, one call in this many gets a new fast path, in
# place of an old one.
_CALLS_PER_TURN = 64

# A function has at most this many tables: one for each form in which it is wrapped
# (`filter_grad(f)`, `partial(f, ...)`, other options). This is also the limit for all callables
# together that wrap no Python function, such as Modules.
_MAX_TABLES = 128


class CacheInfo(NamedTuple):
    """The state of a function's cache, in the manner of `functools.lru_cache`.

    - `entries`: the number of static structures for which compiled programs are kept.
    - `traces`: how often the function was traced, also for entries that were dropped since.
    - `maxsize`: the largest number of entries that are kept; `None` for no limit.
    - `hits`: how many calls ran an existing program. Calls that raised an error don't count, and
        neither do calls of `f.lower(...).compile()`. Calls under `jax.disable_jit` may count.
    """

    entries: int
    traces: int
    maxsize: int | None
    hits: int = 0


def watch(owner: Any, key: Hashable) -> list[weakref.ref[Any]]:
    """Return weak references to the objects that a key refers to.

    When the first of these objects dies, `owner` forgets the key. The caller must keep the
    references: a dead one never calls back.
    """
    # Not a bound method, which would keep the owner alive, because the owner holds the references.
    owner_ref = weakref.ref(owner)

    # `sys.is_finalizing` is a default value, because globals are gone when the interpreter exits.
    def died(_: Any, is_finalizing: Any = sys.is_finalizing) -> None:
        owner = None if is_finalizing() else owner_ref()
        if owner is not None:
            owner.forget(key)

    return [weakref.ref(value, died) for value in referents(key)]


class Table:
    """The entries of one function under one set of options, shared by all wrappers with these.

    - `signature`, `options`: the signature of the function, and the options.
    - `history`: the history of the function's traces.
    - `entries`: the entry of each spec. No lock is held while an entry is looked up, because that
        may run the `==` of a user's static object.
    - `fasts`: the fast paths. The fast path that was hit or added last comes first. Python iterates
        over copies of this list, because C moves a fast path to the front when a call hits it.
    - `linked`: without C, weak references to the handlers of wrappers that call all `fasts`.
    - `n_hits`: the hits of entries that were dropped, and of fast paths that were removed.
    """

    def __init__(self, signature: Signature, options: Options, place: Place):
        self.signature = signature
        self.options = options
        self.history = History(signature.label, options.max_traces, place)
        self.entries: dict[Spec, Entry] = {}
        self.fasts: list[Any] = []
        self.linked: set[weakref.ref[Any]] = set()
        self.n_hits = 0
        self._clock = itertools.count()
        # Guards `fasts` and `linked`. Re-entrant, because garbage collection may drop an entry
        # while this thread holds it.
        self._lock = threading.RLock()
        #: The specs of entries to drop, because one of their static objects has died.
        self._dead: collections.deque[Spec] = collections.deque()

    # --- Entries ------------------------------------------------------------------------------

    def find(self, spec: Spec, make: Callable[[], Entry]) -> Entry:
        """Return the entry of a spec. If there is none, add the entry that `make` returns.

        The entry then counts as the most recently used one.
        """
        entry = self.entries.get(spec) or self._add(make())
        entry.last_used = next(self._clock)
        return entry

    def _add(self, entry: Entry) -> Entry:
        """Add an entry, and drop the least recently used one if there are too many.

        If another thread was first, its entry is returned instead.
        """
        added = self.entries.setdefault(entry.spec, entry)
        if added is entry:
            entry.watches = watch(self, entry.spec)
        # A call of a fast path doesn't set `last_used`. It only counts as a hit of the fast path
        # and, in C, changes the order of the list.
        for fast in self.fasts[::-1]:
            if fast.hits > fast.hits_before:
                fast.hits_before = fast.hits
                fast.entry.last_used = next(self._clock)
        added.last_used = next(self._clock)
        maxsize = self.options.maxsize
        while maxsize is not None and len(self.entries) > maxsize:
            # `list(...)` is one C call. Other threads and garbage collection may change the dict.
            least_used = min(list(self.entries.values()), key=lambda each: each.last_used)
            least_used.why_dropped.append(
                f"its entry was the least recently used of more than `maxsize={maxsize}`"
            )
            self.drop(least_used.spec)
        return added

    def drop(self, spec: Spec) -> None:
        """Drop the entry of a spec, if there is one, and its fast path."""
        entry = self.entries.pop(spec, None)
        if entry is not None:
            self.n_hits += entry.n_hits
            self.remove_fast(entry)

    def forget(self, spec: Spec) -> None:
        """Drop the entry of a spec now or soon, because an object that the spec refers to has died.

        An object may die in the middle of anything, so this must not wait for the lock. Two threads
        might each hold the lock of one table while an object of the other table dies. If the lock
        is taken, the thread that holds it drops the entry.
        """
        self._dead.append(spec)
        self._drop_dead()

    def _drop_dead(self) -> None:
        while self._dead and self._lock.acquire(blocking=False):
            try:
                # `_dead` is a queue that other threads, or garbage collection in this thread, may
                # empty at the same time.
                with contextlib.suppress(IndexError):
                    while True:
                        self.drop(self._dead.popleft())
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock of the fast paths; then drop the entries that had to wait for the lock."""
        with self._lock:
            yield
        self._drop_dead()

    def clear(self) -> None:
        with self.changing():
            for spec in list(self.entries):
                self.drop(spec)
            self.n_hits = 0
            self.history.restart()

    # --- Fast paths ---------------------------------------------------------------------------

    def wants_fast(self, entry: Entry) -> bool:
        """Return whether an entry that was found or added just now should get a fast path."""
        fasts = self.fasts[:]
        # Creating a fast path takes as long as a few calls of the slow path, so only some calls do.
        if len(fasts) >= MAX_FAST and entry.last_used % _CALLS_PER_TURN:
            return False
        return all(fast.entry is not entry for fast in fasts)

    def add_fast(self, fast: Any) -> None:
        """Put a fast path before all others, unless its entry was dropped meanwhile."""
        entry = fast.entry
        with self.changing():
            self.remove_fast(entry)
            self.fasts.insert(0, fast)
            for last in self.fasts[MAX_FAST:]:
                self.remove_fast(last.entry)
            self._unlink()
        # If the entry was dropped meanwhile, the fast path would go on serving calls, and live as
        # long as the table.
        if self.entries.get(entry.spec) is not entry:
            self.remove_fast(entry)

    def remove_fast(self, entry: Entry) -> None:
        with self.changing():
            for fast in self.fasts[:]:
                if fast.entry is entry:
                    self.fasts.remove(fast)
                    self.n_hits += fast.hits
                    self._unlink()

    def _unlink(self) -> None:
        for handler in [ref() for ref in self.linked.copy()]:
            if handler is not None:
                handler.unlink()
        self.linked.clear()

    def info(self) -> CacheInfo:
        with self.changing():
            hits = self.n_hits + sum([fast.hits for fast in self.fasts[:]])
            hits += sum([entry.n_hits for entry in [*self.entries.values()]])
        return CacheInfo(len(self.entries), self.history.n_traces, self.options.maxsize, hits)


# --- Functions ------------------------------------------------------------------------------------


class Function:
    """A function under `filter_jit`, without its arrays. All copies of a wrapper share it.

    - `spec`, `statics`: what `split` returns for the function, besides its arrays.
    - `options`: the options of `filter_jit`.
    - `keeps_arrays`: whether the arrays of the function are never donated, because it is frozen.
        Such a function has a table of its own.
    - `key`: equal for functions that may share a table.
    - `table`: the table of the function's entries.
    - `signature`: the signature of the function, as in the table.
    - `attributes`: the attributes that a wrapper copies from the function, as
        `functools.update_wrapper` does.
    """

    def __init__(
        self,
        fun: Any,
        spec: Spec,
        statics: Sequence[Any],
        options: Options,
        table: Table | None = None,
    ):
        # Wrappers with equal keys share programs, and no call compares the static objects that the
        # function holds. A static array may change in place before a later trace, so compare it by
        # identity.
        for key in changeable_keys(spec):
            key.compare_by_identity()
        self.spec = spec
        self.statics = tuple(statics)
        self.options = options
        self.keeps_arrays = table is not None
        # A wrapper is a pytree node with this object as its metadata, so JAX compares it.
        self.key = options[:-1], static_key(options.jit_arguments), spec
        # Read the signature only if there is no table yet. To read it takes longer than a call, and
        # much code wraps the function anew for each call. A frozen function passes a table of its
        # own, because the key of a shared table would keep the frozen arrays alive.
        self.table = table or _tables_of(fun).get(
            self.key,
            lambda: Table(Signature(fun, *names_of(fun)), options, place_of(fun)),
        )
        self.signature = self.table.signature
        self.attributes = {
            attribute: getattr(fun, attribute)
            for attribute in functools.WRAPPER_ASSIGNMENTS
            # Where a Module lacks an attribute, Equinox's unflatten fills in `MISSING`.
            if getattr(fun, attribute, MISSING) is not MISSING
        }

    def __repr__(self) -> str:
        # JAX's errors show the structure of a wrapper, in which this stands for the function.
        return f"<{self.signature.qualname}{self.signature.inspected}>"

    def with_new_table(self) -> "Function":
        """Return the same function with a table of its own, in which nothing is compiled."""
        function = copy.copy(self)
        function.table = Table(self.signature, self.options, self.table.history.place)
        return function

    def combine(self, arrays: Sequence[Any]) -> Any:
        return combine(self.spec, iter(arrays), iter(self.statics))

    def stop_sharing_if_changed(self, arrays: Sequence[Any]) -> None:
        """Give the table to no later function if static objects of this one have changed in place.

        `arrays` are the function's arrays. A trace after such a change has the new content compiled
        in, but the key of the table has the old content.
        """
        fun = self.combine(arrays)
        is_unchanged = False
        # The user's `__hash__` may raise now.
        with suppressed:
            is_unchanged = hash(split(fun)[0]) == hash(self.spec)
        if not is_unchanged:
            _tables_of(fun).drop(self.key, self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and (other is self or other.key == self.key)

    def __hash__(self) -> int:
        return hash(self.key)


def names_of(fun: Any) -> tuple[str, str]:
    """Return the name and qualified name of a callable, for programs and errors.

    Both are taken from the function that the callable wraps or, if there is no such function, from
    the class of the callable.
    """
    below = fun
    for below in wrapped_by(fun):
        # Equinox doesn't look for a name below a `Partial` either.
        if isinstance(below, eqx.Partial):
            break
    named = below if hasattr(below, "__name__") and hasattr(below, "__qualname__") else type(below)
    return named.__name__, named.__qualname__


def split_named(tree: Any, named: Callable[[], list[tuple[str, Any]]], *options: Any) -> Parts:
    """Return `split(tree, *options)`. An error names the part at fault by its path.

    `named()` returns parts of the tree with the names with which paths begin.
    """
    __tracebackhide__ = True
    try:
        return split(tree, *options)
    except Exception as error:
        # The user's flatten or `__hash__` has raised, or JAX can't sort the keys of a dict.
        raise_instead(split_error(error, named()), error)
        raise


def split_function(fun: Any, options: Options) -> tuple[Function, tuple[Any, ...]]:
    """Split a callable: return it as a `Function`, which is without its arrays, and its arrays."""
    if not callable(fun):
        hint = ""
        if isinstance(fun, (classmethod, property)):
            hint = f" Put `@{type(fun).__name__}` above `@filter_jit`."
        raise TypeError(f"`filter_jit` takes a callable; got {short(fun)}.{hint}")
    spec, arrays, statics = split_named(fun, lambda: [("fun", fun)])
    return Function(fun, spec, statics, options), tuple(arrays)


# --- Where functions keep their tables ------------------------------------------------------------

# The name under which a function has its tables in its `__dict__`. The function and its tables then
# form a plain cycle, which Python frees. A `WeakKeyDictionary` would never free them, because its
# values would refer to its keys. A pickle of the function by value contains this name with `None`
# as the value. So the name doesn't mention eqxjit, which the reader of the pickle may not have.
_ATTRIBUTE = "__jit_tables__"


class _Tables:
    """The tables of one function: one for each form in which the function is wrapped.

    - `owner`: a weak reference to the function; `None` for the tables of all other callables.
    - `by_key`: each table by the `key` of its `Function`, with weak references to the objects that
        the key refers to. When one of these objects dies, the table is dropped.
    """

    def __init__(self, owner: object | None):
        self.owner = None if owner is None else weakref.ref(owner)
        self.by_key: dict[Hashable, tuple[Table, Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Table]) -> Table:
        """Return the table of a key. If there is none, add the table that `make` returns."""
        # No lock is held here, because comparing keys may run a user's `==`.
        found = self.by_key.get(key)
        if found is None:
            # `setdefault` is atomic, so it doesn't matter if another thread is first.
            found = self.by_key.setdefault(key, (make(), watch(self, key)))
            for oldest in list(self.by_key)[:-_MAX_TABLES]:
                self.forget(oldest)
        return found[0]

    def forget(self, key: Hashable) -> None:
        self.by_key.pop(key, None)

    def drop(self, key: Hashable, table: Table) -> None:
        """Forget a key if it has this table."""
        if self.by_key.get(key, (None,))[0] is table:
            self.forget(key)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Called if a function is pickled by value, or if its `__dict__` is deep-copied. Compiled
        # programs can't be copied, so the copy has `None` instead of tables.
        return type(None), ()


_lock = threading.RLock()
# The tables of callables that wrap no Python function, such as Modules.
_shared = _Tables(None)


def _tables_of(fun: Any) -> _Tables:
    """Return the tables of the Python function that a callable is or wraps.

    All callables that wrap no Python function share their tables.
    """
    innermost = next((below for below in wrapped_by(fun) if type(below) is FunctionType), None)
    if innermost is None:
        return _shared
    with _lock:
        tables = vars(innermost).get(_ATTRIBUTE)
        # `functools.wraps` copies the `__dict__` of a function to its wrapper, tables included.
        if tables is None or tables.owner() is not innermost:
            tables = vars(innermost)[_ATTRIBUTE] = _Tables(innermost)
        return tables
