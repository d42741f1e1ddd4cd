"""Describes an array as JAX sees it when it traces."""

import functools
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from .._code.text import array_text
from .._compat import ArrayImpl


class ArrayPart(NamedTuple):
    """An array, as JAX sees it when it traces.

    - `shape`, `dtype`, `weak_type`: its abstract value.
    - `placement`: the devices or the sharding that it was put on; empty where JAX may choose.
    """

    shape: tuple[Any, ...]
    dtype: str
    weak_type: bool
    placement: str

    @property
    def shape_text(self) -> str:
        return array_text(self.dtype, self.shape)

    def __str__(self) -> str:
        weak = " of weak type" if self.weak_type else ""
        return f"{self.shape_text}{weak}{f' on {self.placement}' if self.placement else ''}"


def array_part(array: Any) -> ArrayPart:
    """Return the description of an array, or of the structure that stands for one."""
    if isinstance(array, jax.ShapeDtypeStruct):
        placement = "" if array.sharding is None else _sharding_text(array.sharding)
        weak_type = getattr(array, "weak_type", False)
        return ArrayPart(array.shape, _dtype_text(array.dtype), weak_type, placement)
    if type(array) is ArrayImpl:
        aval = array.aval
        placement = _sharding_text(array.sharding) if array.committed else ""
        return _part_of_type(aval.shape, aval.dtype, aval.weak_type, placement)
    aval = jax.typeof(array)
    is_put = not isinstance(array, Tracer) and getattr(array, "committed", False)
    placement = _sharding_text(array.sharding) if is_put else ""
    weak_type = getattr(aval, "weak_type", False)
    return ArrayPart(aval.shape, _dtype_text(aval.dtype), weak_type, placement)


_dtype_text = functools.lru_cache(str)


@functools.lru_cache(maxsize=1024)
def _part_of_type(shape: tuple[int, ...], dtype: Any, weak_type: bool, placement: str) -> ArrayPart:
    """Return the part that arrays of one type share."""
    return ArrayPart(shape, _dtype_text(dtype), weak_type, placement)


def _sharding_text(sharding: Any) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"a mesh of {axes} by {sharding.spec}"
    devices = [f"{device.platform}:{device.id}" for device in sharding.device_set]
    return ", ".join(sorted(devices))
