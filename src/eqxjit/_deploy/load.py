"""Loads a file that `save.py` wrote: checks all that is in it, and restores the function.

Only what the manifest names is read, and only as many bytes as it says. Whatever is wrong in a file
raises here, because a call comes too late.
"""

import inspect
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TypeVar

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax.export import Exported, default_export_platform, deserialize

from .._code.text import array_text, short
from .._core.entry import arrays_of
from .._fast.signature import Signature
from .._interruptions import raise_if_interruption
from .._spec.tree import combine, split
from .buffers import is_computable
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

T = TypeVar("T")

# The fields of a manifest beside its format and version, and their types as `_fits` reads them.
_FIELDS: dict[str, Any] = {
    "eqxjit": str,
    "jax": str,
    "platforms": [str],
    "name": str,
    "parameters": [(str, str, bool)],
    "n_first": int,
    "inputs": dict,
    "output": dict,
    "arrays": [(str, [int])],
    "sizes": dict,
}

_KINDS = {kind.name: kind for kind in type(inspect.Parameter.KEYWORD_ONLY)}


class _Refused(Exception):
    """The reason why a file isn't loaded: the rest of a sentence that begins with its path."""


def load(path: Path) -> tuple["SavedFunction", list[jax.Array]]:
    """Read a file, and check it: return the function in it, and the arrays to pass to it first."""
    with open(path, "rb") as file:
        try:
            return _attempt(lambda: _read(file))
        except _Refused as refused:
            raise ValueError(f"{path} {refused}") from refused.__cause__


def _attempt(action: Callable[[], T], refused: _Refused | None = None) -> T:
    """Return what an action returns; refuse the file if its content makes the action raise."""
    try:
        return action()
    except (ImportError, _Refused):
        raise
    except Exception as error:
        # A flipped bit may look like another compression, an encryption, a wrong offset.
        raise_if_interruption(error, action)
        raise (refused or _damaged(short(error, 200))) from error


def _damaged(problem: str) -> _Refused:
    return _Refused(f"is damaged, or wasn't written by `frozen.save`: {problem}.")


def _invalid(field: str) -> _Refused:
    return _damaged(f"its manifest has no valid `{field}`")


def _read(file: BinaryIO) -> tuple["SavedFunction", list[jax.Array]]:
    with zipfile.ZipFile(file) as archive:
        content = _content(archive, MANIFEST)
        manifest = _checked(json.loads(content))
        names = [PROGRAM, *map(array_name, range(len(manifest["arrays"])))]
        if [*manifest["sizes"]] != names:
            raise _invalid("sizes")
        infos = archive.infolist()
        if sorted(info.filename for info in infos) != sorted([MANIFEST, *names]):
            raise _damaged("its parts aren't those that its manifest names")
        if sum([info.compress_size for info in infos]) > os.fstat(file.fileno()).st_size:
            raise _damaged("its parts overlap")
        members = {name: _content(archive, name, manifest["sizes"][name]) for name in names}
        if archive.comment != digest([content, *members.values()]):
            raise _Refused("is damaged: its checksum differs. Copy or save it again.")
    exported = _program(manifest, members[PROGRAM])
    fun = SavedFunction(manifest, exported)
    # The function has found the types to be those of the program.
    arrays = [
        jnp.asarray(np.frombuffer(members[name], jnp.dtype(dtype)).reshape(shape))
        for name, (dtype, shape) in zip(names[1:], manifest["arrays"], strict=True)
    ]
    return fun, arrays


