"""Makes the specialised call of an entry: assembles its source, compiles it, and verifies it."""

import functools
import os
import re
import types
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from jax.tree_util import tree_flatten

from .._code.source import define, indented, wrapped
from .._code.tracebacks import trim
from .._compat import PyTreeDef, is_staging
from .._plan.budget import Budget, TooLong
from .._plan.given_source import GivenSource, output_structure
from .._plan.guards import GuardSource, conditions
from .._plan.rebuild import RebuildSource
from .._plan.signature import Signature, absent
from .._trees.given import Given, Position, have_same_given
from .._trees.key_cache import treedef_key
from .._trees.mutation import are_repeated
from .._trees.partition import StaticTree
from .._trees.structure import Node, structure_of
from .counter import hit_counter
from .entry import ENTRY_VARIABLE, CacheEntry, Output, index_of
from .function import WrappedFunction
from .traced import CacheMiss

#: `EQXJIT_SPECIALIZE=0` leaves all calls to the generic path.
SPECIALIZING = os.environ.get("EQXJIT_SPECIALIZE", "1") != "0"

# Beyond this size the generic path serves: compiling the source would take seconds.
_MAX_NODES = 40_000

# Larger structures must be called more often before a specialised call is worth its making.
_NODES_PER_HIT = 2_000


# How many times more warm calls there must be before making one is attempted again.
_HITS_PER_ATTEMPT = 10


class SlowPath(Protocol):
    """The calls of one wrapper that no specialised call serves."""

    @property
    def wrapped(self) -> WrappedFunction:
        """The function, without its arrays."""
        ...

    @property
    def fun_leaves(self) -> tuple[Any, ...]:
        """Its arrays."""
        ...

    def retrace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a warm call in which JAX wants to trace."""
        ...

    def flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return the static objects that come in with a call."""
        ...

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a clearer error than the one that the caller handles, if there is one."""
        ...

    def check_recompiled(self, entry: CacheEntry, output: Output) -> None:
        """Wait for a program that a warm call compiled."""
        ...

    def wait(self, entry: CacheEntry, output: Output) -> None:
        """Wait for a program that can raise, or that isn't known not to."""
        ...


class SpecializedCall:
    """The generated function of one entry, for any wrapper of the entry's function.

    - `source`: its source.
    - `blocks`: whether it waits for the computation.
    - `checks_output`: whether it asks if the static objects that it returns have been changed.
    - `entry`: the entry that it calls.
    """

    __slots__ = ("_fun_statics", "_make", "blocks", "checks_output", "entry", "source")

    def __init__(
        self,
        source: str,
        make: Callable[..., Any],
        entry: CacheEntry,
        blocks: bool,
        fun_statics: list[Position],
    ):
        """`fun_statics` are where those static objects of the function are that it returns."""
        self.source = source
        self.blocks = blocks
        self.checks_output = entry.returns_mutable
        self._make = make
        self._fun_statics = fun_statics
        self.entry = entry

    def instantiate(
        self,
        dispatcher: SlowPath,
        otherwise: Callable[..., Any],
        jitted: Callable[..., Output] | None = None,
    ) -> Callable[..., Any]:
        """Return the function for one wrapper.

        **Arguments:**

        - `dispatcher`: the way of that wrapper.
        - `otherwise`: what to call if the guards don't hold.
        - `jitted`: what to call in the place of the entry's jitted function.
        """
        signature = dispatcher.wrapped.signature
        run = jitted or self.entry.jitted
        # What is compiled ahead of time isn't in the cache.
        hits = hit_counter() if jitted else dispatcher.wrapped.cache.traces.hits
        if any(issubclass(type(leaf), np.ndarray) for leaf in dispatcher.fun_leaves):
            run = _minding_numpy(self.entry, run)
        call = self._make(
            run,
            otherwise,
            signature.binder(dispatcher.retrace),
            signature.binder(dispatcher.explain),
            signature.binder(dispatcher.flattened),
            functools.partial(
                dispatcher.wait if self.blocks else dispatcher.check_recompiled, self.entry
            ),
            self.entry.numpy_inputs.own,
            self.entry.numpy_inputs.own_arrays,
            hits,
            *_checks_of_function(dispatcher),
            *_fun_statics(dispatcher, self._fun_statics),
            *dispatcher.fun_leaves,
        )
        call.__name__, call.__qualname__ = signature.name, signature.qualname
        return call


def _minding_numpy(entry: CacheEntry, jitted: Callable[..., Output]) -> Callable[..., Output]:
    """Return what to call for a function that itself holds NumPy arrays."""
    return lambda *arrays: entry.execute(jitted, arrays)


def _checks_of_function(dispatcher: SlowPath) -> list[Callable[[], bool]]:
    """Return the checks of the static objects that the wrapped function holds."""
    return [dispatcher.wrapped.is_unmodified] if dispatcher.wrapped.mutable else []


def _fun_statics(dispatcher: SlowPath, positions: list[Position]) -> list[Any]:
    given = Given(dispatcher.wrapped.fun, dispatcher.wrapped.fun)
    return [given.get(position) for position in positions]


