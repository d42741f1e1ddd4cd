"""The output of a trace, without its arrays; each call gets back its own static objects.

An output's static half is found when the function is traced, and serves all calls of the entry.
What is equal needn't be the same: of an object that came in with the traced call only the position
is kept, where each call has its own. So an entry doesn't keep alive what it was made for, either.
"""

import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
from jax.tree_util import tree_unflatten

from .._compat import CAN_ASSEMBLE, PyTreeDef, assembled, treedef_rows
from .given import (
    WHOLE,
    Given,
    Index,
    Position,
    Subtree,
    all_subtrees,
    are_equal,
    has_parts,
    is_plain,
    is_told_by_key,
    located,
    parts_of,
    referents,
    subtrees_of,
    values_in,
    varies,
)
from .mutation import mutable_among
from .partition import with_arrays
from .static_key import compares_by_identity, is_hashable, stays

#: What a traced function returns to JAX: its arrays, or its only one as it is, which saves a list.
#: Those of a trace whose output differs from the first one's in anything but arrays come under the
#: index of its `OutSpec` among its entry's.
Output = jax.Array | list[Any] | dict[int, list[Any]]


def output_of(index: int, arrays: list[Any]) -> Output:
    """Return the arrays of a trace as its traced function returns them."""
    if index:
        return {index: arrays}
    return arrays[0] if len(arrays) == 1 else arrays


def index_of(output: Output) -> int:
    """Return the index of an output's `OutSpec` among those of its entry."""
    return next(iter(output)) if type(output) is dict else 0


def arrays_of(output: Output) -> list[Any]:
    """Return the arrays of an output."""
    if type(output) is dict:
        return next(iter(output.values()))
    return output if type(output) is list else [output]


class _Weak:
    """A stand-in for a static object, without keeping it alive; for a tuple, if it holds one."""

    __slots__ = ("get",)

    def __init__(self, get: Any):
        self.get = get


def _weakly(value: Any, ids: Collection[int]) -> Any:
    """Return a static value as it can be kept: itself, if it isn't one of those given, by `id`."""
    kind = type(value)
    if kind is tuple:
        parts = tuple([_weakly(part, ids) for part in value])
        if any(type(part) is _Weak for part in parts):
            return _Weak(lambda: tuple(map(_strongly, parts)))
    elif kind is types.MethodType:
        if id(value.__self__) in ids:
            return _Weak(weakref.WeakMethod(value))
    elif id(value) in ids and not stays(value):
        return _Weak(weakref.ref(value))
    return value


def _strongly(value: Any) -> Any:
    return value.get() if type(value) is _Weak else value


class _Node(NamedTuple):
    """A node of the output that is put together for each call, from the subtrees before it.

    - `kind`: the class of the object.
    - `arity`: how many children it has.
    - `parts`: of its metadata, each with its index: a value, a `_Weak` or a `Position`.
    - `container`: makes the metadata from its parts; None if that is the one part.
    """

    kind: type
    arity: int
    parts: list[tuple[int, Any]]
    container: type | None


#: How a treedef is made: its subtrees in post-order. A treedef is the same for all calls, and a
#: `Position` is one of the call's own.
_Step = PyTreeDef | _Node | Position


