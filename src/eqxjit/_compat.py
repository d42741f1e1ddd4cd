"""All private names of JAX, Equinox and CPython that eqxjit uses, with reasons and fallbacks.

The native back end is here, too, because it may be missing.

The names in modules are looked up once, at import. If a release no longer has a name, the fallback
is slower, or shows less. The page *Stability* names the fallbacks that do less than that, and the
names without a fallback. A new release of JAX or Equinox requires a change of this file at most.
"""

import functools
import inspect
import logging
import pkgutil
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import default_registry, tree_structure

from ._text import switch


def _private(name: str, fallback: Any = None) -> Any:
    """Return the object with the private name `module:attribute`; the fallback if it is gone."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return fallback


def _do_nothing(*_: Any) -> Any:
    # The fallback for functions on which no result depends: they save memory, or make the output of
    # JAX easier to read.
    return ()


# --- The native back end ----------------------------------------------------------------------

#: Which back end is in use and, if it isn't the native one, why. For `python -m eqxjit --info`.
why_back_end = "native"

#: The module that `native.c` defines; `None` if it isn't built, or with `EQXJIT_NATIVE=0`.
native: Any = _private("eqxjit._native")

if native is None:
    # There was no compiler at installation, or the module was built for a different Python.
    why_back_end = "Python, because the native one isn't built (no C compiler at installation?)"
# The interface version that this file expects. A build of an earlier version may be installed.
elif getattr(native, "INTERFACE", None) != 67:
    native = None
    why_back_end = "Python, because the native one was built for a different version of eqxjit"

_IS_NATIVE = switch("EQXJIT_NATIVE")
if _IS_NATIVE is False:
    native = None
    why_back_end = "Python, because EQXJIT_NATIVE=0"
elif _IS_NATIVE and native is None:
    raise ImportError(
        "`EQXJIT_NATIVE=1` asks for the native back end, which isn't built for this Python and "
        "this eqxjit. Install a C compiler and Python's headers, then eqxjit again, by `pip "
        "install --force-reinstall --no-deps`; or unset the variable."
    )

if TYPE_CHECKING or native is not None:
    # CPython calls instances of this class without a look-up of `__call__`, and without a tuple of
    # arguments.
    from ._native import JitFunction as Dispatcher
    from ._native import connect
else:

    class Dispatcher:
        """The base class of wrappers. `connect(wrapper, called)` sets the function that they call.

        `native.c` has a class of the same name with the same purpose.
        """

        __slots__ = ("_called",)

    _called = Dispatcher._called
    # CPython then calls the function in the slot directly, without a frame in between. The slot has
    # no other name, so that users don't find it among the attributes.
    Dispatcher.__call__ = _called
    del Dispatcher._called
    connect = _called.__set__


# --- Types ------------------------------------------------------------------------------------

# The concrete class of JAX's arrays. `type(x) is ArrayImpl` takes a tenth of the time of
# `isinstance(x, jax.Array)`. It is looked up by name, because to create an array and read its type
# would start a backend. The fallback is a class without instances, so `equinox.is_array` decides
# for each leaf.
ArrayImpl: type = _private("jax._src.array:ArrayImpl", type("ArrayImpl", (), {}))

# JAX keeps a NumPy array whose memory it reads in place until the next call of a jitted function,
# even if the program that reads it has run. This function drops such arrays. With the fallback, two
# copies of a large NumPy argument are alive at a time.
drop_read_arrays = _private("jaxlib._jax:collect_garbage", _do_nothing)

# Equinox's unflatten sets a field to this mark if the flattened instance lacked the field.
MISSING = _private("equinox._module._flatten:MISSING", object())

#: `fields_of(module)` returns `module.__dict__` by its C-level descriptor, so no Python code runs.
fields_of: Callable[[Any], dict[str, Any]] = vars(eqx.Module)["__dict__"].__get__

# --- Generated classes ------------------------------------------------------------------------

# `dataclasses` generates methods inside a function called `__create_fn__`.
_GENERATED_EQ = "__create_fn__.<locals>.__eq__"


def has_generated_eq(kind: type) -> bool:
    """Return whether `dataclasses` generated the `__eq__` that a class itself defines.

    The fallback is False. Objects are then compared by their `__eq__`, as in Equinox, for which `1`
    and `1.0` in fields are equal.
    """
    # Not by `__dataclass_fields__` alone, because a dataclass may define an `__eq__` itself.
    code = getattr(vars(kind).get("__eq__"), "__code__", None)
    name = getattr(code, "co_qualname", "")
    return name == _GENERATED_EQ and "__dataclass_fields__" in vars(kind)


# `collections.namedtuple` generates `__new__` in a module whose name begins with this prefix.
_NAMED_TUPLE_MODULE = "namedtuple_"


def has_generated_new(kind: type) -> bool:
    """Return whether `collections.namedtuple` generated the `__new__` of a class.

    The fallback is False. Objects are then created by calling the class, which is slower.
    """
    module = getattr(kind.__new__, "__module__", None) or ""
    return module.startswith(_NAMED_TUPLE_MODULE)


# --- Structures -------------------------------------------------------------------------------

#: `flatten_one_level(node)` returns `(children, metadata)`, and `None` for a leaf.
flatten_one_level: Callable[[Any], tuple[Any, Any] | None] = default_registry.flatten_one_level

#: `flatten_one_level_with_keys(node)` returns the same, but with a pair of a key and a child in the
#: place of each child.
flatten_one_level_with_keys: Callable[[Any], Any] = default_registry.flatten_one_level_with_keys

_LEAF = tree_structure(0)


class _AllClasses(dict[type, Any]):
    """The fallback for the registered classes: any class may be registered."""

    def __contains__(self, kind: object) -> bool:
        return True


#: The classes that are registered as nodes. This is needed for named tuples. JAX flattens most of
#: them into their fields, but calls the registered flatten function if the class is registered.
#: JAX's public `is_tree_node` returns True in both cases. With the fallback, JAX flattens all named
#: tuples, which is slower, and an error is raised if a registered named tuple must be unflattened.
registered_nodes: Any = _private("jax._src.tree_util:_registry", _AllClasses())


def unflatten_node(kind: type, metadata: Any, children: list[Any]) -> Any:
    """Return a node of this class, by the unflatten function in JAX's registry."""
    unflatten: Any = getattr(registered_nodes.get(kind), "from_iter", None)
    if unflatten is not None:
        return unflatten(metadata, tuple(children))
    if metadata is kind and issubclass(kind, tuple):
        # The class is a named tuple that isn't registered.
        return kind(*children)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        # The treedef below would call the class instead of the registered unflatten function.
        raise TypeError(
            f"This release of JAX doesn't say how the named tuple `{kind.__name__}` is registered, "
            "so eqxjit can't rebuild it. Register a class that isn't a named tuple instead."
        )
    make_treedef = type(_LEAF).from_node_data_and_children
    treedef = make_treedef(default_registry, (kind, metadata), [_LEAF] * len(children))
    return treedef.unflatten(children)


