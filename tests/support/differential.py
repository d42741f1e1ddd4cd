"""Runs one scenario under eqxjit, under Equinox and without JIT, and compares the outcomes."""

import contextlib
import copy
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import default_registry, tree_flatten, tree_leaves, tree_map

import eqxjit
from tests.support import changes, nodes, strategies
from tests.support.strategies import BOOM, Change, Scenario

# --- What a tree looks like -------------------------------------------------------------------


def described(tree: Any, avals: bool = True) -> str:
    """Return a text of a tree's structure, static values and, by default, shapes of arrays.

    Two texts are equal exactly if `filter_jit` may use one program. JAX and Python print `1`,
    `True` and `1.0` differently, and equal values of one type equally. No code of eqxjit is
    involved.
    """
    leaves, treedef = tree_flatten(tree)
    return f"{treedef} {[_described_leaf(leaf, avals) for leaf in leaves]}"


def _described_leaf(leaf: Any, avals: bool) -> str:
    if not eqx.is_array(leaf):
        return f"{type(leaf).__qualname__}:{leaf!r}"
    if not avals:
        return "*"
    aval = jax.typeof(leaf)
    return f"{aval.dtype}{aval.shape}{'weak' if getattr(aval, 'weak_type', False) else ''}"


def content(tree: Any) -> list[Any]:
    """Return the bytes of a tree's arrays."""
    arrays = [jnp.asarray(leaf) for leaf in tree_leaves(tree) if eqx.is_array(leaf)]
    return [np.asarray(_numbers(array)).tobytes() for array in arrays]


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _numbers(array: Any) -> Any:
    return jax.random.key_data(array) if _is_key(array) else array


def statics(tree: Any) -> list[Any]:
    """Return the static leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if not eqx.is_array(leaf)]


#: Nobody can tell an equal value of these types from the original.
_NOBODYS = (bool, int, float, complex, str, bytes, range)


def is_nobodys(value: Any) -> bool:
    """Return whether an equal value of the same type may replace this value."""
    if type(value) is frozenset:
        return all(map(is_nobodys, value))
    return type(value) in _NOBODYS or isinstance(value, np.dtype)


def containers(tree: Any) -> Iterator[Any]:
    """Return the nodes of a tree that could be changed in place."""
    one_level = default_registry.flatten_one_level(tree)
    if one_level is not None:
        if isinstance(tree, (list, dict)) or (
            getattr(tree, "__dict__", None) and not isinstance(tree, (tuple, nodes.StaticNode))
        ):
            yield tree
        for child in one_level[0]:
            yield from containers(child)


# --- What the jitted functions do -------------------------------------------------------------


class Boom(Exception):
    """Raised by a function that meets the static value `BOOM`."""


def _double(leaf: Any) -> Any:
    return leaf if not eqx.is_array(leaf) or _is_key(leaf) else jnp.add(leaf, leaf)


def _first(inputs: dict[str, Any]) -> Any:
    return next((_double(leaf) for leaf in tree_leaves(inputs) if eqx.is_array(leaf)), jnp.ones(2))


def _seen(inputs: dict[str, Any]) -> Any:
    # Each part reveals a program that serves a call for which it wasn't compiled.
    text = described(inputs)
    return text, np.uint32(zlib.crc32(text.encode()))


def _built(inputs: dict[str, Any]) -> Any:
    layer = nodes.Layer(jnp.zeros(2), np.arange(3), size=[len(inputs)])
    return nodes.FlaxState(nodes.Bag("label", layer, None, ()), step=1.0), np.float32(1), 1


def _twice(inputs: dict[str, Any]) -> Any:
    shared = [_first(inputs), BOOM]
    return {"b": shared, "a": shared}


#: The pieces of which the output of a function may consist.
PIECES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "inputs": lambda inputs: inputs,
    "doubled": lambda inputs: tree_map(_double, inputs),
    "first": _first,
    "seen": _seen,
    "statics": statics,
    "built": _built,
    "twice": _twice,
    "nothing": lambda inputs: None,
}

#: The callable to jit, created from a function and from the value of its first parameter.
FORMS: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "function": lambda function, bound: function,
    "functools_partial": functools.partial,
    "jax_partial": jax.tree_util.Partial,
    "equinox_partial": eqx.Partial,
    "module": nodes.Calling,
    "bound_method": lambda function, bound: nodes.Calling(function, bound).forward,
    "method": lambda function, bound: function,
}


class Side:
    """The scenario's function in one form: jitted by one implementation, or by none.

    - `runs`, `returned`: how often its Python code ran, and what static leaves it returned.
    - `call`: what is called.
    """

    def __init__(self, scenario: Scenario, bound: Any, jit: Callable[[Any], Any]):
        self.runs = 0
        self.returned: list[Any] = []
        self._jit = jit
        self._pieces = scenario.pieces
        takes_first = scenario.form != "function"
        header = f"model, {scenario.header}" if takes_first else scenario.header
        self._fun = FORMS[scenario.form](strategies.function(header, self._body), bound)
        # A method is looked up on an instance, after it was jitted.
        self._self = [bound] if scenario.form == "method" else []
        self.wrap()

    def wrap(self, how: str = "wrap") -> None:
        """Wrap the function again, in one of three ways."""
        if how == "wrap":
            self.jitted = self._jit(self._fun)
        else:
            again = copy.copy if how == "copy" else functools.partial(tree_map, lambda leaf: leaf)
            self.jitted = again(self.jitted)
        self.call = self.jitted.__get__(*self._self, None) if self._self else self.jitted

    def _body(self, inputs: dict[str, Any]) -> Any:
        self.runs += 1
        # Raises for arrays that JAX rejects, also without JIT, where JAX doesn't check.
        text = described(inputs)
        if BOOM in [leaf for leaf in tree_leaves(inputs) if type(leaf) is str]:
            raise Boom(text)
        parts = [PIECES[piece](inputs) for piece in self._pieces]
        output = parts[0] if len(parts) == 1 else tuple(parts)
        self.returned = statics(output)
        return output


# --- The comparison ---------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a call returned or raised, and how often Python code ran for it."""

    value: Any
    error: Exception | None
    runs: int


