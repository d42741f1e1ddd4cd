"""The arrays that a call passes to JAX, and waiting until the program of a call has run.

The owner of a NumPy array may overwrite it as soon as the call has returned. Two facts about JAX on
a CPU, measured with jax 0.8.0 and 0.10.2, make it possible to allow this at little cost:

- JAX reads the memory of an array in place while the program runs, if the memory is aligned by 64
  bytes and contiguous, and if JAX keeps the dtype.
- JAX copies any other array. It copies before its call returns if the array isn't contiguous, if
  JAX converts the dtype, or if the array is smaller than 100 KiB. Otherwise it copies later, in a
  thread.

So `passed` treats NumPy arrays in four ways. An array that JAX copies before its call returns is
passed as it is, and so is an array that no known program of the function uses. Large arrays that
JAX reads in place may be passed as they are, too, and then the call waits for its program. Any
other array is copied once. If it is large, the copy is aligned, so that JAX doesn't copy it again.

On devices other than a CPU, and under transformations, `passed` copies each NumPy array. Under a
transformation it must, because the transformation may keep the array for a later pass.
"""

import functools
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._compat import (
    ArrayImpl,
    can_read_trace,
    copy_in_tracer,
    drop_read_arrays,
    is_cpu_alone,
    is_jit_disabled,
    is_transforming,
    native,
    wrapped_by_tracer,
)
from .tree import ARRAY_CLASSES, has_tracers

_ALIGNMENT = 64

# JAX copies an array with fewer bytes than this before its call returns, unless the array is
# aligned. JAX's own limit is 100 KiB. A lower limit here is safe, because then more arrays are
# copied here.
_SMALL = 96 << 10

# If the arrays of a call that JAX would read in place have at most this many bytes together, they
# are copied. That takes little time beside Equinox's call, and then the call needn't wait.
_CHEAP_TO_COPY = 1 << 19


def passed(leaves: list[Any], used: Collection[int]) -> tuple[list[Any], bool, bool]:
    """Return the arrays that a call passes to JAX, and whether it must and may have to wait.

    A call asks this only once, after all of its arguments have matched. Tracers of an eager
    transformation are passed as they are, but NumPy arrays within them are replaced by copies.

    **Arguments:**

    - `leaves`: the arrays in the arguments, and the arrays of the function.
    - `used`: the indices of the arrays that known programs use; empty if no program is known. JAX
        drops all other arrays, so they aren't copied. If there are any, the call may have to wait:
        it must if its program isn't a known one, and may use them.

    **Raises:**

    - `TypeError`, with JAX's text, for an array whose bytes are swapped. JAX itself rejects such an
        array only when it traces. Without a trace it would read wrong numbers.
    """
    must_copy = (
        not is_cpu_alone()
        or is_transforming()
        or (not can_read_trace and has_tracers(leaves))
        # Without `jit` the user's function gets the passed arrays themselves, and may return them.
        or is_jit_disabled()
    )
    result = [*leaves]
    to_copy: list[int] = []
    may_wait = False
    undecided = range(len(leaves)) if must_copy else _copy_small(result, _SMALL, _CHEAP_TO_COPY)
    for i in undecided:
        leaf = leaves[i]
        # Not `isinstance`, because an object can set its `__class__` to a different class.
        kind = type(leaf)
        if issubclass(kind, np.ndarray):
            if not leaf.dtype.isnative:
                # This raises JAX's error.
                jax.typeof(leaf)
            if not must_copy and used and i not in used:
                may_wait = True
            elif must_copy or not _is_copied_by_jax(leaf):
                to_copy.append(i)
        elif issubclass(kind, Tracer):
            copy_in_tracer(leaf)
    if not must_copy and _is_worth_a_wait([leaves[i] for i in to_copy], leaves):
        return result, True, may_wait
    for i in to_copy:
        result[i] = copy_numpy(leaves[i])
    return result, False, may_wait


