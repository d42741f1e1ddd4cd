"""Loads a file that `save.py` wrote: checks all that is in it, and restores the function.

Whatever is wrong in a file raises here, because a call comes too late; and nothing in it takes more
memory than on disk.
"""

import inspect
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any, BinaryIO

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax.export import Exported, default_export_platform, deserialize

from .._code.text import short
from .._core.entry import arrays_of
from .._fast.signature import Signature
from .._interruptions import raise_if_interruption
from .._spec.tree import ARRAY, combine, leaf_paths, split
from .save import (
    FORMAT,
    MANIFEST,
    PROGRAM,
    VALUES,
    VERSION,
    Path,
    arguments_among,
    array_name,
    digest,
    is_symbolic,
)

_NUMBERS = " A Python number isn't an array: pass `np.float32(2.0)`, say, in the place of `2.0`."


class _Refused(Exception):
    """The reason why a file isn't loaded: the rest of a sentence that begins with its path."""


def read(path: Path) -> tuple["SavedFunction", list[jax.Array]]:
    """Read a file, and check it: return the function in it, and the arrays to pass to it first."""
    with open(path, "rb") as file:
        try:
            return _read(file)
        except ImportError as error:
            raise ImportError("Loading needs flatbuffers: `pip install flatbuffers`.") from error
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
        # Of a compressed part `zipfile` makes all there is, whatever size is written of it.
        infos = archive.infolist()
        is_stored = all(info.compress_type == zipfile.ZIP_STORED for info in infos)
        size = sum([max(info.compress_size, info.file_size) for info in infos])
        if not is_stored or size > os.fstat(file.fileno()).st_size:
            raise _Refused("is damaged: its parts are compressed, or overlap.")
        manifest = json.loads(archive.read(MANIFEST))
        # Before all else: another version may have other fields and other parts.
        _check_version(manifest)
        names = [MANIFEST, PROGRAM, *map(array_name, range(len(infos) - 2))]
        if archive.namelist() != names or len(names) != 2 + manifest["n_fun"]:
            raise _Refused("is damaged: its parts aren't those that its manifest names.")
        _, program, *arrays = contents = [archive.read(name) for name in names]
        if archive.comment != digest(contents):
            raise _Refused("is damaged: its checksum differs. Copy or save it again.")
    fun = SavedFunction(manifest, _exported(manifest, program))
    return fun, [
        jnp.asarray(np.frombuffer(content, aval.dtype).reshape(aval.shape))
        for content, aval in zip(arrays, fun.fun_avals, strict=True)
    ]


def _check_version(manifest: Any) -> None:
    if type(manifest) is not dict or manifest.get("format") != FORMAT:
        raise _Refused("wasn't written by `frozen.save`.")
    version = manifest["version"]
    if version != VERSION:
        remedy = "Upgrade eqxjit" if version > VERSION else "Save it again under this one"
        raise _Refused(
            f"was written by eqxjit {manifest['eqxjit']}, in version {version} of the format; this "
            f"release reads version {VERSION}. {remedy}."
        )


def _exported(manifest: dict[str, Any], program: bytes) -> Exported:
    try:
        exported = deserialize(bytearray(program))
    except ImportError:
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


class SavedFunction:
    """The function in a file: called with the arrays that aren't compiled in, and its arguments.

    It has the signature of the function that was saved, behind the arrays.

    - `saved_for`: the arguments that it was saved for, in words.
    - `fun_avals`: the types of the arrays.
    """

    def __init__(self, manifest: dict[str, Any], exported: Exported):
        name = self.__name__ = self.__qualname__ = manifest["name"]
        self.__signature__ = _signature(manifest["parameters"])
        args, kwargs = _built(manifest["inputs"])
        bound = self.__signature__.bind(None, *args, **kwargs)
        self._spec, leaves, _ = split((args, kwargs))
        # With a `~` for a weak type, which the program itself doesn't have.
        self._saved = list(map(str, leaves))
        # The order of the leaves: JAX's, which sorts the names.
        kwargs = {key: kwargs[key] for key in sorted(kwargs)}
        self._paths = [
            path
            for top, value in Signature(self, name, name).named((None, *args), kwargs)[1:]
            for path, spec, _ in leaf_paths(split(value)[0], value, top)
            if spec is ARRAY
        ]
        self._n_first = manifest["n_first"]
        self._avals, self.fun_avals = arguments_among(
            exported.in_avals, self._n_first, manifest["n_fun"]
        )
        self._out_spec, outs, self._out_statics = split(_built(manifest["output"]))
        is_sound = (
            name.isprintable()
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
        self.saved_for = _shown(args, kwargs)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arrays in arguments; raise for arguments that it wasn't saved for."""
        spec, leaves, statics = split((args, kwargs))
        if spec != self._spec:
            called_with = _shown(*combine(spec, _texts(leaves), iter(statics)))
            has_numbers = any(type(value) in (bool, int, float, complex) for value in statics)
            is_hint = has_numbers and len(leaves) < len(self._saved)
            raise ValueError(
                f"`{self.__name__}` was saved for {self.saved_for}, and is called with "
                f"{called_with}.{_NUMBERS if is_hint else ''}"
            )
        for saved, aval, passed, path in zip(
            self._saved, self._avals, map(jax.typeof, leaves), self._paths, strict=True
        ):
            # JAX compares those with symbols.
            if str(passed) not in (saved, str(aval)) and not is_symbolic(aval.shape):
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
            saved = ", ".join(map("`{}`: {}".format, self._paths, self._saved))
            raise ValueError(
                f"`{self.__name__}` was saved for {saved}, and is called with "
                f"{', '.join(_texts(leaves))}, which doesn't fit: a symbol stands for one size, "
                "from 1 on."
            ) from error
        return combine(self._out_spec, iter(arrays_of(results)), iter(self._out_statics))


def _signature(parameters: list[Any]) -> inspect.Signature:
    """Return the signature of a function of the arrays and of the parameters in a manifest."""
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


def _built(tree: Any) -> Any:
    """Return the tree that was written, with placeholders of its arrays."""
    [(kind, content)] = tree.items()
    if kind == "array" and type(content) is str:
        return np.asarray(content)
    if kind == "float" and type(content) is str:
        return float.fromhex(content)
    if kind == "dict" and type(content) is dict:
        return {key: _built(item) for key, item in content.items()}
    if kind in ("tuple", "list") and type(content) is list:
        items = [*map(_built, content)]
        return tuple(items) if kind == "tuple" else items
    if kind == "value" and type(content) in VALUES:
        return content
    raise ValueError(f"no tree is written as {short(tree)}")


def _strong(avals: Any) -> list[str]:
    """Return the texts of arrays' types, without the mark of a weak one."""
    return [str(aval).removeprefix("~") for aval in avals]


def _texts(leaves: list[Any]) -> Iterator[str]:
    return (str(jax.typeof(leaf)) for leaf in leaves)


def _shown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return f"({', '.join([*map(str, args), *(f'{k}={v}' for k, v in kwargs.items())])})"
