"""Every private name of JAX, Equinox and CPython that eqxjit uses: its reason and its fallback.

So is the native back end, which isn't there everywhere.

Each name is looked up once, at import. Where a release no longer has it, the fallback is slower or
less pretty, never wrong, so that a new release of JAX or Equinox is a change of this file alone.
"""

import functools
import logging
import pkgutil
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import default_registry, tree_structure

from ._text import switch


def _private(name: str, fallback: Any = None) -> Any:
    """Return what has a private name, `module:attribute`; the fallback where that is gone."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return fallback


def _do_nothing(*_: Any) -> Any:
    # The fallback of functions that only make something prettier.
    return ()


# --- The native back end ----------------------------------------------------------------------

#: Which back end is in use, and why.
why_back_end = "native"

#: `native.c`'s module; None where there is none, or `EQXJIT_NATIVE=0` says so.
native: Any = _private("eqxjit._native")

# That of `native.c` as it is now: it may have been built from an older one.
if getattr(native, "INTERFACE", None) != 61:
    # No compiler where it was installed, or another Python: Python serves.
    native = None
    why_back_end = "Python, because the native one isn't built (no C compiler at installation?)"

_IS_NATIVE = switch("EQXJIT_NATIVE")
if _IS_NATIVE is False:
    native = None
    why_back_end = "Python, because EQXJIT_NATIVE=0"
elif _IS_NATIVE and native is None:
    raise ImportError(
        "`EQXJIT_NATIVE=1` asks for a native back end, and none is built for this Python. Install "
        "a C compiler and Python's headers, then eqxjit again, by `pip install --force-reinstall "
        "--no-deps`; or unset the variable."
    )

if TYPE_CHECKING or native is not None:
    # CPython calls their instances without a look at `__call__`, and without a tuple of arguments.
    from ._native import Dispatcher, connect
else:

    class Dispatcher:
        """A base of wrappers, which call what `connect` gives them: as of `native.c`."""

        __slots__ = ("_called",)

    _called = Dispatcher._called
    # CPython calls what is in the slot, without a frame in between. No attribute leads to it.
    Dispatcher.__call__ = _called
    del Dispatcher._called
    connect = _called.__set__


# --- Types ------------------------------------------------------------------------------------

# The concrete class of arrays. `type(x) is ArrayImpl` is ten times cheaper than
# `isinstance(x, jax.Array)`, and asking an array for its type would start a backend. The fallback
# is the type of no value: each leaf then takes the check by `equinox.is_array`.
ArrayImpl: type = _private("jax._src.array:ArrayImpl", type("ArrayImpl", (), {}))

# What Equinox puts in the place of a field that an instance lacks.
MISSING = _private("equinox._module._flatten:MISSING", object())

#: `fields_of(module)` is `module.__dict__` by its C-level descriptor, which runs no Python.
fields_of: Callable[[Any], dict[str, Any]] = vars(eqx.Module)["__dict__"].__get__

# --- Generated classes ------------------------------------------------------------------------

# `dataclasses` defines the methods that it generates in a function of this name.
_GENERATED_EQ = "__create_fn__.<locals>.__eq__"


def has_generated_eq(kind: type) -> bool:
    """Return whether `dataclasses` generated the `__eq__` that a class itself defines.

    False where that is unclear: the `__eq__` then decides, as under Equinox, and takes `1` for
    `1.0` in the fields.
    """
    # A dataclass may have a user's `__eq__`, and `dataclass(eq=False)` leaves it a base's.
    code = getattr(vars(kind).get("__eq__"), "__code__", None)
    name = getattr(code, "co_qualname", "")
    return name == _GENERATED_EQ and "__dataclass_fields__" in vars(kind)


# `collections.namedtuple` defines `__new__` in a module whose name begins so.
_NAMED_TUPLE_MODULE = "namedtuple_"


def has_generated_new(kind: type) -> bool:
    """Return whether `collections.namedtuple` generated the `__new__` of a class.

    False where that is unclear: the class is then called to make its objects, which is slower.
    """
    module = getattr(kind.__new__, "__module__", None) or ""
    return module.startswith(_NAMED_TUPLE_MODULE)


# --- Structures -------------------------------------------------------------------------------

#: `flatten_one_level(node)` is `(children, metadata)`; None for a leaf.
flatten_one_level: Callable[[Any], tuple[Any, Any] | None] = default_registry.flatten_one_level

_LEAF = tree_structure(0)


class _AllClasses(dict[type, Any]):
    """The fallback of the registered classes: each may be one."""

    def __contains__(self, kind: object) -> bool:
        return True


#: The classes that were registered as nodes, of which JAX asks before it looks for the fields of a
#: named tuple. JAX's public `is_tree_node` doesn't tell these two apart. Without it, all named
#: tuples are taken apart by JAX, which is slower; registered ones are refused.
registered_nodes: Any = _private("jax._src.tree_util:_registry", _AllClasses())


def unflatten_node(kind: type, metadata: Any, children: list[Any]) -> Any:
    """Return the object that JAX's registry makes of a node's metadata and children."""
    make: Any = getattr(registered_nodes.get(kind), "from_iter", None)
    if make is not None:
        return make(metadata, tuple(children))
    if metadata is kind and issubclass(kind, tuple):
        # A named tuple that isn't registered.
        return kind(*children)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        # Of these the call below would make named tuples, whatever they are registered as.
        raise TypeError(f"This release of JAX doesn't tell how `{kind.__name__}` is registered.")
    make = type(_LEAF).from_node_data_and_children
    return make(default_registry, (kind, metadata), [_LEAF] * len(children)).unflatten(children)


# --- Tracing ----------------------------------------------------------------------------------

# The trace that JAX is in, and whether it folds constants eagerly: reading both takes 0.2 µs, an
# addition (the fallback, and what Equinox does) 17.
_trace_ctx = _private("jax._src.core:trace_ctx")
_eager_constant_folding = _private("jax._src.config:eager_constant_folding")
_EvalTrace = _private("jax._src.core:EvalTrace")
_StagingTrace = _private("jax._src.interpreters.partial_eval:DynamicJaxprTrace")
_can_read_trace = None not in (_trace_ctx, _eager_constant_folding, _EvalTrace, _StagingTrace)
#: Whether `is_transforming` tells of `vmap` and `grad`, too.
tells_transformations: bool = _can_read_trace


def is_transforming() -> bool:
    """Return whether a transformation is under way, `vmap` and `grad` included."""
    return not isinstance(_trace_ctx.trace, _EvalTrace) if _can_read_trace else is_staging()


def is_staging() -> bool:
    """Return whether an operation on constants would be staged out into a jaxpr right now."""
    if not _can_read_trace:
        return isinstance(jnp.array(1) + 1, Tracer)
    trace = _trace_ctx.trace
    # Those of `vmap` and `grad` pass constants on, that of an eager `shard_map` doesn't.
    while not isinstance(trace, _StagingTrace) and hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
    return not isinstance(trace, _EvalTrace) and not _eager_constant_folding.value


@functools.cache
def is_cpu_alone() -> bool:
    """Return whether JAX has no other devices than CPUs; asking this starts its backends."""
    # What the public function returns are the backends by the names of their platforms.
    return {*_backends()} == {"cpu"}


# Without it, NumPy arrays are always copied.
_backends = _private("jax.extend.backend:backends", tuple)

# How JAX names a function and its arguments, where the function tells (`__fun_debug_info__`).
try:
    _unnamed: Any = _private("jax._src.api_util:debug_info")("jit", abs, (), {})
    _unnamed = _unnamed._replace(func_src_info="", arg_names=())
except (AttributeError, TypeError, ValueError):
    # Arguments are then called `leaves[0]`; the function's name and place are in its name.
    _unnamed = None


def debug_info(source: str, argument_names: tuple[str, ...] | None) -> Any:
    """Return JAX's record of the names of a function and its arguments; None for JAX's."""
    if _unnamed is None or argument_names is None:
        return None
    return _unnamed._replace(func_src_info=source, arg_names=argument_names)


def wrapped_by_tracer(tracer: Tracer) -> list[Any]:
    """Return the values that a tracer of `vmap`, `jvp` or `grad` wraps; none for one of `jit`."""
    # Without them a program that can raise isn't waited for there.
    values = [getattr(tracer, name, None) for name in _WRAPPED]
    return [value for value in values if isinstance(value, jax.Array)]


# Private attributes of tracers.
_WRAPPED = "val", "primal", "tangent"


def copy_in_tracer(tracer: Any) -> None:
    """Replace the NumPy arrays that a tracer of `vmap`, `jvp` or `grad` wraps by copies.

    A pass backward may read them, too, after the call.
    """
    for name in _WRAPPED:
        value = getattr(tracer, name, None)
        if isinstance(value, Tracer):
            copy_in_tracer(value)
        elif hasattr(value, "__array__") and not isinstance(value, jax.Array):
            # JAX 0.8 wraps NumPy's arrays in a class of its own.
            setattr(tracer, name, np.array(value))


# --- Errors -----------------------------------------------------------------------------------

# Equinox smuggles the message and the stack of a runtime error out of its callback here.
_eqx_jit = _private("equinox._jit")
#: The text around a runtime error's message: `{stack}` and `{msg}` are to be filled in.
runtime_error_text: str = getattr(
    _eqx_jit, "_on_error_msg", "{stack}\nequinox.EquinoxRuntimeError: {msg}\n"
)


def last_runtime_error() -> tuple[str | None, list[bytes | str]]:
    """Return the message and the stack, inside out, of Equinox's latest runtime error."""
    return getattr(_eqx_jit, "last_error_info", None) or (None, [])


