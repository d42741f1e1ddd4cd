"""Every private name of JAX, Equinox and CPython that eqxjit uses: its reason and its fallback.

So is the native back end, which isn't there everywhere.

Each name is looked up once, at import. Where a release no longer has it, the fallback is slower or
less pretty, never wrong, so that a new release of JAX or Equinox is a change of this file alone.
"""

import itertools
import logging
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.tree_util import default_registry, tree_structure

if TYPE_CHECKING:
    # JAX's stubs have a variable of this name, which a type checker won't take for a type.
    PyTreeDef = Any
else:
    from jax.tree_util import PyTreeDef

_T = TypeVar("_T")

# --- The native back end ----------------------------------------------------------------------

try:
    from . import _native

    # That of `_native.c` as it is now: it may have been built from an older one.
    if getattr(_native, "INTERFACE", None) != 11:
        raise ImportError
except ImportError:
    # No compiler where it was installed, or another Python: Python serves.
    _native = None


def native_back_end():  # A return type would hide what is in it.
    """Return `_native.c`'s module; None where there is none, or `EQXJIT_NATIVE=0` says so."""
    return None if os.environ.get("EQXJIT_NATIVE") == "0" else _native


def call_in_flight(entry: Any) -> Any:
    """Return whose call of an entry the native back end is making, and its arguments."""
    assert _native is not None
    return _native.in_flight(entry)


class _Delegate:
    """A base of classes whose instances are called by their `target`: as of `_native.c`."""

    __slots__ = ("target",)

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _as_it_is(cls: type[_T]) -> type[_T]:
    return cls


if TYPE_CHECKING or native_back_end() is None:
    Delegate, call_directly = _Delegate, _as_it_is
else:
    # CPython calls their instances without a look at `__call__`, and without a tuple of arguments.
    Delegate, call_directly = _native.Delegate, _native.call_directly


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

#: Raised by XLA when a program fails, for instance in a callback.
JaxRuntimeError: type[Exception] = getattr(jax.errors, "JaxRuntimeError", RuntimeError)


try:
    #: `fields_of(module)` is `module.__dict__` by its C-level descriptor, which runs no Python.
    fields_of: Callable[[Any], dict[str, Any]] = vars(eqx.Module)["__dict__"].__get__
except (KeyError, AttributeError):

    def fields_of(module: Any, /) -> dict[str, Any]:
        return object.__getattribute__(module, "__dict__")


try:
    # What JAX calls in Python where no program of a jitted function fits: its frame shows whose
    # jitted function it is.
    import jax._src.pjit

    [_CACHE_MISS] = [
        code
        for code in jax._src.pjit._cpp_pjit.__code__.co_consts
        if getattr(code, "co_name", "") == "cache_miss" and "fun" in code.co_freevars
    ]
    _PjitFunction = type(jax.jit(abs))
except (ImportError, AttributeError, ValueError):
    # Calls of the native back end then keep a frame of their own, by which they are found.
    _CACHE_MISS = _PjitFunction = None


def is_found_by_frame(jitted: Any) -> bool:
    """Return whether `function_missed_in` finds what is jitted where JAX has no program for it."""
    return _PjitFunction is not None and type(jitted) is _PjitFunction


def function_missed_in(frame: FrameType) -> Any:
    """Return the function that is jitted, if a frame is JAX's for want of a program; or None."""
    return frame.f_locals.get("fun") if frame.f_code is _CACHE_MISS else None


# --- Structures -------------------------------------------------------------------------------

# A row a node, leaves and `None` included, in post-order: (kind, arity, node data, custom type).
TreedefRow = tuple[Any, int, Any, Any]


def _rows_by_walking(treedef: PyTreeDef) -> Iterator[TreedefRow]:
    """Yield the rows of a treedef by its public methods: a Python call a node."""
    pending: list[tuple[PyTreeDef, bool]] = [(treedef, False)]
    while pending:
        node, children_done = pending.pop()
        children = node.children()
        if children and not children_done:
            pending.append((node, True))
            pending.extend((child, False) for child in reversed(children))
            continue
        data = node.node_data()
        if data is None:
            yield "leaf", 0, None, None
        else:
            yield "node", len(children), data[1], data[0]


