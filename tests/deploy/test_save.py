"""`frozen.save` and `eqxjit.load`: equal results in another process; bad files are rejected."""

import json
import math
import os
import stat

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import deserialize

import eqxjit
from eqxjit._deploy import saved as module
from tests.support.helpers import assert_same
from tests.support.models import mlp
from tests.support.processes import run
from tests.support.sides import CALLS
from tests.support.threads import race

KEY = jax.random.key(0)
X = jnp.arange(1.0, 5.0)


def saved(tmp_path, fun, *args, bound=2**20):
    path = tmp_path / "model.eqxjit"
    eqxjit.freeze(fun, max_constant_bytes=bound).save(path, *args)
    return path


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def in_half_precision(model):
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16) if eqx.is_array(a) else a, model)


FUNCTIONS = {
    "a Module": (mlp(), (X,)),
    "half precision": (in_half_precision(mlp()), (X.astype(jnp.bfloat16),)),
    "two arguments": (eqx.nn.GRUCell(4, 3, key=KEY), (X, jnp.ones(3))),
    "static arguments": (lambda x, n, mode=None: x * n, (X, 3, "text")),
    "floats": (lambda x, *by: (x * by[0], by), (X, -0.0, 0.1, math.inf, math.nan)),
    "containers": (
        lambda tree, n: {"y": (tree["x"][0], [n, None, True]), "n": 1.5},
        ({"x": [X, X], "other": (X,)}, 2),
    ),
    "keys": (
        eqx.Partial(lambda own, x, key: (x + jax.random.normal(own), jax.random.split(key)), KEY),
        (X, KEY),
    ),
    "small dtypes": (
        eqx.Partial(lambda w, x: x * w.astype(x.dtype), jnp.ones(4, jnp.int4)),
        (X.astype(jnp.float8_e4m3fn),),
    ),
    "empty arrays": (eqx.Partial(jnp.add, jnp.ones((0, 4))), (jnp.ones((0, 4)),)),
    "no arrays in": (lambda n: X * n, (2,)),
    "no arrays out": (lambda x: [None, 3, "a", {}], (X,)),
}


@pytest.mark.parametrize("bound", [0, 2**20])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_results(tmp_path, name, bound):
    fun, args = FUNCTIONS[name]
    frozen = eqxjit.freeze(fun, max_constant_bytes=bound)
    path = tmp_path / "model.eqxjit"
    frozen.save(path, *args)
    loaded = eqxjit.load(path)
    expected = frozen(*args)
    for _ in range(CALLS):
        assert_same(loaded(*args), expected)
    assert loaded.cache_info()[:2] == (1, 1)
    assert os.listdir(tmp_path) == ["model.eqxjit"]


def test_in_another_process_by_the_names_of_the_parameters(tmp_path):
    path = tmp_path / "model.eqxjit"
    frozen = eqxjit.freeze(lambda model, arrays, *, n: model(arrays) * n, mlp())
    frozen.save(path, arrays=struct((4,)), n=2)
    program = """
        import sys
        import jax.numpy as jnp, eqxjit

        f = eqxjit.load(sys.argv[1])
        print([f(arrays=jnp.arange(1.0, 5.0), n=2).tolist() for _ in range(4)])
    """
    results = json.loads(run(program, str(path)))
    np.testing.assert_allclose(results, [frozen(X, n=2)] * 4, rtol=1e-6)


def test_what_is_loaded_can_be_compiled_ahead_nested_and_saved_again(tmp_path):
    path = saved(tmp_path, mlp(), X)
    loaded = eqxjit.load(path)
    loaded.compile(X, other_shapes="raise")
    expected = eqxjit.freeze(mlp())(X)
    np.testing.assert_array_equal(loaded(X), expected)
    np.testing.assert_allclose(jax.jit(loaded)(X), expected, rtol=1e-6)
    eqxjit.load(path).save(path, X)
    np.testing.assert_allclose(eqxjit.load(path)(X), expected, rtol=1e-6)


