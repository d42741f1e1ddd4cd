"""Opens functions that hold arrays, and counts the bytes of all arrays that functions hold.

`jax.vmap(model)` is a Python function, so to JAX it is a leaf without arrays. `opened` returns a
pytree that computes the same, and whose leaves are those of `model`. A function of the user's isn't
opened, because other code may share the variables in its closure.
"""

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class

from .._compat import fields_of
from .._core.wrapper import JitFunction, register_partial
from .._places import captured, is_jax_function, is_users
from .._spec.tree import ARRAY_CLASSES


# Not `equinox.Partial`, which warns if the function in it is `jax.vmap(model)`.
class Partial(functools.partial[Any]):
    """A partial function that is a pytree."""


register_partial(Partial)


@register_pytree_with_keys_class
class _Transformed:
    """A function that JAX returned, such as `jax.vmap(model)`, as a pytree of what it calls.

    - `shell`: a copy of the function, in whose closure `None` replaces each function that it calls.
    - `names`: the names of the replaced variables.
    - `contents`: the values of these variables, which are the children of the node.
    """

    def __init__(self, shell: types.FunctionType, names: tuple[str, ...], contents: Any):
        self.__name__ = shell.__name__
        self.__qualname__ = shell.__qualname__
        self.shell = shell
        self.names = names
        self.contents = contents

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        values = dict(zip(self.names, self.contents, strict=True))
        return _with_cells(self.shell, values)(*args, **kwargs)

    def tree_flatten_with_keys(self) -> Any:
        keys = [GetAttrKey(name) for name in self.names]
        return [*zip(keys, self.contents, strict=True)], (self.shell, self.names)

    @classmethod
    def tree_unflatten(cls, metadata: Any, contents: Any) -> "_Transformed":
        shell, names = metadata
        return cls(shell, names, contents)


def _with_cells(fun: types.FunctionType, values: dict[str, Any]) -> types.FunctionType:
    """Return a copy of a function in whose closure some variables have other values."""
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    closure = [cell if name not in values else types.CellType(values[name]) for name, cell in cells]
    copied = types.FunctionType(
        fun.__code__, fun.__globals__, fun.__name__, fun.__defaults__, tuple(closure)
    )
    copied.__kwdefaults__ = fun.__kwdefaults__
    copied.__qualname__ = fun.__qualname__
    return copied


def opened(value: Any) -> Any:
    """Return a pytree that computes the same as a function that holds arrays.

    The function is a method of a Module, a partial, or a function that JAX returned. Any other
    value is returned as it is.
    """
    if type(value) is types.MethodType and isinstance(value.__self__, eqx.Module):
        return Partial(value.__func__, value.__self__)
    if type(value) is functools.partial and captured_bytes([value]):
        return Partial(value.func, *value.args, **value.keywords)
    if is_jax_function(value) and captured_bytes([value]):
        called = {name: content for name, content in captured(value) if callable(content)}
        if called:
            # `None` in the shell, because the shell must not keep the original model alive.
            shell = _with_cells(value, dict.fromkeys(called))
            return _Transformed(shell, (*called,), [*called.values()])
    return value


# Longer containers hold data rather than layers, and take long to walk.
_MAX_ENTRIES = 10_000


def captured_bytes(functions: list[Any]) -> int:
    """Return the bytes of all arrays to which functions refer by closures, globals and wrappers.

    This runs no code of the user's: a flatten may raise, or make a `State` unusable.
    """
    n_bytes = 0
    # The values keep the objects alive, because a new object may have the `id` of a freed one.
    seen: dict[int, Any] = {}
    pending = functions[:]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if type(value) in ARRAY_CLASSES:
            n_bytes += value.nbytes
        else:
            pending.extend(_contents(value))
    return n_bytes


def _contents(value: Any) -> Iterator[Any]:
    """Yield what a container, a Module or a callable refers to."""
    # Not `isinstance`, because the `__class__` of a proxy may raise.
    kind = type(value)
    base = next((cls for cls in (dict, list, tuple) if issubclass(kind, cls)), None)
    if base is not None:
        # With the methods of the base class, because those of a subclass may be the user's code.
        if base.__len__(value) <= _MAX_ENTRIES:
            yield from dict.values(value) if base is dict else base.__iter__(value)
    elif issubclass(kind, eqx.Module):
        yield from fields_of(value).values()
    elif issubclass(kind, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif issubclass(kind, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif issubclass(kind, types.FunctionType):
        yield from [content for _, content in captured(value)]
        if is_users(value.__code__.co_filename):
            names = _globals_in(value.__code__)
            yield from [value.__globals__[name] for name in names if name in value.__globals__]
    elif issubclass(kind, (JitFunction, *_WRAPPERS)):
        yield value.__wrapped__


# The classes of `jax.jit(f)` and of functions with derivatives of their own.
_WRAPPERS = type(jax.jit(abs)), jax.custom_jvp, jax.custom_vjp


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the global variables that a function reads, nested functions included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_in(constant)
