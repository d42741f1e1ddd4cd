"""`bench all`: makes all records anew, one after the other, then writes their figures.

Nothing else should run on the machine meanwhile. `bench latency` skips the peers that aren't
installed: see the extra `peers`.
"""

import argparse
import subprocess
import sys
import time

from ..harness.records import RECORDS, ROOT
from . import figures


def main(argv: list[str]) -> int:
    """Run each command in a process of its own; stop at the first that fails."""
    argparse.ArgumentParser(prog="python -m bench all", description=__doc__).parse_args(argv)
    for name in RECORDS:
        start = time.monotonic()
        print(f"=== {name}", flush=True)
        subprocess.run([sys.executable, "-m", "bench", name], cwd=ROOT, check=True)
        print(f"=== {name}: {time.monotonic() - start:.0f} s", flush=True)
    return figures.main([])
