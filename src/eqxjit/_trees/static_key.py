"""The typed static key: a hashable stand-in for the static half of a call.

Two static values have equal keys exactly if a program compiled for one may serve the other. Unlike
`==`, which `equinox.filter_jit` compares with, the key tells `1` from `True` and `1.0`, `0.0` from
`-0.0`, and one order of a dict's items from another, also inside builtin containers and inside
dataclasses with a generated `__eq__`; and NaN equals NaN. Containers are copied into the key, so
that a later change of theirs is seen. For all other values their type and their own `==` and `hash`
decide.
"""

import collections
import copy
import dataclasses
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, cast

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import tree_flatten

from .._compat import MISSING, ArrayImpl, PyTreeDef, treedef_rows
from .constants import CONSTANTS, constants_key, is_constant, is_same, number_key


class Hashed:
    """A typed static key with its hash, which tuples make anew each time that they are asked.

    - `typed`: the typed static key.
    """

    __slots__ = ("__weakref__", "_hash", "typed")

    def __init__(self, typed: Hashable):
        self.typed = typed
        self._hash = hash(typed)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Hashed)
            and type(other) is type(self)
            and self._hash == other._hash
            and bool(self.typed == other.typed)
        )


class ByEquality:
    """A value compared by its own `==`: of an unhashable one, a copy.

    - `hash`: the hash that it had, in which a change of it shows; None if it is unhashable.
    """

    __slots__ = ("hash", "value")
    #: It serves as a snapshot of what it is the key of: of one element.
    size = 1

    def __init__(self, value: Any, value_hash: int | None):
        self.value = _snapshot(value) if value_hash is None else value
        self.hash = value_hash

    def __hash__(self) -> int:
        return hash(type(self.value)) if self.hash is None else self.hash

    def __eq__(self, other: object) -> bool:
        return type(other) is ByEquality and is_same_opaque(
            self.value, other.value, self.hash, other.hash
        )

    def matches(self, value: Any) -> bool:
        """Return whether a value has the same key."""
        value_hash = None if self.hash is None else hash(value)
        return is_same_opaque(value, self.value, value_hash, self.hash)


class ByContent:
    """A constant, or a dataclass with a generated `==`, of which all fields are constants.

    Made without looking at each part in Python.

    - `kind`: the class.
    - `value`: the constant, or what the fields hold.
    - `names`: the fields of the dataclass that are compared; None for a constant itself.
    """

    __slots__ = ("_hash", "kind", "names", "value")
    #: As above.
    size = 1

    def __init__(self, kind: type, value: Any, names: tuple[str, ...] | None = None):
        self.kind = kind
        self.value = value
        self.names = names
        self._hash = hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is ByContent
            and other.kind is self.kind
            and bool(is_same(other.value, self.value))
        )

    def matches(self, value: Any) -> bool:
        """Return whether a value has the same key."""
        if type(value) is not self.kind:
            return False
        content = value if self.names is None else fields_values(value, self.names)
        return bool(is_same(content, self.value))


def fields_values(value: Any, names: Iterable[str]) -> tuple[Any, ...]:
    """Return what the fields of an object hold."""
    return tuple([getattr(value, name) for name in names])


def fields_key(value: Any) -> ByContent | None:
    """Return the typed static key of a dataclass that holds constants alone; None for others."""
    names = keyed_fields(type(value))
    return None if names is None else _by_fields(type(value), names, fields_values(value, names))


def content_key(value: Any) -> ByContent | None:
    """Return the typed static key of a constant, or as `fields_key` does; None for others."""
    return ByContent(type(value), value) if is_constant(value) else fields_key(value)


def _by_fields(kind: type, names: tuple[str, ...], values: tuple[Any, ...]) -> ByContent | None:
    return ByContent(kind, values, names) if is_constant(values) else None


def _snapshot(value: Any) -> Any:
    """Return a copy that a change of the value doesn't reach; itself where it can't be copied."""
    try:
        copied = copy.deepcopy(value)
        if type(copied) is type(value) and bool(copied == value):
            return copied
    except Exception:
        pass
    return value


