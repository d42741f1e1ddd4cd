"""Clearer errors: they name the argument at fault. Runtime errors are worded as in Equinox."""

import collections
import re
from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.errors import JaxRuntimeError

from .._compat import (
    CALLBACK_ERROR_NAME,
    is_jit_disabled,
    last_runtime_error,
    runtime_error_text,
)
from .._spec.tree import DICT, MODULE, NODE, FailedLevel, failed_levels, read_node
from .._text import short

# Finds the user's message in the text of JAX's error. The callback's error holds the message, and
# then a long explanation.
_MESSAGE = re.compile(rf"{CALLBACK_ERROR_NAME}: (.*?)\n\n\n-{{20}}\n", re.DOTALL)


def runtime_error(error: BaseException) -> BaseException | None:
    """Return Equinox's error with the user's message, if an `eqx.error_if` caused `error`."""
    # Not `isinstance`, because users raise subclasses, and JAX doesn't.
    if type(error) not in (JaxRuntimeError, ValueError):
        return None
    text = _text_of(error)
    if f"{CALLBACK_ERROR_NAME}: " not in text:
        return None
    message, stack = last_runtime_error()
    if message is None or f"{CALLBACK_ERROR_NAME}: {message}" not in text:
        # Equinox keeps only the latest error of all threads. That may be the error of a different
        # thread. A new release of Equinox may keep none.
        found = _MESSAGE.search(text)
        if found is None:
            return None
        message = found[1]
        stack = []
    # The stack has its frames as strings, innermost first. Bytes among them mark where a jitted
    # function begins. Like Equinox, show the frames inside of the outermost jitted function.
    marks = [i for i, part in enumerate(stack) if isinstance(part, bytes)]
    frames = [part for part in stack[: max(marks, default=len(stack))] if isinstance(part, str)]
    shown = "".join(reversed(frames))
    return eqx.EquinoxRuntimeError(runtime_error_text.format(msg=message, stack=shown))


def _text_of(error: BaseException) -> str:
    """Return the text of an error that JAX may have raised; empty if it has no text."""
    return error.args[0] if error.args and isinstance(error.args[0], str) else ""


# How the errors of XLA and JAX for a deleted buffer begin.
_DELETED = ("INVALID_ARGUMENT: Invalid buffer passed", "Array has been deleted")


def array_error(error: BaseException, arrays: Iterable[tuple[str, Any]]) -> BaseException | None:
    """Return an error that names the array at fault; `None` if `error` doesn't reject an array.

    `arrays` are all arrays of the call, with their paths.
    """
    cls = type(error)
    # Not `isinstance`, because users raise subclasses, and JAX doesn't.
    if cls not in (TypeError, ValueError, RuntimeError, JaxRuntimeError):
        return None
    text = _text_of(error)
    # XLA words the error for an array that is donated twice in several ways. All of them give
    # arrays only by a flat index.
    is_donated_twice = "Attempt to " in text and "donate" in text
    paths: dict[int, str] = {}
    for path, leaf in arrays:
        if issubclass(type(leaf), (np.ndarray, np.generic)):
            try:
                jax.typeof(leaf)
            except (TypeError, ValueError) as why:
                is_scalar = issubclass(type(leaf), np.generic)
                static = f"`{path}.item()`" if is_scalar else "a tuple of the array's items"
                return cls(
                    f"The array `{path}` can't be traced: {str(why).rstrip('.')}. Pass a plain "
                    f"array of numbers, or pass a static value, such as {static}."
                )
        elif issubclass(type(leaf), jax.Array) and not isinstance(leaf, Tracer):
            if text.startswith(_DELETED) and leaf.is_deleted():
                return cls(
                    f"The array `{path}` has been deleted. Mostly it was donated to an earlier "
                    "call; then use the result of that call instead, or don't donate the array. "
                    "With `jax_debug_nans` or `jax_debug_infs` it may have been donated to this "
                    "call, whose result has a NaN or an infinity."
                )
            if is_donated_twice and (first := paths.setdefault(id(leaf), path)) != path:
                return cls(
                    f"`{first}` and `{path}` are the same array. It is donated, and its buffer can "
                    f"be reused only once. Pass `jnp.copy` of the array as `{path}`, or don't "
                    "donate the array."
                )
    return None


