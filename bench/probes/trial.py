"""`python -m bench.probes.trial`: how far the figures of a trial are from the truth.

Each program's loop does a random number of things of each kind, and measures them itself. It runs
in turn under Equinox, under eqxjit, and under `--trial`, several times. The shares that each trial
prints are compared with what the program has measured under eqxjit, and the speed-up with the ratio
of the two loops, by the medians of all runs. What the program measures differs from run to run,
too: on a busy machine by as much. So the speed-up is also compared with a ratio that such a machine
disturbs less: one process runs the loop under Equinox and under eqxjit in turn, a twentieth of its
length at a time.
"""

import argparse
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

_PROGRAM = """
import json, sys, time
import equinox as eqx, jax, jax.numpy as jnp, numpy as np

n_of = json.loads(sys.argv[1])
model = eqx.nn.MLP(4, 2, 16, 2, key=jax.random.key(0))
key, x, big = jax.random.key(1), jnp.ones((8, 4)), jnp.ones((n_of["size"], n_of["size"]))
data = np.ones((64, 32), np.float32)

def functions(filter_jit):
    @filter_jit
    def call(model, x):
        return jax.vmap(model)(x)

    @filter_jit
    def compute(x):
        for _ in range(4):
            x = x @ x / x.shape[0]
        return x.sum()

    return call, compute

class Timed:
    def __init__(self, kind):
        self.kind = kind

    def __enter__(self):
        self.begun = time.perf_counter()

    def __exit__(self, *_):
        seconds[self.kind] += time.perf_counter() - self.begun

def loop(n, call, compute):
    for _ in range(n):
        with Timed("jitted calls"):
            for _ in range(n_of["calls"]):
                call(model, x)
        if n_of["waits"]:
            with Timed("waiting"):
                result = compute(big)
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

def measured(n, jitted):
    global seconds
    seconds = dict.fromkeys(
        ["jitted calls", "operations outside jit", "waiting", "moving data"], 0.0
    )
    begun = time.perf_counter()
    loop(n, *jitted)
    seconds["Python"] = time.perf_counter() - begun - sum(seconds.values())
    return seconds

compared = [functions(eqx.filter_jit)]
if "--in-turn" in sys.argv:
    import eqxjit
    compared.append(functions(eqxjit.filter_jit))
for each in compared:
    measured(3, each)
if len(compared) == 1:
    print(json.dumps(measured(n_of["loops"], *compared)))
else:
    parts = [[measured(n_of["loops"] // 20, each) for each in compared] for _ in range(20)]
    print(json.dumps([sum([sum(part.values()) for part in each]) for each in zip(*parts)]))
"""

_WAITS = (
    "float(result)",
    "result.item()",
    "np.asarray(result)",
    "result.block_until_ready()",
    "jax.block_until_ready(result)",
    "f'{result}'",
)
_KINDS = "jitted calls", "operations outside jit", "waiting", "moving data", "Python"
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


class _Errors(NamedTuple):
    """How far a trial's figures are from the truth.

    - `shares`: the largest difference of a share from what the program measured without a trial.
    - `own_shares`: the same from what it measured during the trial, in which Equinox served some
        of the calls.
    - `ratio`: the relative error of the speed-up.
    - `ratio_in_turn`: the same, if the ratio is measured in one process.
    """

    shares: float
    own_shares: float
    ratio: float
    ratio_in_turn: float


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
    output = _output([*options, program, json.dumps(n_of)])
    measured = next(line for line in output.splitlines() if line.startswith("{"))
    return _Run(output, json.loads(measured))


def _ratio_in_turn(program: str, n_of: dict[str, int]) -> float:
    """Return how many times as long the loop takes under Equinox, measured in one process."""
    equinox, ours = json.loads(_output([program, json.dumps(n_of), "--in-turn"]))
    return equinox / ours


