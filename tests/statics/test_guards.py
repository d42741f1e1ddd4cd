"""Guards call a user's `hash` and `==` as a lookup in a dict does, and raise their errors."""

import collections
import signal
import threading

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util
import numpy as np
import pytest

import eqxjit
from tests.support import inside
from tests.support.helpers import SPECIALIZING, Own, assert_same, outcome


class Counting:
    """An object whose `hash` and `==` are counted, and may raise."""

    hashes = comparisons = 0
    raises: type[Exception] | None = None
    raises_compared: type[Exception] | None = None

    def __init__(self, value):
        self.value = value

    def __hash__(self):
        Counting.hashes += 1
        if Counting.raises is not None:
            # Raise a new exception each time, because an exception keeps its traceback.
            raise Counting.raises("from a hash")
        return hash(self.value)

    def __eq__(self, other):
        Counting.comparisons += 1
        if Counting.raises_compared is not None:
            raise Counting.raises_compared("from a comparison")
        assert type(other) is Counting
        assert hash(self.value) == hash(other.value), "compared although the hashes differ"
        return self.value == other.value


class Timeout(Exception):
    """The error that a signal handler raises."""


@pytest.fixture(autouse=True)
def reset():
    Counting.hashes = Counting.comparisons = 0
    yield
    Counting.raises = Counting.raises_compared = None


class Holder(eqx.Module):
    weight: object
    value: object = eqx.field(static=True)


PLACES = {
    "argument": lambda v: v,
    "argument in a tuple": lambda v: (v, 1),
    "static field": lambda v: Holder(1.0, v),
    "list in a static field": lambda v: Holder(1.0, [v]),
}


@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
def test_objects_of_other_hashes_are_never_compared(put):
    f = eqxjit.filter_jit(lambda x, v: x * 2)
    for value in (1, 2, 1, 3, 2, 1, 1, 2, 3, 3):
        assert_same(f(jnp.ones(2), put(Counting(value))), 2 * jnp.ones(2))
    assert f.cache_info().traces == 3


@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
def test_the_user_s_methods_run_as_often_as_under_equinox(put):
    def counts(filter_jit):
        f = filter_jit(lambda x, v: x * 2)
        for _ in range(5):
            v = put(Counting(1))
            Counting.hashes = Counting.comparisons = 0
            f(jnp.ones(2), v)
            yield Counting.hashes, Counting.comparisons

    ours = [*counts(eqxjit.filter_jit)]
    for expected, found in zip(counts(eqx.filter_jit), ours, strict=True):
        # For an object in a static field, Equinox calls only `==`.
        assert found[0] <= max(expected[0], 1) + 1
        assert found[1] <= expected[1] + 1
    assert ours[-1][0] <= 1


def test_a_key_error_of_a_comparison_is_raised_at_once():
    compared = []

    class Name:
        def __init__(self, name):
            self.name = name

        def __hash__(self):
            return 0

        def __eq__(self, other):
            compared.append({self.name, other.name})
            return {"a": True}[self.name] and {"a": True}[other.name]

    f = eqxjit.filter_jit(lambda x, name: x + 1)
    for _ in range(3):
        f(jnp.ones(()), Name("a"))
    compared.clear()
    with pytest.raises(KeyError, match="b"):
        f(jnp.ones(()), Name("b"))
    assert compared == [{"a", "b"}]


def test_what_a_hash_raises_is_raised_at_once():
    f = eqxjit.filter_jit(lambda x, v: x * 2)
    for v in (Counting(1), Counting(1), Counting(1)):
        f(jnp.ones(2), v)
    Counting.raises = Timeout
    Counting.hashes = 0
    with pytest.raises(Timeout, match="from a hash"):
        f(jnp.ones(2), v)
    # The fast path hashes it, and then the slow path.
    assert Counting.hashes <= 2
    Counting.raises = None
    assert_same(f(jnp.ones(2), v), 2 * jnp.ones(2))
    assert f.cache_info().traces == 1


ERRORS = [TypeError, ValueError, UnicodeError, RecursionError, AttributeError, KeyError, Timeout]


