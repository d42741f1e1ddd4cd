"""The compiled entries of one function: a bounded table, and where functions keep their tables."""

import collections
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax

from .._code import html
from .._code.place import Place
from .._compat import clear_with_equinox
from .._lock import Lock, alive
from .._plan.signature import Signature
from .._trees.given import referents
from .._trees.key_cache import TracedObjects
from .._trees.scan import MAX_NODES
from .counter import TraceCounter
from .entry import CacheEntry
from .hooks import make_hook
from .keyed_lock import KeyedLock
from .options import Options
from .state import SpecializedCall

# Under this name a function keeps its caches in its own `__dict__`: a plain cycle, which Python
# frees, where a `WeakKeyDictionary` whose values refer to their key would keep it for good.
_ATTRIBUTE = "__eqxjit_caches__"

# How many differently wrapped forms of one function (`filter_grad(f)`, `partial(f, ...)`, other
# options), and how many functions that have no `__dict__` of their own, share entries.
_MAX_CACHES = 128

# How many specialised calls are tried in turn at one call site, and how many of those whose guards
# mostly run Python before they fail: others do in tens of nanoseconds. What they compare with lives
# with them.
_MAX_SPECIALIZED = 64
_MAX_IN_PYTHON = 8


class CacheInfo(NamedTuple):
    """The state of a function's cache, in the manner of `functools.lru_cache`.

    - `entries`: static structures that are compiled.
    - `traces`: how often the function was traced, entries no longer held included.
    - `recompilations`: how often JAX compiled a trace once more, without tracing.
    - `maxsize`: how many entries are held at most; `None` for any number.
    - `hits`: calls that ran what was traced before, warm ones included. A call that raised is no
        hit, nor is one of `f.lower(...).compile()`; one that JAX compiled again, for another
        device say, is a hit and a recompilation.
    """

    entries: int
    traces: int
    recompilations: int
    maxsize: int | None
    hits: int = 0

    def _repr_html_(self) -> str:
        cells = ["no limit" if cell is None else cell for cell in self]
        return html.block(html.table(self._fields, [cells]))


