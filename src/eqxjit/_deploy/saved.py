"""The file of a frozen function: `write` makes one, and `read` restores the function in it.

It is a zip archive, without pickle: a manifest in JSON, the program as `jax.export` serialises it,
and the arrays that aren't compiled in. Its comment is one digest over all of them.
"""

import contextlib
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter
from typing import Any, BinaryIO

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax.export import Exported, default_export_platform, deserialize, export

from .._core.entry import arrays_of
from .._core.slow import Caller
from .._diagnostics.description import Description, NodePart, describe_trees
from .._diagnostics.differences import differences, listed
from .._fast.signature import Signature
from .._interruptions import raise_if_interruption
from .._spec.tree import Spec, combine, split
from .._text import short
from .layout import PLACEHOLDER, Type, type_of

_FORMAT = "eqxjit.freeze"
_VERSION = 4
_MANIFEST, _PROGRAM = "manifest.json", "program.bin"
_array_name = "array-{}.bin".format

# All fields of a manifest. What is in the last three is checked where it is read.
_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("format", "eqxjit", "jax", "name"), (str,)),
    **dict.fromkeys(("version", "n_first", "n_fun"), (int,)),
    "parameters": (list,),
    "inputs": (dict,),
    # Any tree, a list or a constant, too.
    "output": (dict, list, str, int, float, bool, type(None)),
}

# The first parameter of a saved function: its arrays, by a name that no other has.
_ARRAYS = ("__arrays", "POSITIONAL_ONLY", False)
_REQUIRED = Parameter.empty

Path = str | os.PathLike[str]


# --- Writing ----------------------------------------------------------------------------------


def write(caller: Caller, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the program for arguments like these, and the function's arrays."""
    path = os.fsdecode(path)
    temporary = f"{path}.part"
    try:
        # Opened before the function is traced and exported, which may take minutes.
        with zipfile.ZipFile(temporary, "w") as archive:
            members = _members(caller, args, kwargs)
            archive.comment = _digest(members.values())
            for name, content in members.items():
                archive.writestr(name, content)
        # At once: a server may be loading the file that is there.
        os.replace(temporary, path)
    except OSError as error:
        if error.filename != temporary:
            # The function itself raised it, or the disk is full.
            raise
        # The user has no file of the temporary one's name.
        raise type(error)(error.errno, error.strerror, path) from None
    finally:
        # It is there where something was raised.
        with contextlib.suppress(OSError):
            os.remove(temporary)


def _members(caller: Caller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, bytes]:
    signature = caller.function.signature
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
    entry = call.entry
    if len(entry.outs) != 1:
        raise ValueError(
            "What the function returns beside arrays depends on their shapes. Freeze it anew, and "
            "save it before it is called."
        )
    inputs = combine(call.spec, itertools.repeat(PLACEHOLDER), iter(call.statics))
    for name, argument in signature.named(*inputs):
        # For the error, which names the argument.
        _written(argument, name)
    output = caller.combine([PLACEHOLDER] * len(exported.out_avals), call)
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "eqxjit": importlib.metadata.version("eqxjit"),
        "jax": jax.__version__,
        "name": signature.label,
        "parameters": [
            [p.name, p.kind.name, p.default is not Parameter.empty] for p in signature.parameters
        ],
        "n_first": entry.n_first,
        "n_fun": entry.n_fun,
        "inputs": _written(inputs, "(args, kwargs)"),
        "output": _written(output, "output"),
    }
    return {
        _MANIFEST: json.dumps(manifest, indent=1).encode(),
        _PROGRAM: bytes(exported.serialize()),
        **{_array_name(i): np.asarray(a).tobytes() for i, a in enumerate(caller.fun_arrays)},
    }


def _digest(contents: Iterable[bytes]) -> bytes:
    """Return the digest of the members of a file, the manifest first, in the manifest's order."""
    found = hashlib.sha256()
    for content in contents:
        found.update(content)
    return found.hexdigest().encode()


# --- Reading ----------------------------------------------------------------------------------


class _Refused(Exception):
    """The reason why a file isn't loaded: the rest of a sentence that begins with its path."""


def read(path: Path) -> tuple["SavedFunction", list[jax.Array]]:
    """Read a file, and check it: return the function in it, and the arrays to pass to it first."""
    # `open` would take an integer for a file that is open already.
    with open(os.fsdecode(path), "rb") as file:
        try:
            return _read(file)
        except ImportError:
            # JAX says that it needs flatbuffers.
            raise
        except _Refused as refused:
            raise ValueError(f"{path} {refused}") from refused.__cause__
        except Exception as error:
            # A flipped bit may look like another compression, an encryption, a wrong offset.
            raise_if_interruption(error, lambda: _read(file))
            text = f"{path} is damaged, or wasn't written by `frozen.save`: {short(error, 200)}."
            raise ValueError(text) from error


