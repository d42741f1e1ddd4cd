"""The error path: says which argument is at fault, and words runtime errors as Equinox does."""

import collections
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.errors import JaxRuntimeError
from jax.tree_util import keystr, tree_flatten_with_path

from .._compat import (
    CALLBACK_ERROR_NAME,
    fields_of,
    last_runtime_error,
    runtime_error_text,
)
from .._diagnostics.advice import for_unhashable
from .._spec.static_key import static_key
from .._spec.tree import Spec, _split, _split_leaf, split
from .._text import short

# What Equinox's callback raises: the user's message, and then a long explanation.
_MESSAGE = re.compile(rf"{CALLBACK_ERROR_NAME}: (.*?)\n\n\n-{{20}}\n", re.DOTALL)


def runtime_error(error: BaseException) -> BaseException | None:
    """Return the error that a user of `eqx.error_if` should see, if `error` stems from one."""
    # Not `isinstance`: JAX raises no subclasses, users do.
    if type(error) not in (JaxRuntimeError, ValueError):
        return None
    text = _text_of(error)
    if f"{CALLBACK_ERROR_NAME}: " not in text:
        return None
    message, stack = last_runtime_error()
    if message is None or f"{CALLBACK_ERROR_NAME}: {message}" not in text:
        # Equinox keeps one error for all threads, and another one's came in between; or none.
        found = _MESSAGE.search(text)
        if found is None:
            return None
        message, stack = found[1], []
    # It runs outwards; what is outside of the outermost jitted call, marked by bytes, is left out.
    marks = [i for i, part in enumerate(stack) if isinstance(part, bytes)]
    frames = [part for part in stack[: marks[-1] if marks else None] if isinstance(part, str)]
    shown = "".join(reversed(frames or [part for part in stack if isinstance(part, str)]))
    return eqx.EquinoxRuntimeError(runtime_error_text.format(msg=message, stack=shown))


def _text_of(error: BaseException) -> str:
    """Return the text of an error of JAX's; what holds anything else is the user's."""
    return error.args[0] if error.args and isinstance(error.args[0], str) else ""


# How XLA and JAX begin to say that a buffer was deleted.
_DELETED = ("INVALID_ARGUMENT: Invalid buffer passed", "Array has been deleted")

# How XLA says that an array that it was to reuse was passed twice: it counts flat arguments.
_DONATED_TWICE = (
    "Attempt to use a buffer that was previously donated in the same call",
    "Attempt to donate a buffer which is also used by the same call",
    "Attempt to donate the same buffer twice",
)


def array_error(error: BaseException, arrays: Iterable[tuple[str, Any]]) -> BaseException | None:
    """Return the error for an array that was refused, if `error` is JAX's or XLA's for one."""
    kind = type(error)
    # Not `isinstance`: users raise subclasses.
    if kind not in (TypeError, ValueError, RuntimeError, JaxRuntimeError):
        return None
    text = _text_of(error)
    is_twice = any(beginning in text for beginning in _DONATED_TWICE)
    same: dict[Any, list[str]] = collections.defaultdict(list)
    for path, leaf in arrays:
        if issubclass(type(leaf), (np.ndarray, np.generic)):
            if why := _why_invalid(leaf):
                return kind(f"The array `{path}` {why}")
        elif issubclass(type(leaf), jax.Array) and not isinstance(leaf, Tracer):
            # Those that this very call has donated are deleted, too.
            if leaf.is_deleted() and text.startswith(_DELETED):
                return kind(
                    f"The array `{path}` has been deleted, mostly by being donated to an earlier "
                    "call. Use that call's result in its place, or don't donate it."
                )
            if is_twice:
                same[_buffer(leaf)].append(path)
    shared = [paths for paths in same.values() if len(paths) > 1]
    if not shared:
        return None
    texts = [" and ".join(f"`{path}`" for path in paths) for paths in shared]
    return kind(
        f"{', and '.join(texts)} are the same array, which is donated: its buffer can be reused "
        f"only once. Pass a copy as `{shared[0][-1]}` (`jnp.copy`), or don't donate it."
    )


def _buffer(array: jax.Array) -> int:
    try:
        return array.unsafe_buffer_pointer()
    except (RuntimeError, ValueError):
        # An array on several devices has no one buffer, nor has a deleted one.
        return id(array)


# What to do about arrays that JAX can't trace, by the kinds of their dtypes.
_REMEDIES = {
    "mM": "pass times as numbers, for example `(t - t0) / np.timedelta64(1, 's')`. For a static "
    "value, pass a `datetime.datetime`, or a tuple of those.",
    "SUOT": "convert its items to numbers. For a static value, pass tuples, for example "
    "`tuple(a.tolist())`.",
    "V": "pass its fields as arrays, for example in a dict.",
    "fc": "convert it, for example by `.astype(np.float32)`.",
}


def _why_invalid(array: np.ndarray | np.generic) -> str:
    """Return why JAX can't trace an array, and what to do about that; empty if it can."""
    if isinstance(array, np.ma.MaskedArray):
        return (
            "is a NumPy masked array, which JAX can't trace. Pass its `.filled(...)`, and its mask "
            "as another array."
        )
    try:
        jax.typeof(array)
    except (TypeError, ValueError):
        remedies = [text for kinds, text in _REMEDIES.items() if array.dtype.kind in kinds]
        return f"has dtype {array.dtype}, which JAX can't trace: {''.join(remedies)}"
    return ""