def _output(arguments: list[str]) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _try(seed: int, n_runs: int, is_small: bool) -> Iterator[_Errors]:
    """Yield how far the shares and the speed-up of each trial of a program are from the truth."""
    wait, n_of = _random_program(seed)
    if is_small:
        n_of = {**dict.fromkeys(n_of, 0), "loops": 4000, "calls": 60}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(_PROGRAM.replace("WAIT", wait))
        file.flush()
        # In turn, so that all of them see the same machine.
        rounds, ratios = list[list[_Run]](), list[float]()
        for _ in range(n_runs):
            all_options = [], ["-m", "eqxjit"], ["-m", "eqxjit", "--trial"]
            rounds.append([_run(options, file.name, n_of) for options in all_options])
            ratios.append(_ratio_in_turn(file.name, n_of))
    equinox, alone, trials = zip(*rounds, strict=True)
    shares = {kind: statistics.median([run.shares[kind] for run in alone]) for kind in _KINDS}
    seconds = statistics.median([run.total for run in alone])
    ratio = statistics.median([run.total for run in equinox]) / seconds
    print(f"\nprogram {seed}, {wait}: {n_of}")
    ratio_in_turn = statistics.median(ratios)
    print(
        f"  measured: {_text(shares)}; under Equinox {ratio:.2f} times as long,"
        f" {ratio_in_turn:.2f} times in one process"
    )
    if n_runs > 1:
        of_kinds = [[run.shares[kind] for run in alone] for kind in _KINDS]
        totals = [[run.total for run in runs] for runs in (alone, equinox)]
        print(
            f"            runs without a trial differ by {max(map(_range, of_kinds)):.1%} in a"
            f" share, by {_spread(totals[0]):.0%} in length, by {_spread(totals[1]):.0%} under"
            f" Equinox, and by {_spread(ratios):.0%} in the ratio in one process"
        )
    for trial in trials:
        rows = re.findall(r"(?m)^ +(\d+)%  (\S.*?)  ", trial.output)
        printed = {_NAMES.get(name, name): int(percent) / 100 for percent, name in rows}
        found = {kind: printed.get(kind, 0.0) for kind in _KINDS}
        [faster] = re.findall(r"([\d.]+) times as long", trial.output) or ["nan"]
        of_shares = [
            max(abs(found[kind] - true[kind]) for kind in _KINDS) for true in (shares, trial.shares)
        ]
        of_ratios = [float(faster) / true - 1 for true in (ratio, ratio_in_turn)]
        errors = _Errors(*of_shares, *of_ratios)
        print(
            f"  printed:  {_text(found)}; {faster} times as long\n"
            f"            largest error {errors.shares:.1%},"
            f" {errors.own_shares:.1%} from what this run measured;"
            f" of the speed-up {errors.ratio:+.0%}, {errors.ratio_in_turn:+.0%} in one process;"
            f" the trial's loop took {trial.total / seconds:.2f} times as long",
            flush=True,
        )
        yield errors


def _range(values: list[float]) -> float:
    return max(values) - min(values)


def _spread(values: list[float]) -> float:
    return max(values) / min(values) - 1


def _text(shares: dict[str, float]) -> str:
    return ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first program's number")
    parser.add_argument("--n", type=int, default=6, help="how many programs are tried")
    parser.add_argument("--runs", type=int, default=3, help="how many trials of each program")
    parser.add_argument("--load", type=int, default=0, help="how many other processes keep busy")
    parser.add_argument(
        "--small", action="store_true", help="only call a small model, 240,000 times"
    )
    chosen = parser.parse_args()
    busy = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(chosen.load):
            process = stack.enter_context(subprocess.Popen(busy))
            stack.callback(process.kill)
        tried = [
            errors
            for seed in range(chosen.first, chosen.first + chosen.n)
            for errors in _try(seed, chosen.runs, chosen.small)
        ]
    print()
    for name, limit, text in (
        ("shares", 0.05, "all shares within 5 points"),
        ("own_shares", 0.05, "all shares within 5 points of what the same run measured"),
        ("ratio", 0.15, "the speed-up within 15 %"),
        ("ratio_in_turn", 0.15, "the speed-up within 15 % of that in one process"),
    ):
        n_close = sum(abs(getattr(each, name)) <= limit for each in tried)
        print(f"{n_close} of {len(tried)} trials have {text}")
