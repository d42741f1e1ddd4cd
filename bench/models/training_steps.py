"""A step of training, written in every way that `bench training` compares."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import eqxjit

from ..harness.competitors import Cases, jitted
from ..harness.measure import Case
from .training_tasks import Task

SCANNED = 10
OUTPUTS = ("carry", "loss")
DONATE = "all-except-first"


def step_of(task: Task) -> Callable[..., Any]:
    """A step `(batch, carry) -> (carry, loss)` on trees: model, state and optimiser state."""

    def step(batch: Any, carry: Any) -> Any:
        model, state, opt_state = carry

        def loss_of(model: Any) -> Any:
            return task.loss(model, state, *batch)

        (loss, state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model)
        weights = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = task.optimizer.update(grads, opt_state, weights)
        return (eqx.apply_updates(model, updates), state, opt_state), loss

    return step


def packed_step_of(task: Task) -> Callable:
    """The same, for a model and a state that are packed."""

    def step(batch: Any, carry: Any) -> Any:
        params, state, opt_state = carry

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


def scanned_step_of(task: Task) -> Callable[..., Any]:
    """Several steps on trees by `jax.lax.scan`, given their batches."""
    step = step_of(task)

    def steps(batch: Any, carry: Any) -> Any:
        arrays, static = eqx.partition(carry, eqx.is_array)

        def body(arrays: Any, batch: Any) -> Any:
            carry, loss = step(batch, eqx.combine(arrays, static))
            return eqx.filter(carry, eqx.is_array), loss

        arrays, losses = jax.lax.scan(body, arrays, batch)
        return eqx.combine(arrays, static), losses[-1]

    return steps


def ways(task: Task) -> Cases:
    """Make the step in each way, with functions that are jitted for it alone."""
    carry = carry_of(task, task.model)
    params, _, opt_state = carry_of(task, eqxjit.pack(task.model, optimizer=None))
    state = None if task.state is None else eqxjit.pack(task.state, optimizer=None)
    packed = (params, state, opt_state)
    batches = jax.tree.map(lambda a: jnp.stack([a] * SCANNED), task.batch)

    def jitted_step(step: Callable[..., Any], batch: Any, carry: Any) -> Cases:
        return jitted(step, {"batch": batch, "carry": carry}, OUTPUTS, donate=DONATE)

    def kept(step: Callable[..., Any], carry: Any) -> Case:
        names = {"f": eqxjit.filter_jit(step), "batch": task.batch, "carry": carry}
        return Case("carry, loss = f(batch, carry)", lambda: names, OUTPUTS)

    found = jitted_step(step_of(task), task.batch, carry)
    return {
        "floor": found["floor"],
        "jit": found["jit"],
        "scan": jitted_step(scanned_step_of(task), batches, carry)["floor"],
        "eqx": found["eqx"],
        "eqxjit": found["eqxjit"],
        "packed": jitted_step(packed_step_of(task), task.batch, packed)["eqxjit"],
        "eqxjit, kept": kept(step_of(task), carry),
        "packed, kept": kept(packed_step_of(task), packed),
    }
