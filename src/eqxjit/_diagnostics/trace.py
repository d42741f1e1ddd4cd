"""The record of one trace: what was traced, for which call, why, how long it took, how large."""

import collections
import dataclasses
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from .._compat import source_line
from .._places import LIBRARY_FILES, CallSite, is_users, location
from .._text import block, table
from .description import UNKNOWN, Description
from .differences import Difference, listed

# A line stands out if it made so many equations, and half of them.
_MANY_EQUATIONS = 200


@dataclasses.dataclass
class Seconds:
    """The time that a trace took, nested functions included.

    - `tracing`: running the Python function, in seconds.
    - `lowering`: translating the jaxpr to StableHLO, in seconds; 0 where it became part of an outer
        program.
    - `compiling`: compiling that, or loading it from JAX's persistent cache, in seconds.
    """

    tracing: float = 0.0
    lowering: float = 0.0
    compiling: float = 0.0

    @property
    def total(self) -> float:
        return self.tracing + self.lowering + self.compiling

    def __str__(self) -> str:
        parts = (f"{name} {seconds:.3g}" for name, seconds in dataclasses.asdict(self).items())
        return f"{self.total:.3g} s ({', '.join(parts)})"


@dataclasses.dataclass(eq=False, repr=False)
class Trace:
    """One trace of a function.

    - `function`: the function's qualified name, as from inside the function that defines it.
    - `number`: counts the traces of the function, from 1.
    - `call_site`: the user's line that made the call, with `filename` and `line`; as a text,
        `src/train.py:31`.
    - `differences`: how it differs from the closest earlier trace; empty for the first.
    - `compared_with`: the number of that earlier trace; `None` for the first.
    - `seconds`: how long it took.
    - `from_persistent_cache`: whether JAX's persistent cache had the compiled program.
    - `equations`: the size of the jaxpr, nested ones included; `None` where it wasn't looked at,
        because it became part of an outer program.
    - `busiest_line`: the user's line that made most of the equations, and how many, as
        `"model.py:12 (4,000)"`; empty where no line stands out.
    """

    function: str
    call_site: CallSite
    number: int
    configuration: dict[str, str]
    description: Description = UNKNOWN
    #: Why its entry serves no call any more; empty while it does, and shared with the entry.
    invalidation_reasons: list[str] = dataclasses.field(default_factory=list)
    differences: tuple[Difference, ...] = ()
    compared_with: int | None = None
    seconds: Seconds = dataclasses.field(default_factory=Seconds)
    from_persistent_cache: bool = False
    equations: int | None = None
    busiest_line: str = ""

    @property
    def reason(self) -> str:
        """Why it was made: `"first trace"`, or how it differs from the closest one before."""
        return "; ".join(listed(self.differences)) or "first trace"

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments that it was made for: each part by its path, arrays as `float32[3]`.

        Empty for trees that are too large to be described, and for old traces of large trees.
        """
        # Made each time, because lines are named from the working directory, which may change.
        rows = () if self.description is UNKNOWN else self.description
        return {row.path: str(row.part) for row in rows}

    @property
    def summary(self) -> str:
        """The arguments in a few words."""
        return str(self.description)

    def __repr__(self) -> str:
        return (
            f"<trace {self.number} of {self.function}({self.summary}) at {self.call_site}: "
            f"{self.reason}; {self.seconds}>"
        )

    def explanation(self) -> str:
        """Return a line for each difference, with what to do about it, if anything."""
        lines = [f"  - {line}" for line in listed(self.differences, with_remedies=True)]
        if self.compared_with is not None:
            lines.insert(0, f"  Compared with trace {self.compared_with}:")
        return "\n".join(lines)


class TraceList(list[Trace]):
    """The traces of a function: a list, which shows as a table in a notebook."""

    def _repr_html_(self) -> str:
        if not self:
            return block("<p>Nothing was traced.</p>")
        headings = ("function", "trace", "why", "called at", "seconds", "arguments")
        rows: list[tuple[Any, ...]] = []
        for trace in self:
            why = "\n".join(listed(trace.differences, with_remedies=True)) or "first trace"
            what = trace.function, trace.number, why
            rows.append((*what, trace.call_site, f"{trace.seconds.total:.3g}", trace.summary))
        return block(table(headings, rows))


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
                nested = value if isinstance(value, (tuple, list)) else (value,)
                parts += [each for each in nested if isinstance(each, (ClosedJaxpr, Jaxpr))]
    n = len(equations)
    if n < _MANY_EQUATIONS:
        return n, ""
    lines = collections.Counter([source_line(equation, LIBRARY_FILES) for equation in equations])
    [(line, count)] = lines.most_common(1)
    # None stands out; or a library's, of which there is nothing for the user to change.
    if line is None or count < max(_MANY_EQUATIONS, n / 2) or not is_users(line[0]):
        return n, ""
    return n, f"{location(*line)} ({count:,})"