@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", ["hash", "=="])
def test_a_call_raises_what_the_slow_path_raises(put, error, method, request):
    """The error and its text are the same on each path."""
    f = eqxjit.filter_jit(lambda x, v, n: x * n)
    x = jnp.ones(2)
    for n in (1, 2, 1):
        for _ in range(3):
            f(x, put(Counting(1)), n)
    if method == "hash":
        Counting.raises = error
    else:
        Counting.raises_compared = error
    value = put(Counting(1))
    expected = outcome(inside.caller(f).slow_call, x, value, 1)
    found = outcome(f, x, value, 1)
    if method == "hash" and error is TypeError and "static field" in request.node.callspec.id:
        # It says that it isn't hashable, so it equals no other object.
        assert_same(found, expected)
        return
    assert isinstance(expected, Exception)
    assert (type(found), str(found)) == (type(expected), str(expected))
    Counting.raises = Counting.raises_compared = None
    assert_same(f(x, value, 1), x)
    assert f.cache_info().traces == 2


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_comparison_that_the_slow_path_does_not_make_raises_nothing(error):
    """An example is the `==` of two data tables, which has no single truth value."""

    class Ambiguous(Own):
        def __hash__(self):
            return 1

        def __eq__(self, other):
            if other is not self:
                raise error("ambiguous")
            return True

    f = eqxjit.filter_jit(lambda x, v, n: x * n)
    x = jnp.ones(2)
    value = Ambiguous(1)
    for n in (1, 1, 1, 2, 2):
        assert_same(f(x, value, n), x * n)
    other = Ambiguous(2)
    for n in (3, 3, 3):
        assert_same(f(x, other, n), x * n)


def test_a_part_that_differed_last_raises_nothing_if_an_earlier_part_differs():
    class Grid:
        def __init__(self, points):
            self.points = points

        def __hash__(self):
            return 1

        def __eq__(self, other):
            return self.points.tolist() == other.points.tolist()

    f = eqxjit.filter_jit(lambda pair: pair[0])
    x = jnp.ones(2)
    grids = [Grid(np.arange(n)) for n in (3, 4)]
    for grid in grids * 3:
        assert_same(f((x, "a", grid)), x)
    assert_same(f((x, "b", Grid(None))), x)
    with pytest.raises(AttributeError):
        f((x, "a", Grid(None)))


def test_the_new_value_s_equality_is_asked():
    """A lookup in a dict does the same if both values have an `==`."""

    class Lenient:
        def __init__(self, accepts):
            self.accepts = accepts

        def __hash__(self):
            return 1

        def __eq__(self, other):
            return self.accepts

    for put in PLACES.values():
        f = eqxjit.filter_jit(lambda x, v: x)
        for _ in range(4):
            f(jnp.ones(2), put(Lenient(False)))
        n = f.cache_info().traces
        f(jnp.ones(2), put(Lenient(True)))
        assert f.cache_info().traces == n
        f(jnp.ones(2), put(Lenient(False)))
        assert f.cache_info().traces == n + 1


def test_a_changed_part_of_a_container_can_be_traced_for_another_shape():
    f = eqxjit.filter_jit(lambda holder, x: x * holder.weight * holder.value[0].value)
    holder = Holder(jnp.ones(()), (Own(2),))
    for n in (2, 2, 2):
        assert f(holder, jnp.ones(n))[0] == 2
    holder.value[0].value = 5
    for n in (3, 3, 3):
        assert f(holder, jnp.ones(n))[0] == 5


@pytest.mark.skipif(not SPECIALIZING, reason="the slow path makes a key, which hashes each part")
def test_the_very_part_of_a_container_counts_as_unchanged_without_a_hash():
    f = eqxjit.filter_jit(lambda holder: holder.weight * 2)
    holder = Holder(jnp.ones(2), [Counting(i) for i in range(5)])
    for _ in range(3):
        f(holder)
    Counting.hashes = 0
    for _ in range(3):
        f(holder)
    if eqxjit.native_enabled():
        assert (Counting.hashes, Counting.comparisons) == (0, 0)
    f(Holder(jnp.ones(2), [Counting(i) for i in range(5)]))
    assert f.cache_info().traces == 1
    f(Holder(jnp.ones(2), [Counting(i) for i in range(1, 6)]))
    assert f.cache_info().traces == 2


