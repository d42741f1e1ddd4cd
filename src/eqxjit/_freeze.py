"""`freeze`: a function with its arrays compiled in, for inference with weights that stay."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import _save
from ._binding import Binding
from ._changeable import snapshot
from ._errors import argument_error, short
from ._options import DEFAULT_MAXSIZE, check_options, nearest
from ._partition import DYNAMIC, StaticHalf, partition
from ._program import Program, names_of
from ._save import Path
from ._tracebacks import trimming
from ._wrapped import WrappedFunction
from ._wrapper import (
    BoundFilterPjitFunction,
    FilterPjitFunction,
    register_partial,
    register_wrapper,
)

OtherShapes = Literal["compile", "raise"]

# A weight matrix of 512 by 512. Larger ones make compiling slower and calls no faster.
_MAX_CONSTANT_BYTES = 2**20


class CompiledProgram(NamedTuple):
    """What compiling a frozen function ahead of time took.

    - `seconds`: tracing, lowering and compiling.
    - `executable_bytes`: the size of the executable as JAX would store it, constants included;
        `None` where the backend can't tell.
    """

    seconds: float
    executable_bytes: int | None


class FrozenPjitFunction(FilterPjitFunction):
    """A function whose arrays are compiled in; made by `freeze`."""

    __slots__ = ()

    @property
    def constant_bytes(self) -> int:
        """How many bytes of arrays are compiled in; those of larger arrays are passed along."""
        leaves = self._wrapped.fun.leaves
        return sum([leaf.nbytes for leaf in leaves if eqx.is_array(leaf)])

    def compile(
        self, /, *args: Any, other_shapes: OtherShapes = "compile", **kwargs: Any
    ) -> CompiledProgram:
        """Compiles for arguments like these, so that the first call with such need not.

        The second call writes the specialised call, which takes milliseconds: a server that wants
        its first request to be as fast as all others calls it some times before.

        **Arguments:**

        - `*args`, `**kwargs`: as for a call; a `jax.ShapeDtypeStruct` may stand for an array.
        - `other_shapes`: what a call does later that needs another program: `"compile"` it, or
            `"raise"` a `TooManyTracesError`, which says how its arguments differ.

        **Returns:**

        How long it took, and how large the executable is.

        !!! example

            ```python
            >>> import equinox as eqx
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import eqxjit
            >>> model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
            >>> frozen = eqxjit.freeze(model)
            >>> shape = jax.ShapeDtypeStruct((4,), jnp.float32)
            >>> program = frozen.compile(shape, other_shapes="raise")
            >>> program.seconds > 0
            True
            >>> frozen(jnp.ones(4)).shape
            (2,)

            ```
        """
        if other_shapes not in get_args(OtherShapes):
            raise ValueError(f'`other_shapes` must be "compile" or "raise"; got {other_shapes!r}.')
        self._check_keywords("compile", kwargs, "other_shapes")
        history = self._wrapped.program.history
        history.unseal()
        args, kwargs = jax.tree.map(_example, (args, kwargs), is_leaf=_is_struct)
        before = sum([trace.seconds.total for trace in history.traces])
        with trimming:
            compiled = self.lower(*args, **kwargs).compile()
        seconds = sum([trace.seconds.total for trace in history.traces]) - before
        if other_shapes == "raise":
            history.seal(
                f"`{history.name}` was compiled ahead of time, and nothing else is to be compiled "
                '(`other_shapes="raise"`)'
            )
        return CompiledProgram(seconds, _executable_bytes(compiled.compiled))

    def save(self, path: Path, /, *args: Any, **kwargs: Any) -> None:
        """Saves the program for arguments like these, to be loaded by `eqxjit.load`.

        No pickle: the program is written by `jax.export`, the rest as JSON and plain bytes.

        **Arguments:**

        - `path`: the file to write. One that is there is replaced, at once.
        - `*args`, `**kwargs`: as for a call; a `jax.ShapeDtypeStruct` may stand for an array.

        **Raises:**

        - `ValueError`, if the arguments or what is returned hold anything but arrays, numbers,
            strings and None, in tuples, lists and dicts.
        - `ImportError`, without flatbuffers (`pip install "eqxjit[export]"`).

        !!! example

            ```python
            >>> import os, tempfile
            >>> import equinox as eqx
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import eqxjit
            >>> model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
            >>> path = os.path.join(tempfile.mkdtemp(), "model.eqxjit")
            >>> eqxjit.freeze(model).save(path, jnp.ones(4))
            >>> loaded = eqxjit.load(path)
            >>> bool(jnp.allclose(loaded(jnp.ones(4)), model(jnp.ones(4))))
            True

            ```
        """
        self._check_keywords("save", kwargs)
        args, kwargs = jax.tree.map(_example, (args, kwargs), is_leaf=_is_struct)
        with trimming:
            _save.save(self._site, path, args, kwargs)

    def _check_keywords(self, method: str, keywords: Iterable[str], *options: str) -> None:
        binding = self._wrapped.binding
        _check_keywords(f"`{method}` of {self!r}", binding.parameters, keywords, *options)

    def __repr__(self) -> str:
        label = self._wrapped.binding.label
        saved_for = getattr(getattr(self.__wrapped__, "func", None), _save.SAVED_FOR, None)
        if saved_for is not None:
            return f"load({label}, saved for {saved_for})"
        return f"freeze({label}, {self.constant_bytes:,} bytes compiled in)"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can't be pickled: use its `save`, or pickle what it was made of."
        )


register_wrapper(FrozenPjitFunction)


def _is_struct(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _example(leaf: Any) -> Any:
    """An array of the shape and dtype that stand for it; takes no memory."""
    if not _is_struct(leaf):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(f"Pass an array instead of {leaf}: its dtype is JAX's own.")
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _executable_bytes(compiled: jax.stages.Compiled) -> int | None:
    try:
        return len(compiled.runtime_executable().serialize())  # type: ignore[union-attr]
    except Exception:
        # Not every backend can.
        return None


def freeze(
    fun: Callable[..., Any],
    *args: Any,
    max_constant_bytes: int = _MAX_CONSTANT_BYTES,
    **kwargs: Any,
) -> FrozenPjitFunction:
    """Compiles a function with arrays that stay: those of `fun` and of the arguments given here.

    For inference, where weights don't change: they become constants of the program, so that a call
    neither passes them along nor looks at them. The term is TorchScript's.

    A snapshot: later changes of the model or the arguments are not seen, neither those of fields by
    `object.__setattr__` nor those of static lists, dicts and the like in place; freeze again for
    those. (Objects that compare by identity can't be copied: a program that is compiled later sees
    what has become of them.)

    **Arguments:**

    - `fun`: what to call: a function, a Module, a bound method; or a `filter_jit` of one, whose
        options (`donate=...`) then hold.
    - `*args`, `**kwargs`: its first arguments, and others by name, as for `functools.partial`.
    - `max_constant_bytes`: arrays larger than this aren't compiled in but passed along with each
        call, as those of `filter_jit(model)` are: compiling slows down with the size of constants.

    **Returns:**

    A callable of the remaining arguments: arrays among those are traced, all else is static, as
    under `filter_jit`. With `compile` besides what a wrapped function has. It can be nested in
    other functions, mapped and differentiated with respect to the remaining arguments.

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
    if isinstance(fun, BoundFilterPjitFunction):
        fun, args, kwargs = fun.func, (*fun.args, *args), {**fun.keywords, **kwargs}
    if isinstance(fun, FilterPjitFunction):
        options, fun = fun._wrapped.options, fun.__wrapped__
    if not callable(fun):
        raise TypeError(f"`freeze` takes a callable; got {short(fun)}.")
    _check_signature(fun, args, kwargs)
    try:
        leaves, static = partition(_Partial(fun, *args, **kwargs))
        static = snapshot(static)
    except Exception as error:
        clearer = argument_error(error, [("fun", fun), ("args", args), ("kwargs", kwargs)])
        if clearer is not None:
            raise clearer from error
        raise
    arrays = [_snapshot(leaf) for leaf in leaves]
    passed = [array for array in arrays if array.nbytes > max_constant_bytes]
    constants = (array if array.nbytes <= max_constant_bytes else DYNAMIC for array in arrays)
    with_constants = [next(constants) if leaf is DYNAMIC else leaf for leaf in static.leaves]
    frozen = StaticHalf(static.treedef, tuple(with_constants), _Snapshot())
    remaining = functools.partial(fun, *args, **kwargs)
    program = Program(Binding(remaining, *names_of(fun)), options, None)
    return FrozenPjitFunction(WrappedFunction(fun, frozen, options, program), tuple(passed))


