"""`freeze`: the same results as `filter_jit`, with the arrays compiled in."""

import collections
import copy
import functools
import gc
import pickle
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import Own, assert_close, assert_same
from tests.support.models import mlp
from tests.support.sides import CALLS

KEY = jax.random.key(0)
X = jnp.arange(1.0, 5.0)


class Model(eqx.Module):
    weight: jax.Array
    mode: str = eqx.field(static=True, default="times")

    def __call__(self, x, n=1):
        return self.weight * x * n if self.mode == "times" else self.weight + x

    @eqxjit.filter_jit
    def step(self, x, *, n=1):
        return {"y": self.weight * x * n, "mode": self.mode}


@functools.cache
def cases():
    model = mlp()
    batch = jnp.ones((5, 4))
    cnn = eqx.nn.Sequential(
        [eqx.nn.Conv2d(1, 2, 3, key=KEY), eqx.nn.Dropout(0.5), eqx.nn.Lambda(jnp.ravel)]
    )
    return {
        "a Module": (model, (), {}, (X,)),
        "a function of a model": (lambda m, x: jax.vmap(m)(x), (model,), {}, (batch,)),
        "keywords": (lambda x, m: m(x), (), {"m": model}, (X,)),
        "static arguments": (Model(X), (), {}, (X, 3)),
        "a static argument given": (Model(X), (), {"n": 2}, (X,)),
        "a bound method": (Model(X).__call__, (), {}, (X, 2)),
        "a decorated method": (Model(X).step, (), {}, (X,)),
        "a wrapped function": (eqxjit.filter_jit(lambda m, x: m(x)), (model,), {}, (X,)),
        "a partial": (functools.partial(lambda m, x: m(x), model), (), {}, (X,)),
        "inference mode": (eqx.nn.inference_mode(cnn), (), {}, (jnp.ones((1, 5, 5)),)),
        "NumPy weights": (Model(np.arange(4.0)), (), {}, (X,)),
        "a weak type": (Model(jnp.asarray(2.0)), (), {}, (X.astype(jnp.bfloat16),)),
        "half precision": (Model(X.astype(jnp.bfloat16)), (), {}, (X.astype(jnp.bfloat16),)),
        "a PRNG key": (lambda key, x: jax.random.normal(key, x.shape) + x, (KEY,), {}, (X,)),
        "no arrays": (jnp.sin, (), {}, (X,)),
    }


@pytest.mark.parametrize("bound", [0, 2**20])
@pytest.mark.parametrize("name", cases())
def test_the_same_results(name, bound):
    fun, args, kwargs, rest = cases()[name]
    expected = eqx.filter_jit(lambda *rest: fun(*args, *rest, **kwargs))(*rest)
    frozen = eqxjit.freeze(fun, *args, max_constant_bytes=bound, **kwargs)
    for _ in range(CALLS):
        result = frozen(*rest)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        arrays = eqx.filter((result, expected), eqx.is_array)
        # XLA may compute constants at compile time, in a different order.
        assert_close(*arrays)
        avals = [[leaf.aval for leaf in jax.tree.leaves(side)] for side in arrays]
        assert avals[0] == avals[1]
    assert frozen.cache_info()[:2] == (1, 1)


def test_small_arrays_are_constants_and_large_ones_are_passed():
    model = eqx.nn.Linear(4, 100, key=KEY)
    for bound, n_bytes, n_passed in [(0, 0, 2), (400, 400, 1), (1600, 2000, 0)]:
        frozen = eqxjit.freeze(model, max_constant_bytes=bound)
        assert frozen.constant_bytes == n_bytes
        assert [leaf.shape for leaf in jax.tree.leaves(frozen)] == [(100, 4), (100,)][:n_passed]
        text = frozen.lower(X).as_text()
        assert f"%arg{n_passed}:" in text
        assert f"%arg{n_passed + 1}:" not in text
        assert repr(frozen) == f"freeze(Linear, {n_bytes:,} bytes compiled in)"
        assert [*frozen.traces()[0].arguments] == ["x"]


