"""Saves a frozen function as one file, without pickle, and loads it again.

The file is a zip archive: a manifest with its checksum, the program as `jax.export` serialises it,
and the arrays that aren't compiled in.
"""

import collections
import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import os
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax.export import Exported, default_export_platform, deserialize, export

from .._code.text import array_text, short
from .._core.entry import arrays_of
from .._core.slow import Caller
from .._fast.signature import Signature
from .._spec.tree import Spec, combine, count_arrays, split
from .buffers import is_computable

_FORMAT = "eqxjit.freeze"
_VERSION = 1
_MANIFEST, _CHECKSUM, _PROGRAM = "manifest.json", "manifest.sha256", "program.bin"

Path = str | os.PathLike[str]

#: Under this name a function that was loaded tells the arguments that it was saved for.
SAVED_FOR = "__eqxjit_saved_for__"
#: And under this one, what raises for arguments that it wasn't saved for.
CHECK = "__eqxjit_check__"

# What a static value may be, to be written as JSON and read back as it was.
_VALUES = (bool, int, str, type(None))


class Slot:
    """A placeholder of an array, in a tree that is written down."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


# --- Writing ----------------------------------------------------------------------------------


def save(caller: Caller, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the program for arguments like these, and the function's arrays."""
    folder = os.path.dirname(os.fspath(path)) or os.curdir
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", folder)
    signature = caller.function.signature
    _check_scopes(args, kwargs)
    try:
        call, exported, _ = caller.bind(functools.partial(caller.stage, export), args, kwargs)
    except NotImplementedError as error:
        if not _is_of_export(error):
            raise
        raise ValueError(
            f"`{signature.label}` can't be saved ({error}): a file can't hold Python to call back, "
            "as of `jax.debug.print`, `jax.pure_callback` or `eqx.error_if`. Save a function "
            "without; the environment variable `EQX_ON_ERROR=off` takes out Equinox's checks."
        ) from error
    entry = call.entry
    if len(entry.outs) != 1:
        raise ValueError(
            "What the function returns beside arrays depends on their shapes. Freeze it anew, and "
            "save it before it is called."
        )
    slots = [Slot(i) for i in range(len(exported.out_avals))]
    output = caller.combine(slots, call)
    inputs = combine(call.spec, map(Slot, range(len(call.arrays))), iter(call.statics))
    for name, argument in signature.named(*inputs):
        _written(argument, name)  # Or an error that names the argument.
    avals = _of_arguments(exported.in_avals, entry.n_first, entry.n_fun)
    files = {_PROGRAM: _serialized(exported)}
    arrays: list[dict[str, Any]] = []
    for i, array in enumerate(caller.fun_arrays):
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise ValueError(
                f"An array of {array.dtype} can't be written as bytes: have it compiled in, by a "
                "larger `max_constant_bytes`."
            )
        files[f"array-{i}.bin"] = np.asarray(array).tobytes()
        arrays.append({"dtype": array.dtype.name, "shape": list(array.shape)})
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "eqxjit": importlib.metadata.version("eqxjit"),
        "jax": jax.__version__,
        "platforms": list(exported.platforms),
        "name": signature.label,
        "parameters": [
            [p.name, p.kind.name, p.default is not inspect.Parameter.empty]
            for p in signature.parameters
        ],
        "n_first": entry.n_first,
        "avals": [str(aval) for aval in avals],
        "paths": _paths(signature, inputs),
        "inputs": _written(inputs, "(args, kwargs)"),
        "output": _written(output, "output"),
        "arrays": arrays,
        "sha256": {name: _sha256(content) for name, content in files.items()},
    }
    files[_MANIFEST] = json.dumps(manifest, indent=1).encode()
    files[_CHECKSUM] = _sha256(files[_MANIFEST]).encode()
    temporary = f"{os.fspath(path)}.part"
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        # All or nothing: a server may be loading it.
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        # The user has no file of the temporary one's name.
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def _of_arguments(flat: Sequence[Any], n_first: int, n_fun: int) -> list[Any]:
    """Return what belongs to the arguments' arrays, of all arrays in JAX's order."""
    return [*flat[:n_first], *flat[n_first + n_fun :]]


def is_symbolic(shape: tuple[Any, ...]) -> bool:
    """Return whether some dimension has no size yet."""
    return not all(isinstance(size, int) for size in shape)


