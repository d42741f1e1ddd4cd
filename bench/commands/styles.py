"""`bench styles`: what each way to call a model costs, and how many programs it compiles.

Each job is done from cold: its seconds hold the compilations. A warm call is timed afterwards, the
ways of one job in turn. The model is an MLP of 3 layers, 32 wide.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

import eqxjit

from ..harness.environment import write
from ..harness.measure import Case, Race, options
from ..harness.printing import wide_console

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CHANGES = 10
_SIZES = 64

# What does a job of so many calls; and a warm call of it.
Way = tuple[Callable[[int], None], Callable[[], Any]]

_n_compiled = 0


def main(argv: list[str]) -> int:
    """Do each job in each way, time a warm call of each, report, write."""
    parser = options("styles", __doc__, rounds=15)
    parser.add_argument("--calls", type=int, default=1000, help="calls of a job (1,000)")
    args = parser.parse_args(argv)
    # Read when the first array is made.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.monitoring.register_event_duration_secs_listener(_count)
    console = wide_console(110)

    table = Table(
        title=f"{args.calls:,} calls from cold; a warm call, best of {args.rounds} rounds"
    )
    for column in ("job", "way", "s", "programs", "µs a call"):
        table.add_column(column, justify="left" if column in ("job", "way") else "right")
    report: dict[str, dict[str, dict[str, float]]] = {}
    for job, make in JOBS.items():
        # What one job has compiled for a wrapped Module isn't there for the next.
        jax.clear_caches()
        eqxjit.filter_jit(_model()).clear_cache()  # type: ignore[attr-defined]
        ways = make()
        rows = report[job] = {}
        for name, (work, _) in ways.items():
            with _counting() as counted:
                start = time.perf_counter()
                work(args.calls)
                seconds = time.perf_counter() - start
            rows[name] = {"seconds": seconds, "programs": counted[0]}
        cases = {
            name: Case("out = call()", lambda c=call: {"call": c})
            for name, (_, call) in ways.items()
        }
        race = Race(cases)
        for _ in range(args.rounds):
            race.round()
        for name, microseconds in race.microseconds().items():
            rows[name]["call_us"] = microseconds
            row = rows[name]
            table.add_row(
                job, name, f"{row['seconds']:.2f}", f"{row['programs']}", f"{microseconds:.1f}"
            )
            job = ""
        table.add_section()
    console.print(table)
    console.print(f"written: {write('styles', {'calls': args.calls, 'jobs': report}, args.output)}")
    return 0


def _count(event: str, *_: Any, **__: Any) -> None:
    global _n_compiled
    _n_compiled += event == _COMPILED


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Yield a list that holds the number of compilations within it, at its end."""
    counted = [0]
    before = _n_compiled
    yield counted
    counted[0] = _n_compiled - before


def _model(seed: int = 0) -> eqx.nn.MLP:
    return eqx.nn.MLP(4, 1, 32, 2, key=jax.random.key(seed))


def _training() -> dict[str, Way]:
    optimiser = optax.adam(1e-2)
    x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(32, 4)
    model = _model()

    def step(x: Any, params: Any, opt_state: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            model = params.unpack() if isinstance(params, eqxjit.Packed) else params
            return jnp.mean((jax.vmap(model)(x) - 1) ** 2)

        gradients = eqx.filter_grad(loss_of)(params)
        updates, opt_state = optimiser.update(gradients, opt_state)
        return eqx.apply_updates(params, updates), opt_state

    def way(filter_jit: Any, params: Any) -> Way:
        step_of = filter_jit(step, donate="all-except-first")
        # Donated: none of the arrays may be another way's.
        params = jax.tree.map(lambda leaf: jnp.array(leaf) if eqx.is_array(leaf) else leaf, params)
        carried = [params, optimiser.init(eqx.filter(params, eqx.is_inexact_array))]

        def call() -> None:
            carried[:] = step_of(x, *carried)

        return lambda n: _repeat(call, n), call

    return {
        "equinox.filter_jit": way(eqx.filter_jit, model),
        "filter_jit": way(eqxjit.filter_jit, model),
        "pack": way(eqxjit.filter_jit, eqxjit.pack(model)),
    }


def _changing() -> dict[str, Way]:
    """The weights change ten times; each way is told of it in its own manner."""
    models = [_model(seed) for seed in range(_CHANGES)]
    packed = [eqxjit.pack(model) for model in models]
    x = np.ones(4, np.float32)

    def anew(wrap: Any) -> Way:
        def work(n: int) -> None:
            for model in models:
                predict = wrap(model)
                _repeat(lambda predict=predict: predict(x), n // _CHANGES)

        predict = wrap(models[0])
        return work, lambda: predict(x)

    def passed(predict: Any, models: Any) -> Way:
        def work(n: int) -> None:
            for model in models:
                _repeat(lambda model=model: predict(model, x), n // _CHANGES)

        return work, lambda: predict(models[0], x)

    return {
        "equinox.filter_jit(model)": anew(eqx.filter_jit),
        "filter_jit(model)": anew(eqxjit.filter_jit),
        "freeze(model)": anew(eqxjit.freeze),
        "the model as an argument": passed(eqxjit.filter_jit(lambda model, x: model(x)), models),
        "pack, as an argument": passed(
            eqxjit.filter_jit(lambda model, x: model.unpack()(x)), packed
        ),
    }


def _fixed() -> dict[str, Way]:
    model, x = _model(), np.ones(4, np.float32)

    def way(predict: Any) -> Way:
        return lambda n: _repeat(lambda: predict(x), n), lambda: predict(x)

    return {
        "equinox.filter_jit(model)": way(eqx.filter_jit(model)),
        "filter_jit(model)": way(eqxjit.filter_jit(model)),
        "freeze(model)": way(eqxjit.freeze(model)),
    }


def _shapes() -> dict[str, Way]:
    """Batches of 1 to 64 examples, in turn."""
    model = _model()
    batches = [np.ones((size, 4), np.float32) for size in range(1, _SIZES + 1)]

    def way(filter_jit: Any, pad: bool) -> Way:
        jitted = filter_jit(lambda model, x: jax.vmap(model)(x))

        def call(x: Any) -> Any:
            if not pad:
                return jitted(model, x)
            padded = np.zeros((1 << (len(x) - 1).bit_length(), 4), np.float32)
            padded[: len(x)] = x
            return np.asarray(jitted(model, padded))[: len(x)]

        def work(n: int) -> None:
            for i in range(n):
                jax.block_until_ready(call(batches[i % _SIZES]))

        return work, lambda: call(batches[-1])

    return {
        "equinox.filter_jit": way(eqx.filter_jit, False),
        "filter_jit": way(eqxjit.filter_jit, False),
        "filter_jit, padded to powers of two": way(eqxjit.filter_jit, True),
    }


def _repeat(call: Callable[[], Any], times: int) -> None:
    out = None
    for _ in range(times):
        out = call()
    jax.block_until_ready(out)


JOBS = {
    "training step, adam": _training,
    "inference, fixed weights": _fixed,
    "inference, weights change ten times": _changing,
    "inference, 64 batch sizes": _shapes,
}
