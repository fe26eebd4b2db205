"""The published claims about losses, proved by enumeration in float64: off policy, first steps, KL, entropy."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumerable import STOPPING, TABLE, UNBIASED, draw_table, moments, outcome

from jaxpg import algorithms
from jaxpg.algorithms import exact, on_experience
from jaxpg.algorithms.algorithm import Algorithm, Outputs
from jaxpg.estimators import aggregate, kl, logprobs, losses
from jaxpg.models import Config, Model


def test_importance_sampling_is_unbiased_off_policy_and_its_variance_grows_with_the_distance():
    """The ratio of the whole response is the exact weight; leaving it out, or one token's alone, is biased."""
    corrected = algorithms.rloo_clip(clip_low=1.0, clip_high=1e9)
    direction = draw_table(STOPPING, seed=7)
    variances = []
    for distance in (0.0, 0.5, 1.0):
        sampling = TABLE + distance * direction
        m = moments(STOPPING, corrected, 2, sampling_params=sampling)
        np.testing.assert_allclose(m.bias, 0.0, atol=UNBIASED)
        variances.append(m.total_variance)
    assert variances[0] < variances[1] < variances[2]
    assert np.abs(moments(STOPPING, algorithms.rloo(), 2, sampling_params=sampling).bias).max() > 0.01
    per_token = dataclasses.replace(
        algorithms.rloo(), loss=lambda lp, b: losses.surrogate(lp, b.log_probs, b.advantages)
    )
    assert np.abs(moments(STOPPING, per_token, 2, sampling_params=sampling).bias).max() > 0.01


SURROGATES = {
    "surrogate": lambda lp, b: losses.surrogate(lp, b.log_probs, b.advantages),
    "ppo_clip": lambda lp, b: losses.ppo_clip(lp, b.log_probs, b.advantages),
    "dual_clip": lambda lp, b: losses.ppo_clip(lp, b.log_probs, b.advantages, dual_clip=3.0),
    "cispo": lambda lp, b: losses.cispo(lp, b.log_probs, b.advantages, clip_high=0.2),
    "sapo": lambda lp, b: losses.sapo(lp, b.log_probs, b.advantages),
    "penalty": algorithms.ppo_penalty().loss,
}


@pytest.mark.parametrize("name", SURROGATES)
def test_the_first_step_of_every_surrogate_is_the_policy_gradient(name):
    rloo = moments(STOPPING, algorithms.rloo(), 2)
    first = moments(STOPPING, dataclasses.replace(algorithms.rloo(), loss=SURROGATES[name]), 2, kl_coef=0.7)
    np.testing.assert_allclose(first.mean, rloo.gradient, atol=UNBIASED)
    np.testing.assert_allclose(first.variance, rloo.variance, atol=UNBIASED)


def test_response_level_losses_first_step():
    """One ratio for the response: on their first step, GSPO and GMPO are GRPO."""
    grpo = moments(STOPPING, algorithms.grpo(), 2)
    for algorithm in (algorithms.gspo(), algorithms.gmpo()):
        np.testing.assert_allclose(moments(STOPPING, algorithm, 2).mean, grpo.mean, atol=UNBIASED)


def test_off_policy_first_order_methods_lose_gradient_where_the_clip_acts():
    """PPO's clip makes the off-policy gradient shorter along the truth than the unclipped surrogate's."""
    moved = TABLE + 0.7 * draw_table(STOPPING, seed=3)
    clipped, free = (
        moments(STOPPING, dataclasses.replace(algorithms.rloo(), loss=loss), 2, params=moved, sampling_params=TABLE)
        for loss in (SURROGATES["ppo_clip"], SURROGATES["surrogate"])
    )
    assert clipped.scale < 0.9 * free.scale


def kl_as_loss(estimator):
    """An algorithm that descends a KL estimate alone: no reward enters."""
    return Algorithm(
        advantage=lambda e: e.rewards,
        loss=lambda log_probs, batch: (estimator(log_probs, batch.ref_log_probs), {}),
        aggregate=aggregate.sequence_mean_token_sum,
    )


