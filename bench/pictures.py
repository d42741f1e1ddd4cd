"""The two pictures of `bench calls`."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

mpl.use("Agg")

STYLES = {
    "floor": ("black", "|"),
    "jit": ("tab:blue", "o"),
    "eqx": ("tab:red", "s"),
    "eqxjit": ("tab:green", "D"),
    "nnx.jit": ("tab:purple", "^"),
    "nnx.cached_partial": ("tab:pink", "<"),
    "nnx.jit_partial": ("tab:olive", "v"),
}
LABELS = {
    "floor": "floor: jax.jit on hand-flattened lists",
    "jit": "jax.jit on trees",
    "eqx": "equinox.filter_jit",
    "eqxjit": "eqxjit.filter_jit",
}

Times = Mapping[str, float]  # microseconds by competitor


def ratios(times: Mapping[str, Times], path: Path) -> None:
    """One row per workload, one mark per competitor: its time as a multiple of the floor's."""
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.3 * len(times)), layout="constrained")
    workloads = list(times)
    for name, (colour, marker) in STYLES.items():
        rows = [row for row, workload in enumerate(workloads) if name in times[workload]]
        values = [times[workloads[row]][name] / times[workloads[row]]["floor"] for row in rows]
        label = LABELS.get(name, f"flax {name}")
        axes.scatter(values, rows, c=colour, marker=marker, label=label, s=40)
    axes.set_xscale("log")
    axes.set_xlabel("time of a call, as a multiple of the floor")
    axes.set_yticks(range(len(workloads)), workloads)
    axes.invert_yaxis()
    axes.grid(which="both", axis="x", alpha=0.25)
    axes.grid(axis="y", alpha=0.25)
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def leaves(groups: Mapping[str, Mapping[int, Times]], path: Path) -> None:
    """The cost of a call against the number of leaves, a panel for each kind of tree workload."""
    figure, panels = plt.subplots(
        1, max(1, len(groups)), figsize=(9, 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (group, rows) in zip(panels[0], groups.items(), strict=False):
        for name, label in LABELS.items():
            colour, marker = STYLES[name]
            axes.plot(
                list(rows),
                [row[name] for row in rows.values()],
                color=colour,
                marker=marker,
                label=label,
            )
        axes.set(xscale="log", yscale="log", title=group, xlabel="leaves")
        axes.grid(which="both", alpha=0.25)
    panels[0][0].set_ylabel("µs per call")
    if groups:
        panels[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
