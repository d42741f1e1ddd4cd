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
from hypothesis import strategies as st

import eqxjit
from eqxjit._deploy.pack import MAX_LEAVES_PER_BUFFER
from tests.support import nodes
from tests.support.helpers import assert_same, same_leaf, warm
from tests.support.models import arrays
from tests.support.profile import SCENARIOS
from tests.support.strategies import made, trees
from tests.support.strategies import numpy_array as numbers

FILTER_JITS = [eqxjit.filter_jit, eqx.filter_jit]
DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int32",
    "int4",
    "uint4",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float32",
    "complex64",
]


def strong(leaf):
    """A leaf as `unpack` gives it: of strong type, and JAX's own."""
    if not eqx.is_array(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if leaf.dtype.kind in "OUSMm":
        return leaf
    return jax.lax.convert_element_type(jnp.asarray(leaf), jnp.asarray(leaf).dtype)


def assert_unpacked(packed, tree):
    """A `Packed` gives back the tree: but for leaves that were left alone, which may be weak."""
    assert_same(jax.tree.map(strong, packed.unpack()), jax.tree.map(strong, tree))
    unpacked, packed_from = [
        [*filter(eqx.is_array, jax.tree.leaves(each))] for each in (packed.unpack(), tree)
    ]
    for array, indices in zip(packed.arrays, packed.layout.members, strict=True):
        if len(indices) == 1:
            assert unpacked[indices[0]] is array is packed_from[indices[0]]
        else:
            assert not any(getattr(unpacked[index], "weak_type", False) for index in indices)


def holds_arrays(tree):
    return any(map(eqx.is_array, jax.tree.leaves(tree)))


def mlp(depth=2, width=8, key=0):
    """Not drawn by JAX, which would compile that for each shape."""
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
    assume(holds_arrays(tree))
    assert_unpacked(eqxjit.pack(tree, optimizer=None), tree)


@settings(max_examples=SCENARIOS // 14)
@given(
    st.lists(
        made(
            numbers,
            st.sampled_from(DTYPES),
            st.sampled_from([(), (1,), (0,), (2, 0), (3,), (2, 3)]),
            st.integers(0, 3),
        ),
        max_size=12,
    )
)
def test_random_arrays_of_all_dtypes_come_back(makes):
    tree = [jnp.asarray(make()) for make in makes]
    packed = eqxjit.pack(tree, optimizer=None)
    assert_unpacked(packed, tree)
    n_dtypes = len({leaf.dtype for leaf in tree})
    assert len(packed.arrays) <= n_dtypes * (1 + len(tree) // MAX_LEAVES_PER_BUFFER)


def test_one_buffer_a_dtype():
    tree = {"a": jnp.ones(2), "b": jnp.ones(3, int), "c": jnp.ones(()), "d": jnp.arange(2)}
    packed = eqxjit.pack(tree, optimizer=None)
    assert [(a.shape, a.dtype) for a in packed.arrays] == [((3,), "float32"), ((5,), "int32")]
    assert [*packed.arrays[0]] == [1, 1, 1]
    assert [*packed.arrays[1]] == [1, 1, 1, 0, 1]


def test_typed_keys():
    tree = {
        "key": jr.key(1),
        "keys": jr.split(jr.key(2), (2, 3)),
        "other": [jr.key(3, impl="rbg"), jr.split(jr.key(4, impl="rbg"), 2)],
        "old": jr.PRNGKey(5),
    }
    packed = eqxjit.pack(tree, optimizer=None)
    assert packed.arrays[0] is tree["key"]
    assert len(packed.arrays) == 5
    assert_unpacked(packed, tree)
    drawn = eqxjit.filter_jit(lambda p: jr.normal(p.unpack()["other"][1][0]))(packed)
    assert drawn == jr.normal(tree["other"][1][0])


def test_weak_types_become_strong():
    tree = [jnp.asarray(1.0), jnp.asarray(2.0), jnp.ones(3)]
    assert tree[0].weak_type
    assert not any(leaf.weak_type for leaf in eqxjit.pack(tree, optimizer=None).unpack())
    # Alone in its dtype, it would gain nothing.
    assert eqxjit.pack(tree[:1], optimizer=None).arrays[0] is tree[0]


def test_numpy_arrays_become_jax_arrays_of_the_dtype_under_jit():
    tree = [np.ones(2), np.float64(2), np.arange(2), np.ones(1, np.float32), np.int32(3)]
    packed = eqxjit.pack(tree, optimizer=None)
    assert_same(packed.unpack(), [jnp.asarray(leaf) for leaf in tree])
    tree[0][:] = 7
    assert [*packed.unpack()[0]] == [1, 1]


def test_x64():
    with jax.enable_x64(True):
        tree = [np.ones(2), jnp.arange(3), jnp.ones(2), jnp.ones(1, int)]
        packed = eqxjit.pack(tree, optimizer=None)
        assert [a.dtype for a in packed.arrays] == ["float64", "int64"]
        assert_unpacked(packed, tree)


def test_arrays_that_jax_does_not_take_stay():
    words, dates = np.array(["a", "b"]), np.array(["2020-01-01"], "datetime64[D]")
    objects, record = np.array([None, {}], object), np.zeros(2, [("a", int), ("b", float)])
    tree = [jnp.ones(2), words, dates, objects, record, jnp.ones(3)]
    packed = eqxjit.pack(tree, optimizer=None)
    assert len(packed.arrays) == 5
    assert all(a is b for a, b in zip(packed.unpack()[1:5], tree[1:5], strict=True))


def test_static_values_are_the_same_objects():
    activation, sizes = jax.nn.gelu, (1, (2, 3))
    tree = model("a name", sizes, activation)
    got = eqxjit.pack([tree, print, 3.5], optimizer=None).unpack()
    assert got[0].activation is activation
    assert got[0].sizes is sizes
    assert got[1] is print


# The first ones are what an optimizer without a state has for one.
@pytest.mark.parametrize("tree", [(), None, {}, [None, ()], jnp.ones(3), [jnp.ones(0)]])
def test_nothing_to_share(tree):
    packed = eqxjit.pack(tree, optimizer=None)
    assert_same(packed.unpack(), tree)
    assert all(a is b for a, b in zip(packed.arrays, jax.tree.leaves(tree), strict=False))


def test_large_leaves_are_left_alone():
    small, large = jnp.ones(64), jnp.ones(65)
    tree = [small, large, small + 1, large + 1]
    packed = eqxjit.pack(tree, max_leaf_bytes=256, optimizer=None)
    assert [a.shape for a in packed.arrays] == [(128,), (65,), (65,)]
    assert packed.arrays[1] is large
    assert packed.unpack()[1] is large
    assert_unpacked(packed, tree)
    assert len(eqxjit.pack(tree, max_leaf_bytes=0, optimizer=None).arrays) == 4
    assert len(eqxjit.pack(tree, max_leaf_bytes=10**9, optimizer=None).arrays) == 1
    assert eqxjit.pack(tree, max_leaf_bytes=0, optimizer=None).layout is not packed.layout


def test_a_bound_on_the_leaves_of_a_buffer():
    tree = [jnp.full(2, i) for i in range(2 * MAX_LEAVES_PER_BUFFER + 1)]
    packed = eqxjit.pack(tree, optimizer=None)
    assert 1 < len(packed.arrays) <= 3
    assert_unpacked(packed, tree)


@pytest.mark.parametrize("n_layers", [9, 11, 12])
def test_what_fits_one_buffer_is_in_one(n_layers):
    packed = eqxjit.pack([jnp.ones(shape) for shape in n_layers * [(4, 4), (4,)]], optimizer=None)
    assert [a.shape for a in packed.arrays] == [(20 * n_layers,)]


def test_packing_copies():
    leaf = jnp.ones(3)
    packed = eqxjit.pack([leaf, jnp.zeros(0)], optimizer=None)
    eqxjit.filter_jit(lambda p: p.repack(p.unpack()), donate="all")(packed)
    assert not leaf.is_deleted()


def test_state_of_batch_norm():
    norm, state = nodes.batch_norm()
    x = jr.normal(jr.key(0), (4, 2))

    def loss(norm, state, x):
        out, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            x, state
        )
        return jnp.sum(out**3), state

    def packed_loss(params, packed, x):
        value, state = loss(params.unpack(), packed.unpack(), x)
        return value, packed.repack(state)

    plain = eqxjit.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))
    (value, new), gradient = plain(norm, state, x)
    step = eqxjit.filter_jit(eqx.filter_value_and_grad(packed_loss, has_aux=True))
    got = warm(step, eqxjit.pack(norm, optimizer=None), eqxjit.pack(state, optimizer=None), x)
    (packed_value, packed_new), packed_gradient = got
    pairs = zip(
        arrays((packed_value, packed_new.unpack(), packed_gradient.unpack())),
        arrays((value, new, gradient)),
        strict=True,
    )
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# --- The layout -------------------------------------------------------------------------------


