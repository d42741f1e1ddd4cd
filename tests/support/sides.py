"""What tests of one behaviour share: both implementations, and calls from cold to warm."""

import equinox as eqx
import jax
import pytest

import eqxjit

#: Runs a test under Equinox and under eqxjit, with the same expectations.
both = pytest.mark.parametrize(
    "filter_jit",
    [
        pytest.param(eqx.filter_jit, id="equinox"),
        pytest.param(eqxjit.filter_jit, id="eqxjit"),
    ],
)

#: This many calls take every path: the first traces, and the last takes the fast path.
CALLS = 4

#: Skips a test of behaviour that JAX itself gets wrong before 0.9. Equinox fails it, too.
since_jax_0_9 = pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="JAX itself does otherwise before 0.9"
)
