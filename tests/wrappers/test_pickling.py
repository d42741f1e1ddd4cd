"""Pickles and copies of wrappers: what they do, what they share and what they leave out."""

import copy
import pickle
import re

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support import picklable
from tests.support.helpers import assert_same
from tests.support.sides import CALLS

X = jnp.arange(1.0, 4.0)


THINGS = {
    "decorated": lambda: picklable.decorated,
    "with options": lambda: picklable.with_options,
    "under another name": lambda: picklable.elsewhere,
    "a method": lambda: picklable.Model.step,
    "a static method": lambda: picklable.Model.helper,
    "a bound method": lambda: picklable.Model(X).step,
    "a Module as function": lambda: eqxjit.filter_jit(picklable.Model(X, picklable.plain)),
    "a wrapper of a wrapper": lambda: eqxjit.filter_jit(picklable.decorated, donate="warn"),
}


@pytest.mark.parametrize("warm", [0, 1, CALLS])
@pytest.mark.parametrize("module", [pickle, cloudpickle, copy])
@pytest.mark.parametrize("name", THINGS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_copy_does_what_the_original_does(name, module, warm):
    thing = THINGS[name]()
    arguments = (picklable.Model(X), X) if name == "a method" else (X,)
    expected = thing(*jax.tree.map(jnp.copy, arguments))
    for _ in range(warm):
        thing(*jax.tree.map(jnp.copy, arguments))
    copied = copy.deepcopy(thing) if module is copy else pickle.loads(module.dumps(thing))
    assert type(copied) is type(thing)
    assert jax.tree.structure(copied) == jax.tree.structure(thing)
    for _ in range(CALLS):
        assert_same(copied(*jax.tree.map(jnp.copy, arguments)), expected)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_decorated_function_is_pickled_by_name(protocol):
    """Any function is pickled by name. Equinox's wrapper can't be, because it owns the name."""
    for fun in (picklable.decorated, picklable.Model.step):
        pickled = pickle.dumps(fun, protocol)
        assert len(pickled) < 120
        assert pickle.loads(pickled) == fun
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(picklable.upstreams, protocol)


def test_options_and_entries_of_a_copy_in_this_process():
    # A new wrapper, because other tests clear caches, and old wrappers then don't share tables.
    elsewhere = eqxjit.filter_jit(picklable.plain)
    elsewhere.clear_cache()
    for _ in range(CALLS):
        elsewhere(X)
    copied = pickle.loads(pickle.dumps(elsewhere))
    assert copied == elsewhere
    copied(X)
    # It is the same function with the same options, so nothing is compiled twice.
    assert copied.cache_info() == elsewhere.cache_info()
    assert copied.cache_info()[:2] == (1, 1)
    changed = pickle.loads(pickle.dumps(eqxjit.filter_jit(picklable.plain, maxsize=3)))
    assert changed.cache_info().maxsize == 3


def test_what_was_compiled_stays_behind():
    for thing in (picklable.elsewhere, picklable.decorated):
        thing(X)
        assert len(pickle.dumps(thing)) < 500
    local = eqxjit.filter_jit(lambda x: x * 2)
    local(X)
    cold = len(cloudpickle.dumps(local))
    for _ in range(CALLS):
        local(X)
    assert len(cloudpickle.dumps(local)) == cold


def test_pickles_refer_to_no_private_module():
    options = {"donate": "all", "maxsize": 3, "block": True}
    local = eqxjit.filter_jit(lambda x: x + 1)
    things = [
        eqxjit.filter_jit(picklable.plain, **options),
        eqxjit.filter_jit(picklable.plain, **options).__get__(1),
        picklable.decorated,
        eqxjit.pack((jnp.ones(3), "static"), optimizer=None),
        local,
    ]
    local(jnp.ones(3))
    for thing in things:
        data = cloudpickle.dumps(thing)
        assert b"eqxjit" in data
        assert not re.search(rb"eqxjit\._", data), data
        assert type(pickle.loads(data)) is type(thing)
    assert pickle.loads(cloudpickle.dumps(local))(jnp.ones(3)).tolist() == [2, 2, 2]