def test_equal_trees_share_one_layout():
    one, other = eqxjit.pack(mlp(key=0), optimizer=None), eqxjit.pack(mlp(key=1), optimizer=None)
    assert one.layout is other.layout
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert one.repack(other.unpack()).layout is one.layout


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (model(sizes=(1,)), model(sizes=(True,))),
        (model(sizes=(1,)), model(sizes=(1.0,))),
        (model(sizes=0.0), model(sizes=-0.0)),
        (model("a"), model("b")),
        (model(activation=lambda x: x), model(activation=lambda x: x)),
        ([jnp.ones(2), 1], [jnp.ones(2), True]),
        ({1: jnp.ones(2)}, {True: jnp.ones(2)}),
        ([jnp.ones(2)], [jnp.ones(3)]),
        ([jnp.ones(2)], [jnp.ones(2, int)]),
        ([jnp.ones(2), jnp.ones(2)], [jnp.ones((2, 1)), jnp.ones((1, 2))]),
        ([jr.key(0), jr.key(1)], [jr.PRNGKey(0), jr.PRNGKey(1)]),
    ],
)
def test_different_trees_have_different_layouts(one, other):
    one, other = eqxjit.pack(one, optimizer=None), eqxjit.pack(other, optimizer=None)
    assert one.layout is not other.layout
    assert one.layout != other.layout
    assert jax.tree.structure(one) != jax.tree.structure(other)


