"""Donation: whose buffers are deleted, which output reuses which, and when JAX warns of it."""

import pickle
import threading
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import assert_same
from tests.support.sides import CALLS, both

DONATE = ["all", "all-except-first", "warn", "warn-except-first", "none"]

ignore_warning = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


class Layer(eqx.Module):
    weight: Any
    bias: Any = None
    name: str = eqx.field(static=True, default="layer")

    def __call__(self, x):
        return self.weight + x

    def step(self, x):
        return Layer(self.weight + x, self.bias)


def array(value=0.0, shape=(16,), dtype=jnp.float32):
    """Return an array with a new buffer of its own."""
    return jax.block_until_ready(jnp.full(shape, value, dtype) + jnp.ones((), dtype))


WORKLOADS = {
    "swapped": (lambda a, b: (b * 2, a + 1), lambda: ((array(), array(1)), {})),
    "by keyword": (lambda a, b: (a + 1, b * 2), lambda: ((), {"b": array(1), "a": array()})),
    "unpacked": (
        lambda *args, **kwargs: jax.tree.map(lambda leaf: leaf + 1, (args, kwargs)),
        lambda: ((array(), array(1), array(2)), {"z": array(3), "a": array(4)}),
    ),
    "one output": (lambda a, b, c: a + b + c, lambda: ((array(), array(1), array(2)), {})),
    "identity": (lambda a, b: (b, a), lambda: ((array(), array(1)), {})),
    "trees": (
        lambda model, state, x: (jax.tree.map(lambda w: w + x, model), [state["s"] * 2]),
        lambda: ((Layer(array(), array(1)), {"s": array(2), "t": array(3, (4,))}, array(4)), {}),
    ),
    "several dtypes": (
        lambda a, b, c: (c + 1, b + 1, a + 1),
        lambda: ((array(), array(1, dtype=jnp.int32), array(1, (16,), jnp.bfloat16)), {}),
    ),
    "NumPy": (lambda a, b: (a + 1, b + 1), lambda: ((np.ones(16, np.float32), array()), {})),
    "keys": (
        lambda key, a: (jax.vmap(jax.random.fold_in, (0, None))(key, 1), a + 1),
        lambda: ((jax.random.split(jax.random.key(0), 4), array()), {}),
    ),
}


def pointer(leaf):
    """Return the address of an array's data."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return leaf.unsafe_buffer_pointer()


def arrays(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def effects(f, args, kwargs):
    """Return a call's result, the arrays that it deletes, and the outputs that reuse a buffer."""
    inputs = arrays((args, kwargs))
    before = {pointer(leaf): i for i, leaf in enumerate(inputs)}
    out = jax.block_until_ready(f(*args, **kwargs))
    reused = [before.get(pointer(leaf)) for leaf in arrays(out)]
    return jax.device_get(out), [leaf.is_deleted() for leaf in inputs], reused


