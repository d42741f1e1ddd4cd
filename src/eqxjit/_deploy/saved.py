"""The file of a frozen function: `write` makes one, and `read` restores the function in it.

A header line, with a digest of all that follows; a line of JSON, the manifest; the program as
`jax.export` serialises it; and the arrays that aren't compiled in.
"""

import contextlib
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax.export import Exported, default_export_platform, deserialize, export

from .._core.slow import CallHandler
from .._diagnostics.description import Description, describe_trees
from .._diagnostics.differences import differences, listed
from .._fast.signature import Signature
from .._spec.tree import Spec, arrays_of, combine, split

_VERSION = 6
_HEADER = re.compile(rb"eqxjit\.freeze (\d{1,9}) (\S+) ([0-9a-f]{64})\n")

# The first parameter of a saved function: its arrays, by a name that no other has.
_ARRAYS = ("__arrays", "POSITIONAL_ONLY", False)

#: In the place of each array in what is written.
PLACEHOLDER = np.zeros(0)

Path = str | os.PathLike[str]
Type = jax.ShapeDtypeStruct


# --- Writing ----------------------------------------------------------------------------------


def write(handler: CallHandler, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the program for arguments like these, and the function's arrays."""
    # As `open` does, replace the file that a link leads to, and keep its permissions.
    target = os.path.realpath(os.fsdecode(path))
    temporary = f"{target}.{secrets.token_hex(4)}.part"
    try:
        # Opened before the function is traced and exported, which may take minutes.
        with open(temporary, "xb") as file:
            file.write(_content(handler, args, kwargs))
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(target, temporary)
        # At once: a server may be loading the file that is there.
        os.replace(temporary, target)
    finally:
        # Not there once it has replaced the other, or if it couldn't be opened.
        with contextlib.suppress(OSError):
            os.remove(temporary)


def _content(handler: CallHandler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    signature = handler.function.signature
    try:
        call, exported, _ = handler.stage(export, args, kwargs)
    except NotImplementedError as error:
        if "host_callbacks" not in str(error):
            # The function itself raised it.
            raise
        raise ValueError(
            f"`{signature.label}` can't be saved ({error}): a file can't hold Python to call "
            "back, as of `jax.debug.print`, `jax.pure_callback` or `eqx.error_if`. The environment "
            "variable `EQX_ON_ERROR=off` takes out Equinox's checks."
        ) from error
    entry = call.entry
    if entry.outs:
        raise ValueError(
            "What the function returns beside arrays depends on their shapes. Freeze it again, and "
            "save it before it is called."
        )
    inputs = combine(call.spec, itertools.repeat(PLACEHOLDER), iter(call.statics))
    for name, argument in signature.named(*inputs):
        # For the error, which names the argument.
        to_json(argument, name)
    output = handler.combine([PLACEHOLDER] * len(exported.out_avals), call)
    program = bytes(exported.serialize())
    arrays = [np.asarray(array).tobytes() for array in handler.fun_arrays]
    manifest = {
        "jax": jax.__version__,
        "name": signature.label,
        "parameters": [
            [p.name, p.kind.name, p.default is not Parameter.empty] for p in signature.parameters
        ],
        "inputs": to_json(inputs, "(args, kwargs)"),
        "output": to_json(output, "output"),
        "sizes": [len(program), *map(len, arrays)],
    }
    content = b"".join([json.dumps(manifest).encode(), b"\n", program, *arrays])
    version = importlib.metadata.version("eqxjit")
    header = f"eqxjit.freeze {_VERSION} {version} {hashlib.sha256(content).hexdigest()}\n"
    return header.encode() + content


# --- Reading ----------------------------------------------------------------------------------


def read(path: Path) -> tuple["SavedFunction", list[jax.Array]]:
    """Read a file, and check it: return the function in it, and the arrays to pass to it first."""
    path = os.fsdecode(path)
    with open(path, "rb") as file:
        header = _HEADER.fullmatch(file.readline(200))
        if header is None:
            raise ValueError(f"{path} is damaged, or wasn't written by `frozen.save`.")
        version, writer, digest = header.groups()
        if int(version) != _VERSION:
            newer = int(version) > _VERSION
            raise ValueError(
                f"{path} was written by eqxjit {writer.decode(errors='replace')}, in version "
                f"{int(version)} of the format; this release reads version {_VERSION}. "
                f"{'Upgrade eqxjit' if newer else 'Save it again under this one'}."
            )
        content = file.read()
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise ValueError(f"{path} is damaged: its checksum differs. Copy or save it again.")
    end = content.index(b"\n") + 1
    manifest = json.loads(content[:end])
    offsets = itertools.accumulate(manifest["sizes"], initial=end)
    program, *arrays = [memoryview(content)[a:b] for a, b in itertools.pairwise(offsets)]
    fun = SavedFunction(manifest, _exported(path, program, manifest["jax"]))
    return fun, [
        jnp.asarray(np.frombuffer(array, kind.dtype).reshape(kind.shape))
        for array, kind in zip(arrays, fun.array_types, strict=True)
    ]


def _exported(path: str, program: memoryview, version: str) -> Exported:
    try:
        exported = deserialize(bytearray(program))
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        # JAX's: it raises many kinds for what an older or a newer release has written.
        raise ValueError(
            f"{path} was saved under jax {version}, whose program jax {jax.__version__} can't "
            "read. Save it again under this one."
        ) from error
    platform = default_export_platform()
    if platform not in exported.platforms:
        raise ValueError(
            f"{path} was saved for {', '.join(exported.platforms)}, and this is {platform}. Save "
            "it there."
        )
    return exported


# --- The function -----------------------------------------------------------------------------


class SavedFunction:
    """The function in a file: called with the arrays that aren't compiled in, and its arguments.

    - `array_types`: the types of those arrays.
    - `saved_for`: its arguments, in words.
    """

    def __init__(self, manifest: dict[str, Any], exported: Exported):
        name = self.__name__ = self.__qualname__ = manifest["name"]
        # `freeze` and `bind` find the parameters of the function that was saved, behind the arrays.
        parameters = [
            Parameter(name, getattr(Parameter, kind), default=None if optional else Parameter.empty)
            for name, kind, optional in [_ARRAYS, *manifest["parameters"]]
        ]
        self.__signature__ = inspect.Signature(parameters)
        self._signature = Signature(self, name, name)
        self._spec, _, statics = split(from_json(manifest["inputs"]))
        self._out_spec, _, self._out_statics = split(from_json(manifest["output"]))
        types = [Type(aval.shape, aval.dtype) for aval in exported.in_avals]
        n = len(types) - len(manifest["sizes"]) + 1
        self._types, self.array_types = types[:n], types[n:]
        # Without arrays there is nothing to transform.
        self._call = _refusing(exported.call, name) if exported.in_avals else exported.call
        self._description = self._describe(self._spec, self._types, statics)
        parts = [row for row in self._description if not row.part.is_node]
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
        leaves = self.check(args, kwargs)
        try:
            results = self._call(*leaves, *arrays)
        except ValueError as error:
            if not any(is_symbolic(kind.shape) for kind in self._types):
                raise
            # JAX's error names no argument, and says nothing of what was saved.
            misfit = self._misfit(args, kwargs)
            raise ValueError(f"{misfit}\nA symbol stands for one size, from 1 on.") from error
        return combine(self._out_spec, iter(arrays_of(results)), iter(self._out_statics))


def _refusing(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the same, with an error that says what to do where it is mapped or differentiated."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"`{name}` was loaded from a file, whose program can't be mapped or differentiated. "
            "Call it by `jax.lax.map`, or save `jax.vmap` or `jax.grad` of the function, too."
        )

    mapped = jax.custom_batching.custom_vmap(lambda *arrays: call(*arrays))
    mapped.def_vmap(refuse)
    differentiated = jax.custom_jvp(lambda *arrays: mapped(*arrays))
    differentiated.defjvp(refuse)
    return differentiated


def is_symbolic(shape: tuple[Any, ...]) -> bool:
    """Return whether some dimension has no size yet."""
    return not all(isinstance(size, int) for size in shape)


def type_of(leaf: Any) -> Type:
    """Return the type of an array inside a jitted function, weak types aside."""
    # A NumPy array of 64 bits becomes one of 32, unless JAX has x64 switched on.
    computable = is_computable(leaf.dtype)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if computable else leaf.dtype
    return Type(leaf.shape, dtype)


def is_computable(dtype: Any) -> bool:
    """Return whether JAX computes with a dtype: not with text or dates, nor with typed keys."""
    return isinstance(dtype, np.dtype) and (dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number))


# --- Trees ------------------------------------------------------------------------------------


def to_json(tree: Any, path: str) -> Any:
    """Return a tree as JSON; raise for what is no container, placeholder or plain value."""
    kind = type(tree)
    if kind is np.ndarray:
        return {"array": None}
    # JSON holds these as they are: of a float it has all digits.
    if kind in (bool, int, float, str, type(None)):
        return tree
    if kind is tuple or kind is list:
        items = [to_json(item, f"{path}[{i}]") for i, item in enumerate(tree)]
        return items if kind is list else {"tuple": items}
    if kind is dict and all(type(key) is str for key in tree):
        return {"dict": {key: to_json(item, f"{path}[{key!r}]") for key, item in tree.items()}}
    raise ValueError(
        f"`{path}` is of type `{kind.__name__}`, which a file can't hold without pickle. Take and "
        "return arrays, numbers, strings and None, in tuples, lists and dicts with strings as keys."
    )


def from_json(tree: Any) -> Any:
    """Return the tree that was written, with placeholders of its arrays."""
    if type(tree) is list:
        return [*map(from_json, tree)]
    if type(tree) is not dict:
        return tree
    [(kind, content)] = tree.items()
    if kind == "array":
        return PLACEHOLDER
    if kind == "tuple":
        return tuple(map(from_json, content))
    return {key: from_json(item) for key, item in content.items()}
