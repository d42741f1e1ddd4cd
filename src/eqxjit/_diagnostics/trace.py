"""The record of one trace: what was traced, for which call, why, how long it took, how large."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._places import CallSite, Place
from .._text import short
from .description import UNKNOWN, Description
from .differences import Difference, differences, distance, listed, of_functions
from .html import block, table
from .size import Memory, Program, memory_in, program_of

# With how many of those before it a trace is compared.
MAX_COMPARED = 16

TRACING, LOWERING, COMPILING = "tracing", "lowering", "compiling"


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
    - `seconds`: how long it took.
    - `from_persistent_cache`: whether JAX's persistent cache had the compiled program.
    - `recompiled`: how the calls differed for which JAX compiled its program again, without a
        trace: by another device or sharding, mostly.
    """

    function: str
    call_site: CallSite
    number: int
    _: dataclasses.KW_ONLY
    seconds: Seconds = dataclasses.field(default_factory=Seconds)
    from_persistent_cache: bool = False
    recompiled: list[Difference] = dataclasses.field(default_factory=list)

    # For those who make it: of the function, of the call, and of JAX.
    _place: Place
    _description: Description
    _configuration: dict[str, Any]
    # When and why its entry was dropped: shared with that.
    _invalidations: list[tuple[float, str]]
    # How often the function's cache had been cleared.
    _era: int
    # Whether it is lowered rather than run.
    _is_staged: bool
    # Its function's traces that have ended, and those under way, now: one that is explained is
    # compared with the latest that began before it.
    _others: "tuple[Iterable[Trace], Iterable[Trace]]" = ((), ())
    # If it is the first: its function, and the one of the same place that was traced before.
    _function: Description = UNKNOWN
    _relative: Description | None = None
    # Whether there is anything to compare it with.
    _is_again: bool = False
    # Whether the user's function returned, and what it returned was read.
    _is_made: bool = False
    _begun: float = dataclasses.field(default_factory=time.perf_counter)
    _hits: int = 0
    # How many of JAX's phases were under way in its thread when it began.
    _depth: int = 0
    _explanation: "tuple[tuple[Difference, ...], int | None] | None" = None
    # What JAX has made, weakly: it holds constants of the user's.
    _jaxpr: Callable[[], Any] = lambda: None
    _lowering: Callable[[], Any] = lambda: None
    _program: Program | None = None

    # --- The explanation, made when it is read ------------------------------------------------

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The ways in which it differs from the closest earlier trace; empty for the first."""
        return self._explain()[0]

    @property
    def compared_with(self) -> int | None:
        """The number of that earlier trace; `None` for the first."""
        return self._explain()[1]

    def _explain(self) -> tuple[tuple[Difference, ...], int | None]:
        """Return how it differs from the closest earlier trace, and the number of that."""
        if self._explanation is None:
            self._explanation = self._compare()
        return self._explanation

    def _compare(self) -> tuple[tuple[Difference, ...], int | None]:
        if not self._is_again:
            return (), None
        if self._relative is not None:
            return tuple(of_functions(self._relative, self._function, self._place)), None
        # In one C call each, because other threads change these.
        others = [each for some in self._others for each in list(some) if each._begun < self._begun]
        described = [each for each in others if each._description is not UNKNOWN] or others
        # Of those that are as close, the latest: one that isn't complete yet, in a recursion.
        latest = sorted(described, key=lambda trace: trace._begun)[: -MAX_COMPARED - 1 : -1]
        if not latest:
            # Those failed.
            return (), None
        closest = min(latest, key=self._distance)
        # The number of a cleared one may be another trace's by now.
        number = closest.number if closest._era == self._era else None
        if UNKNOWN in (closest._description, self._description):
            why = "the arguments are too large to be compared, or can't be"
            return (Difference("unknown", "", "", why),), number
        found = differences(closest._description, self._description, self._place.is_users)
        found += [
            Difference("configuration changed", *change)
            for change in _settings_changed(closest._configuration, self._configuration)
        ]
        return tuple(found) or (self._why_not_served_by(closest),), number

    def _distance(self, earlier: "Trace") -> int:
        is_set = bool(_settings_changed(earlier._configuration, self._configuration))
        return distance(earlier._description, self._description) + is_set

    def _why_not_served_by(self, earlier: "Trace") -> Difference:
        # The call looks just like that of the trace.
        why = "JAX's caches no longer hold it (`jax.clear_caches()`)"
        reasons = [reason for when, reason in earlier._invalidations if when < self._begun]
        if reasons:
            why = reasons[-1]
        elif earlier._invalidations is not self._invalidations:
            why = (
                "a static object of that trace's was changed in place, or differs in what neither "
                "its text nor its hash shows, as a dict with its keys in another order"
            )
        return Difference("cache evicted or cleared", "", "", why)

    # --- What it made, found out when it is read ----------------------------------------------

    @property
    def program(self) -> Program | None:
        """Its equations, the lines and loops that make them, and its memory.

        `None` where it became part of an outer program, or was first read when JAX had dropped it.
        """
        jaxpr, lowering = self._jaxpr(), self._lowering()
        if self._program is None and jaxpr is not None:
            self._program = program_of(jaxpr, lowering)
        elif self._program is not None and self._program.memory is None:
            # It may have been compiled since.
            self._program = self._program._replace(memory=memory_in(lowering))
        return self._program

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
        rows = () if self._description is UNKNOWN else self._description
        return {row.path: str(row.part) for row in rows}

    @property
    def summary(self) -> str:
        """The arguments in a few words."""
        return str(self._description)

    def __repr__(self) -> str:
        again = f"; compiled again: {'; '.join(listed(self.recompiled))}" if self.recompiled else ""
        return (
            f"<trace {self.number} of {self.function}({self.summary}) at {self.call_site}: "
            f"{self.reason}; {self.seconds}{again}>"
        )

    def explanation(self) -> str:
        """Return a line for each difference, with what to do about it, if anything."""
        lines = [f"  - {line}" for line in listed(self.differences, with_remedies=True)]
        if self.compared_with is not None:
            lines.insert(0, f"  Compared with trace {self.compared_with}:")
        return "\n".join(lines)


def _settings_changed(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the name of each setting of JAX's that was changed, and the texts of both values."""
    # The names depend on the release of JAX, and a user may add contexts.
    changed = [name for name in new if name not in old or old[name] is not new[name]]
    texts = [
        (n, _setting_text(old[n]) if n in old else "absent", _setting_text(new[n])) for n in changed
    ]
    return [change for change in texts if change[1] != change[2]]


def _setting_text(value: Any) -> str:
    # JAX's environment of axis names has no text.
    sizes = getattr(value, "axis_sizes", None)
    return short(dict(sizes) if isinstance(sizes, Mapping) else value, 1_000)


class TraceList(list[Trace]):
    """The traces of a function: a list, which shows as a table in a notebook."""

    def _repr_html_(self) -> str:
        if not self:
            return block("<p>Nothing was traced.</p>")
        headings = ("function", "trace", "why", "called at", "seconds", "arguments", "memory")
        rows: list[tuple[Any, ...]] = []
        for trace in self:
            why = "\n".join(listed(trace.differences, with_remedies=True)) or "first trace"
            if trace.recompiled:
                why += "\ncompiled again:\n" + "\n".join(listed(trace.recompiled, True))
            what = trace.function, trace.number, why, trace.call_site
            seconds, memory = f"{trace.seconds.total:.3g}", trace.memory or ""
            rows.append((*what, seconds, trace.summary, memory))
        return block(table(headings, rows))
