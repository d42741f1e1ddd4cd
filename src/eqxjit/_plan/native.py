"""Encodes a call plan for the native back end, where there is one and it can carry the plan out.

`_native.c` walks the arguments and makes the output; what is rare calls back into Python. The
generated function stays, for what C leaves to it: rare ways to pass arguments, checks, waiting.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from jax.tree_util import default_registry

from .._compat import ArrayImpl, PyTreeDef, native_back_end
from .._trees.constants import is_same
from .._trees.given import Position
from .._trees.key_cache import has_key, native_check_of
from .._trees.numpy_inputs import is_plain_array
from .._trees.static_key import is_same_opaque
from .plan import (
    Array,
    ArrayRun,
    CallPlan,
    Constant,
    ConstantRun,
    Fields,
    GivenStatic,
    Input,
    MakeDict,
    MakeModule,
    MakeNamedTuple,
    MakeRun,
    MakeSequence,
    Mapping,
    Match,
    NoneNode,
    Output,
    Passed,
    Registered,
    Repeat,
    Sequence,
    Static,
    StaticRun,
    Take,
    TakeRun,
    Unflatten,
    UnflattenGiven,
    child_at,
    n_arrays,
    n_children,
)
from .signature import absent

# In the order of `_native.c`.
(
    _ARRAY, _IS, _SAME, _IS_OR, _HELD_OR, _TYPE_AND, _PREDICATE, _BOTH,
    _SEQUENCE, _DICT, _DICT_BY, _FIELDS, REGISTERED, _ARRAY_RUN, _SAME_RUN, _REPEAT,
    _TAKE, _CONSTANT, _KEPT, _LIST, _TUPLE, _NAMED_TUPLE, _MAKE_DICT, _MODULE, UNFLATTEN,
    _TAKE_RUN, _CONSTANT_RUN, _MAKE_RUN,
) = range(28)  # fmt: skip


def native_enabled() -> bool:
    """Return whether specialised calls are carried out by the native back end.

    It is built where a C compiler is found, and switched off by `EQXJIT_NATIVE=0`, which is looked
    at whenever a specialised call is made. Generated Python serves without it, with the same
    results. Calls that it can't carry out are Python's either way.

    **Returns:**

    True if it is there, and not switched off.

    !!! example

        ```python
        >>> import eqxjit
        >>> isinstance(eqxjit.native_enabled(), bool)
        True

        ```
    """
    return native_back_end() is not None


# Those that ask Python whether a value that isn't the same matches all the same.
_ASKING_PYTHON = frozenset({_IS_OR, _HELD_OR, _TYPE_AND, _PREDICATE, _DICT_BY, REGISTERED})


class Unsupported(Exception):
    """A plan that the native back end can't carry out."""


class NativeCall(NamedTuple):
    """A plan, encoded.

    - `arguments`: the names of the parameters that `match` takes, in its order.
    - `match`: takes the functions that copy one NumPy array, and many, or None for each, and the
        function's arrays.
    - `rebuild`: makes the output.
    - `keeps`: whether `match` returns static objects as well, for `rebuild`.
    - `call`: makes the whole call, of these and what else it takes.
    - `fails_fast`: whether `match` runs no Python where arguments don't match.
    """

    arguments: list[str]
    match: Callable[[Any, Any, tuple[Any, ...]], Callable[..., Any]]
    rebuild: Callable[..., Any]
    keeps: bool
    call: Callable[..., Callable[..., Any]]
    fails_fast: bool


def encode(plan: CallPlan, tick: Callable[[], None]) -> NativeCall | None:
    """Return a plan for the native back end; None if that isn't for it.

    **Arguments:**

    - `plan`: the plan.
    - `tick`: called now and then; what it raises ends the encoding.
    """
    if not native_enabled() or plan.repeats:
        return None
    try:
        arguments = _arguments(plan)
        kept = _Kept(plan, arguments)
        inputs = Encoder(tick, kept.marked)
        for argument in arguments:
            inputs.add_input(argument.node)
        output = Encoder(tick, kept.marked, kept.slots)
        output.add_output(plan.output)
    except Unsupported:
        return None
    return native_call(
        [argument.name for argument in arguments],
        inputs.program(),
        output.program(),
        plan.layout.n_first,
        sum([n_arrays(argument.node) for argument in arguments]),
        len(kept.slots),
    )


#: What to do, and with what (see `_native.c`): each an operation, whether it keeps a value for the
#: output, a number, how many there are of it and all below it, and three objects.
Instructions = tuple[tuple[Any, ...], ...]