@pytest.mark.parametrize("donate", ["all", "all-except-first", "none"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_what_is_deleted_and_what_is_reused(name, donate):
    fun, make = WORKLOADS[name]
    ours, upstream = eqxjit.filter_jit(fun, donate=donate), eqx.filter_jit(fun, donate=donate)
    for _ in range(CALLS):
        out, deleted, reused = effects(ours, *make())
        expected, *others = effects(upstream, *make())
        assert_same(out, expected)
        assert [deleted, reused] == others
    assert donate != "none" or not any(deleted)


# --- The arrays of the function ---------------------------------------------------------------


@both
@pytest.mark.parametrize("donate", DONATE)
def test_the_arrays_of_the_function_are_donated(filter_jit, donate):
    """This holds for all options but `"none"`. The function can't be called again then."""
    model, x, y = Layer(array()), array(1), array(2)
    f = filter_jit(
        eqx.Partial(lambda model, x, y: (model.weight + 1, x + 1, y + 1), model), donate=donate
    )
    f(x, y)
    assert model.weight.is_deleted() == y.is_deleted() == (donate != "none")
    assert x.is_deleted() == (donate in ("all", "warn"))
    for _ in range(CALLS):
        if donate == "none":
            f(x, y)
        else:
            with pytest.raises(Exception, match=r"deleted|donated"):
                f(array(1), array(2))


@both
@ignore_warning
def test_a_method_with_all_except_first(filter_jit):
    """`self` is the first argument."""

    class Model(eqx.Module):
        weight: Any

        @filter_jit(donate="all-except-first")
        def step(self, x):
            return self.weight + x

        @filter_jit(donate="all")
        def consume(self, x):
            return Model(self.weight + x)

    model = Model(array())
    for i in range(CALLS):
        x = array(i)
        model.step(x)
        assert x.is_deleted()
        assert not model.weight.is_deleted()
        x, old = array(i), model
        model = model.consume(x)
        assert old.weight.is_deleted()


# --- Warnings ---------------------------------------------------------------------------------


def warned(f, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f(*args)
    return sum("donated buffers were not usable" in str(warning.message) for warning in caught)


@both
@pytest.mark.parametrize("donate", DONATE)
def test_the_warning(filter_jit, donate):
    """The warning is shown once per compilation for `"warn..."`, and hidden for `"all..."`."""
    f = filter_jit(lambda a, b: a.sum() + b.sum(), donate=donate)
    shown = int(donate.startswith("warn"))
    for shape in [(16,), (2, 2)]:
        for clear in (False, True):
            if clear:
                jax.clear_caches()
            found = [warned(f, array(shape=shape), array(shape=shape)) for _ in range(CALLS)]
            assert found == [shown] + [0] * (CALLS - 1)


EAGER = {
    "grad": lambda f: jax.grad(lambda a: f(a, 2))(array()),
    "vmap": lambda f: jax.vmap(lambda a: f(a, 2))(array(shape=(2, 16))),
}


@pytest.mark.events
@pytest.mark.parametrize("warm", [1, CALLS])
@pytest.mark.parametrize("donate", ["all", "warn"])
@pytest.mark.parametrize("kind", EAGER)
def test_the_warning_of_a_transformation_in_a_warm_call(kind, donate, warm):
    """The warning is shown where Equinox shows it. A pullback runs outside of the call."""
    seen = []
    for filter_jit in (eqx.filter_jit, eqxjit.filter_jit):
        f = filter_jit(lambda a, n: a.sum() * n, donate=donate)
        before = [warned(f, array(), 2) for _ in range(warm)]
        seen.append([before, *(warned(EAGER[kind], f) for _ in range(2))])
    assert seen[1] == seen[0]


def test_the_warning_of_another_thread_is_shown():
    """One thread hides the warning while it compiles. Equinox hides it in all threads."""
    hiding, hidden = threading.Event(), threading.Event()

    def slow(a):
        hiding.set()
        assert hidden.wait(60)
        return a.sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=eqxjit.filter_jit(slow, donate="all"), args=(array(),))
        thread.start()
        assert hiding.wait(60)
        eqxjit.filter_jit(lambda a: a.sum(), donate="warn")(array())
        eqxjit.filter_jit(lambda a: a.sum() + 1, donate="all")(array())
        pickle.loads(pickle.dumps(warnings.filters))
        hidden.set()
        thread.join()
        assert len(caught) == 1


# --- What must stay alive ---------------------------------------------------------------------


@both
def test_a_result_is_never_the_callers_own_array(filter_jit):
    """Donating a result must not delete the argument that it was made from, unchanged."""
    identity = filter_jit(lambda tree: tree)
    consume = filter_jit(lambda a: a + 1, donate="all")
    a = array()
    for _ in range(CALLS):
        for out in arrays(identity([a, Layer(a)])):
            assert out is not a
            consume(out)
        assert not a.is_deleted()
        assert_same(a, array())


@both
def test_donating_under_another_jit(filter_jit):
    """Tracers aren't deleted, because the outer arguments belong to the caller."""
    f = filter_jit(lambda a: a + 1, donate="all")
    outer = filter_jit(lambda a: f(a) + f(a) + a)
    a = array()
    for _ in range(CALLS):
        assert_same(outer(a), 3 * a + 2)
        assert_same(jax.jit(lambda a: f(a))(a), a + 1)
        assert not a.is_deleted()


@pytest.mark.parametrize("donate", ["all", "all-except-first"])
def test_an_array_that_is_passed_twice_is_named(donate):
    f = eqxjit.filter_jit(lambda a, b: a + b["b"][0], donate=donate)
    for _ in range(3):
        x = jnp.arange(3.0)
        with pytest.raises(Exception, match=r"`a` and `b\['b'\]\[0\]` are the same array"):
            f(x, {"b": [x]})
        assert_same(f(jnp.ones(3), {"b": [jnp.ones(3)]}), jnp.full(3, 2.0, jnp.float32))


def test_hiding_the_warning_leaves_no_more_than_one_filter():
    f = eqxjit.filter_jit(lambda x: x[0], donate="all")
    with warnings.catch_warnings():
        for n in range(3, 6):
            warnings.simplefilter("error", DeprecationWarning)
            warnings.filterwarnings("error", message=f"of {n}")
            f(jnp.ones(n))
        kinds = [item for item in warnings.filters if item[2] is Warning and item[1] is not None]
        assert len({type(item[1]) for item in kinds}) == 2
        assert sum(type(item[1]).__module__ != "re" for item in kinds) == 1
