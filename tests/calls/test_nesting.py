"""Calls inside transformations, inside each other, and under JAX's contexts and cleared caches."""

import functools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox._misc import currently_jitting as upstreams

import eqxjit
from tests.support.helpers import Counted, assert_close, assert_same
from tests.support.places import JAX_FILES
from tests.support.sides import CALLS, both, since_jax_0_9
from tests.support.transformations import TRANSFORMATIONS, points


class Model(eqx.Module):
    weight: jax.Array
    power: int = eqx.field(static=True)

    def __call__(self, x):
        return jnp.tanh(self.weight @ x) ** self.power


def model():
    return Model(jnp.linspace(-1.0, 1.0, 9).reshape(3, 3), 2)


def counted(filter_jit=lambda f: f):
    """Return a function that calls a jitted function of a model, and a counter of its traces."""

    def f(model, x, n):
        return Model(model.weight * n, model.power), model(x) * n

    inner = Counted(filter_jit, f)

    def call(x, n=2):
        doubled, y = inner(model(), x, n)
        return doubled.weight.sum() + y.sum()

    return call, inner


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_call_inside_a_transformation(name):
    """The first call and warm calls are inside the transformation."""
    transform, xs = TRANSFORMATIONS[name], points()
    theirs, their_count = counted(eqx.filter_jit)
    expected, outside = transform(theirs, xs), [theirs(x) for x in xs]
    assert_close(expected, transform(counted()[0], xs))
    for is_warm in (False, True):
        ours, our_count = counted(eqxjit.filter_jit)
        for _ in range(CALLS if is_warm else 0):
            assert_same(ours(xs[0]), outside[0])
        for _ in range(2):
            assert_same(transform(ours, xs), expected)
            # Outside again, a program that was compiled for tracers must not be used.
            assert_same(ours(xs[1]), outside[1])
        assert our_count.jitted.cache_info().traces == our_count.traces <= their_count.traces


@both
def test_a_static_output_of_a_nested_call_stays_static(filter_jit):
    @filter_jit
    def inner(x, n):
        return x * n, n + 1, "name"

    @filter_jit
    def outer(x, n):
        y, m, name = inner(x, n)
        assert (m, name) == (n + 1, "name")
        return y, m, inner

    for n in (1, 2, 1, 2, 1, 2, 1, 2):
        y, m, returned = outer(jnp.ones(2), n)
        assert_same(y, jnp.full(2, n, jnp.float32))
        assert type(m) is int
        assert m == n + 1
        assert returned == inner


@since_jax_0_9
@both
def test_recursion_into_the_call_in_progress_is_refused(filter_jit):
    """JAX can't trace a structure that is being traced, even if the recursion would end."""
    depths = [2, 0]
    f = filter_jit(lambda x: f(x) + 1 if depths.pop(0) else x)
    with pytest.raises(RecursionError, match="Recursively calling"):
        f(jnp.array(1.0))
    depths[:] = [0]
    for x in (1.0, 2.0, 3.0, 4.0):
        assert f(jnp.array(x)) == x


def test_calls_of_each_other_are_told_apart():
    @eqxjit.filter_jit
    def inner(x, n):
        return x * n

    @eqxjit.filter_jit
    def outer(x, n, shapes):
        # These are warm calls, and calls with a new shape, while `outer` itself is traced.
        return [inner(x, 2)] + [inner(jnp.ones(size), n) for size in shapes]

    inner(jnp.ones(2), 2)
    for shapes in ((2,), (2, 3), (4, 2)):
        for _ in range(CALLS):
            first, *others = outer(jnp.ones(2), 5, shapes)
            assert first.tolist() == [2.0, 2.0]
            assert [other.tolist() for other in others] == [[5.0] * size for size in shapes]


def test_a_trace_in_a_warm_call_has_all_its_arguments():
    f = eqxjit.filter_jit(lambda x, n=1, *rest, scale=1, **more: (x * n * scale, rest, more))
    for size in (2, 2, 3, 4):
        x = jnp.ones(size)
        for out, rest, more in (f(x, n=2, scale=3, k=4), f(x, 2, 4, scale=3)):
            assert out.tolist() == [6.0] * size
            assert (rest, more) in [((), {"k": 4}), ((4,), {})]


# --- Contexts ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("warm", [0, 1, CALLS])
def test_disable_jit_runs_the_function_as_it_stands(filter_jit, warm):
    shared, seen = [jnp.ones(2)], []

    @filter_jit
    def f(model, x, n):
        seen.append(isinstance(x, jax.core.Tracer))
        return model(x), {"shared": shared, "n": n}

    arguments = model(), points()[0], 3
    expected = f.__wrapped__(*arguments)
    for _ in range(warm):
        f(*arguments)
    seen.clear()
    with jax.disable_jit():
        outputs = [f(*arguments) for _ in range(CALLS)]
    # The function runs once in each call, with arrays instead of tracers.
    assert seen == [False] * CALLS
    # Containers are still created anew.
    lists = [shared, *(out[1]["shared"] for out in outputs)]
    assert len({*map(id, lists)}) == len(lists)
    assert_same(outputs, [expected] * CALLS)
    seen.clear()
    for _ in range(CALLS):
        assert_close(f(*arguments)[0], expected[0])
    assert seen == ([] if warm else [True])
    if filter_jit is eqxjit.filter_jit:
        assert f.cache_info().traces == 1


@both
@pytest.mark.parametrize("error", [TypeError("mine"), RuntimeError()])
def test_the_users_error_under_disable_jit(filter_jit, error):
    @filter_jit
    def fail(x, names):
        raise error

    with jax.disable_jit(), pytest.raises(type(error)) as raised:
        # JAX can't trace strings, but that isn't the error that is raised.
        fail(jnp.ones(2), np.array(["a", "b"]))
    assert raised.value is error
    assert raised.value.__cause__ is None


