"""`bench digits`: one training script, run under both filter_jits.

It trains an `eqx.nn.MLP` with optax on the UCI digits that scikit-learn bundles. The two runs
advance epoch by epoch in turn, so that a noisy machine is noisy for both, and must end identical.
"""

import argparse
from statistics import median

import equinox as eqx
import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import eqxjit

from ..harness.printing import table_of
from ..models.digits import Epoch, accuracy, digits, train


def main(argv: list[str]) -> int:
    """Train under both, compare, report."""
    parser = argparse.ArgumentParser(prog="python -m bench digits", description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    epochs: int = parser.parse_args(argv).epochs
    console = Console()

    training, test = digits()
    runs: dict[str, list[Epoch]] = {"equinox.filter_jit": [], "eqxjit.filter_jit": []}
    scripts = [
        train(filter_jit, training, epochs) for filter_jit in (eqx.filter_jit, eqxjit.filter_jit)
    ]
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=epochs)
        for turn in zip(*scripts, strict=True):
            for run, epoch in zip(runs.values(), turn, strict=True):
                run.append(epoch)
            progress.update(task, advance=1, description=f"loss {turn[-1].losses[-1]:.4f}")

    for name, run in runs.items():
        console.print(f"test accuracy under {name}: {accuracy(run[-1].model, test):.1%}")
    console.print(_table(runs))
    results = [
        [
            np.asarray(array).tobytes()
            for array in jax.tree.leaves(eqx.filter((losses, run[-1].model), eqx.is_inexact_array))
        ]
        for run in runs.values()
        for losses in [[epoch.losses for epoch in run]]
    ]
    is_same = results[0] == results[1]
    console.print("identical" if is_same else "losses or weights differ")
    return 0 if is_same else 1


def _table(runs: dict[str, list[Epoch]]) -> Table:
    # The first epoch compiles: it counts only where there is no other.
    figures = [[epoch.microseconds for epoch in run[1:] or run] for run in runs.values()]
    lines = [(name, min(row), median(row)) for name, row in zip(runs, figures, strict=True)]
    ratios = (theirs / ours for theirs, ours in zip(lines[0][1:], lines[1][1:], strict=True))
    columns = ("", "best epoch", "median epoch")
    return table_of("µs per training step", columns, [*lines, ("times as fast", *ratios)])