def test_weak_types_count_as_strong_ones(tmp_path):
    for saved_for in (jnp.asarray(2.0), np.float32(2)):
        loaded = eqxjit.load(saved(tmp_path, lambda x: x * 2, saved_for))
        for _ in range(CALLS):
            assert loaded(jnp.asarray(3.0)) == loaded(np.float32(3)) == 6
            assert not loaded(jnp.asarray(3.0)).weak_type


# --- Batches of any size ----------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 2**20])
def test_one_file_serves_batches_of_any_size(tmp_path, bound):
    model = mlp()
    shape = jax.export.symbolic_shape("b, 4")
    path = saved(tmp_path, jax.vmap(model), struct(shape), bound=bound)
    eqxjit.load(path).save(path, struct(shape))
    loaded = eqxjit.load(path)
    assert repr(loaded) == "load(MLP, saved for (x: float32[b,4]))"
    for size in (1, 5, 2, 5):
        batch = jnp.arange(4.0 * size).reshape(size, 4)
        for _ in range(CALLS):
            np.testing.assert_allclose(loaded(batch), jax.vmap(model)(batch), rtol=1e-5)
    assert loaded.cache_info()[:2] == (1, 3)
    nested = jax.jit(lambda x: loaded(x) * 2)(jnp.ones((7, 4)))
    assert nested.shape == (7, 3)


def test_several_symbols(tmp_path):
    b, n = jax.export.symbolic_shape("b, n")
    tree = {"z": [struct((2 * b + 1,), jnp.int32)], "n": jnp.float32(3)}

    def fun(x, y, tree):
        return x @ y, [tree["z"][0] * 2, x.shape[1] * tree["n"]]

    loaded = eqxjit.load(saved(tmp_path, fun, struct((b, n)), struct((n,)), tree))

    def call(b, n, m, z):
        tree = {"z": [jnp.arange(z)], "n": jnp.float32(3)}
        return loaded(jnp.ones((b, n)), np.ones(m, np.float32), tree)

    for b, n in [(2, 3), (4, 1), (2, 3)]:
        product, [twice, scaled] = call(b, n, n, 2 * b + 1)
        assert product.tolist() == [n] * b
        assert twice.tolist() == [2 * i for i in range(2 * b + 1)]
        assert scaled == 3 * n
    for sizes, texts in {
        (2, 3, 4, 5): [
            "`x` was float32[b,n], is float32[2,3]",
            "`y` was float32[n], is float32[4]",
        ],
        (2, 3, 3, 4): ["`tree['z'][0]` was int32[2*b + 1], is int32[4]"],
        (0, 3, 3, 1): ["`x` was float32[b,n], is float32[0,3]"],
    }.items():
        with pytest.raises(ValueError, match="`fun` was saved for") as caught:
            call(*sizes)
        for text in texts:
            assert text in str(caught.value)


def test_symbols_of_two_scopes_are_refused(tmp_path):
    frozen = eqxjit.freeze(lambda x, y: x + y)
    path = tmp_path / "model"
    with pytest.raises(ValueError, match="Invalid mixing of symbolic scopes"):
        frozen.save(path, *[struct(jax.export.symbolic_shape("b, 4")) for _ in range(2)])
    scope = jax.export.SymbolicScope()
    shapes = [jax.export.symbolic_shape("b, 4", scope=scope) for _ in range(2)]
    frozen.save(path, *map(struct, shapes))
    ones = jnp.ones((2, 4))
    assert eqxjit.load(path)(ones, ones).tolist() == (2 * ones).tolist()


# --- Wrong calls ------------------------------------------------------------------------------