# --- Tracing ----------------------------------------------------------------------------------

# JAX's current trace, and whether JAX evaluates operations on constants eagerly. Reading both takes
# 0.2 µs. The fallback, which Equinox uses, is to run an addition, which takes 17 µs.
_trace_ctx = _private("jax._src.core:trace_ctx")
_eager_constant_folding = _private("jax._src.config:eager_constant_folding")
_EvalTrace = _private("jax._src.core:EvalTrace")
_StagingTrace = _private("jax._src.interpreters.partial_eval:DynamicJaxprTrace")
#: Whether JAX's current trace can be read. If not, `is_transforming` is false under `vmap` and
#: `grad`.
can_read_trace = None not in (_trace_ctx, _eager_constant_folding, _EvalTrace, _StagingTrace)
#: What `is_transforming` reads, for C. Both are `None` if the current trace can't be read.
trace_ctx, EvalTrace = (_trace_ctx, _EvalTrace) if can_read_trace else (None, None)


def is_transforming() -> bool:
    """Return whether this code runs under a transformation, such as `jit`, `vmap` or `grad`."""
    return not isinstance(_trace_ctx.trace, _EvalTrace) if can_read_trace else is_staging()


def is_staging() -> bool:
    """Return whether an operation on constants would be recorded in a jaxpr right now."""
    if not can_read_trace:
        return isinstance(jnp.array(1) + 1, Tracer)
    trace = _trace_ctx.trace
    # The traces of `vmap` and `grad` pass operations on constants to their parent trace. The trace
    # of an eager `shard_map` doesn't.
    while not isinstance(trace, _StagingTrace) and hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
    return not isinstance(trace, _EvalTrace) and not _eager_constant_folding.value


def is_jit_disabled() -> bool:
    """Return whether `jax.disable_jit` is in force."""
    # Type checkers don't know the attributes of `jax.config`.
    return jax.config.jax_disable_jit  # type: ignore[attr-defined]


@functools.cache
def is_cpu_alone() -> bool:
    """Return whether all devices of JAX are CPUs. The first call starts JAX's backends."""
    return {*_backends()} == {"cpu"}


