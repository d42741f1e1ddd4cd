"""Describes the arguments of a call: each part of them by its path."""

import functools
import inspect
import itertools
import math
import random
import re
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from .._compat import ArrayImpl, fields_of, flatten_one_level
from .._places import (
    CallSite,
    captured,
    code_of,
    is_of_users_code,
    is_users,
    is_users_module,
    transformation_of,
)
from .._spec.static_key import CONSTANTS, IdentityRef, Static, referents, static_key
from .._spec.tree import ARRAY, NODE, is_array, read_node, split
from .._text import counted, short

# Trees with more parts aren't described.
_MAX_PARTS = 50_000

# A text is cut to `LONG_TEXT` characters where it is shown. The text of an object is cut to
# `_MAX_TEXT` characters when it is made.
LONG_TEXT = 40
_MAX_TEXT = 1_000
# Numbers from here on fit no dtype of 32 bits.
_MAX_NUMBER = 2**31

# What a callable holds is described to this depth. Containers of more entries are left out.
_MAX_DEPTH = 4
_MAX_ENTRIES = 100

#: Python's types of numbers by their names. `bool` isn't one of them.
NUMBERS: dict[str, type] = {"int": int, "float": float, "complex": complex}

# Each use of these gives other numbers, as each use of an iterator does.
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)

# Containers besides tuples and lists.
_CONTAINERS = (dict, eqx.Partial, jax.tree_util.Partial)

_WRAPPED = re.compile(r"^(?:\._fun\w*)+")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def array_text(dtype: Any, shape: Iterable[Any]) -> str:
    """Return the text of an array's type, as `float32[2,3]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


class ArrayPart(NamedTuple):
    """An array, as JAX sees it when it traces."""

    shape: tuple[Any, ...]
    dtype: str
    weak_type: bool
    # The device or mesh; empty if JAX may choose.
    placement: str

    nature = kind = "traced array"
    is_node = False

    def __str__(self) -> str:
        weak = " of weak type" if self.weak_type else ""
        placement = f" on {self.placement}" if self.placement else ""
        return f"{array_text(self.dtype, self.shape)}{weak}{placement}"


class Capture(NamedTuple):
    """An array, or a tree with arrays, that a function closes over.

    - `name`: the variable, or the path to it, such as `inner.lam` for one of a captured function.
    - `kind`: `"array"`, `"Module"`, or another name for a tree.
    - `key`: equal for the same arrays.
    """

    name: str
    kind: str
    key: Hashable

    def __str__(self) -> str:
        return f"the {self.kind} `{self.name}`"


class Part(NamedTuple):
    """A static value, or a node without its children; `kind` is the name of its type.

    Two parts whose other fields are equal have equal `key`s exactly if one value may stand for the
    other.
    """

    text: str
    kind: str
    # What remedies ask for: "number" or "label" for a constant; "container", "object" (a dataclass
    # that is a leaf to JAX) or "" for a node; "array" for an array in a static field; one of
    # `_REMADE` for an object that compares by identity.
    nature: str = ""
    key: Hashable = None
    # The module that defines the function or, for any other value, its class.
    module: str = ""
    # Where the code of a callable is.
    made_at: CallSite | None = None
    is_node: bool = False
    # The arrays that a function closes over.
    captures: tuple[Capture, ...] = ()

    @property
    def equals_itself_alone(self) -> bool:
        return self.nature in _REMADE

    @property
    def is_opaque(self) -> bool:
        """True for an object whose contents are a leaf to JAX."""
        return self.nature not in ("", "container")

    @property
    def is_users(self) -> bool:
        """True if the user wrote the code of a callable, or the class of anything else."""
        if self.nature in ("partial", "transformed"):
            # The library made the wrapper, and the user chose the function in it.
            return True
        site = self.made_at
        return is_users(site.filename) if site else is_users_module(self.module)

    def __str__(self) -> str:
        if self.made_at and is_users(self.made_at.filename):
            # Not a part of the text, because the working directory may change.
            return f"{self.text} at {self.made_at}"
        return self.text if len(self.text) <= LONG_TEXT else f"{self.text[:LONG_TEXT]}..."


_REMADE = ("function", "instance", "iterator", "method", "partial", "transformed")


class Row(NamedTuple):
    """A part of a call, its path, and the rows of the nodes that hold it, innermost first."""

    path: str
    # A `Part` or an `ArrayPart`.
    part: Any
    around: "tuple[Row, ...]" = ()

    @property
    def name(self) -> str:
        """The path, without Equinox's wrappers around a function."""
        return _WRAPPED.sub("", self.path).lstrip(".")