def test_other_arguments_are_refused(tmp_path):
    path = saved(tmp_path, lambda x, n, tree: X * x * n, X, 2, {"y": np.float32(1), "k": 2})
    loaded = eqxjit.load(path)
    tree = {"y": np.float32(1), "k": 2}
    assert repr(loaded) == (
        "load(<lambda>, saved for (x: float32[4], n: 2, tree['k']: 2, tree['y']: float32[]))"
    )
    wrong = [
        ((X.astype(int), 2, tree), "`x` was float32, is int32"),
        ((X[:3], 2, tree), "`x` was float32[4], is float32[3]"),
        ((X, 3, tree), "`n` was 2, is 3"),
        (([X], 2, tree), "`x` was float32[4], is list of 1"),
        ((X, 2, {**tree, "k": True}), "`tree['k']` was 2, is True"),
        ((X, 2, {**tree, "y": 1.0}), "pass `np.float32(2.0)`, say"),
        ((X, 2, {"z": np.float32(1), "k": 2}), "`tree['y']` was float32[], is absent"),
    ]
    for _ in range(CALLS):
        assert loaded(X, 2, tree).shape == (4,)
        for args, text in wrong:
            with pytest.raises(ValueError, match=r"`.*<lambda>` was saved for other") as caught:
                loaded(*args)
            assert text in str(caught.value)
            assert ("pass `np.float32" in str(caught.value)) == ("np.float32" in text)
        with pytest.raises(TypeError, match="missing"):
            loaded(X)
    assert loaded.cache_info()[:2] == (1, 1)


def test_a_loaded_function_under_transformations(tmp_path):
    """Under `vmap` it runs once for each element. It can't be differentiated."""
    x = jnp.arange(3.0)
    for bound in (0, 2**20):
        own = eqx.Partial(jnp.multiply, x + 1)
        loaded = eqxjit.load(saved(tmp_path, own, x, bound=bound))
        for _ in range(CALLS):
            assert_same(jax.vmap(loaded)(jnp.stack([x, x + 1])), (x + 1) * jnp.stack([x, x + 1]))
            assert jax.vmap(jax.vmap(loaded), 2)(jnp.ones((2, 3, 4))).shape == (4, 2, 3)
            # JAX raises a different type in each mode. The error is of both types.
            for kind in (ValueError, TypeError):
                for differentiate in (
                    lambda f=loaded: jax.grad(lambda x: f(x).sum())(x),
                    lambda f=loaded: jax.jvp(f, (x,), (x,)),
                    lambda f=loaded: jax.vmap(jax.jacfwd(f))(x[None]),
                    lambda f=loaded: eqxjit.filter_jit(jax.hessian(f))(x),
                ):
                    with pytest.raises(kind, match=r"`Partial` was loaded.* can't differentiate"):
                        differentiate()
            # The loaded function may be called in a gradient with respect to other values.
            ones = jax.grad(lambda y, f=loaded: (y * f(x)).sum())(x)
            assert_same(ones, x * (x + 1))


def test_a_loaded_function_of_symbolic_shapes_says_that_it_cannot_be_differentiated(tmp_path):
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.float32)
    loaded = eqxjit.load(saved(tmp_path, jnp.sin, shape))
    with pytest.raises(ValueError, match="can't differentiate it"):
        jax.grad(lambda x: loaded(x).sum())(X)


# --- Files ------------------------------------------------------------------------------------


def test_paths_of_any_kind(tmp_path):
    frozen = eqxjit.freeze(mlp())
    for path in (tmp_path / "a", os.fspath(tmp_path / "b"), os.fsencode(tmp_path / "c")):
        frozen.save(path, X)
        assert eqxjit.load(path)(X).shape == frozen(X).shape
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]
    # For the number 0, Python's `open` would read and close the standard input.
    with pytest.raises(TypeError, match=r"str, bytes or os\.PathLike"):
        eqxjit.load(0)


