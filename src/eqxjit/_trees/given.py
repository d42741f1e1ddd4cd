"""Static objects of an output that came in with the call: each call gets back its own.

An output's static half is found when the function is traced, and serves all calls of the entry.
What is equal needn't be the same: of an object that came in with the traced call only the position
is kept, where each call has its own. So an entry doesn't keep alive what it was made for, either.
"""

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
from jax.tree_util import tree_structure

from .._compat import (
    CAN_ASSEMBLE,
    LEAF_KIND,
    MISSING,
    PyTreeDef,
    TreedefRow,
    assembled,
    treedef_rows,
)
from .constants import CONSTANTS, Constants
from .key_cache import KnownKey, treedef_key
from .mutation import is_hashable
from .partition import DYNAMIC, StaticTree
from .static_key import (
    ByContent,
    compares_by_identity,
    holds_for_all,
    is_fixed_dtype,
    keyed_fields,
    stays,
)

_NO_REFERENTS = frozenset({*CONSTANTS, Constants, ByContent, type, type(DYNAMIC), type(eqx.Module)})


def referents(key: Hashable) -> Iterator[Any]:
    """Yield the objects that a typed static key refers to weakly, as long as they live."""
    for ref in _refs(key):
        value = ref()
        # Classes and modules stay.
        if value is not None and not isinstance(value, (type, types.ModuleType)):
            yield value


def _refs(key: Hashable) -> list[weakref.ref[Any]]:
    found: list[weakref.ref[Any]] = []
    pending: list[Any] = [key]
    while pending:
        part = pending.pop()
        kind = type(part)
        if kind is tuple or kind is frozenset:
            if not _NO_REFERENTS.issuperset(map(type, part)):
                pending += part
        elif kind is KnownKey:
            # Looked for once: it may have been made of very many elements.
            if part.refs is None:
                part.refs = _refs(part.typed)
            found += part.refs
        elif kind not in _NO_REFERENTS and isinstance(part, weakref.ref):
            found.append(part)
    return found


class Position(NamedTuple):
    """The place where a static object came in with a call.

    - `half`: the index of the static half: 0 for the arguments, 1 for the function.
    - `path`: the indices of the children on the way to the node, or the leaf.
    - `part`: which part of the node's metadata; `WHOLE` for all of it; for a leaf, its index.
    - `is_leaf`: whether it is a leaf.
    """

    half: int
    path: tuple[int, ...]
    part: int
    is_leaf: bool


#: The `part` that is a node's metadata as a whole.
WHOLE = -1


#: The static half of a function that holds nothing.
NOTHING = StaticTree(tree_structure(()), ())


class Given:
    """The static objects that came in with one call: its arguments' and its function's."""

    __slots__ = ("_subtrees", "halves")

    def __init__(self, arguments: StaticTree, fun: StaticTree):
        self.halves = arguments, fun
        #: How to find a subtree of each half, once somebody has looked for one.
        self._subtrees: list[Callable[[tuple[int, ...]], PyTreeDef]] = []

    def subtree(self, half: int, path: tuple[int, ...]) -> PyTreeDef:
        """Return the treedef at a path in one of the halves."""
        if not self._subtrees:
            self._subtrees = [subtrees_of(half.treedef) for half in self.halves]
        return self._subtrees[half](path)

    def get(self, position: Position) -> Any:
        """Return the object at a position."""
        if position.is_leaf:
            return self.halves[position.half].leaves[position.part]
        return _part(self.subtree(position.half, position.path), position.part)


def subtrees_of(treedef: PyTreeDef) -> Callable[[tuple[int, ...]], PyTreeDef]:
    """Return a function that gives the treedef at a path, and takes no node apart twice."""
    children: dict[tuple[int, ...], list[PyTreeDef]] = {}

    def at(path: tuple[int, ...]) -> PyTreeDef:
        node = treedef
        for depth, index in enumerate(path):
            above = path[:depth]
            below = children.get(above)
            if below is None:
                below = children[above] = node.children()
            node = below[index]
        return node

    return at


def _part(treedef: PyTreeDef, part: int) -> Any:
    node_data = treedef.node_data()
    assert node_data is not None
    return node_data[1] if part == WHOLE else node_data[1][part]


