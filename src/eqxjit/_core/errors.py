"""The error path: says which argument is at fault, and words runtime errors as Equinox does."""

import collections
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path

from .._code.files import is_users_module
from .._code.text import short
from .._compat import (
    CALLBACK_ERROR_NAME,
    JaxRuntimeError,
    fields_of,
    last_runtime_error,
    runtime_error_text,
)
from .._interruptions import raise_if_interruption, raised_by, unless_it_raises
from .._spec.static import freeze
from .._spec.tree import is_array

T = TypeVar("T")

# What Equinox's callback raises: the user's message, and then a long explanation.
_MESSAGE = re.compile(rf"{CALLBACK_ERROR_NAME}: (.*?)\n\n\n-{{20}}\n", re.DOTALL)


def runtime_error(error: BaseException) -> BaseException | None:
    """Return the error that a user of `eqx.error_if` should see, if `error` stems from one."""
    # Not `isinstance`: JAX raises no subclasses, users do.
    if type(error) not in (JaxRuntimeError, ValueError):
        return None
    text = str(error)
    if f"{CALLBACK_ERROR_NAME}: " not in text:
        return None
    message, stack = last_runtime_error()
    if message is None or f"{CALLBACK_ERROR_NAME}: {message}" not in text:
        # Equinox keeps one error for all threads, and another one's came in between; or none.
        found = _MESSAGE.search(text)
        if found is None:
            return None
        message, stack = found[1], []
    return eqx.EquinoxRuntimeError(runtime_error_text.format(msg=message, stack=_inside_jit(stack)))


def _inside_jit(stack: Iterable[bytes | str]) -> str:
    """Return the stack within the outermost jitted call: marks are bytes, frames run outwards."""
    frames: list[str] = []
    inside: list[str] = []
    for frame_or_mark in stack:
        if isinstance(frame_or_mark, str):
            frames.append(frame_or_mark)
        else:
            inside = list(frames)
    return "".join(reversed(inside or frames))


def call_error(error: BaseException, arguments: list[tuple[str, Any]]) -> BaseException | None:
    """Return a clearer error for a jitted call that failed; None where `error` is clear enough."""
    note_tracers(error, arguments)
    return (
        runtime_error(error)
        or _invalid_array(error, arguments)
        or _deleted_array(error, arguments)
        or _donated_twice(error, arguments)
    )


def _invalid_array(
    error: BaseException, arguments: list[tuple[str, Any]]
) -> TypeError | ValueError | None:
    """Return the error for an array that JAX can't trace, if `error` is JAX's for one."""
    kind = type(error)
    if kind is not TypeError and kind is not ValueError:
        return None
    for path, leaf in _leaves_with_paths(arguments):
        if not issubclass(type(leaf), (np.ndarray, np.generic)):
            continue
        # An array of another library's may raise another error.
        if isinstance(raised_by(lambda leaf=leaf: jax.typeof(leaf)), kind):
            return kind(f"The array `{path}` {_why_invalid(leaf)}")
    return None


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


# How XLA begins to say that a buffer was deleted, in JAX 0.8 and 0.10 alike.
_INVALID_BUFFER = "INVALID_ARGUMENT: Invalid buffer passed"


def _deleted_array(error: BaseException, arguments: list[tuple[str, Any]]) -> BaseException | None:
    """Return the error for an array that was donated before, if `error` is JAX's for one."""
    kind = type(error)
    if kind not in (RuntimeError, ValueError, JaxRuntimeError):
        return None
    text = str(error)
    for path, leaf in _leaves_with_paths(arguments):
        if not issubclass(type(leaf), jax.Array) or isinstance(leaf, Tracer):
            continue
        # The buffers of this very call are deleted too: is it this array that complains?
        if leaf.is_deleted() and (text.startswith(_INVALID_BUFFER) or text == _complaint(leaf)):
            return kind(
                f"The array `{path}` has been deleted: its buffer was donated to an earlier "
                "call. Use that call's result in its place, or don't donate it."
            )
    return None


# How XLA says that an array that it was to reuse was passed twice: it counts flat arguments.
_DONATED_TWICE = (
    "Attempt to use a buffer that was previously donated in the same call",
    "Attempt to donate a buffer which is also used by the same call",
    "Attempt to donate the same buffer twice",
)


