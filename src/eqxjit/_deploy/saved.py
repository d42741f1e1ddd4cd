"""The file of a frozen function: `write` creates it, and `read` restores the function.

A file consists of four parts:

- a header line, with the version of the format and a digest of the rest of the file;
- the manifest, a line of JSON;
- the program, as `jax.export` serialises it;
- the bytes of the arrays that aren't compiled in.
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
from collections.abc import Callable, Sequence
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
from .._fast.signature import Signature
from .._spec.tree import Spec, combine, split
from .snapshot import Type, changes, type_of

_VERSION = 7
# Before version 7 a header also had the release of eqxjit.
_HEADER = re.compile(rb"eqxjit\.freeze (\d{1,9}) (?:\S+ )?([0-9a-f]{64})\n")

#: Stands for each array in the structures that the manifest holds.
PLACEHOLDER = np.zeros(0)

Path = str | os.PathLike[str]


# --- Writing ----------------------------------------------------------------------------------


def write(handler: CallHandler, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the program for arguments like these, and the function's arrays, to a file."""
    # Like `open`, replace the file that a link leads to, and keep its permissions.
    target = os.path.realpath(os.fsdecode(path))
    temporary = f"{target}.{secrets.token_hex(4)}.part"
    try:
        # Open the file first, because a path that can't be written should raise before tracing and
        # exporting, which may take minutes.
        with open(temporary, "xb") as file:
            file.write(_content(handler, args, kwargs))
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(target, temporary)
        # Replace the file atomically, because a server may be loading it.
        os.replace(temporary, target)
    except OSError as error:
        # Not for any `OSError`, because the user's function may raise one about a different file.
        if error.filename == temporary:
            error.filename = target
        raise
    finally:
        # The temporary file is gone if it has replaced the target, or couldn't be opened.
        with contextlib.suppress(OSError):
            os.remove(temporary)


def _export(jitted: Any) -> Any:
    """Return a function that exports a jitted function for arrays like those passed to it."""
    # The output of the jitted function is `{program: arrays}`. The key means nothing in a file.
    return export(jax.jit(lambda *leaves: next(iter(jitted(*leaves).values()))))


