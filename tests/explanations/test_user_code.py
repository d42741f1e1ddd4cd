"""How often explanations run a flatten of the user's."""

import jax
import jax.numpy as jnp

import eqxjit


def test_a_flatten_with_keys_runs_for_a_first_trace_alone():
    n_keyed = n_flat = 0

    class Box:
        def __init__(self, a):
            self.a = a

    def keyed(box):
        nonlocal n_keyed
        n_keyed += 1
        return [(jax.tree_util.GetAttrKey("a"), box.a)], None

    def flat(box):
        nonlocal n_flat
        n_flat += 1
        return [box.a], None

    jax.tree_util.register_pytree_with_keys(Box, keyed, lambda _, c: Box(*c), flat)
    f = eqxjit.filter_jit(lambda box: box.a + 1)
    f(Box(jnp.ones(1)))
    # For the description, and for the names that JAX is told.
    assert 1 <= n_keyed <= 2
    n_keyed = n_flat = 0
    f(Box(jnp.ones(2)))
    assert n_keyed == 0
    # The slow path, and what finishes the call of a fast path.
    assert n_flat <= 2
    assert str(f.traces()[1].differences[0]) == "shape: `box.a` was float32[1], is float32[2]"
