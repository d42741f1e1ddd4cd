"""The classes by which users read traces: `Trace`, and `TraceList`, which prints as a table."""

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
    """One trace of a function: what it was for, why it was needed, and how long it took."""

    _record: TraceRecord

    @property
    def function(self) -> str:
        """The function's qualified name, without the names of functions around its definition."""
        return self._record.function

    @property
    def number(self) -> int:
        """The number of the trace among the traces of the function, from 1."""
        return self._record.circumstances.number

    @property
    def call_site(self) -> CallSite:
        """The user's line that made the call, with `filename` and `line`; `str` of it is short."""
        return self._record.call_site

    @property
    def seconds(self) -> Seconds:
        """The time that the trace took so far. Its program may be compiled later."""
        return dataclasses.replace(self._record.seconds)

    @property
    def from_persistent_cache(self) -> bool:
        """True if JAX's persistent cache had the compiled program."""
        return self._record.from_persistent_cache

    @property
    def recompiled(self) -> tuple[Difference, ...]:
        """The differences of later calls for which JAX compiled the program again, without a trace.

        Most often they have a different device or sharding.
        """
        return tuple(self._record.recompiled)

    @property
    def is_internal(self) -> bool:
        """True if the function is a library's, without a public name by which users call it."""
        return is_internal(self._record.place)

    # --- The explanation ----------------------------------------------------------------------

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The ways in which the trace differs from the closest earlier trace.

        The first trace of a function has none, unless a function defined on the same line was
        traced before.
        """
        return self._record.explanation[0]

    @property
    def compared_with(self) -> int | None:
        """The number of the earlier trace that `differences` compares with; `None` without one."""
        return self._record.explanation[1]

    # --- What was compiled --------------------------------------------------------------------

    @property
    def program(self) -> Program | None:
        """The size of the program: its equations, the lines and loops behind them, its memory.

        `None` if the trace became part of an outer program, or if JAX dropped the program before
        anybody read its size.
        """
        return self._record.program

    @property
    def equations(self) -> int | None:
        """The number of equations, nested ones included; `None` without a `program`."""
        return None if self.program is None else self.program.equations

    @property
    def memory(self) -> Memory | None:
        """The memory that the compiled program needs; `None` if that isn't known."""
        return None if self.program is None else self.program.memory

    # --- Texts --------------------------------------------------------------------------------

    @property
    def reason(self) -> str:
        """Why the function was traced: `"first trace"`, or the differences in one line."""
        return "; ".join(listed(self.differences)) or "first trace"

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments of the traced call: the text of each part by its path.

        The text of an array is like `float32[3]`. The dict is empty for trees that are too large to
        be described, and for old traces of large trees.
        """
        # Not cached, because texts name lines relative to the working directory, which may change.
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
        """The differences with their remedies, one line each, as the log has them."""
        return explanation_of(*self._record.explanation)


def explanation_of(differences: Iterable[Difference], compared_with: int | None = None) -> str:
    """Return a line for each difference, with its remedy.

    `compared_with` is the number of the earlier trace. Without it, the line that names the earlier
    trace is left out.
    """
    lines = [f"  - {line}" for line in listed(differences, with_remedies=True)]
    if compared_with is not None:
        lines.insert(0, f"  Compared with trace {compared_with}:")
    return "\n".join(lines)


class TraceList(list[Trace]):
    """A list of traces, which prints as a table in a terminal and in a notebook."""

    def __repr__(self) -> str:
        if not self:
            return "Nothing was traced."
        rows = [("trace", "function", "called at", "seconds", "why")]
        for each in self:
            again = [f"compiled again: {text}" for text in listed(each.recompiled)]
            why = " ".join("; ".join([each.reason, *again]).split())
            seconds = f"{each.seconds.total:.3g}"
            rows.append((str(each.number), each.function, str(each.call_site), seconds, why))
        # The last column isn't padded, because its texts may be long.
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
            rows.append(
                (
                    trace.function,
                    trace.number,
                    why,
                    trace.call_site,
                    f"{trace.seconds.total:.3g}",
                    trace.summary,
                    trace.memory or "",
                )
            )
        return block(table(headings, rows))
