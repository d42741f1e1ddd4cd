"""Training with a `Packed`: which optimizers give the same weights as on the model."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxjit

STEPS = 3


@functools.cache
def model():
    """Return a model whose leaves have only two shapes, so that little is compiled."""
    return eqx.nn.MLP(3, 3, 3, 1, activation=jnp.tanh, key=jr.key(0))


def loss(model, x):
    return jnp.mean((jax.vmap(model)(x) - 1.0) ** 2)


X = jr.normal(jr.key(1), (STEPS, 4, 3))


def weights(tree):
    return eqx.filter(tree, eqx.is_inexact_array)


def gradients():
    """Return gradients in the shape of the model, one for each step."""
    keys = jr.split(jr.key(2), STEPS)
    draw = lambda key: lambda a: jr.normal(key, a.shape) if eqx.is_array(a) else a  # noqa: E731
    return [jax.tree.map(draw(key), model()) for key in keys]


GRADIENTS = gradients()


def trained(optimizer, wrap=lambda tree: tree):
    """Return the weights after a step with each of `GRADIENTS`."""
    params = wrap(model())
    state = optimizer.init(weights(params))
    for gradient in GRADIENTS:
        updates, state = optimizer.update(weights(wrap(gradient)), state, weights(params))
        params = eqx.apply_updates(params, updates)
    return params


def trained_packed(optimizer):
    """Return the same, with an optimizer that sees a `Packed`."""
    return trained(optimizer, functools.partial(eqxjit.pack, optimizer=None)).unpack()


def trained_repacked(optimizer):
    """Return the same, with an optimizer that sees the tree, by `unpack` and `repack`."""
    params, state = (
        eqxjit.pack(model(), optimizer=None),
        eqxjit.pack(optimizer.init(weights(model())), optimizer=None),
    )
    for gradient in GRADIENTS:
        tree = params.unpack()
        updates, new_state = optimizer.update(weights(gradient), state.unpack(), weights(tree))
        params = params.repack(eqx.apply_updates(tree, updates))
        state = state.repack(new_state)
    return params.unpack()


def copied(leaf):
    return leaf.copy() if eqx.is_array(leaf) else leaf


def compiled(optimizer, params, unpack=lambda params: params):
    """Return the parameters after jitted steps, gradients included, that donate."""

    @functools.partial(eqxjit.filter_jit, donate="all-except-first")
    def step(x, params, state):
        gradient = eqx.filter_grad(lambda params: loss(unpack(params), x))(params)
        updates, state = optimizer.update(gradient, state, weights(params))
        return eqx.apply_updates(params, updates), state

    state = optimizer.init(weights(params))
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
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adadelta": lambda: optax.adadelta(1.0),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9),
    "lion": lambda: optax.lion(1e-2, weight_decay=0.1),
    "elementwise clipping": lambda: optax.chain(optax.clip(0.01), optax.sgd(0.1)),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)),
    "injected hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "EMA of updates": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "gradient accumulation": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "apply if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
}

# These compute one number from all elements, so the order of summation differs.
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
    "Adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "Muon": lambda: optax.contrib.muon(0.1),
    "clipping by block": lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(0.1)),
    "adaptive clipping": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "a mask by path": lambda: optax.adamw(1e-2, weight_decay=1.0, mask=decayed),
    "a mask by dimensions": lambda: optax.adamw(
        1e-2, weight_decay=1.0, mask=lambda params: jax.tree.map(lambda a: a.ndim > 1, params)
    ),
}


# Operation by operation (`jax.disable_jit`), because XLA may fuse operations in one program and not
# in the other, and compiling all of them would take long.


COMMON = "sgd", "nesterov", "adam", "adamw", "schedule", "gradient accumulation", *GLOBAL
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ELEMENTWISE if each not in COMMON]


@pytest.mark.parametrize("name", [*COMMON, *SLOW])
def test_optimizers_that_may_see_a_packed(name):
    """The weights are the same, bit for bit unless a number depends on all elements."""
    with jax.disable_jit():
        optimizer = {**ELEMENTWISE, **GLOBAL}[name]()
        eqxjit.pack(model(), optimizer=optimizer)
        expected = trained(optimizer)
        got = trained_packed(optimizer)
    assert moved(expected) > 1e-4
    assert largest_difference(got, expected) <= (2e-6 if name in GLOBAL else 0)


@pytest.mark.parametrize("name", LEAFWISE)
def test_optimizers_that_may_not(name):
    """They give different weights on a `Packed`, and the same with `unpack` and `repack`."""
    told = r"doesn't fit a `Packed`: its updates of `tree.layers\[\d\].* differ by \d.*repack\("
    with jax.disable_jit():
        optimizer = LEAFWISE[name]()
        with pytest.raises(ValueError, match=told):
            eqxjit.pack(model(), optimizer=optimizer)
        expected = trained(optimizer)
        assert moved(expected) > 1e-4
        assert largest_difference(trained_repacked(optimizer), expected) == 0
        if name != "a mask by path":
            assert largest_difference(trained_packed(optimizer), expected) > 1e-4


def test_compiled_and_donated():
    """The weights are the same to rounding."""
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))
    optimizer = optax.MultiSteps(clipped, 2)
    plain = compiled(optimizer, jax.tree.map(copied, model()))
    assert moved(plain) > 1e-4
    got = compiled(optimizer, eqxjit.pack(model(), optimizer=optimizer), eqxjit.Packed.unpack)
    assert largest_difference(got, plain) < 2e-6


# --- Told before the first step ---------------------------------------------------------------


REFUSED = r"doesn't fit a `Packed`: its updates of `tree.* differ by"


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def as_dtype(dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_array(leaf) else leaf, model())


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3, weight_decay=1e-7, mask=decayed),
        # The first updates are zero.
        optax.adamw(optax.linear_schedule(0.0, 1e-3, 1000), mask=matrices),
        optax.MultiSteps(optax.lamb(1e-3), 16),
        optax.chain(optax.clip_by_block_rms(10.0), optax.adam(1e-3)),
        # Different numbers are drawn, because there are fewer leaves.
        optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, 0)),
    ],
)
def test_whatever_looks_at_leaves_is_refused(optimizer):
    with jax.disable_jit(), pytest.raises(ValueError, match=REFUSED):
        eqxjit.pack(model(), optimizer=optimizer)


@pytest.mark.parametrize(
    "tree",
    [
        {"w": jnp.zeros((3, 3)), "b": jnp.zeros(3)},  # zeros have no weight decay
        {"w": jnp.ones((1, 1)), "b": jnp.ones(())},
        pytest.param([jnp.ones(s, jnp.complex64) for s in ((2, 2), 2)], marks=pytest.mark.slow),
        pytest.param([model(), as_dtype(jnp.bfloat16)], marks=pytest.mark.slow),
        jax.tree.map(lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, model()),
    ],
)
def test_what_looks_at_leaves_is_refused_whatever_they_are(tree):
    with jax.disable_jit():
        for optimizer in (optax.adamw(1e-3, mask=matrices), optax.lars(1.0)):
            with pytest.raises(ValueError, match=REFUSED):
                eqxjit.pack(tree, optimizer=optimizer)
        clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        eqxjit.pack(tree, optimizer=clipped)


def test_leaves_that_are_not_trained():
    tree = [model(), jnp.arange(3), jnp.arange(2), jr.key(0), jr.key(1), "text", None, jnp.ones(0)]
    assert len(eqxjit.pack(tree, optimizer=optax.adam(1e-3)).arrays) == 4
    eqxjit.pack(tree[1:5], optimizer=optax.adam(1e-3))
    with pytest.raises(ValueError, match=r"its updates of `tree\[0\].layers"):
        eqxjit.pack(tree, optimizer=optax.lamb(1e-3))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.MultiSteps(optax.adamw(1e-3), 8),
        optax.set_to_zero(),
        optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3, mu_dtype=jnp.bfloat16)),
    ],
)
def test_what_fits_is_compared_in_compiled_steps(optimizer):
    """XLA rounds differently there. The optimizer is traced once for the tree, and once packed."""
    n_traces = []

    def update(*args):
        n_traces.append(1)
        return optimizer.update(*args)

    eqxjit.pack(model(), optimizer=optax.GradientTransformation(optimizer.init, update))
    assert len(n_traces) == 2


def test_an_optimizer_that_fails_for_a_packed():
    mask = matrices(weights(model()))
    names = {".weight": "decayed", ".bias": "plain"}
    by_name = optax.multi_transform(
        {"decayed": optax.adamw(1e-3), "plain": optax.adam(1e-3)},
        lambda params: jax.tree_util.tree_map_with_path(lambda p, _: names[str(p[-1])], params),
    )
    for optimizer in (optax.masked(optax.sgd(0.1), mask), optax.adamw(1e-3, mask=mask), by_name):
        with pytest.raises((ValueError, KeyError)) as caught:
            eqxjit.pack(model(), optimizer=optimizer)
        assert "then on the `Packed`. If it doesn't fit, pass" in "\n".join(caught.value.__notes__)


def test_errors_that_are_no_misfit():
    """The optimizer fails on the tree, a signal handler raises, or it isn't an optimizer."""
    plateau = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau())
    with pytest.raises(TypeError, match=r"missing 1 required.*'value'") as caught:
        eqxjit.pack(model(), optimizer=plateau)
    assert "optimizer.update(gradients, state, params)" in "\n".join(caught.value.__notes__)
    update = functools.partial(plateau.update, value=1.0)
    eqxjit.pack(model(), optimizer=optax.GradientTransformation(plateau.init, update))

    def late(updates, state, params):
        if isinstance(updates, eqxjit.Packed):
            raise TimeoutError("late")
        return updates, state

    with pytest.raises(TimeoutError, match="late"):
        eqxjit.pack(model(), optimizer=optax.GradientTransformation(plateau.init, late))
    with pytest.raises(AttributeError, match="update"):
        eqxjit.pack(model(), optimizer=optax.adam)


def test_optimizers_are_compared_where_the_tree_is_traced():
    def pack(key, optimizer):
        return eqxjit.pack(eqx.nn.MLP(3, 3, 3, 1, key=key), optimizer=optimizer)

    keys = jr.split(jr.key(0), 2)
    for transformed in (
        lambda optimizer: eqx.filter_eval_shape(pack, keys[0], optimizer),
        lambda optimizer: jax.vmap(lambda key: pack(key, optimizer).arrays)(keys),
        lambda optimizer: eqxjit.filter_jit(pack)(keys[0], optimizer),
    ):
        transformed(optax.sgd(0.1))
        with pytest.raises(ValueError, match=REFUSED):
            transformed(optax.lars(0.1))