# The backends by the names of their platforms. The function is public, but looked up here because
# it is new. With the fallback, NumPy arrays are always copied.
_backends = _private("jax.extend.backend:backends", tuple)

# JAX's record of the names of a function and its arguments. A function can provide a record of its
# own by `__fun_debug_info__`.
try:
    _unnamed: Any = _private("jax._src.api_util:debug_info")("jit", abs, (), {})
    _unnamed = _unnamed._replace(func_src_info="", arg_names=())
except (AttributeError, TypeError, ValueError):
    # JAX then names arguments `leaves[0]`, and takes the name and place of the function from its
    # `__name__` and `__code__`.
    _unnamed = None


def debug_info(source: str, argument_names: tuple[str, ...] | None) -> Any:
    """Return JAX's record for these names; `None` to let JAX name the function and its arguments.

    `source` is the name of the function with its place.
    """
    if _unnamed is None or argument_names is None:
        return None
    return _unnamed._replace(func_src_info=source, arg_names=argument_names)


def wrapped_by_tracer(tracer: Tracer) -> list[Any]:
    """Return the arrays and tracers that a tracer of `vmap`, `jvp` or `grad` wraps.

    The list is empty for a tracer of `jit`. The fallback is an empty list. Calls under `vmap` and
    `grad` then don't wait for a program that can raise.
    """
    values = [getattr(tracer, name, None) for name in _WRAPPED]
    return [value for value in values if isinstance(value, jax.Array)]


# The private attributes of tracers that hold the wrapped values.
_WRAPPED = "val", "primal", "tangent"


def copy_in_tracer(tracer: Any) -> None:
    """Put copies in place of the NumPy arrays in a tracer of `vmap`, `jvp` or `grad`.

    JAX may read them after the call, for example in the backward pass of a gradient.
    """
    for name in _WRAPPED:
        value = getattr(tracer, name, None)
        if isinstance(value, Tracer):
            copy_in_tracer(value)
        elif hasattr(value, "__array__") and not isinstance(value, jax.Array):
            # Not `isinstance(value, np.ndarray)`, because JAX 0.8 wraps NumPy arrays in a class of
            # its own.
            setattr(tracer, name, np.array(value))


# --- Errors -----------------------------------------------------------------------------------

# In this module Equinox's callback stores the message and the stack of a runtime error.
_eqx_jit = _private("equinox._jit")
#: The template for the text of a runtime error, with the fields `{stack}` and `{msg}`.
runtime_error_text: str = getattr(
    _eqx_jit, "_on_error_msg", "{stack}\nequinox.EquinoxRuntimeError: {msg}\n"
)


def last_runtime_error() -> tuple[str | None, list[bytes | str]]:
    """Return the message and the stack, innermost frame first, of Equinox's latest runtime error.

    The fallback is `(None, [])`: the message is then taken from the text of JAX's error.
    """
    return getattr(_eqx_jit, "last_error_info", None) or (None, [])


#: The name of the class of errors that Equinox's callback raises. The text of JAX's error contains
#: this name.
CALLBACK_ERROR_NAME = "_EquinoxRuntimeError"


# JAX logs each error in a function of `jax.pure_callback`, although the error is also raised.
# `eqx.error_if` raises its error in such a function. Equinox adds this filter in every call, and
# removes it afterwards. That takes time, so this filter stays in place.
logging.getLogger("jax._src.callback").addFilter(
    lambda record: record.getMessage() != "jax.pure_callback failed"
)

# These two functions make JAX leave out the frames of a file. The first leaves them out of the
# source locations of operations, which logs and errors show, and the second out of tracebacks. With
# the fallbacks, both show lines of eqxjit.
exclude_from_locations = _private("jax._src.source_info_util:register_exclusion", _do_nothing)
exclude_from_tracebacks = _private("jax._src.traceback_util:register_exclusion", _do_nothing)


# --- Events -----------------------------------------------------------------------------------

# JAX's names of the events at the beginning and the end of a phase. If a release has other names,
# times are missing from records of traces, and JAX's warning about donated buffers may be shown
# under transformations.
TRACING_EVENT = "/jax/core/compile/jaxpr_trace_duration"
LOWERING_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILING_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


# --- Lowered programs -------------------------------------------------------------------------


