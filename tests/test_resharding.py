"""The sampler on a mesh of its own: the same samples, and no weight is gathered while it decodes."""

from functools import partial

import jax
import numpy as np
import pytest
from launching import ROOT, load

from jaxpg.models import Config, Model
from jaxpg.parallel import sharding
from jaxpg.sampling import sample
from jaxpg.sampling.resharding import make_cast, on_mesh

hlo = load(ROOT / "tools" / "hlo.py")
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 64}
NEW, ROWS = 6, 8


def drawing(dtype):
    model = Model(Config(vocab_size=16, max_length=16, compute_dtype=dtype, tie_embeddings=False, **SIZES))
    draw = jax.jit(partial(sample, model=model, max_new_tokens=NEW, stop_tokens=(1,), samples_per_prompt=2))
    params = model.init(jax.random.key(0))
    params = params | {"head": params["head"] * 40}  # far from uniform
    prompts = np.asarray(jax.random.randint(jax.random.key(1), (ROWS, 4), 2, 16))
    return model, draw, params, (prompts, np.ones(prompts.shape, bool))


@pytest.mark.parametrize(
    ("dtype", "sampled"), [("float32", None), ("bfloat16", None), ("float32", "tensor=2,data=4"), ("float32", "data=8")]
)
def test_the_samples_are_those_of_the_trainers_mesh(dtype, sampled, key):
    model, draw, params, prompts = drawing(dtype)
    trained = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    sampled = sharding.folded(trained) if sampled is None else sharding.make_mesh(sampled)
    alone = draw(params, *prompts, key)
    if dtype == "bfloat16":  # whose sums over tensor round otherwise: then the very same mesh, without a cast before
        with jax.set_mesh(sampled):
            alone = draw(jax.device_put(params, sharding.shardings(sampled, params)), *prompts, key)
    params = jax.device_put(params, sharding.shardings(trained, params))
    moved = on_mesh(draw, model=model, trained=trained, sampled=sampled)
    with jax.set_mesh(trained):
        rows = sharding.put_rows(trained, prompts)
        found = moved(params, *rows, key)
        compiled = draw._cache_size()
        moved(params, *rows, jax.random.key(5))
        assert draw._cache_size() == compiled, "the next rollout compiles nothing"
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    assert len(np.unique(found.tokens[:, 4:])) > 5
    np.testing.assert_allclose(found.log_probs, alone.log_probs, atol=1e-5)
    assert all(x.sharding == sharding.rows(trained) for x in jax.tree.leaves(found))


def test_only_what_is_multiplied_is_cast():
    model, _, params, _ = drawing("bfloat16")
    dtypes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): str(x.dtype)
        for path, x in jax.tree_util.tree_leaves_with_path(make_cast(model, sharding.make_mesh("data=8"))(params))
    }
    kept = {name for name, dtype in dtypes.items() if dtype == "float32"}
    assert len(kept) == 3 and all("norm" in name for name in kept), dtypes


def test_a_sampler_on_the_trainers_mesh_is_left_alone():
    mesh = sharding.make_mesh("data=4,tensor=2")
    assert sharding.folded(mesh) is mesh
    assert on_mesh(print, model=None, trained=mesh, sampled=sharding.make_mesh("data=4,tensor=2")) is print
    assert sharding.folded(sharding.make_mesh("data=2,fsdp=2,tensor=2")) == mesh


def test_no_weight_is_gathered_for_every_token(key):
    """On the trainer's mesh it is: the test knows the difference."""
    trained = sharding.make_mesh("fsdp=8")
    received = {}
    for name, mesh in (("trained", trained), ("folded", sharding.folded(trained))):
        _, draw, params, prompts = drawing("float32")
        params = jax.device_put(params, sharding.shardings(mesh, params))
        with jax.set_mesh(mesh):
            text = draw.lower(params, *sharding.put_rows(mesh, prompts), key).compile().as_text()
        received[name] = sum(
            one.bytes * one.times for one in hlo.Program(text, assumed=NEW).collectives(mesh.shape) if one.times > 1
        )
    assert received["folded"] < 0.1 * received["trained"], received  # a few words a row, of the scatters
