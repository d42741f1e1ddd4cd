"""What tests of one behaviour share: both implementations, and calls from cold to warm."""

import equinox as eqx
import jax
import pytest

import eqxjit

#: Runs a test under upstream and under eqxjit: the same answer is expected of both.
both = pytest.mark.parametrize(
    "filter_jit",
    [
        pytest.param(eqx.filter_jit, id="equinox"),
        pytest.param(eqxjit.filter_jit, id="eqxjit"),
    ],
)

#: So many calls go through every path: the first traces, and in the last a specialised call serves.
CALLS = 4

#: For what JAX itself does wrong before 0.9: upstream fails such a test, too.
since_jax_0_9 = pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="JAX itself does otherwise before 0.9"
)