def _check_scopes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for symbolic dimensions that JAX can't relate, before it does so at length."""
    scopes = {
        id(size.scope): str(leaf.shape)
        for leaf in jax.tree.leaves((args, kwargs))
        if isinstance(leaf, jax.ShapeDtypeStruct)
        for size in leaf.shape
        if hasattr(size, "scope")
    }
    if len(scopes) > 1:
        raise ValueError(
            f"The symbols in {' and '.join(scopes.values())} are of different scopes, so that "
            "equal names don't mean equal sizes: make them all with one "
            "`scope = jax.export.SymbolicScope()` and `jax.export.symbolic_shape(..., "
            "scope=scope)`."
        )


def _paths(signature: Signature, inputs: Any) -> list[str]:
    """Which part of the arguments each array is."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(dict(signature.named(*inputs)))
    slots = {leaf.index: path for path, leaf in leaves if type(leaf) is Slot}
    return [f"{path[0].key}{jax.tree_util.keystr(path[1:])}" for _, path in sorted(slots.items())]


def _is_of_export(error: BaseException) -> bool:
    """Return whether `jax.export` itself raised an error, rather than the function it traced."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") == export.__module__


def _serialized(exported: Exported) -> bytes:
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise ImportError("Saving needs flatbuffers: `pip install flatbuffers`.") from error


def _written(tree: Any, path: str) -> Any:
    """Return a tree as JSON; raise for what is no container, `Slot` of an array or plain value."""
    kind = type(tree)
    if kind is Slot:
        return {"array": tree.index}
    if kind in _VALUES:
        return {"value": tree}
    if kind is float:
        return {"float": tree.hex()}
    if kind is tuple or kind is list:
        return {kind.__name__: [_written(item, f"{path}[{i}]") for i, item in enumerate(tree)]}
    if kind is dict and all(type(key) is str for key in tree):
        return {"dict": {key: _written(item, f"{path}[{key!r}]") for key, item in tree.items()}}
    raise ValueError(
        f"`{path}` is of type `{kind.__name__}`, which a file can't hold without pickle. Take and "
        "return arrays, numbers, strings and None, in tuples, lists and dicts with strings as keys."
    )


# --- Reading ----------------------------------------------------------------------------------

# The fields of a manifest beside its format and version, and their types as `_fits` reads them.
_FIELDS: dict[str, Any] = {
    "eqxjit": str,
    "jax": str,
    "platforms": [str],
    "name": str,
    "parameters": [(str, str, bool)],
    "n_first": int,
    "avals": [str],
    "paths": [str],
    "inputs": dict,
    "output": dict,
    "arrays": [{"dtype": str, "shape": [int]}],
    "sha256": dict,
}

_KINDS = {kind.name: kind for kind in type(inspect.Parameter.KEYWORD_ONLY)}

_DIFFERS = "is damaged: a checksum differs. Copy or save it again."


class _Refused(Exception):
    """The reason why a file isn't loaded: the rest of a sentence that begins with its path."""


