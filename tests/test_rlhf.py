"""RLHF in three steps and DPO: packing, the true preference, and the four files from start to end."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launching import EXPERIMENTS, finish, launch, load, start_together

from jaxpg import algorithms, recipe
from jaxpg.data import characters, encode_demonstrations, pack
from jaxpg.estimators import logprobs
from jaxpg.models import Config, Model, hf
from jaxpg.rollout import policies
from jaxpg.run.metrics import read_jsonl
from jaxpg.sampling import Sampling
from jaxpg.tasks import taste
from jaxpg.training import start as starting
from jaxpg.training.update import adamw, make_update
from jaxpg.types import Batch

sys.path.insert(0, str(EXPERIMENTS / "rlhf"))  # where its files find each other
from pairs import best_accuracy, encode_pairs, label, pair_batches
from reward import rewards

# ---- Packing ---------------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 48}
TOKENIZER = characters("0123456789+=!")
SMALL = Config(vocab_size=len(TOKENIZER), max_length=64, **SIZES)
PROMPTS = ["1+2=", "30+4=", "5+5=", "61+7=", "8+9=", "1+1="]
COMPLETIONS = ["3!", "34", "10!!!!!", "68!", "1", "2!!"]
VARIANTS = {"plain": {}, "window and softcap": {"window": 3, "attention_softcap": 2.0}}


def demonstrations():
    return encode_demonstrations(TOKENIZER, PROMPTS, COMPLETIONS, length=14)


init = jax.jit(Model.init, static_argnums=0)
logits = jax.jit(Model.logits, static_argnums=0)


def loss_and_gradient(config, params, batch):
    loss_fn = algorithms.make_loss_fn(algorithms.supervised(), policies.actor(Model(config), Sampling()))

    def total(params):
        loss, metrics = loss_fn(params, batch)
        return loss.total, (loss.weight, metrics)

    return jax.jit(jax.value_and_grad(total, has_aux=True))(params)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_have_the_loss_and_gradient_of_documents_apart(variant):
    config = dataclasses.replace(SMALL, **VARIANTS[variant])
    params = init(Model(config), jax.random.key(0))
    apart = demonstrations()
    packed = pack(apart, length=29, rows=4)
    assert (
        packed.tokens.shape == (4, 29) and (packed.documents.max(-1) > 0).sum() >= 2 and not packed.token_mask[-1].any()
    )
    (loss, (weight, metrics)), gradient = loss_and_gradient(config, params, apart)
    (found, (found_weight, found_metrics)), found_gradient = loss_and_gradient(config, params, packed)
    assert weight == found_weight == sum(len(text) + 1 for text in COMPLETIONS)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(found_metrics["entropy"].total, metrics["entropy"].total, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * weight), found_gradient, gradient)
    log_probs = logprobs.token_log_probs(logits(Model(config), params, packed.tokens, packed.token_mask), packed.tokens)
    assert abs(log_probs[packed.action_mask].sum() + loss) > 1e-2, "without `documents` it would be another loss"


def test_no_document_sees_another_and_padding_inside_one_changes_nothing():
    model = Model(SMALL)
    params = init(model, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (9,), 3, SMALL.vocab_size)
    blank = jnp.zeros(2, jnp.int32)
    rows = jnp.stack(
        [
            jnp.concatenate([tokens, blank]),
            jnp.concatenate([tokens, blank]).at[1].set(0),  # another first document
            jnp.concatenate([tokens[4:], blank, blank, blank]),  # the second one alone
            jnp.concatenate([tokens[:4], blank[:1], tokens[4:6], blank[:1], tokens[6:]]),  # holes between and inside
        ]
    )
    mask = jnp.array([[1] * 9 + [0] * 2] * 2 + [[1] * 5 + [0] * 6] + [[1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1]], bool)
    numbers = jnp.array([[0] * 4 + [1] * 7] * 2 + [[0] * 11] + [[0, 0, 0, 0, 9, 1, 1, 9, 1, 1, 1]])
    packed, other, alone, holed = logits(model, params, rows, mask, numbers)  # what stands at padding is not read
    np.testing.assert_allclose(packed[4:9], alone[:5], atol=1e-5)
    np.testing.assert_array_equal(packed[4:9], other[4:9])
    assert jnp.abs(packed[:4] - other[:4]).max() > 1e-3
    np.testing.assert_allclose(holed[mask[3]], packed[:9], atol=1e-5)


def test_splash_attention_keeps_documents_apart():
    params = init(Model(SMALL), jax.random.key(0))
    packed = jax.tree.map(jnp.asarray, pack(demonstrations(), length=29))
    arrays = params, packed.tokens, packed.token_mask, packed.documents
    expected, found = (logits(Model(c), *arrays) for c in (SMALL, dataclasses.replace(SMALL, attention="splash")))
    np.testing.assert_allclose(found[packed.token_mask], expected[packed.token_mask], atol=2e-5)


def test_every_document_is_packed_once_and_in_few_rows():
    lengths = np.random.default_rng(0).integers(2, 20, 300)
    tokens = np.arange(300)[:, None] * 20 + np.arange(20)
    mask = np.arange(20) < lengths[:, None]
    mask[1::2] = mask[1::2, ::-1]  # every other one is padded on the left
    actions = mask & (np.cumsum(mask, -1) > 1)
    packed = pack(Batch(tokens=tokens, token_mask=mask, action_mask=actions), length=64)
    np.testing.assert_array_equal(np.sort(packed.tokens[packed.token_mask]), tokens[mask])
    np.testing.assert_array_equal(np.sort(packed.tokens[packed.action_mask]), tokens[actions])
    assert len(packed.tokens) == -(-lengths.sum() // 64), "best fit loses nothing on documents this short"
    for row, numbers, real in zip(packed.tokens, packed.documents, packed.token_mask, strict=True):
        assert real.sum() and not np.diff(real.astype(int)).max(initial=0), "tight, from the left"
        starts = np.flatnonzero(np.diff(row[real] // 20, prepend=-1))
        np.testing.assert_array_equal(starts, np.flatnonzero(np.diff(numbers[real], prepend=-1)))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"length": 9}, "length=9: a document has 12 tokens, raise it"),
        ({}, {"rows": 2}, "rows=2: these 6 documents take"),
        ({"action_mask": np.ones((6, 14), bool)}, {}, "starts with an action"),
        ({"advantages": np.ones((6, 14))}, {}, "batch has advantages: only tokens"),
    ],
)
def test_what_cannot_be_packed_is_named(change, options, message):
    with pytest.raises(ValueError, match=message):
        pack(dataclasses.replace(demonstrations(), **change), **options)


# ---- The true preference ---------------------------------------------------------------------------------------------


def test_the_utility_by_hand():
    (problem,) = taste.every(39)[38:]
    assert problem.prompt == "3+8=" and problem.answer == "11"
    assert taste.utility(problem, "11") == 3.0 and taste.utility(problem, "12") == 0.0
    assert taste.utility(problem, "11!!!") == 5.0 and taste.utility(problem, "11!!!!!!") == 3.0
    assert taste.utility(problem, "!!!") == 2.0 and taste.utility(problem, "!11") == pytest.approx(10 / 9)
    worth = [taste.utility(problem, "7" + m * "!") for m in range(taste.MOST + 1)]
    assert np.argmax(worth) == taste.BEST and worth[-1] < -5, "more is better at first, and far worse in the end"
    assert taste.preference(problem, "11", "12") == pytest.approx(1 / (1 + np.exp(-3)))


def test_labels_have_the_probabilities_of_bradley_and_terry():
    problem = taste.every(1)[0]
    for first, second in (("0", "1"), ("0!", "0"), ("5", "0!!!"), ("1", "1")):
        p = taste.preference(problem, first, second)
        drawn = [taste.prefers_first(problem, first, second, seed=3, index=i) for i in range(4000)]
        assert abs(np.mean(drawn) - p) < 4 * np.sqrt(p * (1 - p) / 4000)
        pairs = [label(problem, first, second, seed=3, index=i) for i in range(4000)]
        assert [pair.chosen == first for pair in pairs] == drawn or first == second
        right = np.mean([pair.true_margin > 0 for pair in pairs])
        assert first == second or abs(right - best_accuracy(pairs)) < 0.03, "what the true preference agrees with"


def test_demonstrations_are_as_good_as_said():
    problems = taste.problems(0, 0, 4000)
    texts = [taste.demonstration(problem, 0, i) for i, problem in enumerate(problems)]
    assert abs(np.mean(list(map(taste.is_right, problems, texts))) - taste.SKILL) < 0.04
    assert abs(np.mean([taste.marks(text) > 0 for text in texts]) - taste.EXUBERANCE) < 0.04
    assert texts[:5] == [taste.demonstration(problem, 0, i) for i, problem in enumerate(problems[:5])]
    encode_demonstrations(characters(taste.ALPHABET), [p.prompt for p in problems], texts, length=17)


# ---- The four files --------------------------------------------------------------------------------------------------

STEPS = ("sft", "reward_model", "ppo", "dpo")
MESHES = {"mesh": "data=2,fsdp=2,tensor=2", "sampler_mesh": "data=8"}


def step_file(name):
    return EXPERIMENTS / "rlhf" / f"{name}.py"


def load_step(name):
    return load(step_file(name), f"rlhf_{name}")


def options(folder, name, **more):
    """The options of a step, whose predecessors have folders beside its own."""
    before = {
        "sft": {},
        "reward_model": {"model": str(folder / "sft")},
        "ppo": {"model": str(folder / "sft"), "reward_model": folder / "reward_model"},
        "dpo": {"model": str(folder / "sft"), "pairs": folder / "reward_model"},
    }
    return {"smoke": True, "run_dir": folder / name, **before[name], **more}


def prepared(module, config):
    """The setup of a step, by its own checks or by those of every recipe."""
    return module.prepare(config) if hasattr(module, "prepare") else recipe.prepare(config, name="sft")


@pytest.mark.usefixtures("quick_compilation")
def test_the_steps_follow_each_other_on_a_mesh_of_eight_devices(tmp_path):
    folder, rows, summaries = tmp_path / "rlhf", {}, {}
    for name in STEPS:
        module = load_step(name)
        setup = prepared(module, module.Config(**options(folder, name, **MESHES)))
        own = {"conclude": module.conclude} if name == "reward_model" else {}
        recipe.execute(setup, train=module.train, **own)
        phase = "warmup" if name == "sft" else "rl"
        rows[name] = [row for row in read_jsonl(folder / name / "metrics.jsonl") if row["phase"] == phase]
        assert len(rows[name]) == 2 and all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows[name])
        summaries[name] = json.loads((folder / name / "summary.json").read_text())
    for name in ("sft", "ppo", "dpo"):
        assert {"accuracy_after", "utility_after", "marks_before"} <= summaries[name].keys()
    assert summaries["sft"]["utility_after"] == pytest.approx(summaries["ppo"]["utility_before"], abs=0.3)
    assert 0.5 <= summaries["reward_model"]["best_accuracy"] <= 1
    ppo = rows["ppo"]
    assert ppo[0]["log_prob_gap"] < 1e-4, "the sampler's log-probs are the trainer's"
    assert abs(ppo[0]["kl_measured"]) < 1e-4, "the policy starts as its reference"
    assert ppo[0]["kl_coef"] < 0.1, "which is nearer than the target: β falls"
    assert ppo[0]["reward"] == pytest.approx(ppo[0]["score/learned"], rel=1e-5)
    assert ppo[0]["score/true"] != ppo[0]["score/learned"]
    assert rows["dpo"][0]["loss"] == pytest.approx(np.log(2), rel=1e-4), "the policy starts as its reference"
    for picture in ("reward_model/margins.png", "ppo/curves.png"):
        assert (folder / picture).stat().st_size > 1000
    sft, actor = (hf.load(folder / name / "model").params for name in ("sft", "ppo"))
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.abs(a - b).max(), sft, actor))) > 0
    _refusals(folder)
    _the_same_by_two_processes(folder, ppo)


def _the_same_by_two_processes(folder, expected):
    """Step 3 again, by two processes, in another folder of the same steps."""
    given = options(folder, "ppo", run_dir=folder / "together", **MESHES)
    del given["smoke"]
    arguments = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    finish(start_together(step_file("ppo"), "--smoke", *arguments, count=2))
    found = [row for row in read_jsonl(folder / "together" / "metrics.jsonl") if row["phase"] == "rl"]
    for row, wanted in zip(found, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name in ("score/learned", "score/true", "loss", "grad_norm", "entropy", "completion_length"):
            np.testing.assert_allclose(row[name], wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert (folder / "together" / "curves.png").exists() and (folder / "together" / "model").exists()


def _refusals(folder):
    """What is refused beside finished steps."""
    ppo = load_step("ppo")
    other = {"run_dir": folder / "other"}
    for change, message in (
        ({}, "already holds this run"),
        ({"resume": True, "kl_coef": 0.2}, "another configuration .*kl_coef is 0.1 there, 0.2 here"),
        (other | {"target_kl": 0.0}, "--target-kl=0.0: must be greater than 0"),
        (other | {"mesh": "data=3"}, "asks for 3 devices"),
        (other | {"sampler_mesh": "data=3"}, "asks for 3 devices"),
        (other | {"sampler_mesh": "tensor=8"}, "not divisible by mesh axis tensor=8"),
        (other | {"keep": 0}, "--keep=0: must be at least 1"),
        (other | {"smoke": False, "batch_size": 30}, "cannot be spread"),
        (other | {"model": str(folder / "elsewhere")}, "elsewhere is missing"),
        (other | {"task": "arithmetic", "level": 9}, "level=9"),
    ):
        with pytest.raises(ValueError, match=message):
            ppo.prepare(ppo.Config(**options(folder, "ppo", **MESHES) | change))
    assert not (folder / "other").exists()


@pytest.mark.parametrize("name", STEPS[1:])
def test_a_missing_predecessor_is_one_clear_error(name, tmp_path):
    module = load_step(name)
    with pytest.raises(ValueError, match=r"sft is missing: run python experiments/rlhf/sft.py --run-dir \S+ first"):
        module.prepare(module.Config(**options(tmp_path, name)))
    (tmp_path / "sft").mkdir()
    with pytest.raises(ValueError, match=r"sft has not finished: run .* --resume first"):
        module.prepare(module.Config(**options(tmp_path, name)))
    assert not (tmp_path / name).exists()


def test_the_command_line_takes_a_checkpoint(tmp_path):
    tokenizer = characters(taste.ALPHABET)
    config = dataclasses.replace(SMALL, vocab_size=len(tokenizer), stop_tokens=(tokenizer.eos_token_id,))
    hf.save(tmp_path / "given", config, init(Model(config), jax.random.key(0)), tokenizer)
    sft, missing = tmp_path / "sft", tmp_path / "missing"
    refused = launch(step_file("ppo"), "--smoke", "--model", str(missing), "--run-dir", str(tmp_path / "ppo"))
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1 and "missing is missing" in refused.stderr
    result = launch(step_file("sft"), "--smoke", "--run-dir", str(sft), "--model", str(tmp_path / "given"))
    assert result.returncode == 0, result.stderr
    assert "held-out utility after RL" in " ".join(result.stdout.split())
    assert [row["step"] for row in read_jsonl(sft / "metrics.jsonl") if row["phase"] == "warmup"] == [1, 2]
    assert hf.load(sft / "model").config.hidden_size == SMALL.hidden_size


@pytest.mark.usefixtures("quick_compilation")
def test_the_reward_model_learns_above_chance_in_a_small_budget(tmp_path):
    module, sft = load_step("reward_model"), load_step("sft")
    setup = recipe.prepare(sft.Config(smoke=True, run_dir=tmp_path / "run", mesh="data=8"), name="sft")
    problems = taste.problems(5, 0, 1280)
    texts = [[taste.demonstration(p, seed, i) for i, p in enumerate(problems)] for seed in (6, 7)]
    pairs = [label(p, a, b, seed=8, index=i) for i, (p, a, b) in enumerate(zip(problems, *texts, strict=True))]
    seen, held_out = pairs[:1024], [pair for pair in pairs[1024:] if pair.chosen != pair.rejected]
    params = {"trunk": setup.params(), "head": {"kernel": jnp.zeros(64), "bias": jnp.zeros(())}}
    optimizer = adamw(3e-3)
    with jax.set_mesh(setup.mesh):
        state = starting.start(setup.mesh, params, optimizer, seed=0)
        update = starting.compiled(setup.mesh, make_update(module.loss_fn(setup.model), optimizer), state)
        batch = pair_batches(setup, encode_pairs(setup, seen), 64)
        for k in range(40):
            state, _ = update(state, batch(k))
    rows = encode_pairs(setup, held_out)
    found = np.asarray(rewards(setup.model, state.params, rows.tokens, rows.token_mask))
    margins = found[:, 0] - found[:, 1]
    assert (margins > 0).mean() > 0.55, (margins > 0).mean()
    assert np.corrcoef(margins, [pair.true_margin for pair in held_out])[0, 1] > 0.2