class Description(tuple[Row, ...]):
    """The parts of a call. A node comes before what it holds."""

    def __str__(self) -> str:
        """Return each argument in a few words: `x: float32[3]`, `model: MLP with 4 arrays`."""
        if self is UNKNOWN:
            return "..."
        texts: list[str] = []
        # The contents of an argument come between it and the next argument.
        starts = [index for index, row in enumerate(self) if not row.around]
        for start, stop in itertools.pairwise([*starts, len(self)]):
            path, part = self[start][:2]
            if part.is_node:
                arrays = [row for row in self[start:stop] if isinstance(row.part, ArrayPart)]
                texts.append(f"{path}: {part} with {counted(len(arrays), 'array')}")
            else:
                texts.append(f"{path}{': ' if isinstance(part, ArrayPart) else '='}{part}")
        return ", ".join(texts)


#: The classes of what `filter_jit` returns.
WRAPPERS: set[type] = set()

#: The description of a call that can't be described. (A call without arguments has an empty one.)
UNKNOWN = Description([Row("...", Part("unknown", ""))])


def describe(call: Any, like: Description = UNKNOWN) -> Description:
    """Describe the arguments of a call, and its function where copies of it may differ.

    `like` is the description of another call with the same entry. It may differ in arrays alone.
    """
    function = call.function
    # The arrays of a frozen function are always the same.
    fun_arrays = () if function.keeps_arrays else call.fun_arrays
    if like is not UNKNOWN:
        described = _with_arrays(like, [*call.arrays, *fun_arrays])
        if described is not None:
            return described
    args, specs, keys = call.spec[3][3:], call.spec[4][3:], sorted(call.kwargs)
    names = function.signature.paths(len(args))
    named = [*zip(names, args, call.args, strict=True)]
    named += [(key, spec, call.kwargs[key]) for key, spec in zip(keys, specs, strict=True)]
    if fun_arrays:
        named.append(("fun", function.spec, function.combine(fun_arrays)))
    return describe_trees(named)


def _with_arrays(rows: Description, arrays: list[Any]) -> Description | None:
    """Return the description of an entry with these arrays; None if their number differs."""
    described = [*rows]
    places = [i for i, row in enumerate(rows) if type(row.part) is ArrayPart]
    if len(places) != len(arrays):
        return None
    for i, part in zip(places, map(_array, arrays), strict=True):
        # Rows are shared, because a function may have many traces of a large tree.
        if part != rows[i].part:
            described[i] = rows[i]._replace(part=part)
    return Description(described)


def describe_function(call: Any) -> Description:
    """Describe the function of a call, with what a partial, a method or an instance holds."""
    function = call.function
    # A frozen function belongs to no family.
    if function.keeps_arrays:
        return UNKNOWN
    return describe_trees([("", function.spec, function.combine(call.fun_arrays))], _MAX_DEPTH)


def describe_trees(named: list[tuple[str, Any, Any]], depth: int = 0) -> Description:
    """Describe trees, each from its name, its spec and itself.

    An object that compares by identity is described with the constants that it holds. What else it
    holds is described up to a depth.
    """
    rows: list[Row] = []
    # What is left to describe: path, spec, value, and the rows of the nodes around it.
    pending: list[Any] = [(*each, ()) for each in reversed(named)]
    while pending:
        path, spec, value, around = pending.pop()
        try:
            if spec is ARRAY:
                part, below = _array(value), []
            elif type(value) in CONSTANTS:
                part, below = _constant(value), []
            elif (below := _children(spec, value)) is not None:
                # A plain dataclass is a leaf to JAX, unlike containers that are registered.
                is_opaque = type(spec) is not tuple and flatten_one_level(value) is None
                part = _part_of_class(type(value), len(below), is_opaque)
            else:
                part, below = _leaf(spec.key, value, len(around) < depth)
        except Exception as error:
            if not is_of_users_code(error):
                raise
            # The user's class may refuse to be asked for its name, its fields, its flatten or a
            # `repr`. The call doesn't need the description, so it goes on.
            part, below = Part("object", "object"), []
        row = Row(path, part, around)
        rows.append(row)
        if below:
            around = (row, *around)
            pending += [(path + name, spec, child, around) for name, spec, child in below[::-1]]
            if len(rows) + len(pending) > _MAX_PARTS:
                return UNKNOWN
    return Description(rows)


def _constant(value: Any) -> Part:
    if value is None:
        # To JAX, None is a node without children.
        return Part("None", "None", is_node=True)
    name = type(value).__name__
    nature = "number" if name in NUMBERS else "" if name == "bool" else "label"
    # Infinity and NaN are in each dtype of numbers that may have them.
    if nature == "number" and _MAX_NUMBER <= abs(value) < math.inf:
        nature = ""
    return Part(repr(value), name, nature)