def parts_of(metadata: Any, kind: type | None) -> tuple[Any, ...] | list[Any]:
    """Return the static objects of a node's metadata: the fields of a Module, the keys of a dict.

    `kind` is the node's class, or None, as in `treedef_rows`.
    """
    if type(metadata) is tuple or (type(metadata) is list and kind in (dict, None)):
        return metadata
    return ()


def _values(row: TreedefRow) -> tuple[Any, ...] | list[Any]:
    """Return the parts of a node's metadata, or all of it."""
    _, _, metadata, kind = row
    parts = parts_of(metadata, kind)
    # The list of a dict's keys is no object of the user's: there is nothing in an empty one.
    return parts if parts or parts is metadata else (metadata,)


def _holds_plain(row: TreedefRow) -> bool:
    return all(map(is_plain, _values(row)))


def _parts(row: TreedefRow) -> list[tuple[int, Any]]:
    """Return `_values`, each with its index."""
    values = _values(row)
    return [*enumerate(values)] if values is row[2] else [(WHOLE, row[2])]


_PLAIN = frozenset(
    {int, str, bool, float, complex, bytes, range, type(None), type(...), types.ModuleType}
)


def is_plain(value: Any) -> bool:
    """Return whether an equal value may stand for this one: nobody can tell, or it is the same."""
    return type(value) in _PLAIN or holds_for_all(_is_plain, value, _PLAIN)


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN or value is DYNAMIC or value is MISSING:
        return True
    return isinstance(value, type) or is_fixed_dtype(type(value)) or stays(value)


def _varies(value: Any) -> bool:
    """Return whether one that came in may be another in the next call of the same entry."""
    return not is_plain(value) and not compares_by_identity(type(value))


class _Subtree:
    """A node in a treedef, with what is below it.

    - `path`: the way to it.
    - `row`: of `treedef_rows`.
    - `mark`: equal for subtrees that hold the very same static objects.
    - `is_plain`: whether all that it holds is plain.
    - `varies`: whether anything in it that isn't need not be the same in all calls.
    """

    __slots__ = ("is_plain", "mark", "path", "row", "varies")

    def __init__(
        self, path: tuple[int, ...], row: TreedefRow, mark: int, plain: bool, varies: bool
    ):
        self.path = path
        self.row = row
        self.mark = mark
        self.is_plain = plain
        self.varies = varies


def _located(treedef: PyTreeDef) -> Iterator[tuple[tuple[int, ...], TreedefRow]]:
    """Yield all nodes, in post-order: the path to each, and its row."""
    rows = [*treedef_rows(treedef)]
    paths: list[tuple[int, ...]] = []
    pending: list[tuple[int, ...]] = [()]
    # Backwards, parents come before their children, and those last one first.
    for row in reversed(rows):
        path = pending.pop()
        paths.append(path)
        pending += [(*path, index) for index in range(row[1])]
    return zip(reversed(paths), rows, strict=True)


def _all_subtrees(treedef: PyTreeDef, marks: dict[Hashable, int]) -> list[_Subtree]:
    """Return all subtrees, in post-order; `marks` are those that were given so far."""
    found: list[_Subtree] = []
    roots: list[_Subtree] = []
    for path, row in _located(treedef):
        kind, arity, data, custom = row
        start = len(roots) - arity
        children = roots[start:]
        parts = parts_of(data, custom)
        # A tuple of parts, or a list of keys, may be put together anew each time.
        held = tuple(map(object_key, parts)) if parts or parts is data else object_key(data)
        key = (kind, arity, custom, held, tuple([child.mark for child in children]))
        holds_plain = _holds_plain(row)
        plain = holds_plain and all(child.is_plain for child in children)
        varies = not holds_plain and any(map(_varies, _values(row)))
        varies = varies or any(child.varies for child in children)
        subtree = _Subtree(path, row, marks.setdefault(key, len(marks)), plain, varies)
        roots[start:] = [subtree]
        found.append(subtree)
    return found


def object_key(value: Any) -> Hashable:
    """Return a key, equal for values of which one may stand for the other in an output."""
    # Equal strings differ in nothing but their addresses, which no run of Python promises.
    return value if type(value) is str else id(value)