def may_be_specialized(entry: CacheEntry) -> bool:
    """Return whether an entry has no specialised call, and may yet get one."""
    return SPECIALIZING and entry.specialized is None and not entry.unspecializable


def is_worth_specializing(entry: CacheEntry, n_arrays: int) -> bool:
    """Return whether the entry is hot enough to specialise."""
    return (
        may_be_specialized(entry)
        # Under an eager `vmap` or `grad` nothing tells what runs: the generic path waits for it.
        and (not entry.unclassified or is_staging())
        and entry.hits >= entry.hits_needed * max(1, n_arrays / _NODES_PER_HIT)
    )


def specialize(
    dispatcher: SlowPath,
    entry: CacheEntry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: StaticTree,
    leaves: list[Any],
    output: Output,
) -> None:
    """Give an entry its specialised call, if one can be made.

    **Arguments:** as of `specialized_call`.
    """
    if entry.second_chance is not None:
        dispatcher.wrapped.cache.specialize(entry, entry.second_chance)
        return
    try:
        call = specialized_call(dispatcher, entry, args, kwargs, static, leaves, output)
    except TooLong:
        # Once, that can be a collection of garbage, or a busy machine.
        entry.hits, entry.hits_needed = 0, _HITS_PER_ATTEMPT * entry.hits_needed
        entry.attempts_left -= 1
        entry.unspecializable = not entry.attempts_left
        return
    if call is None:
        entry.unspecializable = True
    else:
        dispatcher.wrapped.cache.specialize(entry, call)


def specialized_call(
    dispatcher: SlowPath,
    entry: CacheEntry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: StaticTree,
    leaves: list[Any],
    output: Output,
) -> SpecializedCall | None:
    """Return the specialised call of an entry, if one can be made that does exactly the same.

    **Arguments:**

    - `dispatcher`: the way of the wrapper that was called.
    - `entry`: the entry that served the call.
    - `args`, `kwargs`, `static`, `leaves`: the call's arguments, and the two halves of them.
    - `output`: what JAX returned.

    **Raises:**

    - `TooLong`, if making it takes longer than a call may.
    """
    n_nodes = static.treedef.num_nodes
    if not SPECIALIZING or n_nodes > _MAX_NODES:
        return None
    n_nodes += entry.out_specs[index_of(output)].n_nodes
    budget = Budget(entry.seconds_of_first_call, n_nodes)
    blocks = entry.blocks or entry.unclassified
    try:
        given = dispatcher.wrapped.given(static)
        expected = tree_flatten(entry.rebuild(output, given))
        # To try the generated call takes about as long once more.
        source, make, positions = _generate(
            dispatcher.wrapped.signature,
            dispatcher,
            entry,
            static,
            output,
            blocks,
            budget,
            budget.spent,
        )
        fun_statics = [given.get(position) for position in positions]
        flat = entry.flat(dispatcher.fun_leaves, leaves)
        if _does_the_same(
            make, fun_statics, dispatcher, given, args, kwargs, flat, output, expected
        ):
            return SpecializedCall(source, make, entry, blocks, positions)
    except TooLong:
        raise
    except Exception:
        # Whatever a structure does to defeat code generation, the generic path serves it.
        pass
    return None


