"""What is recorded of one trace: written by this package alone, read through `trace.Trace`."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from .._places import CallSite, Place
from .._text import short
from .constants import CapturedArray
from .description import UNKNOWN, Description
from .differences import Difference, differences, differences_of_functions, distance
from .size import Program, memory_in, program_of

#: With how many of the traces before it a trace is compared.
MAX_COMPARED = 16

TRACING, LOWERING, COMPILING = "tracing", "lowering", "compiling"

_CHANGED = (
    "a static object of that trace's was changed in place, or differs in what neither its text nor "
    "its hash shows, as a dict with its keys in another order"
)


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


@dataclasses.dataclass(eq=False)
class Circumstances:
    """What a trace was made for: all that explanations compare.

    - `number`: the number of the trace, from 1.
    - `description`: the arguments. `UNKNOWN` if they can't be described, and in the end for an old
        trace of large trees.
    - `configuration`: JAX's settings, by name.
    - `why_dropped`: why the table dropped the entry of the trace. This list is the entry's, which
        may be filled in later.
    """

    number: int
    description: Description
    configuration: dict[str, Any]
    why_dropped: list[str]


Explanation = tuple[tuple[Difference, ...], int | None]


@dataclasses.dataclass(eq=False)
class TraceRecord:
    """One trace of a function.

    - `function`: the function's name, as from inside the function that defines it; `place`: where
        the function is defined.
    - `call_site`: the user's line that made the call.
    - `circumstances`: what the trace was made for.
    - `earlier`: the circumstances of the traces before it, with which it is compared; empty once it
        is explained.
    - `functions`: for the first trace of a function, if another function of the same place was
        traced before: that function and this one.
    - `seconds`: how long it took so far.
    - `from_persistent_cache`: whether JAX's persistent cache had the compiled program.
    - `recompiled`: how later calls differed for which JAX compiled the program again.
    - `jaxpr`, `lowering`: weak references to what JAX has made: it holds constants of the user's.
    - `constants`: the arrays that the program closes over.
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
    constants: tuple[CapturedArray, ...] = ()
    _program: Program | None = None

    @functools.cached_property
    def explanation(self) -> Explanation:
        """How it differs from the closest trace before, and the number of that; made once."""
        now, place = self.circumstances, self.place
        earlier, self.earlier = self.earlier, ()
        if not earlier:
            functions = self.functions
            return tuple(differences_of_functions(*functions, place) if functions else ()), None
        closest = closest_of(earlier, now.description, now.configuration)
        if UNKNOWN in (closest.description, now.description):
            why = "the arguments are too large to be compared, or can't be"
            return (Difference("unknown", "", "", why),), closest.number
        found = differences(closest.description, now.description, place)
        found += _settings_changed(closest.configuration, now.configuration)
        if not found:
            # The call looks just like the one of that trace.
            why = "JAX's caches no longer hold it (`jax.clear_caches()`)"
            if closest.why_dropped is not now.why_dropped:
                why = "".join(closest.why_dropped) or _CHANGED
            found = [Difference("cache evicted or cleared", "", "", why)]
        return tuple(found), closest.number

    @property
    def program(self) -> Program | None:
        """The size of the program, found out when it is read; `None` if JAX has dropped it."""
        jaxpr, lowering = self.jaxpr(), self.lowering()
        if self._program is None and jaxpr is not None:
            self._program = program_of(jaxpr, lowering, self.constants)
        elif self._program is not None and self._program.memory is None:
            # It may have been compiled since.
            self._program = self._program._replace(memory=memory_in(lowering))
        return self._program


def closest_of(
    earlier: Iterable[Circumstances], description: Description, configuration: dict[str, Any]
) -> Circumstances:
    """Return which of these circumstances differ least from a call's; of several, the latest."""
    latest_first = [*earlier][::-1]
    described = [each for each in latest_first if each.description is not UNKNOWN] or latest_first
    return min(
        described[:MAX_COMPARED],
        key=lambda each: (
            distance(each.description, description)
            + bool(_settings_changed(each.configuration, configuration))
        ),
    )


def _settings_changed(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return which of JAX's settings were changed."""
    # The names depend on the release of JAX, and a user may add contexts.
    changed = [(name, old.get(name), new[name]) for name in new if old.get(name) is not new[name]]
    texts = [(name, _setting_text(was), _setting_text(is_now)) for name, was, is_now in changed]
    return [Difference("configuration changed", *each) for each in texts if each[1] != each[2]]


def _setting_text(value: Any) -> str:
    # JAX's environment of axis names has no text.
    sizes = getattr(value, "axis_sizes", None)
    return short(dict(sizes) if isinstance(sizes, Mapping) else value, 1_000)