def test_it_is_a_snapshot():
    weight = np.arange(4.0, dtype=np.float32)
    model = Model(weight)
    donated = Model(jnp.arange(4.0))
    frozen, of_donated = eqxjit.freeze(model), eqxjit.freeze(donated)
    passed = eqxjit.freeze(donated, max_constant_bytes=0)
    partial = eqxjit.freeze(functools.partial(lambda w, x: w * x, weight))
    eqxjit.filter_jit(lambda m: jax.tree.map(lambda w: w + 1, m), donate="all")(donated)
    weight += 7
    object.__setattr__(model, "weight", X)
    for i in range(CALLS):
        x = jnp.ones(4) * i
        for f in (frozen, of_donated, passed, partial):
            np.testing.assert_array_equal(f(x), np.arange(4.0) * i)


class Configured(eqx.Module):
    config: Any = eqx.field(static=True)
    inner: Any = None

    def __call__(self, x):
        config = self.config[0] if type(self.config) is tuple else self.config
        if isinstance(config, dict):
            return config["by"](x * config["scales"][0])
        return x * (config[0][0] if isinstance(config[0], list) else config[0])


CONFIGS = {
    "dict": lambda: {"scales": [2], "by": jax.nn.relu},
    "OrderedDict": lambda: collections.OrderedDict(scales=[2], by=jax.nn.relu),
    "list of lists": lambda: [[2]],
    "NumPy": lambda: np.array([2]),
    "in a tuple": lambda: ({"scales": [2], "by": jax.nn.relu}, 1),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")  # NumPy's
@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_a_snapshot_of_static_objects_too(kind):
    for calls, nested in ((0, False), (CALLS, True)):
        config = CONFIGS[kind]()
        model = Configured(config)
        whole = Configured([3], [None, model, {"a": X}]) if nested else model
        frozen = eqxjit.freeze(lambda m, x: m(x) if m.inner is None else m.inner[1](x), whole)
        for _ in range(calls):
            assert_same(frozen(X), X * 2)
        changed = config[0] if type(config) is tuple else config
        changed = changed["scales"] if isinstance(changed, dict) else changed
        (changed[0] if isinstance(changed[0], list) else changed)[0] = 5
        assert_same(model(X), X * 5)
        for _ in range(CALLS):
            assert_same(frozen(X), X * 2)
        assert_same(frozen(X[:2]), X[:2] * 2)
        assert_same(jax.vmap(frozen)(X), X * 2)


class Unlike(Own):
    """An object whose copies are unequal to it, or that can't be copied."""

    def __deepcopy__(self, memo):
        if self.value == 3:
            raise TypeError("cannot pickle '_thread.lock' object")
        return type(self)(7)

    def __rmul__(self, other):
        return self.value * other


@pytest.mark.parametrize("value", [2, 3])
def test_what_cannot_be_copied_stays(value):
    frozen = eqxjit.freeze(Configured([Unlike(value)]))
    assert_same(frozen(X), X * value)


def test_frozen_functions_as_arguments_are_told_apart():
    apply = eqxjit.filter_jit(lambda f, x: f(x))
    upstream = eqx.filter_jit(lambda f, x: f(x))
    for _ in range(2):
        for i in range(3):
            for each in (apply, upstream):
                np.testing.assert_array_equal(each(eqxjit.freeze(Model(X * i)), X), X * i * X)


def test_transformations_and_nesting():
    model = mlp()
    frozen = eqxjit.freeze(model)
    batch = jnp.ones((5, 4))
    # By default, products are rounded differently on a GPU.
    with jax.default_matmul_precision("highest"):
        mapped = jax.vmap(model)(batch)
        for _ in range(CALLS):
            assert_close(jax.vmap(frozen)(batch), mapped)
            assert_close(
                jax.grad(lambda x: frozen(x).sum())(X), jax.grad(lambda x: model(x).sum())(X)
            )
            assert_close(jax.jit(frozen)(X), model(X))
            assert_close(eqxjit.filter_jit(lambda f, x: f(x) * 2)(frozen, X), model(X) * 2)
            assert_close(jax.lax.scan(lambda c, x: (c, frozen(x)), None, batch)[1], mapped)
        assert_close(eqxjit.freeze(frozen)(X), model(X))


def test_donation_takes_the_arguments_and_leaves_the_weights():
    class Scale(eqx.Module):
        weight: jax.Array

        @eqxjit.filter_jit(donate="all")
        def step(self, x):
            # There are as many outputs as arrays that could be donated.
            return x * self.weight, x + self.weight

    for bound in (0, 2**20):
        for frozen in (
            eqxjit.freeze(Scale.step, Scale(X), max_constant_bytes=bound),
            eqxjit.freeze(Scale(X).step, max_constant_bytes=bound),
        ):
            x = jnp.ones(4)
            for i in range(1, CALLS):
                y, _ = frozen(x)
                assert x.is_deleted()
                np.testing.assert_allclose(y, X**i)
                x = y


def annotated(x: "jax.Array | None" = None, *, key: "jax.Array | None" = None): ...


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: eqxjit.freeze(3), "`freeze` takes a callable; got 3"),
        (lambda: eqxjit.freeze(Model(X), max_constant_bytes=None), "must be an int; got None"),
        (lambda: eqxjit.freeze(Model(X), max_constant_bytes="1MB"), "must be an int; got '1MB'"),
        (lambda: eqxjit.freeze(Model(X), 1, 2, 3), r"too many positional arguments\n.*; Model\("),
        (lambda: eqxjit.freeze(Model(X), donate="all"), "unexpected keyword argument 'donate'"),
        (
            lambda: eqxjit.freeze(Model(X), max_constant_byte=3),
            r"'max_constant_byte'\n`freeze` takes `max_constant_bytes`; Model",
        ),
        (lambda: eqxjit.freeze(lambda mm, x: x, X, m=3), r"'m'\n.* takes `\(mm, x\)`"),
        (
            lambda: eqxjit.freeze(annotated, kay=3),
            r"'kay'\n.*<function annotated at .* takes `\(x=\.\.\., \*, key=\.\.\.\)`\.$",
        ),
        (lambda: eqxjit.freeze(Model(X))(), r"missing .* argument"),
        (
            lambda: eqxjit.freeze(Model(X)).compile(X, zzz="raise"),
            r"freeze\(Model\)\(\) got .* keyword argument 'zzz'",
        ),
        (
            lambda: eqxjit.freeze(Model(X)).save("unwritten", X, zzz=1),
            r"freeze\(Model\)\(\) got .* keyword argument 'zzz'",
        ),
        (lambda: pickle.dumps(eqxjit.freeze(Model(X))), "can't be pickled"),
    ],
)
def test_errors_name_what_is_wrong(call, match):
    with pytest.raises(TypeError, match=match):
        call()


