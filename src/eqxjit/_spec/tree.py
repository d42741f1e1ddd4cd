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
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import default_registry, keystr, tree_structure
from jaxtyping import PyTree

from .._compat import (
    ArrayImpl,
    fields_of,
    flatten_one_level,
    has_generated_new,
    registered_nodes,
    unflatten_node,
)
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
    return kind.__bases__ == (tuple,) and has_generated_new(kind)


def has_tracers(arrays: Sequence[Any]) -> bool:
    """Return whether some transformation passes its tracers in the place of arrays."""
    return not {*map(type, arrays)} <= ARRAY_CLASSES and any(
        isinstance(array, Tracer) for array in arrays
    )


# --- Taking apart ---------------------------------------------------------------------------------


#: What `split` returns: the spec, the arrays and the static objects, in the order of the spec.
Parts = tuple[Spec, list[Any], list[Any]]


def split(
    tree: PyTree,
    is_input: bool = True,
    more_arrays: tuple[type, ...] = (),
    key_of: Callable[[Any], Hashable] = static_key,
) -> Parts:
    """Take a pytree apart in one pass: return its spec, its arrays and its static objects.

    Arrays are those of `equinox.is_array`, and leaves of the classes `more_arrays`. Static leaves
    of an input must be hashable, as Equinox asks of arguments. The spec has `key_of(value)` for
    each static object that isn't a constant.

    Raises whatever a flatten or a `__hash__` of the user's raises, and a `RecursionError` for a
    tree that contains itself or is too deep; `failed_levels` tells where.
    """
    splitter = _Splitter(is_input, more_arrays, key_of)
    return splitter.split(tree), splitter.arrays, splitter.statics


# What `split` finds in a node: its spec without children, its children, and its static fields.
_Opened = tuple[list[Any], Iterable[Any], Sequence[Any]]


class _Splitter:
    """Takes one tree apart.

    - `arrays`, `statics`: the arrays and the static objects found so far.
    """

    __slots__ = ("_is_input", "_key_of", "_more_arrays", "arrays", "statics")

    def __init__(
        self,
        is_input: bool,
        more_arrays: tuple[type, ...],
        key_of: Callable[[Any], Hashable],
    ):
        self.arrays: list[Any] = []
        self.statics: list[Any] = []
        self._is_input = is_input
        self._more_arrays = more_arrays
        self._key_of = key_of

    def split(self, value: Any) -> Spec:
        """Return the spec of a tree, and collect its arrays and static objects."""
        kind = type(value)
        if kind is ArrayImpl:
            self.arrays.append(value)
            return ARRAY
        if kind in CONSTANTS:
            if value is None:
                return None
            self.statics.append(value)
            return Static(value if kind in THEMSELVES else static_key(value))
        spec: list[Any] | None = None
        try:
            opened = self._open(value, kind)
            if opened is None:
                return self._leaf(value, kind)
            spec, children, fixed = opened
            # A deep tree takes one frame for each level, because children are split right here.
            for child in children:
                if type(child) is ArrayImpl:
                    self.arrays.append(child)
                    spec.append(ARRAY)
                else:
                    spec.append(None if child is None else self.split(child))
            # JAX doesn't look into static fields: whatever is there is one static object.
            for child in fixed:
                self.statics.append(child)
                spec.append(Static(child) if type(child) in THEMSELVES else self._static(child))
        except Exception as error:
            _add_level(error, FailedLevel(value, spec))
            raise
        return tuple(spec)

    def _open(self, value: Any, kind: type) -> _Opened | None:
        """Return what is in a node; `None` for a leaf."""
        if kind is tuple or kind is list:
            return [SEQUENCE, kind, None], value, ()
        if (
            issubclass(type(kind), _MODULE_METACLASS)
            and (fields := module_fields(kind)) is not None
            # A Module may lack a field, or have more of them, such as a wrapper's `__doc__`. Then
            # JAX's registry takes it apart.
            and (found := fields_of(value)).keys() == fields[1]
        ):
            names, _, n_dynamic = fields
            values = [*map(found.__getitem__, names)]
            return [MODULE, kind, names], values[:n_dynamic], values[n_dynamic:]
        if kind is dict and {*map(type, value)} <= {str}:
            # In the order of the keys, as JAX has it. A dict with other keys is a `NODE`.
            keys = tuple(sorted(value))
            return [DICT, dict, keys], [value[key] for key in keys], ()
        # Most static leaves of a model are functions, such as activations.
        if kind is types.FunctionType or kind in ARRAY_CLASSES:
            return None
        if (
            issubclass(kind, tuple)
            and (aux := _named_tuple_aux(kind)) is not None
            # The class may be registered after its first use.
            and kind not in registered_nodes
        ):
            return [SEQUENCE, kind, aux], tuple.__iter__(value), ()
        # Any other class may be registered as a node, and may become one between two calls.
        flat = flatten_one_level(value)
        if flat is None:
            return None
        children, metadata = flat
        self.statics.append(metadata)
        return [NODE, kind, self._static(metadata)], children, ()

    def _leaf(self, value: Any, kind: type) -> Spec:
        ask = kind not in _NEVER_NODES
        is_array = kind in ARRAY_CLASSES or (
            ask and (eqx.is_array(value) or isinstance(value, self._more_arrays))
        )
        if is_array:
            self.arrays.append(value)
            return ARRAY
        # Not `hasattr`, because a metaclass may have a say in it.
        if ask and any("__next__" in vars(base) for base in kind.__mro__):
            # JAX warns of generators, `zip`, `map` and some other iterators, which it is going to
            # reject. Nothing is taken from them.
            tree_structure(value)
        static = self._static(value, ask)
        key = static.key
        if ask and self._is_input and (type(key) is not Opaque or not key.has_hash):
            # Equinox rejects what can't be hashed, so that nothing here changes unseen.
            self._check_hash(value)
        self.statics.append(value)
        return static

    def _static(self, value: Any, ask: bool = False) -> Any:
        """Return the part of a spec that stands for a static object."""
        try:
            return Static(self._key_of(value), ask)
        except Exception as error:
            _add_level(error, FailedLevel(value, None, is_static=True))
            raise

    def _check_hash(self, value: Any) -> None:
        try:
            hash(value)
        except Exception as error:
            _add_level(error, FailedLevel(value, None, is_static=True))
            raise


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


def combine(spec: Spec, arrays: Iterator[Any], statics: Iterator[Any]) -> PyTree:
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
