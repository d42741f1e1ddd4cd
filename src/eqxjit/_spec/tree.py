"""`split` and `combine`: the only functions that split and combine pytrees in plain Python.

`split` returns the spec of a tree, its arrays, and its static objects. The **spec** consists of
nested tuples. The specs of two trees are equal exactly if one program may serve both trees.

    spec = ARRAY | None | Static(key) | (kind, class, aux, child, ...)

All other code works with specs: the table of entries, the traced function, the handling of outputs,
both fast paths, and the explanations.
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
from jax.tree_util import keystr, tree_structure
from jaxtyping import PyTree

from .._compat import (
    ArrayImpl,
    fields_of,
    flatten_one_level,
    flatten_one_level_with_keys,
    has_generated_new,
    registered_nodes,
    unflatten_node,
)
from .static_key import CONSTANTS, THEMSELVES, Opaque, Static, static_key

#: The spec of an array.
ARRAY = object()

#: The kinds of nodes. `native.c` has the same numbers. The `aux` in the spec depends on the kind:
#: - `SEQUENCE`, a tuple or list: `None`. For a named tuple, whether its class has the `__new__`
#:     that `collections.namedtuple` generates, so that `tuple.__new__` does the same faster.
#: - `DICT`, a dict whose keys are all of type `str`: the sorted keys.
#: - `MODULE`, a Module that has all its fields and nothing else: the names of its fields, with the
#:     static fields last.
#: - `NODE`, any other object that is a node by JAX's registry: the `Static` of its metadata.
SEQUENCE, DICT, MODULE, NODE = range(4)

Spec = Any


# --- Classes --------------------------------------------------------------------------------------

_MODULE_METACLASS = type(eqx.Module)

#: The classes of most arrays. To look a class up here takes a fifth of the time of
#: `equinox.is_array`.
ARRAY_CLASSES = frozenset({ArrayImpl, np.ndarray, *np.sctypeDict.values()})

# Classes of static leaves that nobody registers as nodes. Most activation functions of models are
# among their objects.
_NEVER_NODES = CONSTANTS | {
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
    type(jax.jit(abs)),
    jax.custom_jvp,
    jax.custom_vjp,
}


def is_array(leaf: Any) -> bool:
    """Return whether an object is an array, like `equinox.is_array` but faster.

    Unlike `equinox.is_array`, this function returns False for an object that is a node, because
    its class is registered.
    """
    return type(leaf) in ARRAY_CLASSES or (
        bool(eqx.is_array(leaf)) and flatten_one_level(leaf) is None
    )


# Called for classes of Modules only, because the cache keeps classes alive.
@functools.lru_cache(maxsize=4096)
def module_fields(cls: type) -> tuple[tuple[str, ...], frozenset[str], int] | None:
    """Return the field names of a class of Modules, as a tuple and a set, and how many are dynamic.

    The tuple has the static fields last. The function returns `None` if the class has a
    `__getattribute__` of its own, because its fields then can't be read from `__dict__`.
    """
    if cls.__getattribute__ is not eqx.Module.__getattribute__:
        return None
    fields = dataclasses.fields(cls)
    static = [field.name for field in fields if field.metadata.get("static", False)]
    dynamic = [field.name for field in fields if field.name not in static]
    names = (*dynamic, *static)
    return names, frozenset(names), len(dynamic)


@functools.lru_cache(maxsize=1024)
def _named_tuple_aux(kind: Any) -> bool | None:
    """Return the `aux` of a class of named tuples; `None` for any other class."""
    if not hasattr(kind, "_fields"):
        return None
    return kind.__bases__ == (tuple,) and has_generated_new(kind)


def has_tracers(arrays: Sequence[Any]) -> bool:
    """Return whether there are tracers of a transformation among these arrays."""
    return not {*map(type, arrays)} <= ARRAY_CLASSES and any(
        isinstance(array, Tracer) for array in arrays
    )


# --- Splitting ------------------------------------------------------------------------------------


#: The result of `split`: the spec, the list of arrays, and the list of static objects. Both lists
#: have the order of the spec.
Parts = tuple[Spec, list[Any], list[Any]]


def split(
    tree: PyTree,
    is_input: bool = True,
    more_arrays: tuple[type, ...] = (),
    key_of: Callable[[Any], Hashable] = static_key,
) -> Parts:
    """Split a pytree in one pass: return its spec, its arrays and its static objects.

    **Arguments:**

    - `tree`: the pytree.
    - `is_input`: whether static leaves must be hashable, as Equinox demands of arguments.
    - `more_arrays`: classes of leaves that count as arrays, besides those of `equinox.is_array`.
    - `key_of`: returns the key of a static object that isn't a constant, for the spec.

    **Raises:**

    Any error of the user's flatten functions and `__hash__`. A `RecursionError` if the tree
    contains itself or is too deep. `failed_levels(error)` then tells where `split` failed.
    """
    splitter = _Splitter(is_input, more_arrays, key_of)
    return splitter.split(tree), splitter.arrays, splitter.statics


# An opened node: the beginning of its spec (kind, class, aux), its children, and its static fields.
_Opened = tuple[list[Any], Iterable[Any], Sequence[Any]]


class _Splitter:
    """Splits one tree.

    - `arrays`: the arrays that were found so far.
    - `statics`: the static objects that were found so far.
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
            spec, children, static_fields = opened
            # This loop isn't a method of its own, so that each level of a deep tree takes only one
            # frame.
            for child in children:
                if type(child) is ArrayImpl:
                    self.arrays.append(child)
                    spec.append(ARRAY)
                else:
                    spec.append(None if child is None else self.split(child))
            # The value of a static field is one static object, even if it is a pytree.
            for child in static_fields:
                self.statics.append(child)
                spec.append(Static(child) if type(child) in THEMSELVES else self._static(child))
        except Exception as error:
            _add_level(error, FailedLevel(value, spec))
            raise
        return tuple(spec)

    def _open(self, value: Any, kind: type) -> _Opened | None:
        """Return the opened node; `None` for a leaf."""
        if kind is tuple or kind is list:
            return [SEQUENCE, kind, None], value, ()
        if (
            issubclass(type(kind), _MODULE_METACLASS)
            and (fields := module_fields(kind)) is not None
            # A Module may lack a field, or have more attributes than fields, such as the `__doc__`
            # of a wrapper. Such a Module is a `NODE`.
            and (found := fields_of(value)).keys() == fields[1]
        ):
            names, _, n_dynamic = fields
            values = [*map(found.__getitem__, names)]
            return [MODULE, kind, names], values[:n_dynamic], values[n_dynamic:]
        if kind is dict and {*map(type, value)} <= {str}:
            # JAX sorts the keys, too. A dict with other keys is a `NODE`.
            keys = tuple(sorted(value))
            return [DICT, dict, keys], [value[key] for key in keys], ()
        # Functions and arrays are never nodes. Don't ask the registry about them, because most
        # static leaves of a model are functions, such as activations.
        if kind is types.FunctionType or kind in ARRAY_CLASSES:
            return None
        if (
            issubclass(kind, tuple)
            and (aux := _named_tuple_aux(kind)) is not None
            # An object of a registered class is a `NODE`. The registry is asked each time, because
            # the class may be registered after its first use.
            and kind not in registered_nodes
        ):
            return [SEQUENCE, kind, aux], tuple.__iter__(value), ()
        # An object of any other class is a node if its class is registered.
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
        # Not `hasattr`, because that may run code of the user's metaclass.
        if ask and any("__next__" in vars(base) for base in kind.__mro__):
            # JAX warns of generators, `zip`, `map` and some other iterators, because it is going to
            # reject them. This call has JAX warn here, too. No item is taken from the iterator.
            tree_structure(value)
        static = self._static(value, ask)
        key = static.key
        if ask and self._is_input and (type(key) is not Opaque or not key.has_hash):
            # The key doesn't need this hash, but Equinox rejects arguments that can't be hashed.
            self._check_hash(value)
        self.statics.append(value)
        return static

    def _static(self, value: Any, ask: bool = False) -> Any:
        """Return the spec of a static object."""
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