class _Partial(functools.partial[Any]):
    """What is frozen, as a pytree; `equinox.Partial` warns of a `jax.vmap(model)` in it."""


register_partial(_Partial)


class _Snapshot:
    """In the place of a static key: what was frozen equals nothing but itself."""


def _snapshot(array: Any) -> jax.Array:
    if isinstance(array, Tracer):
        raise ValueError(
            "`freeze` compiles in arrays, and was given a tracer: call it outside of `jit`, `grad` "
            "and `vmap`."
        )
    # A copy, since the original may be donated, or changed in place if it is NumPy's.
    return jnp.copy(array)


def _check_signature(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(fun)
    except ValueError:
        # A builtin.
        return
    of = f"`freeze`: {names_of(fun)[1]}{signature}"
    _check_keywords(of, signature.parameters.values(), kwargs, "max_constant_bytes")
    try:
        signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{of}: {error}.") from None


def _check_keywords(
    of: str, parameters: Collection[inspect.Parameter], keywords: Iterable[str], *options: str
) -> None:
    """Raises for a keyword that no parameter takes, and names the nearest one or option."""
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for keyword in keywords:
        if keyword not in names:
            hint = nearest(keyword, [*options, *names])
            raise TypeError(
                f"{of}: got an unexpected keyword argument {keyword!r}"
                f"{f': {hint}' if hint else '.'}"
            )


def load(path: Path) -> FrozenPjitFunction:
    """Loads what `frozen.save` has written: a function of the same arguments, called as fast.

    **Arguments:**

    - `path`: the file.

    **Returns:**

    A frozen function for arguments of the shapes, dtypes and static values that it was saved for;
    others raise a `ValueError` (after `compile(..., other_shapes="raise")` a `TooManyTracesError`).

    **Raises:**

    - `ValueError`, if the file wasn't written by `save`, is damaged, or was written for another
        platform, or by a later release.
    - `OSError`, if it can't be read.
    - `ImportError`, without flatbuffers (`pip install "eqxjit[export]"`).
    """
    saved = _save.load(path)
    return freeze(saved.fun, saved.arrays, max_constant_bytes=0)


# Its methods have examples, and say that they are of `eqxjit`.
__test__ = {"FrozenPjitFunction": FrozenPjitFunction}