@pytest.mark.parametrize("filter_jit", FILTER_JITS)
def test_models_built_alike_do_not_retrace(filter_jit):
    traced = []

    @filter_jit
    def f(p, x):
        traced.append(1)
        return p.unpack()(x)

    for key in range(4):
        f(eqxjit.pack(mlp(key=key), optimizer=None), jnp.ones(3))
        f(pickle.loads(pickle.dumps(eqxjit.pack(mlp(key=key), optimizer=None))), jnp.ones(3))
    assert len(traced) == 1


class Listing(eqx.Module):
    """A model with a list in a static field."""

    weights: list
    options: list = eqx.field(static=True)

    def __call__(self, x):
        return self.weights[0] * x + len(self.options)


def test_static_values_are_a_snapshot():
    tree = Listing([jnp.ones(2), jnp.zeros(2)], ["a"])
    packed = eqxjit.pack(tree, optimizer=None)
    f = eqxjit.filter_jit(lambda p, x: p.unpack()(x))
    assert [*warm(f, packed, jnp.ones(2))] == [2, 2]
    tree.options.append("b")
    assert packed.unpack().options == ["a"]
    assert [*warm(f, packed, jnp.ones(2))] == [2, 2]
    assert [*warm(f, eqxjit.pack(tree, optimizer=None), jnp.ones(2))] == [3, 3]
    other = eqxjit.pack(Listing([jnp.ones(2), jnp.zeros(2)], ["a"]), optimizer=None)
    assert other.layout is packed.layout
    with pytest.raises(ValueError, match=r"`tree.options` was list of 1, is list of 2"):
        packed.repack(tree)


