"""Plans calls for the native back end straight from treedefs: the fast twin of `native.encode`.

`_native.c` writes the instructions of what is common, without a plan in between, and asks here for
the rest. Where what comes in goes out again, a plan is needed.
"""

import functools
from typing import Any

from .._compat import (
    CAN_ASSEMBLE,
    KIND_CLASSES,
    LEAF_KIND,
    LEAF_TREEDEF,
    MISSING,
    ArrayImpl,
    PyTreeDef,
    TreedefColumns,
    assembled,
    native_back_end,
)
from .._trees.key_cache import columns_of
from .._trees.modules import dynamic_fields, keeps_fields_plainly, static_fields
from .._trees.numpy_inputs import is_plain_array
from .._trees.partition import DYNAMIC, StaticTree
from .._trees.structure import (
    MISSING_KIND,
    is_namedtuple,
    is_plain_namedtuple,
    is_standard_namedtuple,
)
from .budget import without_limit
from .inputs import Inputs
from .native import (
    REGISTERED,
    UNFLATTEN,
    Encoder,
    Instructions,
    NativeCall,
    Unsupported,
    call_with,
    native_call,
    unflatten_by,
)
from .plan import Input, Match, Static
from .signature import KEYWORD_ONLY, POSITIONAL_ONLY, POSITIONAL_OR_KEYWORD, Signature, absent

# In the order of `_native.c`: how the nodes of a class are planned.
_NONE, _SEQUENCE, _DICT, _MODULE, _OTHER = range(5)

#: One of those; of a Module the names of its fields, and how many may hold arrays.
_Shape = tuple[int, tuple[str, ...], int]

_BY_POSITION = (POSITIONAL_ONLY, POSITIONAL_OR_KEYWORD)
_BY_NAME = (POSITIONAL_OR_KEYWORD, KEYWORD_ONLY)

#: An instruction without what is below it: what to do, a number, and three objects.
_Head = tuple[int, int, Any, Any, Any]


def plan_natively(
    signature: Signature, n_first: int, static: StaticTree, leaves: tuple[Any, ...], out: PyTreeDef
) -> NativeCall:
    """Return calls like one that was served.

    **Arguments:**

    - `signature`: of the function.
    - `n_first`: how many arrays there are in the first argument.
    - `static`: the static half of the bound arguments.
    - `leaves`, `out`: that of the output.

    **Raises:**

    - any `Exception`, if that is for a plan.
    """
    inputs = Inputs(static.traced, without_limit)
    names = _names(signature, static)
    arguments, n_arrays = _plan(
        static.columns,
        static.leaves,
        (ArrayImpl, is_plain_array),
        _input_shape,
        functools.partial(_input_head, inputs),
        functools.partial(_static, inputs),
    )
    for parameter in signature.parameters:
        if parameter.name not in names:
            names.append(parameter.name)
            arguments += _encoded(Static(absent, Match.IS))
    columns = columns_of(out)
    output, _ = _plan(columns, leaves, (None, None), _output_shape, _output_head, None)
    return native_call(names, arguments, output, n_first, n_arrays)


def _names(signature: Signature, static: StaticTree) -> list[str]:
    """Return the names of the parameters that are passed, in the order of their arrays."""
    _, arities, metadata, _ = static.columns
    # From behind: both, the keyword arguments with all below them, the positional ones.
    args = len(arities) - 2
    n_below = 1
    while n_below:
        n_below += arities[args] - 1
        args -= 1
    n_args, keywords = arities[args], metadata[-2] or ()
    by_position = [p.name for p in signature.parameters if p.kind in _BY_POSITION]
    by_name = {p.name for p in signature.parameters if p.kind in _BY_NAME}
    if n_args > len(by_position) or not by_name.issuperset(keywords):
        raise Unsupported
    return [*by_position[:n_args], *keywords]


def _plan(
    columns: TreedefColumns, leaves: tuple[Any, ...], array: tuple[Any, Any], *ask: Any
) -> tuple[list[Any], int]:
    """Return the instructions for a treedef, and how many arrays it has.

    **Arguments:**

    - `columns`, `leaves`: its columns, and its leaves without arrays.
    - `array`: the class of arrays, and what tells others; None for an output.
    - `ask`: what is asked for shapes of classes, heads of nodes, and static values.
    """
    back_end = native_back_end()
    if back_end is None:
        raise Unsupported
    return back_end.plan(*columns, leaves, LEAF_KIND, KIND_CLASSES, DYNAMIC, MISSING, *array, *ask)


def _static(inputs: Inputs, value: Any, is_leaf: bool) -> tuple[Any, ...]:
    return tuple(_encoded(inputs.static(value, is_leaf)))


def _input_head(inputs: Inputs, cls: type, data: Any, arity: int) -> _Head:
    [(op, _, _, _, *objects)] = _encoded(inputs.container(cls, data, []))
    return (op, arity if op == REGISTERED else 0, *objects)


def _encoded(node: Input) -> Instructions:
    return Encoder(without_limit, set(), {}).input(node)


# Asked for each class anew in each plan: a class may have been changed.


def _input_shape(cls: type) -> _Shape:
    return _shape(cls, is_plain_namedtuple(cls))


def _output_shape(cls: type) -> _Shape:
    return _shape(cls, is_namedtuple(cls) and is_standard_namedtuple(cls))


def _shape(cls: type, is_tuple: bool) -> _Shape:
    """Return the shape of a class; `is_tuple`: whether it is read, or made, as a tuple is."""
    if cls is MISSING_KIND:
        # A Module that isn't whole.
        raise Unsupported
    if cls is type(None):
        return _NONE, (), 0
    if is_tuple or cls is tuple or cls is list:
        return _SEQUENCE, (), 0
    if keeps_fields_plainly(cls):
        dynamic = dynamic_fields(cls)
        return _MODULE, (*dynamic, *static_fields(cls)), len(dynamic)
    return _DICT if cls is dict else _OTHER, (), 0


def _output_head(cls: type, data: Any, arity: int) -> _Head:
    if is_namedtuple(cls):
        return UNFLATTEN, arity, functools.partial(call_with, cls), None, None
    if not CAN_ASSEMBLE:
        raise Unsupported
    root = assembled((cls, data), [LEAF_TREEDEF] * arity)
    return UNFLATTEN, arity, unflatten_by(root), None, None
