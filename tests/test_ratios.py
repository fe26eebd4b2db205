"""Importance ratios: golden values, granularities against each other, weights for a mismatched sampler."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.algorithms import on_batch
from jaxpg.estimators import kl, losses, ratios, segments
from jaxpg.types import Batch

D = jnp.array([[0.1, -0.2, 0.3, 0.7], [0.5, -0.5, 0.2, 0.4]])
OLD = jnp.array([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -0.25, -1.0]])
NEW = OLD + D
MASK = jnp.array([[1, 1, 1, 0], [0, 1, 1, 1]], bool)
RESPONSE = segments.response(MASK)
STEPS = jnp.array([[0, 1, 1, -1], [-1, 0, 0, 1]])
PER_SEGMENT = {"product": ratios.segment_product, "mean": ratios.segment_mean}
BY_SEGMENT = pytest.mark.parametrize("name", PER_SEGMENT)


def test_token_ratio():
    np.testing.assert_allclose(ratios.token(NEW, OLD), np.exp(D), rtol=1e-5)
    np.testing.assert_array_equal(ratios.token(OLD, OLD), np.ones(OLD.shape))


def test_response_golden():
    np.testing.assert_allclose(ratios.segment_mean(NEW, OLD, RESPONSE, MASK)[0, :3], np.full(3, 1.068939), rtol=1e-6)
    np.testing.assert_allclose(ratios.segment_product(NEW, OLD, RESPONSE, MASK)[0, :3], np.full(3, 1.221403), rtol=1e-6)


def test_steps_golden():
    sums = np.array([[0.1, 0.1, 0.1, 0.0], [0.0, -0.3, -0.3, 0.4]])
    np.testing.assert_allclose(ratios.segment_product(NEW, OLD, STEPS, MASK), np.exp(sums), rtol=1e-5)
    sizes = np.array([[1, 2, 2, 1], [1, 2, 2, 1]])
    np.testing.assert_allclose(ratios.segment_mean(NEW, OLD, STEPS, MASK), np.exp(sums / sizes), rtol=1e-5)


@BY_SEGMENT
def test_segments_of_one_token_are_token_ratios(name):
    got = PER_SEGMENT[name](NEW, OLD, segments.token(MASK), MASK)
    np.testing.assert_allclose(got, jnp.where(MASK, ratios.token(NEW, OLD), 1.0), rtol=1e-6)


@BY_SEGMENT
@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf])
def test_garbage_off_the_mask_does_not_matter(name, garbage):
    weights = jnp.cos(jnp.arange(4.0))
    objective = jax.value_and_grad(lambda lp, old: jnp.sum(weights * PER_SEGMENT[name](lp, old, STEPS, MASK)))
    clean = objective(NEW, OLD)
    dirty = objective(jnp.where(MASK, NEW, garbage), jnp.where(MASK, OLD, garbage))
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[1], clean[1])
    np.testing.assert_array_equal(dirty[1][~MASK], np.zeros(2))
    assert np.all(dirty[1][MASK] != 0)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999))
def test_laws_of_granularity(seed):
    """A segment's product is its mean to the power of its size, and the product of its tokens' ratios."""
    rng = np.random.default_rng(seed)
    new, old = -rng.random((2, 2, 6)).astype(np.float32)
    mask = rng.random((2, 6)) < 0.7
    steps = np.where(mask, (np.cumsum(mask, axis=-1) - 1) // 2, -1).astype(np.int32)
    size = segments.total(np.ones((2, 6)), steps, mask)
    product, mean = (f(new, old, steps, mask) for f in (ratios.segment_product, ratios.segment_mean))
    np.testing.assert_allclose(product, mean**size, rtol=1e-5)
    whole = ratios.segment_product(new, old, segments.response(mask), mask)
    by_hand = np.prod(np.where(mask, np.exp(new - old), 1.0), axis=-1, keepdims=True)
    np.testing.assert_allclose(whole, np.where(mask, by_hand, 1.0), rtol=1e-5)


@pytest.mark.parametrize(
    "weights", [lambda lp: ratios.truncated(lp, OLD, cap=1.2), lambda lp: ratios.banded(lp, OLD, low=0.8, high=1.4)]
)
def test_a_nan_that_counts_stays_visible(weights):
    """A token with a broken log-prob must not pass for one that was dropped."""
    np.testing.assert_array_equal(np.isnan(weights(NEW.at[0, 1].set(jnp.nan))), np.arange(8).reshape(2, 4) == 1)


def test_truncated_weights():
    got = ratios.truncated(NEW, OLD, cap=1.2)
    np.testing.assert_allclose(got, np.minimum(np.exp(D), 1.2), rtol=1e-5)
    np.testing.assert_array_equal(
        jax.grad(lambda lp: jnp.sum(ratios.truncated(lp, OLD, cap=1.2)))(NEW), np.zeros(D.shape)
    )


def test_banded_weights_drop_what_lies_outside():
    got = ratios.banded(NEW, OLD, low=0.8, high=1.4)
    k = np.exp(np.asarray(D))
    np.testing.assert_allclose(got, np.where((k >= 0.8) & (k <= 1.4), k, 0.0), rtol=1e-5)
    assert np.sum(got == 0) == 4
    np.testing.assert_array_equal(jax.grad(lambda lp: jnp.sum(ratios.banded(lp, OLD)))(NEW), np.zeros(D.shape))
    np.testing.assert_allclose(
        ratios.banded(jnp.log(jnp.array([0.49, 0.51, 4.9, 5.1])), jnp.zeros(4)), [0, 0.51, 4.9, 0]
    )


def test_bfloat16_is_subtracted_in_float32():
    new, old = jnp.bfloat16(-10.0), jnp.bfloat16(-10.0625)
    got = ratios.token(new, old)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.exp(0.0625), rtol=1e-6)


@BY_SEGMENT
def test_leading_axes_are_free(name):
    whole = PER_SEGMENT[name](NEW, OLD, STEPS, MASK)
    np.testing.assert_allclose(PER_SEGMENT[name](NEW[0], OLD[0], STEPS[0], MASK[0]), whole[0], rtol=1e-6)
    deep = PER_SEGMENT[name](NEW[None], OLD[None], STEPS[None], MASK[None])
    np.testing.assert_allclose(deep[0], whole, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ratios.token(NEW, OLD[0]), r"old_log_probs has shape \(4,\): must be \(2, 4\)"),
        (lambda: ratios.segment_mean(NEW, OLD, STEPS, MASK * 1.0), "mask has dtype float32: must be bool"),
        (lambda: ratios.segment_product(NEW, OLD, D, MASK), "segments has dtype float32: must be integer"),
        (lambda: ratios.truncated(NEW, OLD[0], cap=1.0), r"sampler_log_probs has shape \(4,\): must be \(2, 4\)"),
        (lambda: ratios.truncated(NEW, OLD, cap=0), "cap=0: must be greater than 0"),
        (lambda: ratios.banded(NEW, OLD, low=-1), "low=-1: must be 0 or greater"),
        (lambda: ratios.banded(NEW, OLD, low=2, high=1), "high=1: must be at least 2"),
    ],
)
def test_errors_name_argument_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- The bound -------------------------------------------------------------------------------------------------------

LOG_PROB = -1.0  # of the one token below
ONE, FIRST = jnp.ones((1, 1), bool), jnp.zeros((1, 1), int)
UP, DOWN = jnp.full((1, 1), 2.0), jnp.full((1, 1), -2.0)


def by_segment(lp, old):
    batch = Batch(FIRST, ONE, ONE, log_probs=old, advantages=DOWN)
    return on_batch.by_segment(losses.surrogate, lp, batch, FIRST)[0]


def sapo(d):
    return 4 / 1.05 * jax.nn.sigmoid(1.05 * (jnp.exp(d) - 1)) * 2


# Each function of one token's log-probs, and the same of its log-ratio d without a bound.
BOUNDED = {
    "log_ratio": (ratios.log_ratio, lambda d: d),
    "token": (ratios.token, jnp.exp),
    "segment_product": (lambda lp, old: ratios.segment_product(lp, old, FIRST, ONE), jnp.exp),
    "segment_mean": (lambda lp, old: ratios.segment_mean(lp, old, FIRST, ONE), jnp.exp),
    "surrogate": (lambda lp, old: losses.surrogate(lp, old, DOWN)[0], lambda d: 2 * jnp.exp(d)),
    "ppo_clip": (lambda lp, old: losses.ppo_clip(lp, old, DOWN)[0], lambda d: 2 * jnp.maximum(jnp.exp(d), 0.8)),
    "ppo_clip:up": (lambda lp, old: losses.ppo_clip(lp, old, UP)[0], lambda d: -2 * jnp.minimum(jnp.exp(d), 1.2)),
    "ppo_clip:dual": (
        lambda lp, old: losses.ppo_clip(lp, old, DOWN, dual_clip=3.0)[0],
        lambda d: 2 * jnp.clip(jnp.exp(d), 0.8, 3.0),
    ),
    "gspo": (
        lambda lp, old: losses.gspo(lp, old, DOWN, ONE, clip_low=0.2)[0],
        lambda d: 2 * jnp.maximum(jnp.exp(d), 0.8),
    ),
    "gspo:steps": (
        lambda lp, old: losses.gspo(lp, old, DOWN, ONE, clip_low=0.2, segments=FIRST)[0],
        lambda d: 2 * jnp.maximum(jnp.exp(d), 0.8),
    ),
    "gmpo": (lambda lp, old: losses.gmpo(lp, old, DOWN, ONE)[0], lambda d: 2 * jnp.exp(jnp.maximum(d, -0.4))),
    "sapo": (lambda lp, old: losses.sapo(lp, old, DOWN)[0], sapo),
    "by_segment": (by_segment, lambda d: 2 * jnp.exp(d)),
    "k1": (kl.k1, lambda d: d),
    "k2": (kl.k2, lambda d: d**2 / 2),
    "k3": (kl.k3, lambda d: jnp.expm1(-d) + d),
    "k3:clamp": (lambda lp, old: kl.k3(lp, old, clamp=(30.0, 1e12)), lambda d: jnp.expm1(-d) + d),
}
# Weights: they carry no gradient at any log-ratio.
WEIGHTS = {
    "truncated": (lambda lp, old: ratios.truncated(lp, old, cap=1e12), jnp.exp),
    "banded": (lambda lp, old: ratios.banded(lp, old, low=0.0, high=1e12), jnp.exp),
    # Its gradient is the weight's: −w·A, through log π alone.
    "cispo": (
        lambda lp, old: losses.cispo(lp, old, DOWN, clip_high=1e12)[0] / jax.lax.stop_gradient(lp),
        lambda d: 2 * jnp.exp(d),
    ),
}


def at_log_ratio(function, d):
    """Value and derivative by log π of a function of one token at a log-ratio."""
    old = jnp.full((1, 1), LOG_PROB - d, jnp.float32)
    value, slope = jax.value_and_grad(lambda lp: function(lp, old)[0, 0])(jnp.full((1, 1), LOG_PROB))
    return float(value), float(slope[0, 0])


@pytest.mark.parametrize("d", [200.0, -200.0, 20.5, -20.5, np.inf, 19.0, -19.0, 0.125])
@pytest.mark.parametrize("name", BOUNDED | WEIGHTS)
def test_past_the_bound_the_value_is_that_at_the_bound_and_the_gradient_is_zero(name, d):
    function, unbounded = (BOUNDED | WEIGHTS)[name]
    value, slope = at_log_ratio(function, d)
    at_bound = float(np.clip(d, -20.0, 20.0))
    expected = unbounded(jnp.float32(at_bound))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    if name == "cispo":
        np.testing.assert_allclose(slope, expected / LOG_PROB, rtol=1e-5)
    elif name in WEIGHTS or d != at_bound:
        assert slope == 0
    else:
        np.testing.assert_allclose(slope, jax.grad(unbounded)(jnp.float32(d)), rtol=1e-4)


@pytest.mark.parametrize("name", BOUNDED | WEIGHTS)
def test_a_log_ratio_that_is_nan_stays_visible(name):
    assert np.isnan(at_log_ratio((BOUNDED | WEIGHTS)[name][0], np.nan)[0])


def test_sums_of_log_ratios_are_bounded_once_more():
    d, whole = jnp.full((1, 3), 15.0), jnp.zeros((1, 3), int)
    full = jnp.ones((1, 3), bool)
    for function, expected in ((ratios.segment_product, np.exp(20.0)), (ratios.segment_mean, np.exp(15.0))):
        value, slope = jax.value_and_grad(lambda d, f=function: f(d, jnp.zeros((1, 3)), whole, full)[0, 0])(d)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert np.all(slope == 0) == (function is ratios.segment_product)
    batch = Batch(whole, full, full, log_probs=jnp.zeros((1, 3)), advantages=jnp.ones((1, 3)))
    loss, slope = jax.value_and_grad(lambda d: on_batch.by_segment(losses.surrogate, d, batch, whole)[0].sum())(d)
    np.testing.assert_allclose(loss, -np.exp(20.0), rtol=1e-5)
    np.testing.assert_array_equal(slope, 0.0)


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(
        ("token", lambda lp: ratios.token(lp, OLD)),
        ("product", lambda lp: ratios.segment_product(lp, OLD, STEPS, MASK)),
        ("mean", lambda lp: ratios.segment_mean(lp, OLD, STEPS, MASK)),
        ("truncated", lambda lp: ratios.truncated(lp, OLD, cap=1.2)),
        ("banded", lambda lp: ratios.banded(lp, OLD)),
    )
    def test_same_with_and_without_jit(self, function):
        np.testing.assert_allclose(self.variant(function)(NEW), function(NEW), rtol=1e-6)
