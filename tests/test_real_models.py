"""The recipes and the tool that take a checkpoint: here a small one of random weights."""

import json

import jax
import numpy as np
import pytest
import tiny
from launching import EXPERIMENTS, ROOT, load

from jaxpg import recipe
from jaxpg.models import hf
from jaxpg.rollout import evaluate
from jaxpg.run.metrics import read_jsonl

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny")


def prepared(name, **options):
    """A recipe's file and its setup. A random model gets no sum right: odd lengths are rewarded instead."""
    module = load(EXPERIMENTS / "ladder" / f"{name}.py")
    defaults = {"smoke": True, "scorers": ("own_scorers:odd",)}
    return module, recipe.prepare(module.Config(**defaults | options), name=name)


def trained(name, **options):
    """Trains, and returns the rows of the reinforcement learning and the model that was saved."""
    module, setup = prepared(name, **options)
    recipe.execute(setup, train=module.train)
    folder = options["run_dir"]
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["phase"] == "rl"]
    assert len(rows) == 2 and rows[0]["log_prob_gap"] < 1e-4, "the sampler's log-probs are the trainer's"
    assert all(row["grad_norm"] > 0 and np.isfinite(row["loss"]) for row in rows)
    return rows, hf.load(folder / "model").params


def assert_changed(checkpoint, after, *, adapters):
    before = hf.load(checkpoint).params
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert changed["layers"]["attention"]["query"]
    assert changed["embedding"] == (not adapters), "with adapters the base is frozen"


@pytest.mark.parametrize("rank", [0, 2])
def test_grpo_trains_a_checkpoint_near_its_reference_and_saves_it(rank, checkpoint, tmp_path):
    options = {"model": str(checkpoint), "lora_rank": rank, "kl_coef": 0.1, "rl_learning_rate": 1e-2}
    rows, after = trained("grpo", run_dir=tmp_path / "run", **options)
    assert_changed(checkpoint, after, adapters=rank > 0)
    assert abs(rows[0]["kl_ref"]) < 1e-6 < rows[1]["kl_ref"], "the policy starts as its reference and leaves it"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {"critic": "lora", "lora_rank": 2}),
        ("trpo", {"critic": "lora", "lora_rank": 2}),
        ("dapo", {"top_k": 20, "temperature": 0.7}),
        pytest.param("ppo", {"critic": "head"}, marks=pytest.mark.exhaustive),  # policies are tested by themselves
        pytest.param("ppo", {"critic": "copy"}, marks=pytest.mark.exhaustive),
        pytest.param("remax", {}, marks=pytest.mark.exhaustive),  # as with the small model
    ],
)
def test_recipes_train_a_checkpoint(name, options, checkpoint, tmp_path):
    options = {"model": str(checkpoint), "rl_learning_rate": 1e-2} | options
    rows, after = trained(name, run_dir=tmp_path / "run", **options)
    assert_changed(checkpoint, after, adapters="lora_rank" in options)
    of_critic = {"ppo": "value_loss", "trpo": "critic/loss"}
    if name in of_critic:
        assert all(row[of_critic[name]] > 0 for row in rows)


def test_the_folder_of_a_run_is_a_model_that_is_asked_as_it_was_trained(checkpoint, tmp_path):
    module, setup = prepared("grpo", run_dir=tmp_path / "small", warmup_steps=0, rl_steps=0)
    recipe.execute(setup, train=module.train)
    _, again = prepared("grpo", run_dir=tmp_path / "next", model=str(tmp_path / "small"))
    assert not again.spoken and again.render(again.held_out[:1])[0].endswith("=")
    saved = hf.load(tmp_path / "small" / "model").params
    jax.tree.map(np.testing.assert_array_equal, again.params(), saved)
    _, asked = prepared("grpo", run_dir=tmp_path / "next", model=str(checkpoint))
    assert asked.spoken and asked.render(asked.held_out[:1])[0].startswith("What is ")
    with pytest.raises(ValueError, match="context has 10"):  # which the small model was built with
        prepared("grpo", run_dir=tmp_path / "next", model=str(tmp_path / "small"), max_new_tokens=99)
    assert not (tmp_path / "next").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "chess"}, "--task=chess: choose among arithmetic"),
        ({"lora_rank": -1}, "--lora-rank=-1"),
        ({"prompt_length": 10}, "--prompt-length=10: none of the first .* raise it"),
        ({"prompt_length": 250}, "need 264 tokens, the model's context has 256"),
        ({"level": 9}, "level=9"),
        ({"task": "arithmetic", "warmup_steps": 5, "held_out": 10_000}, "count=10000"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(change, message, checkpoint, tmp_path):
    options = {"model": str(checkpoint), "smoke": "held_out" not in change, "run_dir": tmp_path / "run"}
    with pytest.raises(ValueError, match=message):
        prepared("grpo", **options | change)
    assert not (tmp_path / "run").exists()


def test_the_evaluation_of_a_checkpoint(checkpoint, tmp_path, capsys):
    module = load(ROOT / "tools" / "evaluate_model.py")
    out = tmp_path / "numbers.json"
    c = module.Config(model=str(checkpoint), count=8, samples=3, k=(1, 3), json=out)
    module.run(module.prepare(c))
    assert {"pass@1", "pass@3", "majority@3"} <= set(json.loads(out.read_text())["all"])
    assert "pass@3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--k=4: must lie between 1 and --samples=3"):
        module.prepare(module.Config(model=str(checkpoint), samples=3, k=(4,)))


def test_majority_votes_by_hand():
    answers = [["7", "7", "8"], ["1", "2", None], [None, None, None], ["3", "4", "4"]]
    correct = [[True, True, False], [True, False, False], [False] * 3, [True, False, False]]
    np.testing.assert_array_equal(evaluate.majority_at_k(answers, correct), [1.0, 0.5, 0.0, 0.0])
    assert evaluate.by_group([1, 0, 1, 1], [2, 2, 3, 3]) == {2: 0.5, 3: 1.0}