def test_errors_of_arguments():
    with pytest.raises(ValueError, match=r"kwargs\['m'\]|weight|m"):
        eqxjit.freeze(lambda x, m: x, m={"a": set()})
    with pytest.raises(ValueError, match="call it outside of `jit`"):
        jax.jit(lambda w: eqxjit.freeze(Model(w))(X))(X)
    with pytest.raises(ValueError, match='"compile" or "raise"'):
        eqxjit.freeze(jnp.sin).compile(X, other_shapes="ignore")
    # A function with `**kwargs` takes a keyword of another name.
    frozen = eqxjit.freeze(lambda x, **kwargs: x * kwargs["other_shape"])
    assert frozen.compile(X, other_shape=3).seconds > 0


def test_it_is_freed():
    model = mlp()
    frozen = eqxjit.freeze(model)
    for _ in range(CALLS):
        frozen(X)
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    references = [*map(weakref.ref, [frozen, *leaves, *jax.tree.leaves(frozen)])]
    del frozen, model, leaves
    gc.collect()
    assert {reference() for reference in references} == {None}


# --- Ahead of time ----------------------------------------------------------------------------


def test_other_shapes_can_be_refused():
    frozen = eqxjit.freeze(mlp())
    frozen.compile(X, other_shapes="raise")
    for _ in range(CALLS):
        frozen(X)
        with pytest.raises(eqxjit.TooManyTracesError) as caught:
            frozen(X.astype(jnp.int32))
        message = str(caught.value)
        assert message.startswith("`MLP` was compiled ahead of time and must not ")
        assert "dtype: `x` was float32, is int32" in message
    frozen.compile(X.astype(jnp.int32), other_shapes="raise")
    frozen(X.astype(jnp.int32)), frozen(X)
    with pytest.raises(eqxjit.TooManyTracesError):
        frozen(X.astype(jnp.bfloat16))
    # The limit stays until `other_shapes` is passed again.
    frozen.compile(X.astype(jnp.float16))
    frozen(X.astype(jnp.float16))
    with pytest.raises(eqxjit.TooManyTracesError):
        frozen(X.astype(jnp.bfloat16))
    frozen.compile(X, other_shapes="compile")
    frozen(X.astype(jnp.bfloat16))


