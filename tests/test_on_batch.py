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


def documented(words):
    """The algorithms that the module's docstring names after these words."""
    text = named.__doc__.split(words)[1]
    return set(re.findall(r"`(\w+)`", re.split(r";|\n  \S", text)[0]))


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


def test_the_docstring_says_who_reads_segments():
    experience = in_pairs(make_experience())
    read_by_advantage, read_by_loss = set(), set()
    for name, algorithm in ALGORITHMS.items():
        batch = jax.eval_shape(partial(to_batch, algorithm), experience)
        batch = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), batch)
        batch = dataclasses.replace(batch, kl_coef=jnp.ones(len(batch.tokens)))

        def advantage(ids, algorithm=algorithm):
            return algorithm.advantage(dataclasses.replace(experience, segments=ids))

        def loss(ids, algorithm=algorithm, batch=batch):
            return algorithm.loss(batch.log_probs, dataclasses.replace(batch, segments=ids))

        if reads(advantage, experience.segments):
            read_by_advantage.add(name)
        if reads(loss, experience.segments):
            read_by_loss.add(name)
    assert read_by_advantage == documented("advantages of segments:")
    assert read_by_loss - MADE_OF_GRPO == documented("one ratio and clip for each segment:")


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
