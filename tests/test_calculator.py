"""The calculator's recipe: what the tool says is no action and carries no gradient. Its task: test_tasks_calculator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launching import EXPERIMENTS, load

from jaxpg import algorithms, recipe
from jaxpg.run.metrics import read_jsonl
from jaxpg.types import Experience

calculator = load(EXPERIMENTS / "calculator.py")
pytestmark = pytest.mark.usefixtures("quick_compilation")


def gradient(algorithm, batch):
    """With respect to the log-prob of every token."""
    loss_fn = algorithms.make_loss_fn(algorithm, lambda log_probs, batch: (log_probs, jnp.zeros_like(log_probs)))
    return np.asarray(jax.grad(lambda x: loss_fn(x, batch)[0].total)(jnp.full(batch.tokens.shape, -1.0)))


def test_conversations_are_trained_on_without_what_the_calculator_says(tmp_path, monkeypatch, capsys):
    heard, converse = [], recipe.Recipe.converse
    monkeypatch.setattr(recipe.Recipe, "converse", lambda self, *args: heard.append(converse(self, *args)) or heard[-1])
    # An untrained model gets no product right: answers in few tokens are rewarded.
    config = calculator.Config(smoke=True, run_dir=tmp_path / "run", mesh="data=8", scorers=("own_scorers:odd",))
    setup = recipe.prepare(config, name="calculator")
    recipe.execute(setup, train=calculator.train)
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["phase"] == "rl"]
    assert len(rows) == len(heard) == 2 and all(row["grad_norm"] > 0 for row in rows)
    assert rows[0]["log_prob_gap"] < 1e-4, "the sampler's log-probs are the trainer's"
    assert "held-out calls after RL" in capsys.readouterr().out

    for rollout in jax.device_get(heard):
        actions = rollout.action_mask
        behind_prompt = np.arange(actions.shape[1]) >= setup.prompt_length
        observed = rollout.token_mask & ~actions & behind_prompt
        called = np.isin(rollout.tokens, setup.tokenizer.encode("]", add_special_tokens=False)) & actions
        assert observed.any(), "the calculator was heard"
        assert called.any(1)[observed.any(1)].all(), "it speaks when it is called, and not before"
        groups = setup.config.batch_size // setup.config.group_size
        rewards = jnp.arange(actions.shape[0], dtype=jnp.float32).reshape(groups, -1)
        rewards = rewards**2  # so that no advantage is 0
        experience = Experience(rollout, rewards, jnp.ones(rewards.shape, bool))
        found = gradient(algorithms.rloo(), algorithms.to_batch(algorithms.rloo(), experience))
        assert not found[~actions].any()
        assert found[actions].all()


def test_a_task_without_a_tool_is_told(tmp_path):
    config = calculator.Config(task="arithmetic", run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="--task=arithmetic has no environment, which this recipe learns from"):
        recipe.prepare(config, name="calculator")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 7}, "--group-size=7 does not divide --batch-size=256"),
        ({"temperature": 0.0}, "--temperature=0.0: must be greater than 0"),
        ({"held_out": 33}, "33 evaluation rows cannot be spread"),
    ],
)
def test_bad_options_are_named_and_nothing_is_written(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        recipe.prepare(calculator.Config(run_dir=tmp_path / "run", **options), name="calculator")
    assert not (tmp_path / "run").exists()