def _array(array: Any) -> ArrayPart:
    """Return the part of an array: JAX's, NumPy's, a tracer or a structure."""
    if type(array) is ArrayImpl:
        aval, is_put = array.aval, array.committed
    else:
        try:
            aval: Any = jax.typeof(array)
        except (TypeError, ValueError):
            if not issubclass(type(array), (np.ndarray, np.generic)):
                # An object that only says it is an array.
                return ArrayPart((), type(array).__name__, False, "")
            # A NumPy array of a dtype that JAX rejects.
            aval = array
        # A tracer has no placement.
        is_put = not isinstance(array, Tracer) and getattr(array, "committed", True)
    # JAX may move an array that isn't committed.
    sharding = getattr(array, "sharding", None) if is_put else None
    return _array_part(aval.shape, aval.dtype, getattr(aval, "weak_type", False), sharding)


# A model has many alike, and each text takes microseconds.
@functools.lru_cache(maxsize=1024)
def _array_part(shape: tuple[Any, ...], dtype: Any, weak_type: bool, sharding: Any) -> ArrayPart:
    placement = ""
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        placement = f"a mesh of {axes} by {sharding.spec}"
    elif sharding is not None:
        placement = ", ".join(sorted(f"{d.platform}:{d.id}" for d in sharding.device_set))
    return ArrayPart(shape, str(dtype), weak_type, placement)


# For each child: what follows the path of its parent, its spec, and the child.
_Children = list[tuple[str, Any, Any]]


def _children(spec: Any, value: Any) -> _Children | None:
    """Return the children of a node, and of a static container or dataclass; None for a leaf."""
    cls, is_node = type(value), type(spec) is tuple
    if is_node and spec[0] == NODE:
        return _children_of_registered(spec, value)
    if not is_node and type(spec.key) is not tuple:
        return None
    # Specs and keys have one form.
    _, _, names, *specs = spec if is_node else spec.key
    if issubclass(cls, dict):
        found = [(f"[{short(key)}]", dict.get(value, key)) for key in names or [*value]]
    elif issubclass(cls, (tuple, list)):
        # A list is read once, because another thread may change it meanwhile.
        parts = [*value]
        fields = getattr(cls, "_fields", ())
        suffixes = [f".{name}" for name in fields] or [f"[{i}]" for i in range(len(parts))]
        found = [*zip(suffixes, parts, strict=False)]
    elif issubclass(cls, eqx.Module):
        fields = fields_of(value)
        found = [(f".{name}", fields.get(name)) for name in names]
    elif names is not None:
        found = [(f".{name}", getattr(value, name, None)) for name in names]
    else:
        return None
    # The key of a dict begins with the keys of its own keys.
    specs = specs if is_node else [*map(Static, specs)][-len(found) :]
    # Not strict, because another thread may have changed a list since it was split.
    pairs = zip(found, specs, strict=False)
    return [(suffix, part, child) for (suffix, child), part in pairs]


def _children_of_registered(spec: tuple[Any, ...], value: Any) -> _Children:
    names, children, metadata = read_node(value)
    if issubclass(type(value), eqx.nn.State):
        names = [_name_in_state(*each) for each in zip(names, metadata, strict=True)]
    if type(value) in WRAPPERS:
        return [(".__wrapped__", metadata.spec, value.__wrapped__)]
    below = [*zip(names, spec[3:], children, strict=True)]
    if isinstance(value, eqx.Module):
        # A Module may have fields that its class doesn't declare, such as a wrapper's `__doc__`.
        fields = [(f".{name}", v) for name, v in fields_of(value).items()]
        below += [(name, Static(static_key(v)), v) for name, v in fields if name not in names]
    elif metadata is not None and not isinstance(value, dict):
        below.append((" (metadata)", spec[2], metadata))
    return below


def _name_in_state(name: str, marker: Any) -> str:
    """Return what follows the path of an `equinox.nn.State` in that of one of its arrays."""
    # `equinox.nn.make_with_state` marks each by its path in the model: `Net.bn.batch_counter`.
    known = marker.partition(".")[2] if isinstance(marker, str) else ""
    return f"[{known}]" if known else name


def _part_of_class(cls: type, n: int, is_opaque: bool = False) -> Part:
    """Return the part of a node of `n` children."""
    name = cls.__name__
    if cls in (tuple, list):
        return Part(f"{name} of {n}", name, "container", is_node=True)
    # These wrap a function or values of anybody.
    if cls in WRAPPERS or (issubclass(cls, _CONTAINERS) and not is_opaque):
        return Part(name, name, "container", is_node=True)
    nature = "object" if is_opaque else ""
    return Part(name, name, nature, weakref.ref(cls), cls.__module__, is_node=True)


