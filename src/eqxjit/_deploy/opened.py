"""Finds the arrays that functions hold. Functions that JAX made are opened, others only counted.

`jax.vmap(model)` is a Python function, so to JAX it is a leaf without arrays. `opened` returns a
pytree that computes the same, and whose leaves are those of `model`. A function of the user's is
left alone, because other code may share the variables in its closure.
"""

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class

from .._core.wrapper import register_partial
from .._places import captured, is_jax, is_users


# Not `equinox.Partial`, which warns if the function in it is `jax.vmap(model)`.
class Partial(functools.partial[Any]):
    """A partial function that is a pytree."""


register_partial(Partial)


@register_pytree_with_keys_class
class _Transformed:
    """A function that JAX returned, such as `jax.vmap(model)`, as a pytree of what it calls.

    - `shell`: the function, with empty cells in its closure for what it calls.
    - `names`: the variables of these cells.
    - `contents`: their values, which are the children of the node.
    """

    def __init__(self, shell: types.FunctionType, names: tuple[str, ...], contents: Any):
        self.__name__, self.__qualname__ = shell.__name__, shell.__qualname__
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
    """Return a copy of a function whose variables of these names are in new cells."""
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    closure = [cell if name not in values else types.CellType(values[name]) for name, cell in cells]
    copied = types.FunctionType(
        fun.__code__, fun.__globals__, fun.__name__, fun.__defaults__, tuple(closure)
    )
    copied.__kwdefaults__, copied.__qualname__ = fun.__kwdefaults__, fun.__qualname__
    return copied


def opened(value: Any) -> Any:
    """Return a pytree for a function that JAX or `functools` made, if the function holds arrays.

    Any other value is returned as it is.
    """
    if type(value) is types.MethodType and isinstance(value.__self__, eqx.Module):
        return Partial(value.__func__, value.__self__)
    if not (type(value) is functools.partial or is_jax(value)) or not captured_bytes([value]):
        return value
    if type(value) is functools.partial:
        return Partial(value.func, *value.args, **value.keywords)
    if is_jax(value):
        called = {name: content for name, content in captured(value) if callable(content)}
        if called:
            # Empty the shell, because it must not keep alive the model that is copied.
            return _Transformed(
                _with_cells(value, dict.fromkeys(called)), (*called,), [*called.values()]
            )
    return value


def captured_bytes(functions: list[Any]) -> int:
    """Return the bytes of all arrays to which functions refer by closures, globals and wrappers."""
    arrays: dict[int, Any] = {}
    seen: set[int] = set()
    pending = functions[:]
    while pending:
        fun = pending.pop()
        if id(fun) in seen:
            continue
        seen.add(id(fun))
        for content in _contents(fun):
            for leaf in jax.tree.leaves(content, is_leaf=_is_state):
                if eqx.is_array(leaf):
                    arrays[id(leaf)] = leaf
                elif callable(leaf):
                    pending.append(leaf)
    return sum([array.nbytes for array in arrays.values()])


def _is_state(value: Any) -> bool:
    # Taking a `State` apart makes it unusable for its owner.
    return isinstance(value, eqx.nn.State)


def _contents(fun: Any) -> Iterator[Any]:
    """Yield what a callable refers to: trees of arrays, other callables, and more."""
    if isinstance(fun, functools.partial):
        yield fun.func, fun.args, fun.keywords
    elif isinstance(fun, types.MethodType):
        yield fun.__func__
        if isinstance(fun.__self__, eqx.Module):
            yield fun.__self__
    elif isinstance(fun, types.FunctionType):
        yield from [content for _, content in captured(fun)]
        if is_users(fun.__code__.co_filename):
            yield from [
                fun.__globals__[name]
                for name in _globals_in(fun.__code__)
                if name in fun.__globals__
            ]
    elif hasattr(fun, "__wrapped__"):
        yield fun.__wrapped__


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the global variables that a function reads, nested functions included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_in(constant)
