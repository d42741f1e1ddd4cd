"""What makes a program large: its lines, its loops in Python, its arrays, and what helps."""

import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxjit
from eqxjit import _compat
from eqxjit._diagnostics import constants, size
from tests.support.places import shown

HERE = shown(__file__)
X = jnp.ones(8)
N = 60
linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))


def program_of(fun, *args):
    f = eqxjit.filter_jit(fun)
    # Keep the lowering alive, because records hold it weakly.
    lowered = f.lower(*args)
    program = f.traces()[0].program
    del lowered
    return program


def line_of(fun, offset):
    return f"{HERE}:{fun.__code__.co_firstlineno + offset}"


# Each function with the line of its loop, counted from its first line.


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
    # CPython checks the condition at the end of each pass, so the loop seems to begin in its body.
    while_loop: line_of(while_loop, 3),
    comprehension: line_of(comprehension, 1),
    generator: line_of(generator, 1),
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
                x = jnp.cos(x) * 3 - jnp.tan(x) * 2 + jnp.exp(x) - jnp.sin(x)
        return x

    # The innermost loop isn't listed, because it has only two passes.
    assert program_of(nested, X).loops == (line_of(nested, 1), line_of(nested, 3))


def test_a_recursion_has_one_line():
    def power(x, n):
        if n == 0:
            return x
        return jnp.sin(power(x, n - 1)) * 2 + jnp.cos(x)

    [line] = program_of(lambda x: power(x, N), X).lines
    assert line.split(" -> ")[1] == f"power:{power.__code__.co_firstlineno + 3}: 240 of 240"


def straight(x):
    x = jnp.sin(x) + jnp.cos(x) * jnp.tan(x)
    x = jnp.sin(x) + jnp.cos(x) * jnp.tan(x)
    x = jnp.sin(x) + jnp.cos(x) * jnp.tan(x)
    x = jnp.sin(x) + jnp.cos(x) * jnp.tan(x)
    x = jnp.sin(x) + jnp.cos(x) * jnp.tan(x)
    return jax.nn.softmax(x)


def straight_gradient(x):
    # The backward pass isn't a second pass of a loop.
    for _ in range(4):
        x = jax.grad(lambda x: straight(straight(x)).sum())(x)
    return x


def straight_twice_differentiated(x):
    # Each pass runs one line, and JAX evaluates these in an order of its own.
    for _ in range(4):
        x = jax.jvp(jax.grad(lambda x: (jax.nn.gelu(x) * straight(x)).sum()), (x,), (x,))[1]
    return x


def gradients_of_few_passes(x):
    def loss(x):
        for n in range(5):
            x = straight(x) * n
        return x.sum()

    # Each of these passes through the lines of the loop again.
    first = jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x)
    return first + jax.grad(jax.checkpoint(loss))(x)


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
        (straight_twice_differentiated, ""),
        (gradients_of_few_passes, ""),
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


def test_a_jitted_function_that_is_inlined_often():
    @jax.jit
    def inner(x):
        for n in range(4):
            x = jnp.sin(x) * n + jnp.cos(x)
        return x

    def outer(x):
        a, b, c, d = inner(x), inner(x + 1), inner(x + 2), inner(x + 3)
        e, f, g, h = inner(x), inner(x + 1), inner(x + 2), inner(x + 3)
        return a + b + c + d + e + f + g + h + inner(inner(inner(inner(x)))), inner(x)

    inner(X)
    program = program_of(outer, X)
    assert program.loops == ()
    [note] = program.notes
    assert f"`inner` ({line_of(inner.__wrapped__, 0)}) is inlined 13 times" in note
    # Although it was traced before, for another call.
    assert any(f"outer:{outer.__code__.co_firstlineno + 1} -> inner:" in t for t in program.lines)


def policy(x):
    x = jnp.sin(x) * 2 + jnp.cos(x) - jnp.tan(x)
    return jax.lax.cond(x[0] > 0, lambda x: x + 1, lambda x: x - jnp.sin(x), x)


