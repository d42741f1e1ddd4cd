"""The entries of one function: a bounded table, and where functions keep their tables."""

import collections
import itertools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx

from .._compat import clear_with_equinox
from .._fast.signature import Signature
from .._interruptions import Lock, Weak
from .._places import Place, wrapped_by
from .._spec.static import referents
from .._spec.tree import Spec
from .counter import Check, TraceCounter
from .entry import Entry
from .options import Options

T = TypeVar("T")

# Under this name a function has its tables in its `__dict__`: a plain cycle, which Python
# frees, where a `WeakKeyDictionary` whose values refer to their key would keep it for good.
_ATTRIBUTE = "__eqxjit_tables__"

# How many differently wrapped forms of one function (`filter_grad(f)`, `partial(f, ...)`, other
# options), and how many functions that have no `__dict__`, share entries: a form has two keys.
_MAX_TABLES = 256

#: How many structures of a function take turns at full speed; the slow path serves others.
MAX_FAST = 64

# Where more take turns, one in so many calls of the slow path gets a fast path in place of another.
_CALLS_PER_TURN = 64


class CacheInfo(NamedTuple):
    """The state of a function's cache, in the manner of `functools.lru_cache`.

    - `entries`: static structures that are compiled.
    - `traces`: how often the function was traced, entries no longer in the cache included.
    - `maxsize`: how many entries there are at most; `None` for any number.
    - `hits`: calls that ran an existing program. Calls that raised don't count, nor do those of
        `f.lower(...).compile()`.
    """

    entries: int
    traces: int
    maxsize: int | None
    hits: int = 0


class _Watched:
    """A table that drops a key once an object to which it refers is collected."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._dead: collections.deque[Hashable] = collections.deque()

    def watch(self, key: Hashable) -> list[weakref.ref[Any]]:
        """Return weak references that drop a key, as long as they are alive themselves."""
        # Not a bound method, by which what the table holds would keep the table alive.
        table_ref = weakref.ref(self)

        def died(_: weakref.ref[Any]) -> None:
            table = table_ref()
            if table is None:
                return
            # Python collects garbage at any point: another thread may be changing the table (then
            # the next miss drops the key), or this one, whose changes allow for that.
            table._dead.append(key)
            # No names of modules, which are gone when the interpreter exits.
            try:
                with table.lock.attempt as is_free:
                    if is_free:
                        table._drop_dead()
            except RuntimeError:
                # Another thread has the lock.
                pass

        return [weakref.ref(value, died) for value in referents(key)]

    def _drop_dead(self) -> None:
        while self._dead:
            key = self._dead[0]
            self._drop(key)
            # Only then: an interrupt may come before.
            if key in self._dead:
                self._dead.remove(key)

    def _drop(self, key: Hashable) -> None:
        raise NotImplementedError


class Table(_Watched):
    """The entries of one function under one set of options, shared by all that wrap it so.

    - `signature`: the function's parameters.
    - `options`: how it is jitted.
    - `place`: where the function is defined.
    - `counter`: the count of its traces.
    - `fasts`: the fast paths, the latest to be hit or added first; C walks this very list.
    """

    def __init__(
        self,
        signature: Signature,
        options: Options,
        place: Place,
        number: int | None = None,
        check: Check | None = None,
    ):
        """`number` tells the Python functions that are there apart; `check` is the counter's."""
        super().__init__()
        self.signature = signature
        self.options = options
        self.place = place
        self.counter = TraceCounter(
            signature.label, options.max_traces, place, number, self.lock, check
        )
        self.entries: dict[Spec, Entry] = {}
        self.fasts: list[Any] = []
        #: The callers of wrappers that have generated functions, which change with `fasts`.
        self.linked: Weak[Any] = Weak()
        #: Of calls of the slow path, and of fast paths that were removed.
        self.n_hits = 0
        self._n_slow = 0
        self._clock = itertools.count()

    def find(self, spec: Spec) -> Entry | None:
        """Return the entry of a spec, now the most recently used one; None if there is none."""
        # Without the lock, under which the `==` of a static object might wait for another thread.
        entry = self.entries.get(spec)
        if entry is not None:
            entry.last_used = next(self._clock)
        return entry

    def add(self, entry: Entry) -> Entry:
        """Add an entry in place of the least used; return another thread's, if that was first."""
        with self.lock:
            self._drop_dead()
            # A call of a fast path leaves no trace but a hit and, in C, its place among the others:
            # hence at each new entry, so that at least what was used since then is recorded.
            for fast in self.fasts[::-1]:
                if fast.hits > fast.hits_before:
                    fast.hits_before = fast.hits
                    fast.entry.last_used = next(self._clock)
            added = self.entries.setdefault(entry.spec, entry)
            added.last_used = next(self._clock)
            if added is entry:
                entry.watches = self.watch(entry.spec)
                maxsize = self.options.maxsize
                while maxsize is not None and len(self.entries) > maxsize:
                    self._drop_least_used(entry, maxsize)
            return added

    def _drop_least_used(self, new: Entry, maxsize: int) -> None:
        # In one C call, because garbage collection may drop entries meanwhile.
        others = [entry for entry in list(self.entries.values()) if entry is not new]
        least_used = min(others, key=lambda entry: entry.last_used, default=new)
        # Only the user can change the bound.
        advice = "; with that many static structures in use, raise `maxsize`"
        least_used.invalidation_reasons.append(
            f"its entry was the least recently used of more than {maxsize}"
            f"{advice if self.place.is_users else ''}"
        )
        self._drop(least_used.spec)

    def _drop(self, key: Hashable) -> None:
        entry = self.entries.get(key)
        if entry is not None:
            # First, because an interrupt in between must not leave one that serves no entry.
            self.remove_fast(entry)
            self.entries.pop(key, None)

    def drop_untraced(self, entry: Entry) -> None:
        """Drop an entry whose first trace failed, unless another thread's did not."""
        with self.lock:
            if not entry.was_traced and self.entries.get(entry.spec) is entry:
                self._drop(entry.spec)

    def clear(self) -> None:
        with self.lock:
            for entry in self.entries.values():
                entry.invalidation_reasons.append("`clear_cache()` was called")
            self.entries.clear()
            self.fasts.clear()
            self.n_hits = 0
            self._unlink()
            self.counter.n_traces = 0
            self.counter.hook.restart()

    def wants_fast(self, entry: Entry) -> bool:
        """Return whether an entry should get a fast path now; one that it has goes to the front."""
        fasts = self.fasts
        for index, fast in enumerate(fasts):
            if fast.entry is entry:
                with self.lock:
                    if fasts[index : index + 1] == [fast]:
                        fasts.insert(0, fasts.pop(index))
                return False
        if len(fasts) < MAX_FAST:
            return True
        # Making one takes as long as some calls of the slow path.
        self._n_slow += 1
        return self._n_slow % _CALLS_PER_TURN == 0

    def add_fast(self, fast: Any, uses: bytes | None) -> None:
        """Put a fast path before all others, unless its entry was dropped or has other uses."""
        with self.lock:
            # Its calls would go on being served, and it would live as long as the table.
            if self.entries.get(fast.entry.spec) is not fast.entry or fast.entry.uses is not uses:
                return
            self.remove_fast(fast.entry)
            self.fasts.insert(0, fast)
            for last in self.fasts[MAX_FAST:]:
                self.remove_fast(last.entry)
            self._unlink()

    def remove_fast(self, entry: Entry) -> None:
        for fast in [fast for fast in self.fasts if fast.entry is entry]:
            self.n_hits += fast.hits
            # A call of it in another thread may be on its way.
            fast.is_stale = True
            self.fasts.remove(fast)
            self._unlink()

    def _unlink(self) -> None:
        # A generated function calls those that there were when it was made.
        for caller in self.linked.alive():
            caller.unlink()

    def info(self) -> CacheInfo:
        with self.lock:
            self._drop_dead()
            hits = self.n_hits + sum([fast.hits for fast in self.fasts])
        return CacheInfo(len(self.entries), self.counter.n_traces, self.options.maxsize, hits)


