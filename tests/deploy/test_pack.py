"""`eqxjit.pack`: what it takes, what it gives back, and how it behaves as a pytree."""

import copy
import gc
import io
import pickle
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import assume, given, settings

import eqxjit
from tests.support import nodes
from tests.support.helpers import assert_same, warm
from tests.support.models import arrays
from tests.support.profile import SCENARIOS
from tests.support.strategies import trees

FILTER_JITS = [eqxjit.filter_jit, eqx.filter_jit]


def pack(tree, **options):
    return eqxjit.pack(tree, optimizer=None, **options)


def strong(leaf):
    """Return a leaf as `unpack` returns it: a JAX array without a weak type."""
    if not eqx.is_array(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if leaf.dtype.kind in "OUSMm":
        return leaf
    return jax.lax.convert_element_type(jnp.asarray(leaf), jnp.asarray(leaf).dtype)


def assert_unpacked(packed, tree):
    """Check that `unpack` returns the tree. Leaves outside the buffers may keep weak types."""
    unpacked = packed.unpack()
    assert_same(jax.tree.map(strong, unpacked), jax.tree.map(strong, tree))
    buffers = {id(array) for array in packed.arrays}
    for got, leaf in zip(arrays(unpacked), arrays(tree), strict=True):
        assert got is leaf if id(got) in buffers else not getattr(got, "weak_type", False)


def mlp(depth=2, width=8, key=0):
    """Return an MLP with NumPy's random weights, because JAX's would be compiled per shape."""
    functions = {"activation": nodes.plus_one, "final_activation": nodes.plus_one}
    build = lambda: eqx.nn.MLP(3, 2, width, depth, **functions, key=jr.key(0))  # noqa: E731
    draw = np.random.default_rng(key).normal
    return jax.tree.map(
        lambda leaf: (
            jnp.asarray(draw(size=leaf.shape), leaf.dtype)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf
        ),
        eqx.filter_eval_shape(build),
    )


class Model(eqx.Module):
    """A model with static fields of many kinds."""

    layers: list
    name: str = eqx.field(static=True)
    sizes: tuple = eqx.field(static=True)
    activation: object = eqx.field(static=True)


def model(name="m", sizes=(1, 2.0), activation=jax.nn.relu):
    return Model([jnp.ones((2, 3)), jnp.zeros(3)], name, sizes, activation)


# --- There and back ---------------------------------------------------------------------------


@settings(max_examples=SCENARIOS // 14)
@given(trees)
def test_random_trees_come_back(make):
    tree = make()
    assume(arrays(tree))
    assert_unpacked(pack(tree), tree)


def test_one_buffer_a_dtype():
    tree = {"a": jnp.ones(2), "b": jnp.ones(3, int), "c": jnp.ones(()), "d": jnp.arange(2)}
    packed = pack(tree)
    assert [(a.dtype, [*a]) for a in packed.arrays] == [
        ("float32", [1, 1, 1]),
        ("int32", [1, 1, 1, 0, 1]),
    ]


def test_typed_keys():
    tree = {
        "key": jr.key(1),
        "keys": jr.split(jr.key(2), (2, 3)),
        "other": [jr.key(3, impl="rbg"), jr.split(jr.key(4, impl="rbg"), 2)],
        "old": jr.PRNGKey(5),
    }
    packed = pack(tree)
    assert packed.arrays[0] is tree["key"]
    assert len(packed.arrays) == 5
    assert_unpacked(packed, tree)
    drawn = eqxjit.filter_jit(lambda p: jr.normal(p.unpack()["other"][1][0]))(packed)
    assert drawn == jr.normal(tree["other"][1][0])


def test_weak_types_become_strong_and_numpy_arrays_jax_arrays():
    tree = [jnp.asarray(1.0), np.ones(2), np.float64(2), np.arange(2), np.int32(3)]
    packed = pack(tree)
    assert_same(packed.unpack(), [strong(leaf) for leaf in tree])
    tree[1][:] = 7
    assert [*packed.unpack()[1]] == [1, 1]
    # A single array of a dtype gains nothing from a buffer.
    assert pack(tree[:1]).arrays[0] is tree[0]
    with jax.enable_x64(True):
        tree = [np.ones(2), jnp.arange(3), jnp.ones(2), jnp.ones(1, int)]
        packed = pack(tree)
        assert [a.dtype for a in packed.arrays] == ["float64", "int64"]
        assert_unpacked(packed, tree)


@pytest.mark.parametrize("values", [["a"], np.array(["2020"], "datetime64[D]"), [None, {}]])
def test_arrays_that_jax_does_not_take(values):
    with pytest.raises(TypeError, match="not a valid JAX array type"):
        pack([jnp.ones(2), np.array(values)])


# The first trees are states of optimizers without a state.
@pytest.mark.parametrize("tree", [(), None, {}, [None, ()], jnp.ones(3), [jnp.ones(0)], [3, "a"]])
def test_nothing_to_share(tree):
    packed = pack(tree)
    assert_same(packed.unpack(), tree)
    assert all(a is b for a, b in zip(packed.arrays, jax.tree.leaves(tree), strict=False))


def test_packed_twice():
    packed = pack(pack([jnp.ones(2), jnp.zeros(3, int), jnp.ones(())]))
    assert_same(packed.unpack().unpack(), [jnp.ones(2), jnp.zeros(3, int), jnp.ones(())])


def test_large_leaves_are_left_alone():
    small, large = jnp.ones(64), jnp.ones(65)
    tree = [small, large, small + 1, large + 1]
    packed = pack(tree, max_leaf_bytes=256)
    assert [a.shape for a in packed.arrays] == [(128,), (65,), (65,)]
    assert packed.arrays[1] is packed.unpack()[1] is large
    assert_unpacked(packed, tree)
    assert len(pack(tree, max_leaf_bytes=0).arrays) == 4
    assert len(pack(tree, max_leaf_bytes=10**9).arrays) == 1


def test_many_leaves_take_several_buffers():
    tree = [jnp.full(2, i) for i in range(60)]
    packed = pack(tree)
    assert 1 < len(packed.arrays) <= 3
    assert_unpacked(packed, tree)


def test_packing_copies():
    leaf = jnp.ones(3)
    packed = pack([leaf, jnp.zeros(0)])
    eqxjit.filter_jit(lambda p: p.repack(p.unpack()), donate="all")(packed)
    assert not leaf.is_deleted()


# --- The layout -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (model(sizes=(1,)), model(sizes=(True,))),
        (model(sizes=0.0), model(sizes=-0.0)),
        (model(activation=lambda x: x), model(activation=lambda x: x)),
        ({1: jnp.ones(2)}, {True: jnp.ones(2)}),
        ([jnp.ones(2)], [jnp.ones(3)]),
        ([jnp.ones(2)], [jnp.ones(2, int)]),
        ([jnp.ones(2), jnp.ones(2)], [jnp.ones((2, 1)), jnp.ones((1, 2))]),
        ([jr.key(0), jr.key(1)], [jr.PRNGKey(0), jr.PRNGKey(1)]),
    ],
)
def test_different_trees_have_different_layouts(one, other):
    one, other = pack(one), pack(other)
    assert one.layout != other.layout
    assert jax.tree.structure(one) != jax.tree.structure(other)


