"""`frozen.save` and `eqxjit.load`: the same results in another process; wrong files are refused."""

import contextlib
import json
import os
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support import inside
from tests.support.models import mlp
from tests.support.processes import run
from tests.support.sides import CALLS

KEY = jax.random.key(0)
X = jnp.arange(1.0, 5.0)


def saved(tmp_path, fun, *args, bound=2**20):
    path = tmp_path / "model.eqxjit"
    eqxjit.freeze(fun, max_constant_bytes=bound).save(path, *args)
    return path


def functions():
    model = mlp()
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), eqx.filter(model, eqx.is_array))
    half = eqx.combine(half, model)
    cell = eqx.nn.GRUCell(4, 3, key=KEY)
    return {
        "a Module": (model, (X,)),
        "a batch": (jax.vmap(model), (jnp.ones((5, 4)),)),
        "half precision": (half, (X.astype(jnp.bfloat16),)),
        "two arguments": (cell, (X, jnp.ones(3))),
        "static arguments": (lambda x, n, mode=None: model(x) * n, (X, 3, "text")),
        "floats": (lambda x, by: model(x) * by, (X, -0.0)),
        "containers": (
            lambda tree, n: {"y": (model(tree["x"][0]), [n, None, True]), "n": 1.5},
            ({"x": [X, X], "other": (X,)}, 2),
        ),
        "a key": (lambda x, key: model(x) + jax.random.normal(key), (X, KEY)),
        "integers": (lambda x: model(X) + x, (jnp.arange(3),)),
        "NumPy": (model, (np.ones(4, np.float32),)),
        "no arrays in": (lambda n: model(X) * n, (2,)),
    }


@pytest.mark.parametrize("bound", [0, 100, 2**20])
@pytest.mark.parametrize("name", functions())
def test_the_same_results(tmp_path, name, bound):
    fun, args = functions()[name]
    frozen = eqxjit.freeze(fun, max_constant_bytes=bound)
    path = tmp_path / "model.eqxjit"
    frozen.save(path, *args)
    loaded = eqxjit.load(path)
    expected = frozen(*args)
    for _ in range(CALLS):
        result = loaded(*args)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert type(ours) is type(theirs)
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert loaded.cache_info()[:2] == (1, 1)
    assert os.listdir(tmp_path) == ["model.eqxjit"]


def test_in_another_process_by_the_names_of_the_parameters(tmp_path):
    model = mlp()
    path = tmp_path / "model.eqxjit"
    frozen = eqxjit.freeze(lambda model, x, *, n: model(x) * n, model)
    frozen.save(path, x=jax.ShapeDtypeStruct((4,), jnp.float32), n=2)
    program = """
        import sys
        import jax.numpy as jnp, eqxjit

        f = eqxjit.load(sys.argv[1])
        print([f(x=jnp.arange(1.0, 5.0), n=2).tolist() for _ in range(4)])
    """
    results = json.loads(run(program, str(path)))
    assert results == [frozen(X, n=2).tolist()] * 4


def test_other_arguments_are_refused(tmp_path):
    loaded = eqxjit.load(saved(tmp_path, lambda x, n: X * x * n, X, 2))
    assert repr(loaded) == "load(<lambda>, saved for (float32[4], 2))"
    for _ in range(CALLS):
        loaded(X, 2)
        with pytest.raises(ValueError, match=r"saved for float32\[4\], and is called with int32"):
            loaded(X.astype(int), 2)
        with pytest.raises(ValueError, match=r"saved for \(float32\[4\], 2\), and is called with"):
            loaded(X, 3)
        with pytest.raises(ValueError, match="was saved for"):
            loaded([X], 2)
        with pytest.raises(TypeError, match="missing"):
            loaded(X)
    assert loaded.cache_info()[:2] == (1, 1)


