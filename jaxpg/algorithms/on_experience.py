"""What the advantages of `algorithms` read from an experience: rewards, lengths, returns."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jaxpg.estimators import checks, kl, masked, returns, segments
from jaxpg.types import Array, Experience


def with_kl_in_reward(experience: Experience) -> Experience:
    """Subtracts β·k1 from every token's reward, where k1 = log π_old − log π_ref and β is `kl_coef`.

    π_old is as the trainer computes it, where `trainer_log_probs` are given: so is π_ref.

    Raises:
      ValueError: without `kl_coef` or `ref_log_probs`.
    """
    e, mask = experience, experience.rollout.action_mask
    coef, reference = checks.require(e, "kl_coef"), checks.require(e, "ref_log_probs")
    old = e.rollout.log_probs if e.trainer_log_probs is None else e.trainer_log_probs
    penalty = coef * kl.k1(masked.fill(old, mask), masked.fill(reference, mask))
    rewards = 0.0 if e.token_rewards is None else e.token_rewards
    return dataclasses.replace(e, token_rewards=rewards - penalty)


def response_rewards(experience: Experience) -> Array:
    """The whole return of each sample [P, G]: its outcome and the rewards of its tokens."""
    rewards = jnp.where(experience.valid, experience.rewards, 0.0)
    if experience.token_rewards is None:
        return rewards
    summed = masked.sum(experience.token_rewards, experience.rollout.action_mask, axis=-1)
    return rewards + summed.reshape(rewards.shape)


def token_rewards(experience: Experience) -> Array:
    """The rewards as a sequence [B, T]: the outcome on the last action, besides what the tokens have."""
    rewards = jnp.where(experience.valid, experience.rewards, 0.0)
    placed = segments.place_outcome(rewards.reshape(-1), experience.rollout.action_mask)
    return placed if experience.token_rewards is None else placed + experience.token_rewards


def group(advantage: Callable[..., Array], **options) -> Callable[[Experience], Array]:
    """Lifts a function of grouped rewards to one of an experience."""
    return lambda experience: advantage(response_rewards(experience), experience.valid, **options)


def lengths(experience: Experience) -> Array:
    """Action tokens of each sample [P, G]."""
    return masked.count(experience.rollout.action_mask, axis=-1).reshape(experience.rewards.shape)


def whiten(advantages: Array, experience: Experience) -> Array:
    """Whitens [B, T] over the actions of all samples that have a reward (`masked.whiten`)."""
    return masked.whiten(advantages, experience.rollout.action_mask & experience.valid.reshape(-1, 1))


def reward_to_go(experience: Experience, *, discount: float = 1.0) -> Array:
    """See `returns.reward_to_go`; where the experience carries segments, from a segment's first token on. [B, T]."""
    e, mask, rewards = experience, experience.rollout.action_mask, token_rewards(experience)
    if e.segments is None:
        return returns.reward_to_go(rewards, mask, discount=discount, ends=e.ends)
    _one_episode(e)
    # All tokens of an action are credited with all that the action earned: GAE at λ = 1 without a critic.
    return returns.segment_gae(rewards, jnp.zeros_like(rewards), e.segments, mask, discount=discount, lambda_=1.0)


def n_step(experience: Experience, *, n: int, discount: float) -> Array:
    """See `returns.n_step`; its steps are tokens, segments or not. [B, T]."""
    e, mask, values = experience, experience.rollout.action_mask, checks.require(experience, "values")
    options = {"discount": discount, "bootstrap": e.bootstrap, "ends": e.ends}
    return returns.n_step(token_rewards(e), values, mask, n=n, **options)


def gae(experience: Experience, *, discount: float, lambda_: float) -> Array:
    """See `returns.gae`, and `returns.segment_gae` where the experience carries segments. [B, T]."""
    e, mask, values = experience, experience.rollout.action_mask, checks.require(experience, "values")
    options = {"discount": discount, "lambda_": lambda_, "bootstrap": e.bootstrap}
    if e.segments is None:
        return returns.gae(token_rewards(e), values, mask, **options, ends=e.ends)
    _one_episode(e)
    # The critic's V is read before each segment's first token, and stands for the whole segment.
    return returns.segment_gae(token_rewards(e), values, e.segments, mask, **options)


def _one_episode(experience: Experience) -> None:
    if experience.ends is not None:
        raise ValueError("ends and segments are both set: several episodes in a row need segments=None, a token each")


def critic_targets(advantages: Array, experience: Experience) -> Array:
    """What the critic is to predict [B, T]: A + V, before the first token of each action; elsewhere V as it is."""
    e, values = experience, checks.require(experience, "values")
    targets = advantages + values
    if e.segments is None:
        return targets
    return jnp.where(segments.first(e.segments, e.rollout.action_mask), targets, values)
