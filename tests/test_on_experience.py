"""What an algorithm reads: what is missing is named with its remedy, and what no scorer applied to teaches nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_algorithms import ALGORITHMS, GROUP, PROMPTS, ROWS, make_experience, make_params, policy

from jaxpg import algorithms
from jaxpg.algorithms.algorithm import make_loss_fn, to_batch
from jaxpg.algorithms.on_experience import with_kl_in_reward

NEEDS = {
    "remax": {"greedy_rewards"},
    "actor_critic": {"values"},
    "actor_critic_gae": {"values"},
    "trpo": {"values"},
    "ppo_penalty": {"values"},
    "ppo": {"values"},
    "rlhf": {"values", "ref_log_probs", "kl_coef"},
    "reinforce_pp": {"ref_log_probs", "kl_coef"},
    "reinforce_pp_baseline": {"ref_log_probs"},
    "grpo": {"ref_log_probs"},
    "gdpo": {"scores"},
    "with_truncated_importance": {"trainer_log_probs"},
    "with_icepop": {"trainer_log_probs"},
}
MAY_LACK = ("greedy_rewards", "values", "ref_log_probs", "kl_coef", "scores", "trainer_log_probs", "bootstrap")
BATCH_MAY_LACK = (
    "log_probs", "sampler_log_probs", "advantages", "returns", "values", "ref_log_probs", "kl_coef", "segments"
)  # fmt: skip
KL_IN_LOSS = {"ppo_penalty", "grpo", "reinforce_pp_baseline"}  # pull every sample to the old policy or the reference


def batch_of(name, experience):
    """With the coefficient that an update would set."""
    return dataclasses.replace(to_batch(ALGORITHMS[name], experience), kl_coef=jnp.full(ROWS, 0.1))


def trace(name, batch):
    """Traces the loss and compiles nothing."""
    jax.eval_shape(make_loss_fn(ALGORITHMS[name], policy), make_params(), batch)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_missing_field_of_the_experience_is_named(name):
    for field in MAY_LACK:
        experience = dataclasses.replace(make_experience(), **{field: None})
        if field in NEEDS.get(name, ()):
            with pytest.raises(ValueError, match=rf"is None in the (Experience|Batch): .* Experience\.{field} \["):
                trace(name, jax.eval_shape(lambda e: batch_of(name, e), experience))
        else:
            trace(name, jax.eval_shape(lambda e: batch_of(name, e), experience))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_missing_field_of_the_batch_is_named(name):
    """Never a TypeError from within."""
    batch, missed = jax.eval_shape(lambda e: batch_of(name, e), make_experience()), set()
    for field in BATCH_MAY_LACK:
        try:
            trace(name, dataclasses.replace(batch, **{field: None}))
        except ValueError as error:
            assert str(error).startswith(f"{field} is None in the Batch: ")
            missed.add(field)
    assert ("advantages" in missed) == (name != "supervised")
    assert "kl_coef" not in missed, "the algorithm's own stands in for it"
    assert ("returns" in missed) == (ALGORITHMS[name].critic is not None)


@pytest.mark.parametrize("make", [algorithms.grpo, algorithms.reinforce_pp, algorithms.reinforce_pp_baseline])
def test_an_algorithm_without_a_kl_needs_no_reference(make):
    neither = dataclasses.replace(make_experience(), ref_log_probs=None, kl_coef=None)
    with_reference = make_loss_fn(make(), policy)(make_params(), to_batch(make(), make_experience()))
    without = make_loss_fn(make(), policy)(make_params(), to_batch(make(), neither))
    jax.tree.map(np.testing.assert_array_equal, without, with_reference)
    with pytest.raises(ValueError, match=r"(ref_log_probs|kl_coef) is None"):
        make_loss_fn(make(kl_coef=0.1), policy)(make_params(), to_batch(make(kl_coef=0.1), neither))


@pytest.mark.parametrize("name", ["rlhf", "reinforce_pp"])
def test_the_kl_in_the_reward_is_of_the_trainers_log_probs_where_they_are_given(name):
    experience = make_experience()
    mask, rollout = experience.rollout.action_mask, experience.rollout
    k1 = np.where(mask, experience.trainer_log_probs - experience.ref_log_probs, 0.0)
    np.testing.assert_allclose(with_kl_in_reward(experience).token_rewards, -0.1 * k1, rtol=1e-5, atol=1e-7)
    other = dataclasses.replace(experience, rollout=dataclasses.replace(rollout, log_probs=rollout.log_probs - 1.0))
    same, moved = (to_batch(ALGORITHMS[name], e).advantages for e in (experience, other))
    np.testing.assert_array_equal(same, moved)
    sampled = dataclasses.replace(experience, trainer_log_probs=None)
    k1 = np.where(mask, rollout.log_probs - experience.ref_log_probs, 0.0)
    np.testing.assert_allclose(with_kl_in_reward(sampled).token_rewards, -0.1 * k1, rtol=1e-5, atol=1e-7)


def test_the_gap_is_that_of_trainer_and_sampler_also_where_the_trainer_recomputed():
    experience, params = make_experience(), make_params()
    own = policy(params, experience.rollout).log_probs
    rollout = dataclasses.replace(experience.rollout, log_probs=own + 0.25)
    for trainer in (own, None):
        batch = to_batch(
            ALGORITHMS["rloo"], dataclasses.replace(experience, rollout=rollout, trainer_log_probs=trainer)
        )
        metrics = make_loss_fn(ALGORITHMS["rloo"], policy)(params, batch)[1]
        np.testing.assert_allclose(metrics["log_prob_gap"].mean, 0.25, rtol=1e-5)
    assert metrics["kl_old"].mean > 0.01  # of the sampler's, nothing else is known


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - KL_IN_LOSS))
def test_a_sample_without_a_score_has_no_gradient(name):
    experience = make_experience()
    valid = experience.valid.at[1, 2].set(False)
    rows = np.arange(PROMPTS * GROUP) == 1 * GROUP + 2
    batch = batch_of(name, dataclasses.replace(experience, valid=valid))
    # At the old policy, where no clip bound stops a gradient.
    slope = np.asarray(jax.grad(lambda x: ALGORITHMS[name].loss(x, batch)[0].sum())(batch.log_probs))
    np.testing.assert_array_equal(slope[rows], 0.0)
    assert np.abs(slope[~rows]).max() > 1e-4


def test_supervised_learning_weighs_by_the_advantages_of_its_batch():
    batch = to_batch(algorithms.supervised(), make_experience())
    loss = lambda advantages: algorithms.supervised().loss(  # noqa: E731
        batch.log_probs, dataclasses.replace(batch, advantages=advantages)
    )[0]
    np.testing.assert_array_equal(loss(None), -batch.log_probs)
    np.testing.assert_array_equal(loss(batch.advantages), -batch.log_probs)
    np.testing.assert_array_equal(loss(3.0 * batch.advantages), -3.0 * batch.log_probs)


def test_several_episodes_in_a_row_have_actions_of_one_token():
    e = make_experience()
    e = dataclasses.replace(e, segments=jnp.zeros((ROWS, e.rollout.tokens.shape[1]), int), ends=e.rollout.action_mask)
    for name in ("reinforce_to_go", "ppo"):
        with pytest.raises(ValueError, match="ends and segments are both set"):
            jax.eval_shape(lambda e, name=name: batch_of(name, e), e)
