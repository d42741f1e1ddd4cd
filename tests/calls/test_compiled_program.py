"""The compiled program: named after the user's function, and the same text in every process."""

import logging
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.callables import X, every_callable
from tests.support.processes import run
from tests.support.sides import CALLS


def _program_name(text):
    return re.search(r"^(?:HloModule |module @)([\w.<>-]+)", text, re.MULTILINE).group(1)


@every_callable
def test_the_program_is_named_as_upstreams(fun):
    ours, theirs = eqxjit.filter_jit(fun).lower(X), eqx.filter_jit(fun).lower(X)
    assert _program_name(ours.as_text()) == _program_name(theirs.as_text())
    assert "0x" not in ours.as_text()


def test_log_compiles_tells_the_name_once(caplog):
    """A name for each static value and each shape, whatever eqxjit does behind it."""

    def logged(x, n):
        return x * n

    caplog.set_level(logging.WARNING)
    for filter_jit in (eqx.filter_jit, eqxjit.filter_jit):
        f, x, y = filter_jit(logged), X + 1, jnp.ones(2)
        with jax.log_compiles():
            for arguments in ((x, 1), (x, 2), (y, 1)):
                caplog.clear()
                for _ in range(CALLS):
                    f(*arguments)
                assert re.findall(r"Compiling (?:jit\()?([\w<>]+)\)?", caplog.text) == ["logged"]


PROGRAM = """
    import collections, hashlib, sys
    import equinox as eqx, eqxjit, jax, jax.numpy as jnp

    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))

    # Generated files are numbered; this process may have made others before.
    for n in range(int(sys.argv[1])):
        eqxjit.filter_jit(lambda: n)()

    x = jnp.arange(1.0, 4.0)
    mlp = eqx.nn.MLP(3, 3, 8, 2, key=jax.random.key(0))
    # What varies from process to process: addresses, the order of sets, ids in names.
    unordered = frozenset("abcdefgh")
    thing = object()

    def anything(tree, x, flag=None):
        return {"y": mlp(x), "tree": tree, "thing": thing, "made": eqx.Partial(lambda: x, x * 2)}

    def train(model, x):
        value, gradient = eqx.filter_value_and_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
        return value, eqx.apply_updates(model, gradient)

    wrapped = [
        (eqxjit.filter_jit(anything), ({"b": x, "a": [thing, unordered]}, x, lambda: 3)),
        (eqxjit.filter_jit(anything), ((x, x), x)),
        (eqxjit.filter_jit(train, donate="all-except-first"), (mlp, jnp.ones((5, 3)))),
        (eqxjit.filter_jit(mlp), (x,)),
        (eqxjit.freeze(mlp), (x,)),
        (eqxjit.filter_jit(lambda p, x: p.unpack()(x)), (eqxjit.pack(mlp, optimizer=None), x)),
    ]
    for f, arguments in wrapped:
        print(hashlib.sha256(f.lower(*arguments).as_text().encode()).hexdigest())
    ahead = eqxjit.filter_jit(lambda x: mlp(x) + 7)
    ahead.compile(jax.ShapeDtypeStruct((3,), x.dtype))
    for f, arguments in [*wrapped, (ahead, (x,))] * 4:
        f(*arguments)
    print(events["/jax/compilation_cache/cache_misses"])
"""


@pytest.mark.slow
def test_the_persistent_compilation_cache_hits_in_a_second_process(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    # Another seed, another order of sets; another module, other addresses.
    other = PROGRAM.replace("import", "import sqlite3,", 1)
    *first, first_misses = run(PROGRAM, "1", PYTHONHASHSEED="1", **cache).split()
    *second, second_misses = run(other, "7", PYTHONHASHSEED="2", **cache).split()
    assert second == first
    assert len({*first}) == 6
    assert int(first_misses) > 6
    assert second_misses == "0"
    assert any("anything" in path.name for path in tmp_path.iterdir())