#: What Equinox's callback raises; the type itself is private to `equinox._errors`.
CALLBACK_ERROR_NAME = "_EquinoxRuntimeError"


# JAX logs a failed `eqx.error_if`, which is raised anyway, inside the callback. One permanent
# filter, by the exception, replaces the two that upstream adds and removes on every call.
logging.getLogger("jax._src.callback").addFilter(
    lambda record: type((record.exc_info or (None, None))[1]).__name__ != CALLBACK_ERROR_NAME
)

# JAX leaves frames of these files out of the places that it logs, and out of tracebacks. Those show
# a few lines of ours without.
exclude_from_locations = _private("jax._src.source_info_util:register_exclusion", _do_nothing)
exclude_from_tracebacks = _private("jax._src.traceback_util:register_exclusion", _do_nothing)


# --- Events -----------------------------------------------------------------------------------

# JAX's names of the events that tell when a phase begins and ends. Where a release has other names,
# times are missing, and the warning about donated buffers may be shown under transformations.
TRACING_EVENT = "/jax/core/compile/jaxpr_trace_duration"
LOWERING_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILING_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


# --- Lowered programs -------------------------------------------------------------------------


# Custom calls that JAX emits itself and that report trouble by NaNs or not at all. Any other counts
# as a foreign call: waiting in vain is slow, not waiting loses an error.
_HARMLESS = {
    # Where and how arrays lie on devices.
    *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint"),
    *("annotate_device_placement", "AllocateBuffer"),
    # Operations that XLA implements itself.
    *("ApproxTopK", "TopK", "Qr", "ProductOfElementaryHouseholderReflectors"),
}
_HARMLESS_PREFIXES = (
    # Libraries of linear algebra, on the CPU and on GPUs of two makers.
    *("lapack_", "cusolver_", "cublas_", "cusparse_", "cu_", "hipsolver_", "hipblas_"),
    *("__cublas", "__cudnn"),
    # Dialects in which JAX and XLA write programs.
    *("mhlo.", "chlo.", "stablehlo.", "xla.sdy."),
)
# How a TPU talks to its host in the middle of a program.
_HOST_TRANSFERS = {"stablehlo.send", "stablehlo.recv", "stablehlo.outfeed"}


