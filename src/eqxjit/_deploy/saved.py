"""The file of a frozen function: `write` makes one, and `read` restores the function in it.

It is a zip archive, without pickle: a manifest in JSON, the program as `jax.export` serialises it,
and the arrays that aren't compiled in. Its comment is one digest over all of them.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import inspect
import json
import os
import zipfile
from collections.abc import Callable, Iterable
from inspect import Parameter
from typing import Any, BinaryIO

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax.export import Exported, default_export_platform, deserialize, export

from .._code.text import short
from .._core.entry import arrays_of
from .._core.errors import raise_for_shapes
from .._core.slow import Caller
from .._fast.signature import Signature
from .._interruptions import raise_if_interruption
from .._spec.tree import ARRAY, Spec, combine, leaf_paths, split

_FORMAT = "eqxjit.freeze"
_VERSION = 3
_MANIFEST, _PROGRAM = "manifest.json", "program.bin"
_array_name = "array-{}.bin".format

# All fields of a manifest. What is in the last three is checked where it is read.
_FIELDS = {
    **dict.fromkeys(("format", "eqxjit", "jax", "name"), str),
    **dict.fromkeys(("version", "n_first", "n_fun"), int),
    "parameters": list,
    "inputs": dict,
    "output": dict,
}

Path = str | os.PathLike[str]

# The types of static values that JSON holds as they are: of a float it has all digits.
_VALUES = (bool, int, float, str, type(None))


# --- Writing ----------------------------------------------------------------------------------


def write(caller: Caller, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the program for arguments like these, and the function's arrays."""
    path = os.fsdecode(path)
    folder = os.path.dirname(path) or os.curdir
    # Before the function is traced and exported, which may take minutes.
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", folder)
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
    avals, _ = _arguments_among(exported.in_avals, entry.n_first, entry.n_fun)
    # An array of its type's text stands for each array in what is written.
    inputs = combine(call.spec, (np.asarray(str(aval)) for aval in avals), iter(call.statics))
    for name, argument in signature.named(*inputs):
        # For the error, which names the argument.
        _written(argument, name)
    output = caller.combine([np.asarray(str(aval)) for aval in exported.out_avals], call)
    members = {_PROGRAM: bytes(exported.serialize())}
    for i, array in enumerate(caller.fun_arrays):
        members[_array_name(i)] = np.asarray(array).tobytes()
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
    _write(path, {_MANIFEST: json.dumps(manifest, indent=1).encode(), **members})


def _digest(contents: Iterable[bytes]) -> bytes:
    """Return the digest of the members of a file, the manifest first, in the manifest's order."""
    found = hashlib.sha256()
    for content in contents:
        found.update(content)
    return found.hexdigest().encode()


def _write(path: str, members: dict[str, bytes]) -> None:
    """Write a file as a whole, or not at all."""
    temporary = f"{path}.part"
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            archive.comment = _digest(members.values())
            for name, content in members.items():
                archive.writestr(name, content)
        # At once: a server may be loading the file that is there.
        os.replace(temporary, path)
    except OSError as error:
        # The user has no file of the temporary one's name.
        raise type(error)(error.errno, error.strerror, path) from None
    finally:
        # It is there where something was raised.
        with contextlib.suppress(OSError):
            os.remove(temporary)


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
            problem = short(error, 200)
            raise ValueError(
                f"{path} is damaged, or wasn't written by `frozen.save`: {problem}."
            ) from error


