"""Hypothesis strategies for what a jitted function may meet: values, signatures, series of calls.

Values are drawn as `Made`: recipes that make equal values, sharing nothing, as often as one likes.
"""

import collections
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.support import nodes
from tests.support.models import Pair


class Made:
    """A recipe for a value. Each call of it creates a new value."""

    def __init__(self, make: Callable[..., Any], *parts: Any):
        self.make = make
        self.parts = parts

    def __call__(self) -> Any:
        return self.make(*[part() if isinstance(part, Made) else part for part in self.parts])

    def places(self) -> list[tuple[int, ...]]:
        """Return the places of recipes without parts in this recipe."""
        return [
            (index, *place)
            for index, part in enumerate(self.parts)
            if isinstance(part, Made)
            for place in part.places()
        ] or [()]

    def at(self, place: tuple[int, ...]) -> "Made":
        return self.parts[place[0]].at(place[1:]) if place else self

    def replaced(self, place: tuple[int, ...], new: "Made") -> "Made":
        """Return this recipe with a different recipe at this place."""
        if not place:
            return new
        parts = list(self.parts)
        parts[place[0]] = parts[place[0]].replaced(place[1:], new)
        return Made(self.make, *parts)

    def __repr__(self) -> str:
        name = getattr(self.make, "__name__", repr(self.make))
        return f"{name}({', '.join(map(repr, self.parts))})"


def same(value: Any) -> Any:
    """Return a recipe that always returns the same object."""
    return value


def made(make: Callable[..., Any], *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Made]:
    return st.builds(Made, st.just(make), *parts)


# --- Arrays -----------------------------------------------------------------------------------

# Few of each, so that JAX compiles few operations for calls that aren't jitted.
_SHAPES = [(), (2,), (2, 3), (0,)]
_DTYPES = ["float32", "int32", "bool", "complex64", "bfloat16", "uint8"]


def jax_array(dtype, shape, start):
    return jnp.asarray(numpy_array(dtype, shape, start))


def numpy_array(dtype, shape, start):
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def numpy_scalar(dtype, start):
    return np.dtype(dtype).type(start)


def transposed(dtype, start):
    return numpy_array(dtype, (2, 3), start).T


_ARRAY_KINDS = {jax_array, numpy_array, numpy_scalar, jnp.asarray, transposed, jax.random.key}

_starts = st.integers(-1, 2).map(abs)
_dtypes = st.sampled_from(_DTYPES)
_shapes = st.sampled_from(_SHAPES)

arrays = st.one_of(
    made(jax_array, st.just("float32"), _shapes, _starts),
    made(jax_array, _dtypes, _shapes, _starts),
    made(numpy_array, _dtypes | st.sampled_from(["float64", "int64"]), _shapes, _starts),
    made(numpy_scalar, st.sampled_from(["float64", "float32", "int64", "bool"]), _starts),
    made(jnp.asarray, st.sampled_from([1, 2, 1.0, 2.0])),
    made(transposed, st.just("float32"), _starts),
    made(jax.random.key, _starts),
)

# --- Static values ----------------------------------------------------------------------------

#: A function raises when it meets this static value.
BOOM = "boom"

# Different values that are equal by `==`, and NaN, which isn't equal to itself.
_TWINS = [
    [
        *(Made(same, zero) for zero in (0, False, nodes.Level.LOW)),
        *(Made(float, zero) for zero in ("0.0", "-0.0")),
        *(Made(complex, zero) for zero in ("0j", "-0j")),
    ],
    [
        *(Made(same, one) for one in (1, True, nodes.Level.HIGH)),
        *(Made(kind, "1") for kind in (float, complex, Fraction)),
    ],
    [Made(same, 2), Made(float, "2")],
    [Made(same, "m"), Made(same, nodes.Unit.METRE)],
    [Made(float, "nan"), Made(complex, "1+nanj")],
]

_confusing = st.sampled_from(_TWINS).flatmap(st.sampled_from)

