"""The published claims about baselines, normalisers and critics, proved by enumeration in float64.

An expectation here is a finite sum over all groups of completions, so "unbiased" means equal to rounding, and a bias
is a number with a sign.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumerable import DENSE, STOPPING, TABLE, UNBIASED, dense, moments, outcome

from jaxpg import algorithms
from jaxpg.algorithms import exact, on_experience
from jaxpg.algorithms.algorithm import Outputs
from jaxpg.estimators import advantages, aggregate, segments


def with_advantage(advantage):
    return dataclasses.replace(algorithms.reinforce(), advantage=advantage)


def test_enumeration_counts_and_probabilities():
    # With a stop token: 1 + 2 + 2·2·3 completions; without: 3³.
    assert len(exact.trajectories(STOPPING).outcome) == 15
    free = exact.TokenMDP(rewards=outcome, horizon=3, num_prompts=2)
    assert len(exact.trajectories(free).outcome) == 54
    with jax.enable_x64(True):
        found = np.exp(np.asarray(exact.log_probs(STOPPING, jnp.asarray(TABLE), exact.trajectories(STOPPING)))).prod(-1)
    np.testing.assert_allclose(found.sum(), 1.0, atol=1e-12)
    # By hand: the completion (0,) has the probability of token 0 after the empty prefix.
    first = np.exp(TABLE[0, 0]) / np.exp(TABLE[0, 0]).sum()
    np.testing.assert_allclose(found[0], first[0], rtol=1e-12)


def test_true_gradient_equals_finite_differences_and_the_policy_gradient_theorem():
    """∇J = E Σ_t Q(s_t, a_t)·∇log π (Lan, eqs. 7 and 8 at γ = 1), with Q of the true V: Q = r + V(next)."""
    with jax.enable_x64(True):
        table = jnp.asarray(TABLE)
        gradient = np.asarray(jax.grad(partial(exact.objective, DENSE))(table))
        step = 1e-6
        bump = jnp.zeros_like(table).at[0, 2, 1].set(step)
        slope = (exact.objective(DENSE, table + bump) - exact.objective(DENSE, table - bump)) / (2 * step)
    np.testing.assert_allclose(gradient[0, 2, 1], slope, rtol=1e-7)
    theorem = moments(DENSE, algorithms.actor_critic(n=1), 1, values=exact.true_values(DENSE, TABLE))
    np.testing.assert_allclose(theorem.mean, gradient.reshape(-1), atol=UNBIASED)


def test_the_discount_of_the_theorem_is_dropped():
    """With γ < 1 the reward-to-go estimator lacks γ^t and is biased as a gradient of the discounted objective."""
    discounted = exact.TokenMDP(rewards=lambda p, c: [0.5**t * r for t, r in enumerate(dense(p, c))], stop_token=0)
    with jax.enable_x64(True):
        truth = np.asarray(jax.grad(partial(exact.objective, discounted))(jnp.asarray(TABLE))).reshape(-1)
    usual = moments(DENSE, algorithms.reinforce_to_go(discount=0.5), 1).mean
    assert np.abs(usual - truth).max() > 0.01

    def with_discount(e):  # γ^t·G_t
        t = jnp.cumsum(e.rollout.action_mask, axis=-1) - 1.0
        return 0.5**t * on_experience.reward_to_go(e, discount=0.5)

    np.testing.assert_allclose(moments(DENSE, with_advantage(with_discount), 1).mean, truth, atol=UNBIASED)


@pytest.mark.parametrize("mdp", [STOPPING, DENSE], ids=["outcome", "dense"])
@pytest.mark.parametrize("group_size", [1, 3])
def test_reinforce_is_unbiased_and_averaging_divides_its_variance(mdp, group_size):
    m = moments(mdp, algorithms.reinforce(), group_size)
    np.testing.assert_allclose(m.bias, 0.0, atol=UNBIASED)
    single = moments(mdp, algorithms.reinforce(), 1)
    np.testing.assert_allclose(m.variance * group_size, single.variance, atol=UNBIASED)


def test_reward_to_go_is_unbiased_with_less_variance_than_the_whole_return():
    whole, to_go = (moments(DENSE, a, 1) for a in (algorithms.reinforce(), algorithms.reinforce_to_go()))
    np.testing.assert_allclose(to_go.bias, 0.0, atol=UNBIASED)
    assert to_go.total_variance < 0.9 * whole.total_variance


@pytest.mark.parametrize("seed", range(4))
def test_any_baseline_of_the_state_is_unbiased(seed):
    """b is a random number for each prefix, far off the true V; the mean stays, the variance does not."""
    error = np.random.default_rng(seed).normal(size=(DENSE.table_shape[1],)) * 3

    def baseline(e):
        prefix = jnp.zeros_like(e.rollout.tokens[:, 0])
        found = [jnp.zeros(prefix.shape)]
        for t in range(1, e.rollout.tokens.shape[1]):
            found.append(jnp.asarray(error)[prefix])
            prefix = jnp.clip(prefix * 3 + 1 + e.rollout.tokens[:, t], 0, len(error) - 1)
        return jnp.stack(found, axis=1)

    m = moments(DENSE, algorithms.reinforce_baseline(baseline), 1)
    np.testing.assert_allclose(m.bias, 0.0, atol=UNBIASED)
    assert abs(m.total_variance / moments(DENSE, algorithms.reinforce_to_go(), 1).total_variance - 1) > 0.01


def test_a_baseline_that_looks_at_the_action_is_biased():
    m = moments(DENSE, algorithms.reinforce_baseline(lambda e: 0.5 * e.rollout.tokens.astype(float)), 1)
    assert np.abs(m.bias).max() > 0.01


def test_the_true_value_is_a_good_baseline_where_all_rewards_are_positive():
    """The case the critic was made for: without it every action is reinforced."""
    mdp = dataclasses.replace(DENSE, rewards=lambda p, c: [1.0 + r for r in dense(p, c)])
    plain = moments(mdp, algorithms.reinforce_to_go(), 1)
    better = moments(mdp, algorithms.actor_critic(n=9), 1, values=exact.true_values(mdp, TABLE))
    np.testing.assert_allclose(better.bias, 0.0, atol=UNBIASED)
    assert better.total_variance < 0.5 * plain.total_variance


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_group_baselines(group_size):
    """RLOO is unbiased; the group's mean, which holds the sample, gives exactly (G−1)/G of ∇J; Dr. GRPO ∝ RLOO."""
    rloo = moments(STOPPING, algorithms.rloo(), group_size)
    np.testing.assert_allclose(rloo.bias, 0.0, atol=UNBIASED)
    shrink = (group_size - 1) / group_size
    centered = moments(STOPPING, with_advantage(on_experience.group(advantages.group_centered)), group_size)
    np.testing.assert_allclose(centered.mean, shrink * centered.gradient, atol=UNBIASED)
    np.testing.assert_allclose(centered.variance, shrink**2 * rloo.variance, atol=UNBIASED)
    dr_grpo = moments(STOPPING, algorithms.dr_grpo(max_new_tokens=3), group_size)
    np.testing.assert_allclose(dr_grpo.mean, shrink / 3 * rloo.mean, atol=UNBIASED)
    np.testing.assert_allclose(dr_grpo.variance, (shrink / 3) ** 2 * rloo.variance, atol=UNBIASED)