def native_call(
    arguments: list[str],
    inputs: Instructions,
    output: Instructions,
    n_first: int,
    n_all: int,
    n_kept: int = 0,
) -> NativeCall:
    """Return a call by its programs.

    **Arguments:**

    - `arguments`: the names of the parameters, in the order of `inputs`.
    - `inputs`, `output`: how they are read, and it is made.
    - `n_first`, `n_all`: how many arrays there are in the first argument, and in all.
    - `n_kept`: how many static objects are kept for the output.
    """
    back_end = native_back_end()
    assert back_end is not None
    program, new_match = back_end.Program(inputs), back_end.Match
    asking = [step[4] for step in inputs if step[0] in _ASKING_PYTHON]
    return NativeCall(
        arguments,
        lambda own, own_all, arrays: new_match(
            program, own, np.ndarray, own_all, arrays, n_first, n_all, n_kept
        ),
        back_end.Rebuild(back_end.Program(output)),
        bool(n_kept),
        back_end.Call,
        # A static value that has matched is asked about, in case its class was registered.
        all(predicate is _is_leaf for predicate in asking),
    )


class _Argument(NamedTuple):
    """A parameter: what is planned for it, and where in the bound arguments that is.

    - `path`: the path to it; of `*args`, to the items, the first of which is number `offset`.
    """

    name: str
    node: Input
    path: tuple[int, ...] = ()
    offset: int = 0


def _arguments(plan: CallPlan) -> list[_Argument]:
    """Return the parameters in the order of their arrays, which for keywords is by name."""
    positional: list[_Argument] = []
    by_name: list[_Argument] = []
    left_out: list[_Argument] = []
    numbers = {name: number for number, name in enumerate(plan.kwargs)}
    for index, name, passed in plan.parameters():
        match passed:
            case Passed.BY_POSITION:
                positional.append(_Argument(name, plan.args[index], (0, index)))
            case Passed.BY_NAME:
                by_name.append(_Argument(name, plan.kwargs[name], (1, numbers[name])))
            case Passed.EXTRA:
                extra = plan.args[index:]
                node = Sequence(tuple, len(extra), [*extra])
                positional.append(_Argument(name, node, (0,), index))
            case Passed.MORE:
                left_out.append(_Argument(name, Mapping(dict, [], [], None, None, False)))
            case Passed.LEFT_OUT:
                left_out.append(_Argument(name, Static(absent, Match.IS)))
    if len(by_name) < len(plan.kwargs):
        # Some in `**kwargs`, maybe between the others.
        raise Unsupported
    by_name.sort(key=lambda argument: argument.name)
    return [*positional, *by_name, *left_out]


# --- Static objects that come in and go out -------------------------------------------------------


def _given_in(output: Output) -> list[Position]:
    """Return the positions of the static objects in an output that came in."""
    found: list[Position] = []
    pending: list[Any] = [output]
    while pending:
        match pending.pop():
            case GivenStatic() as node:
                found.append(node.position)
            case MakeRun() as node:
                pending.append(node.item)
            case MakeModule() as node:
                pending += [child for _, child in node.fields]
            case MakeSequence() | MakeNamedTuple() | MakeDict() | Unflatten() as node:
                pending += node.items
            case UnflattenGiven():
                raise Unsupported
            case _:
                pass
    return found


#: A place in the arguments: the path to a leaf, or to a node and which of its static fields.
_Place = tuple[tuple[int, ...], int | None]


def _place(position: Position) -> _Place:
    if position.half:
        # The function's own.
        raise Unsupported
    return position.path, None if position.is_leaf else position.part


def _static_at(plan: CallPlan, place: _Place) -> Static:
    path, part = place
    node: Any = plan.argument(path)
    for index in path[2:]:
        node = child_at(node, index)
    if isinstance(node, Fields) and part is not None:
        return node.part(part)[1]
    if isinstance(node, Static) and part is None:
        return node
    raise Unsupported


