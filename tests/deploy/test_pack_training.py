"""Training with a `Packed`: which optimisers give the weights that they give for the model."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxjit
from bench.models.training_steps import floor, packed
from bench.models.training_tasks import mlp

STEPS = 3


@functools.cache
def model():
    """Every leaf is a matrix of 3 by 3 or a vector of 3: few shapes to compile for."""
    return eqx.nn.MLP(3, 3, 3, 1, activation=jnp.tanh, key=jr.key(0))


def loss(model, x):
    return jnp.mean((jax.vmap(model)(x) - 1.0) ** 2)


X = jr.normal(jr.key(1), (STEPS, 4, 3))


def weights(tree):
    return eqx.filter(tree, eqx.is_inexact_array)


def gradients():
    """Of the shape of the model, one for each step."""
    keys = jr.split(jr.key(2), STEPS)
    draw = lambda key: lambda a: jr.normal(key, a.shape) if eqx.is_array(a) else a  # noqa: E731
    return [jax.tree.map(draw(key), model()) for key in keys]


GRADIENTS = gradients()


def trained(optimiser):
    """The model, after steps with these gradients."""
    tree = model()
    state = optimiser.init(weights(tree))
    for gradient in GRADIENTS:
        updates, state = optimiser.update(weights(gradient), state, weights(tree))
        tree = eqx.apply_updates(tree, updates)
    return tree


def trained_packed(optimiser):
    """The same, where the optimiser sees a `Packed`."""
    params = eqxjit.pack(model())
    state = optimiser.init(weights(params))
    for gradient in GRADIENTS:
        gradient = weights(params.repack(gradient))
        updates, state = optimiser.update(gradient, state, weights(params))
        params = eqx.apply_updates(params, updates)
    return params.unpack()


def trained_repacked(optimiser):
    """The same, where the optimiser sees the tree: `unpack` first, `repack` after."""
    params, state = eqxjit.pack(model()), eqxjit.pack(optimiser.init(weights(model())))
    for gradient in GRADIENTS:
        tree = params.unpack()
        updates, new_state = optimiser.update(weights(gradient), state.unpack(), weights(tree))
        params = params.repack(eqx.apply_updates(tree, updates))
        state = state.repack(new_state)
    return params.unpack()


def copied(leaf):
    return leaf.copy() if eqx.is_array(leaf) else leaf


def compiled(optimiser, params, unpack=lambda params: params):
    """The parameters after steps that are jitted, gradients included, and donate."""

    @functools.partial(eqxjit.filter_jit, donate="all-except-first")
    def step(x, params, state):
        gradient = eqx.filter_grad(lambda params: loss(unpack(params), x))(params)
        updates, state = optimiser.update(gradient, state, weights(params))
        return eqx.apply_updates(params, updates), state

    state = optimiser.init(weights(params))
    for x in X:
        params, state = step(x, params, state)
    return unpack(params)


def largest_difference(one, other):
    pairs = zip(
        jax.tree.leaves(eqx.filter(one, eqx.is_array)),
        jax.tree.leaves(eqx.filter(other, eqx.is_array)),
        strict=True,
    )
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


def moved(tree):
    return largest_difference(tree, model())


# Each element's update depends on that element's history, and on scalars.
ELEMENTWISE = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optax.adagrad(0.1),
    "adadelta": lambda: optax.adadelta(1.0),
    "adam": lambda: optax.adam(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "radam": lambda: optax.radam(1e-2),
    "adamax": lambda: optax.adamax(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "adabelief": lambda: optax.adabelief(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9),
    "lion": lambda: optax.lion(1e-2, weight_decay=0.1),
    "rprop": lambda: optax.rprop(1e-2),
    "elementwise clipping": lambda: optax.chain(optax.clip(0.01), optax.sgd(0.1)),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)),
    "injected hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "EMA of updates": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "gradient accumulation": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "apply if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "a chain": lambda: optax.chain(
        optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale(-1e-2)
    ),
}

# These compute one number from all elements: the order of summation is another.
GLOBAL = {
    "global-norm clipping": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "centralised norm": lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
}


def is_bias(path):
    return jax.tree_util.keystr(path).endswith(".bias")


def decayed(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: not is_bias(path), params)


# These look at whole leaves, or at their names or numbers of dimensions.
LEAFWISE = {
    "LARS": lambda: optax.lars(1.0, weight_decay=0.1),
    "LAMB": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "Fromage": lambda: optax.fromage(0.1),
    "NovoGrad": lambda: optax.novograd(1e-2),
    "Adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "Muon": lambda: optax.contrib.muon(0.1),
    "SM3": lambda: optax.sm3(0.1),
    "clipping by block": lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(0.1)),
    "adaptive clipping": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "a mask by path": lambda: optax.adamw(1e-2, weight_decay=1.0, mask=decayed),
    "a mask by dimensions": lambda: optax.adamw(
        1e-2, weight_decay=1.0, mask=lambda params: jax.tree.map(lambda a: a.ndim > 1, params)
    ),
}


# Operation by operation (`jax.disable_jit`): compiled, XLA may fuse in one what it doesn't in the
# other, and each of these would be compiled anew.


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimisers_that_may_see_a_packed(name):
    """The weights are the same bit for bit."""
    with jax.disable_jit():
        optimiser = ELEMENTWISE[name]()
        expected = trained(optimiser)
        got = trained_packed(optimiser)
    assert moved(expected) > 1e-4
    assert largest_difference(got, expected) == 0


@pytest.mark.parametrize("name", GLOBAL)
def test_optimisers_that_see_one_number_of_all_elements(name):
    with jax.disable_jit():
        optimiser = GLOBAL[name]()
        expected = trained(optimiser)
        got = trained_packed(optimiser)
    assert moved(expected) > 1e-4
    assert largest_difference(got, expected) < 2e-6


@pytest.mark.parametrize("name", LEAFWISE)
def test_optimisers_that_may_not(name):
    """They give other weights; with `unpack` first and `repack` after, the same."""
    with jax.disable_jit():
        optimiser = LEAFWISE[name]()
        expected = trained(optimiser)
        assert moved(expected) > 1e-4
        assert largest_difference(trained_repacked(optimiser), expected) == 0
        if name != "a mask by path":
            assert largest_difference(trained_packed(optimiser), expected) > 1e-4


def test_compiled_and_donated():
    """The weights are the same to rounding."""
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))
    optimiser = optax.MultiSteps(clipped, 2)
    plain = compiled(optimiser, jax.tree.map(copied, model()))
    assert moved(plain) > 1e-4
    got = compiled(optimiser, eqxjit.pack(model()), eqxjit.Packed.unpack)
    assert largest_difference(got, plain) < 2e-6


def test_an_average_of_the_weights():
    params = eqxjit.pack(model())
    average = jax.tree.map(jnp.zeros_like, weights(params))
    update = eqxjit.filter_jit(functools.partial(optax.incremental_update, step_size=0.5))
    for _ in range(3):
        average = update(weights(params), average)
    assert isinstance(average, eqxjit.Packed)
    expected = jax.tree.map(lambda a: 0.875 * a, weights(model()))
    assert largest_difference(average.unpack(), expected) < 1e-6


def test_a_mask_that_is_a_tree_of_the_model():
    """JAX's own error, which names `Packed` with what to write; unpacked, the same weights."""
    mask = jax.tree.map(lambda a: a.ndim > 1, weights(model()))
    labels = jax.tree.map(lambda of_weight: "sgd" if of_weight else "none", mask)
    both = {"sgd": optax.sgd(0.1), "none": optax.set_to_zero()}
    params = weights(eqxjit.pack(model()))
    # JAX 0.8 shows the `Packed` instead.
    told = r"eqxjit.Packed'> \(packed by `eqxjit.pack`: write `.unpack\(\)`|MLP.*Packed\("
    for optimiser in (
        optax.masked(optax.sgd(0.1), mask),
        optax.masked(optax.sgd(0.1), lambda _: mask),
        optax.adamw(1e-2, mask=mask),
        # A tree that can be called is taken for a function of the parameters.
        optax.multi_transform(both, lambda _: labels),
    ):
        with pytest.raises(ValueError, match=told):
            optimiser.init(params)
        with jax.disable_jit():
            expected = trained(optimiser)
            assert largest_difference(trained_repacked(optimiser), expected) == 0
        assert moved(expected) > 1e-4
    with pytest.raises(ValueError, match=rf"{told}|got Packed\("):
        optax.masked(optax.sgd(0.1), {"layers": True}).init(params)
    with pytest.raises(ValueError, match=told):
        eqx.partition(params, mask)
    assert repr(eqxjit.Packed) == str(eqxjit.Packed) == "<class 'eqxjit.Packed'>"


@pytest.mark.slow
def test_the_steps_of_the_benchmark():
    """Some steps of a packed task have the loss of the plain ones, to rounding.

    `python -m bench training` checks all its tasks so; each takes seconds to compile.
    """
    task = mlp()
    _, expected = floor(task).run(STEPS)
    _, got = packed(task).run(STEPS)
    np.testing.assert_allclose(got, expected, rtol=1e-4)