def test_a_refusal_lists_what_is_compiled():
    frozen = eqxjit.freeze(lambda x: x + 1)
    for size in (1, 2, 4):
        frozen.compile(jax.ShapeDtypeStruct((size,), jnp.float32), other_shapes="raise")
    with pytest.raises(eqxjit.TooManyTracesError) as refused:
        frozen(jnp.ones(3))
    assert all(f"\n  - x: float32[{size}]" in str(refused.value) for size in (1, 2, 4))


def test_a_wrong_call_names_what_was_frozen(tmp_path):
    model = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    frozen = eqxjit.freeze(model)
    frozen.save(tmp_path / "saved", jnp.ones(4))
    names = {
        "freeze(Linear)": frozen,
        "load(Linear)": eqxjit.load(tmp_path / "saved"),
        "filter_jit(Linear)": eqxjit.filter_jit(model),
    }
    for name, fun in names.items():
        for _ in range(3):
            with pytest.raises(TypeError) as raised:
                fun(jnp.ones(4), 1, 2)
            assert str(raised.value) == f"{name}() takes 1 positional argument but 3 were given"
            fun(jnp.ones(4))
    assert names["filter_jit(Linear)"].traces()[0].function == "Linear"


def test_a_frozen_function_can_be_copied():
    frozen = eqxjit.freeze(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    for copied in (copy.copy(frozen), copy.deepcopy(frozen)):
        assert copied(jnp.ones(2)).tolist() == frozen(jnp.ones(2)).tolist()


# --- What transformations and closures hold ---------------------------------------------------

WEIGHT = np.arange(300.0, dtype=np.float32).reshape(100, 3)
BATCH = jnp.ones((2, 3))


class Product(eqx.Module):
    weight: Any

    def __call__(self, x):
        return self.weight @ x


class Batched(Product):
    def __call__(self, x):
        return x @ self.weight.T


class Norm(Product):
    def __call__(self, x):
        return jnp.sum((self.weight @ x.T) ** 2)


class Applied(eqx.Module):
    inner: Any

    def __call__(self, x):
        return self.inner(x)


def apply(x, model):
    return model(x)


# Each holds one weight of 1,200 bytes, and takes a batch.
TRANSFORMED = {
    "vmap": lambda w: jax.vmap(Product(w)),
    "vmap with options": lambda w: jax.vmap(Product(w), in_axes=(0,), axis_name="i"),
    "grad": lambda w: jax.grad(Norm(w)),
    "value_and_grad": lambda w: jax.value_and_grad(Norm(w)),
    "jacrev": lambda w: jax.vmap(jax.jacrev(Product(w))),
    "hessian": lambda w: jax.hessian(Norm(w)),
    "checkpoint": lambda w: jax.vmap(jax.checkpoint(Product(w).__call__)),
    "of a partial": lambda w: jax.vmap(functools.partial(apply, model=Product(w))),
    "a partial of it": lambda w: functools.partial(jax.vmap(lambda w, x: w @ x, (None, 0)), w),
    "a bound method": lambda w: Batched(w).__call__,
    "of a bound method": lambda w: jax.vmap(Product(w).__call__),
    "filter_vmap of it": lambda w: eqx.filter_vmap(jax.grad(Norm(w))),
    "in a Module": lambda w: Applied(jax.vmap(Product(w))),
    "in a partial in it": lambda w: jax.vmap(
        functools.partial(apply, model=jax.checkpoint(Product(w).__call__))
    ),
    "under filter_jit": lambda w: eqxjit.filter_jit(jax.vmap(Product(w))),
}


@pytest.mark.parametrize("make", TRANSFORMED.values(), ids=TRANSFORMED)
def test_what_transformations_wrap_is_frozen_like_a_model(make):
    expected = make(WEIGHT)(BATCH)
    for bound, n_bytes in ((0, 0), (2**20, 1200)):
        weight = WEIGHT.copy()
        frozen = eqxjit.freeze(make(weight), max_constant_bytes=bound)
        # The weights are a snapshot, also for later traces.
        weight[:] = 0
        assert frozen.constant_bytes == n_bytes
        assert f"{n_bytes:,} bytes compiled in)" in repr(frozen)
        assert len(jax.tree.leaves(frozen)) == (not bound)
        for _ in range(CALLS):
            assert_close(frozen(BATCH), expected)
        assert_close(frozen(BATCH[:1]), make(WEIGHT)(BATCH[:1]))
        assert f"%arg{2 if not bound else 1}:" not in frozen.lower(BATCH).as_text()


def test_the_weights_of_what_a_transformation_wraps_are_freed():
    model = Product(jnp.asarray(WEIGHT))
    reference = weakref.ref(model.weight)
    frozen = eqxjit.freeze(jax.vmap(model))
    frozen(BATCH)
    del model
    gc.collect()
    assert reference() is None


def closure_of(weight):
    def inner(x):
        return jax.vmap(lambda x: weight @ x)(x)

    return lambda x: inner(x)


GLOBAL = Product(jnp.asarray(WEIGHT))

CYCLE: list[Any] = [jnp.asarray(WEIGHT)]
CYCLE.append({1: CYCLE, "a": CYCLE})

CAPTURING = {
    "a cycle": lambda: lambda x: jax.vmap(Product(CYCLE[0]))(x),
    "another frozen function": lambda: jax.jit(jax.vmap(eqxjit.freeze(GLOBAL))),
    "a closure": lambda: closure_of(jnp.asarray(WEIGHT)),
    "a global": lambda: lambda x: jax.vmap(GLOBAL)(x),
    "vmap of a closure": lambda: jax.vmap(lambda x: GLOBAL(x)),
    "jax.jit": lambda: jax.jit(jax.vmap(Product(jnp.asarray(WEIGHT)))),
}


@pytest.mark.parametrize("make", CAPTURING.values(), ids=CAPTURING)
def test_what_functions_capture_is_counted_and_said(make):
    frozen = eqxjit.freeze(make(), max_constant_bytes=0)
    assert_close(frozen(BATCH), jax.vmap(Product(WEIGHT))(BATCH))
    assert frozen.constant_bytes == 1200
    said = "1,200 bytes compiled in, 1,200 of which functions capture: pass them as arguments)"
    assert repr(frozen).endswith(said)


def test_functions_without_arrays_stay_the_same_objects():
    mapped, partial = jax.vmap(jnp.sin), functools.partial(jnp.add, 1)

    def call(fun, other, x):
        assert (fun is mapped, other is partial) == (True, True)
        return other(fun(x))

    assert_same(eqxjit.freeze(call, mapped, partial)(X), 1 + jnp.sin(X))
    named = jax.vmap(Product(WEIGHT))
    names = eqxjit.freeze(lambda f, x: (f.__name__, f.__qualname__), named)(X)
    assert names == (named.__name__, named.__qualname__)


def test_what_a_function_captures_is_not_taken_apart():
    _, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="b", mode="batch")
    frozen = eqxjit.freeze(lambda x: (x, state) and x * 2)
    assert frozen.constant_bytes == 0
    assert_same(frozen(X), X * 2)
    jax.tree.leaves(state)


class LoadsOnRead(dict):
    def values(self):
        raise RuntimeError("not loaded yet")


class LoadsOnIteration(list):
    def __iter__(self):
        raise RuntimeError("not loaded yet")


@pytest.mark.parametrize("table", [LoadsOnRead(a=2.0), LoadsOnIteration([2.0])])
def test_containers_that_a_function_captures_are_read_without_their_own_code(table):
    frozen = eqxjit.freeze(lambda x: x * len(table))
    assert_same(frozen(X), X)
    assert "0 bytes compiled in" in repr(frozen)
    assert frozen.constant_bytes == 0


def test_a_function_may_refer_to_itself():
    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    assert_same(eqxjit.freeze(power)(X, 3), X**3)
    assert eqxjit.freeze(power).constant_bytes == 0
