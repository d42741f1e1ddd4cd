"""`python -m bench.probes.trial`: how far the figures of a trial are from the truth.

Each program's loop does a random number of things of each kind, and measures them itself. It runs
in turn under Equinox, under eqxjit, and under `--trial`. The shares that the trial prints are
compared with what the program has measured under eqxjit, and in the trial's own run; the speed-up
is compared with the ratio of the two loops. What the program measures differs from run to run, too:
on a busy machine by as much.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

_PROGRAM = """
import json, sys, time
import equinox as eqx, jax, jax.numpy as jnp, numpy as np

n_of = json.loads(sys.argv[1])
model = eqx.nn.MLP(4, 2, 16, 2, key=jax.random.key(0))
key, x, big = jax.random.key(1), jnp.ones((8, 4)), jnp.ones((n_of["size"], n_of["size"]))
data = np.ones((64, 32), np.float32)

@eqx.filter_jit
def call(model, x):
    return jax.vmap(model)(x)

@eqx.filter_jit
def compute(x):
    for _ in range(4):
        x = x @ x / x.shape[0]
    return x.sum()

class Timed:
    def __init__(self, kind):
        self.kind = kind

    def __enter__(self):
        self.begun = time.perf_counter()

    def __exit__(self, *_):
        seconds[self.kind] += time.perf_counter() - self.begun

def loop(n):
    for _ in range(n):
        with Timed("jitted calls"):
            for _ in range(n_of["calls"]):
                call(model, x)
            if n_of["waits"]:
                result = compute(big)
        if n_of["waits"]:
            with Timed("waiting"):
                WAIT
        with Timed("operations outside jit"):
            for _ in range(n_of["operations"]):
                jnp.sin(x) * 2 + x
                jax.random.split(key)
        found = {}
        for i in range(n_of["python"]):
            found[i % 17] = str(i) + "x"
        with Timed("moving data"):
            for _ in range(n_of["moves"]):
                jnp.asarray(data)

for n in (3, n_of["loops"]):
    seconds = dict.fromkeys(
        ["jitted calls", "operations outside jit", "waiting", "moving data"], 0.0
    )
    begun = time.perf_counter()
    loop(n)
    seconds["Python"] = time.perf_counter() - begun - sum(seconds.values())
print(json.dumps(seconds))
"""

_WAITS = (
    "float(result)",
    "result.item()",
    "np.asarray(result)",
    "result.block_until_ready()",
    "jax.block_until_ready(result)",
    "f'{result}'",
)
_NAMES = {
    "operations of JAX outside of any jit": "operations outside jit",
    "calls of jitted functions": "jitted calls",
    "waiting for results": "waiting",
}


class _Run(NamedTuple):
    """What a run printed, and the seconds of each kind that its program has measured."""

    output: str
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        return {kind: spent / self.total for kind, spent in self.seconds.items()}


def _random_program(seed: int) -> tuple[str, dict[str, int]]:
    """Return how a program waits, and how often it does what in each turn of its loop."""
    draw = random.Random(seed)
    n_of = {
        "waits": draw.choice((0, 1, 1)),
        "size": draw.choice((100, 200, 300)),
        "operations": draw.choice((0, 3, 10, 20)),
        "python": draw.choice((0, 1000, 5000, 10_000)),
        "moves": draw.choice((0, 0, 10, 50)),
        "loops": draw.choice((1000, 2000)),
    }
    n_of["calls"] = draw.choice((0, 5, 20, 60) if n_of["waits"] else (5, 20, 60))
    return draw.choice(_WAITS), n_of


def _run(options: list[str], program: str, n_of: dict[str, int]) -> _Run:
    command = [sys.executable, *options, program, json.dumps(n_of)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    measured = next(line for line in output.splitlines() if line.startswith("{"))
    return _Run(output, json.loads(measured))


def _try(seed: int) -> None:
    """Print how far the figures of a trial of one program are from the truth."""
    wait, n_of = _random_program(seed)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(_PROGRAM.replace("WAIT", wait))
        file.flush()
        equinox, alone, trial = (
            _run(options, file.name, n_of)
            for options in ([], ["-m", "eqxjit"], ["-m", "eqxjit", "--trial"])
        )
    rows = re.findall(r"(?m)^ +(\d+)%  (\S.*?)  ", trial.output)
    printed = {_NAMES.get(name, name): int(percent) / 100 for percent, name in rows}
    faster = re.search(r"([\d.]+) times as long", trial.output)
    errors = [
        max(abs(printed.get(kind, 0.0) - share) for kind, share in run.shares.items())
        for run in (alone, trial)
    ]
    print(f"\nprogram {seed}, {wait}: {n_of}")
    print(f"  largest error {errors[0]:.1%} (of the trial's own run {errors[1]:.1%})")
    for kind, share in alone.shares.items():
        found = f"{share:6.1%} alone, {trial.shares[kind]:6.1%} in the trial's run"
        print(f"    {kind:25} {found}, printed {printed.get(kind, 0.0):.0%}")
    speed_up = f"printed {faster[1]}" if faster else "not printed"
    print(f"  Equinox's loop takes {equinox.total / alone.total:.2f} times as long, {speed_up}")
    print(f"  the loop takes {trial.total / alone.total:.2f} times as long in a trial", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first program's number")
    parser.add_argument("--n", type=int, default=6, help="how many programs are tried")
    chosen = parser.parse_args()
    for seed in range(chosen.first, chosen.first + chosen.n):
        _try(seed)
