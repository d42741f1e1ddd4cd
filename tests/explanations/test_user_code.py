"""How often explanations run a flatten of the user's."""

import jax
import jax.numpy as jnp

import eqxjit


def test_a_flatten_with_keys_runs_for_a_first_trace_alone():
    n_keyed = 0

    class Box:
        def __init__(self, a):
            self.a = a

    def keyed(box):
        nonlocal n_keyed
        n_keyed += 1
        return [(jax.tree_util.GetAttrKey("a"), box.a)], None

    jax.tree_util.register_pytree_with_keys(
        Box, keyed, lambda _, c: Box(*c), lambda box: ([box.a], None)
    )
    f = eqxjit.filter_jit(lambda box: box.a + 1)
    f(Box(jnp.ones(1)))
    assert n_keyed == 1
    n_keyed = 0
    f(Box(jnp.ones(2)))
    assert n_keyed == 0
    assert str(f.traces()[1].differences[0]) == "shape: `box.a` was float32[1], is float32[2]"
