"""`freeze` compiles the arrays of a function into its programs; `load` reads one from a file."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp

from .._core.ahead import CompileCost
from .._core.options import Options
from .._core.table import Function, Table, names_of, split_named
from .._core.wrapper import BoundJitFunction, JitFunction, P, T, register_wrapper
from .._fast.signature import Signature
from .._places import place_of, trimming
from .._spec.tree import combine, has_tracers, split
from .._text import short
from .opened import Partial, captured_bytes, opened
from .saved import Path, SavedFunction, read, write
from .snapshot import snapshot


class FrozenFunction(JitFunction[P, T]):
    """A function whose arrays are compiled in, as `freeze` and `load` return it."""

    __slots__ = ()

    @property
    def constant_bytes(self) -> int:
        """The bytes of the arrays that are compiled in.

        Arrays above `max_constant_bytes` are passed with each call instead, and aren't counted.
        Arrays to which a function of yours refers by its closure or by global variables are always
        compiled in, and are counted as well.
        """
        statics = self._function.statics
        return self._captured_bytes + sum([each.nbytes for each in statics if eqx.is_array(each)])

    @property
    def _captured_bytes(self) -> int:
        return captured_bytes([each for each in self._function.statics if callable(each)])

    def compile(
        self, /, *args: Any, other_shapes: Literal["compile", "raise"] | None = None, **kwargs: Any
    ) -> CompileCost:
        """Compile for arguments like these, so that the first such call is fast.

        **Arguments:**

        - `*args`, `**kwargs`: as for a call; a `jax.ShapeDtypeStruct` may stand for an array.
        - `other_shapes`: what happens in a later call that needs a new program. With `"raise"`
            the call raises a `TooManyTracesError`, with `"compile"` it compiles. `None` leaves the
            setting as it is. The setting is `"compile"` until it is changed.

        **Returns:**

        A `CompileCost`: how long it took, and how large the executable is.
        """
        if other_shapes not in ("compile", "raise", None):
            raise ValueError(f'`other_shapes` must be "compile" or "raise"; got {other_shapes!r}.')
        cost = super().compile(*args, **kwargs)
        history = self._function.table.history
        if other_shapes == "compile":
            history.why_sealed = ""
        elif other_shapes == "raise":
            history.why_sealed = (
                f"`{history.name}` was compiled ahead of time and must not compile anything else "
                '(`other_shapes="raise"`)'
            )
        return cost

    def save(self, path: Path, /, *args: Any, **kwargs: Any) -> None:
        """Save the program for arguments like these, to be loaded by `eqxjit.load`.

        The file holds JSON, arrays and a program by `jax.export`, but no pickle. It can be loaded
        on the platform that it was saved on (`"cpu"`, `"cuda"`, ...), under releases of JAX that
        are at most six months newer or three weeks older. A loaded function donates no arrays, and
        can't be differentiated.

        **Arguments:**

        - `path`: the file to write. An existing file is replaced atomically.
        - `*args`, `**kwargs`: as for `compile`. If a shape is symbolic, the program is compiled for
            each shape that it is called with. An optional argument that is left out here can't be
            passed to the loaded function, not even with the value of its default.

        **Raises:**

        - `ValueError`, if the arguments or the result hold anything but arrays, numbers,
            strings and None, in tuples, lists and dicts; or if symbols are of different scopes.
        - `NotImplementedError`, JAX's, if the function calls back into Python.
        - `OSError`, if the file can't be written.
        - `ImportError`, if flatbuffers isn't installed (`pip install flatbuffers`).

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
            # With a new table, because the program in a file isn't compiled for calls here, and
            # because the structure of its output must not depend on earlier traces.
            apart = FrozenFunction(self._function.with_new_table(), self._handler.fun_arrays)
            write(apart._handler, path, args, kwargs)

    def __repr__(self) -> str:
        label = self._function.signature.label
        fun = getattr(self.__wrapped__, "func", None)
        if isinstance(fun, SavedFunction):
            return f"load({label}, saved for ({fun.saved_for}))"
        text = f"{self.constant_bytes:,} bytes compiled in"
        n_captured = self._captured_bytes
        if n_captured:
            text += f", {n_captured:,} of which functions capture: pass them as arguments"
        return f"freeze({label}, {text})"

    def __str__(self) -> str:
        # Not the `__str__` of a wrapper, which is worded for the tool `chex`. A frozen function is
        # shown to users, in pages and notebooks.
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle of a wrapper holds neither programs nor the choice of arrays to compile in.
        raise TypeError(f"{self!r} can't be pickled: `save` it, or pickle what was frozen.")


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
    """Compile the arrays of a function, and of arguments that are passed here, into its programs.

    Use it for inference, where weights don't change: a call neither passes nor checks them.
    `freeze` takes a snapshot, so freeze again after a change of the model. Arrays that
    `jax.vmap(model)`, `jax.grad(model)` and the like hold are part of it. Static objects that
    compare by identity aren't copied, nor are objects to which a function of yours refers by its
    closure or by global variables.

    **Arguments:**

    - `fun`: a function, a Module or a bound method; or a `filter_jit` of one, whose options
        (`donate=...`) then apply.
    - `*args`, `**kwargs`: the first arguments of `fun`, and further arguments by name, as for
        `functools.partial`.
    - `max_constant_bytes`: arrays above this size (1 MiB by default) are passed with each call,
        because large constants take long to compile. Typed keys, and arrays to which a function of
        yours refers, are always compiled in. The `repr` of the result shows their size.

    **Returns:**

    A `FrozenFunction`: a callable of the remaining arguments, with the methods of a wrapped
    function, and `save`. Other jitted functions can call it, and `jax.vmap` and `jax.grad` apply.

    **Raises:**

    - `TypeError`, if `fun` isn't callable or doesn't take these arguments, and if
        `max_constant_bytes` isn't an int.
    - `ValueError`, inside of `jit`, `grad` or `vmap`, if an array is a tracer.

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
    if isinstance(max_constant_bytes, bool) or not isinstance(max_constant_bytes, int):
        raise TypeError(f"`max_constant_bytes` must be an int; got {short(max_constant_bytes)}.")
    if not callable(fun):
        raise TypeError(f"`freeze` takes a callable; got {short(fun)}.")
    signature = Signature(fun, *names_of(fun)).inspected
    try:
        signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        error.add_note(f"`freeze` takes `max_constant_bytes`; {short(fun)} takes `{signature}`.")
        raise
    return _frozen("freeze", Partial(fun, *args, **kwargs), options, max_constant_bytes)


def load(path: Path) -> FrozenFunction[..., Any]:
    """Load a function from a file that `frozen.save` has written.

    The function takes arguments of the shapes, dtypes and static values that it was saved for, and
    is as fast to call as before. Load only files that you trust, because XLA may crash or hang on a
    program that was manipulated.

    **Arguments:**

    - `path`: the file.

    **Returns:**

    A `FrozenFunction`, which can be called in other functions and under `jax.vmap`, but can't be
    differentiated.

    **Raises:**

    - `ValueError`, if the file wasn't written by `save`, is damaged, or is for a different
        platform, version of the format or release of JAX (see `save`), or has 64-bit numbers while
        `jax_enable_x64` is off.
    - `OSError`, if the file can't be read.
    - `ImportError`, if flatbuffers isn't installed (`pip install flatbuffers`).

    !!! example

        ```python
        >>> import tempfile, jax.numpy as jnp, eqxjit
        >>> path = tempfile.mkdtemp() + "/double.eqxjit"
        >>> eqxjit.freeze(lambda x: 2 * x).save(path, jnp.ones(3))
        >>> eqxjit.load(path)
        load(<lambda>, saved for (x: float32[3]))

        ```
    """
    fun, arrays = read(path)
    return _frozen("load", Partial(fun, arrays), Options(), 0)


# Functions that JAX returns are nested: `jax.vmap(jax.grad(model))` consists of six functions in
# JAX 0.10. Each round opens one level of them.
_MAX_ROUNDS = 100


@dataclasses.dataclass(eq=False)
class _Constant:
    """A static leaf that stands for an array to compile in. It compares by identity."""

    array: Any


def _frozen(
    name: str, partial: Partial, options: Options, max_constant_bytes: int
) -> FrozenFunction[..., Any]:
    """Freeze a partial function.

    `name` is `freeze` or `load`. Python's error for a call with wrong arguments shows this name.
    """
    fun = partial.func
    named = [("fun", fun), ("args", partial.args), ("kwargs", partial.keywords)]
    spec, arrays, statics = split_named(partial, lambda: named)
    # Each round opens the functions that the round before has found. Their number is bounded,
    # because a function may refer to itself.
    for _ in range(_MAX_ROUNDS):
        replaced = [*map(opened, statics)]
        if all(map(operator.is_, replaced, statics)):
            break
        spec, arrays, statics = split(combine(spec, iter(arrays), iter(replaced)))
    if has_tracers(arrays):
        raise ValueError("`freeze` got a tracer: call it outside of `jit`, `grad` and `vmap`.")

    def passed_or_constant(array: Any) -> Any:
        # Typed keys are small, and a file can't hold them as arrays.
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        return _Constant(array) if is_key or array.nbytes <= max_constant_bytes else array

    # Arrays are copied because their owner may donate them, or change NumPy arrays in place. JAX
    # reads NumPy arrays in the background, so wait for the copies.
    copies = jax.block_until_ready([*map(jnp.copy, arrays)])
    frozen = snapshot(spec, map(passed_or_constant, copies), statics)
    spec, passed, statics = split(frozen, is_input=False)
    statics = [value.array if type(value) is _Constant else value for value in statics]
    signature = Signature(partial, *names_of(fun), wrapper=name)
    table = Table(signature, options, place_of(fun))
    return FrozenFunction(Function(fun, spec, statics, options, table), tuple(passed))