_first_columns = operator.itemgetter(slice(4))


def _pickled_rows(treedef: PyTreeDef) -> list[tuple[Any, ...]]:
    return treedef.__getstate__()[1]  # type: ignore[misc]


def _rows_by_pickling(treedef: PyTreeDef) -> Iterator[TreedefRow]:
    """Yield the rows of a treedef by the state that it pickles: one C call for the whole tree."""
    return map(_first_columns, _pickled_rows(treedef))


def _pickled_rows_are_as_expected() -> bool:
    try:
        rows = [*_rows_by_pickling(tree_structure((1, {"a": None}, eqx.Partial(max, 2))))]
    except Exception:
        return False
    data = [row[2] for row in rows]
    return len(rows) == 9 and ["a"] in data and rows[-2][3] is eqx.Partial


#: The nodes of a treedef, flat. Pickling hands them over in C, 4 times faster than walking.
treedef_rows: Callable[[PyTreeDef], Iterator[TreedefRow]] = (
    _rows_by_pickling if _pickled_rows_are_as_expected() else _rows_by_walking
)

#: The same by column: a tuple each of kinds, arities, node data and custom types.
TreedefColumns = tuple[tuple[Any, ...], tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]


def treedef_columns(treedef: PyTreeDef) -> TreedefColumns:
    """Return the columns of `treedef_rows`, without a tuple for each row where there is one."""
    is_pickled = treedef_rows is _rows_by_pickling
    rows = _pickled_rows(treedef) if is_pickled else [*treedef_rows(treedef)]
    kinds, arities, data, classes = itertools.islice(zip(*rows, strict=True), 4)
    return kinds, arities, data, classes


LEAF_TREEDEF = tree_structure(0)

#: What the row of a leaf has as its kind.
LEAF_KIND = next(treedef_rows(LEAF_TREEDEF))[0]

#: The classes of the kinds of rows that tell them, as those of custom nodes do not.
KIND_CLASSES: dict[Any, type] = {
    [*treedef_rows(tree_structure(node))][-1][0]: type(node) for node in (None, (), [], {})
}


def _root_by_flattening(treedef: PyTreeDef) -> PyTreeDef:
    """Return the treedef of the root alone, from such a node, by public functions."""
    node = treedef.unflatten([None] * treedef.num_leaves)
    return tree_structure(node, is_leaf=lambda subtree: subtree is not node)


#: Whether treedefs can be put together from node data.
CAN_ASSEMBLE = hasattr(PyTreeDef, "from_node_data_and_children")


def assembled(node_data: Any, children: list[PyTreeDef]) -> PyTreeDef:
    """Return the treedef of a node, without making an object of the user's class."""
    return PyTreeDef.from_node_data_and_children(  # type: ignore[attr-defined]
        default_registry, node_data, children
    )


def _root_by_node_data(treedef: PyTreeDef) -> PyTreeDef:
    children = [LEAF_TREEDEF] * len(treedef.children())
    return assembled(treedef.node_data(), children)


#: The treedef of a tree's root, with leaves in the place of all its children.
root_treedef: Callable[[PyTreeDef], PyTreeDef] = (
    _root_by_node_data if CAN_ASSEMBLE else _root_by_flattening
)


def unflatten_node(kind: type, metadata: Any, children: list[Any]) -> Any:
    """Return the object that JAX's registry makes of a node's metadata and children."""
    return assembled((kind, metadata), [LEAF_TREEDEF] * len(children)).unflatten(children)


def with_metadata(treedef: PyTreeDef, change: Callable[[Any], Any]) -> PyTreeDef:
    """Return the treedef with `change` of each node's metadata, or the same where it can't be."""
    if not CAN_ASSEMBLE:
        return treedef
    made: list[PyTreeDef] = []
    pending: list[tuple[PyTreeDef, bool]] = [(treedef, False)]
    while pending:
        node, children_made = pending.pop()
        node_data, children = node.node_data(), node.children()
        if node_data is None or node_data[0] is type(None):
            made.append(node)
        elif not children_made:
            pending.append((node, True))
            pending.extend((child, False) for child in reversed(children))
        else:
            kind, metadata = node_data
            start = len(made) - len(children)
            made[start:] = [assembled((kind, change(metadata)), made[start:])]
    [whole] = made
    return whole


