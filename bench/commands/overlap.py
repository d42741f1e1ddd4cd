"""`bench overlap`: how much host work hides behind asynchronous computation.

First, steps of training (packed, donated) whose loss is read at once, or after two more steps,
beside the host's work, which takes about as long as a step.

Then, a loop in which the device computes while the host prepares what comes next, both taking about
as long: jax.jit returns at once, so that a step takes as long as the longer of the two;
`equinox.filter_jit` waits, so that it takes as long as both. Asynchronous dispatch stays on.
"""

import argparse
import collections
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

TARGET = 1.02  # of jax.jit
SIZE = 800
PRODUCTS = 6

# A computation on every core would leave none to the host's work; set before JAX is imported.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
)

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax.random as jr  # noqa: E402

import eqxjit  # noqa: E402

from ..harness.competitors import passed  # noqa: E402
from ..harness.measure import Case, Race  # noqa: E402
from ..harness.printing import met_or_missed  # noqa: E402
from ..models.training_steps import packed  # noqa: E402
from ..models.training_tasks import TASKS  # noqa: E402

TRAINED = ("MLP + adam", "several MB + adam")
READ_AFTER = (0, 2)  # more steps
STEPS = 20  # steps of a loop


class Chain(eqx.Module):
    """A matrix, multiplied with what is given, several times."""

    matrix: jax.Array
    times: int = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """From and to a square matrix."""
        for _ in range(self.times):
            x = jnp.tanh(self.matrix @ x)
        return x


def main(argv: list[str]) -> int:
    """Match the host's work to the computation, time the loop under all, report."""
    parser = argparse.ArgumentParser(prog="python -m bench overlap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="of a loop, in each round")
    args = parser.parse_args(argv)
    console = Console()
    losses = Table(title="µs a step of training, and the host's work")
    for column in ("", "step alone", "loss read at once", "two steps later", "of at once"):
        losses.add_column(column, justify="right")
    for task in TRAINED:
        losses.add_row(*_losses(task, args.rounds))
    console.print(losses)

    model, x = Chain(jr.normal(jr.key(0), (SIZE, SIZE)) / SIZE**0.5, PRODUCTS), jnp.eye(SIZE)
    dynamic, static = eqx.partition(model, eqx.is_array)
    tree_jit = jax.jit(lambda dynamic, x: eqx.combine(dynamic, static)(x))
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "jax.jit": partial(tree_jit, dynamic),
        "equinox.filter_jit": partial(eqx.filter_jit(Chain.__call__), model),
        "eqxjit.filter_jit": partial(eqxjit.filter_jit(Chain.__call__), model),
    }
    compute = min(_seconds(lambda: functions["jax.jit"](x).block_until_ready()) for _ in range(5))
    spin = _host_work_of(compute)

    def loop(f: Callable[[jax.Array], jax.Array]) -> None:
        y = x
        for _ in range(args.steps):
            y = f(y)
            spin()
            y.block_until_ready()

    cases = {
        name: Case("loop(f)", lambda f=f: {"loop": loop, "f": f}, ())
        for name, f in functions.items()
    }
    race = Race(cases)
    for _ in track(range(args.rounds), "looping", console=console):
        race.round()

    table = Table(title="ms a step")
    for column in ("", "best round", "median round", "of jax.jit"):
        table.add_column(column, justify="right")
    best = {name: min(seconds) / args.steps * 1e3 for name, seconds in race.figures.items()}
    for name, seconds in race.figures.items():
        middle = median(seconds) / args.steps * 1e3
        ratio = best[name] / best["jax.jit"]
        table.add_row(name, f"{best[name]:.2f}", f"{middle:.2f}", f"{ratio:.3f}")
    console.print(f"computing takes {compute * 1e3:.2f} ms, the host's work about as long")
    console.print(table)
    ours = best["eqxjit.filter_jit"] / best["jax.jit"]
    verdict = met_or_missed(ours <= TARGET)
    console.print(f"{verdict}: {ours:.3f} of jax.jit, at most {TARGET}")
    return 0


def _losses(task: str, rounds: int) -> tuple[str, ...]:
    """Time a training step without the host's work, and with: its row of the table."""
    names = packed(TASKS[task]()).names()
    f, batch, state = names["f"], names["batch"], names["carry"]

    def train(carry: Any, after: int, host_work: Callable[[], object]) -> Any:
        losses: collections.deque[jax.Array] = collections.deque()
        for _ in range(STEPS):
            carry, loss = f(batch, *carry)
            losses.append(loss)
            if len(losses) > after:
                float(losses.popleft())
            host_work()
        return jax.block_until_ready(carry)

    def fresh() -> dict[str, Any]:
        return {"train": train, "carry": passed(state, consumed=True), "host_work": host_work}

    host_work: Callable[[], object] = int
    step = min(_seconds(partial(train, fresh()["carry"], 0, int)) for _ in range(5)) / STEPS
    host_work = _host_work_of(step)
    race = Race(
        {
            str(after): Case(f"carry = train(carry, {after}, host_work)", fresh, ("carry",))
            for after in READ_AFTER
        }
    )
    for _ in range(rounds):
        race.round()
    at_once, later = (us / STEPS for us in race.microseconds().values())
    figures = (step * 1e6, at_once, later)
    return task, *(f"{us:.0f}" for us in figures), f"{later / at_once:.2f}"


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _host_work_of(seconds: float) -> Callable[[], object]:
    """Pure Python that takes about so long: a fixed amount of work, not a wait for the clock."""
    count = 100_000
    rate = min(_seconds(lambda: sum(range(count))) for _ in range(5)) / count
    work = range(round(seconds / rate))
    return lambda: sum(work)
