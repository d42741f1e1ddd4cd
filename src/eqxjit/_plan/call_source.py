"""Writes the plan of a specialised call as Python: guards, the jitted call, and the output."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from .._code.source import define, indented, wrapped
from .._code.tracebacks import trim
from .._trees.given import Given, Position
from .._trees.out_spec import Output
from .budget import Budget
from .given_source import GivenSource
from .guard_source import GuardSource, conditions
from .names import Constants
from .native import NativeCall
from .output_source import OutputSource
from .plan import CallPlan
from .signature import absent


class Callee(Protocol):
    """The cache entry that a specialised call serves."""

    unclassified: bool

    def is_unmodified(self, seen: Any = None) -> bool:
        """Return whether the static objects that it returns are unmodified since its trace."""
        ...

    def returns_given(self, output: Output) -> bool:
        """Return whether `rebuild` needs what came in with the call."""
        ...

    def rebuild(self, output: Output, given: Given | None) -> Any:
        """Return the user's output."""
        ...


class Links(NamedTuple):
    """The links of a specialised call for one wrapper, in the order of `make`'s parameters."""

    jitted: Callable[..., Output]
    otherwise: Callable[..., Any]
    retrace: Callable[..., Any]
    explain: Callable[..., Any]
    flattened: Callable[..., Any]
    wait: Callable[[Output], None]
    own_array: Callable[[Any], Any]
    own_arrays: Callable[[Any], Any]
    hits: Iterator[None]


class CallSource(NamedTuple):
    """A specialised call, not yet linked.

    - `source`: its source.
    - `make`: returns the call for `(*links, *checks, *fun_statics, *fun_arrays)`.
    - `fun_statics`: where those static objects of the function are that it returns.
    """

    source: str
    make: Callable[..., Any]
    fun_statics: list[Position]


class _Parts(NamedTuple):
    """The source of what differs between the back ends.

    - `helpers`: functions and constants of all calls.
    - `guards`: see `GuardSource`.
    - `passed`: the arrays, as arguments of the jitted function.
    - `lines`, `result`: statements, and the expression that is the output.
    - `fun_statics`: parameters that hold static objects of the function, with their positions.
    """

    helpers: list[str]
    guards: list[tuple[str, ...]]
    passed: list[str]
    lines: list[str]
    result: str
    fun_statics: dict[str, Position]


def _python_parts(
    plan: CallPlan,
    names: Constants,
    own: tuple[str, str] | None,
    seen: str | None,
    fun_arrays: list[str],
    arrays: str,
) -> _Parts:
    """Return the guards, and what puts the output together, as Python."""
    guards = GuardSource(plan, names, own, seen)
    given = GivenSource(plan, names, guards)
    output = OutputSource(names, plan.output, arrays, given.expression, is_bare=plan.is_bare)
    passed = [*guards.arrays[: guards.n_first], *fun_arrays, *guards.arrays[guards.n_first :]]
    helpers = [*guards.helpers, *output.helpers]
    return _Parts(helpers, guards.guards, passed, output.lines, output.result, given.fun_statics)


def _native_parts(
    native: NativeCall,
    names: Constants,
    own: tuple[str, str] | None,
    fun_arrays: list[str],
    arrays: str,
) -> _Parts:
    """Return a call of the native back end for each."""
    match, matched = names.variable("match"), names.variable("matched")
    bind = names.constant("bind_match", native.match)
    rebuild = names.constant("rebuild_output", native.rebuild)
    flat, kept = (f"{matched}[0]", f", {matched}[1]") if native.keeps else (matched, "")
    comma = "," if len(fun_arrays) == 1 else ""
    one, many = own or (None, None)
    return _Parts(
        [f"{match} = {bind}({one}, {many}, ({', '.join(fun_arrays)}{comma}))"],
        [(f"({matched} := {match}({', '.join(native.arguments)})) is not None",)],
        [f"*{flat}"],
        [],
        f"{rebuild}({arrays}{kept})",
        {},
    )


