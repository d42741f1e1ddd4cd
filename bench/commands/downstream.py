"""`bench downstream`: packages built on Equinox, with and without `eqxjit.install()`.

The packages of `bench/downstream.txt` are installed into an environment of their own, once. Each
does some work there under both; results and errors must be the same, to the last bit.
"""

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
from rich.progress import track

from ..harness.environment import record
from ..harness.measure import chosen, options
from ..harness.printing import table_of
from ..harness.records import ROOT
from ..probes.downstream import WORK

_PINS = ROOT / "bench" / "downstream.txt"
SIDES = ("equinox", "eqxjit")
# For the example of parallelism.
_EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def main(argv: list[str]) -> int:
    """Install, run each package's work under both, compare, report, write."""
    parser = options("downstream", __doc__)
    parser.add_argument(
        "--environment",
        type=Path,
        default=ROOT / "build" / "downstream",
        help="where to install the packages (build/downstream)",
    )
    args = parser.parse_args(argv)
    console = Console()

    python = _installed(args.environment, console)
    versions = pinned()
    rows: dict[str, dict[str, Any]] = {}
    for package in track([*chosen(WORK, args)], "packages", console=console):
        found = {side: _run(python, package, side) for side in SIDES}
        rows[package] = {
            "version": versions.get(package, versions["equinox"]),
            "calls": found["equinox"]["calls"],
            "calls_left": found["eqxjit"]["calls"],
            "same": len({digest for side in SIDES for digest in found[side]["digests"]}) == 1,
        }
    columns = ("package or example", "version", "calls", "left to Equinox", "same outcomes")
    lines = [(name, *row.values()) for name, row in rows.items()]
    console.print(table_of("packages built on Equinox, under both", columns, lines))
    record("downstream", {"installed": versions, "packages": rows}, args)
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
    paths = [str(ROOT), str(Path(inspect.getfile(eqxjit)).parents[1])]
    finished = subprocess.run(
        [str(python), "-m", "bench.probes.downstream", package, side],
        env={**os.environ, **_EIGHT_DEVICES, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        sys.exit(f"{package} under {side} failed:\n{finished.stderr}")
    return json.loads(finished.stdout.splitlines()[-1])
