"""Logs, once, that a static value is an iterator: tracing consumes it, and later calls don't."""

import collections
import functools
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from .._code.place import Place
from .._lock import Lock
from .._spec.static import compared_fields
from .description import StaticPart, is_iterator
from .trace import Trace

_logger = logging.getLogger("eqxjit")

# How many static values are looked at, containers' elements included.
_MAX_VALUES = 100_000

# How many iterators are remembered as logged, by their paths.
_MAX_LOGGED = 1024

_logged: collections.OrderedDict[Hashable, None] = collections.OrderedDict()
_logged_lock = Lock()


def log_iterators(trace: Trace, place: Place, call: Any) -> None:
    """Log which static values of a complete trace are iterators, each once for a function."""
    in_arguments = _holds_iterator(call.statics)
    if not in_arguments and not _holds_iterator(call.function.statics):
        return
    parts = zip(trace.description.paths, trace.description.parts, strict=True)
    iterators = [
        (f"`{path}`", part.kind)
        for path, part in parts
        if isinstance(part, StaticPart) and part.is_iterator
    ]
    # One in the function, in a partial, or in what is too large to be described, has no path.
    elsewhere = "an argument" if in_arguments else "the function itself"
    for path, kind in iterators or [(elsewhere, "")]:
        with _logged_lock:
            if (place, path, kind) in _logged:
                continue
            _logged[place, path, kind] = None
            if len(_logged) > _MAX_LOGGED:
                _logged.popitem(last=False)
        _logger.warning(
            "`%s`, called at %s: %s. What is taken from it while the function is traced is "
            "compiled in: later calls with it take nothing more, and use the same values again.%s",
            trace.function,
            trace.call_site,
            f"{path} is an iterator ({kind}), and static" if kind else f"{path} holds an iterator",
            " Pass what it yields instead, as arrays." if place.is_users else "",
        )


def _holds_iterator(statics: Iterable[Any]) -> bool:
    # One depth after the other: of most values the classes are all that is looked at.
    pending = [*statics]
    n_left = _MAX_VALUES
    while pending and n_left > 0:
        n_left -= len(pending)
        kinds = {*map(type, pending)}
        if any(map(is_iterator, kinds)):
            return True
        readers = {kind: read for kind in kinds if (read := _reader(kind)) is not None}
        if not readers:
            break
        held = [readers[type(value)](value) for value in pending if type(value) in readers]
        pending = [*itertools.islice(itertools.chain.from_iterable(held), max(n_left, 0))]
    return False


def _reader(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    """Return how to read what a static container holds; None for anything else."""
    if kind in (tuple, list, set, frozenset):
        return list
    if kind is dict:
        return lambda value: [*dict.values(value)]
    if kind is functools.partial:
        return lambda value: (*value.args, *value.keywords.values())
    fields = compared_fields(kind)
    if fields is None:
        return None
    return lambda value: [getattr(value, name, None) for name in fields]
