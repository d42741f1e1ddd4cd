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
    """A Module with decorated methods, and the list of what of it was traced."""
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
def test_a_decorated_call(filter_jit):
    Model, traces = make_model(filter_jit)
    for i in range(CALLS):
        model = Model(x + i)
        for _ in range(CALLS):
            assert_same(model(x), model.plain(x))
            assert_same(model(x=x), model.plain(x))
            assert_same(Model.__call__(model, x), model.plain(x))
    assert traces == ["call"]


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
        for args, kwargs in (((), {}), ((x, 1, 2), {}), ((x,), {"no_such": 1})):
            with pytest.raises(TypeError):
                model.step(*args, **kwargs)
    assert traces == ["step"] * 3 + ["call"]


@both
def test_special_methods_and_parameters_named_like_a_partials_attributes(filter_jit):
    Model, _ = make_model(filter_jit)
    for i in range(CALLS):
        model = Model(x + i)
        assert_same(model[1], model.weight[1])
        assert_same(model + model, 2 * model.weight)
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
    """An override, decorated or not, calls what it overrides."""
    Model, traces = make_model(filter_jit)

    class Decorated(Model):
        @filter_jit
        def __call__(self, x):
            return 10 * super().__call__(x)

        @filter_jit
        def step(self, x):
            return super().step(x, rate=1.0).weight

    class Undecorated(Model):
        def __call__(self, x):
            return 10 * super().__call__(x)

    class Grandchild(Decorated):
        @filter_jit
        def __call__(self, x):
            return 10 * super().__call__(x)

    for i in range(CALLS):
        w = x + i
        assert_same(Decorated(w)(x), 10 * Model(w).plain(x))
        assert_same(Undecorated(w)(x), 10 * Model(w).plain(x))
        assert_same(Grandchild(w)(x), 100 * Model(w).plain(x))
        assert_same(Decorated(w).step(x), w - x)
    assert traces.count("call") == 3


@both
def test_a_method_of_a_plain_class(filter_jit):
    """`self` is static there: each object is another static value."""
    traces = []

    class Plain:
        def __init__(self, by):
            self.by = by

        @filter_jit
        def scale(self, x):
            traces.append(self.by)
            return self.by * x

    two, three = Plain(2), Plain(3)
    for _ in range(CALLS):
        assert_same(two.scale(x), 2 * x)
        assert_same(three.scale(x), 3 * x)
    assert traces == [2, 3]


# --- Abstract methods -------------------------------------------------------------------------


def abstract(base, *decorators):
    """A class of which one method is abstract, and jitted."""

    def step(self, x):
        """One step."""

    for decorator in decorators:
        step = decorator(step)
    return types.new_class("Base", (base,), exec_body=lambda body: body.update(step=step))


@pytest.mark.parametrize(
    "make",
    [
        lambda: abstract(eqx.Module, eqxjit.filter_jit, abc.abstractmethod),
        lambda: abstract(eqx.Module, abc.abstractmethod, eqxjit.filter_jit),
        lambda: abstract(abc.ABC, eqxjit.filter_jit, abc.abstractmethod),
    ],
)
def test_an_abstract_method_stays_abstract(make):
    """Either order of the decorators works."""
    Base = make()
    assert Base.__abstractmethods__ == {"step"}
    with pytest.raises(TypeError, match="abstract"):
        Base()

    class Missing(Base):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Missing()

    class Concrete(Base):
        @eqxjit.filter_jit
        def step(self, x):
            return 2 * x

    for _ in range(CALLS):
        assert_same(Concrete().step(x), 2 * x)


# --- What `model.step` is ---------------------------------------------------------------------


@both
def test_it_has_the_parts_of_a_partial(filter_jit):
    Model, _ = make_model(filter_jit)
    model = Model(x)
    step = model.step
    assert step.func is Model.step
    assert step.args == (model,)
    assert step.args[0] is model
    assert step.keywords == {}
    assert callable(step)
    assert Model.step is Model.__dict__["step"]


@both
def test_it_is_a_pytree_with_the_arrays_of_the_instance(filter_jit):
    Model, traces = make_model(filter_jit)
    model = Model(x)
    step = model.step
    (leaf,) = jtu.tree_leaves(eqx.filter(step, eqx.is_array))
    assert leaf is model.weight
    for i in range(CALLS):
        moved = jax.tree.map(lambda a, i=i: a + i if eqx.is_array(a) else a, step)
        assert type(moved) is type(step)
        assert_same(moved(x).weight, x + i - 0.1 * x)
        again = jtu.tree_unflatten(jtu.tree_structure(step), jtu.tree_leaves(step))
        assert_same(again(x).weight, x - 0.1 * x)
        assert again.args[0].power == 2
    assert traces == ["step"]


@both
def test_tree_at_reaches_the_instance(filter_jit):
    Model, _ = make_model(filter_jit)
    step = Model(x).step
    for i in range(CALLS):
        changed = eqx.tree_at(lambda s: s.args[0].weight, step, x + i)
        assert_same(changed(x).weight, x + i - 0.1 * x)
        assert_same(changed.args[0].weight, x + i)
        assert_same(step(x).weight, x - 0.1 * x)
    with_keyword = eqx.tree_at(lambda s: s.keywords, step, {"rate": 1.0})
    assert_same(warm(with_keyword, x).weight, x - x)


@both
def test_it_goes_into_other_transformations(filter_jit):
    Model, traces = make_model(filter_jit)

    @filter_jit
    def apply(fun, x):
        traces.append("apply")
        return fun(x)

    def loss(step, x):
        return jnp.sum(step(x).weight ** 2)

    for i in range(CALLS):
        model = Model(x + i)
        assert_same(apply(model.step, x).weight, x + i - 0.1 * x)
        gradient = eqx.filter_grad(loss)(model.step, x)
        assert np.allclose(gradient.args[0].weight, 2 * (x + i - 0.1 * x))
        stepped = eqx.filter_vmap(model.step)(jnp.stack([x, 2 * x])).weight
        assert np.allclose(stepped, jnp.stack([x + i - 0.1 * x, x + i - 0.2 * x]))
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
    if filter_jit is eqxjit.filter_jit:  # Upstream's holds a dict.
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
