"""`bench pictures`: draws the pictures of `calls` and `latency` from the figures on record."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..harness import pictures
from ..harness.environment import RESULTS


def main(argv: list[str]) -> int:
    """Draw each picture whose figures are in the folder."""
    parser = argparse.ArgumentParser(prog="python -m bench pictures", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    folder = parser.parse_args(argv).folder
    for path in sorted(folder.glob("calls-*.json")):
        _calls(json.loads(path.read_text())["workloads"], path)
    for path in sorted(folder.glob("latency-*.json")):
        models = json.loads(path.read_text())["models"]
        times = {name: model["us"] for name, model in models.items()}
        pictures.latencies(times, path.with_suffix(".png"))
    return 0


def _calls(workloads: dict[str, Any], path: Path) -> None:
    platform = path.stem.partition("-")[2]
    times = {name: workload["best_us"] for name, workload in workloads.items()}
    groups: dict[str, dict[int, Any]] = {}
    for name, workload in workloads.items():
        if " leaves " in name:
            n_leaves = int(name.split()[0].replace(",", ""))
            groups.setdefault(workload["group"], {})[n_leaves] = times[name]
    pictures.overview(times, path.with_name(f"overview-{platform}.png"))
    pictures.ratios(times, path.with_name(f"ratios-{platform}.png"))
    pictures.leaves(groups, path.with_name(f"leaves-{platform}.png"))
