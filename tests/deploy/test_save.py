"""`frozen.save` and `eqxjit.load`: the same results in another process; wrong files are refused."""

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import re
import tracemalloc
import zipfile
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import deserialize

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
        "floats": (lambda x, *by: (model(x) * by[0], by), (X, -0.0, 0.1, math.inf, math.nan)),
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
    assert repr(loaded) == "load(<lambda>, saved for (x: float32[4], n: 2))"
    for _ in range(CALLS):
        loaded(X, 2)
        with pytest.raises(ValueError, match=r"saved for other.*\n.*`x` was float32, is int32"):
            loaded(X.astype(int), 2)
        with pytest.raises(ValueError, match="`n` was 2, is 3"):
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
    assert repr(loaded) == "load(MLP, saved for (x: float32[b,4]))"
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
    for error, parts in zip(
        errors,
        (
            ["`x` was float32[b,n], is float32[2,3]", "`y` was float32[n], is float32[4]"],
            ["`tree['z'][0]` was int32[2*b + 1], is int32[4]"],
            ["`x` was float32[b,n], is float32[0,3]"],
        ),
        strict=True,
    ):
        for part in ("`fun` was saved for", *parts, "A symbol stands for one size, from 1 on."):
            assert part in error


@pytest.mark.parametrize(
    "array", [np.ones((3, 5), np.float32), np.ones(4, np.float32), np.ones((3, 4), np.int32)]
)
def test_what_does_not_fit_symbols_is_refused(tmp_path, array):
    shape = jax.export.symbolic_shape("b, 4")
    loaded = eqxjit.load(saved(tmp_path, lambda x: x["y"] * 2, {"y": struct(shape)}))
    told = rf"saved for.*\n.*`x\['y'\]` was float32(\[b,4\])?, is {array.dtype}"
    for _ in range(CALLS):
        loaded({"y": np.ones((3, 4), np.float32)})
        with pytest.raises(ValueError, match=told):
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
    with pytest.raises(ValueError, match="Invalid mixing of symbolic scopes"):
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
    except ValueError as error:
        if not re.search(r"damaged|wasn't written by", str(error)):
            raise
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
    with pytest.raises(ValueError, match="is damaged"):
        eqxjit.load(path)


def _members(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _manifest_of(path):
    return json.loads(_members(path)["manifest.json"])


def _rewrite(path, manifest=None, fits=True, compressed=(), sizes=(), **members):
    """Write a file anew with other members (None for no such), and a digest that fits, or not."""
    files = {**_members(path), **members}
    if manifest is not None:
        files["manifest.json"] = json.dumps(manifest).encode()
    files = {name: content for name, content in files.items() if content is not None}
    with zipfile.ZipFile(path, "w") as archive:
        found = hashlib.sha256(b"".join(files.values())) if fits else hashlib.sha256()
        archive.comment = found.hexdigest().encode()
        for name, content in files.items():
            deflated = name in compressed
            archive.writestr(
                name, content, zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
            )
        for name, size in sizes:
            archive.getinfo(name).file_size = size


def _change(path, fits=True, **changes):
    _rewrite(path, {**_manifest_of(path), **changes}, fits)


def _export_for(path, *platforms):
    """Change the platforms of a file's program."""
    exported = deserialize(bytearray(_members(path)["program.bin"]))
    program = bytes(dataclasses.replace(exported, platforms=platforms).serialize())
    _rewrite(path, **{"program.bin": program})


def test_foreign_files_are_refused(tmp_path):
    path = saved(tmp_path, mlp(), X)
    _change(path, format="another")
    other = tmp_path / "file"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("weights.npy", b"")
    text = tmp_path / "text"
    text.write_text("text")
    for file in (path, other, text):
        with pytest.raises(ValueError, match="wasn't written by"):
            eqxjit.load(file)
    with pytest.raises(FileNotFoundError):
        eqxjit.load(tmp_path / "none")


def test_other_platforms_are_refused(tmp_path, monkeypatch):
    path = saved(tmp_path, mlp(), X)
    _export_for(path, "cpu", "tpu")
    eqxjit.load(path)
    for platform in ("tpu", "rocm"):
        _export_for(path, platform)
        with pytest.raises(ValueError, match=f"was saved for {platform}, and this is cpu"):
            eqxjit.load(path)
    # To JAX's `default_backend` that is a "gpu", as one of CUDA's is.
    inside.set_platform(monkeypatch, "rocm")
    eqxjit.load(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {},
            r"by eqxjit (\d.*|of another version), in version 9 of the format; this release reads "
            r"version 4\. Upgrade",
        ),
        (
            {"version": 5},
            r"by eqxjit (\d.*|of another version), in version 5 of the format; .*\. Upgrade",
        ),
        (
            {"version": 3},
            r"by eqxjit (\d.*|of another version), in version 3 of the format; .*\. Save it again",
        ),
    ],
)
def test_other_versions_say_so_whatever_else_they_lack(tmp_path, changes, text):
    path = saved(tmp_path, mlp(), X)
    whole = {**_manifest_of(path), "version": 9, **changes}
    bare = {name: whole[name] for name in ("format", "version")}
    for manifest, kwargs in (
        (whole, {}),
        (bare, {"program.bin": None}),
        (bare, {"fits": False}),
        (bare, {"other.bin": bytes(1000)}),
        (bare, {"other.bin": bytes(1000), "compressed": ["other.bin"]}),
    ):
        path = saved(tmp_path, mlp(), X)
        _rewrite(path, manifest, **kwargs)
        with pytest.raises(ValueError, match=text):
            eqxjit.load(path)