@pytest.mark.parametrize("filter_jit", FILTER_JITS)
def test_models_built_alike_share_a_layout_and_do_not_retrace(filter_jit):
    traced = []

    @filter_jit
    def f(p, x):
        traced.append(1)
        return p.unpack()(x)

    for key in range(4):
        f(pack(mlp(key=key)), jnp.ones(3))
        # Nothing keeps the layout alive, so the next layout is a different object.
        gc.collect()
    packed = pack(mlp())
    # Equinox keeps Modules that were unpickled.
    twin = pickle.loads(pickle.dumps(packed))
    assert twin.layout is packed.layout is pack(mlp(key=1)).layout
    f(twin, jnp.ones(3))
    assert len(traced) == 1


class Listing(eqx.Module):
    """A model with a list in a static field."""

    weights: list
    options: list = eqx.field(static=True)

    def __call__(self, x):
        return self.weights[0] * x + len(self.options)


def test_static_values_are_a_snapshot():
    tree = Listing([jnp.ones(2), jnp.zeros(2)], ["a"])
    packed = pack(tree)
    f = eqxjit.filter_jit(lambda p, x: p.unpack()(x))
    assert [*warm(f, packed, jnp.ones(2))] == [2, 2]
    tree.options.append("b")
    assert packed.unpack().options == ["a"]
    assert [*warm(f, packed, jnp.ones(2))] == [2, 2]
    assert [*warm(f, pack(tree), jnp.ones(2))] == [3, 3]
    assert pack(Listing(tree.weights, ["a"])).layout is packed.layout
    with pytest.raises(ValueError, match=r"`tree.options` was list of 1, is list of 2"):
        packed.repack(tree)