def load(path: Path) -> tuple[Callable[..., Any], list[jax.Array]]:
    """Read a file, and check it: return a function of `(arrays, *args, **kwargs)`, and its arrays.

    That function has the signature of the one that was saved. The arrays weren't compiled in.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                manifest = _manifest(archive)
                contents = _contents(archive, manifest, os.fstat(file.fileno()).st_size)
            exported = _program(manifest, contents[_PROGRAM])
            arrays = _arrays(manifest, contents)
            fun = _restored(manifest, exported)
        except ImportError:
            raise
        except _Refused as refused:
            raise ValueError(f"{path} {refused}") from refused.__cause__
        except Exception as error:
            # Whatever is wrong is told here: a call comes too late. (A flipped bit may look like
            # another compression, an encryption, a wrong offset.)
            raise ValueError(f"{path} {_damaged(short(error, 200))}") from error
    return fun, list(map(jnp.asarray, arrays))


def _manifest(archive: zipfile.ZipFile) -> dict[str, Any]:
    content = _content(archive, _MANIFEST)
    has_checksum = _CHECKSUM in archive.namelist()
    if has_checksum and _content(archive, _CHECKSUM) != _sha256(content).encode():
        raise _Refused(_DIFFERS)
    manifest = json.loads(content)
    if type(manifest) is not dict or manifest.get("format") != _FORMAT:
        raise _Refused("wasn't written by `frozen.save`.")
    version, writer = manifest.get("version"), manifest.get("eqxjit")
    if type(version) is int and version > _VERSION:
        raise _Refused(
            f"was written by {f'eqxjit {writer}' if type(writer) is str else 'a later eqxjit'}, in "
            f"version {version} of the format; this release reads up to {_VERSION}. Upgrade eqxjit."
        )
    if not has_checksum:
        raise _damaged(f"it lacks `{_CHECKSUM}`")
    if type(version) is not int or version != _VERSION:
        raise _invalid("version")
    for field, schema in _FIELDS.items():
        if not _fits(manifest.get(field), schema):
            raise _invalid(field)
    return manifest


def _fits(value: Any, schema: Any) -> bool:
    """Return whether JSON is of a type: `[item]` for a list of such, `(a, b)` for one of a pair."""
    if isinstance(schema, list):
        return type(value) is list and all(_fits(item, schema[0]) for item in value)
    if isinstance(schema, tuple):
        return type(value) is list and len(value) == len(schema) and all(map(_fits, value, schema))
    if isinstance(schema, dict):
        return type(value) is dict and all(_fits(value.get(k), s) for k, s in schema.items())
    return type(value) is schema


def _contents(
    archive: zipfile.ZipFile, manifest: Mapping[str, Any], n_bytes: int
) -> dict[str, bytes]:
    """Return the members that the manifest names, which take no more memory than on disk."""
    names = [_PROGRAM, *(f"array-{i}.bin" for i in range(len(manifest["arrays"])))]
    hashes = manifest["sha256"]
    if {*hashes} != {*names}:
        raise _invalid("sha256")
    extra = collections.Counter(archive.namelist())
    extra.subtract([_MANIFEST, _CHECKSUM, *names])
    for name, count in extra.items():
        if count > 0:
            raise _damaged(f"it holds `{name}`, which its manifest doesn't name")
        if count < 0:
            raise _damaged(f"it lacks `{name}`, which its manifest names")
    if sum([info.compress_size for info in archive.infolist()]) > n_bytes:
        raise _damaged("its parts overlap")
    contents = {name: _content(archive, name) for name in names}
    if any(_sha256(content) != hashes[name] for name, content in contents.items()):
        raise _Refused(_DIFFERS)
    return contents


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise _damaged(f"`{name}` is compressed")
    return archive.read(info)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _damaged(problem: str) -> _Refused:
    return _Refused(f"is damaged, or wasn't written by `frozen.save`: {problem}.")


def _invalid(field: str) -> _Refused:
    return _damaged(f"its manifest has no valid `{field}`")


@contextlib.contextmanager
def _reading(field: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _invalid(field) from error


def _program(manifest: Mapping[str, Any], content: bytes) -> Exported:
    platform, platforms = default_export_platform(), manifest["platforms"]
    if platform not in platforms:
        raise _Refused(
            f"was saved for {', '.join(platforms)}, and this is {platform}. Save it there."
        )
    try:
        exported = deserialize(bytearray(content))
    except ImportError as error:
        raise ImportError("Loading needs flatbuffers: `pip install flatbuffers`.") from error
    except Exception as error:
        raise _Refused(
            f"was saved under jax {manifest['jax']}, whose program jax {jax.__version__} can't "
            "read. Save it again under this one."
        ) from error
    if list(exported.platforms) != platforms:
        raise _invalid("platforms")
    return exported


def _arrays(manifest: Mapping[str, Any], contents: Mapping[str, bytes]) -> list[np.ndarray]:
    with _reading("arrays"):
        return [
            np.frombuffer(contents[f"array-{i}.bin"], jnp.dtype(known["dtype"])).reshape(
                known["shape"]
            )
            for i, known in enumerate(manifest["arrays"])
        ]


def _restored(manifest: Mapping[str, Any], exported: Exported) -> Callable[..., Any]:
    """Return the saved function, of the arrays not compiled in and of its own arguments."""
    name, n_first, saved = manifest["name"], manifest["n_first"], manifest["avals"]
    paths, arrays = manifest["paths"], manifest["arrays"]
    if not 0 <= n_first <= len(saved):
        raise _invalid("n_first")
    in_avals = _of_arguments(exported.in_avals, n_first, len(arrays))
    fun_avals = exported.in_avals[n_first : n_first + len(arrays)]
    expected, output = _read(manifest, "inputs"), _read(manifest, "output")
    known = [array_text(array["dtype"], array["shape"]) for array in arrays]
    for field, is_valid in {
        # JAX passes it on as UTF-8.
        "name": name.isprintable(),
        "arrays": list(map(str, fun_avals)) == known,
        # The program itself doesn't tell which arguments were of weak type.
        "avals": list(map(str, in_avals)) == [text.removeprefix("~") for text in saved],
        "paths": len(paths) == len(saved),
        "inputs": expected.n_arrays == len(saved),
        # Where a function returns no array, its program does.
        "output": max(output.n_arrays, 1) == len(exported.out_avals),
    }.items():
        if not is_valid:
            raise _invalid(field)
    inputs = expected.combine(saved)
    if type(inputs) is not tuple or list(map(type, inputs)) != [tuple, dict]:
        raise _invalid("inputs")
    with _reading("parameters"):
        signature = _signature(manifest["parameters"], *inputs)
    call = _without_transformations(exported.call, name) if exported.in_avals else exported.call

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        spec, leaves, statics = split((args, kwargs))
        avals = [str(jax.typeof(leaf)) for leaf in leaves]
        if spec != expected.spec:
            called_with = _shown(combine(spec, iter(avals), iter(statics)))
            raise ValueError(
                f"`{name}` was saved for {_shown(inputs)}, and is called with {called_with}."
                f"{_hint(expected, (args, kwargs), in_avals, paths)}"
            )
        sizes: dict[str, tuple[Any, str]] = {}
        for i, leaf in enumerate(leaves):
            if avals[i] == saved[i]:
                continue
            problem = _mismatch(in_avals[i], jax.typeof(leaf), paths[i], sizes)
            if problem is not None:
                raise ValueError(
                    f"`{name}` was saved for {saved[i]}, and is called with {avals[i]} as "
                    f"`{paths[i]}`{problem}."
                )
        return leaves

    def restored(arrays: Any, /, *args: Any, **kwargs: Any) -> Any:
        leaves = check(args, kwargs)
        try:
            results = call(*leaves[:n_first], *arrays, *leaves[n_first:])
        except ValueError as error:
            if not any(is_symbolic(aval.shape) for aval in in_avals):
                raise
            # Not a plain symbol in some dimension, but a formula.
            known = ", ".join(map("`{}`: {}".format, paths, saved))
            given = ", ".join(str(jax.typeof(leaf)) for leaf in leaves)
            raise ValueError(
                f"`{name}` was saved for {known}, and is called with {given}, which doesn't fit."
            ) from error
        return output.combine(arrays_of(results))

    restored.__signature__ = signature  # type: ignore[attr-defined]
    restored.__name__ = restored.__qualname__ = name
    setattr(restored, SAVED_FOR, _shown(inputs))
    setattr(restored, CHECK, check)
    return restored


def _without_transformations(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the same, with an error that says what to do where it is mapped or differentiated."""

    @jax.custom_batching.custom_vmap
    def mapped(*arrays: Any) -> Any:
        return call(*arrays)

    @mapped.def_vmap
    def _(axis_size: int, *_: Any) -> Any:
        raise NotImplementedError(
            f"`{name}` was loaded from a file, which holds a program for fixed shapes: it can't be "
            f"under `jax.vmap`. Call it in a loop, as by `jax.lax.map`, or save "
            f"`jax.vmap` of the function for batches of {axis_size}."
        )

    @jax.custom_jvp
    def differentiated(*arrays: Any) -> Any:
        return mapped(*arrays)

    @differentiated.defjvp
    def _(*_: Any) -> Any:
        raise NotImplementedError(
            f"`{name}` was loaded from a file, which holds a program without its derivatives: it "
            "can't be under `jax.grad` or `jax.jvp`. Differentiate the function that it was made "
            "of, or save a function that returns the gradient, too."
        )

    return differentiated