class _Index:
    """The positions of what came in with a traced call, by what is there."""

    __slots__ = ("_found", "_subtrees", "marks")

    def __init__(self, given: Given):
        self.marks: dict[Hashable, int] = {}
        self._found: dict[Hashable, Position] = {}
        # Kept while they are looked up by `id`.
        self._subtrees = [_all_subtrees(half.treedef, self.marks) for half in given.halves]
        for half, static in enumerate(given.halves):
            leaves = enumerate(static.leaves)
            for subtree in self._subtrees[half]:
                path, data = subtree.path, subtree.row[2]
                if _is_leaf(subtree.row):
                    index, leaf = next(leaves)
                    if not is_plain(leaf):
                        self._add((id(leaf),), Position(half, path, index, True))
                elif not subtree.is_plain:
                    self._add(subtree.mark, Position(half, path, WHOLE, False))
                    for part, value in [(WHOLE, data), *_parts(subtree.row)]:
                        if not is_plain(value):
                            self._add((id(value),), Position(half, path, part, False))

    def _add(self, key: Hashable, position: Position) -> None:
        path = position.path
        for n in range(min(len(path), _LONGEST_SUFFIX) + 1):
            self._found.setdefault((key, path[len(path) - n :]), position)

    def _find(self, key: Hashable, path: tuple[int, ...]) -> Position | None:
        # Of one object in several places, the place whose path ends in the same way.
        for n in range(min(len(path), _LONGEST_SUFFIX), -1, -1):
            position = self._found.get((key, path[len(path) - n :]))
            if position is not None:
                return position
        return None

    def find(self, value: Any, path: tuple[int, ...]) -> Position | None:
        """Return where a static object came in that is now at a path in an output."""
        return self._find((id(value),), path)

    def find_subtree(self, subtree: _Subtree) -> Position | None:
        """Return where a subtree of the output came in as it is."""
        return self._find(subtree.mark, subtree.path)


_LONGEST_SUFFIX = 4


def _is_leaf(row: TreedefRow) -> bool:
    return row[0] == LEAF_KIND


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


def are_equal(
    ours: PyTreeDef,
    theirs: PyTreeDef,
    given: Given,
    tells: Callable[[Any], bool] = lambda value: True,
) -> bool:
    """Return whether the typed static keys of two treedefs are equal, and what came in the same.

    **Arguments:**

    - `ours`, `theirs`: the treedefs.
    - `given`: what came in with the call: it must be in the same places.
    - `tells`: whether an equal key is enough, for what isn't the same object.
    """
    differing = _differing(ours, theirs)
    if not differing:
        # Mostly: the keys of very many nodes needn't be made.
        return differing is not None
    if treedef_key(ours) != treedef_key(theirs):
        return False
    differing = [value for value in differing if not is_plain(value)]
    return all(map(tells, differing)) and _none_came_in(differing, given)


def _differing(ours: PyTreeDef, theirs: PyTreeDef) -> list[Any] | None:
    """Return what isn't the same in another treedef; None if their nodes aren't alike."""
    if ours.num_nodes != theirs.num_nodes:
        return None
    differing: list[Any] = []
    for our_row, their_row in zip(treedef_rows(ours), treedef_rows(theirs), strict=True):
        kind, arity, data, cls = our_row
        if kind != their_row[0] or arity != their_row[1] or cls is not their_row[3]:
            return None
        if data is their_row[2]:
            continue
        # Metadata that is a tuple of one part isn't that part.
        if type(data) is not type(their_row[2]):
            return None
        our_parts, their_parts = _values(our_row), _values(their_row)
        if len(our_parts) != len(their_parts):
            return None
        if not all(map(operator.is_, our_parts, their_parts)):
            pairs = zip(our_parts, their_parts, strict=True)
            differing += [their for our, their in pairs if object_key(our) != object_key(their)]
    return differing


def _none_came_in(values: list[Any], given: Given) -> bool:
    if not values:
        return True
    came_in = {
        id(value)
        for half in given.halves
        for row in treedef_rows(half.treedef)
        for value in _values(row)
    }
    came_in.update([id(leaf) for half in given.halves for leaf in half.leaves])
    return came_in.isdisjoint(map(id, values))


