"""`bench soak`: random structures, functions and call orders under threads, checked.

Every result is compared with that of the same function un-jitted: values, dtypes, containers,
static parts (with their types), exceptions. All threads share the jitted functions and start from
the same structures, so that they race for first calls; each then changes its own in place.
"""

import argparse
import faulthandler
import random
import threading
import time
import traceback
from collections import Counter

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..models.random_work import TASKS, difference, mutate, outcome_of, random_tree, refill

PATIENCE = 120.0  # seconds for a thread to come back after the end: longer is a hang


class Worker(threading.Thread):
    """Calls at random until told to stop."""

    def __init__(self, seed: int, number: int, stop: threading.Event) -> None:
        super().__init__(name=f"soak-{number}", daemon=True)
        self.trees = [random_tree(random.Random(f"{seed} tree {i}")) for i in range(20)]
        self.rng = random.Random(f"{seed} worker {number}")
        self.stop = stop
        self.calls: Counter[str] = Counter()
        self.mismatches: list[str] = []

    def run(self) -> None:
        """The thread."""
        while not self.stop.is_set():
            try:
                self.turn()
            except Exception:
                self.mismatches.append(f"the soak itself failed:\n{traceback.format_exc()}")
                return

    def turn(self) -> None:
        """One structure, one function, a few calls."""
        rng = self.rng
        index = rng.randrange(len(self.trees))
        # Mostly the structures stay, so that most calls are warm.
        drawn = rng.random()
        if drawn < 0.002:
            self.trees[index] = random_tree(rng)
        elif drawn < 0.01:
            mutate(self.trees[index], rng)
        elif drawn < 0.2:
            refill(self.trees[index], rng)
        tree = self.trees[index]
        (task,) = rng.choices(TASKS, [task.weight for task in TASKS])
        if rng.random() < 1e-4:
            task.clear_cache()
        arguments = task.arguments(tree, rng)
        expected = outcome_of(lambda: task.plain(*arguments))
        for _ in range(rng.randint(1, 20)):
            got = outcome_of(lambda: task.jitted(*task.passed(arguments)))
            self.calls[task.name] += 1
            if (differs := difference(expected, got)) is not None:
                self.mismatches.append(f"{task.name}{arguments}: {differs}")


def main(argv: list[str]) -> int:
    """Start the threads, watch them, report."""
    parser = argparse.ArgumentParser(prog="python -m bench soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    console = Console()
    process, seconds = psutil.Process(), args.minutes * 60

    stop = threading.Event()
    workers = [Worker(args.seed, number, stop) for number in range(args.threads)]
    memory: list[tuple[float, int]] = []  # when, resident bytes
    for worker in workers:
        worker.start()
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=seconds)
        while (elapsed := time.monotonic() - start) < seconds and any(
            w.is_alive() for w in workers
        ):
            memory.append((elapsed, process.memory_info().rss))
            calls, mismatches = _totals(workers)
            description = f"{calls.total():,} calls, {mismatches} mismatches"
            progress.update(task, completed=elapsed, description=description)
            stop.wait(0.5)
    stop.set()
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    hung = [worker.name for worker in workers if worker.is_alive()]
    if hung:
        console.print(f"[red]hung[/]: {', '.join(hung)}")
        faulthandler.dump_traceback(all_threads=True)

    calls, mismatches = _totals(workers)
    console.print(_table(calls, mismatches, memory))
    for described in [text for worker in workers for text in worker.mismatches][:5]:
        console.print(described, markup=False)
    return 1 if mismatches or hung else 0


def _totals(workers: list[Worker]) -> tuple[Counter[str], int]:
    calls = sum((Counter(dict(worker.calls)) for worker in workers), start=Counter[str]())
    return calls, sum(len(worker.mismatches) for worker in workers)


def _table(calls: Counter[str], mismatches: int, memory: list[tuple[float, int]]) -> Table:
    table = Table(title="soak", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("calls", f"{calls.total():,}")
    for name, count in sorted(calls.items()):
        table.add_row(f"  {name}", f"{count:,}")
    table.add_row("mismatches", str(mismatches))
    sizes = [size / 2**20 for _, size in memory]
    for quarter in range(1, 5):
        at = sizes[len(sizes) * quarter // 4 - 1]
        table.add_row(f"resident after {quarter}/4 of the time", f"{at:,.0f} MiB")
    table.add_row("peak memory", f"{max(sizes):,.0f} MiB")
    return table
