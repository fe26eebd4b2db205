"""Segments as actions: who reads them, and that a segment's ratio is exact however long it is."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_algorithms import ALGORITHMS, make_experience

from jaxpg.algorithms import named, on_batch
from jaxpg.algorithms.algorithm import to_batch
from jaxpg.estimators import aggregate, losses
from jaxpg.types import Batch

MADE_OF_GRPO = {"with_truncated_importance", "with_icepop"}


def documented():
    """The table of the module's docstring: algorithm -> (what has an advantage, what has a ratio)."""
    rows = re.findall(r"^  (`.*`) +(\w+) +(\w+)$", named.__doc__, flags=re.MULTILINE)
    return {name: (credited, ratio) for names, credited, ratio in rows for name in re.findall(r"`(\w+)`", names)}


def in_pairs(experience):
    """Two tokens an action, and rewards on tokens so that it matters where an action begins."""
    mask = experience.rollout.action_mask
    pairs = jnp.where(mask, (jnp.cumsum(mask, axis=-1) - 1) // 2, -1)
    rewards = jnp.where(mask, jnp.sin(jnp.arange(mask.size, dtype=jnp.float32).reshape(mask.shape)), 0.0)
    return dataclasses.replace(experience, segments=pairs, token_rewards=rewards)


def reads(function, segments):
    """Whether the segments enter any computation; traced only."""
    jaxpr = jax.make_jaxpr(function)(segments).jaxpr
    return any(variable is jaxpr.invars[0] for equation in jaxpr.eqns for variable in equation.invars)


def segment_or(unit, function, ids):
    return "segment" if reads(function, ids) else unit


def advantage_of(algorithm, experience):
    """What has an advantage of its own: the response, the token, or the segment where there are any."""
    one_a_response = jax.eval_shape(algorithm.advantage, experience).shape == experience.rewards.shape

    def advantage(ids):
        return algorithm.advantage(dataclasses.replace(experience, segments=ids))

    return segment_or("response" if one_a_response else "token", advantage, experience.segments)


def ratio_of(algorithm, experience):
    """What has a ratio of its own; "none" for a loss that does not compare the policy with that of the rollout."""
    batch = dataclasses.replace(to_batch(algorithm, experience), kl_coef=jnp.ones(len(experience.rollout.tokens)))

    def loss(ids):
        return algorithm.loss(batch.log_probs, dataclasses.replace(batch, segments=ids))

    def aux(log_probs):
        return algorithm.loss(log_probs, batch)[1]

    if "ratio" not in aux(batch.log_probs):
        return "none"
    row = int(np.argmax(batch.action_mask.sum(-1)))
    moved = batch.log_probs.at[row, 1].add(0.01)  # the first action of the longest response
    changed = int(jnp.sum(aux(moved)["ratio"][row] != aux(batch.log_probs)["ratio"][row]))
    return segment_or("token" if changed == 1 else "response", loss, batch.segments)


def test_the_table_says_what_has_an_advantage_and_what_has_a_ratio():
    experience = in_pairs(make_experience())
    found = {
        name: (advantage_of(algorithm, experience), ratio_of(algorithm, experience))
        for name, algorithm in ALGORITHMS.items()
        if name not in MADE_OF_GRPO
    }
    assert found == documented()


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_all_tokens_of_a_segment_share_its_advantage(name):
    """Else the ratio of the segment would meet an advantage that left part of its rewards out."""
    experience = in_pairs(make_experience())
    batch = to_batch(ALGORITHMS[name], experience)
    mask = np.asarray(batch.action_mask)
    together = mask[:, 1:] & mask[:, :-1] & np.asarray(batch.segments[:, 1:] == batch.segments[:, :-1])
    assert together.any()
    np.testing.assert_array_equal(batch.advantages[:, 1:][together], batch.advantages[:, :-1][together])


def long_response(length=4096):
    """Log-probs of about −3 a token, and new ones a little off."""
    rng = np.random.default_rng(0)
    old = rng.normal(-3.0, 1.0, (1, length)).astype(np.float32)
    new = (old + 1e-4 * rng.normal(size=old.shape)).astype(np.float32)
    full = np.ones(old.shape, bool)
    batch = Batch(jnp.zeros(old.shape, jnp.int32), full, full, log_probs=old, advantages=jnp.ones(old.shape))
    return new, dataclasses.replace(batch, segments=jnp.zeros(old.shape, jnp.int32))


def test_the_ratio_of_thousands_of_tokens_is_exact():
    new, batch = long_response()
    exact = np.exp((new.astype(float) - np.asarray(batch.log_probs, float)).sum())
    _, aux = on_batch.by_segment(losses.surrogate, jnp.asarray(new), batch, batch.segments)
    np.testing.assert_allclose(aux["ratio"][0], exact, rtol=1e-6)


def test_what_means_over_tokens_make_of_segments():
    """Each segment counts once in a sum; a mean over tokens divides by their number nevertheless."""
    _, batch = long_response(12)
    batch = dataclasses.replace(batch, segments=jnp.arange(12)[None] // 4, advantages=jnp.full((1, 12), 2.0))
    loss, _ = on_batch.by_segment(partial(losses.ppo_clip), batch.log_probs, batch, batch.segments)
    np.testing.assert_allclose(aggregate.sequence_mean_token_sum(loss, batch.action_mask).mean, -2.0 * 3, rtol=1e-6)
    for mean in (aggregate.token_mean, aggregate.sequence_mean_token_mean):
        np.testing.assert_allclose(mean(loss, batch.action_mask).mean, -2.0 * 3 / 12, rtol=1e-6)
