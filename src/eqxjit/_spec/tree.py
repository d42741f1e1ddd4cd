"""Pytrees taken apart and put together: the only code in Python that does either.

`split` returns the arrays of a tree, its static objects in order, and its **spec**: nested tuples
that are equal exactly if one program may serve both trees.

    spec = ARRAY | None | Static(key) | (kind, class, aux, child, ...)

Everything else reads specs: the table of entries, what JAX traces, outputs, both fast paths, and
explanations.
"""

import dataclasses
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import default_registry, keystr

from .._compat import ArrayImpl, fields_of, flatten_one_level, registered_nodes, unflatten_node
from .static_key import CONSTANTS, THEMSELVES, Opaque, Static, static_key

#: Stands for an array in a spec.
ARRAY = object()

#: The kinds of nodes, and their aux; as in `native.c`.
#: - a tuple or list: None; a named tuple: whether its class, called, does no more than `tuple`.
#: - a dict whose keys are all of type `str`: these, sorted.
#: - a Module that has all its fields and nothing else: their names, static ones last.
#: - anything else that JAX's registry takes for a node: its metadata, a `Static`.
SEQUENCE, DICT, MODULE, NODE = range(4)

Spec = Any


# --- Classes --------------------------------------------------------------------------------------

_MODULE_METACLASS = type(eqx.Module)

#: The classes of most arrays: `equinox.is_array` takes five times as long.
ARRAY_CLASSES = frozenset({ArrayImpl, np.ndarray, *np.sctypeDict.values()})

# Classes of static leaves that nobody registers as a node: those of most activations.
_NEVER_NODES = CONSTANTS | {
    *(types.FunctionType, types.BuiltinFunctionType, type, type(jax.jit(abs))),
    *(jax.custom_jvp, jax.custom_vjp),
}


def is_array(leaf: Any) -> bool:
    """Return what `equinox.is_array` does, faster; a node is no array, whatever its class."""
    return type(leaf) in ARRAY_CLASSES or (
        bool(eqx.is_array(leaf)) and flatten_one_level(leaf) is None
    )


# Of classes of Modules alone: the cache would keep others alive.
@functools.lru_cache(maxsize=4096)
def module_fields(cls: type) -> tuple[tuple[str, ...], frozenset[str], int] | None:
    """Return the names of a Module class's fields in order and as a set, and how many are dynamic.

    Static ones come last. None if instances have a say in reading them.
    """
    # What the instance's `__dict__` holds would not be what the user reads.
    if cls.__getattribute__ is not eqx.Module.__getattribute__:
        return None
    fields = dataclasses.fields(cls)
    static = [field.name for field in fields if field.metadata.get("static", False)]
    dynamic = [field.name for field in fields if field.name not in static]
    names = (*dynamic, *static)
    return names, frozenset(names), len(dynamic)


@functools.lru_cache(maxsize=1024)
def _named_tuple_aux(kind: Any) -> bool | None:
    """Return the aux of a class of named tuples; None for other classes."""
    if not hasattr(kind, "_fields"):
        return None
    # As `collections.namedtuple` makes it.
    module = getattr(kind.__new__, "__module__", None) or ""
    return kind.__bases__ == (tuple,) and module.startswith("namedtuple_")


# --- Taking apart ---------------------------------------------------------------------------------


#: What `split` returns: the spec, the arrays and the static objects, in the order of the spec.
Parts = tuple[Spec, list[Any], list[Any]]


def split(tree: Any, is_input: bool = True, more_arrays: tuple[type, ...] = ()) -> Parts:
    """Take a pytree apart in one pass: return its spec, its arrays and its static objects.

    Arrays are those of `equinox.is_array`, and leaves of the classes `more_arrays`. Static leaves
    of an input must be hashable, as Equinox asks of arguments. Raises whatever a flatten or a
    `__hash__` of the user's raises, and a `RecursionError` for a tree that contains itself or is
    too deep; `failed_levels` tells where.
    """
    arrays: list[Any] = []
    statics: list[Any] = []
    return _split(tree, arrays, statics, is_input, more_arrays), arrays, statics


