"""What makes a program large: its lines, its loops in Python, its arrays, and what helps."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.places import shown

HERE = shown(__file__)
X = jnp.ones(8)
N = 60
linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))


def program_of(fun, *args):
    f = eqxjit.filter_jit(fun)
    # What is held weakly must not be gone.
    lowered = f.lower(*args)
    program = f.traces()[0].program
    del lowered
    return program


def line_of(fun, offset):
    return f"{HERE}:{fun.__code__.co_firstlineno + offset}"


# Each with the line of the loop in it, counted from its first.


def one_line(x):
    for _ in range(250):
        x = x + jnp.sin(x)
    return x


def four_lines(x):
    key = jax.random.key(0)
    for _ in range(N):
        key, sub = jax.random.split(key)
        z = jax.random.normal(sub, (2, 8))
        x = x + 0.1 + jnp.exp(x) * z[0]
        x = 0.9 * x + 0.1 * z[1]
    return x


def field(y):
    return jnp.stack([10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 2.67 * y[2]])


def solver(y):
    y = y[:3]
    for _ in range(N // 2):
        k1 = field(y)
        k2 = field(y + 0.005 * k1)
        y = y + 0.01 / 2 * (k1 + k2)
    return y


def training(x):
    model = linear
    for _ in range(10):
        grads = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x[None]) ** 2))(model)
        updates = jax.tree.map(lambda g: jnp.where(g > 1, 1, g) * 0.1 - jnp.sign(g), grads)
        model = eqx.apply_updates(model, updates)
    return model(x)


def while_loop(x):
    n = 0
    while n < N:
        x = jnp.sin(x) * 2 + jnp.cos(x)
        n += 1
    return x


def comprehension(x):
    return sum([jnp.sin(x * n) + jnp.cos(x + n) for n in range(N)])


def generator(x):
    return sum(jnp.sin(x * n) + jnp.cos(x + n) for n in range(N))


def reduction(x):
    return functools.reduce(lambda x, n: jnp.sin(x) * n + jnp.cos(x) - n, range(N), x)


def differentiated(x):
    def loss(x):
        for n in range(N):
            x = jnp.sin(x) * n
        return x.sum()

    return jax.grad(loss)(x)


def in_scan(x):
    def body(x, _):
        for n in range(N):
            x = jnp.sin(x) * n + jnp.cos(x)
        return x, None

    return jax.lax.scan(body, x, None, length=2)[0]


class Layers(eqx.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x


def layers(x):
    return Layers([linear] * N)(x)


LOOPS = {
    one_line: line_of(one_line, 1),
    four_lines: line_of(four_lines, 2),
    solver: line_of(solver, 2),
    training: line_of(training, 2),
    # CPython tests at the end of each pass: the loop begins in its body.
    while_loop: line_of(while_loop, 3),
    comprehension: line_of(comprehension, 1),
    generator: line_of(generator, 1),
    reduction: line_of(reduction, 1),
    differentiated: line_of(differentiated, 2),
    in_scan: line_of(in_scan, 2),
    layers: line_of(Layers.__call__, 1),
}


@pytest.mark.parametrize("fun", LOOPS, ids=lambda fun: fun.__name__)
def test_a_loop_is_named_by_its_own_line(fun):
    program = program_of(fun, X)
    assert program.equations >= 200
    assert program.loops == (LOOPS[fun],)
    [note] = program.notes
    assert f"loop at {LOOPS[fun]} is unrolled" in note
    assert "jax.lax.scan" in note


def test_loops_in_a_loop_are_all_named():
    def nested(x):
        for _ in range(10):
            x = x + 1
            for _ in range(10):
                x = jnp.sin(x) * 2
            for _ in range(2):
                x = jnp.cos(x)
        return x

    assert program_of(nested, X).loops == (line_of(nested, 1), line_of(nested, 3))


def test_a_recursion_is_named():
    def power(x, n):
        if n == 0:
            return x
        return jnp.sin(power(x, n - 1)) * 2 + jnp.cos(x)

    program = program_of(lambda x: power(x, N), X)
    assert program.loops == (line_of(power, 3),)
    assert "the recursion at" in program.notes[0]
    # Not a line for each depth.
    assert len(program.lines[0].split(" -> ")) == 2


def straight(x):
    x = jnp.sin(x) + jnp.cos(x) * jnp.tan(x)
    x = jnp.sin(x) + jnp.cos(x) * jnp.tan(x)
    x = jnp.sin(x) + jnp.cos(x) * jnp.tan(x)
    x = jnp.sin(x) + jnp.cos(x) * jnp.tan(x)
    x = jnp.sin(x) + jnp.cos(x) * jnp.tan(x)
    return jax.nn.softmax(x)


def straight_gradient(x):
    # The way back is no pass through a loop.
    for _ in range(4):
        x = jax.grad(lambda x: straight(straight(x)).sum())(x)
    return x


def few_large_passes(x):
    for _ in range(3):
        x = eqx.nn.MLP(8, 8, 8, 30, key=jax.random.key(0))(x)
    return x


def sequential(x):
    model = eqx.nn.Sequential([linear, eqx.nn.Lambda(jax.nn.relu)] * N)
    return jax.vmap(model)(x[None])


def deep(x):
    return eqx.nn.MLP(8, 8, 8, N, key=jax.random.key(0))(x)


def leaves(x):
    return jax.tree_util.tree_map(lambda x: jnp.sin(x) * 2 - x**2, [x] * N)


@pytest.mark.parametrize(
    ("fun", "advice"),
    [
        (straight_gradient, ""),
        (few_large_passes, "eqx.filter_vmap"),
        (sequential, "eqx.filter_vmap"),
        (deep, "eqx.filter_vmap"),
        (leaves, "eqxjit.pack"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_is_no_loop_of_the_users(fun, advice):
    program = program_of(fun, X)
    assert program.equations >= 200
    assert program.lines
    assert program.loops == ()
    assert all(advice in note for note in program.notes)
    assert bool(program.notes) == bool(advice)