def raise_instead(clearer: BaseException | None, cause: BaseException | None = None) -> None:
    """Raise `clearer` in place of the error that is being handled; do nothing if it is `None`."""
    __tracebackhide__ = True
    if clearer is None:
        return
    try:
        raise clearer from cause
    finally:
        # The traceback of `clearer` refers to this frame, so a local name would be a cycle. It
        # would keep all that the frames refer to alive until garbage collection.
        del clearer, cause


def raise_clearer(error: BaseException, call: Any) -> None:
    """Raise a clearer error than the one that a call raised, if there is a clearer error."""
    __tracebackhide__ = True
    # An error that the user's function raises while it is traced is never replaced.
    if not isinstance(error, Exception) or (call.trace is not None and not call.is_traced):
        return
    raise_instead(runtime_error(error))
    # Under `jax.disable_jit` the user's function has raised the error itself.
    paths = None if is_jit_disabled() else call.array_paths
    if paths is not None:
        raise_instead(array_error(error, zip(paths, call.flat, strict=True)))


def split_error(error: Exception, named: list[tuple[str, Any]]) -> ValueError | None:
    """Return a clearer error than the `error` that `split` raised, if there is one.

    `named` are parts of the tree, with the names with which their paths begin.
    """
    levels = failed_levels(error)
    # Not `isinstance`, because users raise subclasses, and signal handlers raise other errors.
    if type(error) not in (TypeError, ValueError, RecursionError):
        return None
    if type(error) is RecursionError:
        return _error_for_cycle(_with_paths(levels, named))
    located = [*_with_paths(levels, named)]
    path, level = located[-1] if located else ("", None)
    if not path or level is None:
        return None
    if level.is_static:
        return _error_for_hash(path, level.value, error)
    if type(level.value) in (dict, collections.defaultdict):
        return _error_for_keys(path, level.value)
    return None


def _with_paths(
    levels: list[FailedLevel], named: list[tuple[str, Any]]
) -> Iterator[tuple[str, FailedLevel]]:
    """Yield each level with its path, outermost first.

    Paths begin at the first level whose value is in `named`. Levels outside of it have the path "".
    """
    path = ""
    for level in reversed(levels):
        path = path or next((name for name, each in named if each is level.value), "")
        yield path, level
        if path and level.spec:
            path += _label(level.value, *level.spec)


def _error_for_cycle(located: Iterable[tuple[str, FailedLevel]]) -> ValueError | None:
    """Return an error if a node among these levels contains itself, or else `None`."""
    paths: dict[int, str] = {}
    for path, level in located:
        if id(level.value) in paths:
            return ValueError(
                f"`{paths[id(level.value)]}` contains itself, so it isn't a tree. Keep references "
                "to a parent out of the pytree, or make them static."
            )
        if path and level.spec:
            paths[id(level.value)] = path
    # The tree is very deep, or the user's own code has used up the stack.
    return None


def _error_for_hash(path: str, value: Any, error: Exception) -> ValueError:
    return ValueError(
        f"The static value `{path}` of type `{type(value).__name__}` can't be hashed: "
        f"{type(error).__name__}: {error}. Everything that isn't an array is static, and static "
        "values must be hashable and comparable. Make this value an array, a tuple, a frozenset "
        "or a frozen dataclass."
    )


def _error_for_keys(path: str, value: dict[Any, Any]) -> ValueError:
    return ValueError(
        f"The keys of the dict `{path}` can't be sorted, but JAX sorts the keys of dicts: "
        f"{', '.join(map(short, value))}. Use keys of one type, or an `OrderedDict`."
    )


def _label(value: Any, kind: int, cls: type, aux: Any, *before: Any) -> str:
    """Return what the path of a node's child adds to the path of the node, such as `.weight`.

    The arguments after `value` are the spec of the node up to that child, without the child. So
    `before` are the specs of the children before it.
    """
    i = len(before)
    if kind == NODE:
        return read_node(value)[0][i]
    if kind == DICT:
        return f"[{aux[i]!r}]"
    names = aux if kind == MODULE else getattr(cls, "_fields", None)
    return f".{names[i]}" if names else f"[{i}]"
