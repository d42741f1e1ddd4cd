"""Static objects that came in with a call: where each was, and whether another one has the same."""

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
from jax.tree_util import tree_structure

from .._compat import LEAF_KIND, MISSING, PyTreeDef, TreedefRow, treedef_rows
from .constants import CONSTANTS, Constants
from .key_cache import KnownKey, treedef_key
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
        _, metadata = self.subtree(position.half, position.path).node_data()  # type: ignore[misc]
        return metadata if position.part == WHOLE else metadata[position.part]


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


def has_parts(metadata: Any, kind: type | None) -> bool:
    """Return whether a node's metadata is made of static objects: a Module's fields, a dict's keys.

    `kind` is the node's class, or None, as in `treedef_rows`.
    """
    return type(metadata) is tuple or (type(metadata) is list and kind in (dict, None))


def values_in(metadata: Any, kind: type | None) -> tuple[Any, ...] | list[Any]:
    """Return the parts of a node's metadata, or all of it."""
    return metadata if has_parts(metadata, kind) else (metadata,)


def parts_of(metadata: Any, kind: type | None) -> list[tuple[int, Any]]:
    """Return `values_in`, each with its index."""
    return [*enumerate(metadata)] if has_parts(metadata, kind) else [(WHOLE, metadata)]


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


def varies(value: Any) -> bool:
    """Return whether one that came in may be another in the next call of the same entry."""
    return not is_plain(value) and not compares_by_identity(type(value))


class Subtree(NamedTuple):
    """A node in a treedef, with what is below it.

    - `path`: the way to it.
    - `row`: of `treedef_rows`.
    - `mark`: equal for subtrees that hold the very same static objects.
    - `is_plain`: whether all that it holds is plain.
    - `varies`: whether anything in it that isn't need not be the same in all calls.
    """

    path: tuple[int, ...]
    row: TreedefRow
    mark: int
    is_plain: bool
    varies: bool

    @property
    def is_leaf(self) -> bool:
        return self.row[0] == LEAF_KIND


def located(treedef: PyTreeDef) -> Iterator[tuple[tuple[int, ...], TreedefRow]]:
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


def all_subtrees(treedef: PyTreeDef, marks: dict[Hashable, int]) -> list[Subtree]:
    """Return all subtrees, in post-order; `marks` are those that were given so far."""
    found: list[Subtree] = []
    roots: list[Subtree] = []
    for path, row in located(treedef):
        kind, arity, metadata, cls = row
        start = len(roots) - arity
        children = roots[start:]
        values = values_in(metadata, cls)
        # A tuple of parts, or a list of keys, may be put together anew each time.
        held = (values is metadata, *map(object_key, values))
        key = (kind, arity, cls, held, tuple([child.mark for child in children]))
        others = [value for value in values if not is_plain(value)]
        subtree = Subtree(
            path,
            row,
            marks.setdefault(key, len(marks)),
            not others and all(child.is_plain for child in children),
            any(map(varies, others)) or any(child.varies for child in children),
        )
        roots[start:] = [subtree]
        found.append(subtree)
    return found


def object_key(value: Any) -> Hashable:
    """Return a key, equal for values of which one may stand for the other in an output."""
    # Equal strings differ in nothing but their addresses, which no run of Python promises.
    return value if type(value) is str else id(value)


class Index:
    """The positions of what came in with a traced call, by what is there."""

    __slots__ = ("_found", "_subtrees", "marks")

    def __init__(self, given: Given):
        self.marks: dict[Hashable, int] = {}
        self._found: dict[Hashable, Position] = {}
        # Kept while they are looked up by `id`.
        self._subtrees = [all_subtrees(half.treedef, self.marks) for half in given.halves]
        for half, static in enumerate(given.halves):
            leaves = enumerate(static.leaves)
            for subtree in self._subtrees[half]:
                path, (_, _, metadata, cls) = subtree.path, subtree.row
                if subtree.is_leaf:
                    index, leaf = next(leaves)
                    if not is_plain(leaf):
                        self._add((id(leaf),), Position(half, path, index, True))
                elif not subtree.is_plain:
                    self._add(subtree.mark, Position(half, path, WHOLE, False))
                    for part, value in [(WHOLE, metadata), *parts_of(metadata, cls)]:
                        if not is_plain(value):
                            self._add((id(value),), Position(half, path, part, False))

    def _add(self, key: Hashable, position: Position) -> None:
        for suffix in _suffixes(position.path):
            self._found.setdefault((key, suffix), position)

    def find(self, key: Hashable, path: tuple[int, ...]) -> Position | None:
        """Return where that came in which is now at a path in an output.

        `key` is the mark of a subtree that came in as it is, or `(id(value),)` of a static object.
        """
        # Of one object in several places, the place whose path ends in the same way.
        for suffix in _suffixes(path):
            position = self._found.get((key, suffix))
            if position is not None:
                return position
        return None


_LONGEST_SUFFIX = 4


def _suffixes(path: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the last indices of a path: the longest first, none last."""
    return [path[start:] for start in range(max(0, len(path) - _LONGEST_SUFFIX), len(path) + 1)]


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
        kind, arity, our_data, cls = our_row
        their_kind, their_arity, their_data, their_cls = their_row
        if kind != their_kind or arity != their_arity or cls is not their_cls:
            return None
        if our_data is their_data:
            continue
        # Metadata that is a tuple of one part isn't that part.
        if type(our_data) is not type(their_data):
            return None
        our_parts, their_parts = values_in(our_data, cls), values_in(their_data, cls)
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
        for _, _, metadata, cls in treedef_rows(half.treedef)
        for value in values_in(metadata, cls)
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