def test_layouts_and_what_they_hold_die():
    class Local:
        """Compared by identity."""

    static = Local()
    tree = [jnp.ones(2), jnp.ones(3), static]
    packed = eqxjit.pack(tree, optimizer=None)
    references = [weakref.ref(packed.layout), weakref.ref(static), weakref.ref(packed.arrays[0])]
    del packed, tree, static
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_a_layout_dies_that_its_own_static_values_refer_to():
    # A class that equals its like, and whose instance holds what was made of it.
    def local(x):
        return held

    held = eqxjit.pack([jnp.ones(2), jnp.ones(3), local], optimizer=None)
    reference = weakref.ref(held.layout)
    del held, local
    gc.collect()
    assert reference() is None


def test_functions_under_which_a_packed_ran_die():
    def run():
        f = eqxjit.filter_jit(lambda p, x: p.repack(jax.tree.map(lambda a: a + x, p.unpack())))
        marker = nodes.Plain()
        packed = eqxjit.pack([jnp.ones(2), jnp.ones(3)], optimizer=None)
        f.__wrapped__.marker = marker
        warm(f, packed, jnp.ones(()))
        return weakref.ref(marker)

    reference = run()
    gc.collect()
    assert reference() is None


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
    packed = eqxjit.pack(tree, optimizer=None)
    for power in range(1, 6):
        before = packed
        packed, weight = step(packed, jnp.asarray(2.0))
        assert_same(weight, tree.layers[0].weight * 2.0**power)
        assert all(a.is_deleted() == donate for a in before.arrays)
    assert packed.layout is eqxjit.pack(tree, optimizer=None).layout


def twin_of(packed, how):
    if how == "pickle":
        return pickle.loads(pickle.dumps(packed))
    if how == "deepcopy":
        return copy.deepcopy(packed)
    if how == "copy":
        return copy.copy(packed)
    if how == "flattened":
        leaves, treedef = jax.tree.flatten(packed)
        return jax.tree.unflatten(treedef, leaves)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, packed)
    file.seek(0)
    like = eqxjit.pack(
        jax.tree.map(lambda a: a + 1 if eqx.is_array(a) else a, packed.unpack()), optimizer=None
    )
    return eqx.tree_deserialise_leaves(file, like)


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "copy", "flattened", "serialised"])
def test_copies_have_the_same_layout(how):
    listing = Listing([jnp.ones(2), jnp.zeros(2)], ["a"])
    keys = [jr.key(0), jr.key(1), jr.key(2, impl="rbg")]
    # What neither Equinox nor pickle writes is left out.
    others = {"serialised": [], "pickle": keys}.get(how, [*keys, jax.nn.relu])
    tree = [mlp(), {"b": jnp.ones(2, int), "a": (jnp.zeros(2), 2)}, listing, others]
    packed = eqxjit.pack(tree, optimizer=None)
    twin = twin_of(packed, how)
    assert twin.layout is packed.layout
    assert eqx.tree_equal(packed, twin)
    assert_same(twin.unpack(), packed.unpack())


def test_filtered_and_combined():
    tree = [jnp.ones(2), jnp.arange(3), jnp.ones(3), jnp.arange(2)]
    packed = eqxjit.pack(tree, optimizer=None)
    floats, others = eqx.partition(packed, eqx.is_inexact_array)
    assert_same(floats.unpack(), [tree[0], None, tree[2], None])
    assert_same(others.unpack(), [None, tree[1], None, tree[3]])
    assert_same(eqx.combine(floats, others).unpack(), tree)