class _IdentityRef(weakref.ref[Any]):
    """A weak reference to a value that equals itself alone, whatever its `==` says."""

    __slots__ = ("_id",)

    def __init__(self, value: Any):
        self._id = id(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # A dead one's `id` may be another's by now.
        return type(other) is _IdentityRef and (value := self()) is not None and value is other()


class _ByIdentity:
    """A value that equals itself alone, whatever its `==` says."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return type(other) is _ByIdentity and self.value is other.value


def typed_key(value: Any) -> Hashable:
    """Return the typed static key of one value.

    **Arguments:**

    - `value`: any object.

    **Returns:**

    A hashable object. Objects that compare by identity are referred to weakly where that is
    possible, so that a key doesn't keep them alive.

    **Raises:**

    Whatever the `__hash__` or the `__eq__` of a user's class raises.
    """
    kind = type(value)
    make_key = _KEY_BY_TYPE.get(kind)
    if make_key is None:
        return _key_by_class(kind, value)
    return make_key(value)


def typed_treedef_key(treedef: PyTreeDef) -> Hashable:
    """Return the typed static key of a structure: its nodes, with typed keys of metadata."""
    return tuple(
        [
            (kind, arity, custom, None if data is None else typed_key(data))
            for kind, arity, data, custom in treedef_rows(treedef)
        ]
    )


def _atom_key(value: Any) -> Hashable:
    return (type(value), value)


def _number_key(value: complex) -> Hashable:
    return (type(value), number_key(value))


def iterated(elements: Callable[[Any], Iterable[Any]], value: Any) -> list[Any]:
    """Return the elements of a builtin container, which another thread may be changing.

    `elements` is the `__iter__` of the builtin class, or gives its keys or values.
    """
    for _ in range(_MOST_READS):
        try:
            return [*elements(value)]
        except RuntimeError:
            # It was changed between the start of the iteration and the end.
            continue
    return [*elements(value)]


_MOST_READS = 100


def _elements_key(elements: list[Any]) -> Hashable:
    values = tuple(elements)
    return constants_key(values) or tuple([typed_key(value) for value in values])


def _sequence_key(value: Any, elements: Callable[[Any], Iterable[Any]] = list.__iter__) -> Hashable:
    return (type(value), _elements_key(iterated(elements, value)))


def _tuple_key(value: tuple[Any, ...]) -> Hashable:
    if is_constant(value):
        return ByContent(tuple, value)
    return _sequence_key(value, tuple.__iter__)


def _frozenset_key(value: frozenset[Any]) -> Hashable:
    if is_constant(value):
        return ByContent(frozenset, value)
    return _set_key(value, frozenset.__iter__)


def _set_key(value: Any, elements: Callable[[Any], Iterable[Any]] = set.__iter__) -> Hashable:
    # With their number: there can be several NaN in a set.
    keys = [typed_key(element) for element in iterated(elements, value)]
    return (type(value), len(keys), frozenset(keys))


def _dict_key(value: Any, cls: Any = dict) -> Hashable:
    # Unlike for `==`, the order of the items matters: a function may go through them.
    keys, values = iterated(cls.keys, value), iterated(cls.values, value)
    return (type(value), _elements_key(keys), _elements_key(values))


_ordered_dict_key = functools.partial(_dict_key, cls=collections.OrderedDict)


def _default_dict_key(value: Any) -> Hashable:
    return (typed_key(value.default_factory), _dict_key(value))


def _deque_key(value: Any) -> Hashable:
    return (value.maxlen, _sequence_key(value, collections.deque.__iter__))


def _slice_key(value: slice) -> Hashable:
    return (slice, typed_key(value.start), typed_key(value.stop), typed_key(value.step))


def _method_key(value: types.MethodType) -> Hashable:
    # Methods compare their `__self__` by identity.
    owner = value.__self__
    return (types.MethodType, typed_key(value.__func__), _identity_key(owner))


def is_fixed_dtype(kind: type) -> bool:
    """Return whether a class is one of dtypes that can't be changed in place.

    The fields of a structured dtype can be renamed, also those of the dtypes in it.
    """
    return issubclass(kind, np.dtype) and not issubclass(kind, _STRUCTURED)


_STRUCTURED = type(np.dtype(np.void))


def _structured_dtype_key(value: np.dtype) -> Hashable:
    # Not by its hash, which it keeps when a dtype in it changes.
    return (type(value), ByEquality(value, None))


def _numpy_key(value: np.ndarray | np.generic) -> Hashable:
    dtype = value.dtype
    dtype_key = dtype if is_fixed_dtype(type(dtype)) else _structured_dtype_key(dtype)
    if dtype.hasobject:
        # Its own `==` compares one element with another that it broadcasts, or raises.
        return (type(value), dtype_key, value.shape, _elements_key(value.ravel().tolist()))
    return (type(value), dtype_key, value.shape, value.tobytes())


def _memoryview_key(value: memoryview) -> Hashable:
    try:
        return (memoryview, value.format, value.shape, value.tobytes())
    except ValueError:
        # It was released.
        return _identity_key(value)


def _array_key(value: Any) -> Hashable:
    # Keys of random numbers have a dtype of JAX's own.
    if not isinstance(value.dtype, np.dtype) or not value.is_fully_addressable:
        return _opaque_key(value)
    # Not by `==`, which broadcasts and converts.
    return (type(value), value.weak_type, _numpy_key(np.asarray(value)))


def _module_key(value: eqx.Module) -> Hashable:
    leaves, treedef = tree_flatten(value)
    return (type(value), typed_treedef_key(treedef), _sequence_key(leaves))


def weak_reference(value: Any) -> weakref.ref[Any]:
    """Return a weak reference, equal to those to the same object, that has a hash for good.

    **Raises:**

    - `TypeError`, if there can be none.
    """
    kind = type(value)
    if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
        # Equal while alive if the referents are, that is, by identity; and compared in C.
        ref = weakref.ref(value)
        # It keeps its hash; a dead one that was never asked for it raises.
        hash(ref)
        return ref
    return _IdentityRef(value)


def _identity_key(value: Any) -> Hashable:
    try:
        return (type(value), weak_reference(value))
    except TypeError:
        return (type(value), _ByIdentity(value))


def _opaque_key(value: Any) -> Hashable:
    try:
        value_hash = hash(value)
    except TypeError:
        value_hash = None
    return (type(value), ByEquality(value, value_hash))


# A subclass that keeps its base's `==` is looked into as that is: its own `__iter__` has no say.
_KEY_OF_CONTAINER: dict[type, Callable[[Any], Hashable]] = {
    tuple: _tuple_key,
    list: _sequence_key,
    set: _set_key,
    frozenset: _frozenset_key,
    dict: _dict_key,
    collections.defaultdict: _default_dict_key,
    collections.OrderedDict: _ordered_dict_key,
}

_KEY_BY_TYPE: dict[type, Callable[[Any], Hashable]] = {
    **_KEY_OF_CONTAINER,
    type(None): _atom_key,
    bool: _atom_key,
    int: _atom_key,
    str: _atom_key,
    bytes: _atom_key,
    float: _number_key,
    complex: _number_key,
    collections.Counter: _dict_key,
    types.MappingProxyType: lambda value: (types.MappingProxyType, typed_key(value.copy())),
    types.SimpleNamespace: lambda value: (types.SimpleNamespace, _dict_key(vars(value))),
    collections.deque: _deque_key,
    range: lambda value: (range, value.start, value.stop, value.step),
    bytearray: lambda value: (bytearray, bytes(value)),
    slice: _slice_key,
    types.MethodType: _method_key,
    np.ndarray: _numpy_key,
    ArrayImpl: _array_key,
    cast(type, PyTreeDef): typed_treedef_key,
    _STRUCTURED: _structured_dtype_key,
    memoryview: _memoryview_key,
}

#: The types of which keys are made no slower than a snapshot of the value is compared.
SIMPLE = CONSTANTS | {range, slice, types.MethodType, cast(type, PyTreeDef), type(MISSING)}

_KEY_BY_EQUALITY: dict[type, Callable[[Any], Hashable]] = {
    **_KEY_OF_CONTAINER,
    np.generic: _numpy_key,
    jax.Array: _array_key,
    eqx.Module: _module_key,
}

# Their classes' `==` compares with other types: that is no reason not to look into them.
_KEYED_BY_CONTENT = (np.generic, jax.Array)


def _key_by_class(kind: type, value: Any) -> Hashable:
    make_key = _make_key_of_class(kind)
    if make_key is not None:
        return make_key(value)
    compared = compared_fields(kind)
    if compared is None:
        return _opaque_key(value)
    values = fields_values(value, compared)
    return _by_fields(kind, compared, values) or (kind, tuple(map(typed_key, values)))


# Classes whose equal objects are one object, which may be made anew once nothing refers to it.
_KEY_OF_INTERNED: dict[type, Callable[[Any], Hashable]] = {}


def register_interned(kind: type, make_key: Callable[[Any], Hashable]) -> None:
    """Have objects of a class be keyed by content, while guards compare them by identity."""
    _KEY_OF_INTERNED[kind] = make_key


if type(MISSING) is not object:
    # In the metadata of most Modules: there is nothing to refer to weakly.
    register_interned(type(MISSING), _atom_key)


def _make_key_of_class(kind: type) -> Callable[[Any], Hashable] | None:
    """Return how a class's `==` asks for its keys to be made; None where its fields decide."""
    if kind.__eq__ is object.__eq__:
        return _KEY_OF_INTERNED.get(kind, _identity_key)
    base = _base_of(kind)
    if base is None:
        return None
    is_as_expected = base in _KEYED_BY_CONTENT or kind.__eq__ is base.__eq__
    return _KEY_BY_EQUALITY[base] if is_as_expected else _opaque_key


def _base_of(kind: type) -> type | None:
    """Return the class in `_KEY_BY_EQUALITY` that a class is a subclass of."""
    # To ask `issubclass` for each takes five times as long.
    for base in kind.__mro__:
        if base in _KEY_BY_EQUALITY:
            return base
    return jax.Array if issubclass(kind, jax.Array) else None


# Of the dataclasses met: a weak reference to their `__eq__`, and the fields that it compares.
_compared: weakref.WeakKeyDictionary[
    type, tuple[weakref.ref[types.FunctionType], tuple[str, ...] | None]
] = weakref.WeakKeyDictionary()


def compared_fields(kind: type) -> tuple[str, ...] | None:
    """Return the fields that a dataclass's `__eq__` compares; None where that isn't the generated
    one.
    """
    equality: Any = kind.__eq__
    # `dataclasses` defines its methods in a function of this name, and leaves a user's own alone.
    if type(equality) is not types.FunctionType or (
        equality.__code__.co_qualname != "__create_fn__.<locals>.__eq__"
    ):
        return None
    known = _compared.get(kind)
    if known is None or known[0]() is not equality:
        known = _compared[kind] = weakref.ref(equality), _fields_that_decide(kind)
    return known[1]


def _fields_that_decide(kind: type) -> tuple[str, ...] | None:
    owner = next(base for base in kind.__mro__ if "__eq__" in vars(base))
    parameters = vars(owner).get("__dataclass_params__")
    if parameters is None or not parameters.eq:
        return None
    return tuple([field.name for field in dataclasses.fields(owner) if field.compare])


_CONSTANT_CONTAINERS = frozenset({tuple, frozenset})


def holds_for_all(predicate: Callable[[Any], bool], value: Any, simple: frozenset[type]) -> bool:
    """Return whether a predicate holds for all that is in tuples and frozensets in one another.

    Not by recursion: they may be nested deeply. It holds for objects of the `simple` types.
    """
    if type(value) not in _CONSTANT_CONTAINERS:
        return predicate(value)
    pending = [value]
    while pending:
        part = pending.pop()
        if not simple.issuperset(map(type, part)):
            for element in part:
                if type(element) in _CONSTANT_CONTAINERS:
                    pending.append(element)
                elif not predicate(element):
                    return False
    return True


def identity_suffices(value: Any) -> bool:
    """Return whether a value's typed key can't change while it is the same object."""
    return is_constant(value) or holds_for_all(_identity_suffices, value, CONSTANTS)


def _identity_suffices(value: Any) -> bool:
    kind = type(value)
    return kind in CONSTANTS or kind is range or compares_by_identity(kind) or is_fixed_dtype(kind)


def is_hashable(value: Any) -> bool:
    """Return whether a value has a hash now."""
    try:
        hash(value)
    except Exception:
        return False
    return True


def is_opaque(value: Any) -> bool:
    """Return whether nothing but a value's type and its own `==` and `hash` decide."""
    kind = type(value)
    if kind in _KEY_BY_TYPE:
        return False
    make_key = _make_key_of_class(kind)
    if make_key is None:
        return compared_fields(kind) is None
    return make_key is _opaque_key


def compares_by_identity(kind: type) -> bool:
    """Return whether nothing but an object itself has its typed key."""
    return kind not in _KEY_BY_TYPE and kind.__eq__ is object.__eq__


def stays(value: Any) -> bool:
    """Return whether a library's module holds a value under its own name, as `jax.nn.relu`."""
    try:
        module, name = value.__module__, value.__qualname__
        return module != "__main__" and operator.attrgetter(name)(sys.modules[module]) is value
    except Exception:
        return False


def looked_into_as(kind: type) -> type | None:
    """Return the builtin container by whose rule a subclass is keyed; None for others."""
    base = _base_of(kind)
    if base is None:
        return None
    return base if _make_key_of_class(kind) is _KEY_BY_EQUALITY[base] else None


def is_container(kind: type) -> bool:
    """Return whether objects of a class are looked into, to make their typed keys."""
    if kind in _KEY_BY_TYPE:
        return kind not in SIMPLE
    base = looked_into_as(kind)
    return base not in (None, np.generic) or keyed_fields(kind) is not None


def keyed_fields(kind: type) -> tuple[str, ...] | None:
    """Return the fields of which an object's typed key is made; None where it is made in another
    way.
    """
    fields = compared_fields(kind)
    return None if fields is None or _make_key_of_class(kind) is not None else fields


def compared_by_equality(key: Any) -> ByEquality | None:
    """Return the part of an opaque value's typed key that asks its own `==`."""
    is_opaque_key = type(key) is tuple and len(key) == 2 and type(key[1]) is ByEquality
    return key[1] if is_opaque_key else None


def is_same_opaque(
    value: Any, expected: Any, value_hash: int | None, expected_hash: int | None
) -> bool:
    """Return whether an opaque value is the expected one, as a dict by type and value does."""
    return (
        type(value) is type(expected)
        and value_hash == expected_hash
        and (value is expected or bool(value == expected))
    )