def _outcome(side: Side, context: str, args: list[Any], kwargs: dict[str, Any]) -> Outcome:
    before = side.runs
    value, error = None, None
    try:
        if context == "nested":
            value = eqx.filter_jit(lambda a, k: side.call(*a, **k))(args, kwargs)
        else:
            with jax.disable_jit() if context == "disable_jit" else contextlib.nullcontext():
                value = side.call(*args, **kwargs)
    except Exception as raised:
        error = raised
    return Outcome(value, error, side.runs - before)


def _taken_apart(tree: Any) -> Any:
    """Return a tree after it was flattened and unflattened, if it can be.

    This changes a Module that lacks a field.
    """
    try:
        return tree_map(lambda leaf: leaf, tree)
    except Exception:
        return tree


#: Stands for arguments that don't fit, or that no jitted function takes.
UNTRACEABLE = "not to be traced"


class Comparison:
    """All sides of one scenario, and what is expected of the next call."""

    def __init__(self, scenario: Scenario):
        self._new_side = functools.partial(Side, scenario, scenario.bound())
        self._plain = self._new_side(lambda fun: fun)
        self._ours = self._new_side(eqxjit.filter_jit)
        #: A new `equinox.filter_jit` for each text of `described`, so that it is never stale.
        self._references: dict[str, Side] = {}
        #: The static leaves that each of our traces was given and returned, by the same text.
        self._traced: dict[str, tuple[list[Any], list[Any]]] = {}
        self._structures: set[str] = set()
        self._n_traces = 0
        self._changed = False
        self._statics_changed = False
        #: All results, which are kept so that no `id` is used again.
        self._returned: list[Any] = []
        self._returned_ids: set[int] = set()

    def change(self, before: Change | str, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Change the arguments in place, or wrap the function again."""
        if isinstance(before, Change):
            self._changed = True
            self._statics_changed |= changes.apply(before, args, kwargs)
        else:
            self._ours.wrap(before)

    def call(self, context: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Make a call on all sides."""
        traced_for, structure, given = self._what_is_traced(args, kwargs)
        if traced_for == UNTRACEABLE and context == "disable_jit":
            # Equinox rejects nothing then, but eqxjit is as strict as always.
            context = "plain"
        if traced_for not in self._references:
            self._references[traced_for] = self._new_side(eqx.filter_jit)
        before = self._snapshot(args, kwargs)
        ours = _outcome(self._ours, context, args, kwargs)
        assert self._snapshot(args, kwargs) == before, "the arguments were changed"
        expected = _outcome(self._references[traced_for], context, args, kwargs)
        plain = _outcome(self._plain, "plain", *_taken_apart((args, kwargs)))

        if expected.error is not None or ours.error is not None:
            self._compare_errors(ours, expected, plain)
        else:
            self._compare_values(ours.value, expected.value, plain)
            traced = self._compare_traces(traced_for, structure, context, ours.runs, given)
            self._check_statics(statics(ours.value), given, *traced)
            self._check_freshness(ours.value, (args, kwargs))

    def _what_is_traced(
        self, args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[str, str, list[Any]]:
        try:
            bound = inspect.signature(self._plain.call).bind(*args, **kwargs)
            arguments = bound.args, bound.kwargs
            given = statics(arguments)
            hash(tuple(given))
            return described(arguments), described(arguments, avals=False), given
        except Exception:
            return UNTRACEABLE, "", []

    def _snapshot(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        with contextlib.suppress(Exception):
            leaves = tree_leaves((args, kwargs))
            nodes_ = containers((args, kwargs))
            return described((args, kwargs)), content(leaves), [*map(id, leaves), *map(id, nodes_)]
        return None

    def _compare_errors(self, ours: Outcome, expected: Outcome, plain: Outcome) -> None:
        errors = {type(ours.error), type(expected.error)}
        # A change may have made a second argument bad. Either error may be raised first then.
        assert len(errors) == 1 or (self._changed and errors == {TypeError, ValueError}), errors
        assert ours.runs == expected.runs
        if isinstance(expected.error, Boom):
            assert str(ours.error) == str(expected.error) == str(plain.error)

    def _compare_values(self, ours: Any, expected: Any, plain: Outcome) -> None:
        assert plain.error is None
        assert described(ours) == described(expected) == described(_taken_apart(plain.value))
        assert content(ours) == content(expected) == content(plain.value)
        assert [*map(type, tree_leaves(ours))] == [*map(type, tree_leaves(expected))]

    def _compare_traces(
        self, traced_for: str, structure: str, context: str, runs: int, given: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Check whether eqxjit traced. Return the trace's static inputs and static outputs."""
        traced = given, self._ours.returned
        if context == "disable_jit":
            assert runs == 1
        elif traced_for not in self._traced:
            assert runs == 1, "not traced: a stale program"
            self._structures.add(structure)
        elif runs:
            # The old program would return static objects that their owner has changed since.
            assert self._statics_changed, "traced again"
        else:
            traced = self._traced[traced_for]
        if runs and context != "disable_jit":
            self._n_traces += 1
            self._traced[traced_for] = traced
        info, traces = self._ours.jitted.cache_info(), self._ours.jitted.traces()
        assert (info.entries, info.traces) == (len(self._structures), self._n_traces)
        assert [trace.number for trace in traces] == [*range(1, info.traces + 1)]
        for trace in traces[1:]:
            assert trace.differences
            assert "unknown" not in [difference.category for difference in trace.differences]
        return traced

    def _check_statics(
        self, output: list[Any], given: list[Any], given_then: list[Any], returned: list[Any]
    ) -> None:
        """Checks whose static leaves are in an output.

        What came in with the call that was traced is this call's own, from the same place in its
        arguments; the rest is what was returned to the call that was traced.
        """
        for ours, theirs in zip(output, returned, strict=True):
            pairs = zip(given, given_then, strict=True)
            own = [now for now, then in pairs if then is theirs]
            # Their equality was checked before.
            if not is_nobodys(theirs):
                assert any(ours is each for each in own or [theirs]), (ours, own, theirs)

    def _check_freshness(self, output: Any, arguments: Any) -> None:
        fresh = list(containers(output))
        ids = {id(node) for node in fresh}
        assert len(ids) == len(fresh), "one container, twice"
        assert not ids & self._returned_ids, "a container that was returned before"
        assert ids.isdisjoint(id(node) for node in containers(arguments)), "a container passed in"
        self._returned.append(fresh)
        self._returned_ids |= ids


def compare(scenario: Scenario) -> None:
    """Run a scenario on all sides.

    **Raises:**

    - `AssertionError`, where they differ.
    """
    comparison = Comparison(scenario)
    slots = [make() for make in scenario.slots]
    for each in scenario.rounds:
        if each.before == "rebuild":
            slots[each.slot] = scenario.slots[each.slot]()
        elif each.before is not None:
            comparison.change(each.before, *slots[each.slot])
        args, kwargs = slots[each.slot]
        for _ in range(each.times):
            comparison.call(each.context, args, kwargs)
