"""Policy losses: four quadrants in value and gradient, identities between losses, garbage off the actions."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import aggregate, losses, masked, segments

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import rlax

MASK = jnp.array([[False, True, True, True], [True, False, True, False]])
LOG_PROBS = jnp.array([[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.3, -0.2, -3.0]])
OLD = jnp.array([[-1.1, -0.9, -1.2, -0.1], [-1.4, -1.0, -0.3, -1.0]])
ADVANTAGES = jnp.array([[0.8], [-1.5]])

POINTWISE = {
    "reinforce": lambda lp, old, a: losses.reinforce(lp, a),
    "surrogate": losses.surrogate,
    "ppo_clip": losses.ppo_clip,
    "dual_clip": lambda lp, old, a: losses.ppo_clip(lp, old, a, dual_clip=3.0),
    "cispo": lambda lp, old, a: losses.cispo(lp, old, a, clip_high=0.3),
    "sapo": losses.sapo,
}
WITH_MASK = {
    "gspo": lambda lp, old, a, m: losses.gspo(lp, old, a, m, clip_low=0.2, clip_high=0.2),
    "gmpo": losses.gmpo,
}


def cleared(function):
    """Gives a pointwise loss a mask, as the training loop does: log-probs are set to 0 off the actions."""
    return lambda lp, old, a, m: function(masked.fill(lp, m), masked.fill(old, m), a)


MASKED = WITH_MASK | {name: cleared(function) for name, function in POINTWISE.items()}


def token_loss(function, ratio, advantage):
    """Loss, derivative by log π, and aux of one token."""
    old = jnp.zeros(1)
    log_prob = jnp.log(jnp.array([ratio], jnp.float32))

    def objective(lp):
        loss, aux = function(lp, old, jnp.array([advantage], jnp.float32))
        return loss[0], aux

    (loss, aux), gradient = jax.value_and_grad(objective, has_aux=True)(log_prob)
    return float(loss), float(gradient[0]), {k: v[0] for k, v in aux.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "low", "high"),
    [
        # above the upper clip bound: rising A is stopped, falling A is not
        (2.0, 1.0, -1.3, 0.0, False, True),
        (2.0, -1.0, 2.0, 2.0, False, False),
        # below the lower clip bound: falling A is stopped, rising A is not
        (0.5, 1.0, -0.5, -0.5, False, False),
        (0.5, -1.0, 0.8, 0.0, True, False),
        # between the clip bounds
        (1.25, 2.0, -2.5, -2.5, False, False),
        (0.85, -2.0, 1.7, 1.7, False, False),
        # no advantage, no gradient for a clip to take away
        (2.0, 0.0, 0.0, 0.0, False, False),
        (0.5, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_ppo_clip_quadrants(ratio, advantage, loss, gradient, low, high):
    def clip(lp, old, a):
        return losses.ppo_clip(lp, old, a, clip_low=0.2, clip_high=0.3)

    got_loss, got_gradient, aux = token_loss(clip, ratio, advantage)
    np.testing.assert_allclose([got_loss, got_gradient], [loss, gradient], rtol=1e-6)
    assert (bool(aux["clipped_low"]), bool(aux["clipped_high"])) == (low, high)
    np.testing.assert_allclose(aux["ratio"], ratio, rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "acts"),
    [
        (10.0, -1.0, 3.0, 0.0, True),
        (2.5, -1.0, 2.5, 2.5, False),
        (10.0, 1.0, -1.2, 0.0, False),
        (0.1, 1.0, -0.1, -0.1, False),
        (0.1, -2.0, 1.6, 0.0, False),
    ],
)
def test_dual_clip_acts_on_negative_advantages_alone(ratio, advantage, loss, gradient, acts):
    got_loss, got_gradient, aux = token_loss(POINTWISE["dual_clip"], ratio, advantage)
    np.testing.assert_allclose([got_loss, got_gradient], [loss, gradient], rtol=1e-6)
    assert bool(aux["clipped_dual"]) == acts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    d=st.floats(-2, 2, width=32),
    advantage=st.sampled_from([-2.0, -0.5, 0.0, 1.0]),
    dual=st.sampled_from([None, 2.0]),
)
def test_ppo_clip_equals_its_definition_and_flags_lost_gradients(d, advantage, dual):
    def clip(lp, old, a):
        return losses.ppo_clip(lp, old, a, clip_low=0.2, clip_high=0.3, dual_clip=dual)

    ratio = np.exp(np.float32(d))
    loss, gradient, aux = token_loss(clip, ratio, advantage)
    expected = -min(ratio * advantage, np.clip(ratio, 0.8, 1.3) * advantage)
    if dual is not None and advantage < 0:
        expected = min(expected, -dual * advantage)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    flagged = bool(aux["clipped_low"] | aux["clipped_high"] | aux["clipped_dual"])
    assert flagged == (gradient == 0 and advantage != 0)
    if not flagged:
        np.testing.assert_allclose(gradient, -ratio * advantage, rtol=1e-5)


def test_ppo_clip_agrees_with_rlax():
    d = jnp.linspace(-1.5, 1.5, 41)
    for sign in (1.0, -1.0):
        advantages = sign * jnp.linspace(0.1, 2.0, 41)

        def mine(d, advantages=advantages):
            return jnp.mean(losses.ppo_clip(d, jnp.zeros(41), advantages)[0])

        def theirs(d, advantages=advantages):
            return rlax.clipped_surrogate_pg_loss(jnp.exp(d), advantages, 0.2)

        np.testing.assert_allclose(mine(d), theirs(d), rtol=1e-5)
        np.testing.assert_allclose(jax.grad(mine)(d), jax.grad(theirs)(d), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_ratio_that_overflows_does_not_poison_a_clipped_gradient(sign):
    d = jnp.array([sign * 200.0, sign * jnp.inf])
    advantages = jnp.array([sign, sign])
    loss, gradient = jax.value_and_grad(lambda d: jnp.sum(losses.ppo_clip(d, jnp.zeros(2), advantages)[0]))(d)
    np.testing.assert_allclose(loss, -2.4 if sign > 0 else 1.6, rtol=1e-6)
    np.testing.assert_array_equal(gradient, np.zeros(2))
    assert np.all(np.isfinite(jax.grad(lambda d: jnp.sum(losses.sapo(d, jnp.zeros(2), advantages)[0]))(d)))


@pytest.mark.parametrize("name", [n for n in POINTWISE if n != "reinforce"])
def test_on_policy_gradient_is_that_of_reinforce(name):
    def gradient(function):
        return jax.grad(lambda lp: jnp.sum(function(lp, LOG_PROBS, ADVANTAGES)[0]))(LOG_PROBS)

    np.testing.assert_allclose(gradient(POINTWISE[name]), gradient(POINTWISE["reinforce"]), rtol=1e-5)


@pytest.mark.parametrize("name", ["surrogate", "ppo_clip", "dual_clip", "gspo", "gmpo"])
def test_on_policy_value_is_minus_the_mean_advantage(name):
    loss, aux = MASKED[name](LOG_PROBS, LOG_PROBS, ADVANTAGES, MASK)
    expected = -jnp.mean(jnp.broadcast_to(ADVANTAGES, MASK.shape)[MASK])
    np.testing.assert_allclose(aggregate.token_mean(loss, MASK).mean, expected, rtol=1e-6)
    np.testing.assert_array_equal(aux["ratio"], np.ones(MASK.shape))
    for key in ("clipped_low", "clipped_high"):
        assert not np.any(aux.get(key, False))


def test_gspo_golden():
    d = jnp.array([[0.1, -0.2, 0.3, 9.0]])
    mask = jnp.array([[True, True, True, False]])
    loss, aux = losses.gspo(d, jnp.zeros((1, 4)), jnp.ones((1, 1)), mask, clip_low=0.2, clip_high=0.2)
    np.testing.assert_allclose(aux["ratio"][0, :3], np.full(3, 1.068939), rtol=1e-6)
    np.testing.assert_allclose(loss[0, :3], np.full(3, -1.068939), rtol=1e-6)
    clipped, aux = losses.gspo(d, jnp.zeros((1, 4)), jnp.ones((1, 1)), mask)
    np.testing.assert_allclose(clipped[0, :3], np.full(3, -1.0004), rtol=1e-6)
    assert np.all(aux["clipped_high"][0, :3])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_losses_of_responses_with_one_token_are_ppo(sign):
    log_probs, old = LOG_PROBS.reshape(-1, 1), OLD.reshape(-1, 1)
    advantages, mask = jnp.full((8, 1), sign), jnp.ones((8, 1), bool)
    clip = {"clip_low": 0.2, "clip_high": 0.3}
    pairs = [
        (lambda lp: losses.gspo(lp, old, advantages, mask, **clip), clip),
        (
            lambda lp: losses.gmpo(lp, old, advantages, mask, clip_low=0.3, clip_high=0.2),
            {"clip_low": 1 - np.exp(-0.3), "clip_high": np.exp(0.2) - 1},
        ),
    ]
    for function, clips in pairs:
        for got, expected in zip(
            jax.tree.leaves(jax.value_and_grad(lambda lp, f=function: jnp.sum(f(lp)[0]))(log_probs)),
            jax.tree.leaves(
                jax.value_and_grad(lambda lp, c=clips: jnp.sum(losses.ppo_clip(lp, old, advantages, **c)[0]))(log_probs)
            ),
            strict=True,
        ):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_gspo_over_token_segments_is_ppo():
    per_token = losses.gspo(
        LOG_PROBS, OLD, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.2, segments=segments.token(MASK)
    )
    expected = losses.ppo_clip(LOG_PROBS, OLD, ADVANTAGES)
    np.testing.assert_allclose(per_token[0][MASK], expected[0][MASK], rtol=1e-6)


def test_a_response_as_one_action_counts_once():
    """PPO at the response level: the ratio of summed log-probs, aggregated over one token a response."""
    whole = segments.response(MASK)
    summed, old = segments.total(LOG_PROBS, whole, MASK), segments.total(OLD, whole, MASK)
    loss, aux = losses.ppo_clip(summed, old, ADVANTAGES, clip_low=1.0, clip_high=9.0)
    got = aggregate.token_mean(loss, segments.first(whole, MASK)).mean
    ratio = jnp.exp(jnp.sum(jnp.where(MASK, LOG_PROBS - OLD, 0.0), axis=-1))
    np.testing.assert_allclose(got, -jnp.mean(ratio * ADVANTAGES[:, 0]), rtol=1e-6)
    np.testing.assert_allclose(aux["ratio"][MASK], jnp.broadcast_to(ratio[:, None], MASK.shape)[MASK], rtol=1e-6)


def test_gmpo_clips_tokens_before_the_mean():
    d = jnp.array([[0.9, 0.1, -0.9]])
    mask = jnp.ones((1, 3), bool)

    def objective(d, advantage):
        loss, aux = losses.gmpo(d, jnp.zeros((1, 3)), jnp.full((1, 1), advantage), mask)
        return jnp.mean(loss), aux

    for advantage, clipped, index in ((1.0, [0.4, 0.1, -0.9], 0), (-1.0, [0.9, 0.1, -0.4], 2)):
        (loss, aux), gradient = jax.value_and_grad(objective, has_aux=True)(d, advantage)
        ratio = np.exp(np.mean(clipped))
        np.testing.assert_allclose(loss, -advantage * ratio, rtol=1e-6)
        expected = np.full(3, -advantage * ratio / 3)
        expected[index] = 0.0
        np.testing.assert_allclose(gradient[0], expected, rtol=1e-6)
        flags = aux["clipped_high"] | aux["clipped_low"]
        np.testing.assert_array_equal(flags[0], np.arange(3) == index)


@pytest.mark.parametrize(
    ("ratio", "weight", "low", "high"),
    [(2.0, 1.3, False, True), (0.1, 0.4, True, False), (1.1, 1.1, False, False)],
)
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_caps_the_weight_and_keeps_every_gradient(ratio, weight, low, high, advantage):
    def cispo(lp, old, a):
        return losses.cispo(lp, old, a, clip_low=0.6, clip_high=0.3)

    loss, gradient, aux = token_loss(cispo, ratio, advantage)
    np.testing.assert_allclose(gradient, -weight * advantage, rtol=1e-6)
    np.testing.assert_allclose(loss, -weight * advantage * np.log(ratio), rtol=1e-5)
    assert (bool(aux["capped_low"]), bool(aux["capped_high"])) == (low, high)


@pytest.mark.parametrize("ratio", [0.3, 1.0, 1.7, 4.0])
@pytest.mark.parametrize(("advantage", "tau"), [(1.0, 1.0), (-1.0, 1.05)])
def test_sapo_gate_weighs_the_surrogate_gradient(ratio, advantage, tau):
    loss, gradient, aux = token_loss(losses.sapo, ratio, advantage)
    sigmoid = 1 / (1 + np.exp(-tau * (ratio - 1)))
    np.testing.assert_allclose(loss, -4 / tau * sigmoid * advantage, rtol=1e-5)
    np.testing.assert_allclose(gradient, -4 * sigmoid * (1 - sigmoid) * ratio * advantage, rtol=1e-5)
    np.testing.assert_allclose(aux["gate"], 4 * sigmoid * (1 - sigmoid), rtol=1e-5)


def test_entropy_bonus_rewards_entropy():
    loss, aux = losses.entropy_bonus(jnp.array([0.5, 1.0]), coef=0.01)
    np.testing.assert_allclose(loss, [-0.005, -0.01], rtol=1e-6)
    np.testing.assert_array_equal(aux["entropy"], [0.5, 1.0])


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("garbage", [jnp.nan, -jnp.inf])
def test_garbage_off_the_actions_reaches_neither_value_nor_gradient(name, garbage):
    def objective(lp, old, advantages):
        loss, _ = MASKED[name](lp, old, advantages, MASK)
        return aggregate.sequence_mean_token_mean(loss, MASK).mean

    advantages = jnp.broadcast_to(ADVANTAGES, MASK.shape)
    clean = jax.value_and_grad(objective)(LOG_PROBS, OLD, advantages)
    dirty = [jnp.where(MASK, x, garbage) for x in (LOG_PROBS, OLD, advantages)]
    for got, expected in zip(jax.value_and_grad(objective)(*dirty), clean, strict=True):
        assert np.all(np.isfinite(got))
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert np.any(clean[1] != 0)


@pytest.mark.parametrize("name", MASKED)
def test_one_advantage_a_row_equals_the_same_at_every_token(name):
    per_row = MASKED[name](LOG_PROBS, OLD, ADVANTAGES, MASK)
    per_token = MASKED[name](LOG_PROBS, OLD, jnp.broadcast_to(ADVANTAGES, MASK.shape), MASK)
    for got, expected in zip(jax.tree.leaves(per_row), jax.tree.leaves(per_token), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", MASKED)
def test_rows_and_leading_axes_are_independent(name):
    whole = MASKED[name](LOG_PROBS, OLD, ADVANTAGES, MASK)[0]
    row = MASKED[name](LOG_PROBS[0], OLD[0], ADVANTAGES[0], MASK[0])[0]
    stacked = MASKED[name](LOG_PROBS[None], OLD[None], ADVANTAGES[None], MASK[None])[0]
    np.testing.assert_allclose(whole[0], row, rtol=1e-6)
    np.testing.assert_allclose(stacked[0], whole, rtol=1e-6)


@pytest.mark.parametrize("name", MASKED)
def test_bfloat16_is_computed_in_float32(name):
    inputs = [x.astype(jnp.bfloat16) for x in (LOG_PROBS, OLD, ADVANTAGES)]
    got = MASKED[name](*inputs, MASK)
    expected = MASKED[name](*(x.astype(jnp.float32) for x in inputs), MASK)
    assert got[0].dtype == jnp.float32
    np.testing.assert_array_equal(got[0], expected[0])


@pytest.mark.parametrize("name", MASKED)
def test_aux_carries_no_gradient(name):
    def of_aux(lp):
        _, aux = MASKED[name](lp, OLD, ADVANTAGES, MASK)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in aux.values()) + jnp.sum(lp)

    np.testing.assert_array_equal(jax.grad(of_aux)(LOG_PROBS), np.ones(MASK.shape))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: losses.ppo_clip(LOG_PROBS, OLD, ADVANTAGES, clip_low=-0.1),
            "clip_low=-0.1: must be 0 or greater",
        ),
        (
            lambda: losses.ppo_clip(LOG_PROBS, OLD, ADVANTAGES, clip_high=-0.1),
            "clip_high=-0.1: must be 0 or greater",
        ),
        (
            lambda: losses.ppo_clip(LOG_PROBS, OLD, ADVANTAGES, clip_low=1.5),
            "clip_low=1.5: must be at most 1",
        ),
        (
            lambda: losses.ppo_clip(LOG_PROBS, OLD, ADVANTAGES, dual_clip=1.0),
            "dual_clip=1.0: must be greater than 1",
        ),
        (
            lambda: losses.ppo_clip(LOG_PROBS, OLD[0], ADVANTAGES),
            r"old_log_probs has shape \(4,\): must be \(2, 4\)",
        ),
        (
            lambda: losses.reinforce(LOG_PROBS, jnp.ones(2)),
            r"advantages has shape \(2,\).*advantages\[..., None\]",
        ),
        (lambda: losses.surrogate(LOG_PROBS, OLD, jnp.ones(4)), r"advantages has shape \(4,\)"),
        (lambda: losses.cispo(LOG_PROBS, OLD, ADVANTAGES, clip_high=-1.0), "clip_high=-1.0"),
        (
            lambda: losses.sapo(LOG_PROBS, OLD, ADVANTAGES, temperature_positive=0.0),
            "temperature_positive=0.0",
        ),
        (lambda: losses.gmpo(LOG_PROBS, OLD, ADVANTAGES, MASK, clip_low=-1.0), "clip_low=-1.0"),
        (lambda: losses.gmpo(LOG_PROBS, OLD, ADVANTAGES, MASK * 1.0), "mask has dtype float32: must be bool"),
        (lambda: losses.gspo(LOG_PROBS, OLD, ADVANTAGES, MASK * 1.0), "mask has dtype float32: must be bool"),
        (lambda: losses.gspo(LOG_PROBS, OLD, ADVANTAGES, MASK[0]), r"shape \(4,\): must be \(2, 4\)"),
    ],
)
def test_errors_name_argument_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_errors_are_raised_while_tracing():
    with pytest.raises(ValueError, match="clip_low=-1"):
        jax.jit(lambda lp: losses.ppo_clip(lp, OLD, ADVANTAGES, clip_low=-1.0)[0]).trace(LOG_PROBS)


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(*MASKED.items())
    def test_same_with_and_without_jit(self, function):
        got = self.variant(function)(LOG_PROBS, OLD, ADVANTAGES, MASK)
        expected = function(LOG_PROBS, OLD, ADVANTAGES, MASK)
        chex.assert_trees_all_close(got, expected, rtol=1e-6)
