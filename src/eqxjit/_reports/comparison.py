"""Compares two results of one call, part by part: structure, static objects, bits of arrays."""

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._compat import flatten_one_level
from .._diagnostics.history import TooManyTracesError
from .._signals import suppressed
from .._spec.static_key import static_key
from .._spec.tree import is_array, read_node
from .._text import short


class Unequal(NamedTuple):
    """A part of the output that differs.

    - `path`: where, as `output[0].weight`.
    - `ours`, `theirs`: what is there under eqxjit, and under Equinox.
    - `rounding`: the largest difference of numbers that agree within rounding, relative to the
        largest number in the array; None for any other difference.
    """

    path: str
    ours: str
    theirs: str
    rounding: float | None = None

    def __str__(self) -> str:
        end = "" if self.rounding is None else f" (within rounding: {self.rounding:.1g})"
        return f"{self.path}: {self.ours} under eqxjit, {self.theirs} under Equinox{end}"


def compare(ours: Any, theirs: Any, path: str = "output") -> Iterator[Unequal]:
    """Yield the parts of two results that differ, with their paths."""
    if ours is theirs:
        return
    if is_array(ours) and is_array(theirs):
        yield from _compare_arrays(ours, theirs, path)
        return
    if type(ours) is not type(theirs):
        kinds = type(ours).__name__, type(theirs).__name__
        yield Unequal(path, f"{kinds[0]} {short(ours)}", f"{kinds[1]} {short(theirs)}")
        return
    if flatten_one_level(ours) is None:
        if not _is_same(ours, theirs):
            yield Unequal(path, short(ours), short(theirs))
        return
    (names, children, metadata), (their_names, their_children, their_metadata) = (
        read_node(each) for each in (ours, theirs)
    )
    if names != their_names:
        # The containers have different lengths, or different keys.
        yield Unequal(path, short(ours, 80), short(theirs, 80))
    elif not _is_same(metadata, their_metadata):
        yield Unequal(f"static fields of {path}", short(metadata, 200), short(their_metadata, 200))
    else:
        for name, child, their_child in zip(names, children, their_children, strict=True):
            yield from compare(child, their_child, path + name)


def compare_errors(ours: Exception | None, theirs: Exception | None) -> Iterator[Unequal]:
    """Yield how two errors differ; None stands for a call that returned."""
    if isinstance(ours, TooManyTracesError):
        # `max_traces` is an option of eqxjit's own.
        return
    texts = [
        "no error" if e is None else f"{type(e).__name__}: {_message(e)}" for e in (ours, theirs)
    ]
    # eqxjit documents two kinds of clearer errors, which don't count as differences: errors whose
    # cause has the type of Equinox's error, and Python's own `TypeError` for wrong arguments, where
    # Equinox raises that of `inspect.Signature.bind`.
    is_cause = theirs is not None and type(getattr(ours, "__cause__", None)) is type(theirs)
    is_binding = texts[1].startswith(_BINDING_ERRORS) and type(ours) is TypeError
    if texts[0] != texts[1] and not is_cause and not is_binding:
        yield Unequal("error", texts[0], texts[1])


_BINDING_ERRORS = (
    "TypeError: missing a required",
    "TypeError: got an unexpected",
    "TypeError: too many positional",
    "TypeError: multiple values",
)


def _message(error: Exception) -> str:
    # The first line of the user's message. The stack before it, and the further lines of an error
    # about tracers, name functions that differ between eqxjit and Equinox.
    [line, *_] = str(error).rpartition("EquinoxRuntimeError: ")[2].splitlines() or [""]
    return line


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two static objects are equal in type and value.

    Objects that each trace creates anew are compared by their code or their attributes.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, dict):
        return [*a] == [*b] and all(map(_is_same, a.values(), b.values()))
    if isinstance(a, functools.partial):
        return _is_same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, types.FunctionType):
        # Each trace creates a new function, so their code is compared.
        return a.__code__ is b.__code__
    if isinstance(a, (ClosedJaxpr, Jaxpr)):
        # Optimistix returns jaxprs. Their text names all operations.
        return str(a) == str(b)
    with suppressed:
        if static_key(a) == static_key(b):
            return True
        return type(a).__eq__ is object.__eq__ and bool(vars(a)) and _is_same(vars(a), vars(b))
    return False


def _compare_arrays(ours: Any, theirs: Any, path: str) -> Iterator[Unequal]:
    for name in ("dtype", "shape", "weak_type"):
        values = [getattr(each, name, False) for each in (ours, theirs)]
        if values[0] != values[1]:
            yield Unequal(f"{name} of {path}", str(values[0]), str(values[1]))
            return
    shape, size = ours.shape, ours.size
    if jax.numpy.issubdtype(ours.dtype, jax.dtypes.prng_key):
        # The data of a key are several numbers.
        ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
    if not getattr(ours, "is_fully_addressable", True):
        return
    a, b = np.asarray(ours), np.asarray(theirs)
    if a.tobytes() == b.tobytes():
        return
    bits = (np.frombuffer(x.tobytes(), np.uint8).reshape(size, -1) for x in (a, b))
    where = int((next(bits) != next(bits)).any(axis=1).argmax())
    index = tuple(map(int, np.unravel_index(where, shape)))
    place = f"{path}[{', '.join(map(str, index))}]" if index else path
    yield Unequal(place, repr(a[index]), repr(b[index]), _rounding(a.reshape(-1), b.reshape(-1)))


def _rounding(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return the largest difference, relative to the largest number; None beyond rounding."""
    if not jax.numpy.issubdtype(a.dtype, np.inexact):
        return None
    bound = float(jax.numpy.finfo(a.dtype).eps) ** 0.75
    a, b = (x.astype(np.complex128) for x in (a, b))
    # Equal infinities and numbers that are no numbers on both sides are no difference.
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    if not differs.any():
        # The bits of a NaN, or the sign of zero.
        return 0.0
    with np.errstate(all="ignore"):
        numbers = np.abs(np.concatenate([a, b]))
        largest = numbers[np.isfinite(numbers)].max(initial=0.0) or 1.0
        error = np.abs(a[differs] - b[differs]).max() / largest
    # The comparison is false if a number is infinite, or none, on one side alone.
    return float(error) if error <= bound else None
