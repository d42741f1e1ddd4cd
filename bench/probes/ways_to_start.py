"""One way to get two functions ready: `python -m bench.probes.ways_to_start MODEL WAY FOLDER`.

The functions are a prediction and the gradient of a loss. Prints JSON: the seconds until both have
been called once, and the seconds of each phase.
"""

import concurrent.futures
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqxjit

from ..models.networks import Transformer, small_conv_net

MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "MLP of 16 layers": lambda: (
        eqx.nn.MLP(16, 16, 64, depth=15, key=jr.key(0)),
        jnp.ones((32, 16)),
    ),
    "CNN": lambda: (small_conv_net(key=jr.key(0)), jnp.ones((8, 1, 8, 8))),
    "transformer of 3 blocks": lambda: (Transformer(depth=3, key=jr.key(0)), jnp.ones((4, 8, 16))),
}


def predict(model: Any, x: Any) -> Any:
    """Return the outputs of a batch."""
    return jax.vmap(model)(x)


def gradient(model: Any, x: Any) -> Any:
    """Return the gradient of a loss, as a list, because a saved function can't return Modules."""
    return jax.tree.leaves(eqx.filter_grad(lambda model: jnp.mean(predict(model, x) ** 2))(model))


def main(name: str, way: str, folder: Path) -> dict[str, float]:
    """Return the seconds until both functions have been called, and of each phase."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    model, x = MODELS[name]()
    jax.block_until_ready(eqx.filter((model, x), eqx.is_array))
    functions = {"predict": predict, "gradient": gradient}
    paths = {name: folder / f"{name}.eqxjit" for name in functions}
    # The way "loaded" needs these files. Saving isn't timed.
    if way == "save":
        for name, function in functions.items():
            eqxjit.freeze(function, model).save(paths[name], x)
        return {}
    filter_jit = eqx.filter_jit if way == "equinox" else eqxjit.filter_jit

    with contextlib.redirect_stdout(io.StringIO()), eqxjit.compile_report() as report:
        start = time.perf_counter()
        if way == "loaded":
            for path in paths.values():
                jax.block_until_ready(eqxjit.load(path)(x))
        else:
            jitted: list[Any] = [filter_jit(function) for function in functions.values()]
            if way == "side by side":
                with concurrent.futures.ThreadPoolExecutor() as pool:
                    list(pool.map(lambda f: f.compile(model, x), jitted))
            for f in jitted:
                jax.block_until_ready(f(model, x))
        seconds = time.perf_counter() - start
    phases = {
        phase: sum([getattr(row.seconds, phase) for row in report.rows])
        for phase in ("tracing", "lowering", "compiling")
    }
    return {"until both are called": seconds, **phases}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
