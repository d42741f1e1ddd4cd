"""Draws the pictures of README and the pages from the records. `bench figures` writes them.

The pictures are bar charts in SVG. Letters are large enough to be read at a width of 400 pixels.
The background is transparent, and the colours can be read on white and on black. The SVG is
written by hand, so that equal records give equal files.
"""

import functools
from collections.abc import Callable, Mapping
from html import escape

from ..harness.records import Times, rows

TEXT = "#767c85"
WIDTH, BAR, GAP, FONT = 560, 20, 4, 17
ROOM = 90  # to the right of the longest bar, for its figure and unit

COLOURS = {
    "Equinox": "#d9534f",
    "jax.jit on trees": "#4a90d9",
    "ONNX Runtime": "#4a90d9",
    "eqxjit": "#2f9e5a",
    "eqxjit.freeze": "#2f9e5a",
    "eqxjit, packed": "#c98a1b",
}

Bars = Mapping[str, Mapping[str, float]]  # by heading and label


# The rows of `bench calls` in the overview, with their headings.
OVERVIEW = {
    "MLP 32": "MLP",
    "GRUCell": "GRU step",
    "MLP + adam": "MLP + adam step",
    "transformer": "transformer of 12 blocks",
}


def overview(platform: str) -> str:
    """Draw the time of a call of a few workloads, as a multiple of the floor."""
    labels = {"eqx": "Equinox", "jit": "jax.jit on trees", "eqxjit": "eqxjit"}
    found = {heading: rows("calls", platform)[row] for row, heading in OVERVIEW.items()}
    return _over_floor("call", found, labels, platform)


def training(platform: str) -> str:
    """Draw the time of training steps, as a multiple of the floor."""
    labels = {"eqx": "Equinox", "eqxjit": "eqxjit", "packed": "eqxjit, packed"}
    return _over_floor("step", rows("training", platform), labels, platform)


def latency() -> str:
    """Draw the median time of a call of models with fixed weights, in microseconds."""
    ways = ("equinox.filter_jit", "ONNX Runtime", "eqxjit.freeze")
    bars = {
        model: {way.replace("equinox.filter_jit", "Equinox"): us[way] for way in ways if way in us}
        for model, us in rows("latency").items()
    }
    return _drawn("Median time of a call in microseconds", "Lower is better.", bars, " µs")


PICTURES: dict[str, Callable[[], str]] = {
    "overview": functools.partial(overview, "cpu"),
    "overview-gpu": functools.partial(overview, "gpu"),
    "training": functools.partial(training, "cpu"),
    "training-gpu": functools.partial(training, "gpu"),
    "latency": latency,
}


def _over_floor(
    what: str, found: Mapping[str, Times], labels: Mapping[str, str], platform: str
) -> str:
    where = " on a GPU" if platform == "gpu" else ""
    bars = {
        heading: {label: us[way] / us["floor"] for way, label in labels.items()}
        for heading, us in found.items()
    }
    title = f"Time of a {what}{where}, as a multiple of the floor"
    return _drawn(title, "Lower is better. 1.0x is jax.jit on a flat list of arrays.", bars, "x")


def _drawn(title: str, explanation: str, bars: Bars, unit: str) -> str:
    """Draw a title, a legend and, for each heading, a bar for each label, all to one scale."""
    labels = list(dict.fromkeys(label for group in bars.values() for label in group))
    scale = (WIDTH - ROOM) / max(max(group.values()) for group in bars.values())
    parts: list[str] = []
    y = FONT

    def text(x: float, words: str, weight: str = "normal") -> None:
        parts.append(f'<text x="{x:.0f}" y="{y}" font-weight="{weight}">{escape(words)}</text>')

    text(0, title, "bold")
    y += FONT + GAP
    text(0, explanation)
    y += FONT + 2 * GAP
    x = 0.0
    for label in labels:
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 14}" width="16" height="16" fill="{COLOURS[label]}"/>'
        )
        text(x + 22, label)
        # An estimate by the width of an average letter, because nothing here can measure text.
        x += 50 + 0.55 * FONT * len(label)
    for heading, group in bars.items():
        y += FONT + 4 * GAP
        text(0, heading)
        y += 2 * GAP
        for label, value in group.items():
            width = f"{value * scale:.1f}"
            parts.append(
                f'<rect y="{y}" width="{width}" height="{BAR}" fill="{COLOURS[label]}"/>'
                f'<text x="{value * scale + 6:.1f}" y="{y + 16}">{_figure(value)}{unit}</text>'
            )
            y += BAR + GAP
    height = y + GAP
    label = escape(f"{title}. {explanation}")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}"'
        f' font-family="sans-serif" font-size="{FONT}" fill="{TEXT}">'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