def test_remax_is_unbiased():
    remax, plain = moments(STOPPING, algorithms.remax(), 1), moments(STOPPING, algorithms.reinforce(), 1)
    np.testing.assert_allclose(remax.bias, 0.0, atol=UNBIASED)
    assert abs(remax.total_variance - plain.total_variance) > 1e-3


def test_greedy_completion_is_the_argmax_walk():
    """Greedy is not the most likely completion: token by token, and only completions that exist."""
    mdp = exact.TokenMDP(rewards=lambda p, c: float(len(c)), stop_token=0)
    table = np.zeros(mdp.table_shape)
    table[0, 0] = [0.0, 0.1, -1.0]  # first 1 ...
    table[0, 2] = [0.0, 0.0, 0.5]  # ... after (1,) comes 2 ...
    table[0, 2 * 3 + 3] = [2.0, 0.0, 0.0]  # ... and after (1, 2) the stop: heap number of (1, 2) is (0·3+2)·3+3
    seen = {}

    def spy(params, experience):
        seen["greedy"] = experience.greedy_rewards
        return params

    exact.moments(mdp, table, spy, 1)
    np.testing.assert_array_equal(seen["greedy"], [3.0])


def two_prompts(easy, hard):
    """One token answers: right with the given probability on each prompt."""
    mdp = exact.TokenMDP(rewards=lambda prompt, c: float(c[0] == 1), vocab_size=2, horizon=1, num_prompts=2)
    table = np.zeros(mdp.table_shape)
    table[:, 0, 1] = np.log([easy / (1 - easy), hard / (1 - hard)])
    return mdp, table


def weight_by_prompt(mdp, table, algorithm, group_size):
    m = moments(mdp, algorithm, group_size, params=table)
    mean, truth = m.mean.reshape(2, -1), m.gradient.reshape(2, -1)
    return (mean * truth).sum(-1) / (truth**2).sum(-1)


