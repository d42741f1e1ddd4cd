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


def take(leaf: Any, large: list[Any] | None = None) -> Any:
    """Return what a call passes for a leaf that isn't JAX's: NotImplemented if it is no array.

    That is a copy of a small NumPy array; a large one, for which it must wait, goes to `large`.
    """
    if not is_array(leaf):
        return NotImplemented
    # Not `isinstance`, which believes what an object says of its class.
    if not issubclass(type(leaf), np.ndarray):
        return leaf
    if _n_bytes(leaf) <= MAX_COPIED_BYTES:
        return np.ndarray.copy(leaf)
    if large is not None:
        large.append(leaf)
    return leaf


def owned(arrays: list[Any], uses: bytes | None) -> tuple[list[Any], bool]:
    """Return the arrays that a call passes, and whether it must wait for the program.

    `uses` has a byte for each: whether the program reads it; None where that is unknown.
    """
    if {*map(type, arrays)} <= {ArrayImpl}:
        return arrays, False
    large: list[Any] = []
    pairs = zip(arrays, uses or b"\1" * len(arrays), strict=True)
    return [take(array, large) if use else array for array, use in pairs], bool(large)
