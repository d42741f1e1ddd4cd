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
from .table import CacheInfo, Function, split_function

P = ParamSpec("P")
T = TypeVar("T")

# Attributes of Python functions and methods. Tools read them from a wrapper, too.
_FUNCTION_ATTRIBUTES = {
    *("__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__"),
    *("__name__", "__qualname__", "__annotations__", "__type_params__"),
    *("__func__", "__self__", "__isabstractmethod__"),
}

# The repr of a Module can span many lines, so it is cut after this many characters.
_MAX_REPR = 80


class _Jitted(Generic[P, T]):
    """The methods that `JitFunction` and `BoundJitFunction` share.

    - `_wrapper`: the `JitFunction` itself.
    - `_bound`: the first arguments, which a bound method fills in: its instance.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        # Not annotated, because tools would take annotations for fields of the instances.
        _wrapper = _bound = cast(Any, None)

        @property
        def __wrapped__(self) -> Callable[P, T]: ...

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T: ...

    else:
        # Not by properties, because `inspect` would also find these on the class.
        def __getattr__(self, name: str) -> Any:
            if name == "__wrapped__":
                return self._unwrapped()
            if name in _FUNCTION_ATTRIBUTES:
                # Where a Module lacks an attribute, Equinox's unflatten fills in `MISSING`.
                found = getattr(self.__wrapped__, name, MISSING)
                if found is not MISSING:
                    return found
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and lower the function for these arguments, without running it.

        **Arguments:**

        - `*args`, `**kwargs`: as for a call. In place of an array, a `jax.ShapeDtypeStruct` can be
            passed.

        **Returns:**

        A `Lowered`, in the manner of `jax.stages.Lowered`: `as_text()` returns the program, and
        `compile()` compiles it.

        **Raises:**

        - `TypeError`, `ValueError` or `TooManyTracesError`, as a call does.

        !!! example

            ```python
            >>> import jax, jax.numpy as jnp
            >>> from eqxjit import filter_jit
            >>> f = filter_jit(lambda x, power: x**power)
            >>> compiled = f.lower(jax.ShapeDtypeStruct((3,), jnp.float32), 2).compile()
            >>> compiled(jnp.arange(3.0), 2)
            Array([0., 1., 4.], dtype=float32)

            ```
        """
        with trimming:
            return lower(self._wrapper._handler, self._bound, args, kwargs)

    def compile(self, /, *args: Any, **kwargs: Any) -> CompileCost:
        """Compile the function for arguments like these ahead of time, without running it.

        Later calls with such arguments then trace and compile nothing, even if they call a
        different wrapper of the same function, or run in a different thread. Several functions can
        be compiled concurrently, each in a thread.

        **Arguments:**

        - `*args`, `**kwargs`: as for a call. In place of an array, a `jax.ShapeDtypeStruct` can be
            passed, also within a Module (see `eqx.filter_eval_shape`). It must have the shape,
            dtype and `weak_type` of the array in later calls. If that array has been put on a
            device explicitly, the `jax.ShapeDtypeStruct` must also have its `sharding`.

        **Returns:**

        A `CompileCost`: how long it took, and how large the executable is.

        **Raises:**

        - `TypeError`, `ValueError` or `TooManyTracesError`, as a call does.

        !!! example

            ```python
            >>> import jax, jax.numpy as jnp
            >>> from eqxjit import filter_jit
            >>> f = filter_jit(lambda x, power: x**power)
            >>> cost = f.compile(jax.ShapeDtypeStruct((3,), jnp.float32), 2)
            >>> cost.seconds > 0
            True
            >>> f(jnp.arange(3.0), 2)  # traces and compiles nothing
            Array([0., 1., 4.], dtype=float32)
            >>> f.cache_info()
            CacheInfo(entries=1, traces=1, maxsize=1024, hits=1)

            ```
        """
        with trimming:
            return self.lower(*args, **kwargs).cost()

    def cache_info(self) -> CacheInfo:
        """Return the state of the function's cache, as `functools.lru_cache` does for its own.

        **Returns:**

        A `CacheInfo(entries, traces, maxsize, hits)`. It counts the calls of all wrappers of this
        function that have the same options.

        !!! example

            ```python
            >>> import jax.numpy as jnp
            >>> from eqxjit import filter_jit
            >>> f = filter_jit(lambda x, power: x**power)
            >>> _ = f(jnp.ones(3), 2), f(jnp.ones(3), 2), f(jnp.ones(3), 4)
            >>> f.cache_info()
            CacheInfo(entries=2, traces=2, maxsize=1024, hits=1)

            ```
        """
        return self._wrapper._function.table.info()

    def traces(self) -> list[Trace]:
        """Return a record of each trace: why the function was traced, for what, and how long.

        **Returns:**

        A list of `eqxjit.types.Trace`, the oldest first. A terminal and a notebook show the list as
        a table. It has the latest 256 traces since the cache was last cleared, by all wrappers of
        this function that have the same options.

        !!! example

            ```python
            >>> import jax.numpy as jnp
            >>> from eqxjit import filter_jit
            >>> f = filter_jit(lambda x, power: x**power)
            >>> _ = f(jnp.ones(3), 2), f(jnp.ones(3), 4)
            >>> [trace.number for trace in f.traces()]
            [1, 2]

            ```
        """
        return self._wrapper._function.table.history.traces

    def clear_cache(self) -> None:
        """Drop all programs of this function, and its records of traces.

        This affects all wrappers of this function that have the same options. Their next calls
        trace and compile again.

        !!! example

            ```python
            >>> import jax.numpy as jnp
            >>> from eqxjit import filter_jit
            >>> f = filter_jit(lambda x: 2 * x)
            >>> _ = f(jnp.ones(3))
            >>> f.clear_cache()
            >>> f.cache_info()
            CacheInfo(entries=0, traces=0, maxsize=1024, hits=0)

            ```
        """
        self._wrapper._function.table.clear()

    def specialized_source(self) -> str | None:
        """Return Python code that does what the fast path of the latest call does.

        Without the native back end, this code is the fast path itself.

        **Returns:**

        The code; `None` if there is no fast path, or if the arguments are too large a tree for
        generated Python.
        """
        return self._wrapper._handler.source()

    def __str__(self) -> str:
        # If `chex.assert_max_traces` wraps a jitted function, it sees no traces. It recognises the
        # mistake by the word `CompiledFunction`, and tells its user to swap the two wrappers.
        return f"<CompiledFunction {self!r}>"

    def __eq__(self, other: object) -> Any:
        return eqx.tree_equal(self, other) if type(other) is type(self) else NotImplemented

    # Not by identity, because copies of a wrapper are equal, so they must have equal hashes.
    def __hash__(self) -> int:
        try:
            return hash((self._wrapper._function, *jax.tree.leaves(self)))
        except TypeError as error:
            error.add_note(
                "`jax.lax.scan` and `jax.lax.switch` hash their function, and this jitted function "
                "holds arrays. Pass a lambda that calls it."
            )
            raise


