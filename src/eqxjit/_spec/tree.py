"""Pytrees taken apart and put together: the only code in Python that does either.

`split` returns the arrays of a tree, its static objects in order, and its **spec**: nested tuples
that are equal exactly if one program may serve both trees.

    spec = ARRAY | None | Static(key) | (kind, class, aux, child, ...)

Everything else reads specs: the table of entries, what JAX traces, outputs, both fast paths, and
explanations.
"""

import dataclasses
import functools
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import default_registry, keystr, tree_structure

from .._compat import ArrayImpl, fields_of, registered_nodes, unflatten_node
from .._text import short
from .static_key import CONSTANTS, THEMSELVES, Identity, Opaque, Static, static_key


class _Array:
    """The type of `ARRAY`, which stands for an array in a spec."""

    def __repr__(self) -> str:
        return "ARRAY"


ARRAY = _Array()

#: The kinds of nodes, and their aux; as in `native.c`.
#: - a tuple or list: None; a named tuple: whether its class, called, does no more than `tuple`.
#: - a dict whose keys are all of type `str`: these, sorted.
#: - a Module that has all its fields and nothing else: their names, static ones last.
#: - anything else that JAX's registry takes for a node: its metadata, a `Static`.
SEQUENCE, DICT, MODULE, NODE = range(4)

Spec = Any


# --- Classes --------------------------------------------------------------------------------------

_MODULE_METACLASS = type(eqx.Module)
_flatten_one_level = default_registry.flatten_one_level
NUMPY_SCALARS = frozenset(np.sctypeDict.values())

#: The classes of most arrays: `equinox.is_array` takes five times as long.
ARRAY_CLASSES = frozenset({ArrayImpl, np.ndarray}) | NUMPY_SCALARS

# Classes of static leaves that nobody registers as a node: those of most activations.
_NEVER_NODES = CONSTANTS | {
    *(types.FunctionType, types.BuiltinFunctionType, type, type(jax.jit(abs))),
    *(jax.custom_jvp, jax.custom_vjp),
}


def is_array(leaf: Any) -> bool:
    """Return what `equinox.is_array` does, faster; a node is no array, whatever its class."""
    return type(leaf) in ARRAY_CLASSES or (
        bool(eqx.is_array(leaf)) and _flatten_one_level(leaf) is None
    )


class ModuleFields(NamedTuple):
    """The names of a Module class's fields, static ones last; `read` takes them from a dict."""

    names: tuple[str, ...]
    keys: frozenset[str]
    n_dynamic: int
    read: Callable[[dict[str, Any]], tuple[Any, ...]]


# Of classes of Modules alone: the cache would keep others alive.
@functools.lru_cache(maxsize=4096)
def module_fields(cls: type) -> ModuleFields | None:
    """Return the fields of a class of Modules; None if instances have a say in reading them."""
    # What the instance's `__dict__` holds would not be what the user reads.
    if cls.__getattribute__ is not eqx.Module.__getattribute__:
        return None
    if inspect.getattr_static(cls, "__dict__") is not inspect.getattr_static(
        eqx.Module, "__dict__"
    ):
        return None
    fields = dataclasses.fields(cls)
    # A property of the same name would be what `setattr` writes to.
    if any(hasattr(inspect.getattr_static(cls, f.name, None), "__set__") for f in fields):
        return None
    static = [field.name for field in fields if field.metadata.get("static", False)]
    dynamic = [field.name for field in fields if field.name not in static]
    names = (*dynamic, *static)
    # Of fewer names it would make no tuple.
    read = operator.itemgetter(*names) if len(names) > 1 else lambda d: tuple([d[n] for n in names])
    return ModuleFields(names, frozenset(names), len(dynamic), read)


_named_tuples: weakref.WeakKeyDictionary[type, bool | None] = weakref.WeakKeyDictionary()


def _named_tuple_aux(kind: type) -> bool | None:
    """Return the aux of a class of named tuples; None for one that JAX takes apart."""
    # Asked on each call, because a class may be registered after its first use.
    if kind in registered_nodes:
        return None
    found = _named_tuples.get(kind, ...)
    if found is not ...:
        return found
    aux = None
    if (
        hasattr(kind, "_fields")
        and kind.__getitem__ is tuple.__getitem__  # type: ignore[attr-defined]
        and kind.__len__ is tuple.__len__  # type: ignore[attr-defined]
    ):
        aux = _is_standard(kind)
    return _named_tuples.setdefault(kind, aux)


