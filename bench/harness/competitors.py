"""Jits one function in each of the ways that are compared, and returns a `Case` for each way.

* floor: `jax.jit` over flat lists of arrays, flattened by hand outside the timed loop.
* jit: `jax.jit` over the arrays of the trees, with all static values closed over.
* eqx: `equinox.filter_jit`.
* eqxjit: `eqxjit.filter_jit`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import eqxjit

from .measure import Case

Cases = dict[str, Case]
FilterJit = Callable[..., Any]

FILTER_JITS: dict[str, FilterJit] = {"eqx": eqx.filter_jit, "eqxjit": eqxjit.filter_jit}


def jitted(
    fun: Callable[..., Any],
    arguments: Mapping[str, Any],
    outputs: tuple[str, ...] = ("out",),
    **options: Any,
) -> Cases:
    """Return the case of each of the four ways. The options are those of `jitted_over`."""
    return jitted_over(fun, [arguments], outputs, **options)[0]


def jitted_over(
    fun: Callable[..., Any],
    examples: Sequence[Mapping[str, Any]],
    outputs: tuple[str, ...] = ("out",),
    *,
    call: str | None = None,
    donate: str = "none",
    function: str = "f",
    **options: Any,
) -> list[Cases]:
    """Return, for each example, the cases of the four ways. Each way jits `fun` only once.

    - `examples`: the arguments of `fun` by name. The examples differ only in the shapes and dtypes
        of arrays.
    - `outputs`: the names of the outputs. If an output has the name of an argument, the next call
        gets it as that argument. Such outputs come first.
    - `call`: the call as a user would write it; `f(a, b)` by default.
    - `donate`: what is donated, as for `filter_jit`.
    - `function`: the name of the function in the call.
    - `options`: further options of `jax.jit`.
    """
    names = tuple(examples[0])
    call = call or f"{function}({', '.join(names)})"
    statement = f"{', '.join(outputs)} = {call}"
    _, static = eqx.partition(dict(examples[0]), eqx.is_array)

    def on_arrays(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return eqx.filter(fun(**eqx.combine(given, static)), eqx.is_array)

    donated = {"none": (), "all": range(len(names)), "all-except-first": range(1, len(names))}
    tree_jit = jax.jit(on_arrays, donate_argnums=tuple(donated[donate]), **options)
    floor = _floor(fun, examples[0], outputs, donate=donate, function=function, **options)
    filtered = {
        name: filter_jit(fun, donate=donate, **options) for name, filter_jit in FILTER_JITS.items()
    }

    def case(f: Callable[..., Any], arguments: Mapping[str, Any]) -> Case:
        return Case(
            statement, lambda: {function: f, **passed(arguments, donate != "none")}, outputs
        )

    return [
        {
            "floor": floor(arguments),
            "jit": case(tree_jit, eqx.filter(dict(arguments), eqx.is_array)),
            **{name: case(f, arguments) for name, f in filtered.items()},
        }
        for arguments in examples
    ]


def passed(tree: Any, consumed: bool) -> Any:
    """Return the tree itself, so that all ways read the same memory, or a copy if it is donated."""
    if not consumed:
        return tree
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, tree)


def _floor(
    fun: Callable[..., Any],
    example: Mapping[str, Any],
    outputs: tuple[str, ...],
    *,
    donate: str,
    function: str,
    **options: Any,
) -> Callable[[Mapping[str, Any]], Case]:
    """Return a function that returns the floor's case for an example.

    The floor takes and returns flat lists of arrays. One list holds the arguments that are outputs
    of the call before, and the other list all other arguments.
    """
    fed_back = [name for name in outputs if name in example]

    def split(tree: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        others = {name: value for name, value in tree.items() if name not in fed_back}
        return [tree[name] for name in fed_back], others

    dynamic, static = eqx.partition(dict(example), eqx.is_array)
    state_def, inputs_def = map(jtu.tree_structure, split(dynamic))

    def on_lists(*lists: list[jax.Array]) -> Any:
        given = jtu.tree_unflatten(inputs_def, lists[-1])
        if fed_back:
            given.update(zip(fed_back, jtu.tree_unflatten(state_def, lists[0]), strict=True))
        results: Any = fun(**eqx.combine(given, static))
        results = eqx.filter(results if len(outputs) > 1 else (results,), eqx.is_array)
        parts = [results[: len(fed_back)], results[len(fed_back) :]]
        flat = [jtu.tree_leaves(part) for part in parts if part]
        return tuple(flat) if len(flat) > 1 else flat[0]

    # The names contain the function's name, because a statement may call two floors.
    state_name, inputs_name = f"{function}_state", f"{function}_inputs"
    given_names = (state_name, inputs_name) if fed_back else (inputs_name,)
    targets = (
        *given_names[:-1],
        *((f"{function}_out",) if len(outputs) > len(fed_back) else ()),
    )
    # With "all-except-first", all arguments but the first are outputs of the call before.
    donated = {"none": (), "all": (0, 1), "all-except-first": (0,)}[donate][: len(given_names)]
    flat_jit = jax.jit(on_lists, donate_argnums=donated, **options)
    statement = f"{', '.join(targets)} = {function}({', '.join(given_names)})"

    def case(arguments: Mapping[str, Any]) -> Case:
        state, inputs = map(jtu.tree_leaves, split(eqx.filter(dict(arguments), eqx.is_array)))
        lists = {state_name: state, inputs_name: inputs} if fed_back else {inputs_name: inputs}
        return Case(
            statement, lambda: {function: flat_jit, **passed(lists, donate != "none")}, targets
        )

    return case