def test_layouts_and_what_they_hold_die():
    """This holds even if a layout's static values refer to it, and for functions called with it."""

    def run():
        def local(x):
            return packed

        f = eqxjit.filter_jit(lambda p, x: jax.tree.map(lambda a: a + x, p.unpack()[:2]))
        marker = f.__wrapped__.marker = nodes.Plain()
        packed = pack([jnp.ones(2), jnp.ones(3), local])
        warm(f, packed, jnp.ones(()))
        return map(weakref.ref, (packed.layout, marker, packed.arrays[0], local))

    references = [*run()]
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


# --- As a pytree ------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [*FILTER_JITS, jax.jit])
@pytest.mark.parametrize("donate", [False, True])
def test_under_every_jit(jit, donate):
    def step(p, x):
        new = jax.tree.map(lambda a: a * x if eqx.is_array(a) else a, p.unpack())
        return p.repack(new), new.layers[0].weight

    if jit is jax.jit:
        step = jit(step, donate_argnums=(0,) if donate else ())
    else:
        step = jit(step, donate="all" if donate else "none")
    tree = mlp()
    packed = pack(tree)
    for power in range(1, 6):
        before = packed
        packed, weight = step(packed, jnp.asarray(2.0))
        assert_same(weight, tree.layers[0].weight * 2.0**power)
        assert all(a.is_deleted() == donate for a in before.arrays)
    assert packed.layout is pack(tree).layout


def serialised(packed):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, packed)
    file.seek(0)
    like = pack(jax.tree.map(lambda a: a + 1 if eqx.is_array(a) else a, packed.unpack()))
    return eqx.tree_deserialise_leaves(file, like)


COPIES = {
    "pickle": lambda packed: pickle.loads(pickle.dumps(packed)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "flattened": lambda packed: jax.tree.unflatten(*jax.tree.flatten(packed)[::-1]),
    "serialised": serialised,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_have_the_same_layout(how):
    listing = Listing([jnp.ones(2), jnp.zeros(2)], ["a"])
    keys = [jr.key(0), jr.key(1), jr.key(2, impl="rbg")]
    # Values that Equinox or pickle can't write are left out.
    others = {"serialised": [], "pickle": keys}.get(how, [*keys, jax.nn.relu])
    packed = pack([mlp(), {"b": jnp.ones(2, int), "a": (jnp.zeros(2), 2)}, listing, others])
    twin = COPIES[how](packed)
    assert twin.layout is packed.layout
    assert eqx.tree_equal(packed, twin)
    assert_same(twin.unpack(), packed.unpack())


def test_filtered_and_combined():
    tree = [jnp.ones(2), jnp.arange(3), jnp.ones(3), jnp.arange(2)]
    floats, others = eqx.partition(pack(tree), eqx.is_inexact_array)
    assert_same(floats.unpack(), [tree[0], None, tree[2], None])
    assert_same(others.unpack(), [None, tree[1], None, tree[3]])
    assert_same(eqx.combine(floats, others).unpack(), tree)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ([jnp.ones(10), jnp.ones(())], "2 arrays in 1 buffer, 44 B"),
        ([jnp.ones(500)] * 2 + [jnp.ones(2, int)] * 2, "4 arrays in 2 buffers, 4,016 B"),
        ([jnp.ones(2)] * 2 + [jnp.ones(9999)], "3 arrays in 2 buffers, 40,012 B"),
        (None, "0 arrays in 0 buffers, 0 B"),
    ],
)
def test_printed(tree, text):
    packed = pack(tree)
    assert repr(packed) == str(packed) == f"Packed({text})"
    assert repr(eqx.filter(packed, lambda _: False)).endswith(", 0 B)")
    # Within other Modules, Equinox prints all fields.
    assert "0x" not in eqx.tree_pformat([packed])


# --- Repacking --------------------------------------------------------------------------------


def test_repack():
    packed = pack(mlp())
    new = jax.tree.map(lambda a: a + 1 if eqx.is_array(a) else a, mlp())
    again = packed.repack(new)
    assert again.layout is packed.layout
    assert_same(again.unpack(), new)
    assert_same(packed.unpack(), mlp())


def with_bias(bias):
    return lambda model: eqx.tree_at(lambda m: m.layers[1].bias, model, bias)


