"""KL estimators: golden values, expectation under an enumerated policy, gradients as losses, controllers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import kl

LOGITS = np.array([0.3, -1.0, 0.8, 0.1])
REF_LOGITS = np.array([-0.4, 0.2, 0.5, 0.0])
ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}
BY_NAME = pytest.mark.parametrize("name", ESTIMATORS)


@pytest.mark.parametrize(
    ("name", "d", "expected"),
    [
        ("k1", 0.5, 0.5),
        ("k1", -0.5, -0.5),
        ("k2", -0.5, 0.125),
        ("k3", 0.5, 0.106531),
        ("k3", -0.5, 0.148721),
        ("k3", 3.0, 2.049787),
        ("k3", 1e-4, 5e-9),
    ],
)
def test_golden(name, d, expected):
    got = ESTIMATORS[name](jnp.float32(d), jnp.float32(0.0))
    np.testing.assert_allclose(got, expected, rtol=1e-2 if d == 1e-4 else 1e-6, atol=1e-6 if d != 1e-4 else 0)


def test_reference_is_the_second_argument():
    """A policy twice as sure as the reference is at a positive distance by k1: the sign is easily lost."""
    assert kl.k1(jnp.log(0.8), jnp.log(0.4)) > 0
    assert kl.k3(jnp.log(0.8), jnp.log(0.4)) < kl.k3(jnp.log(0.4), jnp.log(0.8))


def test_expectations_under_the_policy(x64):
    p, log_p = jax.nn.softmax(LOGITS), jax.nn.log_softmax(LOGITS)
    log_q = jax.nn.log_softmax(REF_LOGITS)
    exact = kl.exact(LOGITS, REF_LOGITS)
    np.testing.assert_allclose(exact, np.sum(p * (log_p - log_q)), rtol=1e-12)
    for name in ("k1", "k3"):
        np.testing.assert_allclose(jnp.sum(p * ESTIMATORS[name](log_p, log_q)), exact, rtol=1e-12)
    assert abs(jnp.sum(p * kl.k2(log_p, log_q)) - exact) > 1e-3
    variances = [jnp.sum(p * (ESTIMATORS[n](log_p, log_q) - exact) ** 2) for n in ("k1", "k3")]
    assert variances[1] < variances[0]


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_expected_gradients_as_losses(name, x64):
    """E over the sampled token, gradient through log π alone: what differentiating a loss gives."""
    log_q = jax.nn.log_softmax(REF_LOGITS)
    p = jax.nn.softmax(LOGITS)
    got = jax.grad(lambda x: jnp.sum(p * ESTIMATORS[name](jax.nn.log_softmax(x), log_q)))(LOGITS)
    expected = {
        "k1": np.zeros(4),
        "k2": jax.grad(lambda x: kl.exact(x, REF_LOGITS))(LOGITS),
        "k3": jax.grad(lambda x: kl.exact(REF_LOGITS, x))(LOGITS),
    }[name]
    np.testing.assert_allclose(got, expected, atol=1e-12)
    if name != "k1":
        assert np.max(np.abs(expected)) > 0.05


@settings(max_examples=30, deadline=None, derandomize=True)
@given(d=st.integers(-300, 300).map(lambda i: i / 50))
def test_laws_of_the_estimators(d):
    """k1 changes sign with d, k2 does not, k3 is never negative and exceeds k2 where π finds a token less likely."""
    forth, back = jnp.float32(d), jnp.float32(-d)
    zero = jnp.float32(0.0)
    np.testing.assert_array_equal(kl.k1(forth, zero), -kl.k1(back, zero))
    np.testing.assert_array_equal(kl.k2(forth, zero), kl.k2(back, zero))
    assert kl.k3(forth, zero) >= -1e-6
    assert (kl.k3(forth, zero) > kl.k2(forth, zero)) == (d < 0) or abs(d) < 1e-2
    np.testing.assert_allclose(kl.k3(forth, zero), np.exp(-np.float64(d)) + d - 1, rtol=1e-5, atol=1e-6)


def test_k3_second_derivative_at_zero_is_one():
    """The Fisher metric: neither a clamp nor a floor may halve it."""
    np.testing.assert_allclose(jax.grad(jax.grad(lambda d: kl.k3(d, 0.0)))(0.0), 1.0)


def test_clamp_bounds_value_and_gradient():
    d = jnp.array([-25.0, -1.0, 25.0])
    value, gradient = jax.vmap(jax.value_and_grad(lambda d: kl.k3(d, jnp.zeros(()), clamp=(20.0, 10.0))))(d)
    np.testing.assert_allclose(value, [10.0, np.e - 2, 10.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 1 - np.e, 0.0], rtol=1e-6)
    np.testing.assert_allclose(kl.k3(d, jnp.zeros(3), clamp=(20.0, 1e9))[0], np.exp(20.0) - 21, rtol=1e-6)
    np.testing.assert_allclose(kl.k1(d, jnp.zeros(3), clamp=(5.0, 2.0)), [-2.0, -1.0, 2.0])


def test_exact_with_impossible_tokens():
    filtered = jnp.array([0.5, -jnp.inf, 1.0, -jnp.inf])
    kept = jnp.array([0.1, -jnp.inf, 0.3, 2.0])
    value, gradient = jax.value_and_grad(lambda x: kl.exact(x, kept))(filtered)
    log_p = jax.nn.log_softmax(jnp.array([0.5, 1.0]))
    log_q = jax.nn.log_softmax(kept)[jnp.array([0, 2])]
    np.testing.assert_allclose(value, jnp.sum(jnp.exp(log_p) * (log_p - log_q)), rtol=1e-5)
    assert np.all(np.isfinite(gradient))
    assert kl.exact(kept, filtered) == jnp.inf
    np.testing.assert_allclose(kl.exact(filtered, filtered), 0.0, atol=1e-7)
    assert np.isnan(kl.exact(jnp.array([jnp.nan, 0.0]), jnp.zeros(2)))


@pytest.mark.parametrize(("measured", "expected"), [(0.5, 0.1), (2.0, 0.2), (9.0, 0.4), (1.0, 0.2), (4.0, 0.2)])
def test_double_or_halve(measured, expected):
    got = kl.double_or_halve(jnp.float32(0.2), jnp.float32(measured), low=1.0, high=4.0)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(("measured", "factor"), [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (0.0, 0.98)])
def test_proportional(measured, factor):
    got = kl.proportional(jnp.float32(0.2), jnp.float32(measured), target=6.0, horizon=10_000, batch=1_000)
    np.testing.assert_allclose(got, 0.2 * factor, rtol=1e-6)


def test_controllers_trace_once_and_return_float32():
    """Their coefficient lives in the train state: its type must not change from step to step."""
    coef = jnp.float32(0.1)
    for controller in (
        lambda c, k: kl.double_or_halve(c, k, low=1.0, high=4.0),
        lambda c, k: kl.proportional(c, k, target=6.0, horizon=100, batch=10),
    ):
        got = jax.jit(controller)(coef, jnp.float32(9.0))
        assert (got.dtype, got.shape, got.weak_type) == (jnp.float32, (), coef.weak_type)


@BY_NAME
def test_shapes_and_bfloat16(name):
    d = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.bfloat16)
    got = ESTIMATORS[name](d, jnp.zeros(8, jnp.bfloat16))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, ESTIMATORS[name](d.astype(jnp.float32), jnp.zeros(8)))
    np.testing.assert_array_equal(ESTIMATORS[name](d.reshape(2, 1, 4), jnp.zeros((2, 1, 4))), got.reshape(2, 1, 4))
    assert kl.exact(d.reshape(2, 4), jnp.zeros((2, 4))).shape == (2,)
    assert kl.exact(d, d).dtype == jnp.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kl.k1(jnp.zeros(3), jnp.zeros(2)), r"ref_log_probs has shape \(2,\): must be \(3,\)"),
        (lambda: kl.k3(jnp.zeros(3), jnp.zeros(3), clamp=20.0), "clamp=20.0: must be None or a pair"),
        (
            lambda: kl.k3(jnp.zeros(3), jnp.zeros(3), clamp=(0.0, 1.0)),
            r"clamp\[0\]=0.0: must be greater than 0",
        ),
        (lambda: kl.exact(jnp.zeros((2, 3)), jnp.zeros(3)), r"ref_logits has shape \(3,\): must be \(2, 3\)"),
        (lambda: kl.exact(jnp.zeros((2, 0)), jnp.zeros((2, 0))), r"logits has shape \(2, 0\)"),
        (lambda: kl.double_or_halve(0.1, 1.0, low=2.0, high=1.0), "high=1.0: must be at least 2.0"),
        (
            lambda: kl.proportional(0.1, 1.0, target=0.0, horizon=1, batch=1),
            "target=0.0: must be greater than 0",
        ),
        (
            lambda: kl.proportional(0.1, 1.0, target=1.0, horizon=0, batch=1),
            "horizon=0: must be greater than 0",
        ),
        (lambda: kl.double_or_halve(0.0, 1.0, low=1.0, high=2.0), "coef=0.0: must be greater than 0"),
        (
            lambda: kl.proportional(0.0, 1.0, target=1.0, horizon=1, batch=1),
            "coef=0.0: must be greater than 0",
        ),
    ],
)
def test_errors_name_argument_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(*ESTIMATORS.items(), ("exact", kl.exact))
    def test_same_with_and_without_jit(self, function):
        a, b = jnp.asarray(LOGITS, jnp.float32), jnp.asarray(REF_LOGITS, jnp.float32)
        np.testing.assert_allclose(self.variant(function)(a, b), function(a, b), rtol=1e-5, atol=1e-7)
