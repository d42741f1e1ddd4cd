"""Decides all of one specialised call: makes its plan from a call that was served."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .._trees.array_layout import ArrayLayout
from .._trees.given import Given
from .._trees.mutation import are_repeated
from .._trees.out_spec import Output, OutSpec, index_of
from .._trees.partition import StaticTree
from .._trees.structure import Node, n_arrays, structure_of
from .inputs import Inputs
from .outputs import Outputs, output_structure
from .plan import CallPlan
from .signature import Signature


class Example(NamedTuple):
    """A call that was served by another path.

    - `args`, `kwargs`, `static`: its arguments, and their static half.
    - `given`: the static objects that came in with it.
    - `flat`: all its arrays, in the order in which JAX is given them.
    - `output`: what JAX returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: StaticTree
    given: Given
    flat: list[Any]
    output: Output


def build(
    signature: Signature,
    layout: ArrayLayout,
    n_fun_checks: int,
    out_specs: list[OutSpec],
    example: Example,
    blocks: bool,
    tick: Callable[[], None],
) -> CallPlan:
    """Return the plan of calls like this one.

    **Arguments:**

    - `signature`: of the function.
    - `layout`, `n_fun_checks`: see `CallPlan`.
    - `out_specs`: of its traces.
    - `example`: a call.
    - `blocks`: whether to wait for the computation.
    - `tick`: called now and then; what it raises ends the planning.
    """
    static = example.static
    arguments = structure_of(static.treedef, static.leaves, tick)
    assert isinstance(arguments, Node)
    args, kwargs = arguments.children
    assert isinstance(args, Node)
    assert isinstance(kwargs, Node)
    inputs = Inputs(static.traced, tick)
    index = index_of(example.output)
    outputs, out_tree = Outputs(tick), output_structure(out_specs[index], example.given, tick)
    output = outputs.plan(out_tree)
    returned = [value for out_spec in out_specs for value in out_spec.own]
    return CallPlan(
        signature,
        [inputs.plan(child) for child in args.children],
        {key: inputs.plan(child) for key, child in zip(kwargs.data, kwargs.children, strict=True)},
        layout,
        n_fun_checks,
        output,
        outputs.given,
        index,
        index == 0 and n_arrays(out_tree) < 2,
        any(out_spec.mutable for out_spec in out_specs),
        are_repeated((*static.metadata, *returned)),
        blocks,
    )
