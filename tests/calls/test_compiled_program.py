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
    import collections, hashlib, sys, typing
    import equinox as eqx, eqxjit, jax, jax.numpy as jnp, numpy as np

    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))

    class Pair(typing.NamedTuple):
        first: object
        second: object

    class Result(eqx.Module):
        value: jax.Array
        make: object = eqx.field(static=True)

    # Generated files are numbered; this process may have made others before.
    for n in range(int(sys.argv[1])):
        eqxjit.filter_jit(lambda: n)()

    x = jnp.arange(1.0, 4.0)
    mlp = eqx.nn.MLP(3, 3, 8, 2, key=jax.random.key(0))
    # What varies from process to process: addresses, the order of sets, ids in names.
    unordered = frozenset("abcdefgh")
    thing = object()

    def anything(tree, x, flag=None):
        total = sum(leaf.sum() for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf))
        result = Result(x * 2, lambda: x)
        return {"y": mlp(x), "total": total, "pair": Pair(x + 1, thing), "result": result}

    def train(model, x):
        def loss(model):
            return (jax.vmap(model)(x) ** 2).mean()
        value, gradient = eqx.filter_value_and_grad(loss)(model)
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
    print("hits", events["/jax/compilation_cache/cache_hits"])
    print("misses", events["/jax/compilation_cache/cache_misses"])
"""


@pytest.mark.slow
def test_the_persistent_compilation_cache_hits_in_a_second_process(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    # Another seed, another order of sets; another module, other addresses.
    first = run(PROGRAM, "1", PYTHONHASHSEED="1", **cache).splitlines()
    entries = {path.name for path in tmp_path.iterdir()}
    second = run(
        PROGRAM.replace("import", "import sqlite3,", 1), "7", PYTHONHASHSEED="2", **cache
    ).splitlines()

    assert second[:6] == first[:6]
    assert len(set(first[:6])) == 6
    assert any("anything" in entry for entry in entries)
    assert int(first[-1].split()[1]) > 6
    assert second[-1] == "misses 0"
    assert int(second[-2].split()[1]) >= int(first[-1].split()[1])
    new = {path.name for path in tmp_path.iterdir()} - entries
    assert not [name for name in new if not name.endswith("-atime")]