def test_equations_count_where_they_stand():
    def rollout(x):
        for _ in range(30):
            x = policy(x)
            x = x + jnp.sin(x)
        return x

    program = program_of(rollout, X)
    first, policys = rollout.__code__.co_firstlineno, policy.__code__.co_firstlineno
    n = program.equations
    # For a condition: what is compared, and one more in each branch.
    assert program.lines == (
        f"rollout:{first + 2} -> policy:{policys + 2}: 240 of {n}",
        f"rollout:{first + 2} -> policy:{policys + 1}: 180 of {n}",
        f"rollout:{first + 2} -> policy:{policys + 2} -> <lambda>:{policys + 2}: 90 of {n}",
        f"rollout:{first + 3}: 60 of {n}",
    )
    assert n == 480


def kernel(a, b):
    squares = jnp.sum((a[:, None] - b[None]) ** 2, -1)
    # XLA can't fuse a sort.
    return jnp.sort(squares, axis=1)[:, :2]


def test_memory_is_read_without_compiling():
    f = eqxjit.filter_jit(kernel)
    f(jnp.ones((700, 2)), jnp.ones((800, 2)))
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: events.append(event)
    )
    [trace] = f.traces()
    assert trace.memory[:3] == (700 * 8 + 800 * 8, 700 * 8, 0)
    assert trace.memory.temporaries >= 700 * 800 * 4
    assert events == []
    [differences, squares, *_] = trace.program.largest_arrays
    assert (differences.type, differences.bytes) == ("float32[700,800,2]", 700 * 800 * 8)
    assert differences.line == line_of(kernel, 1)
    assert squares.bytes == 700 * 800 * 4


def test_what_a_function_returns_is_not_temporary():
    x = jnp.ones((600, 600))
    assert program_of(lambda x: x * 2, x).largest_arrays == ()
    assert len(program_of(lambda x: jnp.sin(x) * 2, x).largest_arrays) == 1


def test_what_is_known_of_memory_is_in_the_report(capsys):
    def step(state, x):
        return state + kernel(x, x).sum(), x.sum()

    state, x = jnp.ones((1000, 600)), jnp.ones((1000, 2))
    notes = {}
    for donate in ("none", "all-except-first", "all"):
        f = eqxjit.filter_jit(step, donate=donate)
        with eqxjit.compile_report() as report:
            f(state + 0, x)
        [row] = [row for row in report.rows if row.function.endswith("step")]
        notes[donate] = "\n".join(row.notes)
        assert row.program.memory == f.traces()[0].memory
        assert "2.41 MB" in capsys.readouterr().out
    # The note doesn't name the larger array, which XLA has fused away.
    assert "The largest arrays: float32[1000,1000] (4 MB) at " in notes["none"]
    assert "jax.checkpoint" in notes["none"]
    for donate in ("none", "all-except-first"):
        assert "it returns 2.4 MB of arrays" in notes[donate]
    assert "donate" not in notes["all"]


def test_a_release_of_jax_that_does_not_tell_where_equations_are_made():
    """Sizes are then shown without lines."""

    class Bare:
        """An equation, or a traceback, without JAX's private attributes."""

    assert _compat.traceback_of(Bare()) is None
    assert _compat.stack_of(_compat.traceback_of(Bare())) == ()
    assert not _compat.is_backward(Bare())


def test_sizes_without_lines(monkeypatch):
    monkeypatch.setattr(size, "traceback_of", lambda equation: None)
    monkeypatch.setattr(constants, "traceback_of", lambda equation: None)
    captured = jnp.ones((600, 600))
    program = program_of(lambda x: four_lines(x) + captured.sum(), X)
    assert program.equations >= 200
    assert (program.lines, program.loops) == ((), ())
    [constant] = program.constants
    assert (constant.name, constant.line) == ("captured", "")
    [note] = program.notes
    assert "closes over `captured` float32[600,600], 1.44 MB: pass it as an argument" in note


