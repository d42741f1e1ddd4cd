"""The record of one trace: what was traced, for which call, why, how long it took, how large."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from .._html import block, table
from .._places import CallSite, Place, is_internal
from .._text import short
from .constants import CapturedArray
from .description import UNKNOWN, Description
from .differences import Difference, differences, distance, listed, of_functions
from .size import Memory, Program, memory_in, program_of

# With how many of those before it a trace is compared.
MAX_COMPARED = 16

_CHANGED = (
    "a static object of that trace's was changed in place, or differs in what neither its text nor "
    "its hash shows, as a dict with its keys in another order"
)

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
    # Why its entry was dropped: shared with that.
    _why_dropped: list[str]
    # Its function's traces that have ended: it is compared with those before it.
    _ended: "Collection[Trace]" = ()
    # Where there are none: another function of the same place that was traced, and this one.
    _functions: tuple[Description, Description] | None = None
    # Whether the user's function returned, and what it returned was read.
    _is_made: bool = False
    # What JAX has made, weakly: it holds constants of the user's.
    _jaxpr: Callable[[], Any] = lambda: None
    _lowering: Callable[[], Any] = lambda: None
    _program: Program | None = None
    # What it closes over.
    _constants: tuple[CapturedArray, ...] = ()

    @property
    def is_internal(self) -> bool:
        """Whether the function is one of a library's that users don't know by its name."""
        return is_internal(self._place)

    # --- The explanation, made when it is read ------------------------------------------------

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The ways in which it differs from the closest earlier trace; empty for the first."""
        return self._explanation[0]

    @property
    def compared_with(self) -> int | None:
        """The number of that earlier trace; `None` for the first."""
        return self._explanation[1]

    @functools.cached_property
    def _explanation(self) -> tuple[tuple[Difference, ...], int | None]:
        # In one C call, because other threads change these.
        earlier = [each for each in [*self._ended] if each.number < self.number]
        if not earlier:
            functions = self._functions
            return tuple(of_functions(*functions, self._place) if functions else ()), None
        closest = closest_of(earlier, self._description, self._configuration)
        if UNKNOWN in (closest._description, self._description):
            why = "the arguments are too large to be compared, or can't be"
            return (Difference("unknown", "", "", why),), closest.number
        found = differences(closest._description, self._description, self._place)
        found += _settings_changed(closest._configuration, self._configuration)
        if not found:
            # The call looks just like that of the trace.
            why = "JAX's caches no longer hold it (`jax.clear_caches()`)"
            if closest._why_dropped is not self._why_dropped:
                why = "".join(closest._why_dropped) or _CHANGED
            found = [Difference("cache evicted or cleared", "", "", why)]
        return tuple(found), closest.number

    # --- What it made, found out when it is read ----------------------------------------------

    @property
    def program(self) -> Program | None:
        """Its equations, the lines and loops that make them, and its memory.

        `None` where it became part of an outer program, or was first read when JAX had dropped it.
        """
        jaxpr, lowering = self._jaxpr(), self._lowering()
        if self._program is None and jaxpr is not None:
            self._program = program_of(jaxpr, lowering, self._constants)
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

    @property
    def explanation(self) -> str:
        """A line for each difference, with what to do about it, if anything."""
        return explanation_of(*self._explanation)


def closest_of(
    traces: "Collection[Trace]", description: Description, configuration: dict[str, Any]
) -> Trace:
    """Return the trace that differs least from a call; of several, the latest."""
    described = [each for each in traces if each._description is not UNKNOWN] or [*traces]
    return min(
        described[: -MAX_COMPARED - 1 : -1],
        key=lambda each: (
            distance(each._description, description)
            + bool(_settings_changed(each._configuration, configuration))
        ),
    )


def explanation_of(differences: Iterable[Difference], compared_with: int | None = None) -> str:
    """Return a line for each difference from a trace, with what to do about it."""
    lines = [f"  - {line}" for line in listed(differences, with_remedies=True)]
    if compared_with is not None:
        lines.insert(0, f"  Compared with trace {compared_with}:")
    return "\n".join(lines)


def _settings_changed(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return the settings of JAX's that were changed."""
    # The names depend on the release of JAX, and a user may add contexts.
    changed = [(name, old.get(name), new[name]) for name in new if old.get(name) is not new[name]]
    texts = [(name, _setting_text(was), _setting_text(is_now)) for name, was, is_now in changed]
    return [Difference("configuration changed", *each) for each in texts if each[1] != each[2]]


def _setting_text(value: Any) -> str:
    # JAX's environment of axis names has no text.
    sizes = getattr(value, "axis_sizes", None)
    return short(dict(sizes) if isinstance(sizes, Mapping) else value, 1_000)


class TraceList(list[Trace]):
    """The traces of a function: a list, which shows as a table in a terminal and in a notebook."""

    def __repr__(self) -> str:
        if not self:
            return "Nothing was traced."
        headings = ("trace", "function", "called at", "seconds", "why")
        rows = [
            (str(each.number), each.function, str(each.call_site), f"{each.seconds.total:.3g}")
            for each in self
        ]
        widths = [max(map(len, column)) for column in zip(headings[:4], *rows, strict=True)]
        lines: list[str] = []
        for cells, why in zip([headings[:4], *rows], ["why", *map(_why, self)], strict=True):
            padded = [f"{cell:<{n}}" for cell, n in zip(cells, widths, strict=True)]
            lines.append("  ".join([*padded, why.replace("\n", " ")]))
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


def _why(trace: Trace) -> str:
    again = listed(trace.recompiled)
    return "; ".join([trace.reason, *([f"compiled again: {'; '.join(again)}"] if again else [])])