def test_evaluated_shapes():
    shapes = eqx.filter_eval_shape(lambda key: eqxjit.pack(mlp(key=0), optimizer=None), jr.key(0))
    assert shapes.layout is eqxjit.pack(mlp(), optimizer=None).layout
    model = eqx.filter_eval_shape(lambda p: p.unpack(), shapes)
    assert model.layers[0].weight.shape == (8, 3)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ([jnp.ones(10), jnp.ones(())], "Packed(2 arrays in 1 buffer, 44 B)"),
        ([jnp.ones(500)] * 2 + [jnp.ones(2, int)] * 2, "Packed(4 arrays in 2 buffers, 4,016 B)"),
        (
            [jnp.ones(2), jnp.ones(2), jnp.ones(300_000)],
            "Packed(2 arrays in 1 buffer, 1 as it is, 1,200,016 B)",
        ),
        ([jnp.ones(2), jnp.ones(2, int)], "Packed(0 arrays in 0 buffers, 2 as they are, 16 B)"),
        (None, "Packed(0 arrays in 0 buffers, 0 B)"),
    ],
)
def test_printed(tree, text):
    packed = eqxjit.pack(tree, optimizer=None)
    assert repr(packed) == str(packed) == text
    assert repr(eqx.filter(packed, lambda _: False)).startswith(text.rpartition(", ")[0])
    assert "0x" not in repr(packed.layout)


# --- Repacking --------------------------------------------------------------------------------


def test_repack():
    packed = eqxjit.pack(mlp(), optimizer=None)
    new = jax.tree.map(lambda a: a + 1 if eqx.is_array(a) else a, mlp())
    again = packed.repack(new)
    assert again.layout is packed.layout
    assert_same(again.unpack(), new)
    assert_same(packed.unpack(), mlp())


def with_bias(bias):
    return lambda model: eqx.tree_at(lambda m: m.layers[1].bias, model, bias)


def with_layers(change):
    return lambda model: eqx.tree_at(lambda m: m.layers, model, change(model.layers))


def with_depth(model):
    object.__setattr__(model, "depth", 3)
    return model


BIAS = ["`tree.layers[1].bias` was float32[8]"]


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (with_bias(jnp.ones(9)), [*BIAS, "float32[9]"]),
        (with_bias(jnp.ones(8, int)), ["`tree.layers[1].bias` was float32, is int32"]),
        (with_bias(jr.split(jr.key(0), 8)), ["`tree.layers[1].bias` was float32, is key<fry>"]),
        (with_bias(1.5), [*BIAS, "1.5"]),
        (with_bias(None), [*BIAS, "None"]),
        (with_bias([jnp.ones(8)]), [*BIAS, "is list of 1"]),
        (with_layers(lambda layers: layers[:2]), ["`tree.layers` was tuple of 3, is tuple of 2"]),
        (with_layers(lambda layers: 2 * layers), ["`tree.layers` was tuple of 3, is tuple of 6"]),
        (with_layers(list), ["`tree.layers` was tuple of 3, is list of 3"]),
        (lambda m: mlp(width=9), ["`tree.layers[0].weight` was float32[8,3]", "float32[9,3]"]),
        (lambda m: m.layers[0], ["`tree` was MLP, is Linear"]),
        (lambda m: None, ["`tree` was MLP, is None"]),
        (lambda m: eqx.tree_at(lambda m: m.activation, m, jax.nn.tanh), ["`tree.activation`"]),
        (with_depth, ["`tree.depth` was 2", "is 3"]),
        (lambda m: eqxjit.pack(m, optimizer=None), ["`tree` was MLP, is Packed"]),
    ],
)
def test_wrong_repacks_are_refused(change, texts):
    packed = eqxjit.pack(mlp(), optimizer=None)
    arrays = packed.arrays
    with pytest.raises(ValueError, match=r"`repack` takes a tree of the same structure") as caught:
        packed.repack(change(mlp()))
    for text in texts:
        assert text in str(caught.value)
    # Inside a jitted function, likewise.
    with pytest.raises(ValueError, match=r"`repack` takes a tree of the same structure"):
        eqxjit.filter_jit(lambda p: p.repack(change(p.unpack())))(packed)
    assert packed.arrays is arrays
    assert_same(packed.unpack(), mlp())