def test_saving_leaves_no_trace(tmp_path):
    """A saved program isn't compiled, so it isn't among the function's traces."""
    frozen = eqxjit.freeze(jax.vmap(mlp()))
    batch = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)
    frozen.save(tmp_path / "saved", batch)
    assert frozen.cache_info()[:2] == (0, 0)
    frozen.compile(np.ones((2, 4), np.float32), other_shapes="raise")
    frozen.save(tmp_path / "saved", jnp.ones((3, 4)))
    with pytest.raises(eqxjit.TooManyTracesError) as refused:
        frozen(np.ones((3, 4), np.float32))
    assert str(refused.value).endswith("It is compiled for\n  - x: float32[2,4]")
    assert frozen.cache_info()[:2] == (1, 1)
    assert eqxjit.load(tmp_path / "saved")(np.ones((3, 4), np.float32)).shape == (3, 3)


def test_output_that_depends_on_shapes_is_that_of_the_saved_shape(tmp_path):
    frozen = eqxjit.freeze(lambda x: {"x": x, "n": x.shape[0]})
    for n in (2, 3):
        frozen(jnp.ones(n))
        frozen.save(tmp_path / "saved", jnp.ones(n))
        assert eqxjit.load(tmp_path / "saved")(jnp.ones(n))["n"] == n


def test_errors_of_files_name_the_file(tmp_path):
    frozen = eqxjit.freeze(lambda x: x)
    for path in (tmp_path / "missing" / "z", tmp_path / ("n" * 300), tmp_path):
        # A path that can't be opened is noticed before the function is traced.
        assert frozen.traces() == []
        with pytest.raises(OSError) as raised:  # noqa: PT011
            frozen.save(path, jnp.ones(1))
        assert raised.value.filename == str(path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        eqxjit.load(tmp_path / "none")


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_permissions_and_links_are_those_of_open(tmp_path):
    frozen = eqxjit.freeze(lambda x: x)
    path, link, plain = (tmp_path / name for name in ("model", "link", "plain"))
    plain.touch()
    frozen.save(path, X)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    path.chmod(0o600)
    link.symlink_to("model")
    frozen.save(link, X)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_saving_and_loading_at_once(tmp_path):
    """Each load finds a complete file, even while other threads save."""
    path = tmp_path / "model"
    functions = [
        eqxjit.freeze(eqx.Partial(lambda w, x: x + w[0], jnp.full(9000 * n, float(n))))
        for n in (1, 2)
    ]
    functions[0].save(path, X)

    def work(number):
        for _ in range(10):
            if number < 2:
                functions[number].save(path, X)
            assert (eqxjit.load(path)(X) - X).tolist() in ([1] * 4, [2] * 4)

    race(work, 4)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    "error", [TimeoutError("late"), OSError(2, "mine", "f"), NotImplementedError("mine")]
)
def test_a_users_error_is_raised_and_nothing_stays(tmp_path, error):
    def fail(x):
        raise error

    with pytest.raises(type(error)) as raised:
        saved(tmp_path, fail, X)
    assert raised.value is error
    assert os.listdir(tmp_path) == []


def test_every_changed_byte_and_every_part_is_noticed(tmp_path):
    path = saved(tmp_path, mlp(), X, bound=0)
    content = path.read_bytes()
    header = content.index(b"\n")
    for position in (*range(header + 3), *range(header, len(content), 97), len(content) - 1):
        for wrong in (
            content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :],
            content[:position],
        ):
            path.write_bytes(wrong)
            with pytest.raises(ValueError, match=r"model\.eqxjit (is damaged|was written by)"):
                eqxjit.load(path)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "file"
    for content in (b"", b"PK\x03\x04" * 99, b"eqxjit.freeze", b"\0" * 999):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="file is damaged, or wasn't written by"):
            eqxjit.load(path)


@pytest.mark.parametrize(
    ("version", "remedy"), [("6 0.1.0.dev7+g14b67c38c", "Save it again"), ("9", "Upgrade eqxjit")]
)
def test_other_versions_of_the_format_say_so(tmp_path, version, remedy):
    path = saved(tmp_path, mlp(), X)
    words = path.read_bytes().split(b" ", 2)
    words[1] = version.encode()
    path.write_bytes(b" ".join(words))
    told = rf"in version {version[0]} of the format; this release of eqxjit reads .*\. {remedy}"
    with pytest.raises(ValueError, match=told):
        eqxjit.load(path)