@pytest.mark.parametrize(("rare", "why"), [(0.95, "easy"), (0.05, "hard")])
def test_dividing_by_the_std_weighs_easy_and_hard_prompts_more(rare, why):
    """The difficulty bias of GRPO: relative to ∇J, a prompt at 0.95 or 0.05 outweighs one at 0.5."""
    mdp, table = two_prompts(rare, 0.5)
    grpo = weight_by_prompt(mdp, table, algorithms.grpo(), 12)
    assert grpo[0] > 1.3 * grpo[1], why
    dr_grpo = weight_by_prompt(mdp, table, algorithms.dr_grpo(max_new_tokens=1), 12)
    np.testing.assert_allclose(dr_grpo[0], dr_grpo[1], rtol=1e-9)
    scaled = weight_by_prompt(mdp, table, algorithms.lite_ppo(), 12)
    assert scaled[0] / scaled[1] < grpo[0] / grpo[1]  # the batch's std is the same for both prompts


def test_maxrl_weighs_hard_prompts_more_and_passk_too():
    mdp, table = two_prompts(0.9, 0.2)
    for algorithm in (algorithms.maxrl(), algorithms.pass_at_k(k=3)):
        easy, hard = weight_by_prompt(mdp, table, algorithm, 5)
        assert hard > 1.5 * easy


@pytest.mark.parametrize(("reward_of_right", "favours"), [(1.0, "short right"), (0.0, "long wrong")])
def test_dividing_by_the_length_favours_short_right_and_long_wrong_answers(reward_of_right, favours):
    """The length bias of GRPO: answers of equal reward that differ in length alone are pushed apart."""
    # Tokens: 0 stops; (0,) is short, (1, 0) and (1, 1) are long, all of one correctness; (2, x) is the opposite.
    mdp = exact.TokenMDP(
        rewards=lambda p, c: reward_of_right if c[0] != 2 else 1.0 - reward_of_right, horizon=2, stop_token=0
    )
    table = np.zeros(mdp.table_shape)

    def push(algorithm):  # d log(π(short)/π(long)) under one step: the gradient's pull of logit 0 against logit 1
        first = moments(mdp, algorithm, 3, params=table).mean.reshape(mdp.table_shape)[0, 0]
        return first[0] - first[1]

    np.testing.assert_allclose(push(algorithms.dr_grpo(max_new_tokens=2)), 0.0, atol=UNBIASED)
    length_bias = push(dataclasses.replace(algorithms.grpo(), advantage=on_experience.group(advantages.group_centered)))
    assert length_bias > 0.01 if favours == "short right" else length_bias < -0.01


def critic_error(mdp, size=0.5):
    """A critic that is wrong by a number for each prefix."""
    listed = exact.trajectories(mdp).batch
    error = np.zeros(listed.tokens.shape)
    for t in range(1, listed.tokens.shape[1]):
        _, prefix = np.unique(listed.tokens[:, :t], axis=0, return_inverse=True)
        numbers = np.random.default_rng(t).normal(size=prefix.max() + 1)
        error[:, t] = np.where(listed.action_mask[:, t], numbers[prefix.reshape(-1)] * size, 0.0)
    return error


def test_bias_of_gae_falls_with_lambda_and_variance_rises():
    values = exact.true_values(DENSE, TABLE) + critic_error(DENSE)
    found = [moments(DENSE, algorithms.actor_critic_gae(lambda_=x), 1, values=values) for x in (0.0, 0.5, 0.9, 1.0)]
    biases = [np.linalg.norm(m.bias) for m in found]
    assert biases[0] > biases[1] > biases[2] > biases[3]
    assert biases[3] < UNBIASED
    one_step = moments(DENSE, algorithms.actor_critic(n=1), 1, values=values)
    np.testing.assert_allclose(one_step.mean, found[0].mean, atol=UNBIASED)


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 1.0])
def test_gae_is_unbiased_with_the_true_value(lambda_):
    values = exact.true_values(DENSE, TABLE)
    m = moments(DENSE, algorithms.actor_critic_gae(lambda_=lambda_), 1, values=values)
    np.testing.assert_allclose(m.bias, 0.0, atol=UNBIASED)
    full = moments(DENSE, algorithms.actor_critic_gae(lambda_=1.0), 1, values=values)
    assert m.total_variance <= full.total_variance + UNBIASED


def test_enumeration_agrees_with_sampling():
    """The Monte Carlo mean and variance of a coordinate agree with the exact ones."""
    m = moments(STOPPING, algorithms.grpo(), 2)
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        listed = exact.trajectories(STOPPING)
        weights = np.exp(np.asarray(exact.log_probs(STOPPING, jnp.asarray(TABLE), listed)).sum(-1))
    drawn = rng.choice(len(weights), p=weights / weights.sum(), size=(20_000, 2))
    rewards = listed.outcome[drawn]
    spread = rewards.std(axis=1, keepdims=True)
    advantage = (rewards - rewards.mean(1, keepdims=True)) / np.where(spread == 0, 1, spread + 1e-6)
    # ∂ log π / ∂ logit of token 1 after the empty prefix, over the response's length.
    first = np.exp(TABLE[0, 0]) / np.exp(TABLE[0, 0]).sum()
    score = ((listed.batch.tokens[:, 1] == 1) - first[1]) / listed.batch.action_mask.sum(-1)
    g = (advantage * score[drawn]).mean(1)
    assert abs(g.mean() - m.mean[1]) < 4 * g.std() / np.sqrt(len(g))
    np.testing.assert_allclose(g.var(), m.variance[1], rtol=0.05)


