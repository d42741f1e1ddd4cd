"""The life of a cache entry: three state machines, whose fields are written here alone.

- Validity: pending, traced (`traces`), invalid (`invalidation_reasons`).
- Sync: unknown (`unclassified`), asynchronous, or blocking (`blocks`). What is traced or compiled
    anew takes an asynchronous entry back to unknown; one that blocks does so for good.
- Tier: generic (`hits` of `hits_needed`), specialised, given a second chance, or unsupported.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from .._plan.plan import CallPlan

# How many times more warm calls it takes to be specialised again, after being crowded out: where
# many structures take turns, making specialised calls must not cost more than they save.
_PATIENCE = 1_000

# How many times more warm calls there must be before making one is attempted again, how often.
_HITS_PER_ATTEMPT = 10
_ATTEMPTS = 3


@dataclasses.dataclass(eq=False)
class SpecializedCall:
    """The specialised call of an entry (see `specialized_call.py`).

    - `entry`: the entry that it calls.
    - `instantiate`: returns the function for one wrapper, given its dispatcher, and what to call if
        the guards don't hold.
    - `plan`, `source`: return its plan, as static objects are now, and its source, as Python.
    - `fails_fast`: returns whether its guards mostly fail without running Python.
    - `blocks`: whether it waits for the computation.
    - `checks_output`: whether it looks at static objects of the output.
    """

    entry: "EntryState"
    instantiate: Callable[..., Any]
    plan: Callable[[], CallPlan]
    source: Callable[[], str]
    fails_fast: Callable[[], bool]
    blocks: bool = False
    checks_output: bool = False


class EntryState:
    """The state of a cache entry.

    Transitions of the tier are made under the cache's lock.
    """

    # `_native.c` reads whether it is unclassified from a slot.
    __slots__ = ("__dict__", "__weakref__", "unclassified")

    def __init__(self, blocks: bool):
        self.traces = 0
        #: Why the cache dropped it, once it did; its traces share the list.
        self.invalidation_reasons: list[str] = []
        #: Whether some program of this entry must be waited for, because it can raise.
        self.blocks = blocks
        #: Whether a program of this entry, traced or compiled anew, hasn't been looked at yet.
        self.unclassified = False
        #: Warm calls through the generic path since the specialised call was last lacking, and how
        #: many of them make it worth its making.
        self.hits = 0
        self.hits_needed = 1
        self.seconds_of_first_call = 0.0
        #: How often making the specialised call may still take too long.
        self.attempts_left = _ATTEMPTS
        self.specialized: SpecializedCall | None = None
        #: A specialised call that is out of use until the next call (see `FunctionCache`).
        self.second_chance: SpecializedCall | None = None
        #: Whether the generic path must serve this structure for good.
        self.unspecializable = False

    # --- Validity -----------------------------------------------------------------------------

    def count_trace(self) -> None:
        """Pending or traced -> traced."""
        self.traces += 1
        self.begin_classifying()

    def invalidate(self, reason: str) -> None:
        """Traced -> invalid: the cache drops it."""
        self.invalidation_reasons.append(reason)

    # --- Sync ---------------------------------------------------------------------------------

    def begin_classifying(self) -> None:
        """Asynchronous -> unknown: JAX traced or compiled a program anew."""
        self.unclassified = not self.blocks

    def block_if(self, can_raise: bool) -> None:
        """Unknown -> blocking, if a program was found that can raise."""
        self.blocks = self.blocks or can_raise

    def end_classifying(self, is_known: bool) -> None:
        """Unknown -> asynchronous or blocking, unless that couldn't be told yet."""
        self.unclassified = not is_known

    # --- Tier ---------------------------------------------------------------------------------

    def count_hit(self) -> None:
        """Count a warm call through the generic path."""
        self.hits += 1

    def count_seconds(self, seconds: float) -> None:
        """Count how long a first call took, which making a specialised one must not exceed."""
        self.seconds_of_first_call = max(self.seconds_of_first_call, seconds)

    def specialize(self, call: SpecializedCall) -> None:
        """Generic or second chance -> specialised."""
        self.specialized, self.second_chance = call, None

    def unspecialize(self) -> None:
        """Specialised or second chance -> generic: the call no longer holds."""
        self.hits = 0
        self.specialized = self.second_chance = None

    def crowd_out(self) -> None:
        """Specialised -> generic, for long: there are too many."""
        self.specialized = None
        self.hits = 0
        self.hits_needed *= _PATIENCE

    def give_second_chance(self, call: SpecializedCall) -> None:
        """Specialised -> second chance, as in the clock algorithm: out of use until it is wanted.

        A specialised call leaves no trace in the order of use; the generic path does.
        """
        self.specialized, self.second_chance = None, call

    def end_second_chance(self) -> None:
        """Second chance -> generic: it wasn't wanted."""
        self.second_chance = None

    def postpone(self) -> None:
        """Generic -> generic, or unsupported after some attempts: making the call took too long.

        Once, that can be a collection of garbage, or a busy machine.
        """
        self.hits, self.hits_needed = 0, _HITS_PER_ATTEMPT * self.hits_needed
        self.attempts_left -= 1
        self.unspecializable = not self.attempts_left

    def give_up(self) -> None:
        """Generic -> unsupported: no specialised call can be made."""
        self.unspecializable = True
