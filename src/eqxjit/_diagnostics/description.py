"""Describes what a call was traced for: each part of its arguments by its path, from its spec."""

import functools
import inspect
import itertools
import math
import random
import re
import types
import weakref
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from .._compat import ArrayImpl, fields_of, flatten_one_level
from .._places import CallSite, captured, code_of, is_users, is_users_module, transformation_of
from .._spec.static_key import CONSTANTS, IdentityRef, Static, referents, static_key
from .._spec.tree import ARRAY, NODE, is_array, read_node, split
from .._text import counted, short

# Larger trees aren't described.
_MAX_PARTS = 50_000

# Longer texts are cut where they are shown, and those of objects where they are made.
LONG_TEXT = 40
_MAX_TEXT = 1_000
# Larger numbers fit no dtype of 32 bits.
_MAX_NUMBER = 2**31

# What a callable holds is described so deep, but for containers of more entries.
_MAX_DEPTH = 4
_MAX_ENTRIES = 100

#: Python's types of numbers by their names, without that of truth values.
NUMBERS: dict[str, type] = {"int": int, "float": float, "complex": complex}

# They give other numbers each time, as what has a `__next__` does.
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)

# Besides tuples and lists.
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
    # Empty where JAX may choose.
    placement: str

    nature = kind = "traced array"
    is_node = False

    def __str__(self) -> str:
        weak = " of weak type" if self.weak_type else ""
        placement = f" on {self.placement}" if self.placement else ""
        return f"{array_text(self.dtype, self.shape)}{weak}{placement}"


class Part(NamedTuple):
    """A static value, or a node without its children; `kind` is the name of its type.

    `key` is equal, if all else is, to that of another exactly if one may stand for the other.
    """

    text: str
    kind: str
    # Of a constant "number" or "label"; of a node "container", "object" (a dataclass into which
    # JAX doesn't look) or nothing; of an array in a static field "array"; of what equals itself
    # alone as of `_REMADE`.
    nature: str = ""
    key: Hashable = None
    # Of a function, or of the class of anything else.
    module: str = ""
    # Where a callable's code is.
    made_at: CallSite | None = None
    is_node: bool = False

    @property
    def equals_itself_alone(self) -> bool:
        return self.nature in _REMADE

    @property
    def is_opaque(self) -> bool:
        """True for what holds something into which JAX doesn't look."""
        return self.nature not in ("", "container")

    @property
    def is_users(self) -> bool:
        """True if the user wrote the code of a callable, or the class of anything else."""
        if self.nature in ("partial", "transformed"):
            # Of anybody's function.
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
    """A part of a call, its path, and the rows of the nodes that hold it, inside out."""

    path: str
    # Of either class, which its reader narrows.
    part: Any
    around: "tuple[Row, ...]" = ()

    @property
    def name(self) -> str:
        """The path, without Equinox's wrappers around a function."""
        return _WRAPPED.sub("", self.path).lstrip(".")


class Description(tuple[Row, ...]):
    """The parts of a call, outside in."""

    def __str__(self) -> str:
        """Return each argument in a few words: `x: float32[3]`, `model: MLP with 4 arrays`."""
        if self is UNKNOWN:
            return "..."
        texts: list[str] = []
        # What is in an argument comes between it and the next one.
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

#: Of a call that defies description. (That of a call without arguments is empty.)
UNKNOWN = Description([Row("...", Part("unknown", ""))])


def describe(call: Any, like: Description = UNKNOWN) -> Description:
    """Describe the arguments of a call, and its function where copies of it may differ.

    `like` is the description of another call with the same entry. It may differ in arrays alone.
    """
    function = call.function
    # Those of a frozen function are always the same.
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
    """Return a description of the same entry, but with these arrays; None if they are others."""
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
    # One that holds arrays for good is of its own.
    if function.keeps_arrays:
        return UNKNOWN
    return describe_trees([("", function.spec, function.combine(call.fun_arrays))], _MAX_DEPTH)


