"""Reads the records in `bench/results`.

Only the standard library is imported, because a test without the benchmarks' packages reads them.
"""

import functools
import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
#: The commands that write a record, in the order of `bench all`.
RECORDS = (
    "calls",
    "shapes",
    "statics",
    "training",
    "latency",
    "serving",
    "startup",
    "downstream",
)

Times = dict[str, float]  # microseconds, by the way to call the function


@functools.cache
def record(name: str, platform: str = "cpu") -> dict[str, Any]:
    """Read the record of a command that was measured on a platform."""
    return json.loads((RESULTS / f"{name}-{platform}.json").read_text())


def rows(name: str, platform: str = "cpu") -> dict[str, Times]:
    """Read the times of each row: the best round or, where each call was timed, the median."""
    found = record(name, platform)
    if name == "calls":
        return {row: workload["best_us"] for row, workload in found["workloads"].items()}
    if name == "training":
        return {row: task["us"] for row, task in found["tasks"].items()}
    if name in ("latency", "serving"):
        several = found["models" if name == "latency" else "loads"]
        medians = {row: each["us"].items() for row, each in several.items()}
        return {row: {way: us[0] for way, us in ways} for row, ways in medians.items()}
    return found["best_us"]


def group(*names: str, platform: str = "cpu") -> dict[str, Times]:
    """Read the times of all workloads of `bench calls`, or of those in these groups."""
    workloads = record("calls", platform)["workloads"]
    return {
        row: workload["best_us"]
        for row, workload in workloads.items()
        if not names or workload["group"] in names
    }


def ratios(times: dict[str, Times], way: str, of: str) -> list[float]:
    """Return, for each row that has both ways, the time of `way` divided by that of `of`."""
    return [row[way] / row[of] for row in times.values() if way in row and of in row]


def mean_ratio(times: dict[str, Times], way: str, of: str) -> float:
    """Return the geometric mean of the ratios of all rows."""
    return geometric_mean(ratios(times, way, of))