_OBJECTS = [*nodes.Colour, *nodes.Unit, *nodes.PLAIN, nodes.LAMBDA, nodes.PARTIAL, nodes.plus_one]
_OBJECTS += [nodes.Layer, jnp.sin, jax.nn.relu, max, int, ...]

_hashable_atoms = _confusing | st.sampled_from(
    [
        # These are equal, but a new object each time.
        *(Made(int, text) for text in ("1000", "-7", "123456789012345678901234567890")),
        *(Made(str.join, "", list(text)) for text in ("", "a", "same", "'\"\\\n{}")),
        Made(str.encode, "a"),
        Made(np.dtype, "float32"),
        Made(range, 3),
        *(Made(nodes.Release, *versions) for versions in ((1, 0), (1, 5), (2, 0))),
        Made(jax.ShapeDtypeStruct, (2,), jnp.float32),
        *(Made(same, value) for value in _OBJECTS),
    ]
)


def holding(kind, *values):
    return kind(values)


def mapping(kind, keys, *values):
    return kind(zip(keys, values, strict=True))


#: Static leaves: hashable values that aren't pytree nodes.
static_leaves = st.one_of(
    _confusing,
    _hashable_atoms,
    made(nodes.Config, _hashable_atoms, _hashable_atoms),
    made(holding, st.just(frozenset), _confusing),
)


# Keys that can be sorted. Some are names that generated code may want for itself.
_dict_keys = st.sampled_from(
    [
        *[(), ("a",), ("a", "b"), ("b", "a"), ("type", "class"), ("output", "x y")],
        *[(1, 2), (True, 2), (1.0, 2), (-0.0,), (0.0,), (0,)],
        *[(nodes.Level.HIGH,), ((1,), (True, 0))],
    ]
)


def _of_many(kind: Callable[..., Any], values: st.SearchStrategy[Made]) -> Any:
    return st.lists(values, max_size=3).map(lambda parts: Made(holding, kind, *parts))


def _of_keys(kind: Callable[..., Any], values: st.SearchStrategy[Made]) -> Any:
    @st.composite
    def of_keys(draw: st.DrawFn) -> Made:
        keys = draw(_dict_keys)
        return Made(mapping, kind, keys, *[draw(values) for _ in keys])

    return of_keys()


