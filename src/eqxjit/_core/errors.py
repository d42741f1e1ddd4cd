"""The error path: says which argument is at fault, and words runtime errors as Equinox does."""

import collections
import re
import traceback
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.errors import JaxRuntimeError

from .._compat import CALLBACK_ERROR_NAME, last_runtime_error, runtime_error_text
from .._spec.static_key import static_key
from .._spec.tree import DICT, MODULE, NODE, _split, _split_leaf, read_node
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


def split_error(error: Exception, named: list[tuple[str, Any]]) -> ValueError | None:
    """Return a clearer error than that of `split`, if it is Python's or JAX's.

    `named` are parts of the tree with their names, from which paths begin.
    """
    # Not `isinstance`: users raise subclasses, and a signal handler others.
    if type(error) not in (TypeError, ValueError, RecursionError):
        return None
    path, is_static = "", False
    value: Any = None
    paths: dict[int, str] = {}
    # From the frames, outside in, because to take it apart again would run the user's code again.
    # Each has the `value` that it took apart, and that of a node its `spec` up to the child.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in (_split_leaf.__code__, static_key.__code__):
            value, is_static = frame.f_locals["value"], True
        elif frame.f_code is _split.__code__:
            value, spec = frame.f_locals["value"], frame.f_locals.get("spec")
            path = path or next((name for name, each in named if each is value), "")
            if id(value) in paths and isinstance(error, RecursionError):
                return ValueError(
                    f"`{paths[id(value)]}` contains itself, so it isn't a tree. Keep references to "
                    "a parent out of the pytree, or make them static."
                )
            if path and spec:
                paths[id(value)] = path
                path += _label(value, *spec)
    if not path or isinstance(error, RecursionError):
        # Or the user's functions have taken the stack, or a deep tree has.
        return None
    if is_static:
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
    """Return what follows a node's path in that of the child after those before."""
    i = len(before)
    if kind == NODE:
        return read_node(value)[0][i]
    if kind == DICT:
        return f"[{aux[i]!r}]"
    names = aux if kind == MODULE else getattr(cls, "_fields", None)
    return f".{names[i]}" if names else f"[{i}]"