def test_what_is_loaded_can_be_compiled_ahead_nested_and_saved_again(tmp_path):
    path = saved(tmp_path, mlp(), X)
    loaded = eqxjit.load(path)
    loaded.compile(X, other_shapes="raise")
    expected = eqxjit.freeze(mlp())(X)
    np.testing.assert_array_equal(loaded(X), expected)
    np.testing.assert_allclose(jax.jit(loaded)(X), expected, rtol=1e-6)
    again = tmp_path / "again.eqxjit"
    eqxjit.load(path).save(again, X)
    np.testing.assert_allclose(eqxjit.load(again)(X), expected, rtol=1e-6)


# --- Batches of any size ----------------------------------------------------------------------


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("bound", [0, 2**20])
def test_one_file_serves_batches_of_any_size(tmp_path, bound):
    model = mlp()
    shape = jax.export.symbolic_shape("b, 4")
    path = saved(tmp_path, jax.vmap(model), struct(shape), bound=bound)
    loaded = eqxjit.load(path)
    assert repr(loaded) == "load(MLP, saved for (float32[b,4]))"
    for size in (1, 5, 2, 5):
        batch = jnp.arange(4.0 * size).reshape(size, 4)
        for _ in range(CALLS):
            np.testing.assert_allclose(loaded(batch), jax.vmap(model)(batch), rtol=1e-5)
    assert loaded.cache_info()[:2] == (1, 3)
    nested = jax.jit(lambda x: loaded(x) * 2)(jnp.ones((7, 4)))
    assert nested.shape == (7, 3)


def test_several_symbols_in_another_process(tmp_path):
    def fun(x, y, *, tree):
        return {"product": x @ y, "twice": [tree["z"][0] * 2, x.shape[1] * tree["n"]]}

    b, n = jax.export.symbolic_shape("b, n")
    path = tmp_path / "model.eqxjit"
    examples = struct((b, n)), struct((n,))
    tree = {"z": [struct((2 * b + 1,), jnp.int32)], "n": jnp.float32(3)}
    eqxjit.freeze(fun).save(path, *examples, tree=tree)
    program = """
        import json, sys
        import jax, jax.numpy as jnp, numpy as np, eqxjit

        f = eqxjit.load(sys.argv[1])

        def call(b, n, m, z):
            tree = {"z": [jnp.arange(z)], "n": jnp.float32(3)}
            return f(jnp.ones((b, n)), np.ones(m, np.float32), tree=tree)

        results = [call(*sizes) for sizes in [(2, 3, 3, 5), (4, 1, 1, 9), (2, 3, 3, 5)]]
        errors = []
        for sizes in [(2, 3, 4, 5), (2, 3, 3, 4), (0, 3, 3, 1)]:
            try:
                call(*sizes)
            except ValueError as error:
                errors.append(str(error))
        print(json.dumps([jax.tree.map(lambda x: np.asarray(x).tolist(), results), errors]))
    """
    results, errors = json.loads(run(program, str(path)))
    for result, (b, n) in zip(results, [(2, 3), (4, 1), (2, 3)], strict=True):
        assert result["product"] == [n] * b
        assert result["twice"] == [[2 * i for i in range(2 * b + 1)], 3 * n]
    assert errors == [
        "`fun` was saved for float32[n], and is called with float32[4] as `y`: `n` is 3 in `x`, "
        "and 4 here.",
        "`fun` was saved for `x`: float32[b,n], `y`: float32[n], `tree['n']`: float32[], "
        "`tree['z'][0]`: int32[2*b + 1], and is called with float32[2,3], float32[3], float32[], "
        "int32[4], which doesn't fit.",
        "`fun` was saved for float32[b,n], and is called with float32[0,3] as `x`: `b` stands for "
        "sizes from 1 on.",
    ]


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.ones((3, 5), np.float32), r"float32\[3,5\] as `x\['y'\]`: its dimension 1 must be 4"),
        (np.ones(4, np.float32), r"float32\[4\] as `x\['y'\]`\."),
        (np.ones((3, 4), np.int32), r"int32\[3,4\] as `x\['y'\]`\."),
    ],
)
def test_what_does_not_fit_symbols_is_refused(tmp_path, array, problem):
    shape = jax.export.symbolic_shape("b, 4")
    loaded = eqxjit.load(saved(tmp_path, lambda x: x["y"] * 2, {"y": struct(shape)}))
    for _ in range(CALLS):
        loaded({"y": np.ones((3, 4), np.float32)})
        with pytest.raises(ValueError, match=rf"for float32\[b,4\], and is called with {problem}"):
            loaded({"y": array})


