"""A function under both implementations, and comparison of what they return to the last bit."""

import functools
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_structure

import eqxjit
from tests.support.sides import CALLS

SPECIALIZING = os.environ.get("EQXJIT_SPECIALIZE") != "0"


class Counted:
    """A function under one `filter_jit`, and how often it was traced."""

    def __init__(self, filter_jit: Callable[..., Any], fun: Callable[..., Any], **options: Any):
        self.traces = 0

        @functools.wraps(fun)
        def counted(*args, **kwargs):
            self.traces += 1
            return fun(*args, **kwargs)

        self.jitted = filter_jit(counted, **options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.jitted(*args, **kwargs)


class Twins:
    """One function under `equinox.filter_jit` and under eqxjit's."""

    def __init__(self, fun: Callable[..., Any], **options: Any):
        self.fun = fun
        self.upstream = Counted(eqx.filter_jit, fun, **options)
        self.ours = Counted(eqxjit.filter_jit, fun, **options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return eqxjit's result. Check that cold and warm calls return what Equinox returns."""
        expected = self.upstream(*args, **kwargs)
        for _ in range(CALLS):
            result = self.ours(*args, **kwargs)
            assert_same(result, expected)
        return result  # pyright: ignore

    def assert_no_more_traces(self) -> None:
        assert self.ours.traces <= self.upstream.traces


class Own:
    """A mutable, hashable object with its own `==`."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is type(self) and self.value == other.value

    def __hash__(self):
        return hash(self.value)

    def __repr__(self):
        return f"Own({self.value})"


def assert_specialized(wrapper: Any) -> None:
    """Check that a warm function has a fast path, unless fast paths are switched off."""
    assert (wrapper.specialized_source() is not None) == SPECIALIZING


def outcome(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what a call returns, or the error that it raises."""
    try:
        return f(*args, **kwargs)
    except Exception as error:
        return error


def warm(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return a call's result, after a check that cold and warm calls return the same."""
    first = f(*args, **kwargs)
    for _ in range(CALLS - 1):
        assert_same(f(*args, **kwargs), first)
    return first


def assert_same(one: Any, other: Any) -> None:
    """Check that two pytrees have the same structure and types, and are equal bit for bit."""
    structure, expected = tree_structure(one), tree_structure(other)
    # Since Python 3.13 a dataclass that holds NaN doesn't equal itself.
    assert structure == expected or ("nan" in repr(structure) and repr(structure) == repr(expected))
    leaves, _ = tree_flatten_with_path(one)
    others, _ = tree_flatten_with_path(other)
    assert [path for path, _ in leaves] == [path for path, _ in others]
    for (path, leaf), (_, twin) in zip(leaves, others, strict=True):
        assert same_leaf(leaf, twin), f"{keystr(path)}: {leaf!r} is not {twin!r}"


def same_leaf(one: Any, other: Any) -> bool:
    """Return whether two leaves have the same type and value, including the sign of zero."""
    if type(one) is not type(other):
        return False
    if isinstance(one, jax.Array):
        if one.aval != other.aval:  # shape, dtype, weak type
            return False
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        one, other = np.asarray(one), np.asarray(other)
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float):
        return repr(one) == repr(other)
    return one is other or bool(one == other)


def assert_close(one: Any, other: Any) -> None:
    """Check that two trees of arrays are equal up to rounding."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), one, other)


def recursion_left() -> int:
    """Return how deep Python code may still recurse."""
    try:
        return 1 + recursion_left()
    except RecursionError:
        return 0


class Hooked:
    """A static object whose `==` and `hash` run a function that a test sets."""

    hook: Any = staticmethod(lambda: None)

    def __hash__(self):
        Hooked.hook()
        return 1

    def __eq__(self, other):
        return type(other) is Hooked
