"""Data-parallel training in two processes, which end with the weights of a run in one.

Each process works on its share of every batch of the digits; gloo adds up the gradients. A process
that fails ends the run with an error that names it: JAX alone lets the others wait, for minutes.
"""

import argparse
import collections
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import eqxjit

from ..models.networks import training_step

PROCESSES = 2
TOLERANCE = 1e-5
HEARTBEAT_SECONDS = 10  # by which a process that no longer answers is noticed


# --- In each process --------------------------------------------------------------------------


def train(epochs: int, fail_at: int) -> list[np.ndarray]:
    """The training script, the same for any number of processes and devices: the final weights."""
    # Only here: the launcher does without scikit-learn, which takes its time to import.
    from ..models.digits import BATCH, accuracy, digits, loss

    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    replicated, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ([], ["batch"]))
    (images, labels), test = digits()
    optimiser = optax.adam(2e-3)

    @eqxjit.filter_jit
    def start():
        model = eqx.nn.MLP(64, 10, 32, depth=2, key=jr.key(0))
        state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        return eqx.filter_shard((model, state), replicated)

    step = eqxjit.filter_jit(training_step(optimiser, loss), donate="all")

    def share_of(rows: np.ndarray) -> list[jax.Array]:
        own = np.split(rows, jax.process_count())[jax.process_index()]
        return [
            jax.make_array_from_process_local_data(split, data[own]) for data in (images, labels)
        ]

    model, state = start()
    rng = np.random.default_rng(0)
    n_steps, value = 0, np.nan
    for epoch in range(epochs):
        order = rng.permutation(len(labels))[: len(labels) // BATCH * BATCH]
        for rows in order.reshape(-1, BATCH):
            n_steps += 1
            if n_steps == fail_at and jax.process_index() == PROCESSES - 1:
                raise RuntimeError(f"asked to fail at step {n_steps}")
            model, state, value = step(model, state, *share_of(rows))
        print(f"epoch {epoch + 1}: loss {float(value):.4f}", flush=True)
    # The whole of them: they are replicated.
    weights, static = eqx.partition(model, eqx.is_array)
    weights = jax.tree.map(np.asarray, weights)
    print(f"{n_steps} steps, {step.cache_info()}")
    print(f"test accuracy {accuracy(eqx.combine(weights, static), test):.1%}")
    return jax.tree.leaves(weights)


def work(args: argparse.Namespace) -> None:
    """One process of a run, from its start to its end."""
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    try:
        jax.config.update("jax_num_cpu_devices", args.devices)
        if args.processes > 1:
            address = f"127.0.0.1:{args.port}"
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(
                address,
                args.processes,
                args.process,
                coordinator_bind_address=address,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            )
        np.savez(args.weights, *train(args.epochs, args.fail_at))
    except BaseException:
        traceback.print_exc()
        # Python's own exit would wait for the other processes, which wait for this one.
        os._exit(1)


def _end_with_the_launcher() -> None:
    # However the launcher ends, its end of the pipe is closed then.
    sys.stdin.read()
    os._exit(1)


# --- The launcher -----------------------------------------------------------------------------


def launch(processes: int, devices: int, args: argparse.Namespace) -> list[list[np.ndarray]]:
    """Trains in so many processes, each with so many devices: the weights that each ends with."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{process}.npz") for process in range(processes)]
        port = _free_port()
        commands = [
            f"--process={process} --processes={processes} --devices={devices} --port={port} "
            f"--epochs={args.epochs} --fail-at={args.fail_at} --weights={file}".split()
            for process, file in enumerate(files)
        ]
        _run(commands, args.timeout)
        weights = []
        for file in files:
            with np.load(file) as arrays:
                weights.append([arrays[name] for name in arrays])
        return weights


def _run(commands: list[list[str]], timeout: float) -> None:
    """Runs the processes of a run, until all are done or one has failed."""
    module = [sys.executable, "-m", "bench.examples.data_parallel"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(
            module + command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for command in commands
    ]
    last_lines = [collections.deque[str](maxlen=30) for _ in children]

    def follow(process: int) -> int:
        """Passes on what a process prints, until it ends: its exit status."""
        for line in children[process].stdout or ():
            last_lines[process].append(line)
            print(f"[process {process}] {line}", end="", flush=True)
        return children[process].wait()

    with ThreadPoolExecutor(len(children)) as pool:
        following = {pool.submit(follow, process): process for process in range(len(children))}
        try:
            # The first to end is the cause: the others fail for want of it.
            for ended in as_completed(following, timeout):
                if ended.result():
                    process = following[ended]
                    raise SystemExit(
                        f"process {process} of {len(children)} {_ending(ended.result())}, and the "
                        f"run with it; the last that it printed:\n{''.join(last_lines[process])}"
                    )
        except TimeoutError:
            running = [str(process) for ended, process in following.items() if not ended.done()]
            raise SystemExit(
                f"after {timeout:g} s (`--timeout`) still running: process {', '.join(running)} "
                f"of {len(children)}"
            ) from None
        finally:
            for child in children:
                # Not SIGTERM, which JAX takes for a preemption and survives.
                child.kill()


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name} (exit status {status})"
    return f"failed with exit status {status}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> int:
    """Trains in two processes, and in one with two devices and with one; compares the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300, help="seconds, for each run")
    parser.add_argument(
        "--fail-at", type=int, default=0, help="step at which the last process is to fail"
    )
    # What the launcher tells a process.
    for name in ("process", "processes", "devices", "port"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        work(args)
        return 0

    print(f"{PROCESSES} processes, a device each:", flush=True)
    first, *others = launch(PROCESSES, 1, args)
    print(f"one process, {PROCESSES} devices:", flush=True)
    others += launch(1, PROCESSES, args)
    print("one process, one device:", flush=True)
    [single] = launch(1, 1, args)

    equal = all(_same_bits(first, other) for other in others)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(first, single, strict=True))
    close = difference <= TOLERANCE
    print(f"weights of both processes, and of one with {PROCESSES} devices: ", end="")
    print("equal bit for bit" if equal else "they differ")
    # It adds up the gradients of a batch in another order.
    print(f"of one process with one device: {difference:.1e} away, at most {TOLERANCE:.0e}")
    return 0 if equal and close else 1


def _same_bits(these: list[np.ndarray], those: list[np.ndarray]) -> bool:
    return [a.tobytes() for a in these] == [b.tobytes() for b in those]


if __name__ == "__main__":
    sys.exit(main())
