"""The mesh and its rules: what fits is placed, what does not is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpg.models import Config, Model
from jaxpg.parallel import sharding


@pytest.mark.parametrize(
    "spec, shape",
    [
        ("data=-1", (8, 1, 1)),
        ("data=2,fsdp=2,tensor=2", (2, 2, 2)),
        ("fsdp=-1, tensor=2", (1, 4, 2)),
        ("tensor=8", (1, 1, 8)),
    ],
)
def test_mesh_from_text(spec, shape):
    mesh = sharding.make_mesh(spec)
    assert mesh.axis_names == ("data", "fsdp", "tensor") and mesh.devices.shape == shape
    assert sharding.row_shards(mesh) == shape[0] * shape[1]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("data=3", "asks for 3 devices, this process sees 8"),
        ("data=-1,tensor=3", "asks for a multiple of 3 devices"),
        ("model=2", "there is no axis 'model'"),
        ("data=-1,fsdp=-1", "only one axis may be -1"),
        ("data=two", "data='two' must be a positive integer"),
        ("data=0", "data='0' must be"),
        ("data", "data='' must be"),
        ("", "asks for 1 devices, this process sees 8"),
        ("data=4,data=2", "data stands there twice"),
    ],
)
def test_impossible_meshes_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(spec)


def test_rules_reach_every_matrix_and_leave_the_norms_whole():
    config = Config(
        vocab_size=16,
        hidden_size=8,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        mlp_size=16,
        max_length=8,
        tie_embeddings=False,
    )
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    shapes = jax.eval_shape(Model(config).init, jax.random.key(0))
    places = sharding.shardings(mesh, shapes)
    for (path, shape), place in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(places), strict=True):
        is_norm = "norm" in jax.tree_util.keystr(path)
        assert (place.spec == PartitionSpec()) == is_norm
        assert np.prod(place.shard_shape(shape.shape)) == shape.size // (1 if is_norm else 4)


def test_an_indivisible_dimension_is_named():
    mesh = sharding.make_mesh("tensor=8")
    with pytest.raises(ValueError, match=r"attention/query has shape .* dimension of 4 is not divisible .* tensor=8"):
        sharding.shardings(mesh, {"attention": {"query": jnp.zeros((2, 8, 4, 4))}})


def test_rows_are_spread():
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    placed = sharding.put_rows(mesh, np.arange(12).reshape(12, 1))
    assert placed.sharding.shard_shape(placed.shape) == (3, 1)
    np.testing.assert_array_equal(placed, np.arange(12).reshape(12, 1))
