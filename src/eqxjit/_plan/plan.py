"""The plan of one specialised call: what to guard, take, pass and rebuild.

`build.py` makes it, `call_source.py` writes it as Python, `check.py` carries out its guards.
"""

import bisect
import enum
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from .._compat import PyTreeDef
from .._trees.array_layout import ArrayLayout
from .._trees.given import Position
from .._trees.key_cache import KnownKeys
from .signature import KEYWORD_ONLY, POSITIONAL_ONLY, VAR_KEYWORD, VAR_POSITIONAL, Signature

# --- Items of sequences ---------------------------------------------------------------------------

_Node = TypeVar("_Node")


@dataclass(eq=False, slots=True)
class StaticRun:
    """Items of a sequence that are numbers and texts.

    - `values`: the traced ones.
    """

    values: tuple[Any, ...]

    @property
    def n(self) -> int:
        return len(self.values)


@dataclass(eq=False, slots=True)
class Repeat(Generic[_Node]):
    """Items of a sequence that are alike.

    - `n`: their number.
    - `item`: each; the same object in all runs of such items.
    """

    n: int
    item: _Node


def n_items(item: Any) -> int:
    """Return the number of items of a sequence that a node, or a run, stands for."""
    return item.n if isinstance(item, StaticRun | Repeat) else 1


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


@dataclass(eq=False, slots=True)
class Static:
    """A static value, or `None`.

    - `value`: the traced one.
    - `match`: how another is compared with it.
    - `key`: its typed static key, or its hash, where the comparison takes one.
    - `may_become_node`: whether its class may yet be registered as a pytree.
    """

    value: Any
    match: Match
    key: Any = None
    may_become_node: bool = False


@dataclass(eq=False, slots=True)
class Sequence:
    """A list, a tuple, or a named tuple of `n` items."""

    cls: type
    n: int
    items: "list[InputItem]"
    #: The index of the first child of each item, and their number, once somebody has asked.
    _starts: list[int] | None = field(default=None, init=False)

    def child_at(self, index: int) -> "Input | StaticRun":
        """Return the child at an index, or the run of static values that it is in."""
        if self._starts is None:
            self._starts = [*itertools.accumulate(map(n_items, self.items), initial=0)]
        item = self.items[bisect.bisect_right(self._starts, index) - 1]
        return item.item if isinstance(item, Repeat) else item


@dataclass(eq=False, slots=True)
class Mapping:
    """A dict.

    - `cls`, `keys`, `items`: its class, its keys in the order of the registry, and its values.
    - `key_types`: of keys that equal values and types tell apart; else None.
    - `known_keys`: what compares all keys, where that takes their typed static key.
    """

    cls: type
    keys: list[Any]
    items: "list[Input]"
    key_types: set[type] | None
    known_keys: KnownKeys | None


@dataclass(eq=False, slots=True)
class Fields:
    """A Module, read field by field.

    - `static`: its static fields by name, in the order of the registry.
    - `dynamic`, `items`: the names of the others, likewise, and what they hold.
    """

    cls: type
    static: list[tuple[str, Static]]
    dynamic: list[str]
    items: "list[Input]"


@dataclass(eq=False, slots=True)
class Registered:
    """Any other node, taken apart by JAX's registry.

    - `data`: its metadata.
    """

    cls: type
    data: Static
    items: "list[Input]"


InnerInput = Sequence | Mapping | Fields | Registered
Input = Array | Static | InnerInput
InputItem = Input | StaticRun | Repeat[Input]


def n_arrays(node: InputItem) -> int:
    """Return the number of arrays below a node."""
    if isinstance(node, Array):
        return 1
    if isinstance(node, Repeat):
        return node.n * n_arrays(node.item)
    if isinstance(node, InnerInput):
        return sum([n_arrays(child) for child in node.items])
    return 0


# --- Output ---------------------------------------------------------------------------------------


class Take:
    """The next array that JAX returned."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class Constant:
    """A static value of the trace."""

    value: Any


@dataclass(eq=False, slots=True)
class GivenStatic:
    """A static object that came in with the call, and where."""

    position: Position


@dataclass(eq=False, slots=True)
class MakeSequence:
    """A list or a tuple."""

    cls: type
    items: "list[OutputItem]"


@dataclass(eq=False, slots=True)
class MakeNamedTuple:
    """A named tuple.

    - `is_standard`: whether calling its class does no more than make the tuple.
    """

    cls: type
    items: "list[Output]"
    is_standard: bool


@dataclass(eq=False, slots=True)
class MakeDict:
    """A dict."""

    keys: list[Any]
    items: "list[Output]"


@dataclass(eq=False, slots=True)
class MakeModule:
    """A Module.

    - `fields`: by name, in upstream's order: first the dynamic ones.
    - `n_dynamic`: the number of those.
    - `plain`: a class whose objects are given the fields first; None to fill a Module's dict.
    """

    cls: type
    fields: "list[tuple[str, Output]]"
    n_dynamic: int
    plain: type | None


@dataclass(eq=False, slots=True)
class Unflatten:
    """Any other node, put together by JAX's registry.

    - `labels`: what its items are called.
    """

    treedef: PyTreeDef
    labels: Iterable[Any]
    items: "list[Output]"


@dataclass(eq=False, slots=True)
class UnflattenGiven:
    """A node of whose metadata a part came in with the call.

    - `data`: the metadata; a list or a tuple part by part.
    """

    cls: type
    data: GivenStatic | list[Constant | GivenStatic] | tuple[Constant | GivenStatic, ...]
    labels: Iterable[Any]
    items: "list[Output]"


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
OutputItem = Output | StaticRun | Repeat[Output]


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
    - `given`: the positions of the static objects in it that came in.
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
    given: list[Position]
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