def _copy_small_in_python(leaves: list[Any], n_bytes: int, n_bytes_left: int) -> list[int]:
    """Replace each NumPy array in a list by a copy, if the array has fewer than `n_bytes` bytes.

    Arrays are copied up to `n_bytes_left` bytes in all. Return the indices of the leaves that are
    left to the caller, such as large NumPy arrays and tracers. `copy_small` in `native.c` doesn't
    copy an array that JAX copies anyway. In Python, finding that out takes longer than copying the
    array.
    """
    undecided = []
    for i, leaf in enumerate(leaves):
        kind = type(leaf)
        is_small = kind is np.ndarray and leaf.nbytes < n_bytes and leaf.nbytes <= n_bytes_left
        if is_small and leaf.dtype.isnative:
            n_bytes_left -= leaf.nbytes
            leaves[i] = leaf.copy()
        elif kind is np.ndarray or kind not in ARRAY_CLASSES:
            undecided.append(i)
    return undecided


_copy_small: Any = _copy_small_in_python if native is None else native.copy_small


def _is_copied_by_jax(array: np.ndarray) -> bool:
    """Return whether JAX copies a NumPy array before its call returns, whatever its size."""
    if type(array) is not np.ndarray:
        return False
    x64: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    return not array.flags.c_contiguous or _is_converted(array.dtype, x64)


@functools.lru_cache(maxsize=128)
def _is_converted(dtype: np.dtype, x64: bool) -> bool:
    """Return whether JAX converts arrays of this dtype, so that it doesn't read them in place."""
    return not x64 and dtype.kind in "iufc" and jax.dtypes.canonicalize_dtype(dtype) != dtype


def _is_worth_a_wait(to_copy: list[np.ndarray], leaves: list[Any]) -> bool:
    """Return whether a call should pass arrays as they are and wait, rather than copy them."""
    return (
        # The exact sum takes longer.
        sum([array.nbytes for array in to_copy]) > _CHEAP_TO_COPY
        and sum(map(_bytes_in_place, to_copy)) > _CHEAP_TO_COPY
        # If an array isn't ready, an earlier program still runs, and the call would wait for that
        # program, too. Copying takes no extra time then, because the program runs meanwhile.
        and all(leaf.is_ready() for leaf in leaves if type(leaf) is ArrayImpl)
    )


def _bytes_in_place(array: np.ndarray) -> int:
    """Return how many bytes of an array JAX would read in place: all of them, or none."""
    # The view has NumPy's own attributes, whatever a subclass such as `numpy.memmap` defines.
    plain = np.ndarray.view(array, np.ndarray)
    # `plain.ctypes` takes much longer.
    address = plain.__array_interface__["data"][0]
    return plain.nbytes if plain.flags.c_contiguous and address % _ALIGNMENT == 0 else 0


def copy_numpy(array: np.ndarray) -> np.ndarray:
    """Return a copy of a NumPy array, aligned so that XLA needn't copy it once more."""
    if type(array) is not np.ndarray or array.nbytes < _SMALL or array.dtype.hasobject:
        return np.ndarray.copy(array)
    # Otherwise the copy that an earlier call has passed would be alive beside the new one.
    drop_read_arrays()
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copied = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def wait_for(arrays: list[Any]) -> None:
    """Wait until the program that returned these arrays has run.

    An error of the program is raised here. Afterwards the program doesn't read its inputs any more.
    """
    if {*map(type, arrays)} == {ArrayImpl}:
        # A program has run as soon as one of its outputs is ready.
        arrays[0].block_until_ready()
        return
    left = [*arrays]
    while left:
        array = left.pop()
        if isinstance(array, Tracer):
            # Under an eager `vmap` or `grad`, the program has run on the arrays that the tracer
            # wraps. Wait for each array, because some may be inputs that were passed through, and
            # these may be ready before the program has run.
            left.extend(wrapped_by_tracer(array))
        elif isinstance(array, jax.Array):
            array.block_until_ready()