class _Table:
    """A table that drops a key once an object it references is collected."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._dead: collections.deque[Hashable] = collections.deque()

    def watch(self, key: Hashable) -> list[weakref.ref[Any]]:
        """Return weak references that drop a key, as long as they are kept."""
        # Not a bound method, by which what the table holds would keep the table alive.
        table_ref = weakref.ref(self)

        def died(_: weakref.ref[Any]) -> None:
            table = table_ref()
            if table is not None:
                table._forget(key)

        return [weakref.ref(value, died) for value in referents(key)]

    def _forget(self, key: Hashable) -> None:
        # Python collects garbage at any point: another thread may be changing the table (then the
        # next miss drops the key), or this one, whose changes allow for that.
        self._dead.append(key)
        try:
            with self.lock.attempt as is_free:
                if is_free:
                    self._drop_dead()
        except RuntimeError:
            # Another thread has it.
            pass

    def _drop_dead(self) -> None:
        while self._dead:
            key = self._dead[0]
            self._drop(key)
            # Only then: an interrupt may come before.
            if key in self._dead:
                self._dead.remove(key)

    def _drop(self, key: Hashable) -> None:
        raise NotImplementedError


class FunctionCache(_Table):
    """The entries of one function under one set of options, shared by all that wrap it so.

    - `signature`: the function's parameters.
    - `options`: how it is jitted.
    - `place`: where the function is defined.
    - `traces`: the count of its traces, and who is told of them.
    - `traced`: the large static objects that it was traced with.
    """

    def __init__(
        self,
        signature: Signature,
        options: Options,
        place: Place,
        home: types.FunctionType | None = None,
        number: int = 0,
    ):
        """`home` is the Python function below it, if any; `number` tells it from others."""
        super().__init__()
        self.signature = signature
        self.options = options
        self.place = place
        hook = make_hook(signature.label, place, home, number)
        self.traces = TraceCounter(signature.label, options.max_traces, hook)
        self.retraces = KeyedLock()
        self.entries: dict[Hashable, CacheEntry] = {}
        self.traced = TracedObjects()
        #: Of the largest structure that it was called with: so many nodes are scanned.
        self.most_nodes = MAX_NODES
        #: Whether calls are scanned: some entry has no specialised call, for now or for good.
        self.meets = False
        #: Those that were called warm, by the keys of their scans.
        self._met: dict[Hashable, CacheEntry] = {}
        self._clock = itertools.count()
        #: Weak references to the static objects of the function itself (see `_FunctionCaches`).
        self.watches: list[weakref.ref[Any]] = []
        #: The specialised calls in use, the latest first.
        self.specialized: list[SpecializedCall] = []
        #: Those that were in use until the table was last full, and haven't been called since.
        self._second_chances: list[SpecializedCall] = []
        #: The dispatchers of linked wrappers, by `id`: unlinked when `specialized` changes.
        self.linked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def find(self, key: Hashable) -> CacheEntry | None:
        """Return the entry for a typed static key, now the most recently used one."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.last_used = next(self._clock)
        return entry

    def find_again(self, key: Hashable) -> CacheEntry | None:
        """Return the entry for the key of a scan, if that was met before."""
        entry = self._met.get(key)
        if entry is None or None in [ref() for ref in entry.known_by_address]:
            return None
        entry.last_used = next(self._clock)
        return entry

    def meet(self, entry: CacheEntry, key: Hashable, known_by_address: list[Any]) -> None:
        """Make `find_again` find an entry by the key of a scan of a call that it has served."""
        try:
            refs = [weakref.ref(value) for value in known_by_address]
        except TypeError:
            # It might be another object's address by the next call.
            return
        with self.lock:
            if self.entries.get(entry.key) is entry:
                self._met.pop(entry.met_as, None)
                entry.met_as, entry.known_by_address = key, refs
                self._met[key] = entry

    def find_or_add(self, key: Hashable, make: Callable[[], CacheEntry]) -> CacheEntry:
        """Return the entry for a key; a new one in place of the least used, if there is none."""
        with self.lock:
            self._drop_dead()
            entry = self.entries.get(key)
            if entry is None:
                entry = make()
                entry.watches = self.watch(key)
                self._add(key, entry)
            return entry

    def _add(self, key: Hashable, entry: CacheEntry) -> None:
        entry.key, entry.last_used = key, next(self._clock)
        self.entries[key] = entry
        maxsize = self.options.maxsize
        if maxsize is None or len(self.entries) < maxsize:
            return
        while len(self.entries) > maxsize:
            # In one C call: garbage collection may drop entries meanwhile.
            least_used = min(list(self.entries.values()), key=lambda entry: entry.last_used)
            # Nobody else can.
            advice = "; with that many static structures in use, raise `maxsize`"
            least_used.invalidate(
                f"its entry was the least recently used of more than {maxsize}"
                f"{advice if self.place.is_users else ''}"
            )
            self._drop(least_used.key)
        self._give_second_chances()

    def _give_second_chances(self) -> None:
        """Take the specialised calls out of use, each until the next time that it is wanted.

        They leave no trace in the table; the generic path, which puts them back, does. So what was
        used since the last structure came in is not the least recently used one.
        """
        for call in self._second_chances:
            call.entry.end_second_chance()
        self._second_chances, self.specialized = self.specialized, []
        for call in self._second_chances:
            call.entry.give_second_chance(call)
        if self._second_chances:
            self._unlink()

    def _drop(self, key: Hashable) -> None:
        entry = self.entries.get(key)
        if entry is not None:
            self._met.pop(entry.met_as, None)
            self.unspecialize(entry)
            self.entries.pop(key, None)
            entry.key = entry.met_as = None

    def keep_if_traced(self, key: Hashable, entry: CacheEntry) -> None:
        """Drop an entry whose first trace failed, unless another thread's did not."""
        with self.lock:
            if entry.traces and key not in self.entries:
                self._add(key, entry)
            elif not entry.traces and self.entries.get(key) is entry:
                self._drop(key)

    def drop(self, entry: CacheEntry) -> None:
        """Drop an entry that no longer holds."""
        with self.lock:
            if self.entries.get(entry.key) is entry:
                self._drop(entry.key)

    def clear(self) -> None:
        """Drop all entries, and with them what was compiled."""
        with self.lock:
            for entry in self.entries.values():
                entry.invalidate("`clear_cache()` was called")
            self.entries.clear()
            self._met.clear()
            self._unlink()
            self.specialized, self._second_chances = [], []
            self.traces.clear()

    def continue_traces(self, traces: TraceCounter) -> None:
        """Go on with those of a wrapper whose function is now this one, if it has none so far."""
        with self.lock:
            if self.traces.is_unused:
                self.traces = traces

    def info(self) -> CacheInfo:
        with self.lock:
            self._drop_dead()
        traces = self.traces
        return CacheInfo(
            len(self.entries),
            traces.n_traces,
            traces.n_recompilations,
            self.options.maxsize,
            traces.n_hits,
        )

    def specialize(self, entry: CacheEntry, call: SpecializedCall) -> None:
        """Put a specialised call at the head of those in use, unless its entry was dropped."""
        with self.lock:
            if self.entries.get(entry.key) is not entry:
                return
            calls = [call, *[other for other in self.specialized if other.entry is not entry]]
            excess = [each for each in calls if not each.fails_fast()][_MAX_IN_PYTHON:]
            kept = [each for each in calls if each not in excess][:_MAX_SPECIALIZED]
            self.specialized = kept
            for crowded_out in [each for each in calls if each not in kept]:
                # Its constants go with it, and what only they kept alive.
                crowded_out.entry.crowd_out()
            self._unlink()
            # In the end: if an interrupt comes before, the next call does it all again.
            entry.specialize(call)

    def use_second_chance(self, entry: CacheEntry) -> bool:
        """Put the specialised call of an entry back in use, if it has a second chance."""
        # Under the lock: another thread may end it.
        with self.lock:
            call = entry.second_chance
            if call is not None:
                self.specialize(entry, call)
            return call is not None

    def unspecialize(self, entry: CacheEntry) -> None:
        """Take the specialised call of an entry out of use, because it no longer holds."""
        with self.lock:
            remaining = [other for other in self.specialized if other.entry is not entry]
            if len(remaining) < len(self.specialized):
                self._unlink()
                self.specialized = remaining
            entry.unspecialize()

    def _unlink(self) -> None:
        # In one C call: garbage collection, or another thread, may add a wrapper meanwhile.
        for linked_ref in self.linked.valuerefs():
            linked = linked_ref()
            if linked is not None:
                linked.unlink()