def _content(handler: CallHandler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    signature = handler.function.signature
    try:
        call, exported = stage(handler, _export, args, kwargs)
    except NotImplementedError as error:
        # Only for JAX's error, because the user's function may raise a `NotImplementedError`, too.
        if "host_callbacks" in str(error):
            error.add_note(
                "A file can't hold callbacks into Python, as `jax.debug.print` and `eqx.error_if` "
                "use them. The environment variable `EQX_ON_ERROR=off` removes the checks of "
                "`eqx.error_if`."
            )
        raise
    inputs = combine(call.spec, itertools.repeat(PLACEHOLDER), iter(call.statics))
    for name, argument in signature.named(*inputs):
        # Called for its error alone, which names the argument.
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
    """Return the function in a file, and the arrays in the file, which are its first argument.

    **Raises:**

    - `ValueError`, if the file is damaged, or was written for a different release or platform.
    """
    path = os.fsdecode(path)
    with open(path, "rb") as file:
        header, content = _HEADER.fullmatch(file.readline(200)), file.read()
    if not header or hashlib.sha256(content).hexdigest() != header[2].decode():
        raise ValueError(f"{path} is damaged, or wasn't written by `frozen.save`.")
    version = int(header[1])
    if version != _VERSION:
        remedy = "Upgrade eqxjit" if version > _VERSION else "Save it again with this release"
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
        # JAX raises any of these for the program of an older or newer release.
        raise ValueError(
            f"{path} was saved under jax {version}, whose program jax {jax.__version__} can't "
            "read. Save it again under the JAX that loads it."
        ) from error
    platform = default_export_platform()
    if platform not in exported.platforms:
        raise ValueError(
            f"{path} was saved for {', '.join(exported.platforms)}, and JAX runs on {platform} "
            "here. Save it on this platform."
        )
    dtypes = [aval.dtype for aval in exported.in_avals]
    if any(jax.dtypes.canonicalize_dtype(each, True) != each for each in dtypes):
        raise ValueError(
            f"{path} was saved with 64-bit numbers, which are switched off here. Call "
            '`jax.config.update("jax_enable_x64", True)`, or set JAX_ENABLE_X64=1.'
        )
    return exported


# --- The function -----------------------------------------------------------------------------


# A subclass of both, because for an exported program JAX itself raises a `ValueError` in reverse
# mode and a `TypeError` in forward mode.
class _NotDifferentiableError(ValueError, TypeError):
    """Raised if a loaded function is differentiated."""


def _callable(exported: Exported, name: str) -> Callable[..., Any]:
    """Return the program in a file as a function of its arrays."""
    # An exported program has fixed shapes, so under `vmap` it runs once per element.
    call = sequential_vmap(exported.call)
    # JAX's own errors name neither the function nor the reason.
    guarded = jax.custom_jvp(lambda *leaves: call(*leaves))

    @guarded.defjvp
    def _(*_: Any) -> Any:
        raise _NotDifferentiableError(
            f"`{name}` was loaded from a file, so JAX can't differentiate it, neither in "
            "forward-mode nor in reverse-mode. Differentiate the function that was saved, or save "
            "its gradient, as in `eqxjit.freeze(jax.grad(fun)).save(...)`."
        )

    return guarded


class SavedFunction:
    """The function in a file. It is called with the arrays in the file, then with its arguments.

    - `array_types`: the types of the arrays in the file.
    - `saved_for`: a string that shows the arguments for which the function was saved.
    """

    def __init__(
        self, exported: Exported, n_arrays: int, name: str, named: Any, inputs: Any, output: Any
    ):
        self.__name__ = self.__qualname__ = name
        # `inspect.signature` reads the parameters from this attribute. The arrays come first, under
        # a name that no other parameter has.
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
        self._has_symbols = any(type(size) is not int for kind in types for size in kind.shape)
        n = len(types) - n_arrays
        self.array_types = types[n:]
        self._call = _callable(exported, name)
        self._description = self._describe(self._spec, types[:n], statics)
        parts = [row for row in self._description if not row.part.is_node]
        self.saved_for = ", ".join([f"{row.path}: {row.part}" for row in parts])

    def _describe(self, spec: Spec, types: Sequence[Type], statics: Sequence[Any]) -> Description:
        """Describe arguments, given by their spec, the types of arrays, and static objects."""
        args, kwargs = combine(spec, iter(types), iter(statics))
        # `None` stands for the first argument: the arrays in the file, which aren't described.
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
            except _NotDifferentiableError:
                raise
            except ValueError as error:
                # JAX's error for an array of a wrong type doesn't name the argument.
                cause = error
        passed = self._describe(spec, [*map(type_of, leaves)], statics)
        if cause is not None and passed == self._description:
            raise cause
        lines = changes(self._description, passed)
        if any("static where an array was" in line for line in lines):
            lines.append("What isn't an array is static: pass `np.float32(2.0)`, say, for `2.0`.")
        if cause is not None and self._has_symbols:
            lines.append("(A symbol in a shape may be any size from 1, but the same everywhere.)")
        title = f"`{self.__name__}` was saved for other arguments:"
        raise ValueError("\n    ".join([title, *lines])) from cause


# --- Trees ------------------------------------------------------------------------------------


def to_json(tree: Any, path: str) -> Any:
    """Return a tree as JSON. Raise an error that names `path` if a file can't hold the tree."""
    kind = type(tree)
    if kind is np.ndarray:
        return {"array": None}
    # JSON holds these values exactly, floats included.
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
    """Return the value that a JSON object encodes. The parser decodes inner objects first."""
    [(kind, content)] = item.items()
    return {"array": lambda _: PLACEHOLDER, "tuple": tuple, "dict": dict}[kind](content)
