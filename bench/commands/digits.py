"""`bench digits`: runs one training script under Equinox's `filter_jit` and under eqxjit's.

The script trains an `eqx.nn.MLP` with optax on the UCI digits that scikit-learn bundles. The two
runs take turns, epoch by epoch, so that other work on the machine slows down both. Losses and
weights must be equal bit for bit.
"""

import argparse
from statistics import median

import equinox as eqx
import jax
import numpy as np

import eqxjit

from ..harness.printing import console, progress, show
from ..models.digits import Epoch, accuracy, digits, train


def main(argv: list[str]) -> int:
    """Train under both, print accuracy and times, and compare the results bit by bit."""
    parser = argparse.ArgumentParser(prog="python -m bench digits", description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    epochs: int = parser.parse_args(argv).epochs

    training, test = digits()
    runs: dict[str, list[Epoch]] = {"equinox.filter_jit": [], "eqxjit.filter_jit": []}
    scripts = [
        train(filter_jit, training, epochs) for filter_jit in (eqx.filter_jit, eqxjit.filter_jit)
    ]
    for turn in progress(zip(*scripts, strict=True), "training", epochs):
        for run, epoch in zip(runs.values(), turn, strict=True):
            run.append(epoch)
    for name, run in runs.items():
        console.print(f"test accuracy under {name}: {accuracy(run[-1].model, test):.1%}")
    _show(runs)
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


def _show(runs: dict[str, list[Epoch]]) -> None:
    # The first epoch compiles, so it counts only if there is no other epoch.
    figures = [[epoch.microseconds for epoch in run[1:] or run] for run in runs.values()]
    lines = [(name, min(row), median(row)) for name, row in zip(runs, figures, strict=True)]
    ratios = (theirs / ours for theirs, ours in zip(lines[0][1:], lines[1][1:], strict=True))
    columns = ("", "best epoch", "median epoch")
    show("µs per training step", columns, [*lines, ("times as fast", *ratios)])