def _mismatch(saved: Any, given: Any, path: str, sizes: dict[str, tuple[Any, str]]) -> str | None:
    """Return how an array differs from the saved one, or None; `sizes` holds each symbol's."""
    if not is_symbolic(saved.shape):
        return None if str(saved) == str(given) else ""
    if saved.dtype != given.dtype or len(saved.shape) != len(given.shape):
        return ""
    for axis, (size, other) in enumerate(zip(saved.shape, given.shape, strict=True)):
        if isinstance(size, int):
            if size != other:
                return f": its dimension {axis} must be {size}, and is {other}"
        elif str(size).isidentifier():
            if other == 0:
                return f": `{size}` stands for sizes from 1 on"
            known, where = sizes.setdefault(str(size), (other, path))
            if known != other:
                return f": `{size}` is {known} in `{where}`, and {other} here"
    return None


def _hint(expected: "_Tree", inputs: Any, in_avals: Any, paths: list[str]) -> str:
    """Return what to write in the place of Python's numbers, if some are passed for arrays."""
    saved_for, structure = jax.tree.flatten(expected.combine(map(Slot, range(expected.n_arrays))))
    passed, passed_structure = jax.tree.flatten(inputs)
    if passed_structure != structure:
        return ""
    pairs = zip(saved_for, passed, strict=True)
    leaves = [leaf for saved, leaf in pairs if type(saved) is Slot]
    hints = [
        f"`{_scalar_class(aval.dtype)}({leaf!r})` as `{path}`"
        for aval, leaf, path in zip(in_avals, leaves, paths, strict=True)
        if type(leaf) in (bool, int, float, complex)
        and aval.shape == ()
        and is_computable(aval.dtype)
        and jnp.result_type(aval.dtype, leaf) == aval.dtype
    ]
    return f" A Python number isn't an array: pass {', '.join(hints)}." if hints else ""


