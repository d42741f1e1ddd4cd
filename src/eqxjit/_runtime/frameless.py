"""Makes specialised calls in the native back end alone, without a Python frame of their own."""

from typing import Any

from .._code.tracebacks import trimming
from .._compat import is_found_by_frame
from .._plan.call_source import Links
from .._plan.native import NativeCall
from .._plan.signature import KEYWORD_ONLY, POSITIONAL_ONLY, VAR_KEYWORD, VAR_POSITIONAL, Signature
from .._trees.out_spec import Output
from .entry import CacheEntry
from .miss import MissPath
from .stack import CacheMiss

# As of `_native.c`.
_MOST_PARAMETERS = 16


def can_be_frameless(signature: Signature, jitted: Any) -> bool:
    """Return whether the native back end can bind a call, and JAX's events are found without it."""
    kinds = {parameter.kind for parameter in signature.parameters}
    return (
        is_found_by_frame(jitted)
        and kinds.isdisjoint((VAR_POSITIONAL, VAR_KEYWORD))
        and len(signature.parameters) <= _MOST_PARAMETERS
    )


def binds_in_order(native: NativeCall, signature: Signature) -> bool:
    """Return whether what can be passed by position comes first in a plan, and in this order."""
    # A plan has those last that are passed by name, or left out.
    by_position = [p.name for p in signature.parameters if p.kind != KEYWORD_ONLY]
    return native.arguments[: len(by_position)] == by_position


def frameless(native: NativeCall, links: Links, entry: CacheEntry, owner: MissPath) -> Any:
    """Return a call that does what the generated function does; `owner` has the rest."""
    signature = owner.wrapped.signature

    def finish(output: Output, /, *args: Any, **kwargs: Any) -> Any:
        """Return the output where another trace ran, or a program that was just compiled."""
        __tracebackhide__ = True
        with trimming:
            if entry.unclassified:
                links.wait(output)
            next(links.hits)
            given = links.flattened(*args, **kwargs) if entry.returns_given(output) else None
            return entry.rebuild(output, given)

    # The call is known by its attributes.
    finish.__name__, finish.__qualname__ = signature.name, signature.qualname
    entry.has_frameless_calls = True
    by_name = {parameter.name: parameter for parameter in signature.parameters}
    # In the plan's order: keyword arguments are sorted there.
    parameters = [by_name[name] for name in native.arguments]
    return native.call(
        native.match(links.own_array, links.own_arrays, owner.fun_leaves),
        native.rebuild,
        links.jitted,
        tuple([None if p.kind == POSITIONAL_ONLY else p.name for p in parameters]),
        tuple([None if p.default is p.empty else p.default for p in parameters]),
        sum([p.kind != KEYWORD_ONLY for p in parameters]),
        links.otherwise,
        entry,
        CacheEntry.unclassified,
        CacheMiss,
        links.retrace,
        links.explain,
        finish,
        links.hits,
        owner,
    )
