"""Fresh processes for what a process can do only once: importing, first calls, settings of XLA."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def output_of(module: str, *arguments: str, environment: Mapping[str, str]) -> str:
    """What `python -m module arguments...` prints, in this environment and with this import path.

    **Raises:**

    - `SystemExit`, with what it wrote to its standard error, if it fails.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    finished = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**environment, "PYTHONPATH": path},
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} failed:\n{finished.stderr}")
    return finished.stdout
