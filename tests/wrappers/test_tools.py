"""What tools read of functions they read of jitted ones."""

import collections
import inspect
import pydoc
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit

X = jnp.ones(())


class Shape(eqx.Module):
    side: jax.Array

    @eqxjit.filter_jit
    def area(self, scale: "float" = 1.0) -> "jax.Array":
        """The area."""
        return self.side**2 * scale

    def diagonal(self):
        return self.side * 2**0.5


def plain(x: "Shape", n: int = 2) -> "Shape":
    return x


@pytest.mark.parametrize(
    "name", ["__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__"]
)
def test_attributes_of_python_functions(name):
    assert getattr(eqxjit.filter_jit(plain), name) is getattr(plain, name)
    with pytest.raises(AttributeError):
        getattr(eqxjit.filter_jit(eqx.nn.Identity()), name)
    with pytest.raises(AttributeError):
        getattr(eqxjit.filter_jit(max), name)


def test_a_bound_function():
    shape = Shape(X)
    bound, fun = shape.area, Shape.area.__wrapped__
    texts = bound.__name__, bound.__qualname__, bound.__doc__
    assert texts == ("area", "Shape.area", "The area.")
    assert bound.__self__ is shape
    assert bound.__func__ is Shape.area
    assert bound.__code__ is fun.__code__
    assert typing.get_type_hints(bound) == {"scale": float, "return": jax.Array}
    assert typing.get_type_hints(eqxjit.filter_jit(plain))["x"] is Shape
    assert [*inspect.signature(bound).parameters] == ["scale"]
    assert inspect.getdoc(bound) == "The area."
    assert "The area." in pydoc.plain(pydoc.render_doc(bound))


def test_a_method_that_is_wrapped():
    shape, counter = Shape(X), collections.Counter()
    for method in (shape.diagonal, counter.most_common):
        wrapped = eqxjit.filter_jit(method)
        assert wrapped.__func__ is method.__func__
        assert type(wrapped.__self__) is type(method.__self__)
    assert eqxjit.filter_jit(counter.most_common).__self__ is counter
    assert not hasattr(eqxjit.filter_jit(plain), "__self__")


def test_what_cannot_be_hashed_says_what_helps():
    shape = Shape(X)
    for fun in (shape.area, eqxjit.filter_jit(eqx.Partial(plain, X))):
        with pytest.raises(TypeError, match="pass a lambda that calls it"):
            hash(fun)
    with pytest.raises(TypeError, match="pass a lambda that calls it"):
        jax.lax.switch(0, [shape.area, shape.area])
    assert jax.lax.switch(0, [lambda: shape.area(), lambda: shape.area()]) == 1
