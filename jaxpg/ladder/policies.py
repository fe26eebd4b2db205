"""Policies of the small model: an actor alone, or an actor and a critic with a trunk of its own."""

import jax
import jax.numpy as jnp

from jaxpg.algorithms.algorithm import Policy
from jaxpg.estimators import logprobs
from jaxpg.models import Model, heads
from jaxpg.types import Array, Batch, Rollout


def actor(model: Model, *, temperature: float) -> Policy:
    """Maps (params, batch) to the log-probs of its tokens and the entropy at each, at the sampler's temperature."""

    def policy(params, batch):
        logits = model.logits(params, batch.tokens, batch.token_mask, batch.documents)
        log_probs = logprobs.token_log_probs(logits, batch.tokens, temperature=temperature)
        return log_probs, logprobs.entropy(logits, temperature=temperature)

    return policy


def with_critic(model: Model, params: dict, key: Array) -> dict:
    """Parameters of an actor and of a critic that starts as a copy of it, with a head that says 0."""
    critic = {"trunk": jax.tree.map(jnp.copy, params), "head": heads.init(key, model.config.hidden_size)}
    return {"actor": params, "critic": critic}


def acting(params: dict) -> dict:
    """The actor's share of the parameters of `with_critic`: what samples, and what is evaluated."""
    return params["actor"]


def actor_critic(model: Model, *, temperature: float) -> Policy:
    """The policy of `actor` with the critic's values, on parameters of `with_critic`."""
    act = actor(model, temperature=temperature)

    def policy(params, batch):
        hidden = model.hidden(params["critic"]["trunk"], batch.tokens, batch.token_mask)
        return *act(params["actor"], batch), heads.values(params["critic"]["head"], hidden)

    return policy


def values(run):
    """Builds (state, rollout) -> the critic's V before each token [B, T], compiled, for `experience`."""

    @jax.jit
    def of(critic, rollout: Rollout) -> Array:
        hidden = run.model.hidden(critic["trunk"], rollout.tokens, rollout.token_mask)
        return heads.values(critic["head"], hidden)

    return lambda state, rollout: of(state.params["critic"], rollout)


def reference(run, params: dict):
    """Builds (state, rollout) -> the log-probs [B, T] of a policy that stays as it is, for `experience`."""
    frozen, act = jax.tree.map(jnp.copy, params), actor(run.model, temperature=run.config.temperature)

    @jax.jit
    def log_probs(params, rollout: Rollout) -> Array:
        return act(params, Batch(rollout.tokens, rollout.token_mask, rollout.action_mask))[0]

    return lambda _, rollout: log_probs(frozen, rollout)
