"""Saves a frozen function as one file, without pickle, and loads it again.

The file is a zip archive: a manifest with its checksum, the program as `jax.export` serialises it,
and the arrays that aren't compiled in.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax.export import Exported, default_export_platform, deserialize, export

from .._core.entry import arrays_of
from .._core.slow import Caller
from .._fast.signature import Signature
from .._spec.tree import combine, split

_FORMAT = "eqxjit.freeze"
_VERSION = 1
_MANIFEST, _CHECKSUM, _PROGRAM = "manifest.json", "manifest.sha256", "program.bin"

Path = str | os.PathLike[str]

#: Under this name a function that was loaded tells the arguments that it was saved for.
SAVED_FOR = "__eqxjit_saved_for__"

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
        f"`{path}` is a `{kind.__name__}`, which a file can't hold without pickle. Take and return "
        "arrays, numbers, strings and None, in tuples, lists and dicts with strings as keys."
    )


# --- Reading ----------------------------------------------------------------------------------


def load(path: Path) -> tuple[Callable[..., Any], list[jax.Array]]:
    """Read a file, and check it: return a function of `(arrays, *args, **kwargs)`, and its arrays.

    That function has the signature of the one that was saved. The arrays weren't compiled in.
    """
    files = _read(path)
    manifest = json.loads(files[_MANIFEST])
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{path} wasn't written by `frozen.save`.")
    if manifest["version"] > _VERSION:
        raise ValueError(
            f"{path} was written by eqxjit {manifest['eqxjit']}, in version {manifest['version']} "
            f"of the format; this release reads up to {_VERSION}. Upgrade eqxjit."
        )
    if any(_sha256(files.get(name, b"")) != known for name, known in manifest["sha256"].items()):
        raise ValueError(f"{path} is damaged: a checksum differs. Copy or save it again.")
    platform, platforms = default_export_platform(), manifest["platforms"]
    if platform not in platforms:
        raise ValueError(
            f"{path} was saved for {', '.join(platforms)}, and this is {platform}. Save it there."
        )
    try:
        exported = deserialize(bytearray(files[_PROGRAM]))
    except ImportError as error:
        raise ImportError("Loading needs flatbuffers: `pip install flatbuffers`.") from error
    except Exception as error:
        raise ValueError(
            f"{path} was saved under jax {manifest['jax']}, whose program jax {jax.__version__} "
            "can't read. Save it again under this one."
        ) from error
    arrays: list[jax.Array] = []
    for i, known in enumerate(manifest["arrays"]):
        flat = np.frombuffer(files[f"array-{i}.bin"], jnp.dtype(known["dtype"]))
        arrays.append(jnp.asarray(flat.reshape(known["shape"])))
    return _restored(manifest, exported), arrays


def _read(path: Path) -> dict[str, bytes]:
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                files = {name: archive.read(name) for name in archive.namelist()}
        except Exception as error:
            # A flipped bit may look like another compression, an encryption, a wrong offset.
            raise ValueError(f"{path} is damaged, or wasn't written by `frozen.save`.") from error
    if _MANIFEST not in files or _CHECKSUM not in files:
        raise ValueError(f"{path} wasn't written by `frozen.save`.")
    if _sha256(files[_MANIFEST]).encode() != files[_CHECKSUM]:
        raise ValueError(f"{path} is damaged: a checksum differs. Copy or save it again.")
    return files


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _restored(manifest: Mapping[str, Any], exported: Exported) -> Callable[..., Any]:
    """Return the saved function, of the arrays not compiled in and of its own arguments."""
    name, n_inputs = manifest["name"], len(manifest["avals"])
    n_first = manifest["n_first"]
    in_avals = _of_arguments(exported.in_avals, n_first, len(manifest["arrays"]))
    expected, _, statics = split(_built(manifest["inputs"], [np.zeros(())] * n_inputs))
    saved_for = _shown(combine(expected, iter(manifest["avals"]), iter(statics)))

    call = _without_transformations(exported.call, name) if exported.in_avals else exported.call

    def restored(arrays: Any, /, *args: Any, **kwargs: Any) -> Any:
        spec, leaves, given = split((args, kwargs))
        avals = [str(jax.typeof(leaf)) for leaf in leaves]
        if spec != expected:
            called_with = _shown(combine(spec, iter(avals), iter(given)))
            raise ValueError(
                f"`{name}` was saved for {saved_for}, and is called with {called_with}."
            )
        sizes: dict[str, tuple[Any, str]] = {}
        for i, leaf in enumerate(leaves):
            saved, path = in_avals[i], manifest["paths"][i]
            problem = _mismatch(saved, jax.typeof(leaf), path, sizes)
            if problem is not None:
                raise ValueError(
                    f"`{name}` was saved for {manifest['avals'][i]}, and is called with {avals[i]} "
                    f"as `{path}`{problem}."
                )
        try:
            output = call(*leaves[:n_first], *arrays, *leaves[n_first:])
        except ValueError as error:
            if not any(is_symbolic(aval.shape) for aval in in_avals):
                raise
            # Not a plain symbol in some dimension, but a formula.
            saved = ", ".join(map("`{}`: {}".format, manifest["paths"], manifest["avals"]))
            called_with = ", ".join(avals)
            raise ValueError(
                f"`{name}` was saved for {saved}, and is called with {called_with}, which doesn't fit."
            ) from error
        return _built(manifest["output"], arrays_of(output))

    first = inspect.Parameter("arrays", inspect.Parameter.POSITIONAL_ONLY)
    restored.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [first, *map(_parameter, manifest["parameters"])]
    )
    restored.__name__ = restored.__qualname__ = name
    setattr(restored, SAVED_FOR, saved_for)
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


def _parameter(known: tuple[str, str, bool]) -> inspect.Parameter:
    name, kind, is_optional = known
    default = None if is_optional else inspect.Parameter.empty
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default)


def _built(written: Any, arrays: Any) -> Any:
    """Return the tree that was written, with these arrays."""
    [(kind, content)] = written.items()
    if kind == "array":
        return arrays[content]
    if kind == "float":
        return float.fromhex(content)
    if kind == "dict":
        return {key: _built(item, arrays) for key, item in content.items()}
    if kind in ("tuple", "list"):
        items = [_built(item, arrays) for item in content]
        return tuple(items) if kind == "tuple" else items
    return content


def _shown(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    args, kwargs = arguments
    return f"({', '.join([*map(str, args), *(f'{k}={v}' for k, v in kwargs.items())])})"
