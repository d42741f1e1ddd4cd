"""One compiled entry: `jax.jit` over flat array leaves, for one static structure of a call."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import tree_flatten

from .._compat import wrapped_by_tracer
from .._plan.signature import Signature
from .._trees.array_layout import ArrayLayout
from .._trees.given import Given
from .._trees.key_cache import Seen
from .._trees.mutation import are_unchanged
from .._trees.numpy_inputs import NumpyInputs
from .._trees.out_spec import Output, OutSpec, arrays_of, index_of, output_of
from .._trees.partition import has_tracers, split_leaves
from .effects import may_raise
from .options import Options
from .state import EntryState

#: The variable, local or global, that holds the entry of a warm call.
ENTRY_VARIABLE = "__eqxjit_entry__"

# How many traces that aren't compiled are remembered, the latest ones.
_MAX_UNCOMPILED = 256

# The output of a new trace is compared with the first one and so many others: each takes a while.
_MAX_COMPARED = 16


class CacheEntry(EntryState):
    """One static structure of a function: its jitted form and what its traces returned."""

    def __init__(self, signature: Signature, options: Options, layout: ArrayLayout, jitted: Any):
        super().__init__(options.block)
        self.name = signature.name
        self.label = signature.label
        self.layout = layout
        #: Nothing of it goes to JAX, which keeps the structure of outputs for good.
        self.out_specs: list[OutSpec] = []
        #: Under what the cache holds it: the typed static key, and that of a scan, with what must
        #: live for that to be valid.
        self.key: Hashable = None
        self.met_as: Hashable = None
        self.known_by_address: list[weakref.ref[Any]] = []
        #: The greater, the later.
        self.last_used = 0
        #: Weak references to static objects, which tell the cache when those die.
        self.watches: list[weakref.ref[Any]] = []
        self.numpy_inputs = NumpyInputs()
        #: Whether JAX's warning of donated buffers that weren't usable is hidden.
        self.hides_donation_warning = options.hides_donation_warning
        #: Whether the native back end calls it without a frame by which it is found.
        self.has_frameless_calls = False
        #: The records of its traces that JAX hasn't compiled yet, by what they are for.
        self._uncompiled: dict[Hashable, tuple[Any]] = {}
        self.jitted = jitted

    def keep_uncompiled(self, trace_key: Hashable, record: Any) -> None:
        """Keep the record of a trace that was lowered only, or became part of an outer program."""
        self._uncompiled[trace_key] = (record,)
        if len(self._uncompiled) > _MAX_UNCOMPILED:
            self._uncompiled.pop(next(iter(self._uncompiled)), None)

    def uncompiled(self, trace_key: Hashable) -> tuple[Any, ...]:
        """Return, in a tuple, the record of a trace that JAX hasn't compiled yet; or nothing."""
        return self._uncompiled.get(trace_key, ())

    def drop_uncompiled(self, trace_key: Hashable) -> None:
        """Drop the record of a trace that JAX has compiled."""
        self._uncompiled.pop(trace_key, None)

    def flat(self, fun_leaves: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Return all arrays of a call, in the order in which JAX is given them."""
        return self.layout.flat(fun_leaves, leaves)

    def execute(self, jitted: Callable[..., Output], flat: Sequence[Any]) -> Output:
        """Call the jitted function, or what it was compiled to, with all arrays of a call."""
        if self.blocks:
            return jitted(*flat)
        return self.numpy_inputs.call(jitted, flat, wait_for)

    def is_unmodified(self, seen: Seen | None = None) -> bool:
        """Return whether the static objects that this entry returns are unmodified since its trace.

        Those that came in are each call's own. If a caller has changed others in place, they are no
        longer those that later calls should get back.
        """
        return all(are_unchanged(d.mutable, seen) for d in self.out_specs)

    @property
    def returned(self) -> list[Any]:
        """The static objects in outputs that didn't come in."""
        return [value for out_spec in self.out_specs for value in out_spec.own]

    @property
    def returns_mutable(self) -> bool:
        """True where there is anything for `is_unmodified` to look at."""
        return any(out_spec.mutable for out_spec in self.out_specs)

    def describe(self, out: Any, given: Given) -> Output:
        """Return to JAX the arrays in the output of the user's function, and describe the rest."""
        leaves, treedef = tree_flatten(out)
        dynamic, static = split_leaves(leaves)
        for out_spec in (*self.out_specs[:1], *self.out_specs[1:][-_MAX_COMPARED:]):
            if out_spec.describes(treedef, static, given):
                break
        else:
            out_spec = OutSpec(treedef, static, given)
            self.out_specs.append(out_spec)
        self.count_trace()
        # A program without an output could not be waited for.
        arrays = dynamic or [jnp.zeros((), bool)]
        return output_of(self.out_specs.index(out_spec), arrays)

    def returns_given(self, output: Output) -> bool:
        """Return whether `rebuild` needs what came in with the call."""
        return self.out_specs[index_of(output)].is_given

    def rebuild(self, output: Output, given: Given | None) -> Any:
        """Return the user's output, from what JAX returned for a call."""
        return self.out_specs[index_of(output)].rebuild(arrays_of(output), given)

    def classify(self, leaves: list[Any], blocks: bool | None = None) -> bool:
        """Look at the program for these leaves, which has just run; False if it can't be told.

        Served from JAX's caches, which takes its time, unless `blocks` says if it can raise.
        `end_classifying` is for the caller to call, when all is done.
        """
        if has_tracers(leaves):
            # The outer program is what runs. A later call with arrays is served by this trace.
            return False
        try:
            if blocks is None:
                blocks = may_raise(self.jitted.lower(*leaves).compiler_ir("stablehlo"))
        except Exception:
            # No `lower` (`EQX_ON_ERROR=breakpoint`), or nothing that it knows.
            blocks = True
        self.block_if(blocks)
        return True


def wait_for(output: Output) -> None:
    """Wait until a program has run, so that its error is raised here."""
    pending: list[Any] = list(arrays_of(output))
    while pending:
        array = pending.pop()
        if isinstance(array, Tracer):
            # Under an eager `vmap` or `grad` the program has run all the same.
            pending.extend(wrapped_by_tracer(array))
        elif isinstance(array, jax.Array):
            array.block_until_ready()
