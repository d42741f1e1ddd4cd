"""`f.compile(*examples)`: after it, a first call in any thread traces and compiles nothing."""

import collections
import concurrent.futures
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import assert_same
from tests.support.sides import CALLS

KEY = jax.random.key(0)
X = jnp.arange(1.0, 5.0)

_counts: collections.Counter[str] = collections.Counter()


def _count(event, *_, **__):
    if event.startswith("/jax/core/compile/"):
        _counts[event] += 1


@pytest.fixture(autouse=True, scope="module")
def counting():
    """Count how often JAX traces, lowers and compiles, by JAX's own events."""
    # It stays registered, because not every release of JAX can unregister a listener.
    jax.monitoring.register_event_duration_secs_listener(_count)


def counted(action):
    """Return what an action returns, and how often JAX traced, lowered or compiled meanwhile."""
    before = _counts.total()
    result = action()
    return result, _counts.total() - before


def struct(array, **changes):
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(lambda: array)
    weak_type = jax.typeof(array).weak_type
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak_type, **changes)


class Model(eqx.Module):
    weight: jax.Array
    mode: str = eqx.field(static=True, default="times")

    def __call__(self, x, n=1):
        return self.weight * x * n

    @eqxjit.filter_jit
    def step(self, x, *, n=1):
        return {"y": self.weight * x * n, "mode": self.mode}


def step(model, x, n=1):
    return jax.tree.map(lambda leaf: leaf + 1, eqx.filter(model, eqx.is_array)), model(x) * n


CASES = {
    "a function": (lambda: eqxjit.filter_jit(step), (Model(X), X), {}),
    "a Module": (lambda: eqxjit.filter_jit(Model(X)), (X, 3), {}),
    "a method": (lambda: Model(X).step, (X,), {"n": 2}),
    "donating": (lambda: eqxjit.filter_jit(step, donate="all"), (Model(X), X), {}),
    "that can raise": (
        lambda: eqxjit.filter_jit(lambda x: eqx.error_if(x, x.sum() < 0, "negative")), (X,), {},
    ),
    "a weak type": (lambda: eqxjit.filter_jit(lambda x: x * 2), (jnp.asarray(2.0),), {}),
    "a key": (lambda: eqxjit.filter_jit(jax.random.normal), (KEY,), {}),
    "no arrays": (lambda: eqxjit.filter_jit(lambda n: jnp.ones(n)), (3,), {}),
    "frozen": (lambda: eqxjit.freeze(Model(X)), (X,), {"n": 4}),
}  # fmt: skip


def copied(tree):
    """Return a copy of the arguments, because a call deletes donated arrays."""
    return jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, tree)


@pytest.mark.parametrize("as_structs", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_first_call_compiles_nothing(name, as_structs):
    make, args, kwargs = CASES[name]
    f = make()
    f.clear_cache()
    arguments = [copied((args, kwargs)) for _ in range(CALLS)]
    examples = copied((args, kwargs))
    if as_structs:
        examples = jax.tree.map(lambda leaf: struct(leaf) if eqx.is_array(leaf) else leaf, examples)
    program, n = counted(lambda: f.compile(*examples[0], **examples[1]))
    assert n >= 2  # It was at least lowered and compiled.
    assert program.seconds > 0
    assert program.executable_bytes is None or program.executable_bytes > 0
    expected = None
    for args, kwargs in arguments:
        out, n = counted(lambda: jax.block_until_ready(f(*args, **kwargs)))  # noqa: B023
        assert n == 0
        expected = out if expected is None else expected
        assert_same(out, expected)
    assert f.cache_info()[:2] == (1, 1)
    again = f.compile(*examples[0], **examples[1])
    assert again.seconds == 0


def test_from_another_wrapper_thread_and_call_site():
    eqxjit.filter_jit(Model(X)).compile(struct(X))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        out, n = counted(pool.submit(eqxjit.filter_jit(Model(X + 1)), X).result)
    assert n == 0
    np.testing.assert_array_equal(out, (X + 1) * X)


def test_arrays_of_numpy_or_that_were_put_on_a_device():
    f = eqxjit.filter_jit(lambda x, y: x + y)
    placed = jax.device_put(X, jax.devices()[0])
    f.compile(struct(X, sharding=placed.sharding), struct(X))
    for y in (X, np.asarray(X)):
        out, n = counted(lambda: f(placed, y))  # noqa: B023
        assert n == 0
        assert_same(out, X + X)
    assert f.cache_info()[:2] == (1, 1)


def test_a_model_that_was_never_made():
    model = eqx.filter_eval_shape(eqx.nn.Linear, 4, 3, key=KEY)
    f = eqxjit.filter_jit(lambda model, x: model(x))
    f.compile(model, struct(X))
    real = eqx.nn.Linear(4, 3, key=KEY)
    for _ in range(CALLS):
        out, n = counted(lambda: f(real, X))
        assert n == 0
        np.testing.assert_allclose(out, real(X), rtol=1e-5)
    assert f.cache_info().traces == 1


def test_what_differs_is_traced():
    f = eqxjit.filter_jit(lambda x, n: x * n)
    f.compile(struct(X), 2)
    for args in ((X, 3), (X[:2], 2), (X.astype(int), 2), (X, 2.0)):
        assert counted(lambda: f(*args))[1] > 0  # noqa: B023
    assert f.cache_info().traces == 5
    assert f.traces()[2].reason == "shape: `x` was float32[4], is float32[2]"


def test_several_at_once():
    """The threads trace at the same time, because each waits for the other within its trace."""
    together = threading.Barrier(2, timeout=60)

    def train(model, x):
        together.wait()
        return model(x).sum()

    def evaluate(model, x):
        together.wait()
        return model(x) > 0

    functions = [eqxjit.filter_jit(train), eqxjit.filter_jit(evaluate)]
    examples = Model(X), struct(X)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda f: f.compile(*examples), functions))
    assert min(program.seconds for program in programs) > 0
    assert counted(lambda: [f(Model(X), X) for f in functions])[1] == 0


def test_compiling_serialises_nothing_until_the_size_is_read(monkeypatch):
    """Serialising copies the constants of an executable, which may take much memory."""
    find, n_found = jax.stages.Compiled.runtime_executable, 0

    def runtime_executable(compiled):
        nonlocal n_found
        n_found += 1
        return find(compiled)

    monkeypatch.setattr(jax.stages.Compiled, "runtime_executable", runtime_executable)
    f = eqxjit.filter_jit(lambda x: x + 1)
    cost = f.compile(jnp.ones(3))
    assert cost.seconds > 0
    assert n_found == 0
    assert cost.executable_bytes is None or cost.executable_bytes > 0
    assert n_found > 0