def may_raise(module: Any) -> bool:
    """Return whether a StableHLO program can raise once it runs; True if that is unclear."""
    # Only host callbacks and foreign calls can. The lowered module shows them all, also those that
    # a primitive hides from the jaxpr (lineax's solve, Equinox's `noinline`).
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
        # JAX no longer lowers to a module that can be walked.
        return True
    return False


# --- Upstream's wrappers ----------------------------------------------------------------------

# The class of what `equinox.filter_jit` returns. Without it, wrappers made before
# `eqxjit.install()` go on using upstream's.
UpstreamWrapper: Any = _private("equinox._jit:_JitWrapper")
upstream_filter_jit = _private("equinox._jit:filter_jit", eqx.filter_jit)

# Another field might be another option.
if {*getattr(UpstreamWrapper, "__dataclass_fields__", ())} != {
    *("fn", "_signature", "_dynamic_fun", "_static_fun", "_cached"),
    *("filter_warning", "donate_first", "donate_rest"),
}:
    UpstreamWrapper = None


def upstream_donation(wrapper: Any) -> Any:
    """Return the `donate` of an upstream wrapper; None if it may have other options, too."""

    # As Equinox has it, where there are none.
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


# --- What tracing depends on ------------------------------------------------------------------

_USERS_NAMES = {
    "abstract_mesh_context_manager": "mesh (jax.set_mesh)",
    "mesh_context_manager": "mesh (with mesh:)",
    "axis_env_state": "axis names of an outer transformation",
}

