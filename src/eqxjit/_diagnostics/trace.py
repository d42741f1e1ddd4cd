"""`Trace`: what a user reads of one trace; and the table of several."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from .._html import block, table
from .._places import CallSite, is_internal
from .description import UNKNOWN
from .differences import Difference, listed
from .record import Seconds, TraceRecord
from .size import Memory, Program


@dataclasses.dataclass(frozen=True, repr=False)
class Trace:
    """One trace of a function."""

    _record: TraceRecord

    @property
    def function(self) -> str:
        """The function's qualified name, as from inside the function that defines it."""
        return self._record.function

    @property
    def number(self) -> int:
        """Counts the traces of the function, from 1."""
        return self._record.circumstances.number

    @property
    def call_site(self) -> CallSite:
        """The user's line that made the call, with `filename` and `line`; `str` of it is short."""
        return self._record.call_site

    @property
    def seconds(self) -> Seconds:
        """How long it took so far. It may be compiled later than it is traced."""
        return dataclasses.replace(self._record.seconds)

    @property
    def from_persistent_cache(self) -> bool:
        """Whether JAX's persistent cache had the compiled program."""
        return self._record.from_persistent_cache

    @property
    def recompiled(self) -> tuple[Difference, ...]:
        """How calls differed for which JAX compiled the program again, without a trace.

        Mostly by another device or sharding.
        """
        return tuple(self._record.recompiled)

    @property
    def is_internal(self) -> bool:
        """Whether the function is a library's, and not one that users call by its name."""
        return is_internal(self._record.place)

    # --- The explanation ----------------------------------------------------------------------

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The ways in which it differs from the closest earlier trace; empty for the first."""
        return self._record.explanation[0]

    @property
    def compared_with(self) -> int | None:
        """The number of that earlier trace; `None` for the first."""
        return self._record.explanation[1]

    # --- What was compiled --------------------------------------------------------------------

    @property
    def program(self) -> Program | None:
        """Its equations, the lines and loops that make them, and its memory.

        `None` where it became part of an outer program, or was first read when JAX had dropped it.
        """
        return self._record.program

    @property
    def equations(self) -> int | None:
        """The size of the jaxpr, nested ones included; `None` without a `program`."""
        return None if self.program is None else self.program.equations

    @property
    def memory(self) -> Memory | None:
        """The memory that XLA takes for the program; `None` where that isn't known."""
        return None if self.program is None else self.program.memory

    # --- Texts --------------------------------------------------------------------------------

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
        description = self._record.circumstances.description
        rows = () if description is UNKNOWN else description
        return {row.path: str(row.part) for row in rows}

    @property
    def summary(self) -> str:
        """The arguments in a few words."""
        return str(self._record.circumstances.description)

    def __repr__(self) -> str:
        again = f"; compiled again: {'; '.join(listed(self.recompiled))}" if self.recompiled else ""
        return (
            f"<trace {self.number} of {self.function}({self.summary}) at {self.call_site}: "
            f"{self.reason}; {self.seconds}{again}>"
        )

    @property
    def explanation(self) -> str:
        """A line for each difference, with what to do about it, if anything."""
        return explanation_of(*self._record.explanation)


def explanation_of(differences: Iterable[Difference], compared_with: int | None = None) -> str:
    """Return a line for each difference from a trace, with what to do about it."""
    lines = [f"  - {line}" for line in listed(differences, with_remedies=True)]
    if compared_with is not None:
        lines.insert(0, f"  Compared with trace {compared_with}:")
    return "\n".join(lines)


class TraceList(list[Trace]):
    """The traces of a function: a list, which shows as a table in a terminal and in a notebook."""

    def __repr__(self) -> str:
        if not self:
            return "Nothing was traced."
        rows = [("trace", "function", "called at", "seconds", "why")]
        for each in self:
            again = [f"compiled again: {text}" for text in listed(each.recompiled)]
            why = " ".join("; ".join([each.reason, *again]).split())
            seconds = f"{each.seconds.total:.3g}"
            rows.append((str(each.number), each.function, str(each.call_site), seconds, why))
        # The last column may be of any width.
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
        lines = ["  ".join(map(str.ljust, row, [*widths, 0])) for row in rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not self:
            return block("<p>Nothing was traced.</p>")
        headings = ("function", "trace", "why", "called at", "seconds", "arguments", "memory")
        rows: list[tuple[Any, ...]] = []
        for trace in self:
            why = trace.explanation or "first trace"
            if trace.recompiled:
                why += f"\ncompiled again:\n{explanation_of(trace.recompiled)}"
            what = trace.function, trace.number, why, trace.call_site
            rows.append((*what, f"{trace.seconds.total:.3g}", trace.summary, trace.memory or ""))
        return block(table(headings, rows))
