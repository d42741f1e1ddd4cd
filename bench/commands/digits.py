"""`bench digits`: one training script, run under both filter_jits.

It trains an `eqx.nn.MLP` with optax on the UCI digits that scikit-learn bundles. The two runs
advance epoch by epoch in turn, so that a noisy machine is noisy for both, and must end identical.
"""

import argparse
from statistics import median
from typing import Any

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

    upstream, ours = runs.values()
    for name, run in runs.items():
        console.print(f"test accuracy under {name}: {accuracy(run[-1].model, test):.1%}")
    console.print(_table(runs))
    differences = _differences(upstream, ours)
    console.print("\n".join(differences) if differences else "identical")
    return 1 if differences else 0


def _table(runs: dict[str, list[Epoch]]) -> Table:
    # The first epoch compiles: it counts only where there is no other.
    figures = [[epoch.microseconds for epoch in run[1:] or run] for run in runs.values()]
    lines = [(name, min(row), median(row)) for name, row in zip(runs, figures, strict=True)]
    ratios = (theirs / ours for theirs, ours in zip(lines[0][1:], lines[1][1:], strict=True))
    columns = ("", "best epoch", "median epoch")
    return table_of("µs per training step", columns, [*lines, ("times as fast", *ratios)])


def _differences(upstream: list[Epoch], ours: list[Epoch]) -> list[str]:
    """Where the runs are not equal bit for bit."""
    found = []
    losses = [[value for epoch in run for value in epoch.losses] for run in (upstream, ours)]
    differing = [i for i, pair in enumerate(zip(*losses, strict=True)) if not _same_bits(*pair)]
    if differing:
        found.append(f"{len(differing)} losses differ, the first at step {differing[0]}")
    leaves = [jax.tree_util.tree_leaves_with_path(run[-1].model) for run in (upstream, ours)]
    for (path, theirs), (_, value) in zip(*leaves, strict=True):
        if eqx.is_array(theirs) and not _same_bits(theirs, value):
            found.append(f"final weights differ: {jax.tree_util.keystr(path)}")
    return found


def _same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