# Custom calls that JAX emits itself and that never raise. (Solvers return NaNs if they fail.) Any
# other custom call counts as a foreign call, which can raise. To wait in vain is only slow, but
# without a wait an error would be lost.
_HARMLESS = {
    # Annotations of shardings and memory layouts.
    *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint"),
    *("annotate_device_placement", "AllocateBuffer"),
    # Operations that XLA implements itself.
    *("ApproxTopK", "TopK", "Qr", "ProductOfElementaryHouseholderReflectors"),
}
_HARMLESS_PREFIXES = (
    # Libraries of linear algebra on the CPU, and on GPUs of NVIDIA and AMD.
    *("lapack_", "cusolver_", "cublas_", "cusparse_", "cu_", "hipsolver_", "hipblas_"),
    *("__cublas", "__cudnn"),
    # Dialects in which JAX and XLA write programs.
    *("mhlo.", "chlo.", "stablehlo.", "xla.sdy."),
)
# Operations by which a TPU communicates with its host in the middle of a program.
_HOST_TRANSFERS = {"stablehlo.send", "stablehlo.recv", "stablehlo.outfeed"}


def may_raise(module: Any) -> bool:
    """Return whether a StableHLO program can raise an error when it runs.

    The fallback is True.
    """
    # Only host callbacks and foreign calls can raise. Look for them in StableHLO, because in the
    # jaxpr some primitives hide their callbacks (lineax's solve, Equinox's `noinline`).
    pending: list[Any] = [module]
    try:
        while pending:
            operation = pending.pop().operation
            if operation.name in _HOST_TRANSFERS:
                return True
            if operation.name == "stablehlo.custom_call":
                target = operation.attributes["call_target_name"].value
                if target not in _HARMLESS and not target.startswith(_HARMLESS_PREFIXES):
                    return True
            for region in operation.regions:
                for block in region.blocks:
                    pending.extend(block.operations)
    except (AttributeError, KeyError, TypeError):
        # This release of JAX lowers to a different kind of module.
        return True
    return False


# --- Upstream's wrappers ----------------------------------------------------------------------

# The class of the wrappers that `equinox.filter_jit` returns. With the fallback, wrappers that were
# created before `eqxjit.install()` still call Equinox's `filter_jit`.
UpstreamWrapper: Any = _private("equinox._jit:_JitWrapper")
upstream_filter_jit = _private("equinox._jit:filter_jit", eqx.filter_jit)

_UPSTREAM_FIELDS = {
    "fn",
    "_signature",
    "_dynamic_fun",
    "_static_fun",
    "_cached",
    "filter_warning",
    "donate_first",
    "donate_rest",
}
# A further field may be a new option, which `install` could not take over.
if {*getattr(UpstreamWrapper, "__dataclass_fields__", ())} != _UPSTREAM_FIELDS:
    UpstreamWrapper = None


def upstream_donation(wrapper: Any) -> Any:
    """Return the option `donate` of Equinox's wrapper; `None` if it may also have other options."""

    # Equinox passes a function with these parameters to `jax.jit`. Without other options, JAX keeps
    # the same facts about Equinox's function as about this one.
    def plain(dynamic_donate: Any, dynamic_nodonate: Any, static: Any) -> None: ...

    jitted: Any = jax.jit(plain, donate_argnums=0, static_argnums=2)
    try:
        found, expected = [
            each._jit_info._replace(fun_sourceinfo=None, fun_signature=None)
            for each in (wrapper._cached, jitted)
        ]
    except (AttributeError, TypeError, ValueError):
        return None
    if found != expected:
        return None
    if not wrapper.donate_rest:
        return "none"
    donate = "all" if wrapper.filter_warning else "warn"
    return donate if wrapper.donate_first else f"{donate}-except-first"


# --- Settings that traces depend on -----------------------------------------------------------

# The settings that JAX calls by internal names, and how explanations call them.
_USERS_NAMES = {
    "abstract_mesh_context_manager": "mesh (jax.set_mesh)",
    "mesh_context_manager": "mesh (with mesh:)",
    "axis_env_state": "axis names of an outer transformation",
}

# The values of JAX's settings in the key of its trace cache, and the names of these settings. JAX
# 0.8 doesn't have the names. The fallback is that all calls seem to have the same settings.
trace_context = _private("jax._src.config:trace_context", tuple)
_trace_context_names = _private("jax._src.config:trace_context_names", tuple)


def trace_configuration() -> dict[str, Any]:
    """Return the value of each setting of JAX that programs depend on, by the setting's name."""
    values = trace_context()
    names = _trace_context_names() or [f"setting {i} of JAX" for i in range(len(values))]
    pairs = zip(names, values, strict=False)
    return {_USERS_NAMES.get(name, name): value for name, value in pairs}


