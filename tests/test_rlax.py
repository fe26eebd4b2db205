"""rlax as an oracle for whatever it has too, in value and gradient; returns and ppo_clip meet it in their own tests.

rlax knows neither masks nor leading axes and averages by itself, so everything here is one full sequence.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.estimators import kl, logprobs, losses, ratios, returns, value_losses

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import rlax

# rlax itself, not the code under test, uses what newer versions of JAX give up.
pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore::DeprecationWarning")
RNG = np.random.default_rng(0)
T, V = 7, 5
LOGITS, OTHER = RNG.normal(size=(2, T, V)).astype(np.float32) * 2
ACTIONS = RNG.integers(0, V, T)
X, Y = RNG.normal(size=(2, T)).astype(np.float32)
# rlax aligns logits with the action they draw, we with the token before: one position of context in front.
TOKENS = np.concatenate([[0], ACTIONS])


def shifted(logits):
    return jnp.concatenate([logits, jnp.zeros((1, V))])


def log_probs(logits):
    return logprobs.token_log_probs(shifted(logits), TOKENS)[1:]


PAIRS = {
    "reward_to_go": (
        lambda x: returns.reward_to_go(x[:, 0], np.ones(T, bool), discount=0.9),
        lambda x: rlax.discounted_returns(x[:, 0], jnp.full(T, 0.9), jnp.zeros(T)),
    ),
    "reinforce": (
        lambda x: jnp.mean(losses.reinforce(log_probs(x), Y)[0]),
        lambda x: rlax.policy_gradient_loss(x, ACTIONS, Y, jnp.ones(T)),
    ),
    "entropy_bonus": (
        lambda x: jnp.mean(losses.entropy_bonus(logprobs.entropy(shifted(x))[1:], coef=1.0)[0]),
        lambda x: rlax.entropy_loss(x, jnp.ones(T)),
    ),
    "entropy": (
        lambda x: logprobs.entropy(shifted(x), temperature=0.7)[1:],
        lambda x: rlax.softmax(temperature=0.7).entropy(x),
    ),
    "token_log_probs": (
        lambda x: logprobs.token_log_probs(shifted(x), TOKENS, temperature=0.7)[1:],
        lambda x: rlax.softmax(temperature=0.7).logprob(ACTIONS, x),
    ),
    "exact_kl": (lambda x: kl.exact(x, OTHER), lambda x: rlax.categorical_kl_divergence(x, OTHER)),
    "token_ratio": (
        lambda x: ratios.token(log_probs(x), log_probs(OTHER)),
        lambda x: rlax.categorical_importance_sampling_ratios(x, OTHER, ACTIONS),
    ),
    "squared": (lambda x: value_losses.squared(x[:, 0], Y), lambda x: rlax.l2_loss(x[:, 0], Y)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_agrees_with_rlax(name):
    mine, theirs = (jax.jit(f) for f in PAIRS[name])
    np.testing.assert_allclose(mine(LOGITS), theirs(LOGITS), rtol=1e-5, atol=1e-6)
    gradients = [jax.grad(lambda x, f=f: jnp.sum(jnp.cos(f(x))))(LOGITS) for f in (mine, theirs)]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)
    assert np.any(gradients[0])
