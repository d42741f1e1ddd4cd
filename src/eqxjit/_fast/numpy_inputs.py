"""Copies NumPy arrays among a call's inputs, which their owner may overwrite after the call.

JAX reads an aligned NumPy array in place, and copies another one in the background, while the call
returns.
"""

from typing import Any

import numpy as np
from jax.core import Tracer

from .._compat import ArrayImpl, copy_in_tracer
from .._spec.tree import is_array


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
        return np.ndarray.copy(leaf) if leaf.dtype.isnative else NotImplemented
    if issubclass(kind, Tracer):
        copy_in_tracer(leaf)
    return leaf