def _content(archive: zipfile.ZipFile, name: str, size: int | None = None) -> bytes:
    """Return the content of a member, which takes no more memory than on disk."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise _damaged(f"`{name}` is compressed")
    if size is not None and info.file_size != size:
        raise _damaged(f"`{name}` isn't of the size that its manifest says")
    return archive.read(info)


def _checked(manifest: Any) -> dict[str, Any]:
    """Return a manifest whose fields are of the right types."""
    if type(manifest) is not dict or manifest.get("format") != FORMAT:
        raise _Refused("wasn't written by `frozen.save`.")
    version, writer = manifest.get("version"), manifest.get("eqxjit")
    if type(version) is not int or version < 1:
        raise _invalid("version")
    if version != VERSION:
        remedy = "Upgrade eqxjit" if version > VERSION else "Save it again under this one"
        raise _Refused(
            f"was written by {f'eqxjit {writer}' if type(writer) is str else 'another eqxjit'}, in "
            f"version {version} of the format; this release reads version {VERSION}. {remedy}."
        )
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
    return type(value) is schema


def _program(manifest: Mapping[str, Any], content: bytes) -> Exported:
    platform, platforms = default_export_platform(), manifest["platforms"]
    if platform not in platforms:
        raise _Refused(
            f"was saved for {', '.join(platforms)}, and this is {platform}. Save it there."
        )
    unreadable = _Refused(
        f"was saved under jax {manifest['jax']}, whose program jax {jax.__version__} can't read. "
        "Save it again under this one."
    )
    try:
        exported = _attempt(lambda: deserialize(bytearray(content)), unreadable)
    except ImportError as error:
        raise ImportError("Loading needs flatbuffers: `pip install flatbuffers`.") from error
    if list(exported.platforms) != platforms:
        raise _invalid("platforms")
    return exported


class SavedFunction:
    """The function in a file: called with the arrays that aren't compiled in, and its arguments.

    It has the signature of the function that was saved, behind the arrays.

    - `saved_for`: the arguments that it was saved for, in words.
    """

    def __init__(self, manifest: Mapping[str, Any], exported: Exported):
        name, n_first, arrays = manifest["name"], manifest["n_first"], manifest["arrays"]
        avals, fun_avals = arguments_among(exported.in_avals, n_first, len(arrays))
        inputs = _attempt(lambda: _built(manifest["inputs"]), _invalid("inputs"))
        self._spec, leaves, _ = split(inputs)
        output = _attempt(lambda: _built(manifest["output"]), _invalid("output"))
        self._out_spec, outs, self._out_statics = split(output)
        # With a `~` for a weak type, which the program itself doesn't have.
        self._saved = list(map(str, leaves))
        is_tree = type(inputs) is tuple and list(map(type, inputs)) == [tuple, dict]
        # Where a function returns no array, its program does.
        out_avals = exported.out_avals if outs else []
        for field, is_valid in {
            # JAX passes it on as UTF-8.
            "name": name.isprintable(),
            "n_first": 0 <= n_first <= len(exported.in_avals) - len(arrays),
            "arrays": list(map(str, fun_avals)) == list(itertools.starmap(array_text, arrays)),
            "inputs": is_tree and _strong(leaves) == _strong(avals),
            "output": _strong(outs) == _strong(out_avals),
        }.items():
            if not is_valid:
                raise _invalid(field)
        self.__name__ = self.__qualname__ = name
        self.__signature__ = _attempt(
            lambda: _signature(manifest["parameters"], *inputs), _invalid("parameters")
        )
        names = Signature(self, name, name).path_names(1 + len(inputs[0]))[1:]
        self._paths = _paths(names, inputs)
        self._avals, self._n_first, self._expected = avals, n_first, inputs
        self._call = _without_transformations(exported.call, name, bool(exported.in_avals))
        self.saved_for = _shown(*inputs)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arrays in arguments; raise for arguments that it wasn't saved for."""
        spec, leaves, statics = split((args, kwargs))
        texts = [str(jax.typeof(leaf)) for leaf in leaves]
        if spec != self._spec:
            called_with = _shown(*combine(spec, iter(texts), iter(statics)))
            raise ValueError(
                f"`{self.__name__}` was saved for {self.saved_for}, and is called with "
                f"{called_with}.{self._hint((args, kwargs))}"
            )
        sizes: dict[str, tuple[Any, str]] = {}
        for saved, aval, leaf, text, path in zip(
            self._saved, self._avals, leaves, texts, self._paths, strict=True
        ):
            problem = None if text == saved else _mismatch(aval, jax.typeof(leaf), path, sizes)
            if problem is not None:
                raise ValueError(
                    f"`{self.__name__}` was saved for {saved}, and is called with {text} as "
                    f"`{path}`{problem}."
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
            # Not a plain symbol in some dimension, but a formula.
            saved = ", ".join(map("`{}`: {}".format, self._paths, self._saved))
            passed = ", ".join(str(jax.typeof(leaf)) for leaf in leaves)
            raise ValueError(
                f"`{self.__name__}` was saved for {saved}, and is called with {passed}, which "
                "doesn't fit."
            ) from error
        return combine(self._out_spec, iter(arrays_of(results)), iter(self._out_statics))

    def _hint(self, inputs: Any) -> str:
        """Return what to write in the place of Python's numbers, if some are passed for arrays."""
        expected, structure = jax.tree.flatten(self._expected)
        passed, passed_structure = jax.tree.flatten(inputs)
        if passed_structure != structure:
            return ""
        pairs = zip(expected, passed, strict=True)
        leaves = [leaf for one, leaf in pairs if isinstance(one, np.ndarray)]
        hints = [
            f"`{_scalar_class(aval.dtype)}({leaf!r})` as `{path}`"
            for aval, leaf, path in zip(self._avals, leaves, self._paths, strict=True)
            if type(leaf) in (bool, int, float, complex)
            and aval.shape == ()
            and is_computable(aval.dtype)
            and jnp.result_type(aval.dtype, leaf) == aval.dtype
        ]
        return f" A Python number isn't an array: pass {', '.join(hints)}." if hints else ""


def _strong(avals: Any) -> list[str]:
    """Return the texts of arrays' types, without the mark of a weak one."""
    return [str(aval).removeprefix("~") for aval in avals]


def _paths(names: list[str], inputs: Any) -> list[str]:
    """Return which part of the arguments each array is."""
    paths: list[str] = []
    for (side, top, *rest), leaf in jax.tree_util.tree_flatten_with_path(inputs)[0]:
        if isinstance(leaf, np.ndarray):
            name = names[top.idx] if side.idx == 0 else top.key
            paths.append(f"{name}{jax.tree_util.keystr(tuple(rest))}")
    return paths


def _without_transformations(
    call: Callable[..., Any], name: str, has_arrays: bool
) -> Callable[..., Any]:
    """Return the same, with an error that says what to do where it is mapped or differentiated."""
    if not has_arrays:
        # Nothing to map.
        return call

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


def _mismatch(saved: Any, passed: Any, path: str, sizes: dict[str, tuple[Any, str]]) -> str | None:
    """Return how an array differs from the saved one, or None; `sizes` holds each symbol's."""
    if not is_symbolic(saved.shape):
        return None if str(saved) == str(passed) else ""
    if saved.dtype != passed.dtype or len(saved.shape) != len(passed.shape):
        return ""
    for axis, (size, other) in enumerate(zip(saved.shape, passed.shape, strict=True)):
        if isinstance(size, int):
            if size != other:
                return f": its dimension {axis} must be {size}, and is {other}"
        elif str(size).isidentifier():
            if other == 0:
                return f": `{size}` stands for sizes from 1 on"
            first, where = sizes.setdefault(str(size), (other, path))
            if first != other:
                return f": `{size}` is {first} in `{where}`, and {other} here"
    return None


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


def _built(tree: Any) -> Any:
    """Return the tree that was written, with placeholders of its arrays."""
    [(kind, content)] = tree.items()
    if kind == "array" and type(content) is str:
        return np.asarray(content)
    if kind == "value" and type(content) in VALUES:
        return content
    if kind == "float" and type(content) is str:
        return float.fromhex(content)
    if kind == "dict" and type(content) is dict:
        return {key: _built(item) for key, item in content.items()}
    if kind in ("tuple", "list") and type(content) is list:
        items = map(_built, content)
        return tuple(items) if kind == "tuple" else list(items)
    raise ValueError(f"no tree is written as {short(tree)}")


def _shown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return f"({', '.join([*map(str, args), *(f'{k}={v}' for k, v in kwargs.items())])})"
