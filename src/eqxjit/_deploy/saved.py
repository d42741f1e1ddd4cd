"""The file of a frozen function: `write` makes one, and `read` restores the function in it.

A header line, with a digest of all that follows; a line of JSON, the manifest; the program as
`jax.export` serialises it; and the arrays that aren't compiled in.
"""

import contextlib
import hashlib
import inspect
import itertools
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from inspect import Parameter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.export import Exported, default_export_platform, deserialize, export

from .._core.ahead import stage
from .._core.slow import CallHandler, combine_output
from .._diagnostics.description import Description, describe_trees
from .._diagnostics.differences import differences, listed
from .._fast.signature import Signature
from .._spec.tree import Spec, combine, split

_VERSION = 7
# Before version 7 with the release of eqxjit in it.
_HEADER = re.compile(rb"eqxjit\.freeze (\d{1,9}) (?:\S+ )?([0-9a-f]{64})\n")

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
    except OSError as error:
        # The function's may be of any file.
        if error.filename == temporary:
            error.filename = target
        raise
    finally:
        # Not there once it has replaced the other, or if it couldn't be opened.
        with contextlib.suppress(OSError):
            os.remove(temporary)


def _export(jitted: Any) -> Any:
    # Without the program that stands for its trace, which is of this process.
    return export(jax.jit(lambda *leaves: next(iter(jitted(*leaves).values()))))


