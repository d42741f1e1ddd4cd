"""Every private name of JAX, Equinox and CPython that eqxjit uses: its reason and its fallback.

So is the native back end, which isn't there everywhere.

Each name is looked up once, at import. Where a release no longer has it, the fallback is slower or
less pretty, never wrong, so that a new release of JAX or Equinox is a change of this file alone.
"""

import logging
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


def _do_nothing(*_: Any) -> Any:
    # The fallback of functions that only make something prettier.
    return ()


# --- The native back end ----------------------------------------------------------------------

#: Which back end is in use, and why.
why_back_end = "native"

try:
    from . import _native

    # That of `_native.c` as it is now: it may have been built from an older one.
    if getattr(_native, "INTERFACE", None) != 59:
        raise ImportError
except ImportError:
    # No compiler where it was installed, or another Python: Python serves.
    _native = None
    why_back_end = "Python, because the native one isn't built (no C compiler at installation?)"

_IS_NATIVE = switch("EQXJIT_NATIVE")
if _IS_NATIVE is False:
    _native = None
    why_back_end = "Python, because EQXJIT_NATIVE=0"
elif _IS_NATIVE and _native is None:
    raise ImportError(
        "`EQXJIT_NATIVE=1` asks for a native back end, and none is built for this Python. Install "
        "a C compiler and Python's headers, then eqxjit again, by `pip install --force-reinstall "
        "--no-deps`; or unset the variable."
    )

#: `native.c`'s module; None where there is none, or `EQXJIT_NATIVE=0` says so.
native: Any = _native

if TYPE_CHECKING or _native is not None:
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

try:
    # The concrete class of arrays. `type(x) is ArrayImpl` is ten times cheaper than
    # `isinstance(x, jax.Array)`, and asking an array for its type would start a backend.
    import jax._src.array

    ArrayImpl: type = jax._src.array.ArrayImpl
except (ImportError, AttributeError):
    # No value has this type: each leaf then takes the check by `equinox.is_array`.
    ArrayImpl = type("ArrayImpl", (), {})


try:
    # What Equinox puts in the place of a field that an instance lacks.
    from equinox._module._flatten import MISSING
except ImportError:
    # No field is ever this object: Modules are then read through the pytree registry.
    MISSING = object()

#: `fields_of(module)` is `module.__dict__` by its C-level descriptor, which runs no Python.
fields_of: Callable[[Any], dict[str, Any]] = vars(eqx.Module)["__dict__"].__get__

# --- Structures -------------------------------------------------------------------------------

#: `flatten_one_level(node)` is `(children, metadata)`; None for a leaf.
flatten_one_level: Callable[[Any], tuple[Any, Any] | None] = default_registry.flatten_one_level

_LEAF = tree_structure(0)


class _AllClasses(dict[type, Any]):
    """The fallback of the registered classes: each may be one."""

    def __contains__(self, kind: object) -> bool:
        return True


try:
    #: The classes that were registered as nodes, of which JAX asks before it looks for the fields
    #: of a named tuple. JAX's public `is_tree_node` doesn't tell these two apart.
    from jax._src.tree_util import _registry as registered_nodes

    _ = registered_nodes[tuple].from_iter
except (ImportError, AttributeError, KeyError):
    # All named tuples are then taken apart by JAX, which is slower; registered ones are refused.
    registered_nodes: Any = _AllClasses()


def unflatten_node(kind: type, metadata: Any, children: list[Any]) -> Any:
    """Return the object that JAX's registry makes of a node's metadata and children."""
    registered = registered_nodes.get(kind)
    if registered is not None:
        return registered.from_iter(metadata, tuple(children))
    if metadata is kind and issubclass(kind, tuple):
        # A named tuple that isn't registered.
        return kind(*children)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        # Of these the call below would make named tuples, whatever they are registered as.
        raise TypeError(f"This release of JAX doesn't tell how `{kind.__name__}` is registered.")
    make: Any = type(_LEAF).from_node_data_and_children
    return make(default_registry, (kind, metadata), [_LEAF] * len(children)).unflatten(children)


# --- Tracing ----------------------------------------------------------------------------------

try:
    # The trace that JAX is in, and whether it folds constants eagerly: reading both takes 0.2 µs,
    # asking by an addition (the fallback, and what Equinox does) 17.
    from jax._src.config import eager_constant_folding as _eager_constant_folding
    from jax._src.core import EvalTrace as _EvalTrace
    from jax._src.core import trace_ctx as _trace_ctx
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace as _StagingTrace

    # Present in each trace, or the walk below would stop too early.
    _ = _trace_ctx.trace, _eager_constant_folding.value
except (ImportError, AttributeError):

    def is_tracing() -> bool:
        return isinstance(jnp.array(1) + 1, Tracer)

    is_staging = is_transforming = is_tracing

else:

    def is_staging() -> bool:
        """Return whether an operation on constants would be staged out into a jaxpr right now."""
        return not _eager_constant_folding.value and is_tracing()

    def is_transforming() -> bool:
        """Return whether a transformation is under way, `vmap` and `grad` included."""
        return not isinstance(_trace_ctx.trace, _EvalTrace)

    def is_tracing() -> bool:
        """Return whether a jaxpr is being made, also where constants are folded eagerly."""
        trace = _trace_ctx.trace
        # Those of `vmap` and `grad` pass constants on, that of an eager `shard_map` doesn't.
        while not isinstance(trace, _StagingTrace) and hasattr(trace, "parent_trace"):
            trace = trace.parent_trace
        return not isinstance(trace, _EvalTrace)


