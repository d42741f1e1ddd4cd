"""`bench all`: measures all records again, one after the other, then writes their figures.

The records are of JAX's default device: on a GPU, `bench calls` writes `calls-gpu.json`. `bench
downstream` then doesn't run, because its environment has JAX for a CPU. Nothing else should run on
the machine meanwhile. `bench latency` skips other packages that aren't installed (`pip install -e
".[peers]"`).
"""

import argparse
import subprocess
import sys
import time

import jax

from ..harness.records import RECORDS, ROOT
from . import figures


def main(argv: list[str]) -> int:
    """Run each command in a process of its own, until one fails."""
    argparse.ArgumentParser(prog="python -m bench all", description=__doc__).parse_args(argv)
    on_cpu = jax.default_backend() == "cpu"
    for name in RECORDS if on_cpu else [name for name in RECORDS if name != "downstream"]:
        start = time.monotonic()
        print(f"=== {name}", flush=True)
        subprocess.run([sys.executable, "-m", "bench", name], cwd=ROOT, check=True)
        print(f"=== {name}: {time.monotonic() - start:.0f} s", flush=True)
    return figures.main([])
