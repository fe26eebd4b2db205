"""Groups without a signal give way to new ones, with everything that was told of their samples."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from launching import EXPERIMENTS, load

from jaxpg.rollout.dynamic_sampling import Drawn, has_signal, replace_groups
from jaxpg.types import Prompts, Rollout, Scores


def drawn(rewards, name, **more):
    """Groups of two rows whose tokens say where they come from."""
    rewards = np.asarray(rewards, np.float32)
    tokens = jnp.asarray([[name, i] for i in range(rewards.size)], jnp.int32)
    mask = jnp.ones((rewards.size, 2), bool)
    rollout = Rollout(tokens, mask, mask, jnp.zeros((rewards.size, 2)), jnp.zeros(rewards.size, jnp.int32))
    scores = Scores(rewards, np.ones(rewards.shape, bool), **more)
    asked = np.full((len(rewards), 1), name)
    prompts = Prompts(asked, asked == asked, [f"{name}{p}" for p in range(len(rewards))])
    return Drawn(prompts, rollout, scores)


def test_the_scores_of_each_scorer_move_with_their_groups_and_failures_add_up():
    of = {
        name: {
            "scores": np.full((2, 2, 3), name),
            "scores_valid": np.full((2, 2, 3), bool(name)),
            "greedy_rewards": np.array([10.0 * name, 10.0 * name + 1]),
            "names": ("a", "b", "c"),
            "failures": np.array([0, name, 2]),
        }
        for name in (0, 1)
    }
    kept = replace_groups(drawn([[1, 1], [0, 1]], 0, **of[0]), drawn([[0, 0], [1, 0]], 1, **of[1]))
    assert kept.prompts.problems == ["11", "01"]
    np.testing.assert_array_equal(kept.prompts.tokens, [[1], [0]])
    np.testing.assert_array_equal(kept.scores.scores[:, 0, 0], [1, 0])
    np.testing.assert_array_equal(kept.scores.scores_valid[:, 0, 0], [True, False])
    np.testing.assert_array_equal(kept.scores.greedy_rewards, [11.0, 1.0])
    np.testing.assert_array_equal(kept.rollout.tokens, [[1, 2], [1, 3], [0, 2], [0, 3]])
    assert kept.scores.names == ("a", "b", "c") and kept.scores.failures.tolist() == [0, 1, 4]
    assert kept.scores.token_rewards is None


def test_a_loop_of_ones_own_ends_when_every_group_has_a_signal():
    offers = [drawn([[0, 0], [0, 1]], 0), drawn([[1, 1], [1, 1]], 1), drawn([[1, 1], [0, 1]], 2)]
    batch, draws = offers[0], 1
    while not has_signal(batch.scores).all():
        batch = replace_groups(batch, offers[draws])
        draws += 1
    assert draws == 3 and batch.prompts.problems == ["21", "01"] and batch.scores.failures is None


def test_a_reward_that_does_not_count_is_no_signal():
    scores = Scores(np.array([[0.0, 1.0], [0.0, np.nan]]), np.array([[True, True], [True, False]]))
    np.testing.assert_array_equal(has_signal(scores), [True, False])


def test_rewards_of_steps_are_a_signal():
    of_tokens = np.array([[0.5, 0.5], [0.5, 0.0], [0.0, 0.5], [0.5, 0.0]], np.float32)
    scores = Scores(np.zeros((2, 2), np.float32), np.ones((2, 2), bool), token_rewards=of_tokens)
    np.testing.assert_array_equal(has_signal(scores), [True, False])


# ---- The loop of DAPO ------------------------------------------------------------------------------------------------


def one_step_of_dapo(offers, *, max_resamples):
    """Runs DAPO's loop for step 5 on draws that are given; returns its batch, its row and the streams it asked for."""
    dapo, asked, committed = load(EXPERIMENTS / "ladder" / "dapo.py"), [], []

    def score(prompts, rollout):
        return offers[len(asked) - 1].scores

    def prompts(k):
        asked.append(k)
        return offers[len(asked) - 1].prompts

    r = types.SimpleNamespace(
        config=dapo.Config(max_resamples=max_resamples),
        setup=types.SimpleNamespace(max_new_tokens=4),
        warm_up=lambda: {},
        start=lambda algorithm, params: (
            types.SimpleNamespace(params=params),
            lambda rollout, scores: (rollout, scores),
            lambda state, batch, key: (state, {"batch": batch}),
        ),
        steps=lambda state: [(5, state)],
        key=lambda k: jax.random.key(k),
        prompts=prompts,
        sample=lambda params, prompts, key: offers[len(asked) - 1].rollout,
        score=score,
        commit=lambda k, state, row: committed.append(row),
    )
    dapo.train(r)
    (row,) = committed
    return *row["batch"], row, asked


def test_groups_without_a_signal_are_replaced_until_the_batch_is_full():
    offers = [
        drawn([[0, 0], [0, 1], [1, 1]], 0),
        drawn([[1, 1], [0, 0], [1, 0]], 1),
        drawn([[0, 1], [1, 0], [0, 1]], 2),
    ]
    rollout, scores, row, asked = one_step_of_dapo(offers, max_resamples=9)
    assert row["sampled_groups"] == 3 and asked == [50, 51, 52], "each step has prompts of its own for all its draws"
    # Group 0 comes from the second draw's last, group 2 from the third's first; group 1 stays.
    np.testing.assert_array_equal(scores.rewards, [[1, 0], [0, 1], [0, 1]])
    np.testing.assert_array_equal(rollout.tokens, [[1, 4], [1, 5], [0, 2], [0, 3], [2, 0], [2, 1]])


def test_the_bound_on_draws_holds_and_keeps_the_shape():
    constant = drawn([[1, 1], [0, 0]], 0)
    for most in (2, 0):
        rollout, _, row, asked = one_step_of_dapo([constant] * 9, max_resamples=most)
        assert row["sampled_groups"] == len(asked) == most + 1
        np.testing.assert_array_equal(rollout.tokens, constant.rollout.tokens)
