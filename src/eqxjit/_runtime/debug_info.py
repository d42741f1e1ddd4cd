"""The paths by which JAX names the arguments of a function: in errors, logs, dumps and profiles.

They are texts, the same in every process, and refer to nothing of the user's.
"""

import bisect
import collections
import re
from collections.abc import Sequence
from typing import Any

import equinox as eqx
from jax.tree_util import default_registry, keystr

from .._code.text import short
from .._compat import PyTreeDef, root_treedef
from .._plan.signature import Signature
from .._trees.array_layout import ArrayLayout
from .._trees.modules import dynamic_fields
from .._trees.partition import DYNAMIC, StaticTree
from .._trees.structure import is_namedtuple


def argument_names(
    signature: Signature, arguments: StaticTree, fun: StaticTree, layout: ArrayLayout
) -> tuple[str, ...]:
    """Return the paths of all arrays of a call, in the order in which JAX is given them."""
    args, kwargs = arguments.treedef.children()
    positional = signature.path_names(len(args.children()))
    _, keywords = kwargs.node_data() or (None, ())
    pairs = [
        *zip(positional, args.children(), strict=True),
        *zip(map(signature.keyword_path, keywords), kwargs.children(), strict=True),
    ]
    names = _of_arrays(pairs, arguments.leaves)
    own = _of_arrays([("fun", fun.treedef)], fun.leaves)
    # A bound method of a Module.
    own = [re.sub(r"^fun\.__self__\b", "self", name) for name in own]
    return tuple(layout.flat(own, names))


def _of_arrays(trees: list[tuple[str, PyTreeDef]], leaves: Sequence[Any]) -> list[str]:
    """Return the paths of those leaves of some trees that are arrays."""
    arrays = [index for index, leaf in enumerate(leaves) if leaf is DYNAMIC]
    paths: list[str] = []
    pending = trees[::-1]
    n_seen = 0
    while pending:
        path, treedef = pending.pop()
        n_leaves = treedef.num_leaves
        # The next array is the first that has no path yet.
        if len(paths) == len(arrays) or arrays[len(paths)] >= n_seen + n_leaves:
            n_seen += n_leaves
            continue
        node_data = treedef.node_data()
        if node_data is None:
            paths.append(path)
            n_seen += 1
            continue
        kind, data = node_data
        if treedef.num_nodes == n_leaves + 1:
            stop = bisect.bisect_left(arrays, n_seen + n_leaves)
            places = [index - n_seen for index in arrays[len(paths) : stop]]
            paths += [path + name for name in _suffixes_at(places, treedef, kind, data)]
            n_seen += n_leaves
            continue
        children = treedef.children()
        names = _suffixes(treedef, kind, data, len(children))
        pending += [
            (path + name, child) for name, child in zip(names[::-1], children[::-1], strict=True)
        ]
    return paths


def _suffixes_at(places: list[int], treedef: PyTreeDef, kind: type, data: Any) -> list[str]:
    """Return the `_suffixes` of some of the leaves that are all that a node has."""
    if kind is tuple or kind is list:
        return [f"[{place}]" for place in places]
    if kind is dict:
        return _suffixes(treedef, kind, [data[place] for place in places], len(places))
    names = _suffixes(treedef, kind, data, treedef.num_leaves)
    return [names[place] for place in places]


def _suffixes(treedef: PyTreeDef, kind: type, data: Any, n_children: int) -> list[str]:
    """Return what follows a node's path in the paths of its children, as JAX writes them."""
    if kind is tuple or kind is list or kind is type(None):
        return [f"[{i}]" for i in range(n_children)]
    if kind is dict or kind is collections.OrderedDict:
        return [f"[{_stable(short(key))}]" for key in data]
    if is_namedtuple(kind):
        return [f".{name}" for name in kind._fields]  # type: ignore[attr-defined]
    if issubclass(kind, eqx.Module):
        names = [f".{name}" for name in dynamic_fields(kind)]
        if len(names) == n_children:
            return names
    try:
        # Only an instance tells: one without its children.
        node = root_treedef(treedef).unflatten([object() for _ in range(n_children)])
        flat = default_registry.flatten_one_level_with_keys(node)
        names = [_stable(keystr((key,))) for key, _ in flat[0]]  # type: ignore[index]
        if len(names) == n_children:
            return names
    except Exception:
        # A class that insists on arrays, or a release of JAX without this method.
        pass
    return [f"[{i}]" for i in range(n_children)]


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_INDEX = re.compile(r"<flat index ([^>]+)>")


def _stable(text: str) -> str:
    """Return a part of a path, the same in every process, and written as JAX does."""
    if "0x" in text:
        text = _ADDRESS.sub("...", text)
    return _INDEX.sub(r"\1", text) if "<" in text else text
