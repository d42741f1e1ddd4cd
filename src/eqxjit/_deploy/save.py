"""Saves a frozen function as one file, without pickle; `load.py` reads it.

The file is a zip archive of a manifest in JSON, the program as `jax.export` serialises it, and the
arrays that aren't compiled in. Its comment is one digest over all of them.
"""

import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import os
import zipfile
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.export import export

from .._core.errors import raise_for_shapes
from .._core.slow import Caller
from .._spec.tree import combine

FORMAT = "eqxjit.freeze"
VERSION = 3
MANIFEST, PROGRAM, array_name = "manifest.json", "program.bin", "array-{}.bin".format

Path = str | os.PathLike[str]

#: The types of static values that JSON holds as they are.
VALUES = (bool, int, str, type(None))


def write(caller: Caller, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the program for arguments like these, and the function's arrays."""
    path = os.fsdecode(path)
    signature = caller.function.signature
    args, kwargs = caller.bind(args, kwargs)
    try:
        call, exported, _ = caller.stage(export, args, kwargs)
    except NotImplementedError as error:
        if "host_callbacks" not in str(error):
            # The function itself raised it.
            raise
        raise ValueError(
            f"`{signature.label}` can't be saved ({error}): a file can't hold Python to call "
            "back, as of `jax.debug.print`, `jax.pure_callback` or `eqx.error_if`. Save a "
            "function without; the environment variable `EQX_ON_ERROR=off` takes out Equinox's "
            "checks."
        ) from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        # These come of a shape in the place of an array.
        raise_for_shapes(error, signature.named(args, kwargs))
        raise
    entry = call.entry
    if len(entry.outs) != 1:
        raise ValueError(
            "What the function returns beside arrays depends on their shapes. Freeze it anew, and "
            "save it before it is called."
        )
    avals, _ = arguments_among(exported.in_avals, entry.n_first, entry.n_fun)
    # An array of its type's text stands for each array in what is written.
    inputs = combine(call.spec, (np.asarray(str(aval)) for aval in avals), iter(call.statics))
    for name, argument in signature.named(*inputs):
        # For the error, which names the argument.
        written(argument, name)
    output = caller.combine([np.asarray(str(aval)) for aval in exported.out_avals], call)
    try:
        members = {PROGRAM: bytes(exported.serialize())}
    except ImportError as error:
        raise ImportError("Saving needs flatbuffers: `pip install flatbuffers`.") from error
    for i, array in enumerate(caller.fun_arrays):
        members[array_name(i)] = np.asarray(array).tobytes()
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "eqxjit": importlib.metadata.version("eqxjit"),
        "jax": jax.__version__,
        "name": signature.label,
        "parameters": [
            [p.name, p.kind.name, p.default is not inspect.Parameter.empty]
            for p in signature.parameters
        ],
        "n_first": entry.n_first,
        "n_fun": entry.n_fun,
        "inputs": written(inputs, "(args, kwargs)"),
        "output": written(output, "output"),
    }
    _write(path, {MANIFEST: json.dumps(manifest, indent=1).encode(), **members})


def arguments_among(flat: Any, n_first: int, n_fun: int) -> tuple[list[Any], list[Any]]:
    """Return those of the arguments' arrays and those of the function's, of all in JAX's order."""
    end = n_first + n_fun
    return [*flat[:n_first], *flat[end:]], [*flat[n_first:end]]


def digest(contents: Iterable[bytes]) -> bytes:
    """Return the digest of the members of a file, the manifest first, in the manifest's order."""
    found = hashlib.sha256()
    for content in contents:
        found.update(content)
    return found.hexdigest().encode()


def _write(path: str, members: dict[str, bytes]) -> None:
    """Write a file as a whole, or not at all: a server may be loading it."""
    temporary = f"{path}.part"
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            archive.comment = digest(members.values())
            for name, content in members.items():
                archive.writestr(name, content)
        os.replace(temporary, path)
    except OSError as error:
        # The user has no file of the temporary one's name.
        raise type(error)(error.errno, error.strerror, path) from None
    finally:
        # It is there where something was raised.
        with contextlib.suppress(OSError):
            os.remove(temporary)


def is_symbolic(shape: tuple[Any, ...]) -> bool:
    """Return whether some dimension has no size yet."""
    return not all(isinstance(size, int) for size in shape)


# --- Trees ------------------------------------------------------------------------------------


def written(tree: Any, path: str) -> Any:
    """Return a tree as JSON; raise for what is no container, placeholder or plain value."""
    kind = type(tree)
    if kind is np.ndarray:
        return {"array": str(tree)}
    if kind in VALUES:
        return {"value": tree}
    if kind is float:
        return {"float": tree.hex()}
    if kind is tuple or kind is list:
        return {kind.__name__: [written(item, f"{path}[{i}]") for i, item in enumerate(tree)]}
    if kind is dict and all(type(key) is str for key in tree):
        return {"dict": {key: written(item, f"{path}[{key!r}]") for key, item in tree.items()}}
    raise ValueError(
        f"`{path}` is of type `{kind.__name__}`, which a file can't hold without pickle. Take and "
        "return arrays, numbers, strings and None, in tuples, lists and dicts with strings as keys."
    )
