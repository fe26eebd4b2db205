"""What a step tells of its rollout."""

import jax.numpy as jnp
import numpy as np

from jaxpg.rollout import describe
from jaxpg.run import report
from jaxpg.tasks import arithmetic
from jaxpg.types import Prompts, Rollout, Scores


def prompts(*levels):
    asked = np.zeros((len(levels), 1), np.int32)
    return Prompts(asked, asked == 0, [arithmetic.problem(0, 0, level=level) for level in levels])


def test_rewards_are_told_by_level_and_lengths_by_outcome():
    tokens, mask = jnp.zeros((4, 3), jnp.int32), jnp.ones((4, 3), bool)
    actions = jnp.array([[0, 0, 1], [0, 1, 1], [0, 1, 1], [1, 1, 1]], bool)
    rollout = Rollout(tokens, mask, actions, jnp.zeros((4, 3)), jnp.array([1, 1, 1, 0]))
    scores = Scores(np.array([[1.0, 0.0], [1.0, 0.0]]), np.ones((2, 2), bool))
    row = describe(prompts(2, 3), rollout, scores)
    assert row["completion_length_better"] == 1.5 and row["completion_length_worse"] == 2.5
    assert row["reward/level_2"] == row["reward/level_3"] == 0.5
    assert row["cut_completions"] == 0.25 and row["zero_variance_groups"] == 0.0
    sentences = " ".join(report.in_words([row | {"loss": 0.0, "log_prob_gap": 1e-7}]))
    assert "In 0% of the groups" in sentences and "25.0% of the completions were cut" in sentences
    assert "watch the reward, not the loss" in sentences


def test_rewards_of_tokens_count_as_rewards():
    of_tokens = np.array([[0.5, 0.5], [0.5, 0.0], [0.0, 0.5], [0.5, 0.0]], np.float32)
    scores = Scores(np.zeros((2, 2), np.float32), np.ones((2, 2), bool), token_rewards=of_tokens)
    mask = jnp.ones((4, 2), bool)
    rollout = Rollout(mask.astype(jnp.int32), mask, mask, jnp.zeros((4, 2)), jnp.ones(4, jnp.int32))
    row = describe(prompts(2, 2), rollout, scores)
    assert row["reward"] == 0.625 and row["zero_variance_groups"] == 0.5 and "reward/level_2" not in row


def test_what_has_no_score_counts_in_no_mean():
    scores = Scores(np.array([[4.0, np.nan]]), np.array([[True, False]]), failures=np.array([1]))
    mask = jnp.ones((2, 2), bool)
    rollout = Rollout(mask.astype(jnp.int32), mask, mask, jnp.zeros((2, 2)), jnp.ones(2, jnp.int32))
    row = describe(prompts(2), rollout, scores)
    assert row["reward"] == 4.0 and row["reward_std"] == 0.0
    assert row["scored"] == 0.5 and row["scorer_failures"] == 1 and row["zero_variance_groups"] == 1.0


def test_what_an_update_does_not_tell_is_left_out_and_single_samples_make_no_groups():
    """A custom update may tell nothing at all."""
    row = {"scored": 1.0, "cut_completions": 0.5, "completion_length": 3.0, "zero_variance_groups": 1.0}
    (only,) = report.in_words([row], group_size=1)
    assert only.startswith("50.0% of the completions were cut")
    assert "In 100% of the groups" in " ".join(report.in_words([row], group_size=2))
