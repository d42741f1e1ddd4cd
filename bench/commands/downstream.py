"""`bench downstream`: runs packages built on Equinox with and without `eqxjit.install()`.

The first run installs the packages of `bench/downstream.txt` into an environment of their own. Each
package has a workload, whose results and errors must be the same on both sides, to the last bit.
"""

import inspect
import os
import re
import subprocess
import venv
from pathlib import Path
from typing import Any

import eqxjit

from ..harness.environment import record
from ..harness.measure import chosen, options
from ..harness.printing import console, progress, show
from ..harness.processes import figures_of
from ..harness.records import ROOT
from ..probes.downstream import WORK

_PINS = ROOT / "bench" / "downstream.txt"
SIDES = ("equinox", "eqxjit")


def main(argv: list[str]) -> int:
    """Run the workload of each package on both sides, compare, and write the record."""
    args = options("downstream", __doc__, argv)
    python = _installed()
    versions = pinned()
    # eqxjit isn't installed in that environment, so it is imported from this one. The example of
    # parallelism needs eight devices.
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(inspect.getfile(eqxjit)).parents[1]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    rows: dict[str, dict[str, Any]] = {}
    for package in progress(chosen(WORK, args), "packages"):
        found = {
            side: figures_of(
                "bench.probes.downstream", package, side, environment=environment, python=python
            )
            for side in SIDES
        }
        rows[package] = {
            "version": versions.get(package, versions["equinox"]),
            "calls": found["equinox"]["calls"],
            "calls_left": found["eqxjit"]["calls"],
            "same": len({digest for side in SIDES for digest in found[side]["digests"]}) == 1,
        }
    columns = ("package or example", "version", "calls", "left to Equinox", "same outcomes")
    lines = [(name, *row.values()) for name, row in rows.items()]
    show("packages built on Equinox, with and without eqxjit", columns, lines)
    record("downstream", {"installed": versions, "packages": rows}, args)
    return 0 if all(row["same"] and not row["calls_left"] for row in rows.values()) else 1


def pinned() -> dict[str, str]:
    """Return the version of each package, by its name in lower case."""
    pins = re.findall(r"^(\S+)==(\S+)$", _PINS.read_text(), re.MULTILINE)
    return {name.lower(): version for name, version in pins}


def _installed() -> str:
    """Return the Python of an environment that has the pinned packages. Create it if needed."""
    environment = ROOT / "build" / "downstream"
    python = environment / "bin" / "python"
    stamp = environment / "installed.txt"
    if not stamp.exists() or stamp.read_text() != _PINS.read_text():
        console.print(f"installing {_PINS.name} into {environment}")
        venv.create(environment, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "-r", str(_PINS)]
        subprocess.run(command, check=True)
        stamp.write_text(_PINS.read_text())
    return str(python)