def _is_standard(kind: type) -> bool:
    """Return whether calling the class of a named tuple does no more than make the tuple."""
    new = vars(kind).get("__new__")
    return (
        type(kind) is type
        and kind.__bases__ == (tuple,)
        and kind.__init__ is object.__init__
        and isinstance(new, staticmethod)
        # The function that `collections.namedtuple` generates calls this, and nothing else.
        and getattr(new.__func__, "__globals__", {}).get("_tuple_new") is tuple.__new__
    )


# --- Taking apart ---------------------------------------------------------------------------------


def split(tree: Any, is_input: bool = True) -> tuple[Spec, list[Any], list[Any]]:
    """Take a pytree apart in one pass: return its spec, its arrays and its static objects.

    Arrays are those of `equinox.is_array`; both are in the order of the spec. Static leaves of an
    input must be hashable, as Equinox asks of arguments. Raises whatever a flatten or a `__hash__`
    of the user's raises, and a `RecursionError` for a tree that contains itself or is too deep.
    """
    arrays: list[Any] = []
    statics: list[Any] = []
    return _split(tree, arrays, statics, is_input), arrays, statics


def _split(value: Any, arrays: list[Any], statics: list[Any], is_input: bool) -> Spec:
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
    fixed: Sequence[Any] = ()
    if kind is tuple or kind is list:
        spec, below = [SEQUENCE, kind, None], value
    elif (
        issubclass(type(kind), _MODULE_METACLASS)
        and (fields := module_fields(kind)) is not None
        and (values := _read_module(value, fields)) is not None
    ):
        n = fields.n_dynamic
        spec, below, fixed = [MODULE, kind, fields.names], values[:n], values[n:]
    # A dict with other keys is a node, whose metadata are its keys and their types.
    elif kind is dict and {*map(type, value)} <= _ONLY_STR:
        # As JAX does: arrays come in its order.
        keys = tuple(sorted(value))
        spec, below = [DICT, dict, keys], [value[key] for key in keys]
    # Activations and the like are most static leaves of a model.
    elif kind is types.FunctionType:
        return _split_leaf(value, statics, is_input)
    elif kind in ARRAY_CLASSES:
        arrays.append(value)
        return ARRAY
    elif issubclass(kind, tuple) and (aux := _named_tuple_aux(kind)) is not None:
        spec, below = [SEQUENCE, kind, aux], tuple.__iter__(value)
    else:
        # All else may be a node of a registered class, and may become one between two calls.
        flat = _flatten_one_level(value)
        if flat is None:
            if eqx.is_array(value):
                arrays.append(value)
                return ARRAY
            return _split_leaf(value, statics, is_input)
        below, metadata = flat
        statics.append(metadata)
        spec = [NODE, kind, Static(static_key(metadata))]
    for child in below:
        if type(child) is ArrayImpl:
            arrays.append(child)
            spec.append(ARRAY)
        elif child is None:
            spec.append(None)
        else:
            spec.append(_split(child, arrays, statics, is_input))
    # JAX doesn't look into static fields: whatever is there is one static object.
    for child in fixed:
        statics.append(child)
        if type(child) is bool:
            spec.append(_BOOLS[child])
        else:
            spec.append(Static(child if type(child) in THEMSELVES else static_key(child)))
    return tuple(spec)


_ONLY_STR = {str}
# Made once, because layers have many.
_BOOLS = Static(static_key(False)), Static(static_key(True))


def _read_module(module: Any, fields: ModuleFields) -> tuple[Any, ...] | None:
    """Return a Module's fields; None if it lacks one, or has others, as a wrapper's `__doc__`."""
    found = fields_of(module)
    return fields.read(found) if found.keys() == fields.keys else None


def _split_leaf(value: Any, statics: list[Any], is_input: bool) -> Spec:
    kind = type(value)
    ask = kind not in _NEVER_NODES
    key = static_key(value)
    if ask and is_input and (type(key) is not Opaque or key.hash is None):
        # Equinox refuses what can't be hashed, so that nothing here changes unseen.
        hash(value)
    if kind in _VIEWS or hasattr(kind, "__next__"):
        # JAX warns of a generator or another iterator that isn't taken apart.
        tree_structure(value)
    statics.append(value)
    return Static(key, ask)


_VIEWS = (type({}.values()),)


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
        below.append(next(arrays) if child is ARRAY else combine(child, arrays, statics))
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