def sequence_kl(params, other):
    """KL(params ‖ other) of whole completions, by enumeration."""
    listed = exact.trajectories(STOPPING)
    first, second = (exact.log_probs(STOPPING, p, listed).sum(-1) for p in (params, other))
    return jnp.sum(jnp.exp(first) * (first - second))


def test_the_three_kl_estimators_as_values_and_as_losses():
    """E k1 = E k3 = KL, k2 is off. As losses on policy: E∇k1 = 0, and k2, k3 have the gradients of one action's KL.

    A token's k2 and k3 know the KL of that token's distribution: summed over a response they give ∇ of the expected
    KL along states visited by π, with the states' distribution held fixed.
    """
    reference = TABLE + 0.8 * draw_table(STOPPING, seed=5)
    single = dataclasses.replace(STOPPING, horizon=1, stop_token=None)  # one action: no state distribution
    table, other = TABLE[:, :1], reference[:, :1]
    with jax.enable_x64(True):
        p, q = jnp.asarray(table), jnp.asarray(other)
        forward = np.asarray(jax.grad(lambda x: kl.exact(x[0, 0], q[0, 0]))(p)).reshape(-1)
        backward = np.asarray(jax.grad(lambda x: kl.exact(q[0, 0], x[0, 0]))(p)).reshape(-1)
        probability = jax.nn.softmax(p[0, 0])
        log_p, log_q = jnp.log(probability), jax.nn.log_softmax(q[0, 0])
        truth = kl.exact(p[0, 0], q[0, 0])
        for estimator, unbiased in ((kl.k1, True), (kl.k2, False), (kl.k3, True)):
            error = abs(float(jnp.sum(probability * estimator(log_p, log_q)) - truth))
            assert (error < 1e-12) == unbiased
    descend = partial(exact.moments, single, table, group_size=1, ref_params=other)
    np.testing.assert_allclose(descend(kl_as_loss(kl.k1)).mean, 0.0, atol=UNBIASED)
    np.testing.assert_allclose(descend(kl_as_loss(kl.k2)).mean, -forward, atol=UNBIASED)
    np.testing.assert_allclose(descend(kl_as_loss(kl.k3)).mean, -backward, atol=UNBIASED)
    assert np.abs(forward - backward).max() > 0.01


def test_k1_as_loss_is_zero_and_k1_in_the_reward_is_the_gradient_of_the_kl():
    reference = TABLE + 0.8 * draw_table(STOPPING, seed=5)
    k1 = moments(STOPPING, kl_as_loss(kl.k1), 1, ref_params=reference)
    np.testing.assert_allclose(k1.mean, 0.0, atol=UNBIASED)
    with jax.enable_x64(True):
        truth = np.asarray(jax.grad(sequence_kl)(jnp.asarray(TABLE), jnp.asarray(reference))).reshape(-1)
    anchored = dataclasses.replace(
        algorithms.reinforce_to_go(), advantage=lambda e: on_experience.reward_to_go(on_experience.with_kl_in_reward(e))
    )
    options = {"ref_params": reference, "kl_coef": 0.3}
    with_kl = moments(STOPPING, anchored, 1, **options)
    np.testing.assert_allclose(with_kl.mean, with_kl.gradient - 0.3 * truth, atol=UNBIASED)


def test_ppo_penalty_has_the_gradient_of_the_old_policys_kl():
    """Off policy: −∇(surrogate + β·KL(π_old ‖ π)), here with advantage 0, for one action."""
    single = dataclasses.replace(STOPPING, horizon=1, stop_token=None, rewards=lambda p, c: 0.0)
    new, old = TABLE[:, :1], TABLE[:, :1] + 0.5
    old[0, 0, 1] += 1.0
    algorithm = dataclasses.replace(algorithms.ppo_penalty(), advantage=lambda e: e.rewards)
    m = moments(single, algorithm, 1, params=new, sampling_params=old, kl_coef=0.7)
    with jax.enable_x64(True):
        p, q = jnp.asarray(new), jnp.asarray(old)
        truth = np.asarray(jax.grad(lambda x: 0.7 * kl.exact(q[0, 0], x[0, 0]))(p)).reshape(-1)
    np.testing.assert_allclose(m.mean, -truth, atol=UNBIASED)


