"""The pictures of `bench calls`, `training`, `latency` and `statics`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

mpl.use("Agg")

STYLES = {
    "floor": ("black", "|"),
    "jit": ("tab:blue", "o"),
    "eqx": ("tab:red", "s"),
    "eqxjit": ("tab:green", "D"),
    "python": ("tab:olive", "d"),
    "unchecked": ("tab:gray", "x"),
    "packed": ("tab:orange", "*"),
    "ravel": ("tab:brown", "^"),
    "optax.flatten": ("tab:cyan", "v"),
    "scan": ("tab:purple", "P"),
    "nnx.jit": ("tab:purple", "^"),
    "nnx.cached_partial": ("tab:pink", "<"),
    "nnx.jit_partial": ("tab:brown", "v"),
}
LABELS = {
    "floor": "floor: jax.jit on hand-flattened lists",
    "jit": "jax.jit on trees",
    "eqx": "equinox.filter_jit",
    "eqxjit": "eqxjit.filter_jit",
    "python": "eqxjit.filter_jit, generated Python",
    "unchecked": "by hand, without any check",
}

TRAINING_LABELS = {
    "packed": "eqxjit.filter_jit, packed",
    "ravel": "jax.jit, ravel_pytree by hand",
    "optax.flatten": "jax.jit on trees, optax.flatten",
    "scan": "jax.jit, lax.scan over 10 steps",
}

Times = Mapping[str, float]  # microseconds by competitor

_OVERVIEW = {
    "Identity": "Identity",
    "MLP 32": "MLP forward",
    "GRUCell": "GRU step",
    "MLP + adam": "MLP + adam step",
    "transformer": "transformer forward",
}


def overview(times: Mapping[str, Times], path: Path) -> None:
    """Draw bars for a few workloads and competitors: the picture of the README."""
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    workloads = [name for name in _OVERVIEW if name in times]
    names = ("eqx", "jit", "eqxjit")
    for i, name in enumerate(names):
        rows = [row + (i - 1) * 0.27 for row in range(len(workloads))]
        values = [times[workload][name] / times[workload]["floor"] for workload in workloads]
        bars = axes.barh(rows, values, 0.25, color=STYLES[name][0], label=LABELS[name])
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize="small")
    axes.axvline(1, color="black", linewidth=1, linestyle="--", label="floor")
    axes.set(xlabel="time of a call, as a multiple of the floor", xlim=(0, None))
    axes.margins(x=0.08)
    axes.set_yticks(range(len(workloads)), [_OVERVIEW[name] for name in workloads])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", loc="lower right", framealpha=1)
    _save(figure, path)


def ratios(times: Mapping[str, Times], path: Path) -> None:
    """One row per workload, one mark per competitor: its time as a multiple of the floor's."""
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.3 * len(times)), layout="constrained")
    workloads = list(times)
    for name, (colour, marker) in STYLES.items():
        if not any(name in row for row in times.values()):
            continue
        rows = [row for row, workload in enumerate(workloads) if name in times[workload]]
        values = [times[workloads[row]][name] / times[workloads[row]]["floor"] for row in rows]
        label = {**LABELS, **TRAINING_LABELS}.get(name, f"flax {name}")
        axes.scatter(values, rows, c=colour, marker=marker, label=label, s=40)
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set_xlabel("time of a call, as a multiple of the floor")
    axes.set_yticks(range(len(workloads)), workloads)
    axes.invert_yaxis()
    axes.grid(which="both", axis="x", alpha=0.25)
    axes.grid(axis="y", alpha=0.25)
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    _save(figure, path)


def leaves(groups: Mapping[str, Mapping[int, Times]], path: Path) -> None:
    """The cost of a call against the number of leaves, a panel for each kind of tree workload."""
    figure, panels = plt.subplots(
        1, max(1, len(groups)), figsize=(9, 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (group, rows) in zip(panels[0], groups.items(), strict=False):
        _curves(axes, group, rows, LABELS)
        axes.set_xlabel("leaves")
    panels[0][0].set_ylabel("µs per call")
    if groups:
        panels[0][0].legend(fontsize="small")
    _save(figure, path)


def sizes(groups: Mapping[str, Mapping[int, Times]], suffix: str, path: Path) -> None:
    """The cost of a call against the size of a static value, a panel for each kind of value.

    A group whose name has the suffix is dashed, in the panel of the group without.
    """
    columns = 6
    panelled = list(dict.fromkeys(name.removesuffix(suffix) for name in groups))
    rows = max(1, -(-len(panelled) // columns))
    figure, panels = plt.subplots(
        rows, columns, figsize=(16, 2.5 * rows), sharey=True, squeeze=False, layout="constrained"
    )
    for axes in panels.flat[len(panelled) :]:
        axes.set_axis_off()
    for axes, name in zip(panels.flat, panelled, strict=False):
        for kind in ("", suffix):
            _curves(axes, name, groups.get(name + kind, {}), ("eqx", "eqxjit"), kind)
        axes.set_title(name, fontsize="small")
        _ticks_at({size: f"{size:,}" for size in groups.get(name, {})}, axes.xaxis)
    figure.supxlabel("entries, structures, depth")
    figure.supylabel("µs of CPU time")
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    _save(figure, path)


def _curves(
    axes: Axes,
    title: str,
    rows: Mapping[int, Times],
    names: Iterable[str],
    suffix: str = "",
) -> None:
    """Lines; those with a suffix are dashed."""
    for name in names:
        colour, marker = STYLES[name]
        times = [row[name] for row in rows.values()]
        line = "--" if suffix else "-"
        label = f"{LABELS[name]}{suffix}"
        axes.plot(list(rows), times, line, color=colour, marker=marker, label=label)
    axes.set(xscale="log", yscale="log", title=title)
    axes.grid(which="both", alpha=0.25)


def latencies(times: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """A panel for each model, a row for each competitor: from p50 (dot) over p99 to p99.9."""
    names = list(dict.fromkeys(name for rows in times.values() for name in rows))
    columns = min(2, len(times))
    n_rows = -(-len(times) // columns)
    figure, panels = plt.subplots(
        n_rows,
        columns,
        figsize=(9, (0.9 + 0.27 * len(names)) * n_rows),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes in panels.flat[len(times) :]:
        axes.set_visible(False)
    for axes, (model, rows) in zip(panels.flat, times.items(), strict=False):
        for name, (p50, p99, p999) in rows.items():
            row, colour = names.index(name), _colour(name)
            axes.plot([p50, p999], [row, row], color=colour, linewidth=1)
            axes.scatter([p50], [row], color=colour, s=40)
            axes.scatter([p99, p999], [row, row], color=colour, marker="|")
        axes.set(xscale="log", title=model, xlabel="µs: p50, p99, p99.9")
        _plain_numbers(axes.xaxis)
        axes.grid(which="both", axis="x", alpha=0.25)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].invert_yaxis()
    _save(figure, path)


def _plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis by 1, 2, 5, 10: powers of ten are too few, all ticks too many."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _ticks_at(labels: Mapping[int, str], axis: Axis) -> None:
    """Label a logarithmic axis at these values alone."""
    axis.set_ticks(list(labels), list(labels.values()))
    axis.set_minor_formatter(NullFormatter())


def _save(figure: Figure, path: Path) -> None:
    """Write a picture on a white ground of its own, which a dark page doesn't change."""
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def _colour(name: str) -> str:
    families = {"eqxjit": "tab:green", "equinox": "tab:red", "jax.jit": "black"}
    return next((c for family, c in families.items() if name.startswith(family)), "tab:blue")