_serial = itertools.count()


class _FunctionCaches(_Table):
    """The caches of one function, the most recently used last."""

    def __init__(self, owner: object | None):
        super().__init__()
        self.owner = None if owner is None else weakref.ref(owner)
        self.by_key: collections.OrderedDict[Hashable, FunctionCache] = collections.OrderedDict()
        self.number = next(_serial)
        _tables.add(self)

    def get(self, key: Hashable, make: Callable[[], FunctionCache]) -> FunctionCache:
        with self.lock:
            self._drop_dead()
            cache = self.by_key.get(key)
            if cache is None:
                cache = self.by_key[key] = make()
                cache.watches = self.watch(key)
            self.by_key.move_to_end(key)
            if len(self.by_key) > _MAX_CACHES:
                self.by_key.popitem(last=False)
            return cache

    def _drop(self, key: Hashable) -> None:
        self.by_key.pop(key, None)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Reached when a function is pickled by value, and when its `__dict__` is copied: what was
        # compiled stays behind.
        return type(None), ()


_tables: weakref.WeakSet[_FunctionCaches] = weakref.WeakSet()

_homeless = _FunctionCaches(None)


def _clear_tables() -> None:
    # As upstream: a living wrapper keeps what was compiled for it, a new one has it compiled anew.
    for table in alive(_tables):
        with table.lock:
            table.by_key.clear()


clear_with_equinox(_clear_tables)


def cache_of(
    home: types.FunctionType | None,
    place: Place,
    signature: Signature,
    key: Hashable,
    options: Options,
) -> FunctionCache:
    """Return the cache that serves a function of this typed static key, made if there is none."""
    if home is None:
        caches = _homeless
    else:
        caches = vars(home).get(_ATTRIBUTE)
        # `functools.wraps` copies a function's `__dict__` to another one.
        if caches is None or caches.owner() is not home:
            caches = vars(home).setdefault(_ATTRIBUTE, _FunctionCaches(home))
            if caches is None or caches.owner() is not home:
                caches = vars(home)[_ATTRIBUTE] = _FunctionCaches(home)

    def make() -> FunctionCache:
        return FunctionCache(signature, options, place, home, caches.number)

    return caches.get((key, options.key, signature.name, signature.qualname), make)


def home_of(fun: Any) -> types.FunctionType | None:
    """Return the Python function below a callable, on which its caches are kept."""
    for _ in range(100):
        if type(fun) is types.FunctionType:
            return fun
        if isinstance(fun, (functools.partial, jax.tree_util.Partial, eqx.Partial)):
            fun = fun.func
        elif isinstance(fun, types.MethodType):
            fun = fun.__func__
        elif hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__
        else:
            return None
    return None


def names_of(fun: Any) -> tuple[str, str]:
    """Return what to call a callable in programs and errors: the name of the function below it."""
    for _ in range(100):
        if hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__
        elif isinstance(fun, functools.partial):
            fun = fun.func
        else:
            break
    named = fun if hasattr(fun, "__name__") and hasattr(fun, "__qualname__") else type(fun)
    return named.__name__, named.__qualname__
