"""The table of one function: its entries by spec, and the fast paths that serve them."""

import itertools
import sys
import threading
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

from .._compat import native
from .._diagnostics.history import History
from .._fast.signature import Signature
from .._places import Place
from .._spec.static_key import referents
from .._spec.tree import Spec
from .entry import Entry
from .options import Options

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
        `f.lower(...).compile()`; those under `jax.disable_jit` may.
    """

    entries: int
    traces: int
    maxsize: int | None
    hits: int = 0


def watch(owner: Any, key: Hashable) -> list[weakref.ref[Any]]:
    """Return weak references to what a key refers to; the first to die has the owner drop the key.

    They do so as long as they are alive themselves.
    """
    # Not a bound method, by which what the owner holds would keep the owner alive.
    owner_ref = weakref.ref(owner)

    # Globals are gone when the interpreter exits.
    def died(_: Any, is_finalizing: Any = sys.is_finalizing) -> None:
        owner = None if is_finalizing() else owner_ref()
        if owner is not None:
            owner.drop(key)

    return [weakref.ref(value, died) for value in referents(key)]


class Table:
    """The entries of one function under one set of options, shared by all that wrap it so.

    - `signature`: the function's parameters.
    - `options`: how it is jitted.
    - `place`: where the function is defined.
    - `history`: its traces.
    - `entries`: the entry of each spec. Looking one up may run the `==` of a user's static object,
        so no lock is held meanwhile.
    - `fasts`: the fast paths, the latest to be hit or added first. C walks this very list, and
        moves what it hits to the front; so Python walks copies.
    """

    def __init__(self, signature: Signature, options: Options, place: Place):
        #: Of `fasts` and the counts. Re-entrant, because garbage collection may drop an entry.
        self.lock = threading.RLock()
        self.signature = signature
        self.options = options
        self.place = place
        self.history = History(signature.label, options.max_traces, place, self.lock)
        self.entries: dict[Spec, Entry] = {}
        self.fasts: list[Any] = []
        # The handlers of wrappers that have generated functions.
        self._linked: set[weakref.ref[Any]] = set()
        #: Of calls of the slow path, and of fast paths that were removed.
        self.n_hits = 0
        self._n_slow = 0
        self._clock = itertools.count()

    def __del__(self) -> None:
        # How often a family of functions was called counts those that are gone.
        if self.history.family is not None and not sys.is_finalizing():
            self.history.family.hits_of_gone += self.info().hits

    def find(self, spec: Spec) -> Entry | None:
        """Return the entry of a spec, now the most recently used one; None if there is none."""
        entry = self.entries.get(spec)
        if entry is not None:
            entry.last_used = next(self._clock)
        return entry

    def add(self, entry: Entry) -> Entry:
        """Add an entry in place of the least used; return another thread's, if that was first."""
        added = self.entries.setdefault(entry.spec, entry)
        added.last_used = next(self._clock)
        if added is entry:
            entry.watches = watch(self, entry.spec)
            # A call of a fast path leaves no trace but a hit and, in C, its place in the list.
            for fast in self.fasts[::-1]:
                if fast.hits > fast.hits_before:
                    fast.hits_before = fast.hits
                    fast.entry.last_used = next(self._clock)
            maxsize = self.options.maxsize
            while maxsize is not None and len(self.entries) > maxsize:
                self._drop_least_used(entry, maxsize)
        return added

    def _drop_least_used(self, new: Entry, maxsize: int) -> None:
        # In one C call, because other threads and garbage collection change the dict.
        others = [entry for entry in list(self.entries.values()) if entry is not new]
        least_used = min(others, key=lambda entry: entry.last_used, default=new)
        # Only the user can change the bound.
        advice = "; with that many static structures in use, raise `maxsize`"
        least_used.invalidate(
            f"its entry was the least recently used of more than {maxsize}"
            f"{advice if self.place.is_users else ''}"
        )
        self.drop(least_used.spec)

    def drop(self, spec: Spec) -> None:
        """Drop the entry of a spec, if there is one, and its fast path."""
        entry = self.entries.pop(spec, None)
        if entry is not None:
            self.remove_fast(entry)

    def drop_untraced(self, entry: Entry) -> None:
        """Drop an entry whose first trace failed, unless another thread's did not."""
        if not entry.was_traced and self.entries.get(entry.spec) is entry:
            self.drop(entry.spec)

    def clear(self) -> None:
        with self.lock:
            for entry in list(self.entries.values()):
                entry.invalidate("`clear_cache()` was called")
            self.entries.clear()
            self.fasts.clear()
            self.n_hits = 0
            self._unlink()
            self.history.restart()

    def wants_fast(self, entry: Entry) -> bool:
        """Return whether an entry should get a fast path now; one that it has goes to the front."""
        with self.lock:
            fasts = self.fasts
            for fast in fasts[:]:
                if fast.entry is entry:
                    fasts.remove(fast)
                    fasts.insert(0, fast)
                    return False
            if len(fasts) < MAX_FAST:
                return True
            # Making one takes as long as some calls of the slow path.
            self._n_slow += 1
            return self._n_slow % _CALLS_PER_TURN == 0

    def add_fast(self, fast: Any) -> None:
        """Put a fast path before all others, unless its entry was dropped meanwhile."""
        entry = fast.entry
        with self.lock:
            self.remove_fast(entry)
            self.fasts.insert(0, fast)
            for last in self.fasts[MAX_FAST:]:
                self.remove_fast(last.entry)
            self._unlink()
        # Its calls would go on being served, and it would live as long as the table.
        if self.entries.get(entry.spec) is not entry:
            self.remove_fast(entry)

    def remove_fast(self, entry: Entry) -> None:
        with self.lock:
            for fast in self.fasts[:]:
                if fast.entry is entry:
                    self.fasts.remove(fast)
                    self.n_hits += fast.hits
                    self._unlink()

    def link(self, handler: Any) -> None:
        """Have a handler's `unlink` called whenever the list of fast paths changes."""
        # C reads the list in each call.
        if native is None:
            # Unlike a `WeakSet`, this runs no Python when one dies: what a signal handler raises
            # there is lost.
            self._linked.add(weakref.ref(handler, self._linked.discard))

    def _unlink(self) -> None:
        # A generated function calls those that there were when it was made.
        for ref in self._linked.copy():
            handler = ref()
            if handler is not None:
                handler.unlink()

    def info(self) -> CacheInfo:
        with self.lock:
            hits = self.n_hits + sum([fast.hits for fast in self.fasts[:]])
        return CacheInfo(len(self.entries), self.history.n_traces, self.options.maxsize, hits)