class _Kept:
    """The static objects that are kept for the output.

    - `marked`: the `id`s of what is planned for them.
    - `slots`: the index of each, in the order in which they are met.
    """

    __slots__ = ("marked", "slots")

    def __init__(self, plan: CallPlan, arguments: list[_Argument]):
        places = {_place(position) for position in _given_in(plan.output)}
        self.marked = {id(_static_at(plan, place)) for place in places}
        self.slots: dict[_Place, int] = {}
        for argument in arguments if places else ():
            self._number(argument.node, argument.path, argument.offset)

    def _number(self, node: Input, path: tuple[int, ...], offset: int = 0) -> None:
        match node:
            case Static():
                self._add(node, (path, None))
            case Sequence():
                index = offset
                for item in node.items:
                    n = n_children(item)
                    if not isinstance(item, ArrayRun | StaticRun):
                        child = item.item if isinstance(item, Repeat) else item
                        for number in range(index, index + n):
                            self._number(child, (*path, number))
                    index += n
            case Mapping() | Registered():
                for index, child in enumerate(node.items):
                    self._number(child, (*path, index))
            case Fields():
                for index, (_, child) in enumerate(node.dynamic):
                    self._number(child, (*path, index))
                for part, (_, static) in enumerate(node.static, 1):
                    self._add(static, (path, part))
            case _:
                pass

    def _add(self, node: Static, place: _Place) -> None:
        if id(node) in self.marked:
            self.slots[place] = len(self.slots)


# --- Instructions ---------------------------------------------------------------------------------


class Encoder:
    """The instructions of one half of a plan: a node, then those of what is below it."""

    __slots__ = ("_instructions", "_kept", "_slots", "_tick")

    def __init__(
        self, tick: Callable[[], None], kept: set[int], slots: dict[_Place, int] | None = None
    ):
        self._tick = tick
        self._kept = kept
        self._slots = slots or {}
        #: See `Instructions`.
        self._instructions: list[tuple[Any, ...]] = []

    def program(self) -> Instructions:
        """Return what was encoded."""
        return tuple(self._instructions)

    def _open(
        self,
        op: int,
        first: Any = None,
        second: Any = None,
        third: Any = None,
        n: int = 0,
        keeps: bool = False,
        below: Iterable[Callable[[], None]] = (),
    ) -> None:
        at = len(self._instructions)
        self._instructions.append(())
        for add in below:
            self._tick()
            add()
        size = len(self._instructions) - at
        self._instructions[at] = (op, keeps, n, size, first, second, third)

    # Inputs.

    def add_input(self, node: Input) -> None:
        """Encode how a value is read."""
        match node:
            case Array():
                self._open(_ARRAY, ArrayImpl, is_plain_array)
            case NoneNode():
                self._open(_IS)
            case Static():
                self._add_static(node)
            case Sequence():
                self._open(
                    _SEQUENCE, node.cls, n=node.n, below=self._each(self._add_item, node.items)
                )
            case Mapping():
                self._add_mapping(node)
            case Fields():
                # In this order they are in what `rebuild` made.
                names = tuple([name for name, _ in (*node.dynamic, *node.static)])
                children = [child for _, child in (*node.dynamic, *node.static)]
                self._open(_FIELDS, node.cls, names, below=self._each(self.add_input, children))
            case Registered():
                parts = functools.partial(_parts, _predicate(node.data))
                below = self._each(self.add_input, node.items)
                self._open(REGISTERED, node.cls, parts, n=len(node.items), below=below)

    @staticmethod
    def _each(add: Callable[[Any], None], children: Iterable[Any]) -> list[Callable[[], None]]:
        return [functools.partial(add, child) for child in children]

    def _add_item(self, item: Input | ArrayRun | StaticRun | Repeat) -> None:
        match item:
            case ArrayRun():
                self._open(_ARRAY_RUN, ArrayImpl, is_plain_array, n=item.n)
            case StaticRun():
                self._open(_SAME_RUN, item.values, n=item.n)
            case Repeat():
                self._open(_REPEAT, n=item.n, below=self._each(self.add_input, [item.item]))
            case _:
                self.add_input(item)

    def _add_static(self, node: Static) -> None:
        if not node.may_become_node:
            self._add_match(node)
            return

        is_leaf = functools.partial(self._open, _PREDICATE, _is_leaf)
        self._open(_BOTH, below=[functools.partial(self._add_match, node), is_leaf])

    def _add_match(self, node: Static) -> None:
        value, keeps = node.value, id(node) in self._kept
        match node.match:
            case Match.IS:
                self._open(_IS, value, keeps=keeps)
            case Match.SAME:
                self._open(_SAME, value, keeps=keeps)
            case Match.IS_OR_KEY:
                self._open(_IS_OR, value, _predicate(node), keeps=keeps)
            case Match.KEY:
                has = _predicate(node)
                check = native_check_of(value, node.key)
                if check is None:
                    self._open(_TYPE_AND, type(value), has, keeps=keeps)
                else:
                    self._open(_HELD_OR, type(value), check, has, keeps=keeps)
            case Match.OPAQUE:
                self._open(_PREDICATE, _predicate(node), keeps=keeps)

    def _add_mapping(self, node: Mapping) -> None:
        keys, below = tuple(node.keys), self._each(self.add_input, node.items)
        if node.key_types is not None:
            [cls] = node.key_types
            self._open(_DICT, node.cls, keys, cls, below=below)
        elif node.known_keys is None:
            self._open(_DICT, node.cls, keys, below=below)
        else:
            self._open(_DICT_BY, node.cls, keys, node.known_keys.match, below=below)

    # Outputs.

    def add_output(self, node: Output) -> None:
        """Encode how a value is made."""
        match node:
            case Take():
                self._open(_TAKE)
            case Constant():
                self._open(_CONSTANT, node.value)
            case GivenStatic():
                self._open(_KEPT, n=self._slots[_place(node.position)])
            case MakeSequence():
                op, n = _LIST if node.cls is list else _TUPLE, sum(map(_n_items, node.items))
                self._open(op, n=n, below=self._each(self._add_made_item, node.items))
            case MakeNamedTuple() if node.is_standard:
                below = self._each(self.add_output, node.items)
                self._open(_NAMED_TUPLE, node.cls, n=len(node.items), below=below)
            case MakeNamedTuple():
                self._add_unflatten(functools.partial(call_with, node.cls), node.items)
            case MakeDict():
                self._open(
                    _MAKE_DICT, tuple(node.keys), below=self._each(self.add_output, node.items)
                )
            case MakeModule():
                self._add_module(node)
            case Unflatten():
                self._add_unflatten(unflatten_by(node.treedef), node.items)
            case _:
                raise Unsupported

    def _add_made_item(self, item: Output | TakeRun | ConstantRun | MakeRun) -> None:
        match item:
            case TakeRun():
                self._open(_TAKE_RUN, n=item.n)
            case ConstantRun():
                self._open(_CONSTANT_RUN, item.values, n=len(item.values))
            case MakeRun():
                self._open(_MAKE_RUN, n=item.n, below=self._each(self.add_output, [item.item]))
            case _:
                self.add_output(item)

    def _add_unflatten(self, unflatten: Callable[[list[Any]], Any], items: list[Output]) -> None:
        self._open(UNFLATTEN, unflatten, n=len(items), below=self._each(self.add_output, items))

    def _add_module(self, node: MakeModule) -> None:
        template: dict[str, Any] = {}
        made: dict[str, Output] = {}
        for name, child in node.fields:
            template[name] = child.value if isinstance(child, Constant) else None
            if not isinstance(child, Constant):
                made[name] = child
        below = self._each(self.add_output, made.values())
        self._open(_MODULE, node.cls, tuple(made), template, below=below)


