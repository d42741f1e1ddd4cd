"""The error path: says which argument is at fault, and words runtime errors as Equinox does."""

import collections
import re
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.errors import JaxRuntimeError

from .._compat import CALLBACK_ERROR_NAME, last_runtime_error, runtime_error_text
from .._spec.tree import DICT, MODULE, NODE, failed_levels, read_node
from .._text import short
from .traced import is_disabled

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
    end = max([i for i, part in enumerate(stack) if isinstance(part, bytes)], default=len(stack))
    shown = "".join(reversed([part for part in stack[:end] if isinstance(part, str)]))
    return eqx.EquinoxRuntimeError(runtime_error_text.format(msg=message, stack=shown))


def _text_of(error: BaseException) -> str:
    """Return the text of an error of JAX's; what holds anything else is the user's."""
    return error.args[0] if error.args and isinstance(error.args[0], str) else ""


# How XLA and JAX begin to say that a buffer was deleted.
_DELETED = ("INVALID_ARGUMENT: Invalid buffer passed", "Array has been deleted")


def array_error(error: BaseException, arrays: Iterable[tuple[str, Any]]) -> BaseException | None:
    """Return the error for an array that was refused, if `error` is JAX's or XLA's for one."""
    kind = type(error)
    # Not `isinstance`: users raise subclasses.
    if kind not in (TypeError, ValueError, RuntimeError, JaxRuntimeError):
        return None
    text = _text_of(error)
    # XLA says it in several ways, and counts flat arguments.
    is_twice = "Attempt to " in text and "donate" in text
    paths: dict[int, str] = {}
    for path, leaf in arrays:
        if issubclass(type(leaf), (np.ndarray, np.generic)):
            try:
                jax.typeof(leaf)
            except (TypeError, ValueError) as why:
                return kind(
                    f"The array `{path}` can't be traced: {why} Pass a plain array of "
                    "numbers; or something static, such as a tuple of its items."
                )
        elif issubclass(type(leaf), jax.Array) and not isinstance(leaf, Tracer):
            if text.startswith(_DELETED) and leaf.is_deleted():
                return kind(
                    f"The array `{path}` has been deleted, mostly by being donated to an earlier "
                    "call, or to this one, where `jax_debug_nans` or `infs` has found something. "
                    "Use the earlier call's result in its place, or don't donate it."
                )
            if is_twice and (first := paths.setdefault(id(leaf), path)) != path:
                return kind(
                    f"`{first}` and `{path}` are the same array, which is donated: its buffer can "
                    f"be reused only once. Pass `jnp.copy` of it as `{path}`, or don't donate it."
                )
    return None


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


def drop_unused(call: Any) -> None:
    """Drop the entry of a call that raised, if no trace of it has ended well.

    It would count, and might take the place of an entry that serves.
    """
    entry, table = call.entry, call.function.table
    if not hasattr(entry, "out") and table.entries.get(entry.spec) is entry:
        table.drop(entry.spec)


def raise_clearer(error: BaseException, call: Any) -> None:
    """Raise a clearer error than a call raised, if there is one."""
    __tracebackhide__ = True
    # What the user's function raises while it is traced is never replaced.
    if not isinstance(error, Exception) or (call.trace is not None and not call.is_traced):
        return
    raise_instead(runtime_error(error))
    # Under `jax.disable_jit` the error is the function's own.
    paths = None if is_disabled() else call.array_paths
    if paths is not None:
        raise_instead(array_error(error, zip(paths, call.flat, strict=True)))


def split_error(error: Exception, named: list[tuple[str, Any]]) -> ValueError | None:
    """Return a clearer error than `split` raised, if that is Python's or JAX's.

    `named` are parts of the tree with their names, with which paths begin.
    """
    levels = failed_levels(error)
    # Not `isinstance`: users raise subclasses, and a signal handler others.
    if type(error) not in (TypeError, ValueError, RecursionError):
        return None
    path = ""
    paths: dict[int, str] = {}
    for level in reversed(levels):
        value = level.value
        path = path or next((name for name, each in named if each is value), "")
        if id(value) in paths and isinstance(error, RecursionError):
            return ValueError(
                f"`{paths[id(value)]}` contains itself, so it isn't a tree. Keep references to "
                "a parent out of the pytree, or make them static."
            )
        if path and level.spec:
            paths[id(value)] = path
            path += _label(value, *level.spec)
    if not path or isinstance(error, RecursionError):
        # The user's functions have taken the stack, or a deep tree has.
        return None
    value = levels[0].value
    if levels[0].is_static:
        return ValueError(
            f"The static value `{path}` of type `{type(value).__name__}` can't be hashed: "
            f"{type(error).__name__}: {error}. Everything that isn't an array is static, and "
            "static values must be hashable and comparable: make it an array, a tuple, a frozenset "
            "or a frozen dataclass."
        )
    if type(value) in (dict, collections.defaultdict):
        return ValueError(
            f"The keys of the dict `{path}` can't be sorted, as JAX needs: "
            f"{', '.join(map(short, value))}. Use keys of one type, or an `OrderedDict`."
        )
    return None


def _label(value: Any, kind: int, cls: type, aux: Any, *before: Any) -> str:
    """Return what a node's path is followed by in the path of the child that comes next.

    The arguments after `value` are the node's spec, up to and without that child.
    """
    i = len(before)
    if kind == NODE:
        return read_node(value)[0][i]
    if kind == DICT:
        return f"[{aux[i]!r}]"
    names = aux if kind == MODULE else getattr(cls, "_fields", None)
    return f".{names[i]}" if names else f"[{i}]"
