"""The paths by which JAX names the arrays of a call: in errors, logs, dumps and profiles.

They are texts, the same in every process, and refer to nothing of the user's.
"""

import re

from .._spec.tree import ARRAY, children, leaf_paths
from .calls import Call


def argument_names(call: Call) -> tuple[str, ...]:
    """Return the paths of all arrays of a call, in the order in which JAX is given them."""
    signature = call.function.signature
    args, kwargs = call.spec[3:]
    positional = zip(signature.path_names(len(args) - 3), args[3:], call.args, strict=True)
    keywords = [
        (signature.keyword_path(call_name), spec, value)
        for call_name, (_, spec, value, _) in zip(
            sorted(call.kwargs), children(kwargs, call.kwargs), strict=True
        )
    ]
    names = [
        _stable(path)
        for name, spec, value in (*positional, *keywords)
        for path, leaf, _ in leaf_paths(spec, value, name)
        if leaf is ARRAY
    ]
    fun = call.function.combine(call.fun_arrays)
    own = [
        # A bound method of a Module.
        _stable(re.sub(r"^fun\.__self__\b", "self", path))
        for path, leaf, _ in leaf_paths(call.function.spec, fun, "fun")
        if leaf is ARRAY
    ]
    n = call.entry.n_first
    return (*names[:n], *own, *names[n:])


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_INDEX = re.compile(r"<flat index ([^>]+)>")


def _stable(text: str) -> str:
    """Return a path, the same in every process, and written as JAX does."""
    if "0x" in text:
        text = _ADDRESS.sub("...", text)
    return _INDEX.sub(r"\1", text) if "<" in text else text
