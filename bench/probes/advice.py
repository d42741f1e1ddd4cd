"""One way of `bench advice`, in this process: prints the median of a statement, in microseconds."""

import json
import sys
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

import eqxjit

from ..harness.measure import Case
from ..models.inference import MODELS, FixedModel


def names(fixed: FixedModel) -> dict[str, object]:
    """What a statement may use: the frozen model, its input in several forms, and helpers."""
    given = np.array(fixed.x)
    batch = np.stack([given] * 32)
    return {
        "f": eqxjit.freeze(fixed.model),
        "f_batch": eqxjit.freeze(jax.vmap(fixed.model)),
        "x": fixed.x,
        "given": given,
        "request": given.tolist(),
        "buffer": np.empty_like(given),
        "batch": batch,
        "rows": list(batch),
        "asarray": jnp.asarray,
        "to_numpy": np.asarray,
        "array": np.array,
        "float32": np.float32,
    }


def main() -> None:
    """`python -m bench.probes.advice MODEL CALLS WAY`, the way as JSON."""
    model, calls, way = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    for name, value in way["config"].items():
        jax.config.update(name, value)
    sample = Case(way["statement"], lambda: names(MODELS[model]())).sampler()
    print(median(sample(calls)[calls // 10 :]) * 1e6)


if __name__ == "__main__":
    main()
