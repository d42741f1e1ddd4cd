"""Describes the arguments of a call: a list of their parts, each with its path.

Two descriptions can be compared part by part when the calls themselves are long gone.
"""

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
    is_users,
    is_users_module,
    transformation_of,
)
from .._signals import suppressed
from .._spec.static_key import CONSTANTS, IdentityRef, Static, items_of, referents, static_key
from .._spec.tree import ARRAY, ARRAY_CLASSES, NODE, is_array, read_node, split
from .._text import counted, short

# A call whose arguments have more parts isn't described.
_MAX_PARTS = 50_000

# Messages show at most `LONG_TEXT` characters of an object's text. Descriptions keep `_MAX_TEXT`
# characters, to compare.
LONG_TEXT = 40
_MAX_TEXT = 1_000
# Integers from here on don't fit into 32 bits, so no remedy makes an array of them.
_MAX_NUMBER = 2**31

# The contents of a callable are described to this depth. Containers in it that have more entries
# than `_MAX_ENTRIES` are left out.
_MAX_DEPTH = 4
_MAX_ENTRIES = 100
# The search for arrays in a tree that a function closes over ends after this many parts.
_MAX_CAPTURED_PARTS = 10_000

#: Python's types of numbers by their names. `bool` isn't one of them.
NUMBERS: dict[str, type] = {"int": int, "float": float, "complex": complex}

# Random generators, which count as iterators because each use changes their state.
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)

# The classes that count as containers, besides tuples and lists.
_CONTAINERS = (dict, eqx.Partial, jax.tree_util.Partial)

# The fields `_fun`, `_fun_wrapped`, ... in which Equinox's wrappers keep their function.
_WRAPPER_FIELDS = re.compile(r"^(?:\._fun\w*)+")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def array_text(dtype: Any, shape: Iterable[Any]) -> str:
    """Return the dtype and shape of an array, such as `float32[2,3]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


class ArrayPart(NamedTuple):
    """An array, as JAX sees it when it traces.

    - `shape`: the shape, which may contain symbolic dimensions.
    - `dtype`: the name of the dtype.
    - `weak_type`: whether the dtype is weak.
    - `placement`: the device or mesh of a committed array; empty if JAX may choose the device.
    """

    shape: tuple[Any, ...]
    dtype: str
    weak_type: bool
    placement: str

    nature = kind = "traced array"
    is_node = False

    def __str__(self) -> str:
        weak = " of weak type" if self.weak_type else ""
        placement = f" on {self.placement}" if self.placement else ""
        return f"{array_text(self.dtype, self.shape)}{weak}{placement}"


class Capture(NamedTuple):
    """An array, or a tree with arrays, that a function closes over.

    - `name`: the variable's name; for a variable of a captured function, the path to it, such as
        `inner.lam`.
    - `kind`: `"array"`, `"Module"`, or the type of any other tree, such as `"dict"`.
    - `key`: identifies the arrays. Two captures of the same arrays have equal keys.
    """

    name: str
    kind: str
    key: Hashable

    def __str__(self) -> str:
        return f"the {self.kind} `{self.name}`"


class Part(NamedTuple):
    """A static value, or a node without its children.

    - `text`: the value's text, as messages show it.
    - `kind`: the name of the value's type.
    - `nature`: a subdivision of the kind that selects the remedy; `""` if the kind is enough. A
        constant is a `"number"`, a `"label"` or `""`. A node is a `"container"`, an `"object"` (a
        dataclass that is a leaf to JAX) or `""`. An array in a static field is an `"array"`. An
        object that compares by identity has one of `_IDENTITY_NATURES`. Any other value has `""`.
    - `key`: tells apart values whose other fields are equal. Two such values have equal keys
        exactly if a program for one may run for the other.
    - `module`: the module that defines the function or, for any other value, its class.
    - `code_site`: the line where the code of a callable begins.
    - `is_node`: whether the value is a node.
    - `captures`: the arrays that a function closes over.
    """

    text: str
    kind: str
    nature: str = ""
    key: Hashable = None
    module: str = ""
    code_site: CallSite | None = None
    is_node: bool = False
    captures: tuple[Capture, ...] = ()

    @property
    def compares_by_identity(self) -> bool:
        """True for an object that equals no other object, such as a function."""
        return self.nature in _IDENTITY_NATURES

    @property
    def is_opaque(self) -> bool:
        """True for an object that is a leaf to JAX, although its contents are described, too."""
        return self.nature not in ("", "container")

    @property
    def is_users(self) -> bool:
        """True if the user wrote the code of a callable or, for any other value, its class."""
        if self.nature in ("partial", "transformed"):
            # A library created the wrapper, but the user chose the function in it.
            return True
        site = self.code_site
        return is_users(site.filename) if site else is_users_module(self.module)

    def __str__(self) -> str:
        if self.code_site and is_users(self.code_site.filename):
            # The line isn't a part of `text`, because its form depends on the working directory.
            return f"{self.text} at {self.code_site}"
        return self.text if len(self.text) <= LONG_TEXT else f"{self.text[:LONG_TEXT]}..."


# The natures of objects that compare by identity. Each new object of these causes a new trace.
_IDENTITY_NATURES = ("function", "instance", "iterator", "method", "partial", "transformed")


class Row(NamedTuple):
    """A part of a call, with its place.

    - `path`: where the part is, such as `model.layers[0].weight`.
    - `part`: the part, a `Part` or an `ArrayPart`.
    - `around`: the rows of the nodes that hold the part, innermost first.
    """

    path: str
    part: Any
    around: "tuple[Row, ...]" = ()

    @property
    def name(self) -> str:
        """The path as users know it, without the fields of Equinox's wrappers."""
        return _WRAPPER_FIELDS.sub("", self.path).lstrip(".")


