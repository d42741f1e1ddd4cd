"""NumPy arrays among a call's inputs, which their owner may fill anew once the call has returned.

JAX reads an aligned NumPy array in place, copies another one in the background, and returns before
that is over. So a warm call copies small ones and waits for the program where one is large.
"""

from typing import Any

import numpy as np

from .._compat import ArrayImpl
from .._spec.tree import is_array

#: NumPy arrays of more bytes make a call wait; smaller ones are copied, which costs less.
MAX_COPIED_BYTES = 16_384

# Past what a subclass says of itself.
_n_bytes = np.ndarray.nbytes.__get__  # type: ignore[attr-defined]


def take(leaf: Any) -> Any:
    """Return what a warm call passes for a leaf that isn't an array of JAX's class.

    **Returns:**

    A copy of a small NumPy array, any other array itself, and NotImplemented for anything else.
    """
    # Not `isinstance`, which believes what an object says of its class.
    if issubclass(type(leaf), np.ndarray):
        return np.ndarray.copy(leaf) if _n_bytes(leaf) <= MAX_COPIED_BYTES else leaf
    return leaf if is_array(leaf) else NotImplemented


def take_noting(leaf: Any, large: list[Any]) -> Any:
    """Return the same as `take`, and add a NumPy array to `large` for which the call must wait."""
    taken = take(leaf)
    if taken is leaf and issubclass(type(leaf), np.ndarray):
        large.append(leaf)
    return taken


def owned(arrays: list[Any], uses: bytes | None) -> tuple[list[Any], bool]:
    """Return the arrays that a warm call passes, and whether it must wait for the program.

    **Arguments:**

    - `arrays`: all arrays of a call.
    - `uses`: a byte for each: whether the program reads it; None where that is unknown.
    """
    if {*map(type, arrays)} <= _ONLY_JAX:
        return arrays, False
    large: list[Any] = []
    if uses is None:
        return [take_noting(array, large) for array in arrays], bool(large)
    pairs = zip(arrays, uses, strict=True)
    return [take_noting(array, large) if use else array for array, use in pairs], bool(large)


_ONLY_JAX = {ArrayImpl}