def note_tracers(error: BaseException, arrays: Iterable[tuple[str, Any]]) -> None:
    """Add to JAX's error for a leaked tracer which arguments hold tracers."""
    if type(error) is not jax.errors.UnexpectedTracerError:
        return
    tracers = [path for path, leaf in arrays if isinstance(leaf, Tracer)]
    if tracers:
        error.add_note(
            f"Tracers among the arguments: {', '.join(f'`{path}`' for path in tracers)}. "
            "Look for a value that was stored inside a transformed function."
        )


def note_shapes(error: BaseException, arguments: list[tuple[str, Any]]) -> None:
    """Add to an error of staging which argument is a shape where an array was to be described."""
    # The user's or JAX's: others don't come of such a shape.
    if not isinstance(error, (AttributeError, IndexError, TypeError, ValueError)):
        return
    for path, value in arguments:
        if type(value) in (tuple, list) and value and all(type(n) is int for n in value):
            error.add_note(
                f"`{path}` is the {type(value).__name__} {short(value)}, which is static. For an "
                f"array of that shape, pass `jax.ShapeDtypeStruct({short(tuple(value))}, "
                "jnp.float32)`."
            )


def raise_instead(clearer: BaseException | None, cause: BaseException | None = None) -> None:
    """Raise an error in place of the one that is handled, unless it is None."""
    __tracebackhide__ = True
    if clearer is None:
        return
    try:
        raise clearer from cause
    finally:
        # Its traceback has this frame: what the frames around hold would wait for the collector.
        del clearer, cause


def split_named(
    tree: Any, named: Callable[[], list[tuple[str, Any]]], *options: Any
) -> tuple[Spec, list[Any], list[Any]]:
    """Return `split(tree, *options)`; an error names the part that is at fault.

    `named` returns parts of the tree with their names, from which paths begin.
    """
    __tracebackhide__ = True
    try:
        return split(tree, *options)
    except Exception as error:
        # A flatten or a `__hash__` of the user's, and JAX's for the keys of a dict.
        raise_named(error, named())
        raise


def raise_named(error: Exception, named: list[tuple[str, Any]]) -> None:
    """Raise a clearer error than that of `split`, if there is one; `named` are parts as above."""
    __tracebackhide__ = True
    raise_instead(_split_error(error, named), error)


def _split_error(error: Exception, named: list[tuple[str, Any]]) -> ValueError | None:
    """Return a clearer error than that of `split`, if it is Python's or JAX's."""
    # Not `isinstance`: users raise subclasses, and a signal handler others.
    if type(error) not in (TypeError, ValueError, RecursionError):
        return None
    # What was being taken apart, outside in, because to try again would run the user's code again.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_split = [frame for frame in frames if frame.f_code in _CODE_OF_SPLIT]
    if not of_split:
        return None
    values = [frame.f_locals["value"] for frame in of_split]
    is_static = of_split[-1].f_code is not _split.__code__
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError):
        ids = [*map(id, values)]
        again = [i for i, each in enumerate(ids) if each in ids[i + 1 :]]
        if again and not is_static:
            return ValueError(
                f"`{_path_of(values[: again[0] + 1], named)}` contains itself, so it isn't a tree. "
                "Keep references to a parent out of the pytree, or make them static."
            )
        # Or the user's functions have taken the stack, or a deep tree has.
        if len(frames) - len(values) < sys.getrecursionlimit() // 2:
            return None
        reason = (
            "it contains itself, or is nested too deeply (a dataclass with `eq=False` is compared "
            "by identity, whatever it contains)"
        )
    path, value = _path_of(values, named), values[-1]
    if path and is_static:
        return ValueError(
            f"The static value `{path}` of type `{type(value).__name__}` can't be hashed: "
            f"{reason}. Everything that isn't an array is static, and static values must be "
            f"hashable and comparable: {for_unhashable(value)}."
        )
    if path and type(value) in (dict, collections.defaultdict):
        return ValueError(
            f"The keys of the dict `{path}` can't be sorted, as JAX needs: "
            f"{', '.join(map(short, value))}. Use keys of one type, or an `OrderedDict`."
        )
    return None


# Each has a frame for the `value` that it takes apart.
_CODE_OF_SPLIT = {_split.__code__, _split_leaf.__code__, static_key.__code__}


def _path_of(values: list[Any], named: list[tuple[str, Any]]) -> str:
    """Return the path of the last of some values, each a child of the one before; empty without."""
    path, parent = "", None
    for value in values:
        if value is parent:
            continue
        children = _children(parent) if path else named
        key = next((key for key, child in children if child is value), "")
        if path and not key:
            return ""
        path, parent = path + key, value
    return path


def _children(node: Any) -> list[tuple[str, Any]]:
    """Return what follows a node's path in each child's, and the child."""
    if isinstance(node, eqx.Module):
        return [(f".{name}", value) for name, value in fields_of(node).items()]
    # One level, because JAX never gives back the stack that a cycle takes.
    is_leaf = itertools.chain([False], itertools.repeat(True))
    pairs, _ = tree_flatten_with_path(node, is_leaf=lambda _: next(is_leaf))
    return [(keystr(key), child) for key, child in pairs]