def test_truncated_importance_repairs_a_sampler_that_differs_from_the_trainer():
    """One action: without a cap the weight is exact; the cap trades bias for variance."""
    single = exact.TokenMDP(rewards=lambda p, c: float(c[0]), horizon=1)
    table = TABLE[:, :1]
    sampler = table + 0.6 * draw_table(single, seed=2)
    options = {"params": table, "sampling_params": sampler, "trainer_params": table}
    plain = moments(single, algorithms.reinforce(), 1, **options)
    exact_weight = moments(single, algorithms.with_truncated_importance(algorithms.reinforce(), cap=1e9), 1, **options)
    capped = moments(single, algorithms.with_truncated_importance(algorithms.reinforce(), cap=1.1), 1, **options)
    assert np.abs(plain.bias).max() > 0.01
    np.testing.assert_allclose(exact_weight.bias, 0.0, atol=UNBIASED)
    assert 1e-3 < np.abs(capped.bias).max() < np.abs(plain.bias).max()
    assert capped.total_variance < exact_weight.total_variance


def test_truncated_importance_says_what_is_missing():
    with pytest.raises(ValueError, match="trainer_log_probs"):
        moments(STOPPING, algorithms.with_truncated_importance(algorithms.reinforce()), 1)


def test_entropy_bonus_adds_the_gradient_of_the_entropy():
    single = exact.TokenMDP(rewards=lambda p, c: float(c[0]), horizon=1)
    table = TABLE[:, :1]
    bonus = moments(single, dataclasses.replace(algorithms.rloo(), entropy_coef=0.3), 2, params=table)
    with jax.enable_x64(True):

        def entropy(x):
            log_p = jax.nn.log_softmax(x[0, 0])
            return -0.3 * jnp.sum(jnp.exp(log_p) * log_p)

        truth = np.asarray(jax.grad(entropy)(jnp.asarray(table))).reshape(-1)
    np.testing.assert_allclose(bonus.mean - bonus.gradient, truth, atol=UNBIASED)


MODEL = Model(
    Config(vocab_size=4, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, mlp_size=8, max_length=4)
)


def network(params, batch):
    logits = MODEL.logits(params, batch.tokens, batch.token_mask).at[..., 3:].set(-1e9)  # prompts are never drawn
    return Outputs(logprobs.token_log_probs(logits, batch.tokens), logprobs.entropy(logits))


def test_a_transformer_is_a_policy_like_a_table():
    mdp = exact.TokenMDP(rewards=outcome, stop_token=0, policy=network)
    params = MODEL.init(jax.random.key(1))
    m = exact.moments(mdp, params, algorithms.rloo(), 2)
    # The model computes in float32 within, so rounding is larger here.
    np.testing.assert_allclose(m.bias, 0.0, atol=1e-5 * np.abs(m.gradient).max())


def test_an_estimator_may_be_any_function():
    """A hand-written leave-one-out estimator agrees with the library's."""

    def by_hand(params, e):
        def surrogate(p):
            log_probs = jnp.where(e.rollout.action_mask, STOPPING.policy(p, e.rollout).log_probs, 0.0).sum(-1)
            others = (e.rewards.sum() - e.rewards) / (e.rewards.size - 1)
            return jnp.mean(log_probs * (e.rewards - others).reshape(-1))

        return jax.grad(surrogate)(params)

    mine, library = exact.moments(STOPPING, TABLE, by_hand, 3), moments(STOPPING, algorithms.rloo(), 3)
    np.testing.assert_allclose(mine.mean, library.mean, atol=UNBIASED)
    np.testing.assert_allclose(mine.variance, library.variance, atol=UNBIASED)
