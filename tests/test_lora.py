"""Adapters: nothing at first, merged equals unmerged, the base frozen bit for bit, and PEFT's files read back."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxpg.algorithms.algorithm import Algorithm, Critic, make_loss_fn
from jaxpg.estimators import aggregate, logprobs, losses, value_losses
from jaxpg.models import Config, Model, heads, hf, lora, num_parameters
from jaxpg.parallel import sharding
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.sampling import sample
from jaxpg.training import train_state
from jaxpg.training.update import adamw, make_update
from jaxpg.types import Batch

FIXTURES = Path(__file__).parent / "fixtures"
SIZES = {"vocab_size": 16, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
CONFIG = Config(**SIZES, head_dim=4, mlp_size=16, max_length=16, lora_alpha=6.0)
MODEL = Model(CONFIG)
LOGITS = jax.jit(MODEL.logits)
TOKENS = jax.random.randint(jax.random.key(9), (4, 8), 0, 16)
MASK = jnp.arange(8) >= jnp.array([0, 1, 2, 0])[:, None]
TRAINED = ("attention/query", "attention/out", "mlp/down")
ALGORITHM = Algorithm(
    advantage=None,
    loss=lambda log_probs, batch: losses.reinforce(log_probs, batch.advantages),
    aggregate=aggregate.token_mean,
    critic=Critic(None, lambda values, batch: value_losses.squared(values, batch.returns), coef=1.0),
)
BATCH = Batch(
    tokens=TOKENS,
    token_mask=MASK,
    action_mask=jnp.broadcast_to(jnp.arange(8) >= 4, (4, 8)),
    advantages=jax.random.normal(jax.random.key(10), (4, 8)),
    returns=jnp.ones((4, 8)),
)
OPTIMIZER = adamw(1e-2, weight_decay=0.1)


INIT = jax.jit(MODEL.init)


def base_params():
    return INIT(jax.random.key(0))


def adapted(*, targets=None, rank=3, moved=True):
    """Parameters with adapters which, where `moved`, do something."""
    adapters = lora.init(jax.random.key(1), CONFIG, rank=rank, targets=targets)
    if moved:
        leaves, tree = jax.tree.flatten(adapters)
        keys = jax.random.split(jax.random.key(2), len(leaves))
        leaves = [x + 0.2 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
        adapters = jax.tree.unflatten(tree, leaves)
    return lora.attach(base_params(), adapters)


def actor_critic(**keywords):
    """An adapted actor, and a critic whose head alone is trained."""
    trunk = jax.tree.map(jnp.copy, base_params())
    return {
        "actor": adapted(targets=TRAINED, moved=False),
        "critic": {"trunk": trunk, "head": heads.init(jax.random.key(3), 16, **keywords)},
    }


def trainable(path):
    return lora.is_adapter(path) or path.startswith("critic/head/")


def policy(params, batch):
    logits = MODEL.logits(params["actor"], batch.tokens, batch.token_mask)
    hidden = MODEL.hidden(params["critic"]["trunk"], batch.tokens, batch.token_mask)
    values = heads.values(params["critic"]["head"], hidden)
    return logprobs.token_log_probs(logits, batch.tokens), logprobs.entropy(logits), values


UPDATE = make_update(make_loss_fn(ALGORITHM, policy), OPTIMIZER, trainable=trainable, num_microbatches=2)


STEP = jax.jit(UPDATE)


def init_state():
    return train_state.init(actor_critic(), OPTIMIZER, jax.random.key(0), trainable=trainable)


def test_new_adapters_change_nothing():
    params = adapted(moved=False)
    np.testing.assert_array_equal(LOGITS(params, TOKENS, MASK), LOGITS(base_params(), TOKENS, MASK))
    a = params["lora"]["layers"]["attention"]["out"]["a"]
    assert a.shape == (2, 4, 4, 3) and 0.5 < jnp.std(a) * 4 < 1.5  # N(0, 1/fan_in), of 16 inputs


def test_the_base_is_the_model_before_and_no_copy():
    params = adapted()
    reference = lora.base(params)
    jax.tree.map(np.testing.assert_array_equal, reference, base_params())
    assert reference["embedding"] is params["embedding"]
    again = lora.attach(reference, params["lora"])
    assert jax.tree.structure(again) == jax.tree.structure(params)


@pytest.mark.parametrize("targets", [None, ("attention/out",), ("attention/key", "mlp/down")])
def test_merged_equals_unmerged(targets):
    params = adapted(targets=targets)
    merged = lora.merge(CONFIG, params)
    unmerged = LOGITS(params, TOKENS, MASK)
    assert jnp.abs(unmerged - LOGITS(base_params(), TOKENS, MASK)).max() > 0.01
    np.testing.assert_allclose(LOGITS(merged, TOKENS, MASK)[MASK], unmerged[MASK], atol=1e-5)
    before = leaves(base_params())
    changed = {path for path, leaf in leaves(merged).items() if (leaf != before[path]).any()}
    assert changed == {f"layers/{target}" for target in targets or lora.TARGETS}


def test_a_merged_weight_by_hand():
    """W + A·B·alpha/r = 1 + (1·2 + 1·2 + 1·2)·6/3."""
    ones = jax.tree.map(jnp.ones_like, adapted())
    ones["lora"] = jax.tree.map(jnp.ones_like, ones["lora"])
    ones["lora"]["layers"]["mlp"]["up"]["b"] *= 2
    merged = lora.merge(CONFIG, ones)
    np.testing.assert_array_equal(merged["layers"]["mlp"]["up"], 13.0)
    np.testing.assert_array_equal(merged["layers"]["attention"]["out"], 7.0)
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), lora.base(ones)) | {"lora": ones["lora"]}
    merged = lora.merge(CONFIG, halves)
    assert merged["layers"]["mlp"]["up"].dtype == jnp.float32 and merged["embedding"].dtype == jnp.bfloat16


def test_the_sampler_draws_from_the_adapted_policy():
    params = adapted()
    draw = jax.jit(partial(sample, model=MODEL, max_new_tokens=6, stop_tokens=(0,), samples_per_prompt=2))
    unmerged, merged = (draw(p, TOKENS, MASK, jax.random.key(4)) for p in (params, lora.merge(CONFIG, params)))
    np.testing.assert_array_equal(unmerged.tokens, merged.tokens)
    np.testing.assert_allclose(unmerged.log_probs, merged.log_probs, atol=1e-5)
    log_probs = logprobs.token_log_probs(LOGITS(params, unmerged.tokens, unmerged.token_mask), unmerged.tokens)
    actions = unmerged.action_mask
    np.testing.assert_allclose(log_probs[actions], unmerged.log_probs[actions], atol=1e-5)


def test_bfloat16_compute_is_near_float32():
    params = adapted()
    model = Model(dataclasses.replace(CONFIG, compute_dtype="bfloat16"))
    assert model.hidden(params, TOKENS, MASK).dtype == jnp.bfloat16
    logits = jax.jit(model.logits)(params, TOKENS, MASK)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[MASK], LOGITS(params, TOKENS, MASK)[MASK], atol=0.1)


def test_only_what_is_trainable_trains():
    """The rest stays bit for bit, weight decay or not, and neither gradient nor optimizer knows of it."""
    state = init_state()
    before = jax.tree.map(np.array, leaves(state.params))
    trained = {path: leaf for path, leaf in before.items() if trainable(path)}
    assert len(trained) == 2 * len(TRAINED) + 2
    counter = 1
    assert num_parameters(state.opt_state) == 2 * num_parameters(trained) + counter

    seen = []
    probe = optax.GradientTransformation(
        OPTIMIZER.init, lambda g, s, p: (seen.append(set(leaves(g))), OPTIMIZER.update(g, s, p))[1]
    )
    update = make_update(make_loss_fn(ALGORITHM, policy), probe, trainable=trainable, num_microbatches=2)
    update = jax.jit(update, donate_argnums=0)
    for _ in range(2):
        state, metrics = update(state, BATCH)
    assert seen == [set(trained)]
    assert metrics["grad_norm"].mean > 0
    for path, leaf in leaves(state.params).items():
        assert (leaf != before[path]).any() == (path in trained), path


def test_a_trained_state_resumes(tmp_path):
    state, _ = STEP(init_state(), BATCH)
    saves = Checkpointer(tmp_path)
    saves.save(1, state, {})
    resumed, _ = saves.restore(init_state())
    saves.close()
    whole, again = STEP(state, BATCH)[0], STEP(resumed, BATCH)[0]
    jax.tree.map(np.testing.assert_array_equal, whole.params, again.params)
    jax.tree.map(np.testing.assert_array_equal, whole.opt_state, again.opt_state)


def test_the_gradient_of_adapters_is_that_of_the_whole_model():
    """Freezing the rest changes nothing for what is trained, whatever the micro-batches."""
    optimizer = optax.sgd(1.0)
    loss_fn = make_loss_fn(ALGORITHM, policy)
    moved = {}
    for name, choice in (("all", None), ("some", trainable)):
        state = train_state.init(actor_critic(scale=1.0), optimizer, jax.random.key(0), trainable=choice)
        state = jax.jit(make_update(loss_fn, optimizer, trainable=choice))(state, BATCH)[0]
        moved[name] = leaves(state.params)
    for path, leaf in moved["some"].items():
        if trainable(path):
            np.testing.assert_allclose(leaf, moved["all"][path], atol=1e-6, err_msg=path)


def test_sharded_equals_plain():
    plain, plain_metrics = STEP(init_state(), BATCH)
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    with jax.set_mesh(mesh):
        places = sharding.shardings(mesh, jax.eval_shape(init_state))
        adapters = places.params["actor"]["lora"]["layers"]["attention"]
        assert adapters["query"]["a"].spec == PartitionSpec()
        assert adapters["query"]["b"].spec == PartitionSpec(None, None, "tensor", None)
        update = jax.jit(UPDATE, out_shardings=(places, sharding.replicated(mesh)), donate_argnums=0)
        state = jax.jit(init_state, out_shardings=places)()
        state, metrics = update(state, sharding.put_rows(mesh, BATCH))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, plain.params)
    for name, value in plain_metrics.items():
        np.testing.assert_allclose(metrics[name].mean, value.mean, rtol=1e-5, atol=1e-6, err_msg=name)


def test_files_are_those_of_peft_and_read_back(tmp_path):
    params = adapted(targets=TRAINED)
    lora.save(tmp_path / "adapter", CONFIG, params, base_model="some/model")
    loaded = lora.load(tmp_path / "adapter", CONFIG)
    assert jax.tree.structure(loaded) == jax.tree.structure(params["lora"])
    jax.tree.map(np.testing.assert_array_equal, loaded, params["lora"])
    content = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    assert content[f"{prefix}.lora_A.weight"].shape == (3, 16) and content[f"{prefix}.lora_B.weight"].shape == (16, 3)
    b = params["lora"]["layers"]["attention"]["query"]["b"][1]  # [r, heads, head_dim]
    np.testing.assert_array_equal(content[f"{prefix}.lora_B.weight"], b.reshape(3, 16).T)
    description = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert description["r"] == 3 and description["lora_alpha"] == 6.0 and description["peft_type"] == "LORA"
    assert set(description["target_modules"]) == {"q_proj", "o_proj", "down_proj"}
    assert description["base_model_name_or_path"] == "some/model" and description["task_type"] == "CAUSAL_LM"
    with pytest.raises(ValueError, match="exists: choose another, or pass overwrite=True"):
        lora.save(tmp_path / "adapter", CONFIG, params)
    lora.save(tmp_path / "adapter", CONFIG, params, overwrite=True)


def test_experts_keep_their_attention_adapters(tmp_path):
    config = dataclasses.replace(CONFIG, num_experts=4, experts_per_token=2)
    with pytest.raises(ValueError, match=r"mlp/gate would be an adapter on experts, num_experts=4"):
        lora.init(jax.random.key(0), config, rank=2)
    adapters = lora.init(jax.random.key(0), config, rank=2, targets=lora.ATTENTION)
    params = lora.attach(jax.jit(Model(config).init)(jax.random.key(0)), adapters)
    lora.save(tmp_path / "adapter", config, params)
    jax.tree.map(np.testing.assert_array_equal, lora.load(tmp_path / "adapter", config), adapters)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lora_alpha": 32}, r"lora_alpha=32, the config says 6.0: load the model with hf.load\(..., lora_alpha=32\)"),
        ({"use_dora": True}, "use_dora=True asks for magnitudes"),
        ({"rank_pattern": {"q_proj": 8}}, "asks for ranks that differ"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"r": 5}, r"has shape \(3, 16\) instead of \(5, 16\)"),
        ("missing", "layers.1.self_attn.q_proj.lora_A.weight is missing"),
        ("unexpected", "lm_head.lora_A.weight is unexpected"),
        ("truncated", "not a whole safetensors file"),
        ("absent", "no JSON to be read"),
    ],
)
def test_files_that_mean_something_else_are_refused(tmp_path, change, message):
    folder = tmp_path / "adapter"
    lora.save(folder, CONFIG, adapted(targets=("attention/query",)))
    weights, description = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    content = load_file(weights)
    if isinstance(change, dict):
        description.write_text(json.dumps(json.loads(description.read_text()) | change))
    elif change == "absent":
        description.unlink()
    elif change == "truncated":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif change == "missing":
        del content["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
        save_file(content, weights)
    else:
        save_file(content | {"base_model.model.lm_head.lora_A.weight": np.zeros((3, 16), np.float32)}, weights)
    with pytest.raises(ValueError, match=message):
        lora.load(folder, CONFIG)


def test_what_does_not_fit_is_named(tmp_path):
    key, params = jax.random.key(0), base_params()
    for keywords, message in (
        ({"rank": 0}, "rank=0"),
        ({"rank": 2, "targets": ("attention/qry",)}, "no projection 'attention/qry', choose among attention/query"),
        ({"rank": 2, "targets": "mlp/up"}, "targets='mlp/up': must be a sequence"),
        ({"rank": 2, "targets": ()}, "must be a sequence"),
    ):
        with pytest.raises(ValueError, match=message):
            lora.init(key, CONFIG, **keywords)
    adapters = lora.init(key, dataclasses.replace(CONFIG, mlp_size=8), rank=2)
    with pytest.raises(ValueError, match=r"adapters of layers/mlp/down have shapes \(2, 8, 2\)"):
        lora.attach(params, adapters)
    with pytest.raises(ValueError, match="adapters hold attention/key, params do not"):
        lora.attach(params, adapters["layers"])
    with pytest.raises(ValueError, match=r"adapters of ranks \[\]"):
        lora.save(tmp_path / "adapter", CONFIG, params)
    with pytest.raises(ValueError, match=r"merge them first \(lora.merge\)"):
        hf.save(tmp_path / "model", CONFIG, adapted())
    with pytest.raises(
        ValueError, match="trainable chooses none of the parameters: must be True for some of embedding"
    ):
        train_state.init(params, OPTIMIZER, key, trainable=lora.is_adapter)
    state = train_state.init(actor_critic(), OPTIMIZER, key)
    with pytest.raises(ValueError, match="the same optimizer and trainable"):
        UPDATE(state, BATCH)


def test_the_guide_on_checkpoints_runs(tmp_path):
    """With a small model in place of the one that it names."""
    guide = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()
    blocks = re.findall(r"```py\n(.*?)```", guide, flags=re.DOTALL)
    assert blocks
    code = "\n".join(blocks).replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(FIXTURES / "smollm2"))
    code = code.replace('"runs/', f'"{tmp_path}/')
    names = {}
    exec(compile(code, "guide.md", "exec"), names)  # our own text, not a model's
    config, params, _ = hf.load(tmp_path / "my-model")
    tokens = jnp.arange(6)[None]
    mask = jnp.ones_like(tokens, bool)
    np.testing.assert_allclose(
        Model(config).logits(params, tokens, mask), names["model"].logits(names["params"], tokens, mask), atol=1e-5
    )


def leaves(tree):
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