def test_a_tree_that_is_too_large_to_be_described():
    packed = eqxjit.pack([jnp.ones(2), *[1] * 50_000], optimizer=None)
    with pytest.raises(ValueError, match="differences:\n    somewhere in a large tree"):
        packed.repack([jnp.ones(2), *[1] * 49_999, 2])


def test_static_values_are_compared_by_type():
    packed = eqxjit.pack(model(sizes=(1,)), optimizer=None)
    with pytest.raises(ValueError, match=r"`tree\.sizes\[0\]` was 1, is True"):
        packed.repack(model(sizes=(True,)))
    with pytest.raises(ValueError, match=r"tree\[1\]` was 1, is 1.0"):
        eqxjit.pack([jnp.ones(2), 1], optimizer=None).repack([jnp.ones(2), 1.0])


@settings(max_examples=SCENARIOS // 14)
@given(trees, trees)
def test_random_repacks(make, make_other):
    tree, other = make(), make_other()
    assume(holds_arrays(tree) and holds_arrays(other))
    packed = eqxjit.pack(tree, optimizer=None)
    same = eqxjit.pack(other, optimizer=None).layout is packed.layout
    before = packed.unpack()
    try:
        again = packed.repack(other)
    except ValueError:
        assert not same
    else:
        # Static values stay those of the layout, which may be equal objects.
        for got, leaf in zip(jax.tree.leaves(again.unpack()), jax.tree.leaves(other), strict=True):
            assert not eqx.is_array(leaf) or same_leaf(strong(got), strong(leaf))
    after = packed.unpack()
    pairs = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    assert all(same_leaf(a, b) for a, b in pairs)


# --- Mistakes ---------------------------------------------------------------------------------


def test_forgetting_to_unpack():
    packed = eqxjit.pack(mlp(), optimizer=None)
    with pytest.raises(AttributeError, match=r"packed\.unpack\(\)\.layers"):
        packed.layers  # noqa: B018
    with pytest.raises(TypeError, match=r"packed\.unpack\(\)\(\.\.\.\)"):
        packed(jnp.ones(3))
    with pytest.raises(TypeError, match=r"packed\.unpack\(\)\(\.\.\.\)"):
        eqxjit.filter_jit(lambda p, x: jax.vmap(p)(x))(packed, jnp.ones((2, 3)))
    with pytest.raises(AttributeError, match=r"packed\.unpack\(\)\.layers"):
        eqx.tree_at(lambda p: p.layers[0].weight, packed, jnp.ones(3))
    as_dict = eqxjit.pack({"w": jnp.ones(2)}, optimizer=None)
    with pytest.raises(TypeError, match=r"packed\.unpack\(\)\['w'\]"):
        as_dict["w"]
    with pytest.raises(TypeError, match=r"packed\.unpack\(\)\["):
        iter(as_dict).__next__()
    assert not hasattr(packed, "__array__")
    assert not hasattr(packed, "shape")


def test_a_packed_in_the_place_of_an_array():
    packed, linear = eqxjit.pack(mlp(), optimizer=None), eqx.nn.Linear(3, 3, key=jr.key(0))
    with pytest.raises(TypeError, match=r"class .eqxjit\.Packed."):
        jnp.sum(packed)
    for compute in (linear, lambda p: 2 * p, lambda p: jnp.ones(3) + p, lambda p: p @ jnp.ones(3)):
        with pytest.raises(TypeError, match="Packed"):
            compute(packed)
    assert packed != 1


def test_a_structure_that_changes_in_a_loop():
    """JAX's error shows what was there, and what is."""
    packed = eqxjit.pack([jnp.ones(2), jnp.ones(3)], optimizer=None)
    shorter = eqxjit.pack([jnp.ones(1), jnp.ones(3)], optimizer=None)
    told = r"float32\[2\], float32\[3\](.|\n)*float32\[1\], float32\[3\]"
    with pytest.raises(TypeError, match=told):
        jax.lax.fori_loop(0, 2, lambda _, __: shorter, packed)


def test_an_ensemble_is_printed_with_all_its_bytes():
    ensemble = eqx.filter_vmap(lambda _: eqxjit.pack([jnp.ones(3), jnp.ones(2)], optimizer=None))(
        jnp.arange(5)
    )
    assert repr(ensemble) == "Packed(2 arrays in 1 buffer, 100 B)"


def test_inference_mode_is_of_the_unpacked():
    """It looks for attributes, and would find none."""
    packed, without = (
        eqxjit.pack([mlp(), eqx.nn.Dropout(0.5)], optimizer=None),
        eqxjit.pack(mlp(), optimizer=None),
    )
    for switch in (
        lambda: eqx.nn.inference_mode((packed, None)),
        lambda: eqx.nn.inference_mode(packed, value=False),
        lambda: eqx.tree_at(lambda p: p.inference, packed, True),
        lambda: hasattr(packed, "inference"),
    ):
        with pytest.raises(TypeError, match=r"inference_mode\(packed\.unpack\(\)\)"):
            switch()
    unpacked = eqx.nn.inference_mode(packed.unpack())
    assert eqxjit.pack(unpacked, optimizer=None).unpack()[1].inference
    assert not hasattr(without, "inference")
    assert eqx.nn.inference_mode(without).layout is without.layout
    with pytest.raises(AttributeError, match=r"packed\.unpack\(\)\.inference"):
        without.inference  # noqa: B018


def test_unpacking_what_is_no_longer_a_packed_tree():
    packed = eqxjit.pack(mlp(), optimizer=None)
    with pytest.raises(ValueError, match=r"takes apart arrays.*holds True"):
        jax.tree.map(lambda _: True, packed).unpack()
    with pytest.raises(ValueError, match=r"last axis.* holds Array"):
        jax.tree.map(lambda a: a[:1], packed).unpack()


@pytest.mark.parametrize("size", [1.5, "1", None, True])
def test_sizes_that_are_no_integers(size):
    with pytest.raises(TypeError, match="max_leaf_bytes"):
        eqxjit.pack([], max_leaf_bytes=size, optimizer=None)


def test_a_tree_that_contains_itself():
    tree = []
    tree.append(tree)
    with pytest.raises(ValueError, match="contains itself"):
        eqxjit.pack(tree, optimizer=None)


@pytest.mark.parametrize("tree", [3, 1.5, "text", print, [None, 3], jax.nn.relu, [{"lr": 0.1}]])
def test_nothing_to_pack(tree):
    with pytest.raises(ValueError, match="takes a pytree of arrays, and there is none in"):
        eqxjit.pack(tree, optimizer=None)


def test_packing_twice():
    packed = eqxjit.pack(mlp(), optimizer=None)
    for tree, path in [(packed, "tree"), ([1, {"a": (packed,)}], r"tree\[1\]\['a'\]\[0\]")]:
        with pytest.raises(ValueError, match=f"`{path}` is packed already.*`unpack` it first"):
            eqxjit.pack(tree, optimizer=None)
    again = eqxjit.pack(packed.unpack(), max_leaf_bytes=0, optimizer=None)
    assert_same(again.unpack(), packed.unpack())


def test_deleted_arrays():
    leaf = jnp.ones(3)
    leaf.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        eqxjit.pack([leaf, jnp.ones(2)], optimizer=None)
