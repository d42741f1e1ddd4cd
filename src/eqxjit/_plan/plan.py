"""The plan of one specialised call: what to guard, take, pass and rebuild.

`build.py` makes it, `call_source.py` writes it as Python, `check.py` carries out its guards.
"""

import bisect
import enum
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._compat import PyTreeDef
from .._trees.array_layout import ArrayLayout
from .._trees.given import Position
from .._trees.key_cache import KnownKeys
from .signature import KEYWORD_ONLY, POSITIONAL_ONLY, VAR_KEYWORD, VAR_POSITIONAL, Signature

# --- Inputs ---------------------------------------------------------------------------------------


class Match(enum.Enum):
    """The cheapest comparison that holds exactly for values of one typed static key."""

    IS = enum.auto()
    #: The very object, or the same constant.
    SAME = enum.auto()
    #: The very object, or one of the same type and key.
    IS_OR_KEY = enum.auto()
    #: The very object may have been changed in place.
    KEY = enum.auto()
    #: Its own `==` and `hash` tell.
    OPAQUE = enum.auto()


class Array:
    """An array."""

    __slots__ = ()


class NoneNode:
    """`None`."""

    __slots__ = ()


class Static:
    """A static value.

    - `value`: the traced one.
    - `match`: how another is compared with it.
    - `key`: its typed static key, or its hash, where the comparison takes one.
    - `may_become_node`: whether its class may yet be registered as a pytree.
    """

    __slots__ = ("key", "match", "may_become_node", "value")

    def __init__(self, value: Any, match: Match, key: Any = None, may_become_node: bool = False):
        self.value = value
        self.match = match
        self.key = key
        self.may_become_node = may_become_node


class ArrayRun:
    """Items of a sequence that are arrays: `n` from `start` on."""

    __slots__ = ("n", "start")

    def __init__(self, start: int, n: int):
        self.start = start
        self.n = n


class StaticRun:
    """Items of a sequence that are numbers and texts.

    - `start`, `n`: which ones.
    - `values`: the traced ones.
    """

    __slots__ = ("start", "values")

    def __init__(self, start: int, values: tuple[Any, ...]):
        self.start = start
        self.values = values

    @property
    def n(self) -> int:
        return len(self.values)


class Repeat:
    """Items of a sequence that are alike.

    - `start`, `n`: which ones.
    - `item`: each; the same object in all runs of such items.
    """

    __slots__ = ("item", "n", "start")

    def __init__(self, start: int, n: int, item: "Input"):
        self.start = start
        self.n = n
        self.item = item


class Sequence:
    """A list, a tuple, or a named tuple of `n` items."""

    __slots__ = ("_starts", "cls", "items", "n")

    def __init__(self, cls: type, n: int, items: "list[Input | ArrayRun | StaticRun | Repeat]"):
        self.cls = cls
        self.n = n
        self.items = items
        #: The index of the first child of each item, and their number, once somebody has asked.
        self._starts: list[int] | None = None

    def item_at(self, index: int) -> "Input | ArrayRun | StaticRun | Repeat":
        """Return the item that has the child at an index."""
        if self._starts is None:
            self._starts = [*itertools.accumulate(map(n_children, self.items), initial=0)]
        return self.items[bisect.bisect_right(self._starts, index) - 1]


class Mapping:
    """A dict.

    - `cls`, `keys`, `items`: its class, its keys in the order of the registry, and its values.
    - `key_types`: of keys that equal values and types tell apart; else None.
    - `known_keys`: what compares all keys, where that takes their typed static key.
    - `is_ordered`: whether the order of the keys counts.
    """

    __slots__ = ("cls", "is_ordered", "items", "key_types", "keys", "known_keys")

    def __init__(
        self,
        cls: type,
        keys: list[Any],
        items: "list[Input]",
        key_types: set[type] | None,
        known_keys: KnownKeys | None,
        is_ordered: bool,
    ):
        self.cls = cls
        self.keys = keys
        self.items = items
        self.key_types = key_types
        self.known_keys = known_keys
        self.is_ordered = is_ordered


