"""`bench downstream`: packages built on Equinox, with and without `eqxjit.install()`.

The packages of `bench/downstream.txt` are installed into an environment of their own, once. Each
does some work there under both; results and errors must be the same, to the last bit.
"""

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..harness.environment import write

_ROOT = Path(__file__).parents[2]
_PINS = Path(__file__).parents[1] / "downstream.txt"
SIDES = ("equinox", "eqxjit")
PACKAGES = ("quadax", "flowjax", "distreqx", "dlux", "quax", "diffrax", "optimistix", "lineax")
# For the example of parallelism.
_EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
# Equinox's own.
EXAMPLES = (
    "rnn",
    "cnn",
    "bert",
    "vision_transformer",
    "score_based_diffusion",
    "stateful",
    "parallelism",
)
WORK = (*PACKAGES, *EXAMPLES)


def main(argv: list[str]) -> int:
    """Install, run each package's work under both, compare, report, write."""
    parser = argparse.ArgumentParser(prog="python -m bench downstream", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=WORK, default=WORK)
    parser.add_argument(
        "--environment",
        type=Path,
        default=_ROOT / "build" / "downstream",
        help="where to install the packages (build/downstream)",
    )
    parser.add_argument("--output", type=Path, help="folder for what is written (bench/results)")
    args = parser.parse_args(argv)
    console = Console()

    python = _installed(args.environment, console)
    versions = pinned()
    table = Table(title="packages built on Equinox, under both")
    for column in ("package", "calls of filter_jit", "Equinox's own, installed", "outcomes"):
        table.add_column(column)
    rows: dict[str, Any] = {}
    for package in args.only:
        found = {side: _run(python, package, side) for side in SIDES}
        digests = {digest for side in SIDES for digest in found[side]["digests"]}
        calls = [found[side]["calls"] for side in SIDES]
        rows[package] = {
            "version": versions.get(package, versions["equinox"]),
            "calls": calls[0],
            "calls_left": calls[1],
            "same": len(digests) == 1,
        }
        same = "[green]the same[/]" if len(digests) == 1 else "[red]they differ[/]"
        name = f"{package} {versions[package]}" if package in PACKAGES else f"equinox: {package}"
        table.add_row(name, *(f"{n:,}" for n in calls), same)
    console.print(table)
    if args.output or len(rows) == len(WORK):
        console.print(f"written: {write('downstream', {'packages': rows}, args.output)}")
    return 0 if all(row["same"] and not row["calls_left"] for row in rows.values()) else 1


def pinned() -> dict[str, str]:
    """The version of each package, by its name in lower case."""
    pins = re.findall(r"^(\S+)==(\S+)$", _PINS.read_text(), re.MULTILINE)
    return {name.lower(): version for name, version in pins}


def _installed(environment: Path, console: Console) -> Path:
    """The interpreter of an environment that has the pinned packages."""
    python = environment / "bin" / "python"
    stamp = environment / "installed.txt"
    if not stamp.exists() or stamp.read_text() != _PINS.read_text():
        console.print(f"installing {_PINS.name} into {environment}")
        venv.create(environment, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "-r", str(_PINS)]
        subprocess.run(command, check=True)
        stamp.write_text(_PINS.read_text())
    return python


def _run(python: Path, package: str, side: str) -> dict[str, Any]:
    """What the probe prints, run by that interpreter, with eqxjit as it is here."""
    import eqxjit

    # Not installed there: found by its path.
    paths = [str(_ROOT), str(Path(inspect.getfile(eqxjit)).parents[1])]
    finished = subprocess.run(
        [str(python), "-m", "bench.probes.downstream", package, side],
        env={**os.environ, **_EIGHT_DEVICES, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        sys.exit(f"{package} under {side} failed:\n{finished.stderr}")
    return json.loads(finished.stdout.splitlines()[-1])
