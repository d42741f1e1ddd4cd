"""One structure of a function's calls: its jitted form, and what its programs return."""

import weakref
from typing import Any

import jax.numpy as jnp

from .._spec.static_key import CONSTANTS
from .._spec.tree import Spec, count_arrays, split
from .program import Out, Output, Program


class Entry:
    """One structure of a function's calls.

    - `spec`: the spec of the arguments.
    - `name`: the name of the function.
    - `jitted`: `jax.jit` of a function of flat arrays.
    - `n_arrays`: how many arrays that function takes.
    - `n_fun`: how many of them belong to the function. They come last.
    - `block`: whether each call waits for its program, as the user asked by `block=True`.
    - `out`: what the first program returned besides arrays.
    - `outs`: what each program returns besides arrays, by the program's number, together with the
        weak reference that removes it when JAX drops the program.
    - `why_dropped`: why the table dropped the entry, if there is a reason. The traces of the entry
        share this list.
    - `watches`: weak references to static objects. They tell the table when an object dies.
    - `n_hits`: how many calls of the slow path ran a program that was there.
    - `last_used`: the time of the latest use on the table's clock.
    """

    jitted: Any
    out: Out

    def __init__(self, spec: Spec, function: Any, n_fun: int):
        self.spec = spec
        self.name: str = function.signature.name
        self.n_fun = n_fun
        self.n_arrays = count_arrays(spec) + n_fun
        self.block: bool = function.options.block
        self.hides_donation_warning = function.options.donate in ("all", "all-except-first")
        self.outs: dict[int, tuple[Out, Any]] = {}
        self.why_dropped: list[str] = []
        self.watches: list[weakref.ref[Any]] = []
        self.n_hits = 0
        self.last_used = 0

    def split_output(self, output: Any, came_in: list[Any]) -> Output:
        """Return a new program with the arrays of an output, and remember the rest of the output.

        `came_in` are all static objects of the call.
        """
        spec, arrays, statics = split(output, is_input=False)
        places: dict[int, list[int]] = {}
        for place, value in enumerate(came_in):
            if type(value) not in CONSTANTS:
                places.setdefault(id(value), []).append(place)
        slots = []
        for value in statics:
            # One object may have come in at several places, where another call has several equal
            # ones. Each goes back to its own place, as in a model that is passed and returned.
            here = places.get(id(value), [-1])
            slots.append(here.pop(0) if len(here) > 1 else here[0])
        made_here = [v if slot < 0 else None for v, slot in zip(statics, slots, strict=True)]
        out = Out(spec, tuple(made_here), tuple(slots))
        # Without a lock, because comparing specs may run a user's `==`. Another thread may be
        # first.
        first = self.__dict__.setdefault("out", out)
        program = Program(self.block)
        self._remember(program, first if out.is_as(first) else out)
        # A program without an output could not be waited for.
        return {program: arrays or [jnp.zeros((), bool)]}

    def _remember(self, program: Program, out: Out) -> None:
        outs, number = self.outs, program.number
        # The callback refers to the dict and not to the entry, which would keep itself alive.
        outs[number] = out, weakref.ref(program, lambda _: outs.pop(number, None))