def _n_items(item: Output | TakeRun | ConstantRun | MakeRun) -> int:
    match item:
        case TakeRun() | MakeRun():
            return item.n
        case ConstantRun():
            return len(item.values)
        case _:
            return 1


# --- Called by the back end -----------------------------------------------------------------------


def _is_leaf(value: Any) -> bool:
    return default_registry.flatten_one_level(value) is None


def _is_opaque(node: Static, value: Any) -> bool:
    return is_same_opaque(value, node.value, hash(value), node.key)


def _parts(is_same_data: Callable[[Any], bool], value: Any) -> tuple[Any, ...] | None:
    """Return the children of a registered node, if its metadata is the same."""
    children, data = default_registry.flatten_one_level(value)
    return tuple(children) if is_same_data(data) else None


def _predicate(node: Static) -> Callable[[Any], bool]:
    """Return what tells whether a value matches a planned one."""
    match node.match:
        case Match.IS:
            return functools.partial(operator.is_, node.value)
        case Match.SAME:
            return functools.partial(is_same, node.value)
        case Match.OPAQUE:
            return functools.partial(_is_opaque, node)
        case _:
            return functools.partial(has_key, key=node.key)


def unflatten_by(treedef: PyTreeDef) -> Callable[[list[Any]], Any]:
    """Return what unflattens a list of leaves."""
    # Not the bound method: Python's garbage collector can't see through jaxlib's.
    return functools.partial(type(treedef).unflatten, treedef)


def call_with(cls: type, items: list[Any]) -> Any:
    """Return what a class makes of its arguments."""
    return cls(*items)