def _read(file: BinaryIO) -> tuple["SavedFunction", list[jax.Array]]:
    with zipfile.ZipFile(file) as archive:
        # Nothing may take more memory than on disk. Of a compressed part `zipfile` makes all there
        # is, whatever size is written of it.
        infos, size = archive.infolist(), os.fstat(file.fileno()).st_size
        _check_sizes([archive.getinfo(_MANIFEST)], size)
        manifest = json.loads(archive.read(_MANIFEST))
        # Before all else: another version may have other fields and other parts.
        _check_fields(manifest)
        _check_sizes(infos, size)
        names = [_MANIFEST, _PROGRAM, *map(_array_name, range(len(infos) - 2))]
        # What isn't named isn't read, however large it is.
        if archive.namelist() != names or len(names) != 2 + manifest["n_fun"]:
            raise _Refused("is damaged: its parts aren't those that its manifest names.")
        _, program, *arrays = contents = [archive.read(name) for name in names]
        if archive.comment != _digest(contents):
            raise _Refused("is damaged: its checksum differs. Copy or save it again.")
    try:
        exported = deserialize(bytearray(program))
    except ImportError:
        # As in `read`.
        raise
    except Exception as error:
        # JAX raises many kinds for what an older or a newer one has written.
        raise_if_interruption(error, lambda: deserialize(bytearray(program)))
        raise _Refused(
            f"was saved under jax {manifest['jax']}, whose program jax {jax.__version__} can't "
            "read. Save it again under this one."
        ) from error
    platform = default_export_platform()
    if platform not in exported.platforms:
        raise _Refused(
            f"was saved for {', '.join(exported.platforms)}, and this is {platform}. Save it there."
        )
    fun = SavedFunction(manifest, exported)
    return fun, [
        jnp.asarray(np.frombuffer(content, kind.dtype).reshape(kind.shape))
        for content, kind in zip(arrays, fun.fun_types, strict=True)
    ]


def _check_sizes(infos: list[zipfile.ZipInfo], size: int) -> None:
    """Raise unless parts are stored as they are, and together fit in a file of this size."""
    is_stored = all(info.compress_type == zipfile.ZIP_STORED for info in infos)
    if not is_stored or sum([max(i.compress_size, i.file_size) for i in infos]) > size:
        raise _Refused("is damaged: its parts are compressed, or overlap.")


def _check_fields(manifest: Any) -> None:
    if type(manifest) is not dict or manifest.get("format") != _FORMAT:
        raise _Refused("wasn't written by `frozen.save`.")
    version = manifest.get("version")
    if type(version) is int and version != _VERSION:
        remedy = "Upgrade eqxjit" if version > _VERSION else "Save it again under this one"
        writer = manifest.get("eqxjit", "of another version")
        raise _Refused(
            f"was written by eqxjit {writer}, in version {version} of the format; "
            f"this release reads version {_VERSION}. {remedy}."
        )
    for field in {**_FIELDS, **manifest}:
        if type(manifest.get(field)) not in _FIELDS.get(field, ()):
            raise _Refused(f"is damaged: its manifest has no valid `{field}`.")


# --- The function -----------------------------------------------------------------------------