def _leaf(key: Hashable, value: Any, is_deep: bool) -> tuple[Part, _Children]:
    """Return the part of a leaf, and what it holds that tells it from others of its class."""
    kind, nature, code = type(value), _nature(value), code_of(value)
    name, module = kind.__name__, kind.__module__
    if nature == "method":
        name, module = type(value.__self__).__name__, type(value.__self__).__module__
    elif nature == "transformed":
        name = transformation_of(value)
    elif nature == "function":
        module = value.__module__
    part = Part(
        f"{name} object" if nature == "instance" else _text(value),
        name,
        nature,
        # Weak references, because a description outlives the call and must keep nothing alive.
        (IdentityRef(kind), hash(key), *map(IdentityRef, referents(key))),
        module or "",
        code and CallSite(code.co_filename, code.co_firstlineno),
        captures=tuple(_captures(value)) if nature == "function" else (),
    )
    is_deep = is_deep and nature in ("instance", "method", "partial")
    below: _Children = []
    for name, held in _held_by(value, nature).items():
        is_large = isinstance(held, (tuple, list, dict)) and len(held) > _MAX_ENTRIES
        # Arrays in it are left out, because the arrays of a description are those of the call.
        if type(held) in CONSTANTS or (is_deep and not is_large):
            below.append((f".{name}", split(held, is_input=False)[0], held))
    return part, below


def _captures(fun: Any, prefix: str = "", depth: int = 0) -> Iterator[Capture]:
    """Yield the arrays, and trees with arrays, that a function and those in it close over."""
    for name, value in captured(fun) if type(fun) is types.FunctionType else ():
        path = prefix + name
        if type(value) is types.FunctionType:
            if depth < _MAX_DEPTH:
                yield from _captures(value, f"{path}.", depth + 1)
        elif is_array(value):
            yield Capture(path, "array", _identity_of(value))
        elif isinstance(value, (eqx.Module, tuple, list, dict)):
            arrays = [*filter(is_array, jax.tree.leaves(value))]
            if arrays:
                kind = "Module" if isinstance(value, eqx.Module) else type(value).__name__
                yield Capture(path, kind, tuple(map(_identity_of, arrays[:_MAX_ENTRIES])))


def _identity_of(array: Any) -> Hashable:
    # NumPy's scalars take no weak references.
    return (str(array.dtype), repr(array)) if isinstance(array, np.generic) else IdentityRef(array)


def _held_by(value: Any, nature: str) -> dict[str, Any]:
    kind = type(value)
    if nature == "partial":
        code = getattr(value.func, "__code__", None)
        names = code.co_varnames if code else ()
        args = itertools.zip_longest(names[: len(value.args)], value.args)
        named = [(name or f"args[{i}]", v) for i, (name, v) in enumerate(args)]
        return {**dict(named), **value.keywords, "func": value.func}
    if kind is types.FunctionType and nature == "function":
        return dict(captured(value))
    if nature == "method":
        value = value.__self__
    elif nature != "instance" and (nature or kind.__repr__ is not object.__repr__):
        return {}
    is_users_own = is_users_module(type(value).__module__)
    return getattr(value, "__dict__", {}) if is_users_own else {}


def _nature(value: Any) -> str:
    kind = type(value)
    if kind is types.FunctionType:
        return "transformed" if transformation_of(value) else "function"
    if kind is types.MethodType:
        return "" if isinstance(value.__self__, type) else "method"
    if issubclass(kind, _GENERATORS) or hasattr(kind, "__next__"):
        return "iterator"
    if is_array(value):
        return "array"
    # Members of an enumeration define `__hash__` alone.
    is_compared = kind.__eq__ is not object.__eq__ or kind.__hash__ is not object.__hash__
    if is_compared or isinstance(value, type):
        return ""
    if isinstance(value, functools.partial):
        return "partial"
    return "function" if code_of(value) else "instance"


def _text(value: Any) -> str:
    """Return the text to show of a static value: `repr`, or the name of a callable."""
    kind = type(value)
    transformation = transformation_of(value) if kind is types.FunctionType else ""
    if transformation:
        return f"jax.{transformation} of {_text(inspect.unwrap(value))}"
    if isinstance(value, functools.partial):
        return f"partial of {_text(value.func)}"
    # `float32` alone would read as the type of an array.
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}".replace(" builtins.", " ")
    # What `jax.jit` and the like return has a name, too.
    name = getattr(value, "__qualname__", "") if callable(value) else ""
    if name:
        return f"`{name}`".replace(".<locals>", "") if "<" in name else name
    if kind.__repr__ is object.__repr__ or isinstance(value, eqx.Module):
        return f"{kind.__name__} object"
    # Its address in memory tells nothing.
    return _ADDRESS.sub("", short(value, _MAX_TEXT))
