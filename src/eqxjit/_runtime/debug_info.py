"""The paths by which JAX names the arguments of a function: in errors, logs, dumps and profiles.

They are texts, the same in every process, and refer to nothing of the user's.
"""

import collections
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax.tree_util import default_registry, keystr

from .._code.text import short
from .._compat import PyTreeDef, root_treedef
from .._plan.signature import Signature
from .._trees.array_layout import ArrayLayout
from .._trees.modules import dynamic_fields, is_module_class
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
    arrays = iter([index for index, leaf in enumerate(leaves) if leaf is DYNAMIC])
    array = next(arrays, None)  # the first that has no path yet
    paths: list[str] = []
    pending = trees[::-1]
    n_seen = 0
    while pending and array is not None:
        path, treedef = pending.pop()
        n_leaves = treedef.num_leaves
        end = n_seen + n_leaves
        if array < end:
            node_data = treedef.node_data()
            if node_data is not None and treedef.num_nodes > n_leaves + 1:
                children = treedef.children()
                names = _suffixes(treedef, *node_data, len(children))
                pending += [*zip([path + name for name in names], children, strict=True)][::-1]
                continue
            suffix = None if node_data is None else _suffix_at(treedef, node_data, n_leaves)
            while array is not None and array < end:
                paths.append(path if suffix is None else path + suffix(array - n_seen))
                array = next(arrays, None)
        n_seen = end
    return paths


def _suffix_at(
    treedef: PyTreeDef, node_data: tuple[type, Any], n_children: int
) -> Callable[[int], str]:
    """Return what makes one of the `_suffixes`, of which few may be asked for."""
    kind, data = node_data
    if kind is tuple or kind is list:
        return "[{}]".format
    if kind is dict:
        return lambda place: _of_key(data[place])
    return _suffixes(treedef, kind, data, n_children).__getitem__


def _suffixes(treedef: PyTreeDef, kind: type, data: Any, n_children: int) -> Sequence[str]:
    """Return what follows a node's path in the paths of its children, as JAX writes them."""
    if kind is tuple or kind is list or kind is type(None):
        return [f"[{i}]" for i in range(n_children)]
    if kind is dict or kind is collections.OrderedDict:
        return [*map(_of_key, data)]
    if is_module_class(kind):
        names = _of_fields(kind)
        if len(names) == n_children:
            return names
    if is_namedtuple(kind):
        return [f".{name}" for name in kind._fields]  # type: ignore[attr-defined]
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


def _of_key(key: Any) -> str:
    return f"[{_stable(short(key))}]"


# Equinox keeps classes of Modules alive.
@functools.lru_cache(maxsize=1024)
def _of_fields(cls: type) -> tuple[str, ...]:
    return tuple([f".{name}" for name in dynamic_fields(cls)])


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_INDEX = re.compile(r"<flat index ([^>]+)>")


def _stable(text: str) -> str:
    """Return a part of a path, the same in every process, and written as JAX does."""
    if "0x" in text:
        text = _ADDRESS.sub("...", text)
    return _INDEX.sub(r"\1", text) if "<" in text else text