# --- Where splitting failed -----------------------------------------------------------------------


class FailedLevel(NamedTuple):
    """A level of a tree at which `split` failed.

    - `value`: the node, or the static object.
    - `spec`: the spec of the node up to the child that failed. `None` if the node itself failed.
    - `is_static`: whether the key or the hash of a static object failed.
    """

    value: Any
    spec: Sequence[Any] | None
    is_static: bool = False


# The attribute in which an exception has the levels at which `split` failed, innermost first. Each
# level is added as the exception passes it. To split the tree again in order to find the levels
# would run the user's code again.
_LEVELS = "__eqxjit_levels__"


def _add_level(error: Exception, level: FailedLevel) -> None:
    vars(error).setdefault(_LEVELS, []).append(level)


def failed_levels(error: Exception) -> list[FailedLevel]:
    """Return the levels at which `split` failed, innermost first. The error then forgets them."""
    return vars(error).pop(_LEVELS, [])


# --- Combining ------------------------------------------------------------------------------------


def combine(spec: Spec, arrays: Iterator[Any], statics: Iterator[Any]) -> PyTree:
    """Return the pytree with this spec, these arrays and these static objects. Reverses `split`."""
    if spec is ARRAY:
        return next(arrays)
    if spec is None:
        return None
    if type(spec) is not tuple:
        return next(statics)
    kind, cls, aux = spec[:3]
    metadata = next(statics) if kind == NODE else None
    below = []
    # Not a comprehension, which would take a second frame for each level of a deep tree.
    for child in spec[3:]:
        if child is ARRAY:
            below.append(next(arrays))
        elif type(child) is tuple:
            below.append(combine(child, arrays, statics))
        else:
            below.append(None if child is None else next(statics))
    if kind == MODULE:
        # Like Equinox's unflatten, don't call `__init__` and `__check_init__`.
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
    # The tree is a named tuple. Like JAX, call its class if that has a `__new__` of its own.
    return tuple.__new__(cls, below) if aux else cls(*below)


# --- Reading specs --------------------------------------------------------------------------------


def count_arrays(spec: Spec) -> int:
    """Return how many arrays a tree with this spec has."""
    return sum([part is ARRAY for part in parts_of(spec)])


def parts_of(spec: Spec) -> list[Spec]:
    """Return the spec of each node and leaf of a tree, outermost first."""
    parts = [spec]
    # Not by recursion, because trees may be deep. The list grows while the loop iterates over it.
    for part in parts:
        if type(part) is tuple:
            parts.extend(part[3:])
    return parts


def read_node(value: Any) -> tuple[list[str], list[Any], Any]:
    """Return the labels of a `NODE`'s children, the children, and the metadata.

    The label of a child is what its path adds to the path of the node, such as `.weight`.
    """
    keyed, metadata = flatten_one_level_with_keys(value)
    keyed = [*keyed]
    return [keystr((key,)) for key, _ in keyed], [child for _, child in keyed], metadata
