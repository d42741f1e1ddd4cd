"""NumPy arrays among a call's inputs, which their owner may fill anew once the call has returned.

JAX reads an aligned NumPy array in place, copies another one in the background, and returns before
that is over. So a call that doesn't wait copies its NumPy arrays. Where that would cost more than
waiting, for large arrays and short computations, it waits, as `equinox.filter_jit` always does.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.tree_util import default_registry

from .._compat import ArrayImpl
from .partition import NUMPY_SCALARS, is_array_leaf

# Copying so many bytes costs less than what a call saves over upstream's.
_CHEAP_BYTES = 16_384

# Fifty times what copying a byte takes. A computation that takes longer hides the copy.
_SECONDS_A_BYTE = 1e-8

# Past what a subclass says of itself.
_n_bytes: Callable[[np.ndarray], int] = np.ndarray.nbytes.__get__  # type: ignore[attr-defined]


class LargeArray(Exception):
    """A NumPy array is too large for a call to copy it."""


class NumpyInputs:
    """The NumPy arrays of one cache entry's calls.

    - `limit`: the size of the largest array that is copied, in bytes.
    """

    __slots__ = ("limit",)

    def __init__(self) -> None:
        self.limit = _CHEAP_BYTES

    def own(self, leaf: Any) -> Any:
        """Return an array that nobody writes to: a copy of NumPy's, or `LargeArray` is raised."""
        # Not `isinstance`, which believes what an object says of its class.
        if not issubclass(type(leaf), np.ndarray):
            return leaf
        if _n_bytes(leaf) > self.limit:
            raise LargeArray
        return np.ndarray.copy(leaf)

    def own_arrays(self, leaves: Sequence[Any]) -> list[Any] | None:
        """Return what `own` makes of all leaves; None if one isn't an array."""
        classes = {*map(type, leaves)}
        if len(classes) > 1 or is_node(leaves[0]):
            return [*map(self.own, leaves)] if all(map(is_plain_array, leaves)) else None
        # All of one class, as most are: in C.
        if classes == _ONLY_NUMPY:
            if max(map(_n_bytes, leaves)) > self.limit:
                raise LargeArray
            return [*map(np.ndarray.copy, leaves)]
        if is_array_leaf(leaves[0]):
            return [*leaves] if classes <= NUMPY_SCALARS else [*map(self.own, leaves)]
        return None

    def call(self, jitted: Callable[..., Any], leaves: Iterable[Any], wait: Any) -> Any:
        """Call a jitted function, and `wait` for its output where a NumPy array is large."""
        leaves = [*leaves]
        if {*map(type, leaves)} == _ONLY_JAX:
            return jitted(*leaves)
        try:
            owned = [*map(self.own, leaves)]
        except LargeArray:
            pass
        else:
            return jitted(*owned)
        start = time.perf_counter()
        output = jitted(*leaves)
        wait(output)
        seconds = time.perf_counter() - start
        if seconds > _SECONDS_A_BYTE * self.limit:
            self._raise_limit(leaves, seconds)
        return output

    def _raise_limit(self, leaves: list[Any], seconds: float) -> None:
        """Have arrays of this size copied, if copying them is short beside the computation."""
        sizes = [_n_bytes(leaf) for leaf in leaves if issubclass(type(leaf), np.ndarray)]
        if seconds > _SECONDS_A_BYTE * sum(sizes):
            self.limit = max(self.limit, *sizes)


_ONLY_NUMPY = {np.ndarray}
_ONLY_JAX = {ArrayImpl}


def is_node(value: Any) -> bool:
    """Return whether JAX's registry takes a value for a node."""
    return default_registry.flatten_one_level(value) is not None


def is_plain_array(value: Any) -> bool:
    """Return whether a value is an array, and not a node that some registry made of its class."""
    return is_array_leaf(value) and not is_node(value)