def test_many_medium_arrays_are_summed_by_line():
    """Each array is below a megabyte, as activations of small models are."""
    net = Residual([eqx.nn.Linear(64, 64, key=k) for k in jax.random.split(jax.random.key(0), 20)])

    @eqxjit.filter_jit
    def gradient(net, x):
        return eqx.filter_grad(lambda net: jnp.mean(jax.vmap(net)(x) ** 2))(net)

    with eqxjit.compile_report() as report:
        gradient(net, jnp.ones((2048, 64)))
    [row] = [row for row in report.rows if row.function.endswith("gradient")]
    first = row.program.largest_arrays[0]
    assert (first.type, first.line) == ("float32[2048,64]", line_of(Residual.__call__, 2))
    assert first.number >= 20
    assert first.bytes == first.number * 2048 * 64 * 4
    [note] = [note for note in row.notes if "temporary arrays take" in note]
    assert f"{first.line} makes {first.number} x float32[2048,64], " in note


class Residual(eqx.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = x + jax.nn.gelu(layer(x))
        return x


def loss(net, x):
    return jnp.mean(jax.vmap(net)(x) ** 2)


def stepped(net, x):
    gradients = eqx.filter_grad(loss)(net, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, net, gradients)


def with_decay(net, x):
    gradients = jax.jit(lambda *args: eqx.filter_grad(loss)(*args))(net, x)
    return jax.tree.map(lambda p, g: jax.jit(jnp.subtract)(p * 0.99, g), net, gradients)


def gradients(net, x):
    return eqx.filter_grad(loss)(net, x)


def clipped(net, x):
    value, gradients = eqx.filter_value_and_grad(loss)(net, x)
    norm = optax.global_norm(gradients)
    return value, jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradients)