class Fields:
    """A Module, read field by field.

    - `static`, `dynamic`: its fields by name, in the order of the registry.
    """

    __slots__ = ("cls", "dynamic", "static")

    def __init__(
        self, cls: type, static: list[tuple[str, Static]], dynamic: "list[tuple[str, Input]]"
    ):
        self.cls = cls
        self.static = static
        self.dynamic = dynamic

    def part(self, part: int) -> tuple[str, Static]:
        """Return the static field that is a part of the metadata, as JAX's registry has it."""
        # Before the fields comes what the Module wraps.
        return self.static[part - 1]


class Registered:
    """Any other node, taken apart by JAX's registry.

    - `data`: its metadata.
    """

    __slots__ = ("cls", "data", "items")

    def __init__(self, cls: type, data: Static, items: "list[Input]"):
        self.cls = cls
        self.data = data
        self.items = items


Input = Array | NoneNode | Static | Sequence | Mapping | Fields | Registered


def n_children(item: Input | ArrayRun | StaticRun | Repeat) -> int:
    """Return the number of children that an item of a sequence stands for."""
    return item.n if isinstance(item, (ArrayRun, StaticRun, Repeat)) else 1


def n_arrays(node: Input | ArrayRun | StaticRun | Repeat) -> int:
    """Return the number of arrays below a node."""
    match node:
        case Array():
            return 1
        case ArrayRun():
            return node.n
        case Repeat():
            return node.n * n_arrays(node.item)
        case Fields():
            return sum([n_arrays(child) for _, child in node.dynamic])
        case Sequence() | Mapping() | Registered():
            return sum([n_arrays(child) for child in node.items])
        case _:
            return 0


def child_at(node: Input | StaticRun, index: int) -> Input | StaticRun:
    """Return the child at an index; of a run its item, or a run of leaves as it is."""
    if isinstance(node, Fields):
        return node.dynamic[index][1]
    if type(node) is not Sequence:
        assert isinstance(node, Mapping | Registered)
        return node.items[index]
    item = node.item_at(index)
    assert not isinstance(item, ArrayRun)
    return item.item if isinstance(item, Repeat) else item


# --- Output ---------------------------------------------------------------------------------------


class Take:
    """The next array that JAX returned."""

    __slots__ = ()


class TakeRun:
    """The next `n` of them, items of a sequence."""

    __slots__ = ("n",)

    def __init__(self, n: int):
        self.n = n


class Constant:
    """A static value of the trace."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class ConstantRun:
    """Static values of the trace, items of a sequence."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]):
        self.values = values


class GivenStatic:
    """A static object that came in with the call, and where."""

    __slots__ = ("position",)

    def __init__(self, position: Position):
        self.position = position


class MakeRun:
    """Items of a sequence that are made alike.

    - `n`: their number.
    - `n_arrays`: the arrays that each takes.
    - `item`: each; the same object in all runs of such items.
    """

    __slots__ = ("item", "n", "n_arrays")

    def __init__(self, n: int, n_arrays: int, item: "Output"):
        self.n = n
        self.n_arrays = n_arrays
        self.item = item


class MakeSequence:
    """A list or a tuple."""

    __slots__ = ("cls", "items")

    def __init__(self, cls: type, items: "list[Output | TakeRun | ConstantRun | MakeRun]"):
        self.cls = cls
        self.items = items


class MakeNamedTuple:
    """A named tuple.

    - `is_standard`: whether calling its class does no more than make the tuple.
    """

    __slots__ = ("cls", "is_standard", "items")

    def __init__(self, cls: type, items: "list[Output]", is_standard: bool):
        self.cls = cls
        self.items = items
        self.is_standard = is_standard


class MakeDict:
    """A dict."""

    __slots__ = ("items", "keys")

    def __init__(self, keys: list[Any], items: "list[Output]"):
        self.keys = keys
        self.items = items


