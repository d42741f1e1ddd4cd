"""The size of a program, and which lines make it so large."""

import collections
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from .._compat import source_line
from .._places import LIBRARY_FILES, is_users, location

# A line stands out if it made so many equations, and half of them.
_MANY_EQUATIONS = 200


def size_of(jaxpr: Any) -> tuple[int, str]:
    """Return the number of equations of a jaxpr, nested ones too, and the user's busiest line."""
    equations: list[Any] = []
    # The list grows while it is gone through. Not by recursion, because loops may be nested deeply.
    # Those of a jaxpr that is used twice count twice, as they are compiled twice.
    parts = [jaxpr]
    for part in parts:
        equations += part.eqns
        for equation in part.eqns:
            for value in equation.params.values():
                for each in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(each, (ClosedJaxpr, Jaxpr)):
                        parts.append(each)
    n = len(equations)
    if n < _MANY_EQUATIONS:
        return n, ""
    lines = collections.Counter([source_line(equation, LIBRARY_FILES) for equation in equations])
    [(line, count)] = lines.most_common(1)
    # None stands out; or a library's, of which there is nothing for the user to change.
    if line is None or count < max(_MANY_EQUATIONS, n / 2) or not is_users(line[0]):
        return n, ""
    return n, f"{location(*line)} ({count:,})"