def test_the_checksum_is_checked(tmp_path):
    for change in ({"name": "another"}, {"jax": "0.0"}):
        path = saved(tmp_path, mlp(), X)
        _change(path, fits=False, **change)
        with pytest.raises(ValueError, match="damaged: its checksum differs"):
            eqxjit.load(path)


# --- Files that were made by hand -------------------------------------------------------------


def assert_refused(path, message):
    """A file is refused, and what is large in it isn't read."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            eqxjit.load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**21


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", ["extra.bin", "array-0.bin", "program.bin"])
def test_what_the_manifest_does_not_name_is_refused(tmp_path, name, compression):
    path = saved(tmp_path, mlp(), X)
    with zipfile.ZipFile(path, "a", compression) as archive:
        archive.writestr(name, bytes(2**23))
    assert_refused(path, "damaged: its parts (aren't those that its manifest names|are compressed)")


@pytest.mark.parametrize("name", ["manifest.json", "program.bin"])
def test_compressed_members_are_refused(tmp_path, name):
    path = saved(tmp_path, mlp(), X)
    _rewrite(path, compressed=[name], **{name: bytes(2**23)})
    assert_refused(path, "damaged: its parts are compressed")


@pytest.mark.parametrize("name", ["manifest.json", "program.bin"])
def test_a_compressed_member_whose_size_is_a_lie_is_refused(tmp_path, name):
    path = saved(tmp_path, mlp(), X)
    _rewrite(path, compressed=[name], sizes=[(name, 1)], **{name: bytes(2**23)})
    assert_refused(path, "damaged: its parts are compressed")


def test_missing_members_are_refused(tmp_path):
    for name in ("manifest.json", "program.bin"):
        path = saved(tmp_path, mlp(), X)
        _rewrite(path, **{name: None})
        with pytest.raises(ValueError, match=rf"(its parts aren't|no item named '{name}')"):
            eqxjit.load(path)


def test_members_that_overlap_are_refused(tmp_path):
    """Each names the rest of the file: many of them would take far more memory than the file."""
    path = saved(tmp_path, mlp(), X)
    _change(path, n_fun=9)
    with zipfile.ZipFile(path, "a") as archive:
        content, infos = b"", []
        for i in reversed(range(9)):
            info = zipfile.ZipInfo(f"array-{i}.bin")
            content += bytes(2**15)
            info.file_size = info.compress_size = len(content)
            info.CRC = zlib.crc32(content)
            content = info.FileHeader() + content
            infos.append((info, len(content)))
        start = archive.start_dir
        archive.fp.seek(start)
        archive.fp.write(content)
        archive.start_dir += len(content)
        for info, length in infos:
            info.header_offset = start + len(content) - length
            archive.filelist.append(info)
            archive.NameToInfo[info.filename] = info
        archive._didModify = True
    assert_refused(path, "damaged: its parts are compressed, or overlap")


def test_a_manifest_that_is_nested_deeply_is_refused(tmp_path):
    for depth in (2000, 100_000):
        for field in ("inputs", "output", "n_fun"):
            path = saved(tmp_path, mlp(), X)
            text = json.dumps({**_manifest_of(path), field: "here"})
            nested = '{"tuple": [' * depth + "1" + "]}" * depth
            _rewrite(path, **{"manifest.json": text.replace('"here"', nested).encode()})
            with pytest.raises(ValueError, match="is damaged"):
                eqxjit.load(path)


def _places(node, place=()):
    """Yield the keys and indices that lead to each value in JSON."""
    if place:
        yield place
    for key in node if type(node) is dict else range(len(node) if type(node) is list else 0):
        yield from _places(node[key], (*place, key))


def _mutants(manifest):
    """Yield a manifest with one wrong value, or without one, for all of its values."""
    values = [None, True, -1, 10**30, 1.5, "x", "\ud800", [], {}, [[1]], {"array": None}]
    for *place, last in _places(manifest):
        for value in (*values, "delete", "repeat"):
            mutant = copy.deepcopy(manifest)
            node = mutant
            for key in place:
                node = node[key]
            if value == "delete":
                del node[last]
            elif value != "repeat":
                node[last] = value
            elif type(node) is list:
                node.insert(last, node[last])
            if mutant != manifest:
                yield mutant


def test_whatever_is_wrong_in_a_manifest_is_told_when_it_is_loaded(tmp_path):
    """A call may find that it was saved for other static values; nothing else is left for it."""

    def fun(model, x, tree, /, n=1, *rest, mode="m", other=None, **kwargs):
        return {"y": [model(x) * n, tree["a"][0], None, 1.5], "m": (mode, tree["b"])}

    path = tmp_path / "model.eqxjit"
    args = (X, {"a": [jnp.ones(3, int), -0.0], "b": 2}, 5, np.float32(2))
    kwargs = {"mode": "text", "extra": np.ones((2, 2), np.float32)}
    eqxjit.freeze(fun, eqx.nn.Linear(4, 3, key=KEY), max_constant_bytes=0).save(
        path, *args, **kwargs
    )
    n_refused = 0
    for mutant in _mutants(_manifest_of(path)):
        _rewrite(path, mutant)
        try:
            loaded = eqxjit.load(path)
        except ValueError as error:
            if not re.search("is damaged|wasn't written by|of the format", str(error)):
                raise
            n_refused += 1
            continue
        try:
            loaded(*args, **kwargs)
        except ValueError as error:
            if "` was saved for" not in str(error):
                raise
    assert n_refused > 700


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "2"),
        ("version", True),
        ("version", 5.0),
        ("name", 3),
        ("parameters", [["x", "POSITIONAL", False]]),
        ("parameters", [["a b", "POSITIONAL_OR_KEYWORD", False]]),
        ("parameters", [["x", "POSITIONAL_OR_KEYWORD", 0]]),
        ("n_first", 1.0),
        ("n_fun", 1.0),
        ("jax", None),
        ("eqxjit", 1),
        ("inputs", {"tuple": [{"tuple": [{"array": 1}]}, {"dict": {}}]}),
        ("inputs", {"tuple": [[{"array": None}], {"dict": {}}]}),
        ("inputs", {"tuple": [{"tuple": []}, {"dict": {}}]}),
        ("inputs", {"tuple": [{"tuple": [1]}, {"dict": {}}]}),
        ("inputs", {"tuple": [{"tuple": [{"array": None}]}, {"list": []}]}),
        ("output", {"array": 1}),
        ("output", {"tuple": [{"array": None}, {"list": {}}]}),
        ("output", {"tuple": [{"array": None}, {"dict": []}]}),
        ("output", {"tuple": [{"array": None}, {"a": 1}]}),
        ("output", {"tuple": [{"array": None}, {"array": None}]}),
        ("output", {"float": "0x1p9999"}),
    ],
)
def test_a_wrong_field_is_refused(tmp_path, field, value):
    path = saved(tmp_path, mlp(), X)
    _change(path, **{field: value})
    with pytest.raises(ValueError, match=r"model\.eqxjit is damaged"):
        eqxjit.load(path)
    manifest = _manifest_of(path)
    del manifest[field]
    _rewrite(path, manifest)
    with pytest.raises(ValueError, match=rf"model\.eqxjit is damaged.*{field}"):
        eqxjit.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"array-0.bin": bytes(16)},
        {"array-0.bin": bytes(11)},
        {"array-0.bin": b""},
        {"array-0.bin": None},
        {"array-1.bin": bytes(12)},
    ],
)
def test_wrong_arrays_are_refused(tmp_path, changes):
    path = saved(tmp_path, eqx.Partial(jnp.add, jnp.ones(3)), jnp.ones(3), bound=0)
    assert len(_members(path)["array-0.bin"]) == 12
    _rewrite(path, **changes)
    with pytest.raises(ValueError, match="is damaged"):
        eqxjit.load(path)


def test_an_interruption_is_no_damage(tmp_path, monkeypatch):
    """What a signal handler raises while a file is read goes on its way."""
    path = saved(tmp_path, mlp(), X)
    interruptions = [TimeoutError("late")]
    deserialize = inside.deserialiser()

    def interrupted(content):
        if interruptions:
            raise interruptions.pop()
        return deserialize(content)

    inside.set_deserialiser(monkeypatch, interrupted)
    with pytest.raises(TimeoutError, match="late"):
        eqxjit.load(path)
    assert eqxjit.load(path)(X).shape == (3,)


# --- Mistakes ---------------------------------------------------------------------------------


def test_numbers_in_the_place_of_arrays(tmp_path):
    """Python's are static: the error says so, but not of a number where one was saved."""
    x, n = np.float32(2), np.int32(3)
    loaded = eqxjit.load(saved(tmp_path, lambda x, tree: x * tree["n"], x, {"n": n, "k": 2}))
    wrong = [(2.0, n, 2, True), (x, 3, 2, True), (x, n, 4, False)]
    for x, n, k, is_told in wrong:
        with pytest.raises(ValueError, match="was saved for") as caught:
            loaded(x, {"n": n, "k": k})
        assert ("pass `np.float32(2.0)`, say" in str(caught.value)) == is_told