class Description(tuple[Row, ...]):
    """The parts of a call. A node comes directly before its contents."""

    def __str__(self) -> str:
        """Return each argument in a few words: `x: float32[3]`, `model: MLP with 4 arrays`."""
        if self is UNKNOWN:
            return "..."
        texts: list[str] = []
        # The contents of an argument follow it, and end where the next argument starts.
        starts = [index for index, row in enumerate(self) if not row.around]
        for start, stop in itertools.pairwise([*starts, len(self)]):
            path, part = self[start][:2]
            if part.is_node:
                arrays = [row for row in self[start:stop] if isinstance(row.part, ArrayPart)]
                texts.append(f"{path}: {part} with {counted(len(arrays), 'array')}")
            else:
                texts.append(f"{path}{': ' if isinstance(part, ArrayPart) else '='}{part}")
        return ", ".join(texts)


#: The classes of the wrappers that `filter_jit` returns. The core fills it in.
WRAPPERS: set[type] = set()

#: The description of a call that can't be described. A call without arguments has an empty one.
UNKNOWN = Description([Row("...", Part("unknown", ""))])


def describe(call: Any, like: Description) -> Description:
    """Describe the arguments of a call, and the arrays of its function.

    `like` is the description of a different call with the same entry, or `UNKNOWN`. It saves time,
    because the two calls can differ in their arrays only.
    """
    function = call.function
    # A frozen function is called with the same arrays every time.
    fun_arrays = () if function.keeps_arrays else call.fun_arrays
    if like is not UNKNOWN:
        described = _with_arrays(like, [*call.arrays, *fun_arrays])
        if described is not None:
            return described
    # `call.spec` is the spec of `(args, kwargs)`. The spec of a node has its children from index 3
    # on, and the children of a dict are sorted by key.
    args_specs = call.spec[3][3:]
    kwargs_specs = call.spec[4][3:]
    paths = function.signature.paths(len(args_specs))
    named = [*zip(paths, args_specs, call.args, strict=True)]
    for key, spec in zip(sorted(call.kwargs), kwargs_specs, strict=True):
        named.append((key, spec, call.kwargs[key]))
    if fun_arrays:
        named.append(("fun", function.spec, function.combine(fun_arrays)))
    return describe_trees(named)


def _with_arrays(like: Description, arrays: list[Any]) -> Description | None:
    """Return a description with other arrays; None if the number of arrays differs."""
    rows = [*like]
    places = [i for i, row in enumerate(rows) if type(row.part) is ArrayPart]
    if len(places) != len(arrays):
        return None
    for i, part in zip(places, map(_array_part, arrays), strict=True):
        # Descriptions share equal rows, because a function may have many traces of a large tree.
        if part != rows[i].part:
            rows[i] = rows[i]._replace(part=part)
    return Description(rows)


def describe_function(call: Any) -> Description:
    """Describe the function of a call, with the contents of a partial, a method or an instance."""
    function = call.function
    # A frozen function isn't compared with other functions.
    if function.keeps_arrays:
        return UNKNOWN
    return describe_trees([("", function.spec, function.combine(call.fun_arrays))], _MAX_DEPTH)


