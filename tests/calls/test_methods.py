"""Methods: decorated ones, how they are inherited and combined, and what `model.step` is."""

import abc
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import assert_same, warm
from tests.support.sides import CALLS, both

x = jnp.arange(1.0, 4.0)


def make_model(filter_jit):
    """Return a Module with decorated methods, and a list that names each traced method."""
    traces = []

    class Model(eqx.Module):
        weight: Any
        bias: Any = 0.5
        power: int = eqx.field(static=True, default=2)

        @filter_jit
        def __call__(self, x):
            traces.append("call")
            return (self.weight * x) ** self.power + self.bias

        @filter_jit
        def step(self, x, rate=0.1, *, sign=1):
            """One step."""
            traces.append("step")
            return Model(self.weight - sign * rate * x, self.bias, self.power)

        @filter_jit
        def both(self, x):
            return self(x), self.step(x)(x)

        @filter_jit
        def __getitem__(self, index):
            return self.weight[index]

        @filter_jit
        def __add__(self, other):
            return self.weight + other.weight

        @property
        @filter_jit
        def doubled(self):
            return 2 * self.weight

        @classmethod
        @filter_jit
        def of(cls, weight):
            return cls(weight, power=3)

        @staticmethod
        @filter_jit
        def scaled(x, by=2):
            return by * x

        @filter_jit
        def renamed(this, func, args=1, *, keywords=2):
            return this.weight * func + args * keywords

        def plain(self, x):
            return (self.weight * x) ** self.power + self.bias

    return Model, traces


@both
def test_a_decorated_method(filter_jit):
    Model, traces = make_model(filter_jit)
    model = Model(x)
    for _ in range(CALLS):
        assert_same(model.step(x).weight, x - 0.1 * x)
        assert_same(model.step(x, 0.2).weight, x - 0.2 * x)
        assert_same(model.step(x, rate=0.2).weight, x - 0.2 * x)
        assert_same(model.step(x, sign=-1).weight, x + 0.1 * x)
        assert_same(Model.step(model, x).weight, x - 0.1 * x)
        assert_same(model.both(x), (model.plain(x), Model(x - 0.1 * x).plain(x)))
        assert type(model.step(x)) is Model
        assert_same(Model.__call__(model, x=x), model.plain(x))
        for args, kwargs in (((), {}), ((x, 1, 2), {}), ((x,), {"no_such": 1})):
            with pytest.raises(TypeError):
                model.step(*args, **kwargs)
    assert traces == ["step"] * 3 + ["call"]


@both
def test_special_methods_and_parameters_named_like_a_partials_attributes(filter_jit):
    Model, _ = make_model(filter_jit)
    for i in range(CALLS):
        model = Model(x + i)
        assert_same((model[1], model + model), (model.weight[1], 2 * model.weight))
        assert_same(model.doubled, 2 * model.weight)
        assert_same(model.renamed(func=x), model.weight * x + 2)
        assert_same(model.renamed(x, args=2, keywords=3), model.weight * x + 6)


@both
def test_class_and_static_methods(filter_jit):
    """`@classmethod` and `@staticmethod` above `@filter_jit`."""
    Model, _ = make_model(filter_jit)

    class Child(Model):
        pass

    model = Model(x)
    for i in range(CALLS):
        assert_same(Model.of(x + i), Model(x + i, power=3))
        assert_same(model.of(x + i), Model(x + i, power=3))
        assert type(Child.of(x)) is Child
        assert_same(Model.scaled(x + i), 2 * (x + i))
        assert_same(model.scaled(x + i, by=3), 3 * (x + i))


# --- Inheritance ------------------------------------------------------------------------------


@both
def test_super(filter_jit):
    """An override, decorated or not, calls what it overrides; the rest is inherited."""
    Model, _ = make_model(filter_jit)

    class Decorated(Model):
        extra: Any = 1.0

        @filter_jit
        def __call__(self, x):
            return 10 * super().__call__(x)

        @filter_jit
        def both(self, x):
            return super().step(x, rate=1.0).weight

    class Undecorated(Decorated):
        def __call__(self, x):
            return 10 * super().__call__(x)

    for i in range(CALLS):
        w = x + i
        assert_same(Decorated(w)(x), 10 * Model(w).plain(x))
        assert_same(Undecorated(w)(x), 100 * Model(w).plain(x))
        assert_same(Decorated(w).both(x), w - x)
        assert type(Decorated(w).step(x)) is Model