def test_arrays_in_containers_are_shown_by_their_types(tmp_path):
    loaded = eqxjit.load(saved(tmp_path, lambda x, mode: x["a"], {"a": X}, "sum"))
    with pytest.raises(ValueError, match=r"`x\['a'\]` was float32\[4\], is absent"):
        loaded({"b": X}, mode="sum")
    assert repr(loaded) == "load(<lambda>, saved for (x['a']: float32[4], mode: 'sum'))"


@pytest.mark.parametrize("out", [[X], [], None, 3, 0.5, True, "a", {}, (X, [None])])
def test_any_tree_is_an_output(tmp_path, out):
    assert eqx.tree_equal(eqxjit.load(saved(tmp_path, lambda x: out, X))(X), out)


def test_weak_types_count_as_strong_ones(tmp_path):
    for saved_for in (jnp.asarray(2.0), np.float32(2)):
        loaded = eqxjit.load(saved(tmp_path, lambda x: x * 2, saved_for))
        for _ in range(CALLS):
            assert loaded(jnp.asarray(3.0)) == loaded(np.float32(3)) == 6
            assert not loaded(jnp.asarray(3.0)).weak_type


def test_a_parameter_of_any_name(tmp_path):
    path = tmp_path / "f.eqxjit"
    eqxjit.freeze(lambda arrays, arrays_2: arrays * arrays_2).save(path, X, arrays_2=2)
    assert [*eqxjit.load(path)(arrays=X, arrays_2=2)] == [*(X * 2)]