def test_symbols_go_on_being_symbols_when_saved_again(tmp_path):
    shape = jax.export.symbolic_shape("b, 4")
    path = saved(tmp_path, jax.vmap(mlp()), struct(shape))
    again = tmp_path / "again.eqxjit"
    eqxjit.load(path).save(again, struct(shape))
    assert eqxjit.load(again)(np.ones((6, 4), np.float32)).shape == (6, 3)


def test_symbols_of_two_scopes_are_refused(tmp_path):
    shapes = [jax.export.symbolic_shape("b, 4") for _ in range(2)]
    frozen = eqxjit.freeze(lambda x, y: x + y)
    with pytest.raises(ValueError, match=r"\(b, 4\) and \(b, 4\) are of different scopes"):
        frozen.save(tmp_path / "model", *map(struct, shapes))
    scope = jax.export.SymbolicScope()
    shapes = [jax.export.symbolic_shape("b, 4", scope=scope) for _ in range(2)]
    frozen.save(tmp_path / "model", *map(struct, shapes))
    ones = jnp.ones((2, 4))
    assert eqxjit.load(tmp_path / "model")(ones, ones).tolist() == (2 * ones).tolist()
    with pytest.raises(ValueError, match="give a size for each dimension"):
        frozen.compile(*map(struct, shapes))


class Output(eqx.Module):
    y: jax.Array


@pytest.mark.parametrize(
    ("fun", "args", "message"),
    [
        (lambda x: Output(x), (X,), r"`output` is a `Output`"),
        (lambda x: {"y": [Output(x)]}, (X,), r"`output\['y'\]\[0\]` is a `Output`"),
        (lambda x: x.y, (Output(X),), r"`x` is a `Output`"),
        (lambda x, f: f(x), (X, jnp.sin), r"`f` is a `(ufunc|PjitFunction)`"),
        (lambda d: d[1], ({1: X},), r"`d` is a `dict`"),
    ],
)
def test_what_only_pickle_could_write_is_refused(tmp_path, fun, args, message):
    with pytest.raises(ValueError, match=message):
        saved(tmp_path, fun, *args)
    assert os.listdir(tmp_path) == []


def test_large_arrays_of_keys_are_refused(tmp_path):
    keys = jax.random.split(KEY, 10)
    with pytest.raises(ValueError, match="larger `max_constant_bytes`"):
        saved(tmp_path, eqx.Partial(lambda keys, x: x, keys), X, bound=0)


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        eqxjit.freeze(mlp()).save(tmp_path / "folder", X)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# --- Damaged and foreign files ----------------------------------------------------------------


