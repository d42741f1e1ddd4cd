"""Encodes a call plan for the native back end, where there is one and it can carry the plan out.

`_native.c` walks the arguments and makes the output; what is rare calls back into Python. The
generated function stays, for what C leaves to it: rare ways to pass arguments, checks, waiting.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
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
    CallPlan,
    Constant,
    Fields,
    GivenStatic,
    Input,
    InputItem,
    MakeDict,
    MakeModule,
    MakeNamedTuple,
    MakeSequence,
    Mapping,
    Match,
    Output,
    OutputItem,
    Passed,
    Registered,
    Repeat,
    Sequence,
    Static,
    StaticRun,
    Take,
    Unflatten,
    n_arrays,
    n_items,
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


# Of so many failures at most one may be told late, after asking Python.
_LATE_AT_MOST = 4


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
    - `fails_fast`: returns whether `match`, where arguments don't match, mostly runs no Python.
    """

    arguments: list[str]
    match: Callable[[Any, Any, tuple[Any, ...]], Callable[..., Any]]
    rebuild: Callable[..., Any]
    keeps: bool
    call: Callable[..., Callable[..., Any]]
    fails_fast: Callable[[], bool]


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
        kept, slots = _kept(plan, arguments)
        encoder = Encoder(tick, kept, slots)
        output = encoder.output(plan.output)
        inputs = [step for argument in arguments for step in encoder.input(argument.node)]
    except Unsupported:
        return None
    return native_call(
        [argument.name for argument in arguments],
        inputs,
        output,
        plan.layout.n_first,
        sum([n_arrays(argument.node) for argument in arguments]),
        len(slots),
    )