@pytest.mark.parametrize(
    ("fun", "saves"),
    [(stepped, True), (with_decay, True), (gradients, False), (clipped, False)],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_donation_is_advised_for_steps_and_not_for_gradients(fun, saves):
    """`donate="all"` would delete the weights to which the gradients belong."""
    net = eqx.nn.Linear(600, 600, key=jax.random.key(0))
    with eqxjit.compile_report() as report:
        eqxjit.filter_jit(fun)(net, jnp.ones((2, 600)))
    [row] = [row for row in report.rows if row.program]
    assert (row.program.donation_saves >= 600 * 600 * 4) == saves
    assert any("donate=" in note for note in row.notes) == saves


# --- What a program closes over ---------------------------------------------------------------


class Optics(eqx.Module):
    cube: object
    name: str = eqx.field(static=True, default="telescope")

    def __call__(self, i):
        return jnp.sum(self.cube[i] ** 2)


class Plain:
    def __init__(self, table):
        self.table = table

    def look_up(self, i):
        return self.table[i].sum()


TABLE = jnp.ones((520, 520))
GLOBAL_OPTICS = Optics(TABLE + 1)


def reads_global(i):
    return TABLE[i].sum()


def reads_helper(i):
    return reads_global(i) + 1


def reads_module(i):
    return GLOBAL_OPTICS(i)


def closures():
    array, tree = TABLE + 2, {"weights": [TABLE + 3]}
    numpys, plain = np.ones((521, 521), np.float32), Plain(TABLE + 4)
    return {
        "a global": (reads_global, "TABLE"),
        "a helper's global": (reads_helper, "TABLE"),
        "a Module": (reads_module, "GLOBAL_OPTICS.cube"),
        "a closure": (lambda i: array[i].sum(), "array"),
        "a transformed closure": (jax.vmap(lambda i: array[i].sum()), "array"),
        "a tree": (lambda i: tree["weights"][0][i].sum(), "tree['weights'][0]"),
        "NumPy": (lambda i: jnp.sum(numpys * i), "numpys"),
        "an instance": (lambda i: plain.look_up(i), "plain.table"),
        "a method": (plain.look_up, "self.table"),
        "an inner jit": (lambda i: jax.jit(lambda i: array[i].sum())(i), "array"),
        "a scan": (
            lambda i: jax.lax.scan(lambda c, _: (c + array[i].sum(), None), 0.0, length=3)[0],
            "array",
        ),
    }


@pytest.mark.parametrize("name", closures())
def test_what_a_program_closes_over_is_named(name):
    fun, expected = closures()[name]
    f = eqxjit.filter_jit(fun)
    with eqxjit.compile_report() as report:
        f(jnp.arange(3) if name == "a transformed closure" else jnp.array(3))
    [captured] = f.traces()[0].program.constants
    assert captured.name == expected
    size = 521 if name == "NumPy" else 520
    assert (captured.type, captured.bytes) == (f"float32[{size},{size}]", size * size * 4)
    assert captured.line.startswith(f"{HERE}:")
    [row] = [row for row in report.rows if row.program]
    [note] = [note for note in row.notes if "closes over" in note]
    shown = "1.08 MB" if size == 520 else "1.09 MB"
    assert f"closes over `{expected}` {captured.type}, {shown}: pass it as an argument" in note


def test_what_is_passed_is_not_captured():
    f = eqxjit.filter_jit(lambda optics, i: optics(i))
    f(Optics(TABLE), jnp.array(3))
    [trace] = f.traces()
    assert trace.program.constants == ()
    small = jnp.ones(7)
    f = eqxjit.filter_jit(lambda i: i * small)
    f(jnp.array(3))
    [captured] = f.traces()[0].program.constants
    assert (captured.name, captured.bytes) == ("small", 28)
    assert f.traces()[0].program.notes == ()


def test_nothing_of_the_users_is_kept_alive():
    def make():
        constant = jnp.ones(300_000)
        f = eqxjit.filter_jit(lambda x: jnp.sin(x + constant))
        with eqxjit.compile_report() as report:
            f(jnp.ones(()))
        return weakref.ref(constant), report

    constant, report = make()
    gc.collect()
    jax.clear_caches()
    assert constant() is None
    [row] = [row for row in report.rows if row.function.endswith("<lambda>")]
    # The program was read while JAX still had it.
    assert row.program.equations == 2
    assert row.program.memory.outputs == 1_200_000


def test_a_solve_by_diffrax():
    diffrax = pytest.importorskip("diffrax")

    def solve(x, **options):
        term, control = diffrax.ODETerm(lambda t, y, args: -y), diffrax.PIDController(1e-3, 1e-3)
        arguments = term, diffrax.Tsit5(), 0, 1, 0.1, x
        return diffrax.diffeqsolve(*arguments, stepsize_controller=control, **options).ys

    for options in ({}, {"throw": False}):
        program = program_of(lambda x, options=options: solve(x, **options), X)
        assert program.loops == ()
        [note] = program.notes
        assert f"{line_of(solve, 3)} makes " in note
        assert "a solver of fewer stages" in note
        assert ("`throw=False`" in note) == program.calls_python == (not options)


def test_names_of_captured_arrays_run_no_code_of_the_users():
    """A flatten would make a State unusable, and an attribute's error would fail the call."""
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "b", mode="batch")

    class Angry:
        def __init__(self):
            self.weight = jnp.arange(5000.0)

        def __getattr__(self, name):
            raise RuntimeError(name)

    angry, odd = Angry(), {1: state, "a": [state], (2,): {object(): 3}}

    @eqxjit.filter_jit
    def f(x):
        return x + angry.weight[0] + len(odd)

    assert f(jnp.ones(3))[0] == 4
    [captured] = f.traces()[0].program.constants
    assert (captured.name, captured.type) == ("angry.weight", "float32[5000]")
    x = jnp.ones((3, 2))
    axes = {"axis_name": "b", "in_axes": (0, None), "out_axes": (0, None)}
    assert jax.vmap(norm, **axes)(x, state)[0].shape == (3, 2)