def _generate(
    signature: Signature,
    dispatcher: SlowPath,
    entry: CacheEntry,
    static: StaticTree,
    output_at_hand: Output,
    blocks: bool,
    budget: Budget,
    seconds_after: float,
) -> tuple[str, Callable[..., Any], list[Position]]:
    """Return the source of a specialised call, the function that instantiates it, and
    `fun_statics`.
    """
    names = signature.names()
    names.tick = tick = budget.check_writing
    make, call = (
        names.variable("make_call"),
        names.variable(re.sub(r"\W", "", signature.name) or "f"),
    )
    jitted, otherwise = names.variable("jitted"), names.variable("otherwise")
    retrace, explain = names.variable("retrace"), names.variable("explain")
    flattened = names.variable("flattened")
    wait = names.variable("wait" if blocks else "check_recompiled")
    own = names.variable("own_array"), names.variable("own_arrays")
    hits = names.variable("hits")
    fun_checks = [names.variable("fun_is_unmodified") for _ in _checks_of_function(dispatcher)]
    guards_hold = names.variable("guards_hold")
    arrays = names.variable("arrays")
    fun_arrays = [names.variable(f"fun_array_{i}") for i in range(len(dispatcher.fun_leaves))]
    missing = names.constant("absent", absent)

    arguments = structure_of(static.treedef, static.leaves, tick)
    assert isinstance(arguments, Node)
    args_node, kwargs_node = arguments.children
    assert isinstance(args_node, Node)
    assert isinstance(kwargs_node, Node)
    index = index_of(output_at_hand)
    out_spec = entry.out_specs[index]
    seen = None
    if are_repeated(static.treedef, [value for made in entry.out_specs for value in made.own]):
        seen = names.variable("seen")
    # Who waits for the computation can let JAX read NumPy's arrays where they are.
    guard_source = GuardSource(
        signature, names, args_node, kwargs_node, None if blocks else own, seen
    )
    given_source = GivenSource(names, arguments, guard_source)
    structure = output_structure(out_spec, dispatcher.wrapped.given(static), tick)
    rebuild_source = RebuildSource(names, structure, arrays, given_source.expression)
    fun_statics = given_source.fun_statics

    exception = names.constant("Exception", Exception)
    retrace_signal = names.constant("CacheMiss", CacheMiss)
    kind = names.constant(type(output_at_hand).__name__, type(output_at_hand))
    other_index = f" or {index} not in {arrays}" if index else ""
    rebuild = names.constant("rebuild", entry.rebuild)
    returns_given = names.constant("returns_given", entry.returns_given)
    given = names.variable("given")
    forwarded = signature.forwarded()
    n_first = guard_source.n_first
    passed = [*guard_source.arrays[:n_first], *fun_arrays, *guard_source.arrays[n_first:]]

    lines = [
        *wrapped(
            f"def {make}(",
            [
                *(jitted, otherwise, retrace, explain, flattened, wait, *own, hits),
                *(*fun_checks, *fun_statics, *fun_arrays),
            ],
            "):",
        ),
        *indented([*guard_source.helpers, *rebuild_source.helpers]),
        f"    def {call}({signature.header(missing)}):",
    ]
    for check in fun_checks:
        guard_source.guards += [("# The function's own static objects are as they were.",)]
        guard_source.guards += [(f"{check}()",)]
    if entry.returns_mutable:
        is_unmodified = names.constant("is_unmodified", entry.is_unmodified)
        guard_source.guards += [
            ("# What it returns beside arrays is as it was.",),
            (f"{is_unmodified}({seen or ''})",),
        ]
    body: list[str] = [f"{seen} = {{}}"] if seen else []
    if any(not guard[0].startswith("#") for guard in guard_source.guards):
        body += [
            "try:",
            f"    {guards_hold} = (",
            *indented(conditions(guard_source.guards), 2),
            "    )",
        ]
        body += [f"except {exception}:", f"    {guards_hold} = False"]
        body += [f"if not {guards_hold}:", f"    return {otherwise}({forwarded})"]
    body += ["try:", *indented(wrapped(f"{arrays} = {jitted}(", passed, ")"))]
    if blocks:
        body += [f"    {wait}({arrays})"]
    else:
        # Compiled anew, for another device, say.
        body += [
            f"    if {names.constant('entry', entry)}.unclassified:",
            f"        {wait}({arrays})",
        ]
    body += [
        f"except {retrace_signal}:",
        "    pass  # JAX wants to trace: the miss path lets it.",
        f"except {exception}:",
        f"    {explain}({forwarded})",
        "    raise",
        "else:",
        f"    {names.constant('next', next)}({hits})",
        f"    if {names.constant('type', type)}({arrays}) is not {kind}{other_index}:",
        "        # Of another trace.",
        f"        {given} = {flattened}({forwarded}) if {returns_given}({arrays}) else None",
        f"        return {rebuild}({arrays}, {given})",
        *([f"    {arrays} = {arrays}[{index}]"] if index else []),
        *indented(rebuild_source.lines),
        f"    return {rebuild_source.result}",
        f"return {retrace}({forwarded})",
    ]
    lines += [
        "        try:",
        *indented(body, 3),
        f"        except {names.constant('BaseException', BaseException)}:",
        f"            {names.constant('trim', trim)}()",
        "            raise",
    ]
    lines.append(f"    return {call}")
    source = "\n".join(lines) + "\n"
    budget.check_compiling(source, seconds_after)
    namespace = names.namespace | {ENTRY_VARIABLE: entry}
    made = define(make, signature.name, source, namespace)
    return source, made, list(fun_statics.values())


def _does_the_same(
    make: Callable[..., Any],
    fun_statics: list[Any],
    dispatcher: SlowPath,
    given: Given,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flat: list[Any],
    output: Output,
    expected: tuple[list[Any], PyTreeDef],
) -> bool:
    """Return whether a generated call does the same as JAX's registry, on the values at hand."""
    passed: list[Any] = []

    def jitted(*arrays: Any) -> Output:
        passed.extend(arrays)
        return output.copy()

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError

    def same(array: Any) -> Any:
        return array

    checks = _checks_of_function(dispatcher)

    def ignore(_output: Output) -> None:
        pass

    own = same, list
    trial = make(
        *(jitted, fail, fail, fail, fail, ignore, *own, hit_counter()),
        *(*checks, *fun_statics, *dispatcher.fun_leaves),
    )
    leaves, treedef = tree_flatten(trial(*args, **kwargs))
    expected_leaves, expected_treedef = expected
    return (
        identical(passed, flat)
        and identical(leaves, expected_leaves)
        and treedef_key(treedef) == treedef_key(expected_treedef)
        and have_same_given(treedef, expected_treedef, given)
    )


def identical(ours: list[Any], theirs: list[Any]) -> bool:
    """Return whether two lists hold the very same objects, methods of the same ones included."""
    return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))


def _is_same(ours: Any, theirs: Any) -> bool:
    # A method is made anew each time that it is read; its `==` compares objects by identity.
    return ours is theirs or (type(ours) is types.MethodType and ours == theirs)
