"""`freeze`: a function with its arrays compiled in, for inference with weights that stay."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, overload

import equinox as eqx
import jax
import jax.numpy as jnp

from .._core.ahead import CompileCost
from .._core.errors import with_argument_errors
from .._core.function import Function, innermost_function, names_of
from .._core.options import DEFAULT_MAXSIZE, check_options
from .._core.table import Table
from .._core.wrapper import (
    BoundJitFunction,
    JitFunction,
    P,
    T,
    register_partial,
    register_wrapper,
)
from .._fast.signature import Signature
from .._interruptions import unless_it_raises
from .._places import place_of, trimming
from .._spec.static_key import CONSTANTS, referents, same, static_key
from .._spec.tree import Spec, combine, has_tracers, resplit, split
from .._text import short
from .saved import Path, SavedFunction, is_symbolic, read, write

OtherShapes = Literal["compile", "raise"]


class FrozenFunction(JitFunction[P, T]):
    """A function whose arrays are compiled in; made by `freeze`."""

    __slots__ = ()

    @property
    def constant_bytes(self) -> int:
        """The bytes of arrays that are compiled in; larger arrays are passed along."""
        statics = self._function.statics
        return sum([value.nbytes for value in statics if eqx.is_array(value)])

    def compile(
        self, /, *args: Any, other_shapes: OtherShapes | None = None, **kwargs: Any
    ) -> CompileCost:
        """Compile for arguments like these, so that the first such call is fast.

        **Arguments:**

        - `*args`, `**kwargs`: as for a call; a `jax.ShapeDtypeStruct` may stand for an array.
        - `other_shapes`: how to treat a later call that needs another program. `"raise"` raises a
            `TooManyTracesError`; `"compile"`, the initial setting, compiles it. None leaves the
            setting as it is.

        **Returns:**

        How long compiling took, and how large the executable is.

        !!! example

            ```python
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import eqxjit
            >>> frozen = eqxjit.freeze(jnp.add, jnp.ones(4))
            >>> cost = frozen.compile(jax.ShapeDtypeStruct((4,), jnp.float32), other_shapes="raise")
            >>> cost.seconds > 0
            True

            ```
        """
        if other_shapes not in (None, *get_args(OtherShapes)):
            raise ValueError(f'`other_shapes` must be "compile" or "raise"; got {other_shapes!r}.')
        for leaf in jax.tree.leaves((args, kwargs)):
            if isinstance(leaf, jax.ShapeDtypeStruct) and is_symbolic(leaf.shape):
                raise ValueError(
                    f"{leaf} stands for arrays of many shapes, and a program is compiled for one: "
                    "give a size for each dimension. (`save` takes symbolic ones.)"
                )
        cost = super().compile(*args, **kwargs)
        counter = self._function.table.counter
        if other_shapes == "compile":
            counter.why_sealed = ""
        elif other_shapes == "raise":
            counter.why_sealed = (
                f"`{counter.name}` was compiled ahead of time and refuses to compile anything else "
                '(`other_shapes="raise"`)'
            )
        return cost

    def save(self, path: Path, /, *args: Any, **kwargs: Any) -> None:
        """Save the program for arguments like these, to be loaded by `eqxjit.load`.

        No pickle: the program is written by `jax.export`, the rest as JSON and plain bytes.

        **Arguments:**

        - `path`: the file to write. An existing file is replaced atomically.
        - `*args`, `**kwargs`: as for a call; a `jax.ShapeDtypeStruct` may stand for an array. Its
            shape may be symbolic: the program is then compiled for each shape that it is called
            with. Symbols of several arrays must be of one `jax.export.SymbolicScope`.

        **Raises:**

        - `ValueError`, if the arguments or the result hold anything but arrays, numbers,
            strings and None, in tuples, lists and dicts; and for symbols of several scopes.
        - `ImportError`, without flatbuffers (`pip install flatbuffers`).

        !!! example

            ```python
            >>> import os, tempfile
            >>> import equinox as eqx
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import eqxjit
            >>> model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
            >>> path = os.path.join(tempfile.mkdtemp(), "model.eqxjit")
            >>> shape = jax.export.symbolic_shape("b, 4")  # or (16, 4), for one size
            >>> batches = jax.ShapeDtypeStruct(shape, jnp.float32)
            >>> eqxjit.freeze(jax.vmap(model)).save(path, batches)
            >>> loaded = eqxjit.load(path)
            >>> loaded
            load(MLP, saved for (x: float32[b,4]))
            >>> loaded(jnp.ones((3, 4))).shape, loaded(jnp.ones((50, 4))).shape
            ((3, 2), (50, 2))

            ```
        """
        with trimming:
            write(self._caller, path, args, kwargs)

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

    Use it for inference, where weights don't change: as constants of the program, they are neither
    passed nor checked in a call. It takes a snapshot, so freeze again after a change of the model
    or the arguments. (Only objects that compare by identity aren't copied, and a program compiled
    later sees their later state.)

    **Arguments:**

    - `fun`: a function, a Module or a bound method; or a `filter_jit` of one, whose options
        (`donate=...`) then apply.
    - `*args`, `**kwargs`: its first arguments, and others by name, as for `functools.partial`.
    - `max_constant_bytes`: larger arrays (than 1 MiB by default) are passed along with each call,
        as by `filter_jit(model)`, because large constants take long to compile.

    **Returns:**

    A callable of the remaining arguments, with the methods of a wrapped function, and `save`. It
    can be nested in other functions, mapped and differentiated.

    **Raises:**

    - `TypeError`, if `fun` can't be called, or not with these arguments.
    - `ValueError`, if a static value in them can't be hashed or compared, or an array has been
        deleted.

    !!! example

        ```python
        >>> import equinox as eqx
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import eqxjit
        >>> model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
        >>> frozen = eqxjit.freeze(model)
        >>> frozen
        freeze(MLP, 232 bytes compiled in)
        >>> bool(jnp.allclose(frozen(jnp.ones(4)), model(jnp.ones(4))))
        True

        ```
    """
    if isinstance(max_constant_bytes, bool) or not isinstance(max_constant_bytes, int):
        raise TypeError(f"`max_constant_bytes` must be an int; got {max_constant_bytes!r}.")
    options = check_options("none", False, DEFAULT_MAXSIZE, None, {})
    if isinstance(fun, BoundJitFunction):
        fun, args, kwargs = fun.func, (*fun.args, *args), {**fun.keywords, **kwargs}
    if isinstance(fun, JitFunction):
        options, fun = fun._function.options, fun.__wrapped__
    if not callable(fun):
        raise TypeError(f"`freeze` takes a callable; got {short(fun)}.")
    names = names_of(fun)
    parameters = inspect.Signature(Signature(fun, *names).parameters)
    try:
        parameters.bind_partial(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"`freeze` of `{names[1]}`: {error}. The option of `freeze` is `max_constant_bytes`, "
            f"and the parameters are `{parameters}`."
        ) from None
    remaining = _Partial(fun, *args, **kwargs)
    spec, arrays, statics = with_argument_errors(
        lambda: split(remaining),
        lambda: [("fun", fun), ("args", args), ("kwargs", kwargs)],
    )
    if has_tracers(arrays):
        raise ValueError("`freeze` got a tracer: call it outside of `jit`, `grad` and `vmap`.")
    # Copies of the arrays, too: they may be donated, or changed in place if they are NumPy's.
    spec, arrays, statics = snapshot(spec, map(jnp.copy, arrays), statics)
    # By default those larger than a weight matrix of 512 by 512 are passed: as constants they make
    # compiling slower, and calls no faster.
    spec, passed, statics = resplit(
        spec, arrays, statics, lambda leaf: eqx.is_array(leaf) and leaf.nbytes > max_constant_bytes
    )
    signature = Signature(remaining, *names)
    # So Python's error for a wrong call says that some arguments are there already.
    signature.called = f"freeze({signature.label})"
    table = Table(signature, options, place_of(fun, innermost_function(fun)))
    return FrozenFunction(Function(fun, spec, statics, options, table), tuple(passed))


