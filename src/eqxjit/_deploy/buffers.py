"""Arrays end to end in one flat buffer, and out of it again: linear functions made of JAX's.

`lax.split` is transposed to one concatenation. (Indexing is transposed to the sum of as many arrays
as there are leaves, each as long as the whole buffer.)
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jax.core import Tracer

Shape = tuple[int, ...]


def is_key(leaf: Any) -> bool:
    """Return whether an array holds typed keys of random numbers."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_computable(dtype: Any) -> bool:
    """Return whether JAX computes with a dtype of NumPy's."""
    return isinstance(dtype, np.dtype) and (dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number))


@functools.lru_cache(maxsize=64)
def key_data_shape(impl: Any) -> Shape:
    """Return the shape of the integers that one typed key is made of."""
    return jax.eval_shape(lambda: jr.key_data(jr.key(0, impl=impl))).shape


def join(leaves: Sequence[Any], dtype: np.dtype) -> jax.Array:
    """Return one flat array of this dtype, strongly typed, with the elements of all leaves."""
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    return (_join if traced else _jitted_join)(leaves, dtype)


def split(buffer: Any, shapes: tuple[Shape, ...]) -> Sequence[Any]:
    """Return the arrays of which a buffer was made; its leading axes, if any, are theirs, too."""
    if buffer.dtype == jax.dtypes.float0:
        # A gradient with respect to integers.
        return [np.zeros((*buffer.shape[:-1], *shape), buffer.dtype) for shape in shapes]
    return (_split if isinstance(buffer, Tracer) else _jitted_split)(buffer, shapes)


def _join(leaves: Sequence[Any], dtype: np.dtype) -> jax.Array:
    data = [jr.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]
    flat = [lax.convert_element_type(lax.reshape(leaf, (leaf.size,)), dtype) for leaf in data]
    return lax.concatenate(flat, 0)


def _split(buffer: Any, shapes: tuple[Shape, ...]) -> list[jax.Array]:
    *leading, _ = buffer.shape
    sizes = [math.prod(shape) for shape in shapes]
    parts = lax.split(buffer, sizes, axis=len(leading))
    pairs = zip(parts, shapes, strict=True)
    return [lax.reshape(part, (*leading, *shape)) for part, shape in pairs]


# Where nothing is traced, either is one compiled program.
_jitted_join = jax.jit(_join, static_argnums=1)
_jitted_split = jax.jit(_split, static_argnums=1)
