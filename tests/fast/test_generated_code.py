"""The source of a fast path is readable, and no name or text of the user's can break it."""

import ast
import collections
import gc
import inspect
import linecache

import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.helpers import SPECIALIZING, Own, assert_same
from tests.support.models import Scaled
from tests.support.sides import CALLS

specializing = pytest.mark.skipif(not SPECIALIZING, reason="no code is generated then")
generated = pytest.mark.skipif(
    eqxjit.native_enabled() or not SPECIALIZING, reason="the source isn't what is called"
)

X = jnp.arange(1.0, 4.0)


def everything(model, x, /, flag, *rest, scale=2.0, tree=None, **options):
    return {"y": model(x) * scale, "model": model, "flag": flag, "rest": rest}


def warm(f, *args, **kwargs):
    for _ in range(CALLS):
        f(*args, **kwargs)
    return f


# --- The source -------------------------------------------------------------------------------


@specializing
def test_the_source_is_python_with_the_users_signature_and_a_comment_per_argument():
    f = eqxjit.filter_jit(everything)
    assert f.specialized_source() is None
    warm(f, Scaled(X, 2.0), X, "flag", 1, X, tree={"k": [X, None]}, mode=X)
    source = f.specialized_source()
    compile(source, "<source>", "exec")

    functions = {n.name: n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)}
    arguments = functions["everything"].args
    assert [a.arg for a in arguments.posonlyargs] == ["model", "x"]
    assert [a.arg for a in arguments.args] == ["flag"]
    assert [a.arg for a in arguments.kwonlyargs] == ["scale", "tree"]
    assert (arguments.vararg.arg, arguments.kwarg.arg) == ("rest", "options")

    comments = [line.strip() for line in source.splitlines() if line.strip().startswith("#")]
    for name in ("model", "x", "flag", "*rest", "scale", "tree", "**options"):
        assert any(comment.startswith(f"# {name}:") for comment in comments), name


@specializing
@pytest.mark.parametrize(
    "arguments",
    [
        (Scaled(X, 1.0), [Scaled(X, 2.0)] * 5, {"a": (X, "text", None)}),
        # In source `µ` (micro) is `μ` (mu).
        ({"µ": X, "μ": X + 1, "class": 1},),
    ],
    ids=["modules", "Greek"],
)
def test_the_source_is_formatted(arguments):
    jitted = eqxjit.filter_jit(lambda *arguments: arguments)
    source = warm(jitted, *arguments).specialized_source()
    compile(source, "<source>", "exec")
    assert_same(jitted(*arguments), arguments)
    for line in source.splitlines():
        assert line == line.rstrip()
        assert (len(line) - len(line.lstrip(" "))) % 4 == 0
    assert "0x" not in source


@specializing
def test_the_source_is_for_the_latest_structure():
    f = eqxjit.filter_jit(lambda x, n: x * n)
    seen = set()
    for n in (1, "two".__len__(), 2.5):
        warm(f, X, n)
        seen.add(f.specialized_source())
    assert len(seen) == 3
    f.clear_cache()
    assert f.specialized_source() is None
    warm(f, X, 1)
    assert f.specialized_source() in seen


@specializing
def test_the_source_is_for_the_latest_call():
    """That holds even if an old fast path serves the latest call."""
    f = eqxjit.filter_jit(lambda x, n: x * n)
    sources = []
    for n in range(4):
        warm(f, X, n)
        sources.append(f.specialized_source())
    for n in (2, 0, 0, 3, 1):
        f(X, n)
        assert f.specialized_source() == sources[n]


KEYS = ["a$b", "$", "{x}", "a b", "'", '"', "\n", "\\", "__a", "#", "f", "None"]


def test_a_keyword_may_be_any_text():
    f = eqxjit.filter_jit(lambda **options: options)
    options = {key: X + i for i, key in enumerate(KEYS)}
    # A careless replacement of the prefix would turn some of the keys above into these.
    options |= {"a_b": -X, "_": -X, "a__b": -X, "__": -X}
    for _ in range(CALLS):
        assert_same(f(**options), options)
        assert_same(f(tree=options), {"tree": options})


def test_a_class_may_have_any_name():
    for name in ("a\nraise ValueError", "a$b", "class", "{x}", "#", ""):
        kind = type(name or " ", (Own,), {})
        point = collections.namedtuple("Point", "x y")
        point.__name__ = name
        f = eqxjit.filter_jit(lambda tree: tree)
        for _ in range(CALLS):
            out = f([X, kind(1), point(X, 2)])
            assert type(out[1]) is kind
            assert type(out[2]) is point


@generated
def test_generated_files_have_names_of_their_own():
    """`inspect` and debuggers find the source by the file name."""

    def named(x, n):
        return x * n

    f = eqxjit.filter_jit(named)
    names = set()
    for n in range(3):
        warm(f, X, n)
        # The slot that CPython calls has the generated function itself in it.
        assert inspect.getsource(f.__call__) in f.specialized_source()
        names.add(f.__call__.__code__.co_filename)
    linecache.checkcache()
    assert inspect.getsource(f.__call__).lstrip().startswith("def named(x, n")
    assert len([name for name in names if "named" in name]) == 3


@generated
def test_the_source_is_dropped_with_the_function():
    gc.collect()
    before = set(linecache.cache)
    for n in range(10):
        warm(eqxjit.filter_jit(lambda x, n=n: x * n), X)
    gc.collect()
    assert not [name for name in set(linecache.cache) - before if name.startswith("<eqxjit")]
