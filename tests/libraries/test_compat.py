"""Without each private name in turn, eqxjit still imports and computes the same, only slower."""

import inspect
import pathlib

import pytest

from eqxjit import _compat
from tests.support.hiding import imported_names, is_private
from tests.support.processes import run

PROGRAM = """
    import sys

    from tests.support.hiding import import_without

    import_without(sys.argv[1])
    import eqxjit
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    x = jnp.ones(2)

    def step(model, x, n):
        assert eqxjit.currently_jitting()
        return jax.tree.map(lambda leaf: leaf * n if eqx.is_array(leaf) else leaf, model), model(x)

    ours = eqxjit.filter_jit(step)
    for n in (1, 2.0, True):
        theirs = eqx.filter_jit(lambda model, x: step(model, x, n))(model, x)
        for _ in range(4):
            assert eqx.tree_equal(ours(model, x, n), theirs)
    assert ours.cache_info().traces == 3
    assert not eqxjit.currently_jitting()

    checked = eqxjit.filter_jit(lambda x: eqx.error_if(x, x < 0, "negative"))
    for _ in range(4):
        checked(x)
        try:
            checked(-x)
        except Exception as error:
            assert "negative" in str(error)
        else:
            raise AssertionError("no error")
    eqx.clear_caches()
    checked(x)
    print("fine")
"""

PRIVATE = sorted(filter(is_private, imported_names(inspect.getsource(_compat))))


@pytest.mark.parametrize("hidden", ["nothing", *PRIVATE])
@pytest.mark.slow
def test_without_a_private_name(hidden):
    assert run(PROGRAM, hidden).endswith("fine\n")


def test_private_names_are_imported_in_one_file():
    assert {"jax._src.core", "equinox._jit._JitWrapper"} <= set(PRIVATE)
    for file in pathlib.Path(_compat.__file__).parent.rglob("*.py"):
        if file.name != "_compat.py":
            assert not [*filter(is_private, imported_names(file.read_text()))], file.name


def test_a_program_that_cannot_be_read_may_raise():
    """Waiting for it in vain is slow; not waiting would lose its error."""
    assert _compat.may_raise(object())
