"""Runs modules in fresh processes, for what a process can do only once, such as importing."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from .records import ROOT


def figures_of(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] = os.environ,
    python: str = sys.executable,
) -> Any:
    """Run `python -m module arguments...` in this environment, and read its last line as JSON.

    **Raises:**

    - `SystemExit`, with the standard error of the process, if the process fails.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    finished = subprocess.run(
        [python, "-m", module, *arguments],
        env={**environment, "PYTHONPATH": path},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} failed:\n{finished.stderr}")
    return json.loads(finished.stdout.splitlines()[-1])