# --- Tracing ----------------------------------------------------------------------------------

try:
    # The trace that JAX is in, and whether it folds constants eagerly: reading both takes 0.2 µs,
    # asking by an addition (the fallback, and what Equinox does) 17.
    from jax._src.config import eager_constant_folding as _eager_constant_folding
    from jax._src.core import trace_ctx as _trace_ctx
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace as _StagingTrace

    # Present in each trace, or the walk below would stop too early.
    _ = _trace_ctx.trace, _eager_constant_folding.value
except (ImportError, AttributeError):

    def is_staging() -> bool:
        return isinstance(jnp.array(1) + 1, Tracer)

else:

    def is_staging() -> bool:
        """Return whether an operation on constants would be staged out into a jaxpr right now."""
        if _eager_constant_folding.value:
            return False
        trace = _trace_ctx.trace
        while trace is not None:
            if isinstance(trace, _StagingTrace):
                return True
            trace = getattr(trace, "parent_trace", None)
        return False


try:
    # How JAX names a function and its arguments, where the function tells (`__fun_debug_info__`).
    from jax._src.api_util import debug_info as _debug_info

    _UNNAMED: Any = _debug_info("jit", lambda: None, (), {})

    def debug_info(source: str, argument_names: tuple[str, ...]) -> Any:
        """Return JAX's record of the names of a function and its arguments; None for its own."""
        return _UNNAMED._replace(func_src_info=source, arg_names=argument_names)

    _ = debug_info("f at f.py:1", ("x",)).safe_arg_names(1)
except Exception:
    # Arguments are then called `leaves[0]`; the function's name and place are told otherwise.

    def debug_info(source: str, argument_names: tuple[str, ...]) -> Any:
        return None


#: Whether JAX is one of those for which `drop_slow_dispatch` does something.
DROPS_SLOW_DISPATCH = jax.__version_info__ >= (0, 10)


def drop_slow_dispatch(jitted: Any) -> None:
    """Empty JAX's table, in C++, of the programs of one jitted function; nothing is compiled anew.

    JAX marks the arguments of a call that failed, as one does that has to go through the miss path:
    all later calls with such are dispatched in Python, at several times the cost. The method is
    private; in older releases it makes threads that call at once trace anew. Without it those calls
    stay slow.
    """
    drop = getattr(jitted, "_clear_cache", None)
    if drop is not None and DROPS_SLOW_DISPATCH:
        drop()


def wrapped_by_tracer(tracer: Tracer) -> list[Any]:
    """Return the values that a tracer of `vmap`, `jvp` or `grad` wraps; none where it is one of
    `jit`.

    The attributes are private. Without them a program that can raise isn't waited for there.
    """
    values = [getattr(tracer, name, None) for name in ("val", "primal", "tangent")]
    return [value for value in values if isinstance(value, jax.Array)]


def is_sharded_aval(aval: Any) -> bool:
    """Return whether a traced array is sharded by its type, or one shard inside `jax.shard_map`.

    The names have changed from release to release. Without them such arrays share buffers with
    others, which then become sharded as they are.
    """
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
    runtime_error_text = "{stack}\nequinox.EquinoxRuntimeError: {msg}\n"

    def last_runtime_error() -> tuple[str | None, list[bytes | str]]:
        return None, []

else:

    def last_runtime_error() -> tuple[str | None, list[bytes | str]]:
        """Return the message and the stack, inside out, of Equinox's latest runtime error."""
        return _eqx_jit.last_error_info or (None, [])


#: The local variable by which Equinox recognises, on the stack, the frame of a jitted call.
JITTED_FRAME_MARK = "__equinox_jit_id__"

#: What Equinox's callback raises; the type itself is private to `equinox._errors`.
CALLBACK_ERROR_NAME = "_EquinoxRuntimeError"


