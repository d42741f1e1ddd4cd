"""JAX's errors, logs and dumps name the user's function, its file and line, and its arguments."""

import collections
import functools
import inspect
import logging
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support import nodes
from tests.support.models import Pair
from tests.support.places import in_mlir, names_ours, without_root
from tests.support.sides import CALLS

X, FLAG = jnp.ones(3), jnp.array(True)


class Layer(eqx.Module):
    size: int = eqx.field(static=True)
    weight: jax.Array


class Model(eqx.Module):
    layers: list

    def __call__(self, x):
        return bool(self.layers[1].weight)

    def plain(self, x):
        return bool(self.layers[1].weight)

    @eqxjit.filter_jit
    def jitted(self, x):
        return bool(self.layers[1].weight)


def user(first, second=None, *rest, scale=1, **options):
    for leaf in jax.tree.leaves((first, second, rest, scale, options)):
        if eqx.is_array(leaf) and leaf.shape == ():
            bool(leaf)


CALLED = {
    "first": ((FLAG, X), {}),
    "a keyword": ((X,), {"second": FLAG}),
    "rest": ((X, X, X, {"k": [X, FLAG]}), {}),
    "a named tuple": ((X, Pair(X, FLAG)), {}),
    "a dataclass": ((nodes.Record([X, FLAG], 1), X), {}),
    "a default dict": ((collections.defaultdict(list, z=X, a=FLAG),), {}),
    "a number as key": (({1: X, 2: FLAG},), {}),
}

ARGUMENT = re.compile(r"value of the argument (.*?)\.(?: See|\n|$)")


def message(f, *args, **kwargs):
    with pytest.raises(jax.errors.JAXTypeError) as caught:
        f(*args, **kwargs)
    return str(caught.value)


def place(text):
    [found] = re.findall(r"tracing the function (.*) for jit", text)
    return found


def at(fun):
    _, line = inspect.getsourcelines(fun)
    return f"{fun.__name__} at {__file__}:{line}"


@pytest.mark.parametrize("called", CALLED)
def test_the_words_are_those_of_jax_jit(called):
    args, kwargs = CALLED[called]
    expected = message(jax.jit(user), *args, **kwargs)
    assert place(expected) == at(user)
    f = eqxjit.filter_jit(user)
    for _ in range(CALLS):
        assert message(f, *args, **kwargs) == expected
    assert message(f.lower, *args, **kwargs) == expected


def test_arrays_of_the_function_itself():
    model = Model([Layer(1, X), Layer(1, FLAG)])
    for f, args, argument in (
        (eqxjit.filter_jit(model), (X,), "fun.layers[1].weight"),
        (eqxjit.filter_jit(model.plain), (X,), "fun.__self__.layers[1].weight"),
        (eqxjit.filter_jit(lambda **options: bool(options["flag"])), {"flag": FLAG}, "flag"),
        (model.jitted, (X,), "self.layers[1].weight"),
        (eqxjit.filter_jit(lambda model, x: model(x)), (model, X), "model.layers[1].weight"),
    ):
        text = message(f, **args) if type(args) is dict else message(f, *args)
        assert ARGUMENT.findall(text) == [argument]
        assert f" at {__file__}:" in place(text)
    assert place(message(eqxjit.filter_jit(model.plain), X)) == at(Model.plain)


def test_partials_and_frozen_functions():
    for f in (eqxjit.filter_jit(functools.partial(user, X)), eqxjit.freeze(user, X)):
        text = message(f, FLAG)
        assert ARGUMENT.findall(text) == ["second"]
        assert place(text) == at(user)
    frozen = eqxjit.freeze(user, max_constant_bytes=0, first=FLAG)
    assert place(message(frozen)) == at(user)
    wrapped = functools.wraps(user)(lambda *args: user(*args))
    assert place(message(eqxjit.filter_jit(wrapped), FLAG)) == at(user)


def test_names_of_a_compiled_function_and_of_another_device():
    compiled = eqxjit.filter_jit(lambda model, x: x).lower(Model([Layer(1, X)]), X).compile()
    with pytest.raises(TypeError, match="Argument 'x' compiled with") as caught:
        compiled(Model([Layer(1, X)]), jnp.ones(4))
    assert "leaves" not in str(caught.value)


def test_logs_and_dumps(caplog):
    f = eqxjit.filter_jit(user)
    with caplog.at_level(logging.WARNING, "jax"), jax.log_compiles(), jax.explain_cache_misses():
        for n in (3, 4):
            for _ in range(CALLS):
                f(Model([Layer(1, X)]), jnp.ones(n))
    assert f"defined at {at(user).partition(' at ')[2]}" in caplog.text
    assert "Compiling jit(user)" in caplog.text
    assert "at second, now f32[4] and before f32[3]" in caplog.text

    def computes(model, x):
        return model.layers[0].weight * x

    text = eqxjit.filter_jit(computes).lower(Model([Layer(1, X)]), X).lowered
    text = text.as_text(debug_info=True)
    for part in ("@jit_computes", "model.layers[0].weight", in_mlir(__file__)):
        assert part in text
    for shown in (caplog.text, text):
        assert not names_ours(shown)
        assert not re.search(r"leaves|_entry", without_root(shown))
