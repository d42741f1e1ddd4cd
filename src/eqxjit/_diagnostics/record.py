"""The record of one trace. Only this package writes it; users read it through `Trace`."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from .._places import CallSite, Place
from .._signals import suppressed
from .._text import short
from .constants import CapturedArray, constants_of
from .description import UNKNOWN, Description
from .differences import Difference, differences, differences_of_functions, distance
from .size import Program, memory_in, program_of

#: A trace is compared with at most this many traces before it.
MAX_COMPARED = 16

TRACING, LOWERING, COMPILING = "tracing", "lowering", "compiling"

_NO_VISIBLE_DIFFERENCE = (
    "a static object was changed in place since that trace, or differs in a way that neither its "
    "text nor its hash shows, such as the order of a dict's keys"
)


@dataclasses.dataclass
class Seconds:
    """The time that a trace took, including the functions nested in it.

    - `tracing`: the seconds of running the Python function.
    - `lowering`: the seconds of translating the jaxpr to StableHLO; 0 for a trace that became part
        of an outer program.
    - `compiling`: the seconds of compiling the StableHLO program, or of loading the compiled
        program from JAX's persistent cache.
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


@dataclasses.dataclass(eq=False)
class Circumstances:
    """The call that a trace was for, as far as explanations compare it with other calls.

    - `number`: the number of the trace, from 1.
    - `description`: the description of the arguments. It is `UNKNOWN` if they can't be described.
        The descriptions of old traces of large trees are replaced by `UNKNOWN` in time.
    - `configuration`: JAX's settings, by name.
    - `why_dropped`: why the table dropped the entry of the trace; empty while the table has the
        entry. The list belongs to the entry, which fills it in.
    """

    number: int
    description: Description
    configuration: dict[str, Any]
    why_dropped: list[str]


#: The differences between a trace and an earlier trace, and the number of the earlier trace. The
#: number is `None` if the earlier trace is of a different function, or if there is none.
Explanation = tuple[tuple[Difference, ...], int | None]


@dataclasses.dataclass(eq=False)
class TraceRecord:
    """One trace of a function.

    - `function`: the function's name, without the names of functions around its definition.
    - `place`: where the function is defined.
    - `call_site`: the user's line that made the call.
    - `circumstances`: the call that the trace was for.
    - `earlier`: the circumstances of the traces with which this one is compared. They are dropped
        once the trace is explained.
    - `functions`: for a function's first trace, the descriptions of two functions to compare: the
        one that was traced before at the same place, and this one. `None` if there is no such pair.
    - `seconds`: the time that the trace took so far.
    - `from_persistent_cache`: whether JAX's persistent cache had the compiled program.
    - `recompiled`: the differences of later calls for which JAX compiled the program again.
    - `jaxpr`, `lowering`: weak references to JAX's jaxpr and lowering of the program. Both hold the
        user's constants, so the record must not keep them alive.
    - `roots`: weak references to the function and the static arguments, in which the names of
        captured arrays are looked for.
    """

    function: str
    place: Place
    call_site: CallSite
    circumstances: Circumstances
    earlier: Collection[Circumstances]
    functions: tuple[Description, Description] | None
    seconds: Seconds = dataclasses.field(default_factory=Seconds)
    from_persistent_cache: bool = False
    recompiled: list[Difference] = dataclasses.field(default_factory=list)
    jaxpr: Callable[[], Any] = lambda: None
    lowering: Callable[[], Any] = lambda: None
    roots: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)
    _program: Program | None = None

    @functools.cached_property
    def explanation(self) -> Explanation:
        """The differences from the closest earlier trace; computed lazily, once."""
        now = self.circumstances
        earlier = self.earlier
        self.earlier = ()
        if not earlier:
            if self.functions is None:
                return (), None
            old, new = self.functions
            return tuple(differences_of_functions(old, new, self.place)), None
        closest = closest_of(earlier, now.description, now.configuration)
        if UNKNOWN in (closest.description, now.description):
            why = "the arguments can't be compared, or are too large for that"
            return (Difference("unknown", "", "", why),), closest.number
        found = differences(closest.description, now.description, self.place)
        found += _changed_settings(closest.configuration, now.configuration)
        if not found:
            # The call looks just like the earlier one. All traces of an entry share the entry's
            # `why_dropped`. So if the two lists are one object, the table still had the entry, and
            # it was JAX that dropped the program.
            why = "JAX's caches no longer hold the program (`jax.clear_caches()`)"
            if closest.why_dropped is not now.why_dropped:
                why = "".join(closest.why_dropped) or _NO_VISIBLE_DIFFERENCE
            found = [Difference("cache evicted or cleared", "", "", why)]
        return tuple(found), closest.number

    @functools.cached_property
    def constants(self) -> tuple[CapturedArray, ...]:
        """The arrays that the program closes over; computed lazily, once."""
        roots = [root for ref in self.roots if (root := ref()) is not None]
        # The search for names reads the user's objects, which may raise any error. Such an error
        # must not make a call or a report fail.
        with suppressed:
            return constants_of(self.jaxpr(), roots)
        return ()

    @property
    def program(self) -> Program | None:
        """The size of the program, computed lazily; `None` if JAX dropped the program before."""
        jaxpr = self.jaxpr()
        lowering = self.lowering()
        if self._program is None and jaxpr is not None:
            self._program = program_of(jaxpr, lowering, self.constants)
        elif self._program is not None and self._program.memory is None:
            # JAX may have compiled the program since the size was computed.
            self._program = self._program._replace(memory=memory_in(lowering))
        return self._program


def closest_of(
    earlier: Iterable[Circumstances], description: Description, configuration: dict[str, Any]
) -> Circumstances:
    """Return the circumstances that differ least from a call, the latest of equally close ones.

    `description` and `configuration` are the call's.
    """
    latest_first = [*earlier][::-1]
    described = [each for each in latest_first if each.description is not UNKNOWN] or latest_first

    def total_distance(each: Circumstances) -> int:
        has_changed_settings = bool(_changed_settings(each.configuration, configuration))
        return distance(each.description, description) + has_changed_settings

    return min(described[:MAX_COMPARED], key=total_distance)


def _changed_settings(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return the differences between JAX's settings in two traces."""
    found: list[Difference] = []
    for name, value in new.items():
        # A setting may be missing in the earlier trace, because users can add contexts of their
        # own.
        old_value = old.get(name)
        if old_value is not value:
            old_text, new_text = _setting_text(old_value), _setting_text(value)
            if old_text != new_text:
                found.append(Difference("configuration changed", name, old_text, new_text))
    return found


def _setting_text(value: Any) -> str:
    # JAX's environment of axis names has no readable `repr`.
    sizes = getattr(value, "axis_sizes", None)
    return short(dict(sizes) if isinstance(sizes, Mapping) else value, 1_000)