@pytest.mark.parametrize("position", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_changed_byte_is_noticed(tmp_path, position):
    path = saved(tmp_path, mlp(), X, bound=0)
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 0xFF
    path.write_bytes(content)
    try:
        loaded = eqxjit.load(path)
    except ValueError:
        with pytest.raises(ValueError, match=r"damaged|wasn't written by"):
            eqxjit.load(path)
    else:
        # Zip archives hold a few bytes that mean nothing, such as dates.
        np.testing.assert_allclose(loaded(X), mlp()(X), rtol=1e-5)


@pytest.mark.parametrize("bit", [0, 3])
def test_a_changed_directory_is_noticed(tmp_path, bit):
    path = saved(tmp_path, mlp(), X)
    content = path.read_bytes()
    for position in range(content.index(b"PK\x01\x02"), len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << bit
        path.write_bytes(changed)
        with contextlib.suppress(ValueError):
            eqxjit.load(path)


@pytest.mark.parametrize("part", [0, 10, 0.5, 0.99])
def test_a_part_of_a_file_is_noticed(tmp_path, part):
    path = saved(tmp_path, mlp(), X)
    content = path.read_bytes()
    path.write_bytes(content[: int(part if part > 1 else part * len(content))])
    with pytest.raises(ValueError, match="damaged, or wasn't written by"):
        eqxjit.load(path)


def _changed(path, fits=True, **changes):
    """Rewrites a file with other entries of the manifest, and a checksum that fits, if wanted."""
    import hashlib

    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    manifest = {**json.loads(files["manifest.json"]), **changes}
    files["manifest.json"] = json.dumps(manifest).encode()
    if fits:
        files["manifest.sha256"] = hashlib.sha256(files["manifest.json"]).hexdigest().encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("text")
    with pytest.raises(ValueError, match="wasn't written by"):
        eqxjit.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.npy", b"")
    with pytest.raises(ValueError, match="wasn't written by"):
        eqxjit.load(path)
    with pytest.raises(FileNotFoundError):
        eqxjit.load(tmp_path / "none")
    path = saved(tmp_path, mlp(), X)
    _changed(path, format="another")
    with pytest.raises(ValueError, match="wasn't written by"):
        eqxjit.load(path)


def test_other_versions_and_platforms_are_refused(tmp_path, monkeypatch):
    path = saved(tmp_path, mlp(), X)
    _changed(path, platforms=["cpu", "tpu"])
    eqxjit.load(path)
    _changed(path, platforms=["tpu"])
    with pytest.raises(ValueError, match="was saved for tpu, and this is cpu"):
        eqxjit.load(path)
    _changed(path, platforms=["rocm"])
    with pytest.raises(ValueError, match="was saved for rocm, and this is cpu"):
        eqxjit.load(path)
    with monkeypatch.context() as patch:
        # To JAX's `default_backend` that is a "gpu", as one of CUDA's is.
        inside.set_platform(patch, "rocm")
        eqxjit.load(path)
    _changed(path, platforms=["cpu"], version=2)
    with pytest.raises(ValueError, match=r"reads up to 1\. Upgrade eqxjit"):
        eqxjit.load(path)
    with zipfile.ZipFile(path) as archive:
        hashes = json.loads(archive.read("manifest.json"))["sha256"]
    _changed(path, version=1)
    _changed(path, fits=False, name="another")
    with pytest.raises(ValueError, match="damaged: a checksum differs"):
        eqxjit.load(path)
    _changed(path, sha256={**hashes, "program.bin": "0" * 64})
    with pytest.raises(ValueError, match="damaged: a checksum differs"):
        eqxjit.load(path)


def test_without_flatbuffers_the_extra_is_named(tmp_path, monkeypatch):
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
                assert "pip install flatbuffers" in str(error), error
            else:
                raise AssertionError("no error")
    """
    run(program, str(saved(tmp_path, mlp(), X)), str(tmp_path / "other"))


def test_a_loaded_function_under_transformations_says_what_to_do(tmp_path):
    def doubled(x):
        return x * 2

    path, x = tmp_path / "f.eqxjit", jnp.ones(3)
    eqxjit.freeze(doubled).save(path, x)
    loaded = eqxjit.load(path)
    for _ in range(3):
        assert loaded(x).tolist() == [2, 2, 2]
        with pytest.raises(NotImplementedError, match=r"`.*doubled` was loaded.*`jax.vmap`"):
            jax.vmap(loaded)(jnp.ones((2, 3)))
        for transformed in (
            lambda: jax.grad(lambda x: loaded(x).sum())(x),
            lambda: jax.jvp(loaded, (x,), (x,)),
        ):
            with pytest.raises(NotImplementedError, match=r"`.*doubled` was loaded.*`jax.grad`"):
                transformed()


def test_a_function_that_calls_back_is_refused(tmp_path):
    def prints(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(ValueError, match=r"`.*prints` can't be saved.*`jax.debug.print`"):
        eqxjit.freeze(prints).save(tmp_path / "f.eqxjit", jnp.ones(3))