class _DropEquinoxErrors(logging.Filter):
    """A filter that drops JAX's own log of a failed `eqx.error_if`: the error is raised anyway."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return type(error).__name__ != CALLBACK_ERROR_NAME


# JAX logs inside the callback, before any `except` of ours. One permanent filter that looks at the
# exception replaces the two changes of the logger that upstream makes on every call.
logging.getLogger("jax._src.callback").addFilter(_DropEquinoxErrors())

try:
    # Frames of these files are left out of filtered tracebacks, as JAX leaves out its own.
    from jax._src.traceback_util import register_exclusion as exclude_from_tracebacks
except ImportError:

    def exclude_from_tracebacks(path: str) -> None:
        """Do nothing: without the registry a traceback shows a few frames of ours."""


try:
    # And these aren't where JAX says that an operation, or a call, was made.
    from jax._src.source_info_util import register_exclusion as exclude_from_locations
except ImportError:

    def exclude_from_locations(path: str) -> None:
        """Do nothing: without the registry JAX's logs name a line of ours."""


# --- Lowered programs -------------------------------------------------------------------------


def lowered_operations(module: Any) -> list[tuple[str, str]] | None:
    """Return the name of each operation in a lowered program and, for a custom call, its target.

    None where JAX no longer lowers to a module that can be walked.
    """
    found: list[tuple[str, str]] = []
    # Not `walk`, which turns an interrupt in what it calls into an error of its own.
    pending: list[Any] = [module]
    try:
        while pending:
            operation = pending.pop().operation
            name = operation.name
            is_call = name == "stablehlo.custom_call"
            found.append((name, operation.attributes["call_target_name"].value if is_call else ""))
            for region in operation.regions:
                for block in region.blocks:
                    pending.extend(block.operations)
    except Exception:
        return None
    return found


def jaxpr_lowered_in(frame: FrameType) -> Any:
    """Return the closed jaxpr that a function of JAX lowers, from its frame; None if it isn't
    there.

    To be asked for it, JAX goes through all arguments again: as long as a first call's own work.
    """
    return _local_of_class(frame, ClosedJaxpr)


def module_compiled_in(frame: FrameType) -> Any:
    """Return the lowered program that a function of JAX compiles, as `jaxpr_lowered_in`."""
    try:
        from jaxlib.mlir.ir import Module
    except ImportError:
        return None
    return _local_of_class(frame, Module)


def _local_of_class(frame: FrameType, cls: type) -> Any:
    return next((value for value in frame.f_locals.values() if type(value) is cls), None)


# --- Warnings ---------------------------------------------------------------------------------


def warning_filters() -> list[Any]:
    """Return the filters of warnings, the first to match first; since Python 3.14 they may be a
    context's.

    `warnings.filterwarnings` takes nothing but a regular expression.
    """
    find = getattr(warnings, "_get_filters", None)
    return warnings.filters if find is None else find()  # type: ignore[return-value]


# --- Caches -----------------------------------------------------------------------------------

try:
    # The functions that `equinox.clear_caches()` calls.
    from equinox._caches import cache_clears as _cache_clears
except ImportError:
    _cache_clears = []


def clear_with_equinox(clear: Callable[[], None]) -> None:
    """Make `equinox.clear_caches()` call `clear` too."""
    _cache_clears.append(clear)


# --- Upstream's wrappers ----------------------------------------------------------------------

try:
    # The class of what `equinox.filter_jit` returns, and its jitted functions, by their options.
    from equinox._jit import _filter_jit_cache
    from equinox._jit import _JitWrapper as UpstreamWrapper
    from equinox._jit import filter_jit as upstream_filter_jit

    #: Whether upstream's wrappers can be read: another field might be another option.
    upstream_is_known: bool = {*UpstreamWrapper.__dataclass_fields__} == {
        "fn",
        "_signature",
        "_dynamic_fun",
        "_static_fun",
        "_cached",
        "filter_warning",
        "donate_first",
        "donate_rest",
    }
except (ImportError, AttributeError):
    # Wrappers made before `eqxjit.install()` then stay upstream's, and are only named.
    upstream_is_known, _filter_jit_cache = False, None
    upstream_filter_jit = eqx.filter_jit
    _made = type(eqx.filter_jit(lambda: None))
    # If it were a plain function, every function would be taken for a wrapper.
    UpstreamWrapper = _made if issubclass(_made, eqx.Module) else type("UpstreamWrapper", (), {})