def describe_trees(named: list[tuple[str, Any, Any]], depth: int = 0) -> Description:
    """Describe trees, given by their names, their specs and the trees themselves.

    An object that compares by identity is described with the constants that it holds. Its other
    contents are described up to a depth.
    """
    rows: list[Row] = []
    # The values that remain to be described, each with its path, its spec and the rows around it.
    pending: list[Any] = [(*each, ()) for each in reversed(named)]
    while pending:
        path, spec, value, around = pending.pop()
        # The call doesn't need the description. So it goes on if code of the user's class raises,
        # if JAX can't sort the keys of a dict, or if Python refuses to print a long integer.
        part, children = Part("object", "object"), list[Any]()
        with suppressed:
            part, children = _part_and_children(spec, value, len(around) < depth)
        row = Row(path, part, around)
        rows.append(row)
        if children:
            around = (row, *around)
            # Reversed, because `pending` is a stack.
            for suffix, child_spec, child in reversed(children):
                pending.append((path + suffix, child_spec, child, around))
            if len(rows) + len(pending) > _MAX_PARTS:
                return UNKNOWN
    return Description(rows)


# A child is a triple: the suffix of its path after the path of its parent, its spec, and the child.
_Children = list[tuple[str, Any, Any]]


def _part_and_children(spec: Any, value: Any, is_deep: bool) -> tuple[Part | ArrayPart, _Children]:
    """Return the part of a value, and the children or other contents to describe below it.

    `is_deep` is whether the contents of objects are described, too.
    """
    if spec is ARRAY:
        return _array_part(value), []
    if type(value) in CONSTANTS:
        return _constant(value), []
    children = _children(spec, value)
    if children is None:
        return _leaf(spec.key, value, is_deep)
    # An opaque value is a leaf to JAX, as a plain dataclass is. A registered container in a static
    # field isn't opaque, because JAX could flatten it.
    is_opaque = type(spec) is not tuple and flatten_one_level(value) is None
    return _part_of_class(type(value), len(children), is_opaque), children


def _constant(value: Any) -> Part:
    if value is None:
        # To JAX, None is a node without children.
        return Part("None", "None", is_node=True)
    name = type(value).__name__
    nature = "label"
    if name == "bool":
        nature = ""
    elif name in NUMBERS:
        # A number that is too large gets no remedy. Infinity and NaN aren't too large.
        nature = "" if _MAX_NUMBER <= abs(value) < math.inf else "number"
    return Part(repr(value), name, nature)


def _array_part(array: Any) -> ArrayPart:
    """Return the part of a JAX or NumPy array, a tracer, or a `jax.ShapeDtypeStruct`."""
    if type(array) is ArrayImpl:
        aval, is_committed = array.aval, array.committed
    else:
        try:
            aval: Any = jax.typeof(array)
        except (TypeError, ValueError):
            if not issubclass(type(array), (np.ndarray, np.generic)):
                # An object whose `__class__` claims that it is an array.
                return ArrayPart((), type(array).__name__, False, "")
            # A NumPy array with a dtype that JAX rejects.
            aval = array
        # A tracer has no placement.
        is_committed = not isinstance(array, Tracer) and getattr(array, "committed", True)
    # JAX may move an array that isn't committed to another device.
    sharding = getattr(array, "sharding", None) if is_committed else None
    weak_type = getattr(aval, "weak_type", False)
    return _array_part_of(aval.shape, aval.dtype, weak_type, sharding)


# Cached, because many arrays of a model are alike, and their texts take microseconds each.
@functools.lru_cache(maxsize=1024)
def _array_part_of(shape: tuple[Any, ...], dtype: Any, weak_type: bool, sharding: Any) -> ArrayPart:
    placement = ""
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        placement = f"Mesh({axes}) with spec {sharding.spec}"
    elif sharding is not None:
        placement = ", ".join(sorted(f"{d.platform}:{d.id}" for d in sharding.device_set))
    return ArrayPart(shape, str(dtype), weak_type, placement)


def _children(spec: Any, value: Any) -> _Children | None:
    """Return the children of a node, or of a static container or dataclass; else `None`."""
    cls, spec_class = type(value), type(spec)
    is_node = spec_class is tuple
    if is_node and spec[0] == NODE:
        return _children_of_registered(spec, value)
    if not is_node and type(spec.key) is not tuple:
        return None
    # The spec of a node and the static key of a container have the same form.
    _, _, names, *specs = spec if is_node else spec.key
    if issubclass(cls, dict):
        found = [(f"[{short(key)}]", dict.get(value, key)) for key in names or [*dict.keys(value)]]
    elif issubclass(cls, (tuple, list)):
        items = items_of(value)
        fields = getattr(cls, "_fields", ())
        suffixes = [f".{name}" for name in fields] or [f"[{i}]" for i in range(len(items))]
        found = [*zip(suffixes, items, strict=False)]
    elif issubclass(cls, eqx.Module):
        fields = fields_of(value)
        found = [(f".{name}", fields.get(name)) for name in names]
    elif names is not None:
        found = [(f".{name}", getattr(value, name, None)) for name in names]
    else:
        return None
    if not is_node:
        # The static key of a dict has the dict's keys before its values. Only the values are
        # described.
        specs = [*map(Static, specs)][-len(found) :]
    # Not strict, because another thread may have changed a list since it was split.
    pairs = zip(found, specs, strict=False)
    return [(suffix, child_spec, child) for (suffix, child), child_spec in pairs]