class _Tables(_Watched):
    """The tables of one function, and what was read of it, the most recently used last."""

    def __init__(self, owner: object | None):
        super().__init__()
        self.owner = None if owner is None else weakref.ref(owner)
        self.by_key: collections.OrderedDict[Hashable, tuple[Any, Any]] = collections.OrderedDict()
        # Those that lie on no function are of many.
        self.number = None if owner is None else next(_serial)
        _all_tables.add(self)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made for a key, or is made now."""
        with self.lock:
            # A key may be that of an object which is collected, but not yet dropped.
            self._drop_dead()
            found = self.by_key.get(key)
        # Not under the lock: it may run the user's code. Another thread may be first.
        made = (make(), self.watch(key)) if found is None else found
        with self.lock:
            found = self.by_key.setdefault(key, made)
            self.by_key.move_to_end(key)
            if len(self.by_key) > _MAX_TABLES:
                self.by_key.popitem(last=False)
            return found[0]

    def _drop(self, key: Hashable) -> None:
        self.by_key.pop(key, None)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Reached when a function is pickled by value, and when its `__dict__` is copied: what was
        # compiled isn't copied.
        return type(None), ()


_serial = itertools.count()
_all_tables: Weak[_Tables] = Weak()
_homeless = _Tables(None)


def _clear_tables() -> None:
    # As in Equinox: a living wrapper keeps what was compiled for it, a new one compiles anew.
    for tables in _all_tables.alive():
        with tables.lock:
            tables.by_key.clear()


clear_with_equinox(_clear_tables)


def tables_of(home: types.FunctionType | None) -> _Tables:
    """Return the tables of what has this function below it, which hold nothing at first."""
    if home is None:
        return _homeless
    tables = vars(home).get(_ATTRIBUTE)
    # `functools.wraps` copies a function's `__dict__` to another one.
    if tables is None or tables.owner() is not home:
        made = _Tables(home)
        # Another thread may be first.
        tables = vars(home).setdefault(_ATTRIBUTE, made)
        if tables is None or tables.owner() is not home:
            tables = vars(home)[_ATTRIBUTE] = made
    return tables


def home_of(fun: Any) -> types.FunctionType | None:
    """Return the Python function below a callable, on which its tables lie."""
    return next((below for below in wrapped_by(fun) if type(below) is types.FunctionType), None)


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
