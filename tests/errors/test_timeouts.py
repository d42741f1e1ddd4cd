"""What a signal handler raises in a call arrives, and the next call is right."""

import pytest

from tests.support.processes import run

# A timer fires once, at a random moment during a series of calls. If its exception doesn't arrive,
# the calls go on, and the program notices.
PROGRAM = """
    import collections, gc, random, signal, time
    import equinox as eqx, jax, jax.numpy as jnp, numpy as np
    import eqxjit

    # JAX has one: Python drops what is raised in it.
    gc.callbacks.clear()

    class Timeout(Exception): ...
    # What handlers of timeouts raise.
    ERRORS = [Timeout, TimeoutError, RuntimeError]

    class Own:
        def __init__(self, value=0): self.value = value
        def __eq__(self, other): return type(other) is Own and self.value == other.value
        def __hash__(self): return self.value

    @jax.tree_util.register_pytree_node_class
    class Node:
        def __init__(self, *children): self.children = children
        def tree_flatten(self): return [*self.children], ("metadata", len(self.children))
        @classmethod
        def tree_unflatten(cls, metadata, children): return cls(*children)

    class Model(eqx.Module):
        weight: object
        inner: object = None
        static: object = eqx.field(static=True, default=None)

        @eqxjit.filter_jit
        def step(self, x): return self.weight + x

    x = jnp.ones(2)
    f = eqxjit.filter_jit(lambda tree, x: (tree, x + 1))
    owns = [Own(i) for i in range(20)]
    model = Model(x, Model(np.ones(2), Own()), [1, 2.0, {"a": Own()}])
    ahead = f.lower(owns, x).compile()
    double = lambda tree, x: (tree, x * 2)
    calls = {
        "arrays": lambda: f([x] * 20, x),
        "NumPy": lambda: f([np.ones(2), np.ones(5000)], x),
        "own ==": lambda: f(owns, x),
        "nodes made again": lambda: f([Node(x, Node(x))] * 5, x),
        "Modules": lambda: f([model] * 4, x),
        "structures in turn": lambda: [f(Own(i), x) for i in range(9)],
        "ahead of time": lambda: ahead(owns, x),
        "a method": lambda: model.step(x),
        "wrapped where it is called": lambda: eqxjit.filter_jit(double)(Own(), x),
    }

    def handler(*_): raise error
    signal.signal(signal.SIGALRM, handler)

    def repeat(call, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            call()

    def arrives(call, error, seconds):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            # Of a function of its own: in Python 3.13 a `try` doesn't catch what a jump back to
            # the head of a loop in it raises.
            repeat(call, seconds + 2)
            return False
        except error as found:
            return type(found) is error

    random.seed(0)
    arrived, missing = 0, []
    for name, call in calls.items():
        for _ in range(4): call()
        for i in range(34):
            error = ERRORS[i % len(ERRORS)]
            if arrives(call, error, random.uniform(0.0002, 0.003)):
                arrived += 1
            else:
                missing.append((name, error.__name__))
        # Nothing is left behind, either.
        [*_, out] = jax.tree.leaves(call(), is_leaf=lambda leaf: leaf is x)
        assert out.shape == (2,) and out[0] == 2, name
    print(arrived, missing)
"""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param({}, id="default"),
        pytest.param({"EQXJIT_NATIVE": "0"}, id="generated"),
        pytest.param({"EQXJIT_SPECIALIZE": "0"}, id="slow"),
    ],
)
def test_each_timeout_arrives(path):
    """A timer interrupts calls at many points, on each path, and none of its errors is lost."""
    assert run(PROGRAM, **path) == "306 []\n"


# The handler runs in the `number`-th flatten of a node, in a call whose own error comes first.
FAILING = """
    import signal
    import equinox as eqx, jax, jax.numpy as jnp
    import eqxjit

    class Timeout(Exception): ...
    n_left = 0

    @jax.tree_util.register_pytree_node_class
    class Node:
        def __init__(self, child): self.child = child
        def tree_flatten(self):
            global n_left
            n_left -= 1
            if n_left == 0: signal.raise_signal(signal.SIGALRM)
            return [self.child], None
        @classmethod
        def tree_unflatten(cls, _, children): return cls(*children)

    def handler(*_): raise Timeout
    signal.signal(signal.SIGALRM, handler)

    @eqxjit.filter_jit
    def f(node, x): return eqx.error_if(x, x > 1, "too large")

    node, small, large = Node(jnp.ones(2)), jnp.array(0.0), jnp.array(2.0)
    for _ in range(4): f(node, small)
    outcomes = []
    for number in range(1, 6):
        n_left = number
        try: f(node, large)
        except Timeout: outcomes.append(n_left <= 0)
        except eqx.EquinoxRuntimeError: outcomes.append(n_left > 0)
    print(all(outcomes), n_left > 0)
"""


@pytest.mark.parametrize("native", ["0", "1"])
def test_a_timeout_while_an_error_is_explained_arrives(native):
    assert run(FAILING, EQXJIT_NATIVE=native) == "True True\n"