class OutSpec:
    """The output of a trace: its structure and its leaves, `DYNAMIC` for each array.

    What came in with the call that was traced is each call's own, from the same position. So it is
    neither kept alive, nor can it have been changed in place.

    - `n_nodes`: how many nodes it has.
    - `own`: the static objects in it that didn't come in.
    - `mutable`: those of them that can be changed in place.
    - `is_given`: whether anything in it did come in; `varies`: and need not be the same in all
        calls.
    """

    __slots__ = ("_leaves", "_steps", "is_given", "mutable", "n_nodes", "own", "varies")

    def __init__(self, treedef: PyTreeDef, leaves: tuple[Any, ...], given: Given):
        self.n_nodes = treedef.num_nodes
        self._leaves = leaves
        self._steps: list[_Step] = [treedef]
        self.own: list[Any] = []
        self.is_given = self.varies = False
        nodes = treedef_rows(treedef)
        metadata = (value for _, _, data, cls in nodes for value in values_in(data, cls))
        if not (all(map(is_plain, metadata)) and all(map(is_plain, leaves))):
            self._refer(treedef, leaves, given)
        # A method changes with its object, which compares by identity.
        self.mutable = mutable_among([v for v in self.own if type(v) is not types.MethodType])

    def _refer(self, treedef: PyTreeDef, leaves: tuple[Any, ...], given: Given) -> None:
        index = Index(given)
        ids = {id(value) for half in given.halves for value in referents(half.key)}

        def referred(value: Any, path: tuple[int, ...]) -> Any:
            if is_plain(value):
                return value
            kept = index.find((id(value),), path) or _weakly(value, ids)
            if kept is value:
                self.own.append(value)
            return kept

        subtrees = all_subtrees(treedef, index.marks)
        paths = [subtree.path for subtree in subtrees if subtree.is_leaf]
        self._leaves = tuple(map(referred, leaves, paths))
        # A leaf that can't be hashed can't be told to have changed: upstream returns it, too.
        self.own = [leaf for leaf in self.own if is_hashable(leaf)]
        self._steps = _steps_of(treedef, subtrees, index, referred)
        self.is_given = any(type(leaf) in (Position, _Weak) for leaf in self._leaves) or any(
            type(step) is not PyTreeDef for step in self._steps
        )
        self.varies = subtrees[-1].varies or any(self.leaf_positions(leaves))

    def resolve(self, given: Given | None) -> tuple[tuple[Any, ...], PyTreeDef]:
        """Return the leaves and the structure for a call, with its own static objects.

        `given` may be None where `is_given` is false.
        """
        if not self.is_given:
            [treedef] = self._steps
            return self._leaves, treedef
        assert given is not None

        def value_of(value: Any) -> Any:
            return given.get(value) if type(value) is Position else _strongly(value)

        made: list[PyTreeDef] = []
        for step in self._steps:
            if isinstance(step, _Node):
                parts = [value_of(part) for _, part in step.parts]
                data = parts[0] if step.container is None else step.container(parts)
                start = len(made) - step.arity
                made[start:] = [assembled((step.kind, data), made[start:])]
            elif isinstance(step, Position):
                made.append(given.subtree(step.half, step.path))
            else:
                made.append(step)
        [treedef] = made
        return tuple([value_of(leaf) for leaf in self._leaves]), treedef

    def rebuild(self, arrays: list[Any], given: Given | None) -> Any:
        """Return the output of a call. (A marker behind the last array isn't looked at.)"""
        static, treedef = self.resolve(given)
        return tree_unflatten(treedef, with_arrays(static, arrays))

    def describes(self, treedef: PyTreeDef, leaves: tuple[Any, ...], given: Given) -> bool:
        """Return whether another trace's output differs in its arrays alone."""
        try:
            own, own_treedef = self.resolve(given)
            if len(leaves) != len(own) or not all(map(operator.is_, own, leaves)):
                return False
            return are_equal(own_treedef, treedef, given, is_told_by_key)
        except Exception:
            # Metadata that can't be compared belongs to the one trace that made it.
            return False

    def positions(
        self, treedef: PyTreeDef, given: Given
    ) -> Iterator[tuple[tuple[int, ...], int, Position]]:
        """Yield where the static objects in nodes came in: the path to the node, and which part.

        What compares by identity is left out: it is the same for all calls of the entry.

        - `treedef`: the structure for the call, as `resolve` returns it.
        """
        if not self.is_given:
            return
        paths = (path for path, _ in located(treedef))
        for step in self._steps:
            if isinstance(step, _Node):
                path = next(paths)
                for part, value in step.parts:
                    is_given = type(value) is Position
                    if is_given and not compares_by_identity(type(given.get(value))):
                        yield path, part, value
            elif isinstance(step, Position):
                for came, (_, _, metadata, cls) in located(given.subtree(step.half, step.path)):
                    path = next(paths)
                    for part, value in parts_of(metadata, cls):
                        if varies(value):
                            position = Position(step.half, (*step.path, *came), part, False)
                            yield path, part, position
            else:
                for _ in range(step.num_nodes):
                    next(paths)

    def leaf_positions(self, leaves: tuple[Any, ...]) -> Iterator[tuple[int, Position]]:
        """Yield where leaves came in, but for what compares by identity: which, and its position.

        - `leaves`: the leaves for the call, as `resolve` returns them.
        """
        for index, position in enumerate(self._leaves if self.is_given else ()):
            if type(position) is Position and not compares_by_identity(type(leaves[index])):
                yield index, position


def _steps_of(
    treedef: PyTreeDef,
    subtrees: list[Subtree],
    index: Index,
    referred: Callable[[Any, tuple[int, ...]], Any],
) -> list[_Step]:
    """Return the steps that make a treedef from what came in."""
    at = subtrees_of(treedef)
    steps: list[_Node | Position | Subtree] = []
    starts: list[int] = []
    for subtree in subtrees:
        path, arity = subtree.path, subtree.row[1]
        start = starts[-arity] if arity else len(steps)
        starts[len(starts) - arity :] = [start]
        position = None if subtree.is_plain else index.find(subtree.mark, path)
        if subtree.is_plain:
            steps[start:] = [subtree]
        elif position is not None:
            steps[start:] = [position]
        else:
            kind, metadata = at(path).node_data()  # type: ignore[misc]
            values = parts_of(metadata, kind)
            container = type(metadata) if has_parts(metadata, kind) else None
            if not is_plain(metadata) and index.find((id(metadata),), path) is not None:
                values, container = [(WHOLE, metadata)], None
            parts = [(part, referred(value, path)) for part, value in values]
            is_own = all(map(operator.is_, [p for _, p in parts], [v for _, v in values]))
            if is_own and all(type(step) is Subtree for step in steps[start:]):
                steps[start:] = [subtree]
            else:
                steps.append(_Node(kind, arity, parts, container))
    if not CAN_ASSEMBLE and any(type(step) is _Node for step in steps):
        return [treedef]
    return [at(step.path) if isinstance(step, Subtree) else step for step in steps]