#: What to do, and with what (see `_native.c`): each an operation, whether it keeps a value for the
#: output, a number, how many there are of it and all below it, and three objects.
Instructions = list[tuple[Any, ...]]


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
    program, new_match = back_end.Program(tuple(inputs)), back_end.Match
    # A static value that has matched is asked about, in case its class was registered.
    never_asks = all(step[4] is _is_leaf for step in inputs if step[0] in _ASKING_PYTHON)
    return NativeCall(
        arguments,
        lambda own, own_all, arrays: new_match(
            program, own, np.ndarray, own_all, arrays, n_first, n_all, n_kept
        ),
        back_end.Rebuild(back_end.Program(tuple(output))),
        bool(n_kept),
        back_end.Call,
        lambda: never_asks or _LATE_AT_MOST * program.n_failed_late < program.n_failed,
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
                left_out.append(_Argument(name, Mapping(dict, [], [], None, None)))
            case Passed.LEFT_OUT:
                left_out.append(_Argument(name, Static(absent, Match.IS)))
    if len(by_name) < len(plan.kwargs):
        # Some in `**kwargs`, maybe between the others.
        raise Unsupported
    by_name.sort(key=lambda argument: argument.name)
    return [*positional, *by_name, *left_out]


# --- Static objects that come in and go out -------------------------------------------------------


#: A place in the arguments: the path to a leaf, or to a node and which of its static fields.
_Place = tuple[tuple[int, ...], int | None]


def _place(position: Position) -> _Place:
    if position.half:
        # The function's own.
        raise Unsupported
    return position.path, None if position.is_leaf else position.part


def _kept(plan: CallPlan, arguments: list[_Argument]) -> tuple[set[int], dict[_Place, int]]:
    """Return which static values are kept for the output.

    **Returns:**

    The `id`s of what is planned for them, and the index of each in the order in which they are met.
    """
    places = {_place(position) for position in plan.given}
    if not places:
        return set(), {}
    statics = [each for argument in arguments for each in _statics(*argument[1:])]
    # In a run, one is planned for all items: all are kept.
    kept = {id(static) for place, static in statics if place in places}
    met = [place for place, static in statics if id(static) in kept]
    if not places.issubset(met):
        raise Unsupported
    return kept, {place: index for index, place in enumerate(met)}


def _statics(
    node: Input, path: tuple[int, ...], offset: int = 0
) -> Iterator[tuple[_Place, Static]]:
    """Yield the static values from a node on that can be kept, in the order of instructions."""
    match node:
        case Static():
            yield (path, None), node
        case Sequence():
            index = offset
            for item in node.items:
                start, index = index, index + n_items(item)
                child = item.item if isinstance(item, Repeat) else item
                if not isinstance(child, Array | StaticRun):
                    for number in range(start, index):
                        yield from _statics(child, (*path, number))
        case Mapping() | Registered() | Fields():
            for index, child in enumerate(node.items):
                yield from _statics(child, (*path, index))
            if isinstance(node, Fields):
                for part, (_, static) in enumerate(node.static, 1):
                    yield (path, part), static
        case _:
            pass


# --- Instructions ---------------------------------------------------------------------------------


class Encoder:
    """The encoding of a plan: the instruction for a node, then those for what is below it."""

    __slots__ = ("_kept", "_slots", "_tick")

    def __init__(self, tick: Callable[[], None], kept: set[int], slots: dict[_Place, int]):
        """`tick`: see `encode`; `kept`, `slots`: see `_kept`."""
        self._tick = tick
        self._kept = kept
        self._slots = slots

    def _steps(
        self,
        op: int,
        first: Any = None,
        second: Any = None,
        third: Any = None,
        n: int = 0,
        keeps: bool = False,
        below: Iterable[Instructions] = (),
    ) -> Instructions:
        steps: Instructions = [()]
        for part in below:
            self._tick()
            steps += part
        steps[0] = (op, keeps, n, len(steps), first, second, third)
        return steps

    # Inputs.

    def input(self, node: InputItem) -> Instructions:
        """Return how a value, or a run of them, is read."""
        match node:
            case Array():
                return self._steps(_ARRAY, ArrayImpl, is_plain_array)
            case Repeat(item=Array()):
                return self._steps(_ARRAY_RUN, ArrayImpl, is_plain_array, n=node.n)
            case Repeat():
                return self._steps(_REPEAT, n=node.n, below=[self.input(node.item)])
            case StaticRun():
                return self._steps(_SAME_RUN, node.values, n=node.n)
            case Static():
                return self._static(node)
            case Sequence():
                return self._steps(_SEQUENCE, node.cls, n=node.n, below=map(self.input, node.items))
            case Mapping():
                return self._mapping(node)
            case Fields():
                # In this order they are in what `rebuild` made.
                static = dict(node.static)
                names, children = (*node.dynamic, *static), [*node.items, *static.values()]
                return self._steps(_FIELDS, node.cls, names, below=map(self.input, children))
            case Registered():
                parts = functools.partial(_parts, predicate(node.data))
                below = map(self.input, node.items)
                return self._steps(REGISTERED, node.cls, parts, n=len(node.items), below=below)

    def _static(self, node: Static) -> Instructions:
        matching = self._matching(node)
        if not node.may_become_node:
            return matching
        return self._steps(_BOTH, below=[matching, self._steps(_PREDICATE, _is_leaf)])

    def _matching(self, node: Static) -> Instructions:
        value, keeps = node.value, id(node) in self._kept
        match node.match:
            case Match.IS:
                return self._steps(_IS, value, keeps=keeps)
            case Match.SAME:
                return self._steps(_SAME, value, keeps=keeps)
            case Match.IS_OR_KEY:
                return self._steps(_IS_OR, value, predicate(node), keeps=keeps)
            case Match.OPAQUE:
                return self._steps(_PREDICATE, predicate(node), keeps=keeps)
            case Match.KEY:
                cls, has = type(value), predicate(node)
                check = native_check_of(value, node.key)
                if check is None:
                    return self._steps(_TYPE_AND, cls, has, keeps=keeps)
                return self._steps(_HELD_OR, cls, check, has, keeps=keeps)

    def _mapping(self, node: Mapping) -> Instructions:
        keys, below = tuple(node.keys), map(self.input, node.items)
        if node.known_keys is not None:
            return self._steps(_DICT_BY, node.cls, keys, node.known_keys.match, below=below)
        [cls] = node.key_types or [None]
        return self._steps(_DICT, node.cls, keys, cls, below=below)

    # Outputs.

    def output(self, node: OutputItem) -> Instructions:
        """Return how a value, or a run of them, is made."""
        match node:
            case Take():
                return self._steps(_TAKE)
            case Repeat(item=Take()):
                return self._steps(_TAKE_RUN, n=node.n)
            case Repeat():
                return self._steps(_MAKE_RUN, n=node.n, below=[self.output(node.item)])
            case StaticRun():
                return self._steps(_CONSTANT_RUN, node.values, n=node.n)
            case Constant():
                return self._steps(_CONSTANT, node.value)
            case GivenStatic():
                return self._steps(_KEPT, n=self._slots[_place(node.position)])
            case MakeSequence():
                op, n = _LIST if node.cls is list else _TUPLE, sum(map(n_items, node.items))
                return self._steps(op, n=n, below=map(self.output, node.items))
            case MakeNamedTuple() if node.is_standard:
                n, below = len(node.items), map(self.output, node.items)
                return self._steps(_NAMED_TUPLE, node.cls, n=n, below=below)
            case MakeNamedTuple():
                return self._unflatten(functools.partial(call_with, node.cls), node.items)
            case MakeDict():
                below = map(self.output, node.items)
                return self._steps(_MAKE_DICT, tuple(node.keys), below=below)
            case MakeModule():
                names, below = zip(*node.fields, strict=True) if node.fields else ((), ())
                return self._steps(_MODULE, node.cls, names, below=map(self.output, below))
            case Unflatten():
                return self._unflatten(unflatten_by(node.treedef), node.items)
            case _:
                raise Unsupported

    def _unflatten(
        self, unflatten: Callable[[list[Any]], Any], items: list[Output]
    ) -> Instructions:
        return self._steps(UNFLATTEN, unflatten, n=len(items), below=map(self.output, items))


# --- Called by the back end -----------------------------------------------------------------------


def _is_leaf(value: Any) -> bool:
    return default_registry.flatten_one_level(value) is None


def _is_opaque(node: Static, value: Any) -> bool:
    return is_same_opaque(value, node.value, hash(value), node.key)


def _parts(is_same_data: Callable[[Any], bool], value: Any) -> tuple[Any, ...] | None:
    """Return the children of a registered node, if its metadata is the same."""
    children, data = default_registry.flatten_one_level(value)
    return tuple(children) if is_same_data(data) else None


def predicate(node: Static) -> Callable[[Any], bool]:
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