def describe_trees(named: list[tuple[str, Any, Any]], depth: int = 0) -> Description:
    """Describe trees, each from its name, its spec and itself.

    Of what an object that equals itself alone holds constants are described, and all else up to a
    depth.
    """
    rows: list[Row] = []
    # What is left: of each its path, its spec, itself, and the rows of the nodes that hold it.
    pending: list[Any] = [(*each, ()) for each in reversed(named)]
    while pending:
        path, spec, value, around = pending.pop()
        try:
            if spec is ARRAY:
                part, below = _array(value), []
            elif type(value) in CONSTANTS:
                part, below = _constant(value), []
            elif (below := _children(spec, value)) is not None:
                # JAX may look into a container of another kind, but not into a plain dataclass.
                is_opaque = type(spec) is not tuple and flatten_one_level(value) is None
                part = _part_of_class(type(value), len(below), is_opaque)
            else:
                part, below = _leaf(spec.key, value, len(around) < depth)
        except Exception:
            # The user's class may refuse to be asked: for its name, its fields, its flatten, a
            # `repr`. It is described for us, not for the call, which goes on.
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
        # JAX takes it for a node without children.
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
            # NumPy's, of a dtype that JAX refuses.
            aval = array
        # A tracer has no place that it could tell.
        is_put = not isinstance(array, Tracer) and getattr(array, "committed", True)
    # JAX puts the others where it likes.
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


# Of each child what follows the path in its own, its spec and itself.
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
        found = [(f"[{short(key)}]", dict.__getitem__(value, key)) for key in names or [*value]]
    elif issubclass(cls, (tuple, list)):
        fields = getattr(cls, "_fields", ())
        suffixes = [f".{name}" for name in fields] or [f"[{i}]" for i in range(len(value))]
        found = [*zip(suffixes, value, strict=True)]
    elif issubclass(cls, eqx.Module):
        fields = fields_of(value)
        found = [(f".{name}", fields[name]) for name in names]
    elif names is not None:
        found = [(f".{name}", getattr(value, name)) for name in names]
    else:
        return None
    # In the key of a dict those of its keys come first.
    specs = specs if is_node else [*map(Static, specs)][-len(found) :]
    # Strict, because another thread may have changed a list since.
    pairs = zip(found, specs, strict=True)
    return [(suffix, part, child) for (suffix, child), part in pairs]


def _children_of_registered(spec: tuple[Any, ...], value: Any) -> _Children:
    names, children, metadata = read_node(value)
    if type(value) in WRAPPERS:
        return [(".__wrapped__", metadata.spec, value.__wrapped__)]
    below = [*zip(names, spec[3:], children, strict=True)]
    if isinstance(value, eqx.Module):
        # One with fields that its class doesn't have, such as a wrapper's `__doc__`.
        fields = [(f".{name}", v) for name, v in fields_of(value).items()]
        below += [(name, Static(static_key(v)), v) for name, v in fields if name not in names]
    elif metadata is not None and not isinstance(value, dict):
        below.append((" (metadata)", spec[2], metadata))
    return below


def _part_of_class(cls: type, n: int, is_opaque: bool = False) -> Part:
    """Return the part of a node of `n` children."""
    name = cls.__name__
    if cls in (tuple, list):
        return Part(f"{name} of {n}", name, "container", is_node=True)
    # Around anybody's function, or anything.
    if cls in WRAPPERS or (issubclass(cls, _CONTAINERS) and not is_opaque):
        return Part(name, name, "container", is_node=True)
    nature = "object" if is_opaque else ""
    return Part(name, name, nature, weakref.ref(cls), cls.__module__, is_node=True)


def _leaf(key: Hashable, value: Any, is_deep: bool) -> tuple[Part, _Children]:
    """Return the part of a leaf, and what tells it from one that is made alike."""
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
        # A description outlives the call, and keeps no object of the user's alive.
        (IdentityRef(kind), hash(key), *map(IdentityRef, referents(key))),
        module or "",
        code and CallSite(code.co_filename, code.co_firstlineno),
    )
    is_deep = is_deep and nature in ("instance", "method", "partial")
    below: _Children = []
    for name, held in _held_by(value, nature).items():
        is_large = isinstance(held, (tuple, list, dict)) and len(held) > _MAX_ENTRIES
        # The call's description has no arrays but the call's.
        if type(held) in CONSTANTS or (is_deep and not is_large):
            below.append((f".{name}", split(held, is_input=False)[0], held))
    return part, below


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
    # The latter of a member of an enumeration.
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
    # The text of `float32` by itself is that of an array of that dtype.
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}".replace(" builtins.", " ")
    # What `jax.jit` and the like make has a name, too.
    name = getattr(value, "__qualname__", "") if callable(value) else ""
    if name:
        return f"`{name}`".replace(".<locals>", "") if "<" in name else name
    if kind.__repr__ is object.__repr__ or isinstance(value, eqx.Module):
        return f"{kind.__name__} object"
    # Where something is in memory tells nothing.
    return _ADDRESS.sub("", short(value, _MAX_TEXT))
