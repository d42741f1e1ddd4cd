"""`filter_jit`, and the callable pytree that it returns."""

import copy
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, cast, overload

import equinox as eqx
import jax
from jax.tree_util import GetAttrKey, register_pytree_node, register_pytree_with_keys

from .._compat import MISSING, Dispatcher
from .._diagnostics.description import WRAPPERS
from .._diagnostics.trace import Trace
from .._places import trimming
from .._text import short
from .ahead import CompileCost, Lowered, lower
from .options import Donate, JitOptions, Options, check_options
from .slow import CallHandler
from .table import CacheInfo, Function, take_apart

P = ParamSpec("P")
T = TypeVar("T")

# What tools read of a function that is written in Python, or of a method.
_OF_FUNCTIONS = {
    *("__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__"),
    *("__name__", "__qualname__", "__annotations__", "__type_params__"),
    *("__func__", "__self__", "__isabstractmethod__"),
}

# A Module's repr can span many lines.
_LONGEST_REPR = 80


class _Jitted(Generic[P, T]):
    """The methods of a wrapped function, bound to an instance or not."""

    __slots__ = ()

    if TYPE_CHECKING:
        # The `JitFunction`, and the arguments that are filled in. Without annotations, which
        # instances would have.
        _wrapper = _bound = cast(Any, None)

        @property
        def __wrapped__(self) -> Callable[P, T]: ...

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T: ...

    else:
        # Not properties, since `inspect` would find those on the class, too.
        def __getattr__(self, name: str) -> Any:
            if name == "__wrapped__":
                return self._unwrapped()
            if name in _OF_FUNCTIONS:
                # Equinox's unflatten fills in a mark where a Module has no such attribute.
                found = getattr(self.__wrapped__, name, MISSING)
                if found is not MISSING:
                    return found
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and lower the function for these arguments, without running it.

        **Arguments:**

        - `*args`, `**kwargs`: as for a call; a `jax.ShapeDtypeStruct` may stand for an array.

        **Returns:**

        A `Lowered`, with `as_text()`, `lowered` (JAX's) and `compile()`.
        """
        with trimming:
            return lower(self._wrapper._handler, self._bound, args, kwargs)

    def compile(self, /, *args: Any, **kwargs: Any) -> CompileCost:
        """Compile for arguments like these ahead of time.

        The first call with such arguments then traces and compiles nothing, through any wrapper of
        the function and in any thread. The function isn't run. Several functions can be compiled
        concurrently, in threads.

        **Arguments:**

        - `*args`, `**kwargs`: as for a call; a `jax.ShapeDtypeStruct` may stand for an array, alone
            or within a Module (`eqx.filter_eval_shape`). Shape, dtype and `weak_type` must be those
            of the later call, and also `sharding` if that array is on a device explicitly.

        **Returns:**

        A `CompileCost`: how long it took, and how large the executable is.
        """
        with trimming:
            return self.lower(*args, **kwargs).cost()

    def cache_info(self) -> CacheInfo:
        """Return the state of the cache: `CacheInfo(entries, traces, maxsize, hits)`."""
        return self._wrapper._function.table.info()

    def traces(self) -> list[Trace]:
        """Return the record of each trace: its arguments, reason and time.

        **Returns:**

        A list of the latest 256 traces, the oldest first, since the cache was last cleared, by all
        wrappers of this function under these options. In a notebook it shows as a table.
        """
        return self._wrapper._function.table.history.traces

    def clear_cache(self) -> None:
        """Drop all programs of this function under these options."""
        self._wrapper._function.table.clear()

    def specialized_source(self) -> str | None:
        """Return the source of the latest call's fast path in Python, also if C makes the call.

        `None` if there is none, or if the tree is too large for generated Python.
        """
        return self._wrapper._handler.source()

    def __str__(self) -> str:
        # `chex.assert_max_traces` finds out by this word that it is around a jitted function, where
        # it sees no trace, and says to swap the two.
        return f"<CompiledFunction {self!r}>"

    def __eq__(self, other: object) -> Any:
        return eqx.tree_equal(self, other) if type(other) is type(self) else NotImplemented

    # Not by identity, because copies are equal, and must hash alike.
    def __hash__(self) -> int:
        try:
            return hash((self._wrapper._function, *jax.tree.leaves(self)))
        except TypeError as error:
            error.add_note(
                "If a JAX function must hash this jitted function, as `jax.lax.scan` or `switch`, "
                "pass a lambda that calls it."
            )
            raise


class JitFunction(_Jitted[P, T], Dispatcher):
    """A function compiled by `filter_jit`: a pytree whose leaves are that function's arrays."""

    __slots__ = ("__dict__", "__weakref__", "_handler")

    _wrapper = property(lambda self: self)
    _bound = property(lambda self: ())

    def __init__(self, function: Function, arrays: tuple[Any, ...]):
        self.__dict__ = dict(function.attributes)  # type: ignore
        self._handler = CallHandler(function, arrays, self)

    @property
    def _function(self) -> Function:
        return self._handler.function

    def _unwrapped(self) -> Any:
        return self._function.combine(self._handler.fun_arrays)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundJitFunction(self, instance)

    def __repr__(self) -> str:
        wrapped = self.__wrapped__
        is_function = inspect.isroutine(wrapped)
        name = self._function.signature.qualname if is_function else short(wrapped, _LONGEST_REPR)
        return f"filter_jit({name})"

    def __copy__(self) -> "JitFunction[P, T]":
        return type(self)(self._function, self._handler.fun_arrays)

    def __deepcopy__(self, memo: dict[int, Any]) -> "JitFunction[P, T]":
        # The static half is shared, and with it what is compiled.
        return type(self)(self._function, copy.deepcopy(self._handler.fun_arrays, memo))

    # Not `__reduce__`, to which the protocol isn't passed.
    def __reduce_ex__(self, protocol: Any) -> Any:
        name = self._function.signature.qualname
        module = sys.modules.get(self._function.attributes.get("__module__", ""))
        try:
            found = operator.attrgetter(name)(module)
        except AttributeError:
            found = None
        if type(found) is not JitFunction or found != self:
            return _blank, (), (self.__wrapped__, self._function.options)
        # Below 4 names of attributes are resolved by pickling what has them: this, without end.
        return name if protocol < 4 else (_blank, (), found._content)

    def __setstate__(self, state: Any) -> None:
        type(self).__init__(self, *take_apart(*getattr(state, "content", state)))

    @property
    def _content(self) -> types.FunctionType:
        """A function that picklers take by name or by value, as they would the user's."""
        content: Any = types.FunctionType((lambda: None).__code__, {}, "_content")
        content.__module__ = self._function.attributes["__module__"]
        content.__qualname__ = f"{self._function.signature.qualname}._content"
        content.content = self.__wrapped__, self._function.options
        # The same one each time, in any thread: picklers compare it by identity.
        return vars(self._function).setdefault("_content", content)


def _blank() -> JitFunction[..., Any]:
    # To be filled in by `__setstate__`, since what it wraps may refer to it.
    return JitFunction.__new__(JitFunction)


class BoundJitFunction(_Jitted[P, T], functools.partial[T]):
    """A wrapped method of an instance: like `equinox.Partial`, with `func`, `args` and `keywords`.

    A `functools.partial`, so that it is made and called in C; and a pytree.
    """

    __slots__ = ()

    # For `help(model.step)`.
    __doc__ = property(lambda self: self.func.__doc__)  # type: ignore[assignment]
    # Jitted, unlike that of the method that is wrapped.
    __func__ = property(operator.attrgetter("func"))
    _wrapper = property(operator.attrgetter("func"))
    _bound = property(operator.attrgetter("args"))

    def _unwrapped(self) -> Any:
        return self._wrapper.__wrapped__.__get__(*self.args)

    def __repr__(self) -> str:
        instance = ", ".join([short(argument, _LONGEST_REPR) for argument in self.args])
        return f"<bound {self.func!r} of {instance}>"


def register_wrapper(kind: type[JitFunction[..., Any]]) -> None:
    """Make a kind of wrapper a pytree, whose leaves are its function's arrays."""

    def flatten(wrapper: JitFunction[..., Any]) -> tuple[tuple[Any, ...], Function]:
        return wrapper._handler.fun_arrays, wrapper._function

    def unflatten(function: Function, arrays: Any) -> JitFunction[..., Any]:
        return kind(function, tuple(arrays))

    register_pytree_node(kind, flatten, unflatten)
    WRAPPERS.add(kind)


def register_partial(kind: type[functools.partial[Any]]) -> None:
    """Make a kind of `functools.partial` a pytree of its function and arguments."""
    names = "func", "args", "keywords"

    def flatten_with_keys(partial: functools.partial[Any]) -> Any:
        return [(GetAttrKey(name), getattr(partial, name)) for name in names], None

    def unflatten(_: None, children: Any) -> functools.partial[Any]:
        func, args, keywords = children
        return kind(func, *args, **keywords)

    register_pytree_with_keys(kind, flatten_with_keys, unflatten)


register_wrapper(JitFunction)
register_partial(BoundJitFunction)


def _wrap(fun: Any, options: Options) -> JitFunction[..., Any]:
    return JitFunction(*take_apart(fun, options))


# Typed as upstream's, because checkers don't bind an object of a class where they compare a method
# with that of a base class or a protocol.
@overload
def filter_jit(
    *,
    donate: Donate = "none",
    block: bool = False,
    maxsize: int | None = 1024,
    max_traces: int | None = None,
    **jitkwargs: Unpack[JitOptions],
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


@overload
def filter_jit(
    fun: Callable[P, T],
    *,
    donate: Donate = "none",
    block: bool = False,
    maxsize: int | None = 1024,
    max_traces: int | None = None,
    **jitkwargs: Unpack[JitOptions],
) -> Callable[P, T]: ...


def filter_jit(
    fun: Any = inspect.Parameter.empty,
    *,
    donate: Donate = "none",
    block: bool = False,
    maxsize: int | None = 1024,
    max_traces: int | None = None,
    **jitkwargs: Any,
) -> Any:
    """Compile a function: JAX and NumPy arrays in its arguments are traced, all else is static.

    A drop-in replacement for `equinox.filter_jit` with faster calls, which return before their
    computation is done, unless the program can raise. It compiles `f(x, 1)` and `f(x, True)`
    separately.

    **Arguments:**

    - `fun`: a pure function or another callable, such as a Module, a bound method or a
        `functools.partial`. Without it, as in `@filter_jit(donate="all")`, the result is a
        decorator.
    - `donate`: the arrays whose buffers JAX may reuse for the outputs. Donated arrays are deleted.
        - `"all"`: all arrays. JAX's warning about unusable buffers is hidden.
        - `"all-except-first"`: all arrays except those in the first argument.
        - `"warn"`, `"warn-except-first"`: the same, with the warning.
        - `"none"`: no arrays; the default.
    - `block`: whether each call waits for its computation, as in Equinox. By default only those
        do whose program holds a callback, such as `eqx.error_if`, or a foreign call.
    - `maxsize`: how many static structures are kept compiled. Further ones replace the least
        recently used. `None` for no limit.
    - `max_traces`: how many traces are allowed until the cache is cleared, over all wrappers of the
        function under these options; for a Module, over those with equal static fields. `None` for
        no limit. A call that needs one more raises a `TooManyTracesError`, which explains why.
    - `**jitkwargs`: further arguments of `jax.jit`, such as `inline` or `compiler_options`.

    **Returns:**

    A `JitFunction`, with the signature of `fun`. It is a pytree, whose leaves are the arrays in
    `fun`. (To type checkers it is a function: `isinstance(f, eqxjit.types.JitFunction)` narrows
    it.)

    **Raises:**

    - `TypeError`, if `fun` isn't callable, and for an unknown option.
    - `ValueError`, for an unknown `donate`, and for `static_argnums`, `static_argnames`,
        `donate_argnums`, `in_shardings` or `out_shardings` among the `jitkwargs`.

    A call raises a `TypeError` if its arguments don't fit the signature, and a `ValueError` that
    names the argument if a static value can't be hashed.

    !!! example

        ```python
        >>> import equinox as eqx
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from eqxjit import filter_jit
        >>> @filter_jit
        ... def predict(model, x):
        ...     return jax.vmap(model)(x)
        >>> model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
        >>> predict(model, jnp.ones((3, 4))).shape
        (3, 2)

        ```
    """
    with trimming:
        options = check_options(donate, block, maxsize, max_traces, jitkwargs)
    if fun is inspect.Parameter.empty:
        return functools.partial(_wrap, options=options)
    return _wrap(fun, options)


fast_filter_jit = filter_jit