def test_code_of_the_users_runs_about_as_often_as_under_equinox():
    """It may run once more when a fast path is created or tried, and once to describe a trace."""
    counts = collections.Counter()

    class Node:
        def __init__(self, x):
            self.x = x

    class Static(Own):
        def __repr__(self):
            counts["repr"] += 1
            return "Static"

    def flatten(node):
        counts["flatten"] += 1
        return (node.x,), None

    jax.tree_util.register_pytree_node(Node, flatten, lambda _, children: Node(*children))

    def counted(filter_jit):
        f = filter_jit(lambda node, static: node.x * static.value)
        for size, n in [(2, 1), (2, 1), (2, 1), (3, 1), (3, 1), (2, 2), (2, 2), (2, 2)]:
            x = jnp.ones(size)
            counts.clear()
            f(Node(x), Static(n))
            yield counts.copy()

    traced = [1, 0, 0, 1, 0, 1, 0, 0]
    for theirs, ours, is_traced in zip(
        counted(eqx.filter_jit), counted(eqxjit.filter_jit), traced, strict=True
    ):
        for code in ("flatten", "repr"):
            assert ours[code] <= theirs[code] + 1 + is_traced, code


def test_no_lock_is_held_while_static_values_are_compared():
    """Otherwise an `==` that takes a lock, as in an ORM, could deadlock with another caller."""
    f = eqxjit.filter_jit(lambda x, value: x * value.n)
    x = jnp.ones(2)
    finished = []

    class Value:
        def __init__(self, n, hashed=1):
            self.n = n
            self.hashed = hashed

        def __hash__(self):
            return self.hashed

        def __eq__(self, other):
            if threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=f, args=(x, Value(len(finished), 10)), daemon=True)
                thread.start()
                thread.join(60)
                finished.append(not thread.is_alive())
            return type(other) is Value and self.n == other.n

    for n in range(2):
        assert f(x, Value(n)).tolist() == [n, n]
    assert finished
    assert all(finished)


class Interrupt(BaseException):
    """An exception like `SystemExit` or `KeyboardInterrupt`."""


@pytest.mark.parametrize("second", [ValueError, Interrupt])
def test_an_error_is_not_lost_if_the_arguments_can_not_be_taken_apart_again(second):
    class Once:
        is_left = None

        def __init__(self, x):
            self.x = x

        def flatten(self):
            if Once.is_left == 0:
                raise second("from the flatten")
            if Once.is_left is not None:
                Once.is_left -= 1
            return (self.x,), None

    jax.tree_util.register_pytree_node(Once, Once.flatten, lambda _, children: Once(*children))

    def body(once):
        def check(x):
            if np.any(x < 0):
                raise RuntimeError("the program's")
            return x

        return jax.pure_callback(check, once.x, once.x)

    f = eqxjit.filter_jit(body)
    for _ in range(4):
        f(Once(jnp.ones(2)))
    Once.is_left = 1
    with pytest.raises((Exception, Interrupt)) as info:
        f(Once(-jnp.ones(2)))
    error = info.value
    # The slow path takes them apart once.
    if second is Interrupt and SPECIALIZING:
        assert type(error) is Interrupt
        error = error.__context__
    assert "the program's" in str(error)


@pytest.mark.skipif(not SPECIALIZING, reason="the slow path words it")
@pytest.mark.parametrize("error", [ValueError, RecursionError])
def test_what_a_signal_handler_raises_in_a_guard_arrives(error):
    """This also holds for errors after which a call normally takes the slow path."""

    class Interrupted(Own):
        is_due = False

        def __hash__(self):
            if Interrupted.is_due:
                Interrupted.is_due = False
                signal.raise_signal(signal.SIGUSR1)
            return 1

    def handler(*_):
        raise error("from a handler")

    f = eqxjit.filter_jit(lambda x, v: x)
    for _ in range(4):
        f(jnp.ones(2), Interrupted(1))
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        Interrupted.is_due = True
        with pytest.raises(error, match=r"^from a handler$"):
            f(jnp.ones(2), Interrupted(1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert_same(f(jnp.ones(2), Interrupted(1)), jnp.ones(2))
