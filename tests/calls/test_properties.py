"""Random calls of random functions: eqxjit, Equinox and plain Python have the same outcomes.

With `HYPOTHESIS_PROFILE=thorough`, `pytest` on this file draws more than 10,000 scenarios.
"""

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqxjit._spec.tree import split
from tests.support.differential import (
    FORMS,
    PIECES,
    compare,
    described,
)
from tests.support.profile import SCENARIOS
from tests.support.strategies import pairs, scenarios

_drawn = itertools.count(1)


def _bound_memory():
    """Clear the caches of Equinox and JAX, which keep each compiled program."""
    if next(_drawn) % 100 == 0:
        eqx.clear_caches()
        jax.clear_caches()
        gc.collect()


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=SCENARIOS // len(FORMS))
@given(data=st.data())
@pytest.mark.slow
def test_sequences_of_calls(form, data):
    _bound_memory()
    scenario = data.draw(scenarios(form, list(PIECES)))
    # A failure under Equinox uses up some of its thread's stack for good, so each scenario has a
    # new thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(compare, scenario).result()


@settings(max_examples=SCENARIOS)
@given(pairs())
def test_static_keys_are_equal_where_structures_print_alike(pair):
    tree, other = pair
    first, again, varied = [split(make())[0] for make in (tree, tree, other)]
    assert (first, hash(first)) == (again, hash(again))
    print_alike = described(tree(), avals=False) == described(other(), avals=False)
    assert (first == varied) is print_alike
