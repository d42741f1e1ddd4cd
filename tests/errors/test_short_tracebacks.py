"""The tracebacks of the commonest mistakes: one error, and few frames of eqxjit."""

import traceback

import jax.numpy as jnp
import pytest

import eqxjit


def one_argument(x):
    return x


@pytest.mark.parametrize("n_calls", [0, 1, 3])
@pytest.mark.parametrize("wrong", [lambda f: f(), lambda f: f(1, 2), lambda f: f(1, y=2)])
def test_a_wrong_call_shows_one_error(wrong, n_calls):
    f = eqxjit.filter_jit(one_argument)
    for _ in range(n_calls):
        f(jnp.ones(3))
    with pytest.raises(TypeError, match=r"one_argument\(\)") as raised:
        wrong(f)
    check(raised.value)


@pytest.mark.parametrize(
    "options", [{"donates": "all"}, {"donate": "everything"}, {"static_argnums": [0]}]
)
def test_a_wrong_option_shows_one_error(options):
    with pytest.raises((TypeError, ValueError)) as raised:
        eqxjit.filter_jit(one_argument, **options)
    check(raised.value)


def check(error):
    assert error.__context__ is None or error.__suppress_context__
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert sum("eqxjit/_" in name for name in frames) <= 2
