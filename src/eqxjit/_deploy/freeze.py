"""`freeze`: a function with its arrays compiled in, for inference; `load`: one from a file."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp

from .._core.ahead import CompileCost
from .._core.options import Options
from .._core.table import Function, Table, names_of, split_named
from .._core.wrapper import BoundJitFunction, JitFunction, P, T, register_partial, register_wrapper
from .._fast.signature import Signature
from .._places import place_of, trimming
from .._spec.arrays import has_tracers
from .._spec.static_key import referents, same, static_key
from .._spec.tree import Spec, combine, split
from .._text import short
from .saved import Path, SavedFunction, read, write


class FrozenFunction(JitFunction[P, T]):
    """A function whose arrays are compiled in; made by `freeze`."""

    __slots__ = ()

    @property
    def constant_bytes(self) -> int:
        """The bytes of arrays that are compiled in; larger arrays are passed along."""
        return sum(value.nbytes for value in self._function.statics if eqx.is_array(value))

    def compile(
        self, /, *args: Any, other_shapes: Literal["compile", "raise"] | None = None, **kwargs: Any
    ) -> CompileCost:
        """Compile for arguments like these, so that the first such call is fast.

        **Arguments:**

        - `*args`, `**kwargs`: as for a call; a `jax.ShapeDtypeStruct` may stand for an array.
        - `other_shapes`: what a later call does that needs another program. `"raise"` raises a
            `TooManyTracesError`; `"compile"`, the initial setting, compiles. None changes nothing.
        """
        if other_shapes not in ("compile", "raise", None):
            raise ValueError(f'`other_shapes` must be "compile" or "raise"; got {other_shapes!r}.')
        cost = super().compile(*args, **kwargs)
        history = self._function.table.history
        if other_shapes == "compile":
            history.why_sealed = ""
        elif other_shapes == "raise":
            history.why_sealed = (
                f"`{history.name}` was compiled ahead of time and refuses to compile anything else "
                '(`other_shapes="raise"`)'
            )
        return cost

    def save(self, path: Path, /, *args: Any, **kwargs: Any) -> None:
        """Save the program for arguments like these, to be loaded by `eqxjit.load`.

        The file holds JSON, arrays and a program by `jax.export`, but no pickle. It is for the
        platform that it is saved on (`"cpu"`, `"cuda"`, ...), and for releases of JAX that are at
        most six months newer or three weeks older. A loaded function donates no arrays.

        **Arguments:**

        - `path`: the file to write. An existing file is replaced atomically.
        - `*args`, `**kwargs`: as for `compile`. If a shape is symbolic, the program is compiled for
            each shape that it is called with. What is left out here can't be passed to the loaded
            function, not even as its default.

        **Raises:**

        - `ValueError`, if the arguments or the result hold anything but arrays, numbers,
            strings and None, in tuples, lists and dicts; and for symbols of several scopes.
        - `ImportError`, without flatbuffers (`pip install flatbuffers`).

        !!! example

            ```python
            >>> import tempfile, jax, jax.numpy as jnp, eqxjit
            >>> path = tempfile.mkdtemp() + "/model.eqxjit"
            >>> shape = jax.export.symbolic_shape("n, 4")  # or (16, 4), for one size
            >>> eqxjit.freeze(jnp.sum).save(path, jax.ShapeDtypeStruct(shape, jnp.float32))
            >>> eqxjit.load(path)(jnp.ones((3, 4)))
            Array(12., dtype=float32)

            ```
        """
        with trimming:
            write(self._handler, path, args, kwargs)

    def __repr__(self) -> str:
        label = self._function.signature.label
        fun = getattr(self.__wrapped__, "func", None)
        if isinstance(fun, SavedFunction):
            return f"load({label}, saved for ({fun.saved_for}))"
        return f"freeze({label}, {self.constant_bytes:,} bytes compiled in)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As a wrapper it would come back with arrays that are passed, and without its programs.
        raise TypeError(f"{self!r} can't be pickled: `save` it, or pickle what it was made of.")


register_wrapper(FrozenFunction)


@overload
def freeze(fun: Callable[P, T], *, max_constant_bytes: int = 2**20) -> FrozenFunction[P, T]: ...


@overload
def freeze(
    fun: Callable[..., T], *args: Any, max_constant_bytes: int = 2**20, **kwargs: Any
) -> FrozenFunction[..., T]: ...


def freeze(
    fun: Any, *args: Any, max_constant_bytes: int = 2**20, **kwargs: Any
) -> FrozenFunction[..., Any]:
    """Compile a function with fixed arrays: those of `fun` and of the arguments passed here.

    Use it for inference, where weights don't change: they are neither passed nor checked in a call.
    It takes a snapshot, so freeze again after a change of the model or the arguments. (Static
    objects that compare by identity aren't copied.)

    **Arguments:**

    - `fun`: a function, a Module or a bound method; or a `filter_jit` of one, whose options
        (`donate=...`) then apply.
    - `*args`, `**kwargs`: its first arguments, and others by name, as for `functools.partial`.
    - `max_constant_bytes`: larger arrays (than 1 MiB by default) are passed with each call, because
        large constants take long to compile. Typed keys are always compiled in.

    **Returns:**

    A callable of the remaining arguments, with the methods of a wrapped function, and `save`. It
    can be nested in other functions, mapped and differentiated.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, equinox as eqx, eqxjit
        >>> frozen = eqxjit.freeze(eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0)))
        >>> frozen, frozen(jnp.ones(4)).shape
        (freeze(MLP, 232 bytes compiled in), (2,))

        ```
    """
    options = Options()
    if isinstance(fun, BoundJitFunction):
        fun, args = fun.func, (*fun.args, *args)
    if isinstance(fun, JitFunction):
        options, fun = fun._function.options, fun.__wrapped__
    if not callable(fun):
        raise TypeError(f"`freeze` takes a callable; got {short(fun)}.")
    parameters = inspect.Signature(Signature(fun, *names_of(fun)).parameters)
    try:
        parameters.bind_partial(*args, **kwargs)
    except TypeError as error:
        error.add_note(f"`freeze` takes `max_constant_bytes`; {short(fun)} takes `{parameters}`.")
        raise
    return _frozen("freeze", _Partial(fun, *args, **kwargs), options, max_constant_bytes)


def load(path: Path) -> FrozenFunction[..., Any]:
    """Load a file written by `frozen.save`: a function of the same arguments, as fast to call.

    It takes arguments of the shapes, dtypes and static values that it was saved for. Load only
    files that you trust: XLA may crash or hang on a program that was made by hand.

    **Raises:**

    - `ValueError`, if the file wasn't written by `save`, is damaged, or is for another platform,
        another version of the format or another release of JAX (see `save`).
    - `OSError`, if it can't be read; `ImportError`, without flatbuffers.
    """
    fun, arrays = read(path)
    return _frozen("load", _Partial(fun, arrays), Options(), 0)


# Not `equinox.Partial`, which warns of a `jax.vmap(model)` in it.
class _Partial(functools.partial[Any]):
    """The frozen function, as a pytree."""


register_partial(_Partial)


@dataclasses.dataclass(eq=False)
class _Constant:
    """An array that is compiled in: a static leaf that compares by identity."""

    array: Any


def _frozen(
    name: str, partial: _Partial, options: Options, max_constant_bytes: int
) -> FrozenFunction[..., Any]:
    """Freeze a partial function: errors call it `name(...)`."""
    fun = partial.func
    named = [("fun", fun), ("args", partial.args), ("kwargs", partial.keywords)]
    spec, arrays, statics = split_named(partial, lambda: named)
    if has_tracers(arrays):
        raise ValueError("`freeze` got a tracer: call it outside of `jit`, `grad` and `vmap`.")

    def passed_or_constant(array: Any) -> Any:
        # A file can't hold a typed key, and they are small.
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        return _Constant(array) if is_key or array.nbytes <= max_constant_bytes else array

    # Copies of the arrays, too: they may be donated, or changed in place if they are NumPy's, which
    # JAX reads in the background.
    copies = jax.block_until_ready([*map(jnp.copy, arrays)])
    frozen = snapshot(spec, map(passed_or_constant, copies), statics)
    spec, passed, statics = split(frozen, is_input=False)
    statics = [value.array if type(value) is _Constant else value for value in statics]
    signature = Signature(partial, *names_of(fun), wrapper=name)
    table = Table(signature, options, place_of(fun))
    return FrozenFunction(Function(fun, spec, statics, options, table), tuple(passed))


def snapshot(spec: Spec, arrays: Iterable[Any], statics: Iterable[Any]) -> Any:
    """Return a tree that `split` has taken apart, with copies of its static objects."""
    return combine(spec, iter(arrays), map(_copy_static, statics))


def _copy_static(value: Any) -> Any:
    """Return a copy of a static object; the object itself where it can't be copied."""
    key = static_key(value)
    # What compares by identity is no other object in the copy.
    memo = {id(referent): referent for referent in referents(key)}
    try:
        copied = copy.deepcopy(value, memo)
        # One that isn't equal wouldn't be what the user froze or packed.
        return copied if same(copied, key) else value
    except (AttributeError, RuntimeError, TypeError, ValueError, copy.Error):
        # It can't be copied, as a lock or a file can't, or the `==` of its copy fails.
        return value