def _children_of_registered(spec: tuple[Any, ...], value: Any) -> _Children:
    """Return the children and metadata of a node that JAX flattens by a registered function."""
    suffixes, children, metadata = read_node(value)
    if issubclass(type(value), eqx.nn.State):
        suffixes = [_suffix_in_state(*each) for each in zip(suffixes, metadata, strict=True)]
    if type(value) in WRAPPERS:
        return [(".__wrapped__", metadata.spec, value.__wrapped__)]
    found = [*zip(suffixes, spec[3:], children, strict=True)]
    if isinstance(value, eqx.Module):
        # A Module may have fields that its class doesn't declare, such as a wrapper's `__doc__`.
        for name, field in fields_of(value).items():
            if f".{name}" not in suffixes:
                found.append((f".{name}", Static(static_key(field)), field))
    elif metadata is not None and not isinstance(value, dict):
        found.append((" (metadata)", spec[2], metadata))
    return found


def _suffix_in_state(suffix: str, marker: Any) -> str:
    """Return what the path of an array adds to the path of the `equinox.nn.State` that holds it.

    `suffix` is JAX's name for the array in the state, and `marker` is Equinox's.
    """
    # `equinox.nn.make_with_state` marks each array by its path in the model, as in
    # `Net.bn.batch_counter`.
    path = marker.partition(".")[2] if isinstance(marker, str) else ""
    return f"[{path}]" if path else suffix


def _part_of_class(cls: type, n_children: int, is_opaque: bool = False) -> Part:
    """Return the part of a node, or of a dataclass that is a leaf to JAX (`is_opaque`)."""
    name = cls.__name__
    if cls in (tuple, list):
        return Part(f"{name} of {n_children}", name, "container", is_node=True)
    # Remedies look through containers for the class that the user can change. A wrapper, a dict and
    # a partial function hold values that others wrote, as a tuple does, so they are containers.
    if cls in WRAPPERS or (issubclass(cls, _CONTAINERS) and not is_opaque):
        return Part(name, name, "container", is_node=True)
    nature = "object" if is_opaque else ""
    return Part(name, name, nature, weakref.ref(cls), cls.__module__, is_node=True)


def _leaf(key: Hashable, value: Any, is_deep: bool) -> tuple[Part, _Children]:
    """Return the part of a leaf, and the contents that tell it from other leaves of its class.

    `key` is the static key of the leaf.
    """
    cls = type(value)
    nature = _nature(value)
    code = code_of(value)
    name, module = cls.__name__, cls.__module__
    if nature == "method":
        name, module = type(value.__self__).__name__, type(value.__self__).__module__
    elif nature == "transformed":
        name = transformation_of(value)
    elif nature == "function":
        module = value.__module__
    part = Part(
        text=f"{name} object" if nature == "instance" else _text(value),
        kind=name,
        nature=nature,
        # Weak references, because a description outlives the call and must keep nothing alive.
        key=(IdentityRef(cls), hash(key), *map(IdentityRef, referents(key))),
        module=module or "",
        code_site=code and CallSite(code.co_filename, code.co_firstlineno),
        captures=tuple(_captures(value)) if nature == "function" else (),
    )
    is_deep = is_deep and nature in ("instance", "method", "partial")
    contents: _Children = []
    for name, content in _contents(value, nature).items():
        is_large = isinstance(content, (tuple, list, dict)) and len(content) > _MAX_ENTRIES
        # Without `is_deep`, only constants are described, because they hold no arrays. The arrays
        # in the description of a call must be the call's own (see `_with_arrays`).
        if type(content) in CONSTANTS or (is_deep and not is_large):
            # Not an input, because what an object holds need not be hashable.
            contents.append((f".{name}", split(content, is_input=False)[0], content))
    return part, contents