@both
@pytest.mark.parametrize("n_before", [0, 3])
def test_without_arrays_under_ensure_compile_time_eval(filter_jit, n_before):
    squares = filter_jit(lambda n: jnp.arange(n) ** 2)
    for _ in range(n_before):
        squares(4)

    @jax.jit
    def add(x):
        with jax.ensure_compile_time_eval():
            table = squares(4)
        return x + table

    assert add(jnp.ones(4)).tolist() == [1, 2, 5, 10]
    assert squares(4).tolist() == [0, 1, 4, 9]


# --- Cleared caches ---------------------------------------------------------------------------


@pytest.mark.parametrize("clear", [jax.clear_caches, eqx.clear_caches], ids=["jax", "equinox"])
@pytest.mark.parametrize("warm", [1, CALLS])
def test_clearing_caches(clear, warm):
    (ours, theirs) = (
        Counted(jit, lambda x, n: x * n) for jit in (eqxjit.filter_jit, eqx.filter_jit)
    )
    x = jnp.ones(3)
    for _ in range(2):
        for _ in range(warm):
            assert_same([ours(x, 2), ours(x, 3)], [theirs(x, 2), theirs(x, 3)])
        clear()
    assert_same(jax.jit(ours, static_argnums=1)(x, 2), x * 2)
    assert_same(jax.jit(theirs, static_argnums=1)(x, 2), x * 2)
    assert ours.traces == theirs.traces


def frames_of_jax(call):
    """Return how many of JAX's Python functions a call runs."""
    called = 0

    def see(frame, event, _):
        nonlocal called
        called += event == "call" and frame.f_code.co_filename.startswith(JAX_FILES)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


def test_warm_calls_are_fast_whatever_was_traced_before():
    """After a failed call, JAX handles calls with the same arguments in Python, which is slow."""
    fails = True

    def fun(x):
        if fails and x.dtype == jnp.int32:
            raise ZeroDivisionError
        return x + 1

    f, fresh = eqxjit.filter_jit(fun), eqxjit.filter_jit(lambda x: x + 1)
    shapes = [jnp.arange(3.0), jnp.arange(4.0)]
    for x in shapes * CALLS:
        f(x)
        fresh(shapes[0])
    with pytest.raises(ZeroDivisionError):
        f(jnp.arange(2))
    fails = False
    f.compile(jax.ShapeDtypeStruct((7,), jnp.float32))
    jax.clear_caches()
    shapes += [jnp.arange(2), jnp.ones(7)]
    for x in shapes * 2:
        f(x)
        fresh(shapes[0])
    least = frames_of_jax(lambda: fresh(shapes[0]))
    assert least < 5
    assert [frames_of_jax(lambda x=x: f(x)) for x in shapes] == [least] * len(shapes)


@both
def test_an_axis_that_no_argument_is_mapped_over(filter_jit):
    """A call without mapped arguments is also part of the program that `vmap` transforms."""
    x = jnp.arange(3.0)
    f = filter_jit(lambda a: jax.lax.psum(a, "i"))
    for _ in range(CALLS):
        alone = jax.vmap(lambda i: f(x), axis_name="i")(jnp.arange(2))
        beside = jax.vmap(lambda i: f(x) + f(x + i), axis_name="i")(jnp.arange(2.0))
        assert alone.tolist() == [[0, 2, 4]] * 2
        assert beside.tolist() == [[1, 5, 9]] * 2


# --- `currently_jitting()`: the answers of Equinox's own --------------------------------------


def _at_compile_time(f):
    def inner(x):
        with jax.ensure_compile_time_eval():
            f(x)
        return x

    return inner


X = jnp.ones(3)

CONTEXTS = TRANSFORMATIONS | {
    "outside": lambda f, _: f(X),
    "ensure_compile_time_eval alone": lambda f, _: _at_compile_time(f)(X),
    "vmap, at compile time": lambda f, _: jax.jit(jax.vmap(_at_compile_time(f)))(X),
    "at compile time, jit": lambda f, _: jax.jit(_at_compile_time(jax.jit(f)))(X),
    "scan, vmap, jvp": lambda f, _: jax.lax.scan(
        lambda c, _: (c, jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(X)), 0, None, 2
    ),
    "disable_jit": lambda f, _: _without_jit(f),
    "vmap, eqxjit.filter_jit, grad": lambda f, _: jax.vmap(eqxjit.filter_jit(jax.grad(f)))(X),
    "filter_closure_convert": lambda f, _: eqx.filter_closure_convert(f, X),
    "pure_callback": lambda f, _: jax.jit(
        lambda x: jax.pure_callback(f, jax.ShapeDtypeStruct((), jnp.float32), x)
    )(X),
}


def _without_jit(f):
    with jax.disable_jit():
        return jax.jit(f)(X)


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_answer_is_upstreams(name):
    answers = []

    def f(x):
        answers.append((eqxjit.currently_jitting(), upstreams()))
        return x.sum()

    CONTEXTS[name](f, points())
    assert answers
    assert all(ours is theirs for ours, theirs in answers)
    assert eqxjit.currently_jitting() is False


def test_it_adds_nothing_to_the_program():
    """To find out whether it is traced, Equinox adds numbers, and this addition is traced."""

    def f(answer, x):
        return x * (2 if answer() else 3)

    jaxpr = jax.make_jaxpr(functools.partial(f, eqxjit.currently_jitting))(X)
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["mul"]
