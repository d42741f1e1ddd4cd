"""Data-parallel training in two processes, whose weights are compared with those of one process.

Each process gets its share of every batch of the digits, and gloo adds up the gradients.
"""

import argparse
import multiprocessing
import os
import socket
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import eqxjit

from ..models.digits import BATCH, accuracy, digits, loss
from ..models.networks import training_step

PROCESSES = 2
TOLERANCE = 1e-5
TIMEOUT = 300  # seconds, for each run


def train(epochs: int) -> list[np.ndarray]:
    """Train, and return the final weights. The code is the same for any number of processes."""

    def say(text: str) -> None:
        # Printed with its newline in one piece, because all processes print to the same terminal.
        print(f"[process {jax.process_index()}] {text}\n", end="", flush=True)

    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    replicated, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ([], ["batch"]))
    (images, labels), test = digits()
    optimizer = optax.adam(2e-3)

    @eqxjit.filter_jit
    def start():
        model = eqx.nn.MLP(64, 10, 32, depth=2, key=jr.key(0))
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return eqx.filter_shard((model, state), replicated)

    step = eqxjit.filter_jit(training_step(optimizer, loss), donate="all")

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
            model, state, value = step(model, state, *share_of(rows))
        say(f"epoch {epoch + 1}: loss {float(value):.4f}")
    # Each process has all weights, because they are replicated.
    weights, static = eqx.partition(model, eqx.is_array)
    weights = jax.tree.map(np.asarray, weights)
    correct = accuracy(eqx.combine(weights, static), test)
    assert isinstance(step, eqxjit.types.JitFunction)
    say(f"{n_steps} steps, {step.cache_info()}, test accuracy {correct:.1%}")
    return jax.tree.leaves(weights)


def work(process: int, processes: int, devices: int, port: int, epochs: int) -> list[np.ndarray]:
    """Train in one process of a run, and return its weights."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        address = f"127.0.0.1:{port}"
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, processes, process, coordinator_bind_address=address)
    try:
        return train(epochs)
    except BaseException:
        traceback.print_exc()
        # Python's own exit would wait for the other processes, which wait for this one.
        os._exit(1)


def launch(processes: int, devices: int, epochs: int) -> list[list[np.ndarray]]:
    """Train in this many processes with this many devices each, and return the weights of each."""
    print(f"{processes} process(es), {devices} device(s) each:", flush=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(work, i, processes, devices, port, epochs) for i in range(processes)]
        # If a process dies, the pool ends the others.
        return [run.result(TIMEOUT) for run in runs]


def main() -> int:
    """Train in two processes, on two devices of one process, and on one device. Compare weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    runs = [(PROCESSES, 1), (1, PROCESSES), (1, 1)]
    first, *others = [weights for run in runs for weights in launch(*run, epochs)]
    away = [
        max(float(np.abs(a - b).max()) for a, b in zip(first, weights, strict=True))
        for weights in others
    ]
    words = "largest difference: other process {:.1e}, two devices {:.1e}, one device {:.1e}"
    print(words.format(*away))
    # On one device the gradients are summed in a different order, so their last bits may differ.
    return 0 if away[:2] == [0, 0] and away[2] <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