def _donated_twice(error: BaseException, arguments: list[tuple[str, Any]]) -> BaseException | None:
    """Return the error for an array that was passed twice and donated, if `error` is XLA's."""
    kind = type(error)
    if kind not in (RuntimeError, ValueError, JaxRuntimeError):
        return None
    if not any(text in str(error) for text in _DONATED_TWICE):
        return None
    paths: dict[Any, list[str]] = {}
    for path, leaf in _leaves_with_paths(arguments):
        if issubclass(type(leaf), jax.Array) and not isinstance(leaf, Tracer):
            paths.setdefault(_buffer(leaf), []).append(path)
    shared = [names for names in paths.values() if len(names) > 1]
    if not shared:
        return None
    texts = [" and ".join(f"`{path}`" for path in names) for names in shared]
    return kind(
        f"{', and '.join(texts)} are the same array, which is donated: its buffer can be reused "
        f"only once. Pass a copy as `{shared[0][-1]}` (`jnp.copy`), or don't donate it."
    )


def _buffer(array: jax.Array) -> Any:
    """Return what two arrays have in common if they share their memory."""
    # An array on several devices has none, nor has a deleted one.
    return unless_it_raises(array.unsafe_buffer_pointer, id(array))


def _complaint(array: jax.Array) -> str:
    """Return the error message of a deleted array."""
    return str(raised_by(lambda: np.asarray(array)) or "")


def note_tracers(error: BaseException, arguments: list[tuple[str, Any]]) -> None:
    """Add to JAX's error for a leaked tracer which arguments hold tracers."""
    if type(error) is not jax.errors.UnexpectedTracerError:
        return
    tracers = [path for path, leaf in _leaves_with_paths(arguments) if isinstance(leaf, Tracer)]
    if tracers:
        error.add_note(
            f"Tracers among the arguments: {', '.join(f'`{path}`' for path in tracers)}. "
            "Look for a value that was stored inside a transformed function."
        )


def raise_for_shapes(error: Exception, arguments: list[tuple[str, Any]]) -> None:
    """Raise, or note, that an example is a shape where an array was to be described."""
    __tracebackhide__ = True
    shapes = [(path, value) for path, value in arguments if _is_shape(value)]
    if not shapes:
        return
    path, shape = shapes[0]
    text = (
        f"`{path}` is the {type(shape).__name__} {short(shape)}, which is static. For an array of "
        f"that shape, pass `jax.ShapeDtypeStruct({short(tuple(shape))}, jnp.float32)`."
    )
    described = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    if any(isinstance(leaf, described) for _, leaf in _leaves_with_paths(arguments)):
        error.add_note(text)
    else:
        raised = f"{type(error).__name__}: {error}"
        raise TypeError(f"{text} (With it, tracing raises {raised})") from error


def _is_shape(value: Any) -> bool:
    return type(value) in (tuple, list) and bool(value) and all(type(n) is int for n in value)


def with_argument_errors(
    action: Callable[[], T], arguments: Callable[[], list[tuple[str, Any]]]
) -> T:
    """Return what an action on arguments returns: it splits them, or looks them up.

    A clearer error is raised in place of the action's, if there is one. An interruption is raised
    as it is, and an error of a class of the user's never replaced.
    """
    __tracebackhide__ = True
    try:
        return action()
    except Exception as error:
        # A flatten, `__hash__` or `__eq__` of the user's.
        raise_if_interruption(error, action)
        if not is_users_module(type(error).__module__):
            clearer = _argument_error(error, arguments())
            if clearer is not None:
                raise clearer from error
        raise


def _argument_error(error: Exception, arguments: list[tuple[str, Any]]) -> ValueError | None:
    if isinstance(error, RecursionError):
        path = _cycle(arguments)
        if path:
            return ValueError(
                f"`{path}` contains itself, so it isn't a tree. Keep references to a parent out of "
                "the pytree, or make them static."
            )
    for path, node in _nodes_with_paths(arguments):
        if type(node) in _SORTED_DICTS and _raises(lambda node=node: sorted(node)):
            return ValueError(
                f"The keys of the dict `{path}` can't be sorted, as JAX needs: "
                f"{', '.join(map(short, node))}. Use keys of one type, or an `OrderedDict`."
            )
        found = _bad_static(node)
        if found is not None:
            suffix, value, problem, reason = found
            return ValueError(
                f"The static value `{path}{suffix}` of type `{type(value).__name__}` {problem}: "
                f"{reason}. Everything that isn't an array is static, and static values must be "
                "hashable and comparable: make it an array, a tuple or a frozen dataclass, or give "
                "its class an `__eq__` and a `__hash__`."
            )
    return None


