"""`python -m bench.probes.trial`: compares the shares that a trial prints with the true shares.

Each script has a loop whose parts measure their own time. It runs once without `--trial`, for the
true shares, and once with it.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile

_SHARES = """
import json, sys, time
import equinox as eqx, jax, jax.numpy as jnp

milliseconds, n = json.loads(sys.argv[1]), int(sys.argv[2])

@eqx.filter_jit
def call(model, x):
    return jax.vmap(model)(x)

@eqx.filter_jit
def slow(x, times):
    return jax.lax.fori_loop(0, times, lambda i, x: x @ x / 300, x).sum()

model, x = eqx.nn.MLP(4, 2, 8, 20, key=jax.random.key(0)), jnp.ones((8, 4))
big = jnp.ones((300, 300))

def until(kind, do):
    begun = time.perf_counter()
    while time.perf_counter() - begun < milliseconds[kind] / 1e3:
        do()

def eager():
    jnp.sin(x)
    x + x
    jax.random.split(key)

def python():
    sum([i * i for i in range(100)])

def calls():
    call(model, x)

def move():
    jax.device_put(numbers)

key = jax.random.key(0)
numbers = __import__("numpy").ones(1000, "float32")
eager(); move(); calls(); float(slow(big, jnp.int32(1)))
begun, times = time.perf_counter(), jnp.int32(20)
for _ in range(5):
    float(slow(big, times))
seconds = (time.perf_counter() - begun) / 5
times = jnp.int32(max(1, 20 * milliseconds["waiting"] / 1e3 / seconds))
spent = dict.fromkeys(milliseconds, 0.0)

def loop():
    for _ in range(n):
        start = time.perf_counter()
        result = slow(big, times)
        spent["jitted calls"] += time.perf_counter() - start
        start = time.perf_counter()
        WAIT
        spent["waiting"] += time.perf_counter() - start
        for kind, do in zip(("operations outside jit", "Python", "jitted calls", "moving data"),
                            (eager, python, calls, move)):
            start = time.perf_counter()
            until(kind, do)
            spent[kind] += time.perf_counter() - start

loop()
print(json.dumps({kind: part / sum(spent.values()) for kind, part in spent.items()}))
"""

_KINDS = "operations outside jit", "waiting", "Python", "jitted calls", "moving data"
_CASES = [
    ((3, 3, 2, 2, 0), "float(result)"),
    ((6, 1, 0.5, 2.5, 0), "jax.block_until_ready(result)"),
    ((0.5, 6, 2, 1.5, 0), "result.block_until_ready()"),
    ((1, 2, 6, 1, 0), "result.item()"),
    ((1, 2, 1, 6, 0), "np.asarray(result)"),
    ((2, 0.5, 2, 2, 3.5), "f'{result}'"),
]
_NAMES = {
    "operations of JAX outside of any jit": "operations outside jit",
    "calls of jitted functions": "jitted calls",
    "waiting for results": "waiting",
}


def _run(script: str, *arguments: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        before = [each for each in arguments if each.startswith("-")]
        after = [each for each in arguments if not each.startswith("-")]
        command = [sys.executable, *(["-m", "eqxjit"] * bool(before)), *before, file.name, *after]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _printed(output: str) -> dict[str | None, float]:
    rows = re.findall(r"(?m)^ +(\d+)%  (\S.*?)  ", output)
    return {_NAMES.get(kind, kind): int(share) / 100 for share, kind in rows}


def shares(n: int, options: list[str]) -> None:
    """Print the true shares of each script, the shares that its trial prints, and the errors."""
    for milliseconds, wait in _CASES:
        script = _SHARES.replace("WAIT", wait).replace("import json,", "import numpy as np, json,")
        arguments = json.dumps(dict(zip(_KINDS, milliseconds, strict=True))), str(n)
        alone = json.loads(_run(script, "--explain", *arguments).splitlines()[-1])
        output = _run(script, "--trial", *options, *arguments)
        within = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        found = _printed(output)
        errors = {kind: found.get(kind, 0.0) - share for kind, share in alone.items()}
        print(f"{wait}: largest error {max(map(abs, errors.values())):.1%}")
        for kind, share in alone.items():
            line = f"  {kind:25} {share:6.1%} without trial, {within[kind]:6.1%} in the trial's run"
            print(f"{line}, printed {found.get(kind, 0.0):.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--no-compare", action="store_true")
    chosen = parser.parse_args()
    shares(chosen.n, ["--no-compare"] * chosen.no_compare)