def test_step_level_estimators():
    """GAE over segments: one token each is token level; steps and whole responses are unbiased with the true V."""

    def segmented(algorithm, ids):
        return dataclasses.replace(
            algorithm, advantage=lambda e: algorithm.advantage(dataclasses.replace(e, segments=ids(e)))
        )

    values = exact.true_values(DENSE, TABLE)
    token_ids = lambda e: jnp.cumsum(e.rollout.action_mask, axis=-1) - 1  # noqa: E731
    gae = algorithms.actor_critic_gae(lambda_=0.5)
    token, plain = (moments(DENSE, a, 1, values=values) for a in (segmented(gae, token_ids), gae))
    np.testing.assert_allclose(token.mean, plain.mean, atol=UNBIASED)
    pairs = segmented(gae, lambda e: (jnp.cumsum(e.rollout.action_mask, axis=-1) - 1) // 2)
    np.testing.assert_allclose(moments(DENSE, pairs, 1, values=values).bias, 0.0, atol=UNBIASED)
    whole = segmented(algorithms.actor_critic_gae(), lambda e: jnp.zeros_like(e.rollout.tokens))
    np.testing.assert_allclose(moments(DENSE, whole, 1, values=values).bias, 0.0, atol=UNBIASED)


def with_segments(algorithm, ids):
    """Over actions of several tokens, summed and without a clip bound or a normaliser."""

    def loss(log_probs, batch):
        return algorithm.loss(log_probs, dataclasses.replace(batch, segments=ids(batch.action_mask)))

    def advantage(e):
        return algorithm.advantage(dataclasses.replace(e, segments=ids(e.rollout.action_mask)))

    sums = aggregate.sequence_mean_token_sum
    return dataclasses.replace(algorithm, advantage=advantage, loss=loss, aggregate=sums)


SEGMENTS = {
    "tokens": segments.token,
    "pairs": lambda mask: jnp.where(mask, (jnp.cumsum(mask, axis=-1) - 1) // 2, -1),
    "responses": segments.response,
}
UNWHITENED = {
    "reinforce_pp": dataclasses.replace(algorithms.reinforce_pp(), advantage=on_experience.reward_to_go),
    "ppo": dataclasses.replace(algorithms.ppo(), advantage=partial(on_experience.gae, discount=1.0, lambda_=1.0)),
    "reinforce_to_go": algorithms.reinforce_to_go(),
    "reinforce_baseline": algorithms.reinforce_baseline(lambda e: 0.5),
    "actor_critic_gae": algorithms.actor_critic_gae(),
    "grpo": dataclasses.replace(algorithms.grpo(), advantage=on_experience.response_rewards),
}


@pytest.mark.parametrize("ids", SEGMENTS)
@pytest.mark.parametrize("name", UNWHITENED)
def test_step_level_algorithms_are_unbiased_where_tokens_have_rewards(name, ids):
    """Each token of an action must be credited with all the action earned, or ratio and advantage do not match."""
    values = exact.true_values(DENSE, TABLE)
    m = moments(DENSE, with_segments(UNWHITENED[name], SEGMENTS[ids]), 1, values=values)
    np.testing.assert_allclose(m.bias, 0.0, atol=UNBIASED)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"horizon": 0}, "horizon=0"),
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"stop_token": 3}, "stop_token=3"),
        ({"horizon": 20}, "horizon=20"),
    ],
)
def test_a_bad_mdp_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        exact.TokenMDP(rewards=outcome, **options)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="group_size=0"):
        exact.moments(STOPPING, TABLE, algorithms.rloo(), 0)
    with pytest.raises(ValueError, match="limit=10"):
        exact.moments(STOPPING, TABLE, algorithms.rloo(), 4, limit=10)
    with pytest.raises(ValueError, match="values has shape"):
        exact.moments(STOPPING, TABLE, algorithms.actor_critic(), 1, values=np.zeros((3, 4)))
    leaky = exact.TokenMDP(
        rewards=outcome, policy=lambda p, b: Outputs(jnp.full(b.tokens.shape, -2.0), jnp.zeros(b.tokens.shape))
    )
    with pytest.raises(ValueError, match="add up to"):
        exact.moments(leaky, TABLE, algorithms.rloo(), 1)