BIAS = "`tree.layers[1].bias` was float32"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_bias(jnp.ones(9)), f"{BIAS}[8], is float32[9]"),
        (with_bias(jnp.ones(8, int)), f"{BIAS}, is int32"),
        (with_bias(1.5), f"{BIAS}[8], is 1.5"),
        (with_bias(None), f"{BIAS}[8], is None"),
        (lambda m: eqx.tree_at(lambda m: m.layers, m, [*m.layers]), "was tuple of 3, is list of 3"),
        (lambda m: eqx.tree_at(lambda m: m.activation, m, jax.nn.tanh), "`tree.activation` was"),
        (lambda m: mlp(depth=1), "`tree.depth` was 2, is 1"),
        (pack, "`tree` was MLP, is Packed"),
    ],
)
def test_wrong_repacks_are_refused(change, text):
    packed = pack(mlp())
    for repack in (
        lambda: packed.repack(change(mlp())),
        lambda: eqxjit.filter_jit(lambda p: p.repack(change(p.unpack())))(packed),
    ):
        with pytest.raises(ValueError, match=r"`repack` takes a tree of the same str") as caught:
            repack()
        assert text in str(caught.value)
    assert_same(packed.unpack(), mlp())


def test_a_tree_that_is_too_large_to_be_described():
    packed = pack([jnp.ones(2), *[1] * 50_000])
    with pytest.raises(ValueError, match="differences:\n    somewhere in a large tree"):
        packed.repack([jnp.ones(2), *[1] * 49_999, 2])


# --- Mistakes ---------------------------------------------------------------------------------


def test_the_optimizer_must_be_given():
    with pytest.raises(TypeError, match="optimizer"):
        eqxjit.pack(mlp())


def test_forgetting_to_unpack():
    packed, as_dict = pack(mlp()), pack({"w": jnp.ones(2)})
    vmapped = eqxjit.filter_jit(lambda p, x: jax.vmap(p)(x))
    for error, text, use in [
        (AttributeError, r"packed\.unpack\(\)\.layers", lambda: packed.layers),
        (AttributeError, r"unpack\(\)\.layers", lambda: eqx.tree_at(lambda p: p.layers, packed, 1)),
        (TypeError, "'Packed' object is not callable", lambda: packed(jnp.ones(3))),
        (TypeError, r"callable value, got Packed\(", lambda: vmapped(packed, jnp.ones((2, 3)))),
        (TypeError, "'Packed' object is not subscriptable", lambda: as_dict["w"]),
        (TypeError, "'Packed' object is not iterable", lambda: next(iter(as_dict))),
        (TypeError, r"class .eqxjit\.Packed.", lambda: jnp.sum(packed)),
        (TypeError, "Packed", lambda: jnp.ones(3) + packed),
    ]:
        with pytest.raises(error, match=text):
            use()
    assert not hasattr(packed, "__array__")
    assert not hasattr(packed, "shape")
    assert packed != 1


def test_a_structure_that_changes_in_a_loop():
    """JAX's error shows the old and the new structure."""
    packed = pack([jnp.ones(2), jnp.ones(3)])
    shorter = pack([jnp.ones(1), jnp.ones(3)])
    told = r"float32\[2\], float32\[3\](.|\n)*float32\[1\], float32\[3\]"
    with pytest.raises(TypeError, match=told):
        jax.lax.fori_loop(0, 2, lambda _, __: shorter, packed)


def test_inference_mode_is_of_the_unpacked():
    """It looks for attributes, and a `Packed` has none."""
    packed = pack([mlp(), eqx.nn.Dropout(0.5)])
    for switch in (
        lambda: eqx.nn.inference_mode((packed, None)),
        lambda: eqx.tree_at(lambda p: p.inference, packed, True),
        lambda: hasattr(packed, "inference"),
    ):
        with pytest.raises(TypeError, match=r"inference_mode\(packed\.unpack\(\)\)"):
            switch()
    unpacked = eqx.nn.inference_mode(packed.unpack())
    assert pack(unpacked).unpack()[1].inference


def test_unpacking_what_is_no_longer_a_packed_tree():
    packed = pack(mlp())
    with pytest.raises(ValueError, match=r"takes buffers.* a buffer of shape \(\)\."):
        jax.tree.map(lambda _: True, packed).unpack()
    with pytest.raises(ValueError, match=r"last axis.* a buffer of shape \(1,\)\."):
        jax.tree.map(lambda a: a[:1], packed).unpack()


def test_trees_that_cannot_be_packed():
    cycle = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="contains itself"):
        pack(cycle)
    leaf = jnp.ones(3)
    leaf.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        pack([leaf, jnp.ones(2)])