def test_other_platforms_are_refused(tmp_path, monkeypatch):
    path = saved(tmp_path, mlp(), X)
    monkeypatch.setattr(module, "default_export_platform", lambda: "rocm")
    here = jax.export.default_export_platform()
    with pytest.raises(ValueError, match=f"for {here}, and JAX runs on rocm here"):
        eqxjit.load(path)


@pytest.mark.parametrize("of", ["argument", "model"])
def test_64_bit_numbers_need_the_switch_of_jax(tmp_path, of):
    path = tmp_path / "wide"
    with jax.enable_x64(True):
        wide, key = jnp.arange(3.0), jax.random.key(0)
        factor, x = (wide, jnp.int32(2)) if of == "model" else (jnp.int32(2), wide)
        frozen = eqxjit.freeze(lambda a, x, key: a * x, factor, max_constant_bytes=0)
        frozen.save(path, x, key)
        np.testing.assert_array_equal(eqxjit.load(path)(x, key), 2 * np.arange(3.0))
    with pytest.raises(ValueError, match="64-bit numbers, which are switched off") as caught:
        eqxjit.load(path)
    assert str(path) in str(caught.value)


def test_a_program_that_jax_cannot_read_says_so(tmp_path, monkeypatch):
    """An exception that a signal handler raises meanwhile reaches the caller."""
    path = saved(tmp_path, mlp(), X)
    for error, raised, told in [
        (KeyError("another release"), ValueError, f"saved under jax {jax.__version__}, whose"),
        (TimeoutError("late"), TimeoutError, "late"),
    ]:

        def fail(content, error=error):
            raise error

        monkeypatch.setattr(module, "deserialize", fail)
        with pytest.raises(raised, match=told):
            eqxjit.load(path)
    monkeypatch.setattr(module, "deserialize", deserialize)
    assert eqxjit.load(path)(X).shape == (3,)


def test_without_flatbuffers_it_is_named(tmp_path):
    program = """
        import sys

        sys.modules["flatbuffers"] = None
        import jax.numpy as jnp, eqxjit

        for action in (
            lambda: eqxjit.freeze(jnp.sin).save(sys.argv[2], jnp.ones(3)),
            lambda: eqxjit.load(sys.argv[1]),
        ):
            try:
                action()
            except ImportError as error:
                assert "install 'flatbuffers'" in str(error), error
            else:
                raise AssertionError("no error")
    """
    run(program, str(saved(tmp_path, mlp(), X)), str(tmp_path / "other"))


# --- What can't be saved ----------------------------------------------------------------------


class Output(eqx.Module):
    y: jax.Array


@pytest.mark.parametrize(
    ("fun", "args", "message"),
    [
        (lambda x: Output(x), (X,), r"`output` is of type `Output`"),
        (lambda x: {"y": [Output(x)]}, (X,), r"`output\['y'\]\[0\]` is of type `Output`"),
        (lambda x: x.y, (Output(X),), r"`x` is of type `Output`"),
        (lambda x, f: f(x), (X, jnp.sin), r"`f` is of type `(ufunc|PjitFunction)`"),
        (lambda d: d[1], ({1: X},), r"`d` is of type `dict`"),
    ],
)
def test_what_only_pickle_could_write_is_refused(tmp_path, fun, args, message):
    with pytest.raises(ValueError, match=message):
        saved(tmp_path, fun, *args)
    assert os.listdir(tmp_path) == []


def test_a_function_that_calls_back_is_refused(tmp_path):
    def prints(x):
        jax.debug.print("{}", x)
        return x

    for argument in (jnp.ones(3), (3, 1)):
        with pytest.raises(NotImplementedError, match="callback") as raised:
            saved(tmp_path, prints, argument)
        assert "hold callbacks into Python, as `jax.debug.print`" in "\n".join(
            raised.value.__notes__
        )