# By `filter_warning`, `donate_first` and `donate_rest`.
_DONATIONS = {
    (False, False, False): "none",
    (True, True, True): "all",
    (True, False, True): "all-except-first",
    (False, True, True): "warn",
    (False, False, True): "warn-except-first",
}


def upstream_donation(wrapper: Any) -> str | None:
    """Return the `donate` of an upstream wrapper; None if it can't be read."""
    if not upstream_is_known or _has_jit_options(wrapper):
        return None
    return _DONATIONS.get((wrapper.filter_warning, wrapper.donate_first, wrapper.donate_rest))


def _has_jit_options(wrapper: Any) -> bool:
    assert _filter_jit_cache is not None
    jitted, plain = wrapper._cached, _filter_jit_cache(wrapper.__wrapped__, {})
    # Two of the same options, if `equinox.clear_caches()` was called meanwhile.
    return jitted is not plain and _jit_options(jitted) != _jit_options(plain)


def _jit_options(jitted: Any) -> list[Any]:
    """Return the options of a function under `jax.jit`; the function if JAX keeps none."""
    try:
        pairs = jitted._jit_info._asdict().items()
    except AttributeError:
        return [jitted]
    return [value for name, value in pairs if name not in ("fun_sourceinfo", "fun_signature")]


# --- What tracing depends on ------------------------------------------------------------------

# Settings of `jax.config` that a program may depend on. Only those that exist are looked at.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_device",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_optimization_level",
)
_USERS_NAMES = {
    "abstract_mesh_context_manager": "mesh (jax.set_mesh)",
    "mesh_context_manager": "mesh (with mesh:)",
    "axis_env_state": "axis names of an outer transformation",
}


def _context_without_names() -> tuple[Any, ...]:
    return (getattr(jax.sharding, "get_abstract_mesh", lambda: None)(),)


try:
    from jax._src.config import trace_context as _trace_context
    from jax._src.config import trace_context_names as _trace_context_names

    _CONTEXT_NAMES: tuple[str, ...] = tuple(_trace_context_names())
    # JAX's own list of what its cache of traces is keyed by.
    if len(_CONTEXT_NAMES) != len(_trace_context()):
        raise ImportError
except Exception:
    _CONTEXT_NAMES = ("abstract_mesh_context_manager",)
    _trace_context = _context_without_names


def trace_configuration() -> dict[str, str]:
    """Return what JAX's programs depend on beside arguments: the name and the value of each."""
    global _last_configuration
    values = _trace_context(), [getattr(jax.config, name, None) for name in _SETTINGS]
    last_values, texts = _last_configuration
    try:
        is_as_before = values == last_values
    except Exception:
        # A `jax` context of the user's own may hold anything.
        is_as_before = False
    if not is_as_before:
        by_name = {
            **dict(zip(_SETTINGS, values[1], strict=True)),
            **dict(zip(_CONTEXT_NAMES, values[0], strict=True)),
        }
        texts = {_USERS_NAMES.get(name, name): _setting_text(v) for name, v in by_name.items()}
        _last_configuration = values, texts
    return texts


# Mostly as it was: texts are made when something has changed.
_last_configuration: tuple[Any, dict[str, str]] = None, {}


def _setting_text(value: Any) -> str:
    sizes = getattr(value, "axis_sizes", None)
    if isinstance(sizes, Mapping):
        # JAX's environment of axis names has no text of its own.
        return repr(dict(sizes))
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"


try:
    from jax._src.source_info_util import user_frames as _user_frames
except ImportError:

    def _user_frames(traceback: Any) -> Any:
        return ()


def source_line(equation: Any, library_files: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the file and line, not a library's, that made an equation of a jaxpr; or None."""
    try:
        for frame in _user_frames(equation.source_info.traceback):
            if not frame.file_name.startswith(library_files):
                return frame.file_name, frame.start_line
    except Exception:
        # Another release's signature: no line stands out.
        pass
    return None