# --- Abstract methods -------------------------------------------------------------------------


def abstract(base, *decorators):
    """Return a class with a jitted abstract method."""

    def step(self, x):
        """One step."""

    for decorator in decorators:
        step = decorator(step)
    return types.new_class("Base", (base,), exec_body=lambda body: body.update(step=step))


def test_an_abstract_method_stays_abstract():
    """Either order of the decorators works."""
    for Base in (
        abstract(eqx.Module, eqxjit.filter_jit, abc.abstractmethod),
        abstract(eqx.Module, abc.abstractmethod, eqxjit.filter_jit),
        abstract(abc.ABC, eqxjit.filter_jit, abc.abstractmethod),
    ):
        assert Base.__abstractmethods__ == {"step"}
        for missing in (Base, type(Base)("Missing", (Base,), {})):
            with pytest.raises(TypeError, match="abstract"):
                missing()
        Concrete = type(Base)(
            "Concrete", (Base,), {"step": eqxjit.filter_jit(lambda self, x: 2 * x)}
        )
        assert_same(warm(Concrete().step, x), 2 * x)


# --- What `model.step` is ---------------------------------------------------------------------


@both
def test_it_is_a_partial_and_a_pytree_with_the_arrays_of_the_instance(filter_jit):
    Model, traces = make_model(filter_jit)
    model = Model(x)
    step = model.step
    assert (step.func, step.keywords) == (Model.step, {})
    assert step.args[0] is model
    pairs, _ = jtu.tree_flatten_with_path(eqx.filter(step, eqx.is_array))
    assert [(jtu.keystr(path), leaf) for path, leaf in pairs] == [(".args[0].weight", model.weight)]
    for i in range(CALLS):
        moved = jax.tree.map(lambda a, i=i: a + i if eqx.is_array(a) else a, step)
        changed = eqx.tree_at(lambda s: s.args[0].weight, step, x + i)
        for each in (moved, changed):
            assert type(each) is type(step)
            assert_same(each(x).weight, x + i - 0.1 * x)
    assert traces == ["step"]
    with_keyword = eqx.tree_at(lambda s: s.keywords, step, {"rate": 1.0})
    assert_same(warm(with_keyword, x).weight, x - x)


@both
def test_it_goes_into_other_transformations(filter_jit):
    Model, traces = make_model(filter_jit)

    @filter_jit
    def apply(fun, x):
        traces.append("apply")
        return fun(x)

    for i in range(CALLS):
        step, weight = Model(x + i).step, x + i - 0.1 * x
        assert_same(apply(step, x).weight, weight)
        gradient = eqx.filter_grad(lambda step, x: jnp.sum(step(x).weight ** 2))(step, x)
        assert np.allclose(gradient.args[0].weight, 2 * weight)
        stepped = eqx.filter_vmap(step)(jnp.stack([x, 2 * x])).weight
        assert np.allclose(stepped, jnp.stack([weight, x + i - 0.2 * x]))
    assert traces.count("apply") == 1


@both
def test_equality_and_hash(filter_jit):
    Model, _ = make_model(filter_jit)
    model = Model(3.0)
    assert model.step == model.step == Model(3.0).step
    assert bool(Model(x).step == Model(x).step)
    assert not bool(Model(x).step == Model(2 * x).step)
    assert not bool(model.step == Model(4.0).step)
    assert not bool(model.step == model.both)
    assert model.step != "step"
    with pytest.raises(TypeError):
        hash(Model(x).step)
    if filter_jit is eqxjit.filter_jit:  # Equinox's method holds a dict.
        assert len({Model(3.0).step, Model(3.0).step, Model(4.0).step}) == 2


def test_a_bound_method_has_what_the_wrapper_has():
    Model, _ = make_model(eqxjit.filter_jit)
    model = Model(x)
    warm(model.step, x)
    assert model.step.cache_info() == Model.step.cache_info()
    assert model.step.cache_info() == (1, 1, 1024, CALLS - 1)
    assert model.step.specialized_source() == Model.step.specialized_source()
    model.step.clear_cache()
    assert model.step.cache_info().entries == 0
    with pytest.raises(AttributeError):
        _ = model.step.no_such_name