def _split(
    value: Any,
    arrays: list[Any],
    statics: list[Any],
    is_input: bool,
    more_arrays: tuple[type, ...],
) -> Spec:
    # One function, because each level of a deep tree takes as many frames as there are calls here.
    kind = type(value)
    if kind is ArrayImpl:
        arrays.append(value)
        return ARRAY
    if kind in CONSTANTS:
        if value is None:
            return None
        statics.append(value)
        return Static(value if kind in THEMSELVES else static_key(value))
    spec: list[Any] | None = None
    fixed: Sequence[Any] = ()
    try:
        if kind is tuple or kind is list:
            spec, below = [SEQUENCE, kind, None], value
        elif (
            issubclass(type(kind), _MODULE_METACLASS)
            and (fields := module_fields(kind)) is not None
            # One may lack a field, or have others, as a wrapper's `__doc__`.
            and (found := fields_of(value)).keys() == fields[1]
        ):
            names, _, n = fields
            values = [*map(found.__getitem__, names)]
            spec, below, fixed = [MODULE, kind, names], values[:n], values[n:]
        # A dict with other keys is a node, whose metadata are its keys and their types.
        elif kind is dict and {*map(type, value)} <= {str}:
            # As JAX does: arrays come in its order.
            keys = tuple(sorted(value))
            spec, below = [DICT, dict, keys], [value[key] for key in keys]
        # Activations and the like are most static leaves of a model.
        elif kind is types.FunctionType:
            return _split_leaf(value, statics, is_input)
        elif kind in ARRAY_CLASSES:
            arrays.append(value)
            return ARRAY
        elif (
            issubclass(kind, tuple)
            and (aux := _named_tuple_aux(kind)) is not None
            # It may be registered after its first use.
            and kind not in registered_nodes
        ):
            spec, below = [SEQUENCE, kind, aux], tuple.__iter__(value)
        else:
            # All else may be a node of a registered class, and may become one between two calls.
            flat = flatten_one_level(value)
            if flat is None:
                if eqx.is_array(value) or isinstance(value, more_arrays):
                    arrays.append(value)
                    return ARRAY
                return _split_leaf(value, statics, is_input)
            below, metadata = flat
            statics.append(metadata)
            spec = [NODE, kind, _static(metadata)]
        for child in below:
            if type(child) is ArrayImpl:
                arrays.append(child)
                spec.append(ARRAY)
            elif child is None:
                spec.append(None)
            else:
                spec.append(_split(child, arrays, statics, is_input, more_arrays))
        # JAX doesn't look into static fields: whatever is there is one static object.
        for child in fixed:
            statics.append(child)
            spec.append(Static(child) if type(child) in THEMSELVES else _static(child))
    except Exception as error:
        _add_level(error, FailedLevel(value, spec))
        raise
    return tuple(spec)


def _static(value: Any, ask: bool = False) -> Any:
    """Return what a spec has for a static object."""
    try:
        return Static(static_key(value), ask)
    except Exception as error:
        _add_level(error, FailedLevel(value, None, is_static=True))
        raise


def _split_leaf(value: Any, statics: list[Any], is_input: bool) -> Spec:
    kind = type(value)
    ask = kind not in _NEVER_NODES
    try:
        key = static_key(value)
        if ask and is_input and (type(key) is not Opaque or key.hash is None):
            # Equinox refuses what can't be hashed, so that nothing here changes unseen.
            hash(value)
    except Exception as error:
        _add_level(error, FailedLevel(value, None, is_static=True))
        raise
    statics.append(value)
    return Static(key, ask)


# --- Where taking apart failed --------------------------------------------------------------------


class FailedLevel(NamedTuple):
    """A level of a tree whose `split` failed.

    - `value`: the node, or the static object.
    - `spec`: the spec of a node up to the child that failed; `None` if the node itself failed.
    - `is_static`: whether taking the key of a static object failed.
    """

    value: Any
    spec: Sequence[Any] | None
    is_static: bool = False


# The name under which an exception has its levels, innermost first. Each level adds itself as the
# exception passes it, because to take the tree apart again would run the user's code again.
_LEVELS = "__eqxjit_levels__"


def _add_level(error: Exception, level: FailedLevel) -> None:
    vars(error).setdefault(_LEVELS, []).append(level)


def failed_levels(error: Exception) -> list[FailedLevel]:
    """Return the levels at which a `split` failed, innermost first; the error then forgets them."""
    return vars(error).pop(_LEVELS, [])


# --- Putting together -----------------------------------------------------------------------------


def combine(spec: Spec, arrays: Iterator[Any], statics: Iterator[Any]) -> Any:
    """Put a pytree together from its arrays and static objects: the reverse of `split`."""
    if spec is ARRAY:
        return next(arrays)
    if spec is None:
        return None
    if type(spec) is not tuple:
        return next(statics)
    kind, cls, aux = spec[:3]
    metadata = next(statics) if kind == NODE else None
    below = []
    # Not a comprehension, which takes a frame for each level of a deep tree.
    for child in spec[3:]:
        if child is ARRAY:
            below.append(next(arrays))
        elif type(child) is tuple:
            below.append(combine(child, arrays, statics))
        else:
            below.append(None if child is None else next(statics))
    if kind == MODULE:
        # Past `__init__` and `__check_init__`, as Equinox's unflatten.
        module = object.__new__(cls)
        fields_of(module).update(zip(aux, below, strict=True))
        return module
    if kind == NODE:
        return unflatten_node(cls, metadata, below)
    if kind == DICT:
        return dict(zip(aux, below, strict=True))
    if cls is list:
        return below
    if aux is None:
        return tuple(below)
    return tuple.__new__(cls, below) if aux else cls(*below)


# --- Reading specs --------------------------------------------------------------------------------


def count_arrays(spec: Spec) -> int:
    return sum([part is ARRAY for part in parts_of(spec)])


def parts_of(spec: Spec) -> list[Spec]:
    """Return the spec of each node and leaf of a tree, outside in."""
    parts = [spec]
    # Not by recursion, because trees may be deep: the list grows while it is gone through.
    for part in parts:
        if type(part) is tuple:
            parts.extend(part[3:])
    return parts


def read_node(value: Any) -> tuple[list[str], list[Any], Any]:
    """Return what follows the path of a node of JAX's registry, its children, and its metadata."""
    keyed, metadata = default_registry.flatten_one_level_with_keys(value)  # type: ignore[misc]
    keyed = [*keyed]
    return [keystr((key,)) for key, _ in keyed], [child for _, child in keyed], metadata