# --- Programs ---------------------------------------------------------------------------------


def traceback_of(equation: Any) -> Any:
    """Return JAX's traceback of the code that created an equation; `None` if there is none."""
    # JAX has no public name for the traceback. Without a traceback, sizes of programs are shown
    # without lines.
    return getattr(getattr(equation, "source_info", None), "traceback", None)


def is_backward(equation: Any) -> bool:
    """Return whether an equation is in the backward pass of a gradient, or is rematerialised."""
    # JAX writes transformations into the name stack, which is meant for profilers. Without the name
    # stack, a loop and its backward pass count as two loops, and gradients can't be told from new
    # weights.
    names = str(getattr(getattr(equation, "source_info", None), "name_stack", ""))
    return "transpose(" in names or "rematted" in names


def jitted_in(frame: Any) -> Any:
    """Return the function that a frame of `jax.jit` compiles; `None` for any other frame."""
    # JAX's events have only the name of a function. A report needs the function itself, to tell
    # JAX's operations from functions that the user has jitted. If the function can't be read, the
    # report lists operations as if they were the user's functions, and has no note about them.
    code = frame.f_code
    is_jit = code.co_name == _JIT_ENTRY and code.co_filename == _JIT_FILE
    return frame.f_locals.get("fun") if is_jit else None


# The name and file of JAX's function that runs if a jitted function isn't compiled yet.
_JIT_ENTRY = "cache_miss"
_JIT_FILE = getattr(_private("jax._src.pjit"), "__file__", "")


def stack_of(traceback: Any) -> tuple[tuple[Any, int], ...]:
    """Return the frames of a traceback of JAX, innermost first: code objects with offsets."""
    try:
        codes, offsets = traceback.raw_frames()
    except AttributeError:
        # The equation has no traceback, or this release of JAX has a different kind.
        return ()
    return tuple(zip(codes, offsets, strict=True))


def source_of(jaxpr: Any) -> tuple[str, str, int] | None:
    """Return the name, file and line of the function of a jaxpr; `None` if they are missing."""
    text = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None)
    name, _, place = text.rpartition(" at ") if isinstance(text, str) else ("", "", "")
    filename, _, line = place.rpartition(":")
    return (name, filename, int(line)) if line.isdigit() else None


def weak_lowering(lowered: Any) -> Callable[[], Any]:
    """Return a weak reference to the object that JAX caches for a lowered program."""
    try:
        return weakref.ref(lowered._lowering)
    except (AttributeError, TypeError):
        # The memory of the compiled program, and its callbacks, are then unknown.
        return lambda: None


def memory_of(lowering: Any) -> tuple[int, ...] | None:
    """Return the bytes of a program's arguments, outputs, donated arrays, and temporary memory.

    Donated arrays count as arguments and as outputs, too. `None` if the memory is unknown.
    """
    try:
        stats = lowering._executable.memory_analysis()
        names = "argument", "output", "alias", "temp"
        return tuple([getattr(stats, f"{name}_size_in_bytes") for name in names])
    except (AttributeError, NotImplementedError, RuntimeError):
        # The program isn't compiled, JAX has dropped it, this release has other names, or the
        # backend doesn't report memory.
        return None


def changes_something(jaxpr: Any) -> bool:
    """Return whether a program changes something when it runs, such as a `Ref`, or by a callback.

    To print for debugging doesn't count. If JAX has dropped the jaxpr, it isn't known to.
    """
    # JAX has no public class of effects. Without this attribute, no effect is known.
    effects = getattr(jaxpr, "effects", ())
    return any("Debug" not in type(each).__name__ for each in effects)


def has_host_callback(lowering: Any) -> bool:
    """Return whether a lowered program calls Python. If so, JAX doesn't cache it in a file."""
    return bool(_host_callbacks(lowering))


def calls_users_python(lowering: Any) -> bool:
    """Return whether a lowered program calls Python for more than the checks of `eqx.error_if`.

    With the fallback, such a check counts, too.
    """
    return not all(map(_is_error_check, _host_callbacks(lowering)))


def _host_callbacks(lowering: Any) -> Sequence[Any]:
    arguments = getattr(lowering, "compile_args", None) or {}
    return arguments.get("host_callbacks") or ()


def _is_error_check(callback: Any) -> bool:
    # JAX puts the function into two closures and an object of its own.
    try:
        for _ in range(2):
            callback = inspect.getclosurevars(callback).nonlocals["callback"]
        return callback.callback_func.__module__ == "equinox._errors"
    except (AttributeError, KeyError, TypeError):
        return False