try:
    # How JAX names a function and its arguments, where the function tells (`__fun_debug_info__`).
    from jax._src.api_util import debug_info as _debug_info

    _unnamed: Any = _debug_info("jit", lambda: None, (), {})
    _ = _unnamed._replace(func_src_info="f at f.py:1", arg_names=("x",)).safe_arg_names(1)
except (ImportError, AttributeError, TypeError, ValueError):
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
        if isinstance(value, np.ndarray):
            setattr(tracer, name, np.ndarray.copy(value))
        elif isinstance(value, Tracer):
            copy_in_tracer(value)
        elif hasattr(value, "__array__") and not isinstance(value, jax.Array):
            # JAX 0.8 wraps NumPy's arrays in a class of its own.
            setattr(tracer, name, np.array(value))


def is_sharded_aval(aval: Any) -> bool:
    """Return whether a traced array is sharded by its type, or one shard inside `jax.shard_map`."""
    # The names have changed from release to release. Without them such arrays share buffers with
    # others, which then become sharded as they are.
    manual = getattr(aval, "manual_axis_type", None)
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    return bool(
        getattr(manual, "varying", None)
        or getattr(aval, "vma", None)
        or any(axis is not None for axis in spec)
    )


# --- Errors -----------------------------------------------------------------------------------

try:
    # Equinox smuggles the message and the stack of a runtime error out of its callback here.
    import equinox._jit as _eqx_jit

    _ = _eqx_jit.last_error_info
    #: The text around a runtime error's message: `{stack}` and `{msg}` are to be filled in.
    runtime_error_text: str = _eqx_jit._on_error_msg
except (ImportError, AttributeError):
    _eqx_jit = None
    runtime_error_text = "{stack}\nequinox.EquinoxRuntimeError: {msg}\n"


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

try:
    # JAX leaves frames of these files out of tracebacks, and of the places that it logs.
    from jax._src.source_info_util import register_exclusion as exclude_from_locations
    from jax._src.traceback_util import register_exclusion as exclude_from_tracebacks
except ImportError:
    # Tracebacks and JAX's logs then show a few lines of ours.
    exclude_from_locations = exclude_from_tracebacks = _do_nothing


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

try:
    # The class of what `equinox.filter_jit` returns, and its jitted functions, by their options.
    from equinox._jit import _filter_jit_cache
    from equinox._jit import _JitWrapper as UpstreamWrapper
    from equinox._jit import filter_jit as upstream_filter_jit

    # Another field might be another option.
    if {*UpstreamWrapper.__dataclass_fields__} != {
        *("fn", "_signature", "_dynamic_fun", "_static_fun", "_cached"),
        *("filter_warning", "donate_first", "donate_rest"),
    }:
        raise ImportError
except (ImportError, AttributeError):
    # Wrappers made before `eqxjit.install()` then go on using upstream's.
    UpstreamWrapper = _filter_jit_cache = None
    upstream_filter_jit = eqx.filter_jit


def upstream_donation(wrapper: Any) -> Any:
    """Return the `donate` of an upstream wrapper; None if it has other options, too."""
    assert _filter_jit_cache is not None
    if _jit_options(wrapper._cached) != _jit_options(_filter_jit_cache(wrapper.__wrapped__, {})):
        return None
    if not wrapper.donate_rest:
        return "none"
    donate = "all" if wrapper.filter_warning else "warn"
    return donate if wrapper.donate_first else f"{donate}-except-first"


def _jit_options(jitted: Any) -> Any:
    """Return JAX's record of a jitted function's options; the function if there is none."""
    try:
        return jitted._jit_info._replace(fun_sourceinfo=None, fun_signature=None)
    except (AttributeError, TypeError, ValueError):
        # Of equal options Equinox makes one, until its caches are cleared.
        return jitted


# --- What tracing depends on ------------------------------------------------------------------

_USERS_NAMES = {
    "abstract_mesh_context_manager": "mesh (jax.set_mesh)",
    "mesh_context_manager": "mesh (with mesh:)",
    "axis_env_state": "axis names of an outer transformation",
}

try:
    # JAX's list of what its cache of traces is keyed by, and the values.
    from jax._src.config import trace_context, trace_context_names

    if len(trace_context_names()) != len(trace_context()):
        raise ImportError
except (ImportError, AttributeError, NotImplementedError, TypeError, ValueError):
    # Another release's, such as 0.8: explanations then name the mesh, and what numbers depend on.
    _SETTINGS = (
        *("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable"),
        *("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_default_device"),
    )
    trace_context_names = lambda: ("abstract_mesh_context_manager", *_SETTINGS)  # noqa: E731

    def trace_context() -> Any:
        settings = [getattr(jax.config, name, None) for name in _SETTINGS]
        return jax.sharding.get_abstract_mesh(), *settings


def trace_configuration() -> dict[str, Any]:
    """Return what JAX's programs depend on beside arguments: the value of each name."""
    # Asked for each time: `jax.make_user_context` adds to them, always under one name.
    pairs = enumerate(zip(trace_context_names(), trace_context(), strict=False))
    return {
        f"{name} {i}" if name == "user_context" else _USERS_NAMES.get(name, name): value
        for i, (name, value) in pairs
    }


# --- Programs ---------------------------------------------------------------------------------


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
