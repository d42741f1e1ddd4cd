"""One probe of `bench startup`: `python -m bench.probes.startup PROBE COMPETITOR`.

Prints the seconds of each figure as JSON.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Figures = dict[str, float]  # seconds, by the name of the figure


def seconds(action: Callable[[], Any]) -> float:
    """Return how many seconds an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def imports(name: str) -> Figures:
    """Import Equinox, and then eqxjit.

    Garbage collection is off, as in `timeit`. One is due soon after Equinox was imported. It takes
    ten times as long as importing eqxjit, and would be in one of the figures by chance.
    """
    gc.disable()
    equinox = seconds(lambda: __import__("equinox"))
    return {
        "equinox, then eqxjit": equinox if name == "eqx" else seconds(lambda: __import__("eqxjit"))
    }


def _figures(name: str, examples: list[Any]) -> Figures:
    """Time the first call of a function, and its first call with a new shape."""
    first, other = (cases[name].sampler() for cases in examples)
    return {"first call": first(1)[0], "new shape": other(1)[0]}


def nested(name: str) -> Figures:
    """Trace a function that calls jitted functions.

    It calls one function a hundred times, or wraps and calls fifty new functions.
    """
    import jax
    import jax.numpy as jnp

    from ..harness.competitors import FILTER_JITS
    from ..models.networks import call, small_mlp

    filter_jit = FILTER_JITS[name]
    model, x = small_mlp(), jnp.ones(4)
    inner = filter_jit(call)

    def trace(functions: Iterable[Callable[..., Any]]) -> None:
        def outer(x: jax.Array) -> jax.Array:
            for function in functions:
                x = function(model, x)
            return x

        jax.jit(outer).trace(x)

    def newly_wrapped() -> Iterator[Callable[..., Any]]:
        for _ in range(50):
            yield filter_jit(lambda model, x: model(x))

    trace([call])  # JAX does some work only in the first trace of a process
    trace([inner])
    return {
        "one function, 100 times": min(seconds(lambda: trace([inner] * 100)) for _ in range(5)),
        "50 new functions": min(seconds(lambda: trace(newly_wrapped())) for _ in range(5)),
    }


def wide(kind: str, name: str) -> Figures:
    """Time the first call on a tree of many leaves, and the first call with a new shape."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from ..harness.competitors import jitted_over
    from ..models.networks import Affine

    class Layer(eqx.Module):
        weight: jax.Array
        index: int = eqx.field(static=True)

    array, x, longer = jnp.ones(()), jnp.ones(3), jnp.ones(4)
    trees = {
        "1,000 arrays": lambda: [array] * 1_000,
        "300 Modules": lambda: [Affine(array, array, "name") for _ in range(300)],
        "20,000 floats": lambda: [float(i) for i in range(20_000)],
        "2,000 layers that differ": lambda: [Layer(array, i) for i in range(2_000)],
        "2,000 lists that differ": lambda: [[i, 0.5, True, array] for i in range(2_000)],
    }
    tree = trees[kind]()
    jax.block_until_ready((array, x + 1, longer + 1))
    examples = [{"tree": tree, "x": x} for x in (x, longer)]
    return _figures(name, jitted_over(lambda tree, x: x + 1, examples))


def main(probe: str, name: str) -> Figures:
    """Run a probe under one of the competitors."""
    if probe == "import":
        return imports(name)
    import jax

    from ..models import shape_rows

    # With synchronous dispatch a first call ends when its results are ready.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    rows = {
        "MLP": shape_rows.mlp,
        "MLP + adam": shape_rows.training,
        "transformer": shape_rows.transformer,
    }
    if probe in rows:
        return _figures(name, rows[probe](2))
    return nested(name) if probe == "nested" else wide(probe, name)


PROBES = (
    "import",
    "MLP",
    "MLP + adam",
    "transformer",
    "nested",
    "1,000 arrays",
    "300 Modules",
    "20,000 floats",
    "2,000 layers that differ",
    "2,000 lists that differ",
)

if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
