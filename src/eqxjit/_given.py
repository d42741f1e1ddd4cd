"""Static objects of an output that came in with the call, referred to weakly.

An entry goes with the objects that compare by identity and that it was made for. It would keep them
alive itself, and so never go, if it held on to those that its function returns. Whoever calls the
function has them: a call with others is another entry's.
"""

import types
import weakref
from collections.abc import Collection, Hashable, Iterator
from typing import Any

import equinox as eqx

from ._compat import PyTreeDef, with_metadata
from ._key_cache import KnownKey
from ._partition import DYNAMIC
from ._static_key import CONSTANTS, Constants, stays

_NO_REFERENTS = frozenset({*CONSTANTS, Constants, type, type(DYNAMIC), type(eqx.Module)})


def referents(key: Hashable) -> Iterator[Any]:
    """The objects that a typed static key refers to weakly, as long as they live."""
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


class _Given:
    """Stands for a static object, without keeping it alive; for a tuple, if it holds one."""

    __slots__ = ("get",)

    def __init__(self, get: Any):
        self.get = get


def _weakly(value: Any, given: Collection[int]) -> Any:
    """A static value as it can be kept: itself, if it isn't one of those given, by `id`."""
    kind = type(value)
    if kind is tuple:
        parts = tuple([_weakly(part, given) for part in value])
        if any(type(part) is _Given for part in parts):
            return _Given(lambda: tuple(map(_strongly, parts)))
    elif kind is types.MethodType:
        if id(value.__self__) in given:
            return _Given(weakref.WeakMethod(value))
    elif id(value) in given and not stays(value):
        return _Given(weakref.ref(value))
    return value


def _strongly(value: Any) -> Any:
    return value.get() if type(value) is _Given else value


class StaticOutput:
    """The static half of an output: its structure and its leaves, `DYNAMIC` for each array."""

    __slots__ = ("_is_given", "_leaves", "_treedef")

    def __init__(self, treedef: PyTreeDef, leaves: tuple[Any, ...], given: Collection[int]):
        self._treedef = treedef
        self._leaves = leaves
        #: Whether there is something given among the leaves, and in the treedef.
        self._is_given = False, False
        if given:
            self._refer_weakly(given)

    def _refer_weakly(self, given: Collection[int]) -> None:
        found: list[Any] = []

        def weakly(value: Any) -> Any:
            kept = value if value is DYNAMIC else _weakly(value, given)
            if kept is not value:
                found.append(kept)
            return kept

        leaves = tuple(map(weakly, self._leaves))
        in_leaves = bool(found)
        found.clear()
        treedef = with_metadata(self._treedef, weakly)
        self._is_given = in_leaves, bool(found)
        if in_leaves:
            self._leaves = leaves
        if found:
            self._treedef = treedef

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The leaves."""
        return tuple(map(_strongly, self._leaves)) if self._is_given[0] else self._leaves

    @property
    def treedef(self) -> PyTreeDef:
        """The structure."""
        return with_metadata(self._treedef, _strongly) if self._is_given[1] else self._treedef
