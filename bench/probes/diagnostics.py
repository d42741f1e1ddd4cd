"""Measures what diagnostics cost: the same work with and without them, in one process.

Prints JSON: for each row, the seconds of CPU time of the best turn with diagnostics ("on") and
without ("off").
"""

import contextlib
import io
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp

import eqxjit
from eqxjit._diagnostics import waiting
from eqxjit._diagnostics.history import History

from ..models.networks import mean_squared_error, small_mlp

Context = Callable[[], contextlib.AbstractContextManager[Any]]
_lines = itertools.count(1)


def _new(fun: Any) -> Any:
    """Return a copy of a function that seems to be defined at another line.

    At one line, eqxjit would compare each copy with the one before, as it does for a function that
    is wrapped in a loop.
    """
    return type(fun)(fun.__code__.replace(co_firstlineno=next(_lines)), fun.__globals__)


def _predict(model: Any, x: Any) -> Any:
    return jax.vmap(model)(x)


def _gradient(model: Any, x: Any) -> Any:
    return eqx.filter_grad(mean_squared_error)(model, x, x)


def _increment(x: Any) -> Any:
    return x + 1


def _calls(*functions: Any) -> Iterator[Callable[[], Any]]:
    """Yield endless pieces of work, each of which wraps these functions anew and calls them."""
    model, x = small_mlp(), jnp.ones((8, 4))
    while True:
        jitted = [eqxjit.filter_jit(_new(fun)) for fun in functions]
        yield lambda jitted=jitted: [f(model, x) for f in jitted]


def _shapes() -> Iterator[Callable[[], Any]]:
    """Yield endless pieces of work, each of which calls one function with a new shape."""
    increment = eqxjit.filter_jit(_increment)
    for size in itertools.count(2):
        x = jax.block_until_ready(jnp.ones(size))
        yield lambda x=x: increment(x)


def _stubbed() -> Context:
    """Return a context in which no trace is described, compared, timed, watched or logged."""
    example = eqxjit.filter_jit(_increment)
    example(jnp.ones(()))
    [trace] = example.traces()  # type: ignore[attr-defined]
    nothing = lambda *_: None  # noqa: E731

    @contextlib.contextmanager
    def tracing(*_: Any) -> Iterator[Any]:
        # The core only needs a record that isn't None.
        yield trace._record

    @contextlib.contextmanager
    def stubbed() -> Iterator[None]:
        with mock.patch.multiple(History, tracing=tracing, finish=nothing):
            with mock.patch.multiple(waiting, begin=nothing, end=nothing):
                yield

    return stubbed


def _reported(work: Iterator[Callable[[], Any]]) -> Iterator[Callable[[], Any]]:
    """Yield the same pieces of work, each under a `compile_report` whose table isn't shown."""

    def reported(run: Callable[[], Any]) -> None:
        with contextlib.redirect_stdout(io.StringIO()), eqxjit.compile_report():
            run()

    return (partial(reported, run) for run in work)


def _in_turn(turns: int, **ways: tuple[Iterator[Callable[[], Any]], Context]) -> dict[str, float]:
    """Return the CPU seconds of the best turn of each way, which is work and its context."""
    best = dict.fromkeys(ways, float("inf"))
    # The first turn isn't counted, because it fills caches that all ways share.
    for turn in range(turns + 1):
        for name, (work, context) in ways.items():
            run = next(work)
            with context():
                start = time.process_time()
                run()
                seconds = time.process_time() - start
            best[name] = min(best[name], seconds) if turn else best[name]
    return best


def main(turns: int) -> dict[str, dict[str, float]]:
    """Measure each row in this many turns, and new shapes in three times as many."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    logging.disable()
    plain, stubbed = contextlib.nullcontext, _stubbed()
    call, shapes, program = _calls(_predict), _shapes(), _calls(_predict, _gradient)
    return {
        "a first call": _in_turn(turns, on=(call, plain), off=(call, stubbed)),
        "a new shape": _in_turn(3 * turns, on=(shapes, plain), off=(shapes, stubbed)),
        "two first calls, compile_report()": _in_turn(
            turns, on=(_reported(program), plain), off=(program, plain)
        ),
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
