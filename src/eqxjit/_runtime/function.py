"""What all copies of one wrapper share: the function's static half, its parameters, its cache."""

import functools
import inspect
from collections.abc import Hashable
from typing import Any

from .._code.place import place_of
from .._compat import MISSING
from .._lock import Lock
from .._plan.signature import Signature
from .._trees.given import NOTHING, Given
from .._trees.key_cache import is_large
from .._trees.mutation import Mutable, are_unchanged, is_frozen, mutable, snapshot
from .._trees.partition import DYNAMIC, StaticTree, partition
from .cache import FunctionCache, cache_of, home_of, names_of
from .errors import not_callable, raise_for_arguments
from .options import Options

_choosing = Lock()


class WrappedFunction:
    """A function under `filter_jit`, without its arrays.

    - `fun`: the static half of the function.
    - `options`: how it is jitted.
    - `signature`: its parameters.
    - `keeps_arrays`: whether its arrays stay, whatever is donated.
    - `attributes`: what a wrapper takes over from it, as with `functools.update_wrapper`.
    """

    __slots__ = (
        "_cache",
        "_home",
        "_mutable",
        "_place",
        "attributes",
        "fun",
        "keeps_arrays",
        "large",
        "options",
        "signature",
    )

    def __init__(
        self, fun: Any, static: StaticTree, options: Options, cache: FunctionCache | None = None
    ):
        self.fun = static
        self.options = options
        self.keeps_arrays = cache is not None
        # Not made before a call asks: that looks into all that the function holds.
        self._cache = cache
        self._mutable: list[Mutable] | None = [] if cache is not None else None
        #: Those that can be changed, too, and that a warm call doesn't look into.
        self.large: list[Mutable] = []
        self._home = home_of(fun)
        self._place = place_of(fun, self._home)
        self.signature = Signature(fun, *names_of(fun)) if cache is None else cache.signature
        self.attributes = {
            attribute: getattr(fun, attribute)
            for attribute in functools.WRAPPER_ASSIGNMENTS
            # Equinox's unflatten fills in its own mark where a Module has no such attribute.
            if getattr(fun, attribute, MISSING) is not MISSING
        }

    def __repr__(self) -> str:
        # It stands for the function in the structure of a wrapper, which JAX shows in its errors.
        return f"<{self.signature.qualname}{inspect.Signature(self.signature.parameters)}>"

    @property
    def cache(self) -> FunctionCache:
        if self._cache is None:
            self._look()
            try:
                cache = cache_of(
                    self._home, self._place, self.signature, self.fun.key, self.options
                )
            except Exception as error:
                self._explain(error)
                raise
            with _choosing:
                # Another thread may have found another: `equinox.clear_caches()` came in between.
                if self._cache is None:
                    self._cache = cache
        return self._cache

    @property
    def mutable(self) -> list[Mutable]:
        """The static objects in it that its user can change in place, as they were when it was
        first used, but for large ones. (What is frozen holds copies of its own.)
        """
        self._look()
        assert self._mutable is not None
        return self._mutable

    def _look(self) -> None:
        """Note the static objects, and their key, at one time: when a call first asks."""
        if self._mutable is None:
            try:
                _ = self.fun.key
            except Exception as error:
                self._explain(error)
                raise
            found = mutable(self.fun)
            found = [pair for pair in found if not is_frozen(pair.value)]
            self.large = [pair for pair in found if is_large(pair.key)]
            self._mutable = [pair for pair in found if not is_large(pair.key)]

    def _explain(self, error: Exception) -> None:
        """Raise an error that names the static value at fault, if one is found."""
        fun = self.fun.combine([DYNAMIC] * self.fun.n_arrays)
        raise_for_arguments(error, [("fun", fun)])

    @property
    def fun_to_trace(self) -> StaticTree:
        """The static half of the function: of a frozen one a copy, which an output may hand out."""
        return snapshot(self.fun) if self.keeps_arrays else self.fun

    def given(self, static: StaticTree) -> Given:
        """Return the static objects that come in with a call that has these arguments."""
        # What is frozen is nobody's but its entries': these look for changes in it themselves.
        return Given(static, NOTHING if self.keeps_arrays else self.fun)

    def is_unmodified(self) -> bool:
        """Return whether what a warm call looks into is unmodified since it was wrapped."""
        return are_unchanged(self.mutable)

    def has_large_unmodified(self) -> bool:
        """Return whether what a warm call doesn't look into is unmodified, as a trace must know."""
        self._look()
        return are_unchanged(self.large)

    def is_wholly_unmodified(self) -> bool:
        """Return whether all static objects in it are unmodified."""
        return self.is_unmodified() and self.has_large_unmodified()

    @property
    def _key(self) -> Hashable:
        return (
            self.options.key,
            self.fun.key if self.is_wholly_unmodified() else self.fun.current_key,
        )

    # Copies of a wrapper that JAX unflattens compare by this, as metadata of a pytree node.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, WrappedFunction) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def wrap_function(fun: Any, options: Options) -> tuple[WrappedFunction, tuple[Any, ...]]:
    """Return a function as `filter_jit` sees it: its static half, and its arrays."""
    if not callable(fun):
        raise not_callable(fun)
    try:
        leaves, static = partition(fun)
        if any(type(leaf).__hash__ is None for leaf in static.leaves):
            _ = static.key  # Can't be made.
        return WrappedFunction(fun, static, options), tuple(leaves)
    except Exception as error:
        raise_for_arguments(error, [("fun", fun)])
        raise