def _containers_in_static_fields(values: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    return st.one_of(
        _of_many(list, values),
        _of_many(tuple, values),
        _of_keys(dict, values),
        made(nodes.Config, values),
        made(nodes.Settings, values),
        made(Pair, values, values),
        made(slice, values),
    )


#: What a static field may hold: also what can be changed in place.
static_fields = st.recursive(
    static_leaves | made(holding, st.just(set), _confusing) | st.just(Made(same, None)),
    _containers_in_static_fields,
    max_leaves=4,
)

# --- Trees ------------------------------------------------------------------------------------


def partial(kind, function, *parts):
    *args, keyword = parts
    return kind(function, *args, keyword=keyword)


def mlp(activation):
    return eqx.nn.MLP(2, 2, 2, 1, activation=activation, key=jax.random.key(0))


_ready_made = made(nodes.StaticNode, static_fields) | st.sampled_from(
    [
        *(Made(same, None), Made(nodes.Empty), Made(nodes.Nothing)),
        *(Made(lambda: nodes.batch_norm()[1]), Made(nodes.batch_norm), Made(nodes.adam_state)),
        *(Made(mlp, jax.nn.relu), Made(mlp, jnp.tanh)),
        *(Made(eqx.nn.Dropout, p) for p in (0, 0.0, 0.5, 1, True)),
    ]
)


def _nodes_over(trees: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    modules = st.one_of(
        made(nodes.Layer, trees, trees, static_fields),
        made(nodes.Derived, trees, trees, static_fields, static_fields, trees),
        made(nodes.Converted, trees, static_fields),
        made(nodes.wrapper, st.sampled_from([nodes.plus_one, nodes.LAMBDA]), trees),
        made(operator.attrgetter("method"), made(nodes.Layer, trees, trees, static_fields)),
        made(
            partial,
            st.sampled_from([eqx.Partial, jax.tree_util.Partial]),
            st.sampled_from([nodes.plus_one, nodes.LAMBDA]),
            trees,
            trees,
        ),
        made(eqx.Partial, made(nodes.Layer, trees, trees), trees),
    )
    builtin = st.one_of(
        _of_many(list, trees),
        _of_many(tuple, trees),
        _of_keys(dict, trees),
        _of_keys(collections.OrderedDict, trees),
        *[_of_keys(functools.partial(collections.defaultdict, of), trees) for of in (list, None)],
        made(Pair, trees, trees),
        made(nodes.CheckedPair, trees),
    )
    registered = st.one_of(
        made(nodes.FlaxState, trees, static_fields),
        made(nodes.Bag, static_fields, trees, trees),
        made(nodes.Record, trees, static_fields),
    )
    return modules | builtin | registered


leaves = arrays | static_leaves


@st.composite
def _rows(draw: st.DrawFn) -> Made:
    """Many equal items in a row, which generated code treats as one; there may be an odd one."""
    item = draw(arrays | _nodes_over(leaves))
    items = [item] * draw(st.integers(4, 9))
    if draw(st.booleans()):
        items[draw(st.sampled_from([0, 4, -1])) % len(items)] = draw(leaves)
    return Made(holding, draw(st.sampled_from([list, tuple])), *items)


#: Pytrees of all kinds of nodes.
trees = st.one_of(
    leaves,
    st.recursive(leaves | _ready_made, _nodes_over, max_leaves=6),
    _rows(),
)

#: Arguments that no jitted function can take.
bad_trees = st.sampled_from(
    [
        # It is a NumPy array, but of a dtype that JAX rejects.
        Made(np.array, ["not", "numbers"]),
        Made(holding, set, 1),
        Made(nodes.Settings, 1),
        Made(mapping, dict, ("a", 1), 0, 0),
        Made(holding, list, Made(bytearray, b"a")),
    ]
)

# --- Functions --------------------------------------------------------------------------------

#: Parameters of all kinds, with some names that generated code might use itself.
HEADERS = [
    "x, y",
    "x, /, y=array, *, z=2.0",
    "args, fun=None, *kwargs",
    "*args, jitted=0, **kwargs",
    "type, /, output, *, absent=True, **arrays",
    "*, len, otherwise=-0.0",
    "x=1, *has_key",
]


def function(header: str, body: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a new function with these parameters, which returns `body(arguments by name)`."""
    namespace: dict[str, Any] = {"body": body, "array": jnp.arange(2.0)}
    exec(f"def f({header}):\n    return body(locals())", namespace)
    return namespace["f"]


# --- Calls ------------------------------------------------------------------------------------


def call(names: list[str | None], *values: Any) -> tuple[list[Any], dict[str, Any]]:
    """Draw the arguments of a call. Positional arguments have no names."""
    pairs = [*zip(names, values, strict=True)]
    return [value for name, value in pairs if not name], {name: v for name, v in pairs if name}


@st.composite
def calls_of(draw: st.DrawFn, header: str) -> Made:
    """Draw arguments that fit these parameters."""
    kind = inspect.Parameter
    names: list[str | None] = []
    by_position = True
    for parameter in inspect.signature(function(header, dict)).parameters.values():
        if parameter.kind is kind.VAR_POSITIONAL:
            names += [None] * (draw(st.integers(0, 2)) if by_position else 0)
        elif parameter.kind is kind.VAR_KEYWORD:
            names += draw(st.lists(st.sampled_from(["class", "out"]), unique=True))
        elif parameter.default is not kind.empty and draw(st.booleans()):
            by_position = False
        elif parameter.kind is kind.POSITIONAL_ONLY or (
            by_position and parameter.kind is not kind.KEYWORD_ONLY and draw(st.booleans())
        ):
            names.append(None)
        else:
            by_position = False
            names.append(parameter.name)
    return Made(call, names, *[draw(trees) for _ in names])


@st.composite
def variations_of(draw: st.DrawFn, made: Made) -> Made:
    """Draw recipes that differ from this one in one place, usually only slightly."""
    place = draw(st.sampled_from(made.places()))
    old = made.at(place)
    if old.make is call:
        return made
    twins = [value for values in _TWINS if old in values for value in values]
    if twins:
        new = draw(st.sampled_from(twins))
    else:
        # Only an array is replaced by an array, because the place may be a static field.
        new = draw(leaves if old.make in _ARRAY_KINDS else static_leaves)
    return made.replaced(place, new)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Made, Made]:
    """Draw two trees that are usually nearly the same."""
    tree = draw(trees)
    return tree, draw(variations_of(tree))


@st.composite
def spoiled(draw: st.DrawFn, made: Made) -> Made:
    """Draw arguments that can't be bound, can't be jitted, or that the function rejects."""
    names, *values = made.parts
    way = draw(st.sampled_from(["unknown", "more", "less"] + ["bad", "boom"] * bool(values)))
    if way in ("unknown", "more"):
        more = ["unknown"] if way == "unknown" else [None] * 5
        return Made(call, [*names, *more], *values, *[Made(same, 1) for _ in more])
    if way == "less":
        return Made(call, names[1:], *values[1:])
    new = draw(bad_trees) if way == "bad" else Made(same, BOOM)
    return made.replaced((draw(st.integers(1, len(values))),), new)


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of one argument in place: `changes` finds what can be changed, and how.

    - `place`, `way`: which of the places, and which of the ways; modulo their number.
    - `array`, `value`: what replaces an array, or something else.
    """

    place: int
    way: int
    array: Made
    value: Made


@dataclasses.dataclass(frozen=True)
class Round:
    """Some calls with the same arguments.

    - `slot`: the slot whose arguments are passed. Each slot has its own arguments.
    - `before`: what happens first: a `Change`; `"rebuild"` makes the slot's arguments again; other
        words make the wrapper again.
    - `context`, `times`: how the calls are made, and how many there are.
    """

    slot: int
    before: Change | str | None
    context: str
    times: int


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A function, how it is wrapped, and what it is called with.

    - `header`, `pieces`: its parameters, and what its output consists of (`differential.PIECES`).
    - `bound`: what the wrapped callable holds, where it holds something.
    - `slots`: the first arguments of each slot of the rounds.
    """

    header: str
    pieces: list[str]
    form: str
    bound: Made
    slots: list[Made]
    rounds: list[Round]


N_SLOTS = 3

changes = st.builds(Change, st.integers(0, 11), st.integers(0, 5), arrays, static_fields)
_before = st.one_of(
    st.none(), changes, changes, st.sampled_from(["rebuild", "wrap", "copy", "flatten"])
)
_contexts = st.sampled_from(["plain"] * 14 + ["nested", "disable_jit"])
_rounds = st.builds(Round, st.integers(0, N_SLOTS - 1), _before, _contexts, st.integers(1, 4))


@st.composite
def scenarios(draw: st.DrawFn, form: str, pieces: list[str]) -> Scenario:
    header = draw(st.sampled_from(HEADERS))
    fresh = calls_of(header)
    slots = [draw(fresh)]
    for _ in range(N_SLOTS - 1):
        way = draw(st.sampled_from(["varied"] * 6 + ["same", "fresh", "spoiled"]))
        others = {"varied": variations_of(slots[-1]), "fresh": fresh, "spoiled": spoiled(slots[0])}
        slots.append(slots[0] if way == "same" else draw(others[way]))
    chosen = draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=2))
    rounds = draw(st.lists(_rounds, min_size=3, max_size=7))
    return Scenario(header, chosen, form, draw(trees), slots, rounds)