def _scalar_class(dtype: np.dtype) -> str:
    name = dtype.type.__name__
    return f"{'np' if hasattr(np, name) else 'jnp'}.{name}"


def _signature(
    parameters: list[tuple[str, str, bool]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.Signature:
    """Return the signature of a function of the arrays and of arguments that it was saved for."""
    names = [name for name, _, _ in parameters]
    arrays = inspect.Parameter("_".join(["arrays", *names]), inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.Signature([arrays, *itertools.starmap(_parameter, parameters)])
    bound = signature.bind(None, *args, **kwargs)
    # Calls are bound likewise, or none would be the one that was saved.
    if (bound.args[1:], bound.kwargs) != (args, kwargs):
        raise ValueError(f"the arguments are bound as {bound}")
    return signature


def _parameter(name: str, kind: str, is_optional: bool) -> inspect.Parameter:
    default = None if is_optional else inspect.Parameter.empty
    return inspect.Parameter(name, _KINDS[kind], default=default)


class _Tree(NamedTuple):
    """A tree that was written, without its arrays."""

    spec: Spec
    statics: list[Any]

    @property
    def n_arrays(self) -> int:
        return count_arrays(self.spec)

    def combine(self, arrays: Iterable[Any]) -> Any:
        """Return the tree with these arrays."""
        return combine(self.spec, iter(arrays), iter(self.statics))


def _read(manifest: Mapping[str, Any], field: str) -> _Tree:
    """Return the tree that was written, without its arrays, which are numbered in its order."""
    with _reading(field):
        spec, arrays, statics = split(_built(manifest[field]))
    if list(map(int, arrays)) != list(range(len(arrays))):
        raise _invalid(field)
    return _Tree(spec, statics)


def _built(written: Any) -> Any:
    """Return the tree that was written, with its index in the place of each array."""
    [(kind, content)] = written.items()
    if kind == "array" and type(content) is int:
        return np.asarray(content)
    if kind == "value" and type(content) in _VALUES:
        return content
    if kind == "float" and type(content) is str:
        return float.fromhex(content)
    if kind == "dict" and type(content) is dict:
        return {key: _built(item) for key, item in content.items()}
    if kind in ("tuple", "list") and type(content) is list:
        items = map(_built, content)
        return tuple(items) if kind == "tuple" else list(items)
    raise ValueError(f"no tree is written as {short(written)}")


def _shown(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    args, kwargs = arguments
    return f"({', '.join([*map(str, args), *(f'{k}={v}' for k, v in kwargs.items())])})"
