"""The arrays that go into a program, and those that come out of it."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._compat import ArrayImpl, wrapped_by_tracer
from .._spec.tree import is_array

# --- Inputs ---------------------------------------------------------------------------------------

# The owner of a NumPy array may fill it anew once the call has returned. But JAX reads an aligned
# one in place, copies another one in the background, and returns before that is over. So a warm
# call copies small ones, and waits for the program where one is large.

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

# --- Outputs --------------------------------------------------------------------------------------

#: What a traced function returns to JAX: its arrays, or the only one as it is, which saves a list.
#: Those of a trace whose `Out` isn't the entry's first come under the index of that.
Output = jax.Array | list[Any] | dict[int, list[Any]]


def arrays_of(output: Output) -> list[Any]:
    """Return the arrays of an output."""
    if type(output) is dict:
        return next(iter(output.values()))
    return output if type(output) is list else [output]


def wait_for(output: Output) -> None:
    """Wait until a program has run, so that its error is raised here."""
    pending: list[Any] = list(arrays_of(output))
    while pending:
        array = pending.pop()
        if isinstance(array, Tracer):
            # Under an eager `vmap` or `grad` the program has run all the same.
            pending.extend(wrapped_by_tracer(array))
        elif isinstance(array, jax.Array):
            array.block_until_ready()
