"""The error path: says which argument is at fault, and words runtime errors as Equinox does."""

import collections
import contextlib
import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from .._places import is_users_module
from .._spec.static_key import Opaque, static_key
from .._spec.tree import Spec, is_array, split
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
    try:
        return str(error)
    except Exception:
        # A `__str__` of the user's, whose error this is then.
        return ""


# How XLA begins to say that a buffer was deleted, in JAX 0.8 and 0.10 alike.
_INVALID_BUFFER = "INVALID_ARGUMENT: Invalid buffer passed"

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
            if not _is_valid(leaf):
                return kind(f"The array `{path}` {_why_invalid(leaf)}")
        elif issubclass(type(leaf), jax.Array) and not isinstance(leaf, Tracer):
            # The buffers of this very call are deleted too: is it this array that complains?
            if leaf.is_deleted() and (
                text.startswith(_INVALID_BUFFER) or text == _complaint_of_deleted(leaf)
            ):
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


def _is_valid(array: np.ndarray | np.generic) -> bool:
    try:
        jax.typeof(array)
    except (TypeError, ValueError):
        return False
    return True


def _complaint_of_deleted(array: jax.Array) -> str:
    try:
        np.asarray(array)
    except RuntimeError as error:
        return str(error)
    return ""


def _buffer(array: jax.Array) -> int:
    try:
        return array.unsafe_buffer_pointer()
    except (RuntimeError, ValueError):
        # An array on several devices has no one buffer, nor has a deleted one.
        return id(array)


def _why_invalid(array: np.ndarray | np.generic) -> str:
    """Return why JAX can't trace an array, and what to do about that."""
    if isinstance(array, np.ma.MaskedArray):
        return (
            "is a NumPy masked array, which JAX can't trace. Pass its `.filled(...)`, and its mask "
            "as another array."
        )
    what = f"has dtype {array.dtype}, which JAX can't trace:"
    if array.dtype.kind in "mM":
        return (
            f"{what} pass times as numbers, for example `(t - t0) / np.timedelta64(1, 's')`. For a "
            "static value, pass a `datetime.datetime`, or a tuple of those."
        )
    if array.dtype.kind in "SUO":
        return (
            f"{what} convert its items to numbers. For a static value, pass tuples, for example "
            "`tuple(a.tolist())`."
        )
    if array.dtype.names is not None:
        return f"{what} pass its fields as arrays, for example in a dict."
    return f"{what} convert it, for example by `.astype(np.float32)`."


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
    tree: Any, named: list[tuple[str, Any]], is_input: bool = True
) -> tuple[Spec, list[Any], list[Any]]:
    """Return `split(tree, is_input)`; an error names the part that is at fault."""
    __tracebackhide__ = True
    try:
        return split(tree, is_input)
    except Exception as error:
        # A flatten or a `__hash__` of the user's.
        raise_instead(argument_error(error, named), error)
        raise


def argument_error(error: Exception, arguments: list[tuple[str, Any]]) -> ValueError | None:
    """Return a clearer error than that of splitting arguments, or of looking them up.

    None if no argument is at fault, and for an error of a class of the user's.
    """
    # A signal handler may raise a `TimeoutError` anywhere.
    if isinstance(error, OSError) or is_users_module(type(error).__module__):
        return None
    if isinstance(error, RecursionError):
        # On a stack of its own, where only what is too deep by itself raises that again.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_find_fault, error, arguments).result()
    return _find_fault(error, arguments)


def _find_fault(error: Exception, arguments: list[tuple[str, Any]]) -> ValueError | None:
    for path, kind, node in _nodes(arguments):
        if kind == "cycle" and isinstance(error, RecursionError):
            return ValueError(
                f"`{path}` contains itself, so it isn't a tree. Keep references to a parent out of "
                "the pytree, or make them static."
            )
        is_sorted = type(node) in (dict, collections.defaultdict)
        if is_sorted and _raises(lambda node=node: sorted(node)):
            return ValueError(
                f"The keys of the dict `{path}` can't be sorted, as JAX needs: "
                f"{', '.join(map(short, node))}. Use keys of one type, or an `OrderedDict`."
            )
        statics = [("", node)] if kind == "leaf" and not is_array(node) else []
        if issubclass(type(node), eqx.Module):
            values, fields = fields_of(node), dataclasses.fields(node)
            names = [field.name for field in fields if field.metadata.get("static", False)]
            statics = [(f".{name}", values[name]) for name in names if name in values]
        for suffix, value in statics:
            # A list in a static field is compared, though it can't be hashed.
            problem = _why_not_a_key(value, must_hash=kind == "leaf")
            if problem:
                return ValueError(
                    f"The static value `{path}{suffix}` of type `{type(value).__name__}` "
                    f"{problem}. Everything that isn't an array is static, and static values must "
                    "be hashable and comparable: make it an array, a tuple or a frozen dataclass, "
                    "or give its class an `__eq__` and a `__hash__`."
                )
    return None


def _why_not_a_key(value: Any, must_hash: bool) -> str:
    """Return why a static value can't be looked up; empty if it can."""
    reason = _raises(lambda: hash((static_key(value), value if must_hash else None)))
    if reason:
        return f"can't be hashed: {reason}"
    parts: list[Any] = [static_key(value)]
    # The list grows while it is gone through.
    for part in parts:
        if type(part) in (tuple, frozenset):
            parts.extend(part)
        elif type(part) is Opaque:
            one = other = part.value
            if part.hash is None:
                # A large container finds its items equal to themselves without asking them.
                with contextlib.suppress(Exception):  # A `__deepcopy__` of the user's.
                    other = copy.deepcopy(one)
            reason = _raises(lambda one=one, other=other: bool(one == other))
            if reason:
                return f"can't be compared: {reason}"
    return ""


def _raises(action: Callable[[], Any]) -> str:
    """Return what code of the user's raises, in words; empty where it raises nothing."""
    try:
        action()
    except RecursionError:
        return (
            "it contains itself, or is nested too deeply (a dataclass with `eq=False` is "
            "compared by identity, whatever it contains)"
        )
    except Exception as error:
        # A `__hash__`, an `__eq__`, or a `__lt__` of keys.
        return f"{type(error).__name__}: {_text_of(error)}"
    return ""


def _nodes(arguments: list[tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield the path of each node below the arguments, its kind and itself, outside in.

    A "leaf" has nothing below it, a "cycle" contains itself and isn't looked into again; all else
    is a "node".
    """
    for name, value in arguments:
        pending: list[tuple[str, Any, tuple[int, ...]]] = [(name, value, ())]
        while pending:
            path, node, ancestors = pending.pop()
            if id(node) in ancestors:
                yield path, "cycle", node
                continue
            try:
                below = _children(node)
            except Exception:
                # A flatten of the user's, or the `__lt__` or `repr` of a key.
                below = []
            if below == [("", node)]:
                yield path, "leaf", node
            else:
                yield path, "node", node
                ancestors = (*ancestors, id(node))
                pending += [(path + key, child, ancestors) for key, child in reversed(below)]


def _children(node: Any) -> list[tuple[str, Any]]:
    """Return what follows a node's path in each child's, and the child; of a leaf itself."""
    # One level at a time, because JAX never gives back the stack that a cycle takes.
    is_leaf = itertools.chain([False], itertools.repeat(True))
    pairs, _ = tree_flatten_with_path(node, is_leaf=lambda _: next(is_leaf))
    return [(keystr(key), child) for key, child in pairs]