class JitFunction(_Jitted[P, T], Dispatcher):
    """A function that `filter_jit` has wrapped. Call it like the function itself.

    It is a pytree, whose leaves are the arrays in the wrapped function. The attribute `__wrapped__`
    is the wrapped function.
    """

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
        name = self._function.signature.qualname if is_function else short(wrapped, _MAX_REPR)
        return f"filter_jit({name})"

    def __copy__(self) -> "JitFunction[P, T]":
        return type(self)(self._function, self._handler.fun_arrays)

    def __deepcopy__(self, memo: dict[int, Any]) -> "JitFunction[P, T]":
        # The copy shares the `Function`, and thereby all compiled programs.
        return type(self)(self._function, copy.deepcopy(self._handler.fun_arrays, memo))

    # Not `__reduce__`, because that doesn't get the protocol.
    def __reduce_ex__(self, protocol: Any) -> Any:
        name = self._function.signature.qualname
        module = sys.modules.get(self._function.attributes.get("__module__", ""))
        try:
            found = operator.attrgetter(name)(module)
        except AttributeError:
            found = None
        if type(found) is not JitFunction or found != self:
            return _blank, (), (self.__wrapped__, self._function.options)
        if protocol < 4:
            # These protocols refer to an attribute by pickling its owner first. Pickling `_content`
            # would pickle this wrapper again, without end.
            return name
        return _blank, (), found._content

    def __setstate__(self, state: Any) -> None:
        # The state is `(function, options)`, or a `_content`, which has both as an attribute.
        fun, options = getattr(state, "content", state)
        type(self).__init__(self, *split_function(fun, options))

    @property
    def _content(self) -> types.FunctionType:
        """A function that represents the wrapped function and its options in a pickle.

        Picklers such as cloudpickle decide by the module of a function whether they pickle it by
        name or by value. They decide the same for this function as for the user's. Pickles contain
        the name `_content`.
        """
        content: Any = types.FunctionType((lambda: None).__code__, {}, "_content")
        content.__module__ = self._function.attributes["__module__"]
        content.__qualname__ = f"{self._function.signature.qualname}._content"
        content.content = self.__wrapped__, self._function.options
        # Return the same object in all threads and calls, because picklers compare it by identity
        # with the object that they find by its name.
        return vars(self._function).setdefault("_content", content)


def _blank() -> JitFunction[..., Any]:
    """Return an empty wrapper, which unpickling then fills in by `__setstate__`.

    The wrapper exists before its function is unpickled, because the function may refer to the
    wrapper. Pickles contain the name `_blank`.
    """
    return JitFunction.__new__(JitFunction)


