"""Without each private name in turn, eqxjit still imports and computes the same, only slower."""

import inspect
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.tree_util import tree_structure

from eqxjit import _compat
from tests.support.hiding import imported_names, is_private
from tests.support.processes import run

PROGRAM = """
    import sys

    from tests.support.hiding import import_without

    import_without(sys.argv[1])
    import eqxjit
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    x = jnp.ones(2)

    def step(model, x, n):
        assert eqxjit.currently_jitting()
        return jax.tree.map(lambda leaf: leaf * n if eqx.is_array(leaf) else leaf, model), model(x)

    ours = eqxjit.filter_jit(step)
    for n in (1, 2.0, True):
        theirs = eqx.filter_jit(lambda model, x: step(model, x, n))(model, x)
        for _ in range(4):
            assert eqx.tree_equal(ours(model, x, n), theirs)
    assert ours.cache_info().traces == 3
    assert not eqxjit.currently_jitting()

    checked = eqxjit.filter_jit(lambda x: eqx.error_if(x, x < 0, "negative"))
    for _ in range(4):
        checked(x)
        try:
            checked(-x)
        except Exception as error:
            assert "negative" in str(error)
        else:
            raise AssertionError("no error")
    eqx.clear_caches()
    checked(x)
    print("fine")
"""

PRIVATE = sorted(filter(is_private, imported_names(inspect.getsource(_compat))))


@pytest.mark.parametrize("hidden", ["nothing", *PRIVATE])
@pytest.mark.slow
def test_without_a_private_name(hidden):
    assert run(PROGRAM, hidden).endswith("fine\n")


def test_private_names_are_imported_in_one_file():
    assert {"jax._src.core", "equinox._jit._JitWrapper", "jaxlib.mlir.ir"} <= set(PRIVATE)
    for file in pathlib.Path(_compat.__file__).parent.rglob("*.py"):
        if file.name != "_compat.py":
            assert not [*filter(is_private, imported_names(file.read_text()))], file.name


TREES = [
    1,
    None,
    (1, (2, [3, {}])),
    {"b": 1, "a": {"c": None}},
    eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0)),
    optax.adam(1e-3).init({"w": jnp.ones(2)}),
    eqx.Partial(max, 2, key=3),
]


def test_both_ways_to_read_a_treedef_tell_the_same_structures_apart():
    by_walking = [_compat._rows_by_walking(tree_structure(tree)) for tree in TREES]
    by_pickling = [_compat._rows_by_pickling(tree_structure(tree)) for tree in TREES]
    for walked, pickled in zip(by_walking, by_pickling, strict=True):
        assert [row[1] for row in walked] == [row[1] for row in pickled]
    for i, one in enumerate(by_walking):
        for j, other in enumerate(by_walking):
            assert (one == other) is (i == j)


def test_the_faster_way_to_read_a_treedef_is_in_use():
    assert _compat.treedef_rows is _compat._rows_by_pickling


@pytest.mark.parametrize("tree", [tree for tree in TREES if tree != 1])
def test_both_ways_to_get_at_the_root_of_a_treedef_agree(tree):
    treedef = tree_structure(tree)
    root = _compat.root_treedef(treedef)
    assert root == _compat._root_by_flattening(treedef) == _compat._root_by_node_data(treedef)
    assert root.node_data() == treedef.node_data()
    assert [*map(str, root.children())] == ["PyTreeDef(*)"] * len(treedef.children())
    if treedef.num_nodes == root.num_nodes:
        assert root == treedef


@pytest.mark.parametrize("tree", TREES)
def test_a_treedef_is_given_other_metadata(tree, monkeypatch):
    treedef = tree_structure(tree)
    assert _compat.with_metadata(treedef, lambda metadata: metadata) == treedef

    def flat(metadata):
        is_norms = isinstance(metadata, tuple) and (3, 2) in metadata
        return (
            tuple([(6,) if part == (3, 2) else part for part in metadata]) if is_norms else metadata
        )

    norm_and_tree = tree_structure({"norm": eqx.nn.LayerNorm((3, 2)), "tree": tree})
    changed = _compat.with_metadata(norm_and_tree, flat)
    made = changed.unflatten([0] * changed.num_leaves)
    assert made["norm"].shape == (6,)
    assert tree_structure(made["tree"]) == treedef
    monkeypatch.setattr(_compat, "CAN_ASSEMBLE", False)
    assert _compat.with_metadata(treedef, lambda metadata: None) is treedef


def test_the_way_that_makes_no_node_is_in_use():
    assert _compat.root_treedef is _compat._root_by_node_data