def resplit(
    spec: Spec, arrays: list[Any], statics: list[Any], is_dynamic: Callable[[Any], bool]
) -> tuple[Spec, list[Any], list[Any]]:
    """Return the same as `split`, with other arrays among a tree's arrays and static leaves."""
    old_arrays, old_statics = iter(arrays), iter(statics)
    new_arrays: list[Any] = []
    new_statics: list[Any] = []

    def walk(spec: Spec, is_leaf: bool) -> Spec:
        if spec is None:
            return None
        if type(spec) is tuple:
            kind, cls, aux = spec[:3]
            if kind == NODE:
                new_statics.append(next(old_statics))
            n_leaves = _n_dynamic(spec)
            return (kind, cls, aux, *[walk(c, i < n_leaves) for i, c in enumerate(spec[3:])])
        leaf = next(old_arrays if spec is ARRAY else old_statics)
        if is_leaf and is_dynamic(leaf):
            new_arrays.append(leaf)
            return ARRAY
        new_statics.append(leaf)
        return Static(Identity(leaf)) if spec is ARRAY else spec

    new_spec = walk(spec, True)
    # It refers to itself, and to the arrays: only the garbage collector would free them.
    del walk
    return new_spec, new_arrays, new_statics


def _n_dynamic(spec: tuple[Any, ...]) -> int:
    """Return how many of a node's children aren't static fields."""
    fields = module_fields(spec[1]) if spec[0] == MODULE else None
    return len(spec) - 3 if fields is None else fields.n_dynamic


# --- Reading specs --------------------------------------------------------------------------------


def count_arrays(spec: Spec) -> int:
    return sum([part is ARRAY for part in parts_of(spec)])


def are_aligned(one: Spec, other: Spec) -> bool:
    """Return whether trees of two specs have as many arrays, nodes and static objects."""
    counts = [(count_arrays(spec), len(parts_of(spec))) for spec in (one, other)]
    return counts[0] == counts[1]


def parts_of(spec: Spec) -> list[Spec]:
    """Return the spec of each node and leaf of a tree, outside in."""
    parts = [spec]
    # Not by recursion, because trees may be deep: the list grows while it is gone through.
    for part in parts:
        if type(part) is tuple:
            parts.extend(part[3:])
    return parts


def children(spec: tuple[Any, ...], value: Any) -> list[tuple[str, Spec, Any, bool]]:
    """Return the children of a node with this spec.

    Of each: what follows the node's path in the child's, its spec, itself, and whether it is in a
    static field.
    """
    kind, cls, aux, *below = spec
    n = n_dynamic = len(below)
    names = [*map("[{}]".format, range(n))]
    if kind == MODULE:
        names, n_dynamic = [*map(".{}".format, aux)], _n_dynamic(spec)
        values = [*map(fields_of(value).__getitem__, aux)]
    elif kind == DICT:
        names = [*map("[{}]".format, map(short, aux))]
        values = [*map(value.__getitem__, aux)]
    elif kind == SEQUENCE:
        # Of named tuples JAX 0.10 gives each child the first field's key.
        values = [*tuple.__iter__(value)] if isinstance(value, tuple) else list(value)
        if aux is not None and len(cls._fields) == n:
            names = [*map(".{}".format, cls._fields)]
    else:
        names, values, _ = read_node(value)
    if len(values) != n:
        raise ValueError("a node changed while it was read")
    is_static = [False] * n_dynamic + [True] * (n - n_dynamic)
    return list(zip(names, below, values, is_static, strict=True))


def read_node(value: Any) -> tuple[list[str], list[Any], Any]:
    """Return what follows the path of a node of JAX's registry, its children, and its metadata."""
    try:
        keyed, metadata = default_registry.flatten_one_level_with_keys(value)  # type: ignore[misc]
        keyed = [*keyed]
        return [keystr((key,)) for key, _ in keyed], [child for _, child in keyed], metadata
    except Exception:
        # A key's `__str__`, or a flatten with keys of the user's, which calls don't need.
        values, metadata = _flatten_one_level(value)  # type: ignore[misc]
        values = [*values]
        return [f"[{i}]" for i in range(len(values))], values, metadata


def has_tracers(arrays: Sequence[Any]) -> bool:
    """Return whether some transformation passes its tracers in the place of arrays."""
    # Not a generator: on Python 3.12 one that is interrupted keeps an array alive.
    return not {*map(type, arrays)} <= ARRAY_CLASSES and any(
        [isinstance(array, Tracer) for array in arrays]  # noqa: C419
    )


def is_transformed(output: Any) -> bool:
    """Return whether a program's output is part of a transformation: what it can do is unknown."""
    if type(output) is dict:
        [output] = output.values()
    return type(output) is not ArrayImpl and has_tracers(
        output if type(output) is list else [output]
    )