def generate(
    plan: CallPlan,
    native: NativeCall | None,
    entry: Callee,
    entry_variable: str,
    miss: type[Exception],
    budget: Budget,
) -> CallSource:
    """Return a plan as Python source, compiled.

    **Arguments:**

    - `plan`: the plan.
    - `native`: the same for the native back end; None to write it all as Python.
    - `entry`: what the call is for; `entry_variable` is the global that holds it.
    - `miss`: by which JAX says that it wants to trace.
    - `budget`: how long this may take.
    """
    signature, index = plan.signature, plan.out_index
    names = signature.names()
    names.tick = budget.check
    make, call = (
        names.variable("make_call"),
        names.variable(re.sub(r"\W", "", signature.name) or "f"),
    )
    jitted, otherwise = names.variable("jitted"), names.variable("otherwise")
    retrace, explain = names.variable("retrace"), names.variable("explain")
    flattened = names.variable("flattened")
    wait = names.variable("wait" if plan.blocks else "check_recompiled")
    own = names.variable("own_array"), names.variable("own_arrays")
    hits = names.variable("hits")
    fun_checks = [names.variable("fun_is_unmodified") for _ in range(plan.n_fun_checks)]
    guards_hold = names.variable("guards_hold")
    arrays = names.variable("array" if plan.is_bare else "arrays")
    fun_arrays = [names.variable(f"fun_array_{i}") for i in range(plan.layout.n_fun)]
    missing = names.constant("absent", absent)

    seen = names.variable("seen") if plan.repeats else None
    # Who waits for the computation can let JAX read NumPy's arrays where they are.
    copies = None if plan.blocks else own
    if native is not None:
        parts = _native_parts(native, names, copies, fun_arrays, arrays)
    else:
        parts = _python_parts(plan, names, copies, seen, fun_arrays, arrays)
    guards = parts.guards

    exception = names.named(Exception)
    retrace_signal = names.named(miss)
    is_dict = f"{names.named(type)}({arrays}) is {names.named(dict)}"
    is_of_other = f"not ({is_dict} and {index} in {arrays})" if index else is_dict
    rebuild = names.constant("rebuild", entry.rebuild)
    returns_given = names.constant("returns_given", entry.returns_given)
    given = names.variable("given")
    forwarded = signature.forwarded()

    lines = [
        *wrapped(
            f"def {make}(",
            [
                *(jitted, otherwise, retrace, explain, flattened, wait, *own, hits),
                *(*fun_checks, *parts.fun_statics, *fun_arrays),
            ],
            "):",
        ),
        *indented(parts.helpers),
        f"    def {call}({signature.header(missing)}):",
    ]
    for check in fun_checks:
        guards += [("# The function's own static objects are as they were.",), (f"{check}()",)]
    if plan.checks_output:
        is_unmodified = names.constant("is_unmodified", entry.is_unmodified)
        guards += [
            ("# What it returns beside arrays is as it was.",),
            (f"{is_unmodified}({seen or ''})",),
        ]
    body: list[str] = [f"{seen} = {{}}"] if seen else []
    if any(not guard[0].startswith("#") for guard in guards):
        body += [
            "try:",
            f"    {guards_hold} = (",
            *indented(conditions(guards), 2),
            "    )",
            f"except {exception}:",
            f"    {guards_hold} = False",
            f"if not {guards_hold}:",
            f"    return {otherwise}({forwarded})",
        ]
    body += ["try:", *indented(wrapped(f"{arrays} = {jitted}(", parts.passed, ")"))]
    if plan.blocks:
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
        f"    {names.named(next)}({hits})",
        f"    if {is_of_other}:",
        "        # Of another trace.",
        f"        {given} = {flattened}({forwarded}) if {returns_given}({arrays}) else None",
        f"        return {rebuild}({arrays}, {given})",
        *([f"    {arrays} = {arrays}[{index}]"] if index else []),
        *indented(parts.lines),
        f"    return {parts.result}",
        f"return {retrace}({forwarded})",
    ]
    lines += [
        "        try:",
        *indented(body, 3),
        f"        except {names.named(BaseException)}:",
        f"            {names.named(trim)}()",
        "            raise",
        f"    return {call}",
    ]
    source = "\n".join(lines) + "\n"
    budget.check_compiling(source)
    namespace = names.namespace | {entry_variable: entry}
    made = define(make, signature.name, source, namespace)
    return CallSource(source, made, list(parts.fun_statics.values()))
