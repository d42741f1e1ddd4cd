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
from .._plan.guards import WayIn, conditions
from .._plan.rebuild import WayOut
from .._plan.signature import Binding, absent
from .._trees.given import Given, Position, have_same_given
from .._trees.key_cache import treedef_key
from .._trees.mutation import are_repeated
from .._trees.partition import StaticHalf
from .._trees.structure import Node, structure_of
from .counter import hit_counter
from .entry import ENTRY_VARIABLE, Entry, Output, index_of
from .function import WrappedFunction
from .traced import Retrace

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

    def check_recompiled(self, entry: Entry, output: Output) -> None:
        """Wait for a program that a warm call compiled."""
        ...

    def wait(self, entry: Entry, output: Output) -> None:
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
        entry: Entry,
        blocks: bool,
        fun_statics: list[Position],
    ):
        """`fun_statics` are where those static objects of the function are that it returns."""
        self.source = source
        self.blocks = blocks
        self.checks_output = entry.returns_changeable
        self._make = make
        self._fun_statics = fun_statics
        self.entry = entry

    def instantiate(
        self,
        site: SlowPath,
        otherwise: Callable[..., Any],
        jitted: Callable[..., Output] | None = None,
    ) -> Callable[..., Any]:
        """Return the function for one wrapper.

        **Arguments:**

        - `site`: the way of that wrapper.
        - `otherwise`: what to call if the guards don't hold.
        - `jitted`: what to call in the place of the entry's jitted function.
        """
        binding = site.wrapped.binding
        run = jitted or self.entry.jitted
        # What is compiled ahead of time isn't in the cache.
        hits = hit_counter() if jitted else site.wrapped.program.traces.hits
        if any(issubclass(type(leaf), np.ndarray) for leaf in site.fun_leaves):
            run = _minding_numpy(self.entry, run)
        call = self._make(
            run,
            otherwise,
            binding.receiver(site.retrace),
            binding.receiver(site.explain),
            binding.receiver(site.flattened),
            functools.partial(site.wait if self.blocks else site.check_recompiled, self.entry),
            self.entry.numpy_inputs.own,
            self.entry.numpy_inputs.own_arrays,
            hits,
            *_checks_of_function(site),
            *_fun_statics(site, self._fun_statics),
            *site.fun_leaves,
        )
        call.__name__, call.__qualname__ = binding.name, binding.qualname
        return call


def _minding_numpy(entry: Entry, jitted: Callable[..., Output]) -> Callable[..., Output]:
    """Return what to call for a function that itself holds NumPy arrays."""
    return lambda *arrays: entry.execute(jitted, arrays)


def _checks_of_function(site: SlowPath) -> list[Callable[[], bool]]:
    """Return the checks of the static objects that the wrapped function holds."""
    return [site.wrapped.is_intact] if site.wrapped.changeable else []


def _fun_statics(site: SlowPath, positions: list[Position]) -> list[Any]:
    given = Given(site.wrapped.fun, site.wrapped.fun)
    return [given.get(position) for position in positions]


def may_be_specialized(entry: Entry) -> bool:
    """Return whether an entry has no specialised call, and may yet get one."""
    return SPECIALIZING and entry.specialized is None and not entry.unspecializable


def is_worth_specializing(entry: Entry, n_arrays: int) -> bool:
    """Return whether the entry is hot enough to specialise."""
    return (
        may_be_specialized(entry)
        # Under an eager `vmap` or `grad` nothing tells what runs: the generic path waits for it.
        and (not entry.unclassified or is_staging())
        and entry.hits >= entry.hits_needed * max(1, n_arrays / _NODES_PER_HIT)
    )


def specialize(
    site: SlowPath,
    entry: Entry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: StaticHalf,
    leaves: list[Any],
    output: Output,
) -> None:
    """Give an entry its specialised call, if one can be made.

    **Arguments:** as of `specialized_call`.
    """
    if entry.resting is not None:
        site.wrapped.program.specialize(entry, entry.resting)
        return
    try:
        call = specialized_call(site, entry, args, kwargs, static, leaves, output)
    except TooLong:
        # Once, that can be a collection of garbage, or a busy machine.
        entry.hits, entry.hits_needed = 0, _HITS_PER_ATTEMPT * entry.hits_needed
        entry.attempts_left -= 1
        entry.unspecializable = not entry.attempts_left
        return
    if call is None:
        entry.unspecializable = True
    else:
        site.wrapped.program.specialize(entry, call)