class MakeModule:
    """A Module.

    - `fields`: by name, in upstream's order: first the dynamic ones.
    - `n_dynamic`: the number of those.
    - `plain`: a class whose objects are given the fields first; None to fill a Module's dict.
    """

    __slots__ = ("cls", "fields", "n_dynamic", "plain")

    def __init__(
        self,
        cls: type,
        fields: "list[tuple[str, Output]]",
        n_dynamic: int,
        plain: type | None,
    ):
        self.cls = cls
        self.fields = fields
        self.n_dynamic = n_dynamic
        self.plain = plain


class Unflatten:
    """Any other node, put together by JAX's registry.

    - `labels`: what its items are called.
    """

    __slots__ = ("items", "labels", "treedef")

    def __init__(self, treedef: PyTreeDef, labels: Iterable[Any], items: "list[Output]"):
        self.treedef = treedef
        self.labels = labels
        self.items = items


class UnflattenGiven:
    """A node of whose metadata a part came in with the call.

    - `data`: the metadata; a list or a tuple part by part.
    """

    __slots__ = ("cls", "data", "items", "labels")

    def __init__(
        self,
        cls: type,
        data: "GivenStatic | list[Constant | GivenStatic] | tuple[Constant | GivenStatic, ...]",
        labels: Iterable[Any],
        items: "list[Output]",
    ):
        self.cls = cls
        self.data = data
        self.labels = labels
        self.items = items


Output = (
    Take
    | Constant
    | GivenStatic
    | MakeSequence
    | MakeNamedTuple
    | MakeDict
    | MakeModule
    | Unflatten
    | UnflattenGiven
)


# --- The whole ------------------------------------------------------------------------------------


class Passed(enum.Enum):
    """The way in which a call fills a parameter."""

    BY_POSITION = enum.auto()
    BY_NAME = enum.auto()
    #: `*args`: the arguments from its index on.
    EXTRA = enum.auto()
    #: `**kwargs`: the arguments that no parameter has the name of.
    MORE = enum.auto()
    LEFT_OUT = enum.auto()


class CallPlan(NamedTuple):
    """One call as data.

    - `signature`: of the function.
    - `args`, `kwargs`: its bound arguments, these sorted by name, as their arrays are.
    - `layout`: the order of all arrays.
    - `n_fun_checks`: the number of checks of the function's own static objects.
    - `output`: what is given back; `out_index` is the number of its trace.
    - `is_bare`: whether JAX returns its only array as it is, not in a list.
    - `checks_output`: whether static objects of the output may have been changed in place.
    - `repeats`: whether some static objects come more than once, and need but one look.
    - `blocks`: whether to wait for the computation; else NumPy arrays are copied.
    """

    signature: Signature
    args: list[Input]
    kwargs: dict[str, Input]
    layout: ArrayLayout
    n_fun_checks: int
    output: Output
    out_index: int
    is_bare: bool
    checks_output: bool
    repeats: bool
    blocks: bool

    def parameters(self) -> Iterator[tuple[int, str, Passed]]:
        """Yield each parameter of the function: its index, its name, and how it is filled."""
        for index, parameter in enumerate(self.signature.parameters):
            name, kind = parameter.name, parameter.kind
            if kind == VAR_POSITIONAL:
                passed = Passed.EXTRA
            elif kind == VAR_KEYWORD:
                passed = Passed.MORE
            elif kind != KEYWORD_ONLY and index < len(self.args):
                passed = Passed.BY_POSITION
            elif kind != POSITIONAL_ONLY and name in self.kwargs:
                passed = Passed.BY_NAME
            else:
                passed = Passed.LEFT_OUT
            yield index, name, passed

    def argument(self, path: tuple[int, ...]) -> Input:
        """Return the argument that a path into `(args, kwargs)` leads through."""
        in_kwargs, index, *_ = path
        return ([*self.kwargs.values()] if in_kwargs else self.args)[index]
