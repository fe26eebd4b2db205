"""The step-level experiment: three granularities of one rollout, worked out by hand. Its runs: see test_recipes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launching import EXPERIMENTS, load

from jaxpg import algorithms
from jaxpg.data import characters
from jaxpg.parallel import sharding
from jaxpg.rollout.dynamic_sampling import TOLD
from jaxpg.tasks import steps
from jaxpg.types import Experience, Prompts, Rollout

PROBLEM = steps.Problem("2+3+4=", "5;9", 1, ("5", "9"))
TOKENIZER = characters(steps.ALPHABET)
COMPLETION = "5;8"  # and a stop token: the first step is right and earns 1/2, the second is wrong
VALUES = [0.25, 0.5, 0.25, 0.0]


def experience(granularity):
    """A row of two prompt tokens and the completion, scored as the experiment scores it."""
    ids = [*TOKENIZER(COMPLETION, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    tokens = jnp.asarray([[0, 0, *ids]], jnp.int32)
    actions = jnp.asarray([[False, False, True, True, True, True]])
    rollout = Rollout(tokens, jnp.ones((1, 6), bool), actions, jnp.zeros((1, 6)), jnp.ones(1, jnp.int32))
    task = types.SimpleNamespace(step_rewards=steps.make_rewards)
    mesh = sharding.make_mesh("data=1", devices=jax.devices()[:1])
    r = types.SimpleNamespace(task=task, tokenizer=TOKENIZER, mesh=mesh)
    score = load(EXPERIMENTS / "studies" / "step_level.py").scorer(r, granularity)
    scores = score(Prompts(tokens[:, :2], jnp.ones((1, 2), bool), [PROBLEM]), rollout)
    fields = {name: jnp.asarray(x) for name, x in vars(scores).items() if name in TOLD and x is not None}
    return Experience(rollout, values=jnp.asarray([[9.0, 9.0, *VALUES]]), **fields)


@pytest.mark.parametrize(
    ("granularity", "advantages", "ratios"),
    [
        # δ = 0.5-0.25, 0.5+0.25-0.5, 0-0.25, 0; A_t = δ_t + A_{t+1} / 2
        ("token", [0.3125, 0.125, -0.25, 0.0], [1, 1, 1, 1]),
        # V of the steps 0.25 and 0.25: δ = 0.5+0.25-0.25, 0-0.25
        ("step", [0.375, 0.375, -0.25, -0.25], [2, 2, 2, 2]),
        # 0.5 in all less V 0.25
        ("response", [0.25, 0.25, 0.25, 0.25], [4, 4, 4, 4]),
    ],
)
def test_the_granularity_says_who_is_credited_and_what_has_a_ratio(granularity, advantages, ratios):
    batch = algorithms.to_batch(algorithms.actor_critic_gae(lambda_=0.5), experience(granularity))
    np.testing.assert_allclose(batch.advantages[0, 2:], advantages, atol=1e-6)
    whitened = algorithms.to_batch(algorithms.ppo(lambda_=0.5), experience(granularity))
    centred = np.asarray(advantages) - np.mean(advantages)
    np.testing.assert_allclose(
        whitened.advantages[0, 2:], centred / max(float(np.std(advantages)), 1e-4), rtol=1e-3, atol=1e-6
    )
    moved = jnp.where(batch.action_mask, 0.01, 0.0)  # each token a little likelier than when it was drawn
    aux = algorithms.ppo().loss(moved, batch)[1]
    np.testing.assert_allclose(np.log(aux["ratio"][0, 2:]) / 0.01, ratios, rtol=1e-4)
