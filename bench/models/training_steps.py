"""The ways to write a training step that `bench training` compares."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import eqxjit

from ..harness.competitors import Cases, jitted
from ..harness.measure import Case
from .training_tasks import Task

SCANNED = 10  # steps in one call of the way "scan"
OUTPUTS = ("carry", "loss")
DONATE = "all-except-first"


def step_of(task: Task) -> Callable[..., Any]:
    """Return a step `(batch, carry) -> (carry, loss)`.

    The carry holds the model, its state and the optimizer state. All may be packed.
    """

    def step(batch: Any, carry: Any) -> Any:
        model, state, opt_state = carry

        def loss_of(model: Any) -> Any:
            loss, new = task.loss(_unpacked(model), _unpacked(state), *batch)
            return loss, state.repack(new) if isinstance(state, eqxjit.Packed) else new

        (loss, state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model)
        weights = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = task.optimizer.update(grads, opt_state, weights)
        return (eqx.apply_updates(model, updates), state, opt_state), loss

    return step


def _unpacked(tree: Any) -> Any:
    return tree.unpack() if isinstance(tree, eqxjit.Packed) else tree


def carry_of(task: Task, model: Any) -> Any:
    """Return the first carry of a step: the model, its state and the optimizer state."""
    return (model, task.state, task.optimizer.init(eqx.filter(model, eqx.is_inexact_array)))


def scanned_step_of(task: Task) -> Callable[..., Any]:
    """Return a function that takes stacked batches, and scans over their steps."""
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
    """Return the case of each way. Each way jits its own function."""
    carry = carry_of(task, task.model)
    params, _, opt_state = carry_of(task, eqxjit.pack(task.model, optimizer=None))
    state = None if task.state is None else eqxjit.pack(task.state, optimizer=None)
    packed = (params, state, opt_state)
    batches = jax.tree.map(lambda a: jnp.stack([a] * SCANNED), task.batch)

    step = step_of(task)

    def jitted_step(step: Callable[..., Any], batch: Any, carry: Any) -> Cases:
        return jitted(step, {"batch": batch, "carry": carry}, OUTPUTS, donate=DONATE)

    def kept(carry: Any) -> Case:
        names = {"f": eqxjit.filter_jit(step), "batch": task.batch, "carry": carry}
        return Case("carry, loss = f(batch, carry)", lambda: names, OUTPUTS)

    found = jitted_step(step, task.batch, carry)
    return {
        "floor": found["floor"],
        "jit": found["jit"],
        "scan": jitted_step(scanned_step_of(task), batches, carry)["floor"],
        "eqx": found["eqx"],
        "eqxjit": found["eqxjit"],
        "packed": jitted_step(step_of(task), task.batch, packed)["eqxjit"],
        "eqxjit, kept": kept(carry),
        "packed, kept": kept(packed),
    }