def _bad_static(node: Any) -> tuple[str, Any, str, str] | None:
    """Return the first value in a node's static half that can't be keyed: where, what, and why."""
    if issubclass(type(node), eqx.Module):
        candidates = [(f".{name}", value) for name, value in _fields(node, static=True)]
    elif jax.tree_util.all_leaves([node]) and not is_array(node):
        reason = _raises(lambda: hash(node))
        if reason:
            return "", node, "can't be hashed", reason
        candidates = [("", node)]
    else:
        return None
    for suffix, value in candidates:
        reason = _raises(lambda value=value: hash(freeze(value)))
        if reason:
            return suffix, value, "can't be hashed", reason
        # Containers find an element equal to itself without asking it.
        reason = next(filter(None, map(_incomparable, _parts(value))), "")
        if reason:
            return suffix, value, "can't be compared", reason
    return None


def _parts(value: Any) -> Iterator[Any]:
    """Yield a static value, and what the builtin containers in it hold."""
    yield value
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (tuple, list, set, frozenset)):
        for element in value:
            yield from _parts(element)


def _incomparable(value: Any) -> str:
    return _raises(lambda: bool(value == value))


def _raises(action: Any) -> str:
    """Return what an action raises, in words; empty where it raises nothing."""
    error = raised_by(action)
    if isinstance(error, RecursionError):
        return (
            "it contains itself, or is nested too deeply (a dataclass with `eq=False` is compared "
            "by identity, whatever it contains)"
        )
    return "" if error is None else f"{type(error).__name__}: {error}"


def _fields(module: eqx.Module, static: bool) -> list[tuple[str, Any]]:
    """Return the static, or the other, fields of a Module instance that are set."""
    values = fields_of(module)
    names = [
        field.name
        for field in dataclasses.fields(type(module))
        if bool(field.metadata.get("static", False)) == static
    ]
    return [(name, values[name]) for name in names if name in values]


# JAX sorts their keys.
_SORTED_DICTS = (dict, collections.defaultdict)


def _cycle(arguments: list[tuple[str, Any]]) -> str:
    """Return the path of the first node that contains itself; empty if there is none."""
    return next((path for path, _, is_cycle in _nodes(arguments) if is_cycle), "")


def _nodes_with_paths(arguments: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return ((path, node) for path, node, _ in _nodes(arguments))


def _nodes(arguments: list[tuple[str, Any]]) -> Iterator[tuple[str, Any, bool]]:
    """Yield each node and leaf below the arguments, outside in, as far as they can be walked.

    Each comes with its path, and with whether it contains itself: it then isn't looked into again.
    """
    for name, value in arguments:
        pending: list[tuple[str, Any, tuple[int, ...]]] = [(name, value, ())]
        while pending:
            path, node, ancestors = pending.pop()
            is_cycle = id(node) in ancestors
            yield path, node, is_cycle
            if is_cycle:
                continue
            children: list[tuple[str, Any]] = []
            if issubclass(type(node), dict):
                children = [(f"{path}[{short(key)}]", child) for key, child in node.items()]
            elif issubclass(type(node), tuple) and hasattr(node, "_fields"):
                pairs = zip(node._fields, node, strict=False)  # type: ignore[attr-defined]
                children = [(f"{path}.{field}", child) for field, child in pairs]
            elif issubclass(type(node), (tuple, list)):
                children = [(f"{path}[{i}]", child) for i, child in enumerate(node)]
            elif issubclass(type(node), eqx.Module):
                children = [(f"{path}.{k}", v) for k, v in _fields(node, static=False)]
            ancestors = (*ancestors, id(node))
            pending.extend((p, child, ancestors) for p, child in reversed(children))


def _leaves_with_paths(arguments: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in arguments:
        # A node of the user's may be one that can't be flattened.
        flatten = functools.partial(tree_flatten_with_path, value)
        pairs, _ = unless_it_raises(flatten, ([], None))
        leaves.extend((f"{name}{keystr(path)}", leaf) for path, leaf in pairs)
    return leaves


def not_callable(fun: Any) -> TypeError:
    """Return the error for something that `filter_jit` can't wrap."""
    hint = ""
    if isinstance(fun, (classmethod, staticmethod)):
        kind = type(fun).__name__
        hint = f" Put `@{kind}` above `@filter_jit`."
    elif isinstance(fun, property):
        hint = " Put `@property` above `@filter_jit`."
    elif inspect.ismodule(fun):
        hint = " Name the function in the module."
    return TypeError(f"`filter_jit` takes a callable; got {short(fun)}.{hint}")