def _content(handler: CallHandler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    signature = handler.function.signature
    try:
        call, exported = stage(handler, _export, args, kwargs)
    except NotImplementedError as error:
        # Unless it is the function's own.
        if "host_callbacks" in str(error):
            error.add_note(
                "A file can't hold Python to call back, as of `jax.debug.print` or `eqx.error_if`. "
                "The environment variable `EQX_ON_ERROR=off` takes out Equinox's."
            )
        raise
    if any(out is not call.entry.out for out, _ in call.entry.outs.values()):
        raise ValueError(
            "What the function returns beside arrays depends on their shapes. Freeze it again, and "
            "save it before it is called."
        )
    inputs = combine(call.spec, itertools.repeat(PLACEHOLDER), iter(call.statics))
    for name, argument in signature.named(*inputs):
        # For the error, which names the argument.
        to_json(argument, name)
    placeholders = [PLACEHOLDER] * len(exported.out_avals)
    output = combine_output(call, call.entry.out, placeholders)
    program = bytes(exported.serialize())
    arrays = [np.asarray(array).tobytes() for array in handler.fun_arrays]
    parameters = [
        [p.name, p.kind.name, p.default is not Parameter.empty] for p in signature.parameters
    ]
    sizes = [len(program), *map(len, arrays)]
    structures = to_json(inputs, "(args, kwargs)"), to_json(output, "output")
    manifest = [jax.__version__, sizes, signature.label, parameters, *structures]
    content = b"".join([json.dumps(manifest).encode(), b"\n", program, *arrays])
    header = f"eqxjit.freeze {_VERSION} {hashlib.sha256(content).hexdigest()}\n"
    return header.encode() + content


# --- Reading ----------------------------------------------------------------------------------


def read(path: Path) -> tuple["SavedFunction", list[jax.Array]]:
    """Read a file, and check it: return the function in it, and the arrays to pass to it first."""
    path = os.fsdecode(path)
    with open(path, "rb") as file:
        header, content = _HEADER.fullmatch(file.readline(200)), file.read()
    if not header or hashlib.sha256(content).hexdigest() != header[2].decode():
        raise ValueError(f"{path} is damaged, or wasn't written by `frozen.save`.")
    version = int(header[1])
    if version != _VERSION:
        remedy = "Upgrade eqxjit" if version > _VERSION else "Save it again under this one"
        raise ValueError(
            f"{path} was written in version {version} of the format; this release of eqxjit reads "
            f"version {_VERSION}. {remedy}."
        )
    end = content.index(b"\n") + 1
    written_by, sizes, *manifest = json.loads(content[:end], object_hook=_container)
    offsets = itertools.accumulate(sizes, initial=end)
    program, *arrays = [memoryview(content)[a:b] for a, b in itertools.pairwise(offsets)]
    fun = SavedFunction(_exported(path, program, written_by), len(arrays), *manifest)
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

    def __init__(
        self, exported: Exported, n_arrays: int, name: str, named: Any, inputs: Any, output: Any
    ):
        self.__name__ = self.__qualname__ = name
        # `freeze` and `bind` find the parameters of the function that was saved, behind the arrays,
        # whose name no other has.
        named = [("__arrays", "POSITIONAL_ONLY", False), *named]
        parameters = [
            Parameter(name, getattr(Parameter, kind), default=None if optional else Parameter.empty)
            for name, kind, optional in named
        ]
        self.__signature__ = inspect.Signature(parameters)
        self._signature = Signature(self, name, name)
        self._spec, _, statics = split(inputs)
        self._out_spec, _, self._out_statics = split(output)
        types = [Type(aval.shape, aval.dtype) for aval in exported.in_avals]
        n = len(types) - n_arrays
        self.array_types = types[n:]
        # Its program is for these shapes: mapped, it is called once for each element.
        self._call = sequential_vmap(exported.call)
        self._description = self._describe(self._spec, types[:n], statics)
        parts = [row for row in self._description if not row.part.is_node]
        self.saved_for = ", ".join([f"{row.path}: {row.part}" for row in parts])

    def _describe(self, spec: Spec, types: Sequence[Type], statics: Sequence[Any]) -> Description:
        args, kwargs = combine(spec, iter(types), iter(statics))
        named = self._signature.named((None, *args), kwargs)[1:]
        specs = [*spec[3][3:], *spec[4][3:]]
        pairs = zip(named, specs, strict=True)
        return describe_trees([(name, spec, value) for (name, value), spec in pairs])

    def __call__(self, arrays: Any, /, *args: Any, **kwargs: Any) -> Any:
        spec, leaves, statics = split((args, kwargs))
        cause = None
        if spec == self._spec:
            try:
                results = self._call(*leaves, *arrays)
                return combine(self._out_spec, iter(results), iter(self._out_statics))
            except ValueError as error:
                # JAX's for another type names no argument, and says nothing of what was saved.
                cause = error
        passed = self._describe(spec, [*map(type_of, leaves)], statics)
        if cause is not None and passed == self._description:
            raise cause
        lines = changes(self._description, passed)
        if any("static where an array was" in line for line in lines):
            lines.append("What isn't an array is static: pass `np.float32(2.0)`, say, for `2.0`.")
        lines += ["(A symbol in a shape stands for one size, from 1 on.)"] * (cause is not None)
        title = f"`{self.__name__}` was saved for other arguments:"
        raise ValueError("\n    ".join([title, *lines])) from cause


def changes(old: Description, new: Description) -> list[str]:
    # Trees of very many parts aren't described.
    return listed(differences(old, new)) or ["somewhere in a large tree"]


def type_of(leaf: Any) -> Type:
    """Return the type of an array inside a jitted function, weak types aside."""
    aval = jax.typeof(leaf)
    return Type(aval.shape, aval.dtype)


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
        items = [[key, to_json(item, f"{path}[{key!r}]")] for key, item in tree.items()]
        return {"dict": items}
    raise ValueError(
        f"`{path}` is of type `{kind.__name__}`, which a file can't hold without pickle. Take and "
        "return arrays, numbers, strings and None, in tuples, lists and dicts with strings as keys."
    )


def _container(item: dict[str, Any]) -> Any:
    """Return what an object in the JSON stands for: innermost ones come first."""
    [(kind, content)] = item.items()
    return {"array": lambda _: PLACEHOLDER, "tuple": tuple, "dict": dict}[kind](content)