class BoundJitFunction(_Jitted[P, T], functools.partial[T]):
    """A wrapped method, bound to an instance. Like `equinox.Partial`, it is a pytree.

    It subclasses `functools.partial`, which is created and called in C. `func` is the wrapper of
    the method, `args` has the instance, and `keywords` is empty.
    """

    __slots__ = ()

    # `help(model.step)` shows this docstring.
    __doc__ = property(lambda self: self.func.__doc__)  # type: ignore[assignment]
    # `__func__` is the wrapper. Without this property, `__getattr__` would return the function of
    # the unwrapped method, which isn't jitted.
    __func__ = property(operator.attrgetter("func"))
    _wrapper = property(operator.attrgetter("func"))
    _bound = property(operator.attrgetter("args"))

    def _unwrapped(self) -> Any:
        return self._wrapper.__wrapped__.__get__(*self.args)

    def __repr__(self) -> str:
        instance = ", ".join([short(argument, _MAX_REPR) for argument in self.args])
        return f"<bound {self.func!r} of {instance}>"


def register_wrapper(cls: type[JitFunction[..., Any]]) -> None:
    """Register a class of wrappers as a pytree, whose children are the arrays of its function."""

    def flatten(wrapper: JitFunction[..., Any]) -> tuple[tuple[Any, ...], Function]:
        return wrapper._handler.fun_arrays, wrapper._function

    def unflatten(function: Function, arrays: Any) -> JitFunction[..., Any]:
        return cls(function, tuple(arrays))

    register_pytree_node(cls, flatten, unflatten)
    WRAPPERS.add(cls)


def register_partial(cls: type[functools.partial[Any]]) -> None:
    """Register a subclass of `functools.partial` as a pytree of its function and its arguments."""
    names = "func", "args", "keywords"

    def flatten_with_keys(partial: functools.partial[Any]) -> Any:
        return [(GetAttrKey(name), getattr(partial, name)) for name in names], None

    def unflatten(_: None, children: Any) -> functools.partial[Any]:
        func, args, keywords = children
        return cls(func, *args, **keywords)

    register_pytree_with_keys(cls, flatten_with_keys, unflatten)


register_wrapper(JitFunction)
register_partial(BoundJitFunction)


def _wrap(fun: Any, options: Options) -> JitFunction[..., Any]:
    return JitFunction(*split_function(fun, options))


# The types say that a function is returned, as in Equinox. If they said `JitFunction`, type
# checkers would not bind a wrapped method when they compare it with the method of a base class or
# of a protocol.
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
    """Compile a function. JAX and NumPy arrays in its arguments are traced, all else is static.

    This is a drop-in replacement for `equinox.filter_jit` with faster calls. A call returns before
    its computation is done, except in the cases named at `block`. Static values are compared by
    type and value, so `f(x, 1)` and `f(x, True)` are compiled separately.

    **Arguments:**

    - `fun`: a pure function or another callable, such as a Module, a bound method or a
        `functools.partial`. Without `fun`, as in `@filter_jit(donate="all")`, `filter_jit` returns
        a decorator.
    - `donate`: the arrays whose buffers JAX may reuse for the outputs. Donated arrays are deleted.
        - `"all"`: all arrays. JAX's warning about unusable donated buffers is hidden.
        - `"all-except-first"`: all arrays except those in the first argument. The warning is
            hidden, too.
        - `"warn"`, `"warn-except-first"`: the same arrays, but JAX's warning is shown.
        - `"none"`: no arrays. This is the default.
    - `block`: whether each call waits until its computation is done, as in Equinox. By default a
        call waits only if its program can raise, because the program has a callback
        (`eqx.error_if`, for example) or a foreign call, or if the program reads a large NumPy array
        in place.
    - `maxsize`: for how many static structures compiled programs are kept. A further structure
        replaces the least recently used structure. `None` means no limit.
    - `max_traces`: how many traces are allowed before the cache is cleared. All wrappers of the
        function with the same options count together. If `fun` is a Module, all Modules with equal
        static fields do. A call that needs one more trace raises a `TooManyTracesError`, which
        explains why the function is traced again. `None` means no limit.
    - `**jitkwargs`: further options of `jax.jit`, such as `inline` or `compiler_options`.

    **Returns:**

    A `JitFunction` with the signature of `fun`. It is a pytree, whose leaves are the arrays in
    `fun`. Type checkers take it for a function. To use methods such as `f.compile`, narrow the type
    by `isinstance(f, eqxjit.types.JitFunction)`.

    **Raises:**

    - `TypeError`, if `fun` isn't callable, or if an option is unknown or has a wrong type.
    - `ValueError`, if an option has a wrong value, or if the `jitkwargs` contain `static_argnums`,
        `static_argnames`, `donate_argnums`, `donate_argnames`, `in_shardings` or `out_shardings`.

    A call raises a `TypeError` if its arguments don't fit the signature. It raises a `ValueError`,
    which names the argument, if a static value can't be hashed.

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
