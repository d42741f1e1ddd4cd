"""What `bench startup` runs in fresh processes: `python -m bench.probes.startup PROBE FILTER_JIT`.

Each probe prints its figures, seconds by name, as JSON.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

Figures = dict[str, float]

IMPORT = "equinox, then eqxjit"


def seconds(action: Callable[[], Any]) -> float:
    """How long the action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def imports(name: str) -> Figures:
    """Importing Equinox; and eqxjit, where Equinox is imported already.

    Without garbage collection, as `timeit` measures: importing Equinox leaves one about to come,
    ten times as long as our import, and chance would decide in whose figure it falls.
    """
    gc.disable()
    equinox = seconds(lambda: __import__("equinox"))
    return {IMPORT: equinox if name == "eqx" else seconds(lambda: __import__("eqxjit"))}


def first_calls(workload: str, name: str) -> Figures:
    """The first call, traced and compiled, and the first with another batch."""
    import equinox as eqx
    import jax.numpy as jnp
    import jax.random as jr
    import optax

    from ..models.networks import Transformer, batched, call, training_step

    fun, width, model = batched, 4, eqx.nn.MLP(4, 4, 32, depth=2, key=jr.key(0))
    if workload == "transformer":
        fun, width, model = call, 16, Transformer(key=jr.key(0))
    examples = [{"model": model, "x": jnp.ones((size, width))} for size in (8, 9)]
    if workload == "MLP + adam":
        optimiser = optax.adam(1e-3)
        fun, state = training_step(optimiser), optimiser.init(eqx.filter(model, eqx.is_array))
        examples = [{**example, "opt_state": state, "y": example["x"]} for example in examples]
    return _figures(name, fun, examples)


def _figures(name: str, fun: Callable[..., Any], examples: list[dict[str, Any]]) -> Figures:
    """A call with the first of two examples, then one with the other, whose shape is new."""
    import equinox as eqx
    import jax

    from ..harness.competitors import jitted_over

    # Not to be waited for in a call.
    jax.block_until_ready(eqx.filter(examples, eqx.is_array))
    first, other = (cases[name].sampler() for cases in jitted_over(fun, examples))
    return {"first call": first(1)[0], "new shape": other(1)[0]}


def nested(name: str) -> Figures:
    """Tracing a function that calls jitted functions: one a hundred times; fifty, each wrapped anew
    and called once.
    """
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import jax.random as jr

    from ..harness.competitors import FILTER_JITS
    from ..models.networks import call

    filter_jit = FILTER_JITS[name]
    model, x = eqx.nn.MLP(4, 4, 32, depth=2, key=jr.key(0)), jnp.ones(4)
    inner = filter_jit(call)

    def trace(functions: Iterable[Callable[..., Any]]) -> None:
        def outer(x: jax.Array) -> jax.Array:
            for function in functions:
                x = function(model, x)
            return x

        jax.jit(outer).trace(x)

    def wrapped_anew() -> Iterator[Callable[..., Any]]:
        for _ in range(50):
            yield filter_jit(lambda model, x: model(x))

    trace([call])  # what JAX does once
    trace([inner])
    return {
        "one function, 100 times": min(seconds(lambda: trace([inner] * 100)) for _ in range(5)),
        "50 new functions": min(seconds(lambda: trace(wrapped_anew())) for _ in range(5)),
    }


def wide(kind: str, name: str) -> Figures:
    """A tree of many leaves: the first call, and the first with another shape."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    class Layer(eqx.Module):
        weight: jax.Array
        index: int = eqx.field(static=True)

    class Affine(eqx.Module):
        weight: jax.Array
        bias: jax.Array

    array, x, longer = jnp.ones(()), jnp.ones(3), jnp.ones(4)
    trees = {
        "arrays": lambda: [array] * 1_000,
        "modules": lambda: [Affine(array, array) for _ in range(300)],
        "floats": lambda: [float(i) for i in range(20_000)],
        "layers": lambda: [Layer(array, i) for i in range(2_000)],
        "lists": lambda: [[i, 0.5, True, array] for i in range(2_000)],
    }
    tree = trees[kind]()
    jax.block_until_ready((array, x, longer, x + 1, longer + 1))
    return _figures(name, lambda tree, x: x + 1, [{"tree": tree, "x": x} for x in (x, longer)])


PROBES: dict[str, Callable[[str], Figures]] = {
    "import": imports,
    "MLP": partial(first_calls, "MLP"),
    "MLP + adam": partial(first_calls, "MLP + adam"),
    "transformer": partial(first_calls, "transformer"),
    "nested": nested,
    "1,000 arrays": partial(wide, "arrays"),
    "300 Modules": partial(wide, "modules"),
    "20,000 floats": partial(wide, "floats"),
    "2,000 layers that differ": partial(wide, "layers"),
    "2,000 lists that differ": partial(wide, "lists"),
}

if __name__ == "__main__":
    if sys.argv[1] != "import":
        import jax

        # So that a first call ends with its results.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    print(json.dumps(PROBES[sys.argv[1]](sys.argv[2])))