# Not `equinox.Partial`, which warns of a `jax.vmap(model)` in it.
class _Partial(functools.partial[Any]):
    """The frozen function, as a pytree."""


register_partial(_Partial)


def snapshot(
    spec: Spec, arrays: Iterable[Any], statics: Iterable[Any]
) -> tuple[Spec, list[Any], list[Any]]:
    """Return a tree, as `split` does, with copies of its static objects."""
    # Split anew, because what the spec says of the static objects must be true of their copies.
    return split(combine(spec, iter(arrays), map(_copy_static, statics)), is_input=False)


def _copy_static(value: Any) -> Any:
    """Return a copy of a static object; the object itself where it can't change, or be copied."""
    if type(value) in CONSTANTS or type(value).__eq__ is object.__eq__:
        return value
    key = static_key(value)
    # What compares by identity is no other object in the copy.
    memo = {id(referent): referent for referent in referents(key)}
    # An object of the user's may be one that can't be copied.
    copied = unless_it_raises(lambda: copy.deepcopy(value, {**memo}), value)
    # One that isn't equal wouldn't be what the user froze or packed.
    return copied if unless_it_raises(lambda: same(copied, key), False) else value


def load(path: Path) -> FrozenFunction[..., Any]:
    """Load a file written by `frozen.save`: a function of the same arguments, as fast to call.

    Load only files that you trust: XLA reads the program in it, and may crash or hang on one that
    was made by hand.

    **Arguments:**

    - `path`: the file.

    **Returns:**

    A frozen function for arguments of the shapes, dtypes and static values that it was saved for;
    others raise a `ValueError`.

    **Raises:**

    - `ValueError`, if the file wasn't written by `save`, is damaged, or was written for another
        platform or in another version of the format.
    - `OSError`, if it can't be read.
    - `ImportError`, without flatbuffers (`pip install flatbuffers`).
    """
    fun, arrays = read(path)
    loaded: FrozenFunction[..., Any] = freeze(fun, arrays, max_constant_bytes=0)
    table = loaded._function.table
    table.signature.called = f"load({table.signature.label})"
    # Arguments that the file isn't for are its error, whether or not other shapes are refused.
    table.counter.check = fun.check
    return loaded