# JAX's list of what its cache of traces is keyed by; and the names, which JAX 0.8 doesn't tell.
_trace_context = _private("jax._src.config:trace_context", tuple)
_trace_context_names = _private("jax._src.config:trace_context_names", tuple)


def trace_configuration() -> dict[str, Any]:
    """Return what JAX's programs depend on beside arguments: the value of each name."""
    values = _trace_context()
    names = _trace_context_names() or [f"setting {i} of JAX" for i in range(len(values))]
    pairs = zip(names, values, strict=False)
    return {_USERS_NAMES.get(name, name): value for name, value in pairs}


# --- Programs ---------------------------------------------------------------------------------


def traceback_of(equation: Any) -> Any:
    """Return JAX's traceback of an equation: where the user's code made it; None without one."""
    # Where equations are made is public nowhere. Without it, sizes are told without lines.
    return getattr(getattr(equation, "source_info", None), "traceback", None)


def is_backward(equation: Any) -> bool:
    """Return whether an equation is part of a backward pass of a gradient, or computed again."""
    # JAX tells transformations in a name for profilers. Without it, a loop that a gradient goes
    # through again counts twice, and a gradient is told from a new value of weights no more.
    names = str(getattr(getattr(equation, "source_info", None), "name_stack", ""))
    return "transpose(" in names or "rematted" in names


def jitted_in(frame: Any) -> Any:
    """Return the function that `jax.jit` is asked for in a frame of JAX's; None in another."""
    # JAX's events tell the name of a function and no more. Without this, operations outside of any
    # jit have rows like other functions of their names, and no note.
    code = frame.f_code
    is_jit = code.co_name == _JIT_ENTRY and code.co_filename == _JIT_FILE
    return frame.f_locals.get("fun") if is_jit else None


# The function of JAX's that runs where a jitted function is called that isn't compiled yet.
_JIT_ENTRY, _JIT_FILE = "cache_miss", getattr(_private("jax._src.pjit"), "__file__", "")


def stack_of(traceback: Any) -> tuple[tuple[Any, int], ...]:
    """Return the stack of JAX's traceback: each code, inside out, with an instruction's offset."""
    try:
        codes, offsets = traceback.raw_frames()
    except AttributeError:
        # Another release's; or the equation has none.
        return ()
    return tuple(zip(codes, offsets, strict=True))


def source_of(jaxpr: Any) -> tuple[str, str, int] | None:
    """Return the name, file and line of the function that JAX traced; None if it doesn't say."""
    text = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None)
    name, _, place = text.rpartition(" at ") if isinstance(text, str) else ("", "", "")
    filename, _, line = place.rpartition(":")
    return (name, filename, int(line)) if line.isdigit() else None


def weak_lowering(lowered: Any) -> Callable[[], Any]:
    """Return a weak reference to what JAX keeps of a lowered program, and compiles once."""
    try:
        return weakref.ref(lowered._lowering)
    except (AttributeError, TypeError):
        # What is compiled can't be asked for its memory, then, nor for callbacks.
        return _do_nothing


def memory_of(lowering: Any) -> tuple[int, ...] | None:
    """Return the bytes of a compiled program's arguments, outputs, both, and temporaries."""
    try:
        stats = lowering._executable.memory_analysis()
        names = "argument", "output", "alias", "temp"
        return tuple([getattr(stats, f"{name}_size_in_bytes") for name in names])
    except (AttributeError, NotImplementedError, RuntimeError):
        # Not compiled, gone, of another release, or of a backend that can't tell.
        return None


def has_host_callback(lowering: Any) -> bool:
    """Return whether a lowered program calls Python, so that JAX never caches it in a file."""
    arguments = getattr(lowering, "compile_args", None)
    return bool(arguments and arguments.get("host_callbacks"))
