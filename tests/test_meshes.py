"""On every mesh the same: loss and gradient of the policy, of adapters and of a critic, and what the policy samples."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

from jaxpg import algorithms
from jaxpg.models import Config, Model, lora
from jaxpg.parallel import sharding
from jaxpg.rollout import policies
from jaxpg.sampling import Sampling, sample
from jaxpg.training import train_state
from jaxpg.training.update import adamw, make_update
from jaxpg.types import Batch

MESHES = ("data=8", "data=2,fsdp=4", "tensor=8")
ROWS, LENGTH, VOCABULARY = 16, 12, 32


SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "mlp_size": 64}


def make_model(**change):
    return Model(Config(vocab_size=VOCABULARY, max_length=LENGTH, tie_embeddings=False, **(SIZES | change)))


def make_batch():
    draw = np.random.default_rng(0)
    mask = np.arange(LENGTH) < draw.integers(4, LENGTH + 1, (ROWS, 1))
    normal = draw.normal(size=(3, ROWS, LENGTH)).astype(np.float32)
    return Batch(
        tokens=draw.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32),
        token_mask=mask,
        action_mask=mask & (np.arange(LENGTH) > 2),
        advantages=normal[0],
        log_probs=normal[1] / 10 - 3.4,
        values=normal[2],
        returns=normal[1],
    )


def actor():
    model = make_model()
    return model.init(jax.random.key(0)), algorithms.grpo(), policies.actor(model, Sampling()), None


def adapters():
    model = make_model()
    params = lora.attach(model.init(jax.random.key(0)), lora.init(jax.random.key(1), model.config, rank=4))
    params = jax.tree.map(lambda x: x + 0.01, params)  # b is 0 at first, and with it the gradient of a
    return params, algorithms.dr_grpo(max_new_tokens=LENGTH), policies.actor(model, Sampling()), lora.is_adapter


def critic():
    model = make_model()
    params = model.init(jax.random.key(0))
    params = {"actor": params, "critic": policies.init_critic(jax.random.key(1), model, params, kind="copy")}
    return params, algorithms.ppo(), policies.actor_critic(model, Sampling()), None


def one_step(spec, build):
    """Loss and gradient on a mesh, the gradient as what plain descent of rate 1 takes away."""
    params, algorithm, policy, trainable = build()
    devices = jax.devices()[:1] if spec == "data=1" else jax.devices()
    mesh = sharding.make_mesh(spec, devices=devices)
    optimizer = optax.sgd(1.0)
    state = train_state.init(params, optimizer, jax.random.key(0), trainable=trainable)
    places = sharding.shardings(mesh, state)
    loss_fn = algorithms.make_loss_fn(algorithm, policy)
    update = make_update(loss_fn, optimizer, num_microbatches=2, trainable=trainable)
    with jax.set_mesh(mesh):
        batch = sharding.put_rows(mesh, make_batch())
        step = jax.jit(update, out_shardings=(places, sharding.replicated(mesh)))
        after, metrics = step(jax.device_put(state, places), batch)
    assert jax.tree.all(jax.tree.map(lambda x, place: x.sharding == place, after, places))
    gradient = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, after.params)
    return float(metrics["loss"].mean), gradient


@pytest.mark.parametrize("build", [actor, adapters, critic])
@pytest.mark.parametrize(
    "specs",
    [("data=2,fsdp=2,tensor=2",), pytest.param(MESHES, marks=pytest.mark.exhaustive)],  # all axes at once, and the rest
    ids=["mixed", "rest"],
)
def test_loss_and_gradient_are_those_of_one_device(build, specs, capfd):
    loss, gradient = one_step("data=1", build)
    largest = max(float(np.abs(g).max()) for g in jax.tree.leaves(gradient))
    assert largest > 1e-3
    for spec in specs:
        found, there = one_step(spec, build)
        np.testing.assert_allclose(found, loss, rtol=1e-5, err_msg=spec)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * largest), there, gradient)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("unroll", "specs"),
    [
        (True, ("data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2")),
        pytest.param(True, MESHES[1:], marks=pytest.mark.exhaustive),
        pytest.param(False, ("data=2,fsdp=2,tensor=2",), marks=pytest.mark.exhaustive),  # the default on accelerators
    ],
)
def test_samples_are_those_of_one_device(unroll, specs, key):
    """XLA's partitioner may trip over unrolled layers, the default on CPUs, where it does not over scanned ones."""
    model = make_model()
    params = model.init(jax.random.key(0))
    params |= {"head": params["head"] * 12}  # far from uniform
    prompts = np.random.default_rng(0).integers(2, VOCABULARY, (8, 4)).astype(np.int32)
    mask = np.arange(4) >= (np.arange(8) % 3)[:, None]
    draw = jax.jit(
        partial(sample, model=model, max_new_tokens=LENGTH - 4, stop_tokens=(1,), samples_per_prompt=2, unroll=unroll)
    )
    alone = draw(params, prompts, mask, key)
    assert len(np.unique(alone.tokens[:, 4:])) > 10
    for spec in specs:
        mesh = sharding.make_mesh(spec)
        with jax.set_mesh(mesh):
            placed = jax.device_put(params, sharding.shardings(mesh, params))
            found = draw(placed, *sharding.put_rows(mesh, (prompts, mask)), key)
        np.testing.assert_array_equal(found.tokens, alone.tokens, err_msg=spec)
        np.testing.assert_allclose(found.plain_log_probs, alone.plain_log_probs, atol=1e-5, err_msg=spec)


@pytest.mark.parametrize("shape", [(32,), (8, 32), (8, 4, 32)])
def test_hidden_states_of_any_rank_have_logits_on_a_mesh(shape):
    model = make_model()
    params, hidden = model.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), shape)
    expected = model.unembed(params, hidden)
    with jax.set_mesh(sharding.make_mesh("data=2,fsdp=2,tensor=2")):
        found = jax.jit(model.unembed)(params, hidden)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def peak_memory(spec):
    """Bytes that a device needs for an update of AdamW: what it is given and what it holds meanwhile."""
    model, optimizer, mesh = (
        make_model(hidden_size=256, head_dim=32, mlp_size=1024, num_layers=8, remat=True),
        adamw(1e-3),
        sharding.make_mesh(spec),
    )
    state = jax.eval_shape(lambda: train_state.init(model.init(jax.random.key(0)), optimizer, jax.random.key(0)))
    places = sharding.shardings(mesh, state)
    state = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places)
    update = make_update(algorithms.make_loss_fn(algorithms.grpo(), policies.actor(model, Sampling())), optimizer)
    with jax.set_mesh(mesh):
        step = jax.jit(update, donate_argnums=0, out_shardings=(places, sharding.replicated(mesh)))
        found = step.lower(state, sharding.put_rows(mesh, make_batch())).compile().memory_analysis()
    return found.argument_size_in_bytes + found.temp_size_in_bytes


def test_memory_falls_with_fsdp():
    """Parameters, gradients and moments are nearly all of it here, and each device has an eighth of them."""
    alone, shared = peak_memory("data=8"), peak_memory("fsdp=8")
    assert alone / 8 <= shared < 1.15 * alone / 8
