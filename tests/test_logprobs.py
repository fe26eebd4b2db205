"""Log-probs and entropy: alignment, temperature, numerics, and tokens that do not exist."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg import logprobs

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 4, 5)).astype(np.float32) * 3
TOKENS = np.array([[0, 3, 1, 4], [2, 2, 0, 1]])


def reference(logits, temperature):
    """Log-softmax in float64."""
    scaled = logits.astype(np.float64) / temperature
    return scaled - np.log(np.sum(np.exp(scaled), axis=-1, keepdims=True))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_logits_at_t_minus_one_speak_about_token_t(temperature):
    got = logprobs.token_log_probs(LOGITS, TOKENS, temperature=temperature)
    log_p = reference(LOGITS, temperature)
    expected = [[0.0] + [log_p[b, t - 1, TOKENS[b, t]] for t in range(1, 4)] for b in range(2)]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_the_last_logits_and_the_first_token_do_not_matter():
    changed_logits = LOGITS.copy()
    changed_logits[:, -1] = np.nan
    changed_tokens = TOKENS.copy()
    changed_tokens[:, 0] = 4
    got = logprobs.token_log_probs(changed_logits, changed_tokens)
    np.testing.assert_array_equal(got, logprobs.token_log_probs(LOGITS, TOKENS))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_entropy_of_the_tempered_distribution(temperature):
    log_p = reference(LOGITS, temperature)
    expected = -np.sum(np.exp(log_p) * log_p, axis=-1)
    got = logprobs.entropy(LOGITS, temperature=temperature)
    np.testing.assert_allclose(got[:, 1:], expected[:, :-1], rtol=1e-5)
    np.testing.assert_array_equal(got[:, 0], np.zeros(2))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), temperature=st.floats(0.3, 3), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_laws_of_a_distribution(seed, temperature, scale):
    """Probabilities add up to 1, entropy is minus their mean log, in [0, log V], and a shift of logits does nothing."""
    logits = np.random.default_rng(seed).normal(size=(2, 5)).astype(np.float32) * np.float32(scale)
    every_next = np.broadcast_to(logits, (5, 2, 5))
    tokens = np.stack([np.zeros(5, int), np.arange(5)], axis=-1)
    log_p = logprobs.token_log_probs(every_next, tokens, temperature=temperature)[:, 1]
    np.testing.assert_allclose(jnp.sum(jnp.exp(log_p)), 1.0, rtol=1e-5)
    entropy = logprobs.entropy(logits, temperature=temperature)[1]
    np.testing.assert_allclose(entropy, -jnp.sum(jnp.exp(log_p) * log_p), rtol=1e-4, atol=1e-5)
    assert 0 <= entropy <= np.log(5) + 1e-6
    moved = logprobs.token_log_probs(every_next + 3, tokens, temperature=temperature)[:, 1]
    np.testing.assert_allclose(moved, log_p, rtol=1e-4, atol=1e-4)


def test_entropy_is_never_negative_and_at_most_log_v():
    sure = jnp.zeros((1, 3, 5)).at[:, :, 1].set(1e4)
    assert np.all(logprobs.entropy(sure) >= 0)
    np.testing.assert_allclose(logprobs.entropy(jnp.zeros((1, 3, 5)))[0, 1:], np.log(5), rtol=1e-6)


def test_filtered_tokens_have_no_probability_and_finite_gradients():
    logits = jnp.asarray(LOGITS).at[:, :, 2].set(-jnp.inf)
    tokens = jnp.array([[0, 3, 1, 4], [0, 3, 0, 1]])

    def objective(x):
        return jnp.sum(logprobs.token_log_probs(x, tokens)) + jnp.sum(logprobs.entropy(x))

    value, gradient = jax.value_and_grad(objective)(logits)
    without = np.delete(LOGITS, 2, axis=-1)
    renumbered = tokens - (tokens > 2)
    expected = jnp.sum(logprobs.token_log_probs(without, renumbered)) + jnp.sum(logprobs.entropy(without))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert np.all(np.isfinite(gradient))
    assert logprobs.token_log_probs(logits, jnp.full((2, 4), 2))[0, 1] == -jnp.inf


def test_large_logits_keep_their_digits():
    small = logprobs.token_log_probs(LOGITS, TOKENS)
    shifted = logprobs.token_log_probs(LOGITS + np.float32(4096.0), TOKENS)
    np.testing.assert_allclose(shifted, small, atol=2e-3)
    extreme = logprobs.token_log_probs(np.where(LOGITS > 0, np.float32(1e5), np.float32(-1e5)), TOKENS)
    assert np.all(np.isfinite(extreme))


@pytest.mark.parametrize("token", [-1, -5, 5, 99])
def test_tokens_outside_the_vocabulary_are_nan_there_alone(token):
    tokens = TOKENS.copy()
    tokens[1, 2] = token
    got = logprobs.token_log_probs(LOGITS, tokens)
    expected = np.array(logprobs.token_log_probs(LOGITS, TOKENS))
    expected[1, 2] = np.nan
    np.testing.assert_array_equal(got, expected)
    gradient = jax.grad(lambda x: jnp.nansum(jnp.where(tokens == token, 0.0, logprobs.token_log_probs(x, tokens))))(
        LOGITS
    )
    assert np.all(np.isfinite(gradient))


def test_gradient_is_indicator_minus_probability():
    gradient = jax.grad(lambda x: logprobs.token_log_probs(x, TOKENS, temperature=0.5)[0, 2])(jnp.asarray(LOGITS))
    expected = np.zeros(LOGITS.shape)
    expected[0, 1] = (np.eye(5)[TOKENS[0, 2]] - np.exp(reference(LOGITS, 0.5)[0, 1])) / 0.5
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_entropy_gradient_matches_finite_differences(x64):
    jax.test_util.check_grads(
        lambda x: logprobs.entropy(x, temperature=0.7),
        (LOGITS.astype(np.float64),),
        order=1,
        modes=["rev"],
        atol=1e-6,
    )


def test_bfloat16_is_computed_in_float32():
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    for function in (lambda x: logprobs.token_log_probs(x, TOKENS), logprobs.entropy):
        got = function(half)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, function(half.astype(jnp.float32)))


def test_length_one_and_leading_axes():
    np.testing.assert_array_equal(logprobs.token_log_probs(LOGITS[:, :1], TOKENS[:, :1]), np.zeros((2, 1)))
    np.testing.assert_array_equal(logprobs.entropy(LOGITS[:, :1]), np.zeros((2, 1)))
    whole = logprobs.token_log_probs(LOGITS, TOKENS)
    np.testing.assert_allclose(logprobs.token_log_probs(LOGITS[0], TOKENS[0]), whole[0], rtol=1e-6)
    np.testing.assert_allclose(logprobs.token_log_probs(LOGITS[None], TOKENS[None])[0], whole, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: logprobs.token_log_probs(LOGITS, TOKENS, temperature=0.0),
            "temperature=0.0: must be greater than 0",
        ),
        (lambda: logprobs.entropy(LOGITS, temperature=-1.0), "temperature=-1.0: must be greater than 0"),
        (
            lambda: logprobs.token_log_probs(LOGITS, TOKENS[:, :2]),
            r"tokens has shape \(2, 2\): must be \(2, 4\)",
        ),
        (lambda: logprobs.token_log_probs(LOGITS, TOKENS * 1.0), "tokens has dtype float32: must be integer"),
        (lambda: logprobs.entropy(LOGITS[0, 0]), r"logits has shape \(5,\): must be \[..., T, V\]"),
    ],
)
def test_errors_name_argument_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(
        ("log_probs", lambda x: logprobs.token_log_probs(x, TOKENS)), ("entropy", logprobs.entropy)
    )
    def test_same_with_and_without_jit(self, function):
        np.testing.assert_allclose(self.variant(function)(LOGITS), function(LOGITS), rtol=1e-5, atol=1e-6)