def is_told_by_key(value: Any) -> bool:
    """Return whether a value's typed static key tells all of it, as not every `==` does."""
    kind = type(value)
    if kind in (tuple, list, set, frozenset):
        return all(map(is_told_by_key, value))
    if kind is dict:
        return all(map(is_told_by_key, itertools.chain(value, value.values())))
    fields = keyed_fields(kind)
    if fields is not None and vars(value).keys() == {*fields}:
        return all(map(is_told_by_key, vars(value).values()))
    return is_plain(value)


class _Same:
    """A subtree of the output that is the same for all calls."""

    __slots__ = ("treedef",)

    def __init__(self, treedef: PyTreeDef):
        self.treedef = treedef


class _Node:
    """A node of the output that is put together for each call, from the subtrees before it.

    - `kind`: the class of the object.
    - `arity`: how many children it has.
    - `parts`: of its metadata, each with its index: a value, a `_Weak` or a `Position`.
    - `container`: makes the metadata from its parts; None if that is the one part.
    - `is_own`: whether none of the metadata came in.
    """

    __slots__ = ("arity", "container", "is_own", "kind", "parts")

    def __init__(
        self,
        kind: type,
        arity: int,
        parts: list[tuple[int, Any]],
        container: type | None,
        is_own: bool,
    ):
        self.kind = kind
        self.arity = arity
        self.parts = parts
        self.container = container
        self.is_own = is_own


#: How a treedef is made: its subtrees in post-order. A `Position` is one of the call's own.
_Step = _Same | _Node | Position


class StaticOutput:
    """The static half of an output: its structure and its leaves, `DYNAMIC` for each array.

    What came in with the call that was traced is each call's own, from the same position. So it is
    neither kept alive, nor can it have been changed in place.

    - `n_nodes`: how many nodes it has.
    - `own`: the static objects in it that didn't come in.
    - `is_given`: whether anything in it did; `varies`: and need not be the same in all calls.
    """

    __slots__ = ("_leaves", "_steps", "is_given", "n_nodes", "own", "varies")

    def __init__(self, treedef: PyTreeDef, leaves: tuple[Any, ...], given: Given):
        self.n_nodes = treedef.num_nodes
        self._leaves = leaves
        self._steps: list[_Step] = [_Same(treedef)]
        self.own: list[Any] = []
        self.varies = False
        if not all(map(_holds_plain, treedef_rows(treedef))) or not all(map(is_plain, leaves)):
            self._refer(treedef, leaves, given)
        self.is_given = any(type(leaf) in (Position, _Weak) for leaf in self._leaves) or any(
            type(step) is not _Same for step in self._steps
        )

    def _refer(self, treedef: PyTreeDef, leaves: tuple[Any, ...], given: Given) -> None:
        index = _Index(given)
        ids = {id(value) for half in given.halves for value in referents(half.key)}

        def referred(value: Any, path: tuple[int, ...]) -> Any:
            if is_plain(value):
                return value
            position = index.find(value, path)
            if position is not None:
                return position
            kept = _weakly(value, ids)
            if kept is value:
                self.own.append(value)
            return kept

        subtrees = _all_subtrees(treedef, index.marks)
        paths = [subtree.path for subtree in subtrees if _is_leaf(subtree.row)]
        self._leaves = tuple(map(referred, leaves, paths))
        # A leaf that can't be hashed can't be told to have changed: upstream returns it, too.
        self.own = [leaf for leaf in self.own if is_hashable(leaf)]
        self._steps = _steps_of(treedef, subtrees, index, referred)
        kept = zip(leaves, self._leaves, strict=True)
        self.varies = subtrees[-1].varies or any(
            type(position) is Position and _varies(leaf) for leaf, position in kept
        )

    def resolve(self, given: Given | None) -> tuple[tuple[Any, ...], PyTreeDef]:
        """Return the leaves and the structure for a call, with its own static objects.

        `given` may be None where `is_given` is false.
        """
        if not self.is_given:
            [step] = self._steps
            return self._leaves, step.treedef  # type: ignore[union-attr]
        assert given is not None

        def value_of(value: Any) -> Any:
            kind = type(value)
            if kind is Position:
                return given.get(value)
            return value.get() if kind is _Weak else value

        made: list[PyTreeDef] = []
        for step in self._steps:
            if type(step) is _Same:
                made.append(step.treedef)
            elif type(step) is Position:
                made.append(given.subtree(step.half, step.path))
            else:
                assert type(step) is _Node
                parts = [value_of(part) for _, part in step.parts]
                data = parts[0] if step.container is None else step.container(parts)
                start = len(made) - step.arity
                made[start:] = [assembled((step.kind, data), made[start:])]
        [treedef] = made
        return tuple([value_of(leaf) for leaf in self._leaves]), treedef

    def positions(
        self, treedef: PyTreeDef, given: Given
    ) -> Iterator[tuple[tuple[int, ...], int, Position]]:
        """Yield where the static objects in nodes came in: the path to the node, and which part.

        What compares by identity is left out: it is the same for all calls of the entry.

        - `treedef`: the structure for the call, as `resolve` returns it.
        """
        if not self.is_given:
            return
        paths = (path for path, _ in _located(treedef))
        for step in self._steps:
            if type(step) is _Same:
                for _ in range(step.treedef.num_nodes):
                    next(paths)
            elif type(step) is Position:
                for came, row in _located(given.subtree(step.half, step.path)):
                    path = next(paths)
                    for part, value in () if row[2] is None else _parts(row):
                        if not is_plain(value) and not compares_by_identity(type(value)):
                            position = Position(step.half, (*step.path, *came), part, False)
                            yield path, part, position
            else:
                assert type(step) is _Node
                path = next(paths)
                for part, value in step.parts:
                    is_given = type(value) is Position
                    if is_given and not compares_by_identity(type(given.get(value))):
                        yield path, part, value

    def leaf_positions(self, leaves: tuple[Any, ...]) -> Iterator[tuple[int, Position]]:
        """Yield where leaves came in, but for what compares by identity: which, and its position.

        - `leaves`: the leaves for the call, as `resolve` returns them.
        """
        for index, position in enumerate(self._leaves if self.is_given else ()):
            if type(position) is Position and not compares_by_identity(type(leaves[index])):
                yield index, position