class SavedFunction:
    """The function in a file: called with the arrays that aren't compiled in, and its arguments."""

    def __init__(self, manifest: dict[str, Any], exported: Exported):
        name = self.__name__ = self.__qualname__ = manifest["name"]
        # `freeze` and `bind` find the parameters of the function that was saved, behind the arrays.
        self.__signature__ = inspect.Signature(
            [
                Parameter(name, getattr(Parameter, kind), default=None if optional else _REQUIRED)
                for name, kind, optional in [_ARRAYS, *manifest["parameters"]]
            ]
        )
        self._signature = Signature(self, name, name)
        args, kwargs = _built(manifest["inputs"])
        bound = self.__signature__.bind(None, *args, **kwargs)
        self._spec, leaves, statics = split((args, kwargs))
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
        n_first = self._n_first = manifest["n_first"]
        end = n_first + manifest["n_fun"]
        self._types, self.fun_types = [*types[:n_first], *types[end:]], types[n_first:end]
        self._out_spec, outs, self._out_statics = split(_built(manifest["output"]))
        # Whatever is wrong in a file raises when it is read, because a call comes too late.
        is_sound = (
            name.isprintable()
            and all(type(optional) is bool for _, _, optional in manifest["parameters"])
            and 0 <= n_first <= len(self._types)
            # Calls are bound likewise, or none would be the one that was saved.
            and (bound.args[1:], bound.kwargs) == (args, kwargs)
            and len(leaves) == len(self._types)
            # Where a function returns no array, its program does.
            and (not outs or len(outs) == len(exported.out_avals))
        )
        if not is_sound:
            raise _Refused("is damaged: its manifest doesn't fit its program.")
        # Without arrays there is nothing to transform.
        self._call = _refusing(exported.call, name) if exported.in_avals else exported.call
        self._description = self._describe(self._spec, self._types, statics)
        parts = [row for row in self._description if not isinstance(row.part, NodePart)]
        self.saved_for = ", ".join([f"{row.path}: {row.part}" for row in parts])

    def _describe(self, spec: Spec, types: Sequence[Type], statics: Sequence[Any]) -> Description:
        args, kwargs = combine(spec, iter(types), iter(statics))
        named = self._signature.named((None, *args), kwargs)[1:]
        specs = [*spec[3][3:], *spec[4][3:]]
        pairs = zip(named, specs, strict=True)
        return describe_trees([(name, spec, value) for (name, value), spec in pairs])

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arrays in arguments; raise for arguments that it wasn't saved for."""
        spec, leaves, _ = split((args, kwargs))
        # JAX compares those with symbols.
        is_fit = spec == self._spec and all(
            is_symbolic(saved.shape) or saved == type_of(leaf)
            for saved, leaf in zip(self._types, leaves, strict=True)
        )
        if not is_fit:
            raise ValueError(self._misfit(args, kwargs))
        return leaves

    def _misfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        spec, leaves, statics = split((args, kwargs))
        passed = self._describe(spec, [*map(type_of, leaves)], statics)
        found = differences(self._description, passed)
        lines = listed(found) or ["somewhere in a large tree"]
        if any(difference.category == "static where an array was" for difference in found):
            lines.append("What isn't an array is static: pass `np.float32(2.0)`, say, for `2.0`.")
        return "\n    ".join([f"`{self.__name__}` was saved for other arguments:", *lines])

    def __call__(self, arrays: Any, /, *args: Any, **kwargs: Any) -> Any:
        leaves, n = self.check(args, kwargs), self._n_first
        try:
            results = self._call(*leaves[:n], *arrays, *leaves[n:])
        except ValueError as error:
            if not any(is_symbolic(kind.shape) for kind in self._types):
                raise
            raise_if_interruption(error, lambda: self._call(*leaves[:n], *arrays, *leaves[n:]))
            # JAX's error names no argument, and says nothing of what was saved.
            misfit = self._misfit(args, kwargs)
            raise ValueError(f"{misfit}\nA symbol stands for one size, from 1 on.") from error
        return combine(self._out_spec, iter(arrays_of(results)), iter(self._out_statics))


def _refusing(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the same, with an error that says what to do where it is mapped or differentiated."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"`{name}` was loaded from a file, which holds a program for fixed shapes and without "
            "derivatives: it can't be under `jax.vmap`, `jax.grad` or `jax.jvp`. Call it in a "
            "loop, as by `jax.lax.map`; or save `jax.vmap` of the function, or a function that "
            "returns the gradient, too."
        )

    mapped = jax.custom_batching.custom_vmap(lambda *arrays: call(*arrays))
    mapped.def_vmap(refuse)
    differentiated = jax.custom_jvp(lambda *arrays: mapped(*arrays))
    differentiated.defjvp(refuse)
    return differentiated


def is_symbolic(shape: tuple[Any, ...]) -> bool:
    """Return whether some dimension has no size yet."""
    return not all(isinstance(size, int) for size in shape)


# --- Trees ------------------------------------------------------------------------------------


def _written(tree: Any, path: str) -> Any:
    """Return a tree as JSON; raise for what is no container, placeholder or plain value."""
    kind = type(tree)
    if kind is np.ndarray:
        return {"array": None}
    # JSON holds these as they are: of a float it has all digits.
    if kind in (bool, int, float, str, type(None)):
        return tree
    if kind is tuple or kind is list:
        items = [_written(item, f"{path}[{i}]") for i, item in enumerate(tree)]
        return items if kind is list else {"tuple": items}
    if kind is dict and all(type(key) is str for key in tree):
        return {"dict": {key: _written(item, f"{path}[{key!r}]") for key, item in tree.items()}}
    raise ValueError(
        f"`{path}` is of type `{kind.__name__}`, which a file can't hold without pickle. Take and "
        "return arrays, numbers, strings and None, in tuples, lists and dicts with strings as keys."
    )


def _built(tree: Any) -> Any:
    """Return the tree that was written, with placeholders of its arrays."""
    match tree:
        case {"array": None}:
            return PLACEHOLDER
        case {"tuple": [*items]}:
            return tuple(map(_built, items))
        case {"dict": {**items}}:
            return {key: _built(item) for key, item in items.items()}
        case [*items]:
            return [*map(_built, items)]
        case bool() | int() | float() | str() | None:
            return tree
    raise ValueError(f"no tree is written as {short(tree)}")
