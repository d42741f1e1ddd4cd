"""The arrays that a call passes to JAX, and the wait for its program.

The owner of a NumPy array may overwrite it as soon as the call has returned. These facts about JAX
on a CPU, measured with jax 0.8.0 and 0.10.2, make that safe at little cost:

- Memory that is aligned by 64 bytes, contiguous and of a dtype that JAX keeps is read in place
  while the program runs.
- Anything else is copied. JAX makes the copy before its call returns if the array isn't contiguous,
  if its dtype is converted, or if it has less than 100 KiB; otherwise later, in a thread.

So `passed` leaves to JAX what JAX copies at once. It passes large aligned memory itself, and has
the call wait for its program. It makes one aligned copy of everything else. On other devices, and
below transformations, which may keep an array for a later pass, it copies every NumPy array.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._compat import (
    ArrayImpl,
    copy_in_tracer,
    is_cpu_alone,
    is_transforming,
    native,
    tells_transformations,
    wrapped_by_tracer,
)
from .tree import ARRAY_CLASSES, has_tracers

_ALIGNMENT = 64

# JAX copies what is smaller and not aligned before its call returns.
_SMALL = 96 << 10

# A smaller array is copied also where JAX would read it in place: the copy takes less than a tenth
# of a call under Equinox, and the call needn't wait.
_CHEAP_TO_COPY = 1 << 19


def passed(leaves: list[Any]) -> tuple[list[Any], bool]:
    """Return what a call passes for its arrays, and whether it must wait for its program.

    A call asks this once, after all of its arguments have matched. NumPy arrays within tracers of
    an eager transformation are replaced by copies.

    **Raises:**

    - `TypeError`, JAX's, for an array of swapped bytes. JAX refuses them only where it traces, and
        otherwise reads wrong numbers.
    """
    must_copy = (
        not is_cpu_alone()
        or is_transforming()
        or (not tells_transformations and has_tracers(leaves))
        # Then the user's function gets the very arrays, and may return them.
        or jax.config.jax_disable_jit  # type: ignore[attr-defined]
    )
    result, waits = [*leaves], False
    for i in range(len(leaves)) if must_copy else _settle_small(result, _SMALL):
        leaf = leaves[i]
        # Not `isinstance`, which believes what an object says of its class.
        kind = type(leaf)
        if issubclass(kind, np.ndarray):
            if not leaf.dtype.isnative:
                # Raises.
                jax.typeof(leaf)
            if not must_copy and _is_copied_by_jax(leaf):
                continue
            if not must_copy and _is_worth_a_wait(leaf, leaves):
                waits = True
            else:
                result[i] = copy_numpy(leaf)
        elif issubclass(kind, Tracer):
            copy_in_tracer(leaf)
    return result, waits


def _copy_small(leaves: list[Any], n_bytes: int) -> list[int]:
    """Copy NumPy arrays of fewer bytes; return the indices of all other NumPy arrays and tracers.

    In C those that JAX copies at once are left alone, but Python takes longer to find out an
    address than to copy a small array.
    """
    left = []
    for i, leaf in enumerate(leaves):
        kind = type(leaf)
        if kind is np.ndarray and leaf.nbytes < n_bytes and leaf.dtype.isnative:
            leaves[i] = leaf.copy()
        elif kind is np.ndarray or kind not in ARRAY_CLASSES:
            left.append(i)
    return left


_settle_small: Any = _copy_small if native is None else native.settle_small


def _is_copied_by_jax(array: np.ndarray) -> bool:
    """Return whether JAX copies a NumPy array before its call returns, whatever its size."""
    return type(array) is np.ndarray and (
        not array.flags.c_contiguous or _is_converted(array.dtype, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    )


@functools.lru_cache(maxsize=128)
def _is_converted(dtype: np.dtype, x64: bool) -> bool:
    """Return whether JAX converts arrays of this dtype, so that it reads no memory of theirs."""
    return not x64 and dtype.kind in "iufc" and jax.dtypes.canonicalize_dtype(dtype) != dtype


def _is_worth_a_wait(array: np.ndarray, leaves: list[Any]) -> bool:
    """Return whether a call should pass the memory itself and wait, instead of copying it."""
    # Past what a subclass, such as one of mapped files, defines.
    plain = np.ndarray.view(array, np.ndarray)
    return (
        plain.nbytes > _CHEAP_TO_COPY
        and plain.flags.c_contiguous
        and plain.ctypes.data % _ALIGNMENT == 0
        # Otherwise an earlier program still runs, and the call would wait for that one, too; while
        # a copy costs nothing there.
        and all(leaf.is_ready() for leaf in leaves if type(leaf) is ArrayImpl)
    )


def copy_numpy(array: np.ndarray) -> np.ndarray:
    """Return a copy of a NumPy array, where XLA reads it in place instead of copying it again."""
    if type(array) is not np.ndarray or array.nbytes < _SMALL or array.dtype.hasobject:
        return np.ndarray.copy(array)
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copied = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def wait_for(arrays: list[Any]) -> None:
    """Wait until a program has run, so that its error is raised here, or its inputs are free."""
    if {*map(type, arrays)} == {ArrayImpl}:
        # The program has run once one of its outputs is there.
        arrays[0].block_until_ready()
        return
    left = [*arrays]
    while left:
        array = left.pop()
        if isinstance(array, Tracer):
            # Under an eager `vmap` or `grad` the program has run all the same, and may have
            # passed inputs on, which say nothing.
            left.extend(wrapped_by_tracer(array))
        elif isinstance(array, jax.Array):
            array.block_until_ready()