def _steps_of(
    treedef: PyTreeDef,
    subtrees: list[_Subtree],
    index: _Index,
    referred: Callable[[Any, tuple[int, ...]], Any],
) -> list[_Step]:
    """Return the steps that make a treedef from what came in."""
    at = subtrees_of(treedef)
    steps: list[_Node | Position | _Subtree] = []
    starts: list[int] = []
    for subtree in subtrees:
        arity = subtree.row[1]
        start = starts[-arity] if arity else len(steps)
        starts[len(starts) - arity :] = [start]
        position = None if subtree.is_plain else index.find_subtree(subtree)
        if subtree.is_plain:
            steps[start:] = [subtree]
        elif position is not None:
            steps[start:] = [position]
        else:
            node = _node_of(at(subtree.path), subtree.path, index, referred)
            if node.is_own and all(type(step) is _Subtree for step in steps[start:]):
                steps[start:] = [subtree]
            else:
                steps.append(node)
    if not CAN_ASSEMBLE and any(type(step) is _Node for step in steps):
        return [_Same(treedef)]
    return [_Same(at(step.path)) if isinstance(step, _Subtree) else step for step in steps]


def _node_of(
    treedef: PyTreeDef,
    path: tuple[int, ...],
    index: _Index,
    referred: Callable[[Any, tuple[int, ...]], Any],
) -> _Node:
    node_data = treedef.node_data()
    assert node_data is not None
    kind, data = node_data
    arity = len(treedef.children())
    values = parts_of(data, kind)
    position = None if is_plain(data) else index.find(data, path)
    if position is not None or not values:
        whole = position or referred(data, path)
        return _Node(kind, arity, [(WHOLE, whole)], None, whole is data)
    parts = [(part, referred(value, path)) for part, value in enumerate(values)]
    is_own = all(kept is value for (_, kept), value in zip(parts, values, strict=True))
    return _Node(kind, arity, parts, type(data), is_own)
