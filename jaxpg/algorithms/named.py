"""The ladder by name: an algorithm is an advantage, a per-token loss and an aggregation.

To write a new one, call `Algorithm(advantage=..., loss=..., aggregate=...)` with functions of your own. `trpo` needs
`trust_region.make_update` in place of `update.make_update`. For Bradley-Terry, DPO and IPO see `preference`.

The granularity of actions is data, not an option: an action is a token, or a segment where the experience carries
`segments`. The table says what has an advantage of its own, and what has a ratio and a clip of its own. Without
segments, "segment" means a token, but for `gspo` the response. The weights of `with_truncated_importance` and
`with_icepop` are of tokens.

  algorithm                                                      advantage   ratio
  `supervised`, `reinforce`, `remax`, `rloo`, `opo`, `maxrl`     response    none
  `reinforce_to_go`, `reinforce_baseline`, `actor_critic_gae`    segment     none
  `actor_critic`                                                 token       none
  `trpo`, `ppo_penalty`                                          segment     token
  `ppo`, `rlhf`, `reinforce_pp`                                  segment     segment
  `ppo_critic_free`, `reinforce_pp_baseline`, `grpo`, `dr_grpo`  response    segment
  `dapo`, `lite_ppo`, `pass_at_k`, `gdpo`, `gspo`                response    segment
  `cispo`, `sapo`                                                response    token
  `rloo_clip`, `gmpo`                                            response    response

Losses without a ratio are indifferent to segments: the log-prob of a segment is the sum of its tokens'.

Equations of the two articles the ladder follows, and where they live.

Lan 2025, "From REINFORCE to Dr. GRPO" (numbers are the article's):
  1 return `returns.reward_to_go` | 2–5 V and Q `exact.true_values`, test_exact | 6 objective `exact.objective` |
  7–9 policy gradient theorem, with and without γ^t: test_exact | 10 `reinforce` | 11, 12 `reinforce_baseline` |
  13 `remax` | 14 `rloo` | off-policy surrogate `losses.surrogate` | 15, 16 `ppo_critic_free` | 17 `returns.gae` |
  advantage normalisation `masked.whiten` | 18 `grpo` | 19 `dr_grpo` times G/(G−1): on policy that is `rloo` |
  20 `advantages.group_normalized` | 21 `dr_grpo`

Caruzzo 2026, "How policy-gradient methods became practical for reasoning models" (by section):
  trajectory return, log-derivative trick: test_exact | log-probability of a trajectory
  `preference.sequence_log_probs` | reward-to-go `reinforce_to_go` | baseline `reinforce_baseline` | critic's regression
  `value_losses.squared`, with the proximal term ‖φ − φ_i‖² `value_losses.proximal` | Q, V, n-step advantages (A3C)
  `returns.n_step`, `actor_critic` | GAE and its bootstrapped target `returns.gae`, `actor_critic_gae` | importance
  sampling `losses.surrogate`, test_exact | TRPO, Fisher matrix, conjugate gradient `trust_region` | PPO-penalty
  `ppo_penalty`, adaptive β `kl.double_or_halve` | PPO-clip `ppo` | RLHF `preference.bradley_terry`, exact KL
  `kl.exact`, k1 in the reward `rlhf` | GRPO `grpo`, its KL estimate `kl.k3` | Dr. GRPO `dr_grpo` | "12 × 13" example:
  test_advantages, notebooks/compose_estimators.ipynb
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from jaxpg.algorithms import on_batch
from jaxpg.algorithms.algorithm import Algorithm, Critic
from jaxpg.algorithms.on_batch import by_segment, old_and_advantages
from jaxpg.algorithms.on_experience import (
    critic_targets,
    gae,
    group,
    lengths,
    n_step,
    response_rewards,
    reward_to_go,
    whiten,
    with_kl_in_reward,
)
from jaxpg.estimators import advantages, aggregate, checks, kl, losses, ratios, segments, value_losses
from jaxpg.estimators.checks import require
from jaxpg.types import Array, Batch, Experience

# ---- REINFORCE and its baselines ------------------------------------------------------------------------------------


def supervised() -> Algorithm:
    """Maximum likelihood: REINFORCE with advantage 1 on completions that somebody else wrote.

    The advantages of a batch weigh its tokens, 0 for a sample that is not `valid`; a batch without has weights 1.
    """

    def loss(log_probs, batch):
        return losses.reinforce(log_probs, jnp.ones_like(log_probs) if batch.advantages is None else batch.advantages)

    return Algorithm(advantage=lambda e: jnp.ones_like(e.rewards), loss=loss, aggregate=aggregate.token_mean)


def reinforce() -> Algorithm:
    """REINFORCE: the whole return for every action, no baseline (Williams 1992)."""
    return Algorithm(
        advantage=response_rewards,
        loss=on_batch.score,
        aggregate=aggregate.sequence_mean_token_sum,
    )


def reinforce_to_go(*, discount: float = 1.0) -> Algorithm:
    """REINFORCE with causality: an action is credited with what follows it. Equal to `reinforce` on outcome rewards.

    The γ^t in front of each term, which the policy gradient theorem has, is dropped as everybody does.
    """
    return Algorithm(
        advantage=partial(reward_to_go, discount=discount),
        loss=on_batch.score,
        aggregate=aggregate.sequence_mean_token_sum,
    )


def reinforce_baseline(baseline: Callable[[Experience], Array], *, discount: float = 1.0) -> Algorithm:
    """REINFORCE less any b(s) that ignores the action: experience -> [B, T], [B, 1] or []; unbiased, less variance."""
    return Algorithm(
        advantage=lambda e: reward_to_go(e, discount=discount) - baseline(e),
        loss=on_batch.score,
        aggregate=aggregate.sequence_mean_token_sum,
    )


def remax() -> Algorithm:
    """ReMax: the baseline is the reward of the greedy completion (Li 2024)."""
    return Algorithm(
        advantage=lambda e: advantages.greedy_baseline(response_rewards(e), require(e, "greedy_rewards"), e.valid),
        loss=on_batch.score,
        aggregate=aggregate.sequence_mean_token_sum,
    )


def rloo() -> Algorithm:
    """RLOO: the baseline is the mean reward of the other samples (Kool 2019; Ahmadian 2024)."""
    return Algorithm(
        advantage=group(advantages.leave_one_out),
        loss=on_batch.score,
        aggregate=aggregate.sequence_mean_token_sum,
    )


def rloo_clip(*, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """RLOO with several updates a rollout: one clipped ratio for the whole response, the action of a bandit."""
    clip = partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high)
    return Algorithm(
        advantage=group(advantages.leave_one_out),
        loss=lambda log_probs, batch: by_segment(clip, log_probs, batch, segments.response(batch.action_mask)),
        aggregate=aggregate.sequence_mean_token_sum,
    )


def opo() -> Algorithm:
    """OPO: the length-weighted mean reward as baseline, exactly on policy (Hao 2025)."""
    return Algorithm(
        advantage=lambda e: advantages.length_weighted_baseline(response_rewards(e), lengths(e), e.valid),
        loss=on_batch.score,
        aggregate=aggregate.sequence_mean_token_sum,
    )


def maxrl() -> Algorithm:
    """MaxRL: centred rewards over their mean, which climbs towards log-likelihood (Tajwar 2026)."""
    return Algorithm(
        advantage=group(advantages.mean_normalized),
        loss=on_batch.score,
        aggregate=aggregate.sequence_mean_token_sum,
    )


# ---- With a critic --------------------------------------------------------------------------------------------------


def _squared(values: Array, batch: Batch) -> Array:
    return value_losses.squared(values, require(batch, "returns"))


def actor_critic(*, n: int = 1, discount: float = 1.0, value_coef: float = 0.5) -> Algorithm:
    """A3C: n rewards and then the critic (Mnih 2016). n = 1 is TD(0); n >= the longest response is return − V."""
    targets = partial(n_step, n=n, discount=discount)
    return Algorithm(
        advantage=lambda e: targets(e) - require(e, "values"),
        loss=on_batch.score,
        aggregate=aggregate.sequence_mean_token_sum,
        critic=Critic(targets, _squared, coef=value_coef),
    )


def actor_critic_gae(*, discount: float = 1.0, lambda_: float = 0.95, value_coef: float = 0.5) -> Algorithm:
    """GAE: the λ-mixture of all n-step advantages (Schulman 2016)."""
    estimate = partial(gae, discount=discount, lambda_=lambda_)
    return Algorithm(
        advantage=estimate,
        loss=on_batch.score,
        aggregate=aggregate.sequence_mean_token_sum,
        critic=Critic(lambda e: critic_targets(estimate(e), e), _squared, coef=value_coef),
    )


def trpo(*, discount: float = 1.0, lambda_: float = 0.95) -> Algorithm:
    """TRPO: GAE under the plain surrogate (Schulman 2015); its critic needs an update of its own."""
    return dataclasses.replace(
        actor_critic_gae(discount=discount, lambda_=lambda_),
        loss=lambda log_probs, batch: losses.surrogate(log_probs, *old_and_advantages(batch)),
        aggregate=aggregate.token_mean,
    )


def ppo_penalty(
    *, discount: float = 1.0, lambda_: float = 0.95, value_coef: float = 0.5, kl_coef: float = 0.2
) -> Algorithm:
    """PPO with a penalty β·KL(π_old ‖ π) (Schulman 2017, eq. 8).

    `update.make_kl_adaptation` moves β by factors, so the first one, `kl_coef`, must be above 0.
    """
    checks.positive("kl_coef", kl_coef)
    return dataclasses.replace(
        actor_critic_gae(discount=discount, lambda_=lambda_, value_coef=value_coef),
        loss=on_batch.kl_penalty,
        aggregate=aggregate.token_mean,
        kl_coef=kl_coef,
    )


def ppo(
    *,
    discount: float = 1.0,
    lambda_: float = 0.95,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float = 0.2,
    value_coef: float = 0.5,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """PPO: whitened GAE, clipped ratio, clipped critic (Schulman 2017, eqs. 7, 9); over segments, if there are any."""
    estimate = partial(gae, discount=discount, lambda_=lambda_)

    def value_loss(values, batch):
        old, targets = require(batch, "values"), require(batch, "returns")
        return value_losses.clipped(values, old, targets, clip=value_clip)

    return Algorithm(
        advantage=lambda e: whiten(estimate(e), e),
        loss=partial(on_batch.clip, clip_low=clip_low, clip_high=clip_high),
        aggregate=aggregate.token_mean,
        entropy_coef=entropy_coef,
        critic=Critic(lambda e: critic_targets(estimate(e), e), value_loss, coef=value_coef),
    )


def rlhf(*, kl_coef: float = 0.1, **options) -> Algorithm:
    """RLHF: `ppo`, whose options it takes, on r_t − β·k1_t, anchored to the reference policy (Ouyang 2022).

    kl_coef is the first β, above 0. The β of the moment is read from `Experience.kl_coef`: set it to the train state's.
    """
    checks.positive("kl_coef", kl_coef)
    plain = ppo(**options)
    critic = dataclasses.replace(plain.critic, targets=lambda e: plain.critic.targets(with_kl_in_reward(e)))
    return dataclasses.replace(
        plain, advantage=lambda e: plain.advantage(with_kl_in_reward(e)), critic=critic, kl_coef=kl_coef
    )


# ---- Without a critic -----------------------------------------------------------------------------------------------


def ppo_critic_free(*, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Algorithm:
    """PPO's clipped objective on response rewards whitened over the batch, without a critic (Schulman 2017, eq. 7).

    dual_clip bounds the loss of a negative advantage at a huge ratio (Ye 2020, eq. 5); 3 is common.
    """
    return Algorithm(
        advantage=group(advantages.batch_normalized),
        loss=partial(on_batch.clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregate=aggregate.token_mean,
    )


def reinforce_pp(*, clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0) -> Algorithm:
    """REINFORCE++: reward-to-go with k1 in the reward, whitened over the batch's tokens (Hu 2025).

    kl_coef is the first β; 0 leaves the KL out. The β of the moment is read from `Experience.kl_coef`.
    """

    def advantage(e):
        return whiten(reward_to_go(with_kl_in_reward(e) if kl_coef > 0 else e), e)

    plain = ppo_critic_free(clip_low=clip_low, clip_high=clip_high)
    return dataclasses.replace(plain, advantage=advantage, kl_coef=kl_coef)


def reinforce_pp_baseline(*, clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0) -> Algorithm:
    """REINFORCE++ with baseline: group mean off, scaled over the batch, k2 in the loss if kl_coef > 0 (Hu 2025)."""
    anchor = kl.k2 if kl_coef > 0 else None
    return Algorithm(
        advantage=group(advantages.group_centered_batch_normalized),
        loss=partial(on_batch.clip, clip_low=clip_low, clip_high=clip_high, kl_estimator=anchor),
        aggregate=aggregate.token_mean,
        kl_coef=kl_coef,
    )


def grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0) -> Algorithm:
    """GRPO: z-score in the group, mean over tokens then samples, k3 in the loss if kl_coef > 0 (Shao 2024, eq. 3)."""
    anchor = kl.k3 if kl_coef > 0 else None
    return Algorithm(
        advantage=group(advantages.group_normalized),
        loss=partial(on_batch.clip, clip_low=clip_low, clip_high=clip_high, kl_estimator=anchor),
        aggregate=aggregate.sequence_mean_token_mean,
        kl_coef=kl_coef,
    )


def dr_grpo(*, max_new_tokens: int, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """Dr. GRPO: GRPO less its two normalisers (Liu 2025); the budget, a constant, replaces the length.

    On policy its gradient times G/(G−1)·max_new_tokens equals that of `rloo`.
    """
    return Algorithm(
        advantage=group(advantages.group_centered),
        loss=partial(on_batch.clip, clip_low=clip_low, clip_high=clip_high),
        aggregate=partial(aggregate.constant_length, length=max_new_tokens),
    )


def dapo(*, limit: int, margin: int, clip_low: float = 0.2, clip_high: float = 0.28) -> Algorithm:
    """DAPO: higher upper clip bound, token mean, overlong shaping, no KL (Yu 2025).

    limit and margin, in tokens: `advantages.overlong_penalty`. Resampling groups of equal rewards is the loop's part.
    """
    penalty = partial(advantages.overlong_penalty, limit=limit, margin=margin)
    return Algorithm(
        advantage=lambda e: advantages.group_normalized(response_rewards(e) + penalty(lengths(e)), e.valid),
        loss=partial(on_batch.clip, clip_low=clip_low, clip_high=clip_high),
        aggregate=aggregate.token_mean,
    )


def lite_ppo(*, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """Lite PPO: the group's mean, but the batch's std, so that no prompt is weighed by its difficulty (Liu 2025)."""
    return dataclasses.replace(
        ppo_critic_free(clip_low=clip_low, clip_high=clip_high), advantage=group(advantages.group_centered_batch_scaled)
    )


def pass_at_k(*, k: int, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """Pass@k training: GRPO for the reward "one of k is right" (Chen 2025)."""
    return dataclasses.replace(grpo(clip_low=clip_low, clip_high=clip_high), advantage=group(advantages.pass_at_k, k=k))


def gdpo(*, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """GDPO: GRPO for several rewards, each normalised by itself before they are added (Liu 2026)."""

    def advantage(e):
        scores = require(e, "scores")
        applied = True if e.scores_valid is None else e.scores_valid
        return advantages.decoupled(scores, jnp.broadcast_to(e.valid[..., None] & applied, scores.shape))

    return dataclasses.replace(grpo(clip_low=clip_low, clip_high=clip_high), advantage=advantage)


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Algorithm:
    """GSPO: GRPO with one length-normalised ratio for the response (Zheng 2025, eq. 5), or for each segment."""
    return dataclasses.replace(
        grpo(),
        loss=lambda log_probs, batch: losses.gspo(
            log_probs,
            *old_and_advantages(batch),
            batch.action_mask,
            clip_low=clip_low,
            clip_high=clip_high,
            segments=batch.segments,
        ),
    )


def gmpo(*, clip_low: float = 0.4, clip_high: float = 0.4) -> Algorithm:
    """GMPO: GRPO with the geometric mean of clipped token ratios (Zhao 2025)."""
    clip = partial(losses.gmpo, clip_low=clip_low, clip_high=clip_high)
    return dataclasses.replace(
        grpo(), loss=lambda log_probs, batch: clip(log_probs, *old_and_advantages(batch), batch.action_mask)
    )


def cispo(*, clip_low: float = 1.0, clip_high: float = 4.0) -> Algorithm:
    """CISPO: the importance weight is clipped, the gradient of no token is lost (MiniMax 2025)."""
    clip = partial(losses.cispo, clip_low=clip_low, clip_high=clip_high)
    return Algorithm(
        advantage=group(advantages.group_normalized),
        loss=lambda log_probs, batch: clip(log_probs, *old_and_advantages(batch)),
        aggregate=aggregate.token_mean,
    )


def sapo(*, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> Algorithm:
    """SAPO: GRPO with a soft gate in place of the clip (Gao 2025)."""
    gate = partial(losses.sapo, temperature_positive=temperature_positive, temperature_negative=temperature_negative)
    return dataclasses.replace(grpo(), loss=lambda log_probs, batch: gate(log_probs, *old_and_advantages(batch)))


# ---- Changes to any of the above ------------------------------------------------------------------------------------


def with_truncated_importance(algorithm: Algorithm, *, cap: float = 2.0) -> Algorithm:
    """Corrects a sampler whose probabilities differ from the trainer's: see `ratios.truncated`."""
    return on_batch.weighted(algorithm, partial(ratios.truncated, cap=cap))


def with_icepop(algorithm: Algorithm, *, low: float = 0.5, high: float = 5.0) -> Algorithm:
    """Drops tokens on which sampler and trainer disagree too much (IcePop): see `ratios.banded`."""
    return on_batch.weighted(algorithm, partial(ratios.banded, low=low, high=high))
