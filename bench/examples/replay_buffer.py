"""Deep Q-learning with a replay buffer in NumPy: an agent learns to walk to the end of a corridor.

Buffer and environment overwrite their arrays in place, which is safe once a call has returned.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from eqxjit import filter_jit

LENGTH, BATCH, DISCOUNT = 12, 64, 0.95
optimizer = optax.adam(1e-3)


@filter_jit
def act(model: eqx.nn.MLP, observation) -> jax.Array:
    """Choose the action with the highest value."""
    return jnp.argmax(model(observation))


@filter_jit(donate="all-except-first")
def learn(fixed, model: eqx.nn.MLP, state: optax.OptState):
    """Take one step towards the values that the target network predicts."""
    target, (seen, actions, rewards, seen_next, ends) = fixed

    def loss(model):
        best = jax.vmap(target)(seen_next).max(axis=1)
        goal = rewards + DISCOUNT * (1 - ends) * best
        values = jax.vmap(model)(seen)[jnp.arange(BATCH), actions]
        return jnp.mean((values - goal) ** 2)

    gradients = eqx.filter_grad(loss)(model)
    updates, state = optimizer.update(gradients, state)
    return eqx.apply_updates(model, updates), state


def main() -> None:
    """Learn, then walk without random actions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3_000)
    steps = parser.parse_args().steps
    rng = np.random.default_rng(0)
    model = eqx.nn.MLP(LENGTH, 2, 32, 2, key=jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    target = model
    places, positions = np.eye(LENGTH, dtype=np.float32), np.zeros((steps, 2), np.int32)
    actions, rewards = np.zeros(steps, np.int32), np.zeros(steps, np.float32)
    observation, place = np.zeros(LENGTH, np.float32), 0
    for step in range(steps):
        observation[:] = places[place]  # as an environment that reuses its buffer
        explores = rng.random() < max(0.1, 1 - 2 * step / steps)
        action = rng.integers(2) if explores else int(act(model, observation))
        after = min(max(place + (1 if action else -1), 0), LENGTH - 1)
        positions[step], actions[step] = (place, after), action
        rewards[step] = after == LENGTH - 1
        place = 0 if rewards[step] else after
        if step >= BATCH:
            rows = rng.integers(step + 1, size=BATCH)
            seen, seen_next = places[positions[rows, 0]], places[positions[rows, 1]]
            batch = seen, actions[rows], rewards[rows], seen_next, rewards[rows]
            model, state = learn((target, batch), model, state)
        if step % 100 == 0:
            # Copied, because `learn` deletes the arrays of the model that it is passed.
            target = jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, model)
    place, taken = 0, 0
    while place < LENGTH - 1 and taken < 3 * LENGTH:
        place, taken = max(place + (1 if act(model, places[place]) else -1), 0), taken + 1
    print(f"reached place {place} of {LENGTH - 1} in {taken} actions")


if __name__ == "__main__":
    main()