def _captures(fun: Any, prefix: str = "", depth: int = 0) -> Iterator[Capture]:
    """Yield the arrays, and the trees with arrays, that a function closes over.

    Functions among the captured variables are searched, too. `prefix` is the beginning of the paths
    of all variables.
    """
    for name, value in captured(fun) if type(fun) is types.FunctionType else ():
        path = prefix + name
        if type(value) is types.FunctionType:
            if depth < _MAX_DEPTH:
                yield from _captures(value, f"{path}.", depth + 1)
        elif is_array(value):
            yield Capture(path, "array", _identity_of(value))
        elif isinstance(value, (eqx.Module, tuple, list, dict)):
            arrays = _arrays_in(value)
            if arrays:
                kind = "Module" if isinstance(value, eqx.Module) else type(value).__name__
                yield Capture(path, kind, tuple(map(_identity_of, arrays)))


def _arrays_in(tree: Any) -> list[Any]:
    """Return the first arrays in a tree of Modules and builtin containers.

    JAX's flatten would run code of the user's, and never end for a tree that contains itself. A
    function may close over anything.
    """
    arrays: list[Any] = []
    pending = [tree]
    for value in pending:
        if len(pending) > _MAX_CAPTURED_PARTS or len(arrays) == _MAX_ENTRIES:
            break
        cls = type(value)
        if cls in ARRAY_CLASSES or issubclass(cls, jax.Array):
            arrays.append(value)
        elif issubclass(cls, eqx.Module):
            pending.extend(fields_of(value).values())
        elif issubclass(cls, dict):
            pending.extend(dict.values(value))
        elif issubclass(cls, (tuple, list)):
            pending.extend(items_of(value))
    return arrays


def _identity_of(array: Any) -> Hashable:
    # NumPy scalars support no weak references, so they are identified by their values.
    return (str(array.dtype), repr(array)) if isinstance(array, np.generic) else IdentityRef(array)


def _contents(value: Any, nature: str) -> dict[str, Any]:
    """Return what a leaf holds, by name: arguments, closed-over variables, or attributes."""
    cls = type(value)
    if nature == "partial":
        code = getattr(value.func, "__code__", None)
        names = code.co_varnames if code else ()
        contents: dict[str, Any] = {}
        for i, argument in enumerate(value.args):
            contents[names[i] if i < len(names) else f"args[{i}]"] = argument
        return {**contents, **value.keywords, "func": value.func}
    if cls is types.FunctionType and nature == "function":
        return dict(captured(value))
    if nature == "method":
        value = value.__self__
    elif nature != "instance":
        # Other values show their contents in their text, unless they define `__eq__` and not
        # `__repr__`.
        has_default_text = not nature and cls.__repr__ is object.__repr__
        if not has_default_text:
            return {}
    is_users_own = is_users_module(type(value).__module__)
    return getattr(value, "__dict__", {}) if is_users_own else {}


def _nature(value: Any) -> str:
    """Return the nature of a leaf, as `Part` lists them."""
    cls = type(value)
    if cls is types.FunctionType:
        return "transformed" if transformation_of(value) else "function"
    if cls is types.MethodType:
        # Bound class methods of one class are equal.
        return "" if isinstance(value.__self__, type) else "method"
    if issubclass(cls, _GENERATORS) or hasattr(cls, "__next__"):
        return "iterator"
    if is_array(value):
        return "array"
    # `__hash__` is checked as well, because members of an enumeration define no `__eq__`.
    is_compared = cls.__eq__ is not object.__eq__ or cls.__hash__ is not object.__hash__
    if is_compared or isinstance(value, type):
        return ""
    if isinstance(value, functools.partial):
        return "partial"
    return "function" if code_of(value) else "instance"


def _text(value: Any) -> str:
    """Return the text to show for a static value: its `repr`, or the name of a callable."""
    cls = type(value)
    transformation = transformation_of(value) if cls is types.FunctionType else ""
    if transformation:
        return f"jax.{transformation} of {_text(inspect.unwrap(value))}"
    if isinstance(value, functools.partial):
        return f"partial of {_text(value.func)}"
    if isinstance(value, type):
        # The class `float32` without its module would read like the type of an array.
        return f"class {value.__module__}.{value.__qualname__}".replace(" builtins.", " ")
    # Not only for functions, because other callables have names, too: `jax.jit(f)`, for example.
    name = getattr(value, "__qualname__", "") if callable(value) else ""
    if name:
        return f"`{name}`".replace(".<locals>", "") if "<" in name else name
    if cls.__repr__ is object.__repr__ or isinstance(value, eqx.Module):
        return f"{cls.__name__} object"
    # Addresses in memory tell users nothing, and differ between equal objects.
    return _ADDRESS.sub("", short(value, _MAX_TEXT))