def test_without_flatbuffers_it_is_named(tmp_path, monkeypatch):
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

    for argument in (jnp.ones(3), (3, 1)):
        with pytest.raises(ValueError, match=r"`.*prints` can't be saved.*`jax.debug.print`"):
            eqxjit.freeze(prints).save(tmp_path / "f.eqxjit", argument)


def test_what_it_was_not_saved_for_is_the_same_error_once_other_shapes_are_refused(tmp_path):
    path = tmp_path / "saved"
    eqxjit.freeze(lambda x, s: x * s).save(path, jnp.ones(3), jnp.float32(1))
    loaded = eqxjit.load(path)
    wrong = [(jnp.ones(4), jnp.float32(2)), (jnp.ones(3), 2.0), (jnp.ones(3, int), jnp.float32(2))]

    def errors():
        for arguments in wrong:
            with pytest.raises(ValueError, match="was saved for") as raised:
                loaded(*arguments)
            yield str(raised.value)

    before = list(errors())
    assert "pass `np.float32(" in before[1]
    loaded.compile(jnp.ones(3), jnp.float32(2), other_shapes="raise")
    assert list(errors()) == before


def test_a_shape_for_an_array_is_named(tmp_path):
    for fun in (jnp.sin, lambda x: x.shape, mlp()):
        with pytest.raises((TypeError, AttributeError, IndexError)) as raised:
            eqxjit.freeze(fun).save(tmp_path / "f.eqxjit", (4,))
        assert "is the tuple (4,), which is static" in raised.value.__notes__[-1]


def test_paths_of_any_kind(tmp_path):
    frozen = eqxjit.freeze(mlp())
    for path in (tmp_path / "a", os.fspath(tmp_path / "b"), os.fsencode(tmp_path / "c")):
        frozen.save(path, X)
        assert eqxjit.load(path)(X).shape == frozen(X).shape
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_a_number_is_no_file():
    # Python's `open` would read, and close, the standard input.
    with pytest.raises(TypeError, match=r"str, bytes or os\.PathLike"):
        eqxjit.load(0)


def test_errors_of_files_name_the_file_of_the_user(tmp_path):
    frozen = eqxjit.freeze(lambda x: x)
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (folder, tmp_path / "missing" / "z.eqxjit", tmp_path / ("n" * 300)):
        with pytest.raises(OSError) as raised:  # noqa: PT011
            frozen.save(path, jnp.ones(1))
        assert ".part" not in str(raised.value)
        # What can't be opened is noticed before all that takes time.
        assert len(frozen.traces()) == (path is folder)
        frozen.clear_cache()
    assert not list(tmp_path.rglob("*.part"))
