"""Without each private name in turn, eqxjit still imports and computes the same, only slower."""

import ast
import collections
import dataclasses
import inspect
import pathlib
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

import eqxjit
from eqxjit import _compat
from tests.support.processes import run

PROGRAM = """
    import pkgutil
    import sys

    import equinox as eqx
    import jax
    import jax.numpy as jnp

    resolve_name = pkgutil.resolve_name

    def without(name):
        if name == hidden:
            raise ImportError(name)
        return resolve_name(name)

    def step(model, x, n):
        assert eqxjit.currently_jitting()
        return jax.tree.map(lambda leaf: leaf * n if eqx.is_array(leaf) else leaf, model), model(x)

    def check():
        model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
        x = jnp.ones(2)
        # Functions of its own, which have no tables of another import's.
        ours = eqxjit.filter_jit(lambda *args: step(*args))
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

    pkgutil.resolve_name = without
    for hidden in sys.argv[1:]:
        for name in [*sys.modules]:
            if name.startswith("eqxjit") and name != "eqxjit._native":
                del sys.modules[name]
        import eqxjit
        check()
        print(hidden)
"""


def imported_names(source):
    """Return the modules that a file imports, and the names that it uses, as `module.name`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def is_private(name):
    """Return whether a name of JAX or Equinox, or a module before it, is private."""
    return name.startswith("jaxlib.") or bool(re.match(r"(jax|equinox)\..*?\b_(?!_)", name))


PRIVATE = re.findall(r'_private\("((?:jax|equinox).*?)"', inspect.getsource(_compat))


@pytest.mark.slow
def test_without_each_private_name():
    names = ["nothing", *PRIVATE]
    assert run(PROGRAM, *names).split() == names


def test_private_names_are_imported_in_one_file():
    assert {"jax._src.core:trace_ctx", "equinox._jit:_JitWrapper"} <= set(PRIVATE)
    for file in pathlib.Path(_compat.__file__).parent.rglob("*.py"):
        if file.name != "_compat.py":
            assert not [*filter(is_private, imported_names(file.read_text()))], file.name


def test_a_program_that_cannot_be_read_may_raise():
    """Waiting without need is slow, but not waiting would lose the program's error."""
    assert _compat.may_raise(object())


@pytest.mark.parametrize(
    ("read", "fallback"),
    [
        (_compat.memory_of, None),
        (_compat.has_host_callback, False),
        (_compat.source_of, None),
        (_compat.upstream_donation, None),
        (_compat.wrapped_by_tracer, []),
        (_compat.copy_in_tracer, None),
        (lambda lowered: _compat.memory_of(_compat.weak_lowering(lowered)()), None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_objects_of_a_release_without_their_private_attributes(read, fallback):
    """Reports then show less, and `install` doesn't change existing wrappers."""
    assert read(object()) == fallback


class Pair(NamedTuple):
    first: Any


@dataclasses.dataclass(frozen=True)
class Data:
    value: Any


@pytest.mark.parametrize("name", ["_GENERATED_EQ", "_NAMED_TUPLE_MODULE"])
def test_without_names_that_python_gives_what_it_generates(name, monkeypatch):
    """Objects are then created by calling the class, and compared by `==`, as under Equinox."""
    monkeypatch.setattr(_compat, name, "<gone>")
    # New classes, for which nothing is cached.
    pair = collections.namedtuple("pair", "first second")
    data = dataclasses.make_dataclass("data", ["value"], frozen=True)
    assert not (_compat.has_generated_eq(data) and _compat.has_generated_new(pair))
    f = eqxjit.filter_jit(lambda tree, static: (pair(tree.second, tree.first), static))
    for n in (1, 2) * 4:
        tree, static = f(pair(jnp.ones(n), "a"), data(n))
        assert (type(tree), tree.first, tree.second.shape) == (pair, "a", (n,))
        assert static == data(n)
    assert f.cache_info().traces == 2


def test_what_python_generates_is_found():
    assert _compat.has_generated_eq(Data)
    assert _compat.has_generated_new(Pair)

    class Own(Data):
        def __eq__(self, other):
            return True

        __hash__ = Data.__hash__

    class Child(Data):
        pass

    own_new = collections.namedtuple("own_new", "x")
    own_new.__new__ = lambda cls, x: tuple.__new__(cls, (x,))
    assert not _compat.has_generated_eq(Own)
    assert not _compat.has_generated_eq(Child)
    assert not _compat.has_generated_eq(object)
    assert not _compat.has_generated_new(own_new)
