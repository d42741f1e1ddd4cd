"""Copies NumPy arrays among a call's inputs, which their owner may overwrite after the call.

JAX reads an aligned NumPy array in place, and copies another one in the background, while the call
returns.
"""

from typing import Any

import numpy as np
from jax.core import Tracer

from .._compat import ArrayImpl, copy_in_tracer
from .._spec.tree import is_array

# From so many bytes on a second copy takes longer than aligning the first.
_LARGE = 1 << 20
_ALIGNMENT = 64


def as_array(leaf: Any) -> Any:
    """Return what a call passes for a leaf, a copy of a NumPy array; NotImplemented if it is none.

    Of a tracer of an eager transformation the NumPy arrays are replaced by copies.
    """
    # Not `isinstance`, which believes what an object says of its class.
    kind = type(leaf)
    if kind is ArrayImpl:
        return leaf
    if not is_array(leaf):
        return NotImplemented
    if issubclass(kind, np.ndarray):
        # JAX refuses swapped bytes where it traces, and reads wrong numbers where it doesn't.
        return _copied(leaf) if leaf.dtype.isnative else NotImplemented
    if issubclass(kind, Tracer):
        copy_in_tracer(leaf)
    return leaf


def _copied(array: np.ndarray) -> np.ndarray:
    if type(array) is not np.ndarray or array.nbytes < _LARGE or array.dtype.hasobject:
        return np.ndarray.copy(array)
    # XLA reads it in place where it is aligned so, instead of copying it once more.
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copied = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied
