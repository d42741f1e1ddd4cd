"""A step of training, written in every way that `bench training` compares."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import eqxjit

from ..harness.competitors import FilterJit, passed
from ..harness.measure import Case
from .training_tasks import Task

SCANNED = 10
STATEMENT = "carry, loss = f(batch, *carry)"
OUTPUTS = ("carry", "loss")
DONATE = "all-except-first"

Builder = Callable[[Task], Case]


def step_of(task: Task) -> Callable[..., Any]:
    """A step `(batch, model, state, opt_state) -> ((model, state, opt_state), loss)`, on trees."""

    def step(batch: Any, model: Any, state: Any, opt_state: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return task.loss(model, state, *batch)

        (loss, state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model)
        weights = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = task.optimizer.update(grads, opt_state, weights)
        return (eqx.apply_updates(model, updates), state, opt_state), loss

    return step


def packed_step_of(task: Task) -> Callable:
    """The same, for a model and a state that are packed."""

    def step(batch: Any, params: Any, state: Any, opt_state: Any) -> Any:
        def loss_of(params: Any) -> Any:
            if state is None:
                return task.loss(params.unpack(), None, *batch)
            loss, new = task.loss(params.unpack(), state.unpack(), *batch)
            return loss, state.repack(new)

        (loss, state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(params)
        weights = eqx.filter(params, eqx.is_inexact_array)
        updates, opt_state = task.optimizer.update(grads, opt_state, weights)
        return (eqx.apply_updates(params, updates), state, opt_state), loss

    return step


def carry_of(task: Task, model: Any) -> Any:
    """What a step is given beside the batch: model, state and optimizer state."""
    return (model, task.state, task.optimizer.init(eqx.filter(model, eqx.is_inexact_array)))


def _case(function: Any, batch: Any, carry: Any, donated: bool = True) -> Case:
    names = {"f": function, "batch": batch}
    return Case(STATEMENT, lambda: {**names, "carry": passed(carry, donated)}, OUTPUTS)


def floor(task: Task, steps: int = 1) -> Case:
    """Flat lists in, flat lists out."""
    dynamic, static = eqx.partition(carry_of(task, task.model), eqx.is_array)
    leaves, treedef = jtu.tree_flatten(dynamic)
    step = step_of(task)

    def on_lists(batch: Any, leaves: Any) -> Any:
        carry = eqx.combine(jtu.tree_unflatten(treedef, leaves), static)
        carry, loss = step(batch, *carry)
        return jtu.tree_leaves(eqx.filter(carry, eqx.is_array)), loss

    def scanned(batches: Any, leaves: Any) -> Any:
        leaves, losses = jax.lax.scan(lambda c, b: on_lists(b, c), leaves, batches)
        return leaves, losses[-1]

    batch = task.batch
    if steps > 1:
        batch = jax.tree.map(lambda a: jnp.stack([a] * steps), batch)
    function = jax.jit(scanned if steps > 1 else on_lists, donate_argnums=1)
    names = {"f": function, "batch": batch}
    return Case(
        "carry, loss = f(batch, carry)",
        lambda: {**names, "carry": passed(leaves, consumed=True)},
        OUTPUTS,
    )


def on_trees(task: Task) -> Case:
    """`jax.jit` over trees of arrays, what is static closed over."""
    dynamic, static = eqx.partition(carry_of(task, task.model), eqx.is_array)
    step = step_of(task)

    def on_arrays(batch: Any, *dynamic: Any) -> Any:
        carry, loss = step(batch, *eqx.combine(dynamic, static))
        return eqx.filter(carry, eqx.is_array), loss

    return _case(jax.jit(on_arrays, donate_argnums=(1, 2, 3)), task.batch, dynamic)


def filtered(task: Task, filter_jit: FilterJit, donate: str = DONATE) -> Case:
    """The step on trees under a `filter_jit`."""
    function = filter_jit(step_of(task), donate=donate)
    return _case(function, task.batch, carry_of(task, task.model), donate == DONATE)


def packed(task: Task, donate: Any = DONATE, **options: Any) -> Case:
    """eqxjit's, with model and state packed."""
    params, _, opt_state = carry_of(task, eqxjit.pack(task.model, optimizer=None, **options))
    function = eqxjit.filter_jit(packed_step_of(task), donate=donate)
    state = None if task.state is None else eqxjit.pack(task.state, optimizer=None, **options)
    return _case(function, task.batch, (params, state, opt_state), donate == DONATE)


WAYS: dict[str, Builder] = {
    "floor": floor,
    "jit": on_trees,
    "scan": functools.partial(floor, steps=SCANNED),
    "eqx": functools.partial(filtered, filter_jit=eqx.filter_jit),
    "eqxjit": functools.partial(filtered, filter_jit=eqxjit.filter_jit),
    "packed": packed,
}
KEPT: dict[str, Builder] = {
    "eqxjit, kept": functools.partial(filtered, filter_jit=eqxjit.filter_jit, donate="none"),
    "packed, kept": functools.partial(packed, donate="none"),
}
