"""`bench memory`: what a process keeps after many warm calls, static values, and models."""

import argparse
import gc
import weakref
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..harness.competitors import FILTER_JITS, FilterJit
from ..models.networks import call

TENTHS = 10


class Kept:
    """How many of the arrays that were passed in are still alive."""

    def __init__(self) -> None:
        self._passed: list[weakref.ref[jax.Array]] = []

    def watch(self, array: jax.Array) -> jax.Array:
        """The array; from now on it counts while it is alive."""
        self._passed.append(weakref.ref(array))
        return array

    def count(self) -> int:
        """How many are."""
        return sum(ref() is not None for ref in self._passed)


def warm_calls(filter_jit: FilterJit, times: int, _kept: Kept) -> Iterator[None]:
    """A model in and out, a static number: one structure."""
    f = filter_jit(lambda model, x, n: (model, model(x) * n))
    model, x = eqx.nn.MLP(4, 4, 32, depth=2, key=jr.key(0)), jnp.ones(4)
    for _ in range(times):
        model, x = f(model, x, 1)
        yield


def static_values(filter_jit: FilterJit, times: int, kept: Kept) -> Iterator[None]:
    """Another static number in each call: another entry."""
    f = filter_jit(lambda x, n: x * n)
    for n in range(times):
        f(kept.watch(jnp.full(1000, n)), n)
        yield


def models(filter_jit: FilterJit, times: int, kept: Kept) -> Iterator[None]:
    """Another model in each call, with a lambda of its own: another entry, which dies with it."""
    f = filter_jit(call)
    for i in range(times):
        model = eqx.nn.MLP(4, 4, 32, depth=2, activation=lambda x: jnp.tanh(x), key=jr.key(i))
        kept.watch(model.layers[0].weight)
        f(model, jnp.ones(4))
        yield


LOADS: dict[str, tuple[Callable[[FilterJit, int, Kept], Iterator[None]], int]] = {
    "warm calls": (warm_calls, 1_000_000),
    "static values": (static_values, 10_000),
    "models": (models, 1_000),
}


def main(argv: list[str]) -> int:
    """Run the loads; print the resident memory after each tenth of each."""
    parser = argparse.ArgumentParser(prog="python -m bench memory", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--under", choices=FILTER_JITS, default="eqxjit", help="which filter_jit")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of calls")
    args = parser.parse_args(argv)
    console = Console()

    table = Table(title=f"MiB resident, under {args.under}")
    for column in ("", "calls", "before", "tenths of the calls", "arrays kept"):
        table.add_column(column, justify="right")
    with Progress(console=console) as progress:
        for name in args.only:
            load, times = LOADS[name]
            times, kept = max(TENTHS, int(times * args.scale)), Kept()
            task = progress.add_task(name, total=times)
            sizes = [_resident()]
            for done, _ in enumerate(load(FILTER_JITS[args.under], times, kept), start=1):
                if done % (times // TENTHS) == 0:
                    progress.update(task, completed=done)
                    sizes.append(_resident())
            before, *after = [f"{size:,.0f}" for size in sizes]
            table.add_row(name, f"{times:,}", before, " ".join(after), str(kept.count()))
    console.print(table)
    return 0


def _resident() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20