def _read(file: BinaryIO) -> tuple["SavedFunction", list[jax.Array]]:
    with zipfile.ZipFile(file) as archive:
        # Nothing may take more memory than on disk. Of a compressed part `zipfile` makes all there
        # is, whatever size is written of it.
        of_manifest, infos = archive.getinfo(_MANIFEST), archive.infolist()
        size = os.fstat(file.fileno()).st_size
        _check_sizes([of_manifest], size)
        manifest = json.loads(archive.read(of_manifest))
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
    fun = SavedFunction(manifest, _exported(manifest, program))
    return fun, [
        jnp.asarray(np.frombuffer(content, aval.dtype).reshape(aval.shape))
        for content, aval in zip(arrays, fun.fun_avals, strict=True)
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
        if type(manifest.get(field)) is not _FIELDS.get(field):
            raise _Refused(f"is damaged: its manifest has no valid `{field}`.")


def _exported(manifest: dict[str, Any], program: bytes) -> Exported:
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
    return exported


# --- The function -----------------------------------------------------------------------------


class SavedFunction:
    """The function in a file: called with the arrays that aren't compiled in, and its arguments."""

    def __init__(self, manifest: dict[str, Any], exported: Exported):
        name = self.__name__ = self.__qualname__ = manifest["name"]
        # `freeze` and `bind` find the parameters of the function that was saved, behind the arrays.
        self.__signature__ = _signature(manifest["parameters"])
        args, kwargs = _built(manifest["inputs"])
        bound = self.__signature__.bind(None, *args, **kwargs)
        self._spec, leaves, statics = split((args, kwargs))
        # With a `~` for a weak type, which the program itself doesn't have.
        self._saved = list(map(str, leaves))
        self._paths = [
            path
            for top, value in Signature(self, name, name).named((None, *args), kwargs)[1:]
            for path, spec, _ in leaf_paths(split(value)[0], value, top)
            if spec is ARRAY
        ]
        self._n_first = manifest["n_first"]
        self._avals, self.fun_avals = _arguments_among(
            exported.in_avals, self._n_first, manifest["n_fun"]
        )
        self._out_spec, outs, self._out_statics = split(_built(manifest["output"]))
        # Whatever is wrong in a file raises when it is read, because a call comes too late.
        is_sound = (
            name.isprintable()
            and all(type(optional) is bool for _, _, optional in manifest["parameters"])
            and 0 <= self._n_first <= len(self._avals)
            # Calls are bound likewise, or none would be the one that was saved.
            and (bound.args[1:], bound.kwargs) == (args, kwargs)
            and _strong(leaves) == _strong(self._avals)
            # Where a function returns no array, its program does.
            and (not outs or _strong(outs) == _strong(exported.out_avals))
        )
        if not is_sound:
            raise _Refused("is damaged: its manifest doesn't fit its program.")
        # Without arrays there is nothing to transform.
        self._call = _refusing(exported.call, name) if exported.in_avals else exported.call
        self.saved_for = _shown(self._spec, self._saved, statics)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arrays in arguments; raise for arguments that it wasn't saved for."""
        spec, leaves, statics = split((args, kwargs))
        types = [str(jax.typeof(leaf)) for leaf in leaves]
        if spec != self._spec:
            called_with = _shown(spec, types, statics)
            has_numbers = any(type(value) in (bool, int, float, complex) for value in statics)
            hint = ""
            if has_numbers and len(leaves) < len(self._saved):
                hint = " A Python number isn't an array: pass `np.float32(2.0)`, say, for `2.0`."
            raise ValueError(
                f"`{self.__name__}` was saved for {self.saved_for}, and is called with "
                f"{called_with}.{hint}"
            )
        expected = zip(self._saved, self._avals, self._paths, strict=True)
        for passed, (saved, aval, path) in zip(types, expected, strict=True):
            # JAX compares those with symbols.
            if passed not in (saved, str(aval)) and not is_symbolic(aval.shape):
                raise ValueError(
                    f"`{self.__name__}` was saved for {saved}, and is called with {passed} as "
                    f"`{path}`."
                )
        return leaves

    def __call__(self, arrays: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        leaves, n = self.check(args, kwargs), self._n_first
        try:
            results = self._call(*leaves[:n], *arrays, *leaves[n:])
        except ValueError as error:
            if not any(is_symbolic(aval.shape) for aval in self._avals):
                raise
            # JAX's error names no argument, and says nothing of what was saved.
            saved = ", ".join(map("`{}`: {}".format, self._paths, self._saved))
            passed = ", ".join([str(jax.typeof(leaf)) for leaf in leaves])
            raise ValueError(
                f"`{self.__name__}` was saved for {saved}, and is called with {passed}, which "
                "doesn't fit: a symbol stands for one size, from 1 on."
            ) from error
        return combine(self._out_spec, iter(arrays_of(results)), iter(self._out_statics))


def _signature(parameters: list[Any]) -> inspect.Signature:
    """Return the signature of a function of the arrays and of the parameters in a manifest."""
    # A name that no other parameter has.
    arrays = "_".join(["arrays", *[name for name, _, _ in parameters]])
    return inspect.Signature(
        [
            Parameter(name, getattr(Parameter, kind), default=None if optional else Parameter.empty)
            for name, kind, optional in [(arrays, "POSITIONAL_ONLY", False), *parameters]
        ]
    )


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


def _arguments_among(flat: Any, n_first: int, n_fun: int) -> tuple[list[Any], list[Any]]:
    """Return those of the arguments' arrays and those of the function's, of all in JAX's order."""
    end = n_first + n_fun
    return [*flat[:n_first], *flat[end:]], [*flat[n_first:end]]


def is_symbolic(shape: tuple[Any, ...]) -> bool:
    """Return whether some dimension has no size yet."""
    return not all(isinstance(size, int) for size in shape)


def _strong(avals: Any) -> list[str]:
    """Return the texts of arrays' types, without the mark of a weak one."""
    return [str(aval).removeprefix("~") for aval in avals]


class _ArrayText(str):
    """The type of an array, to be shown in its place within containers, too."""

    __repr__ = str.__str__


def _shown(spec: Spec, types: list[str], statics: list[Any]) -> str:
    args, kwargs = combine(spec, map(_ArrayText, types), iter(statics))
    return f"({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])})"


# --- Trees ------------------------------------------------------------------------------------


def _written(tree: Any, path: str) -> Any:
    """Return a tree as JSON; raise for what is no container, placeholder or plain value."""
    kind = type(tree)
    if kind is np.ndarray:
        return {"array": str(tree)}
    if kind in _VALUES:
        return {"value": tree}
    if kind is tuple or kind is list:
        return {kind.__name__: [_written(item, f"{path}[{i}]") for i, item in enumerate(tree)]}
    if kind is dict and all(type(key) is str for key in tree):
        return {"dict": {key: _written(item, f"{path}[{key!r}]") for key, item in tree.items()}}
    raise ValueError(
        f"`{path}` is of type `{kind.__name__}`, which a file can't hold without pickle. Take and "
        "return arrays, numbers, strings and None, in tuples, lists and dicts with strings as keys."
    )


def _built(tree: Any) -> Any:
    """Return the tree that was written, with placeholders of its arrays."""
    [(kind, content)] = tree.items()
    match kind, content:
        case "array", str():
            return np.asarray(content)
        case "tuple", list():
            return tuple(map(_built, content))
        case "list", list():
            return [*map(_built, content)]
        case "dict", dict():
            return {key: _built(item) for key, item in content.items()}
        case "value", _ if type(content) in _VALUES:
            return content
    raise ValueError(f"no tree is written as {short(tree)}")