def specialized_call(
    site: SlowPath,
    entry: Entry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: StaticHalf,
    leaves: list[Any],
    output: Output,
) -> SpecializedCall | None:
    """Return the specialised call of an entry, if one can be made that does exactly the same.

    **Arguments:**

    - `site`: the way of the wrapper that was called.
    - `entry`: the entry that served the call.
    - `args`, `kwargs`, `static`, `leaves`: the call's arguments, and the two halves of them.
    - `output`: what JAX returned.

    **Raises:**

    - `TooLong`, if making it takes longer than a call may.
    """
    n_nodes = static.treedef.num_nodes
    if not SPECIALIZING or n_nodes > _MAX_NODES:
        return None
    n_nodes += entry.descriptions[index_of(output)].n_nodes
    budget = Budget(entry.seconds_of_first_call, n_nodes)
    blocks = entry.blocks or entry.unclassified
    try:
        given = site.wrapped.given(static)
        expected = tree_flatten(entry.rebuild(output, given))
        # To try the generated call takes about as long once more.
        source, make, positions = _generate(
            site.wrapped.binding, site, entry, static, output, blocks, budget, budget.spent
        )
        fun_statics = [given.get(position) for position in positions]
        flat = entry.flat(site.fun_leaves, leaves)
        if _does_the_same(make, fun_statics, site, given, args, kwargs, flat, output, expected):
            return SpecializedCall(source, make, entry, blocks, positions)
    except TooLong:
        raise
    except Exception:
        # Whatever a structure does to defeat code generation, the generic path serves it.
        pass
    return None


def _generate(
    binding: Binding,
    site: SlowPath,
    entry: Entry,
    static: StaticHalf,
    output_at_hand: Output,
    blocks: bool,
    budget: Budget,
    seconds_after: float,
) -> tuple[str, Callable[..., Any], list[Position]]:
    """Return the source of a specialised call, the function that instantiates it, and
    `fun_statics`.
    """
    names = binding.names()
    names.tick = tick = budget.check_writing
    make, call = names.variable("make_call"), names.variable(re.sub(r"\W", "", binding.name) or "f")
    jitted, otherwise = names.variable("jitted"), names.variable("otherwise")
    retrace, explain = names.variable("retrace"), names.variable("explain")
    flattened = names.variable("flattened")
    wait = names.variable("wait" if blocks else "check_recompiled")
    own = names.variable("own_array"), names.variable("own_arrays")
    hits = names.variable("hits")
    fun_checks = [names.variable("fun_is_intact") for _ in _checks_of_function(site)]
    guards_hold = names.variable("guards_hold")
    arrays = names.variable("arrays")
    fun_arrays = [names.variable(f"fun_array_{i}") for i in range(len(site.fun_leaves))]
    missing = names.constant("absent", absent)

    arguments = structure_of(static.treedef, static.leaves, tick)
    assert isinstance(arguments, Node)
    args_node, kwargs_node = arguments.children
    assert isinstance(args_node, Node)
    assert isinstance(kwargs_node, Node)
    index = index_of(output_at_hand)
    description = entry.descriptions[index]
    seen = None
    if are_repeated(static.treedef, [value for made in entry.descriptions for value in made.own]):
        seen = names.variable("seen")
    # Who waits for the computation can let JAX read NumPy's arrays where they are.
    way_in = WayIn(binding, names, args_node, kwargs_node, None if blocks else own, seen)
    given_source = GivenSource(names, arguments, way_in)
    structure = output_structure(description, site.wrapped.given(static), tick)
    way_out = WayOut(names, structure, arrays, given_source.expression)
    fun_statics = given_source.fun_statics

    exception = names.constant("Exception", Exception)
    retrace_signal = names.constant("Retrace", Retrace)
    kind = names.constant(type(output_at_hand).__name__, type(output_at_hand))
    other_index = f" or {index} not in {arrays}" if index else ""
    rebuild = names.constant("rebuild", entry.rebuild)
    returns_given = names.constant("returns_given", entry.returns_given)
    given = names.variable("given")
    forwarded = binding.forwarded()
    n_first = way_in.n_first
    passed = [*way_in.arrays[:n_first], *fun_arrays, *way_in.arrays[n_first:]]

    lines = [
        *wrapped(
            f"def {make}(",
            [
                *(jitted, otherwise, retrace, explain, flattened, wait, *own, hits),
                *(*fun_checks, *fun_statics, *fun_arrays),
            ],
            "):",
        ),
        *indented([*way_in.helpers, *way_out.helpers]),
        f"    def {call}({binding.header(missing)}):",
    ]
    for check in fun_checks:
        way_in.guards += [("# The function's own static objects are as they were.",)]
        way_in.guards += [(f"{check}()",)]
    if entry.returns_changeable:
        is_intact = names.constant("is_intact", entry.is_intact)
        way_in.guards += [
            ("# What it returns beside arrays is as it was.",),
            (f"{is_intact}({seen or ''})",),
        ]
    body: list[str] = [f"{seen} = {{}}"] if seen else []
    if any(not guard[0].startswith("#") for guard in way_in.guards):
        body += ["try:", f"    {guards_hold} = (", *indented(conditions(way_in.guards), 2), "    )"]
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
        *indented(way_out.lines),
        f"    return {way_out.result}",
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
    made = define(make, binding.name, source, namespace)
    return source, made, list(fun_statics.values())


def _does_the_same(
    make: Callable[..., Any],
    fun_statics: list[Any],
    site: SlowPath,
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

    checks = _checks_of_function(site)

    def ignore(_output: Output) -> None:
        pass

    own = same, list
    trial = make(
        *(jitted, fail, fail, fail, fail, ignore, *own, hit_counter()),
        *(*checks, *fun_statics, *site.fun_leaves),
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
