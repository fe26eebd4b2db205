"""Preference losses: values by hand, gradients, and the identities that tie DPO, IPO and Bradley-Terry."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import preference

CHOSEN = jnp.array([-10.0, -12.0, -8.0])
REJECTED = jnp.array([-11.0, -9.0, -8.0])
REF_CHOSEN = jnp.array([-10.5, -11.0, -8.0])
REF_REJECTED = jnp.array([-10.0, -10.0, -8.0])
ALL = (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)
GAP = np.array([1.5, -2.0, 0.0])  # h
LOSSES = {"dpo": preference.dpo, "ipo": preference.ipo}


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def test_bradley_terry_golden():
    loss, aux = preference.bradley_terry(jnp.array([2.0, 0.0, 1.0]), jnp.array([1.0, 0.0, 3.0]))
    np.testing.assert_allclose(loss, [0.313262, 0.693147, 2.126928], rtol=1e-5)
    np.testing.assert_array_equal(aux["correct"], [True, False, False])
    np.testing.assert_array_equal(aux["margin"], [1.0, 0.0, -2.0])


def test_bradley_terry_margin_shifts_and_only_the_difference_counts():
    a, b = jnp.array([2.0, 0.0]), jnp.array([1.0, 0.5])
    with_margin = preference.bradley_terry(a, b, margin=0.5)[0]
    np.testing.assert_allclose(with_margin, preference.bradley_terry(a - 0.5, b)[0], rtol=1e-6)
    np.testing.assert_allclose(preference.bradley_terry(a + 7, b + 7)[0], preference.bradley_terry(a, b)[0], rtol=1e-5)
    per_pair = preference.bradley_terry(a, b, margin=jnp.array([0.0, 0.5]))[0]
    np.testing.assert_allclose(per_pair[1], with_margin[1], rtol=1e-6)


def test_bradley_terry_gradient_is_the_probability_of_being_wrong():
    gradient = jax.grad(lambda r: preference.bradley_terry(r, 1.0)[0])(2.0)
    np.testing.assert_allclose(gradient, -1 / (1 + np.e), rtol=1e-5)
    far = jax.value_and_grad(lambda r: preference.bradley_terry(r, 0.0)[0])
    np.testing.assert_allclose(far(-1e4), (1e4, -1.0), rtol=1e-6)
    np.testing.assert_allclose(far(1e4), (0.0, 0.0))


def test_dpo_golden():
    loss, aux = preference.dpo(*ALL, beta=0.1)
    np.testing.assert_allclose(loss, -log_sigmoid(0.1 * GAP), rtol=1e-5)
    np.testing.assert_allclose(aux["margin"], 0.1 * GAP, atol=1e-6)
    np.testing.assert_allclose(aux["chosen_reward"], 0.1 * np.array([0.5, -1.0, 0.0]), atol=1e-6)
    np.testing.assert_array_equal(aux["correct"], [True, False, False])


def test_dpo_is_bradley_terry_on_implicit_rewards():
    loss, aux = preference.dpo(*ALL, beta=0.3)
    expected, _ = preference.bradley_terry(aux["chosen_reward"], aux["rejected_reward"])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_dpo_starts_at_log_two_and_raises_the_chosen():
    loss, gradients = jax.value_and_grad(
        lambda c, r: jnp.sum(preference.dpo(c, r, CHOSEN, REJECTED, beta=0.1)[0]), argnums=(0, 1)
    )(CHOSEN, REJECTED)
    np.testing.assert_allclose(loss, 3 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(gradients[0], np.full(3, -0.05), rtol=1e-5)
    np.testing.assert_allclose(gradients[1], np.full(3, 0.05), rtol=1e-5)


def test_label_smoothing_mixes_both_labels():
    swapped = preference.dpo(REJECTED, CHOSEN, REF_REJECTED, REF_CHOSEN, beta=0.2)[0]
    plain = preference.dpo(*ALL, beta=0.2)[0]
    smooth = preference.dpo(*ALL, beta=0.2, label_smoothing=0.1)[0]
    np.testing.assert_allclose(smooth, 0.9 * plain + 0.1 * swapped, rtol=1e-5)


def test_ipo_golden_and_its_optimum():
    loss, _ = preference.ipo(*ALL, beta=0.25)
    np.testing.assert_allclose(loss, (GAP - 2.0) ** 2, rtol=1e-5)
    at_optimum = jax.grad(lambda c: preference.ipo(c, 0.0, 0.0, 0.0, beta=0.25)[0])(2.0)
    assert at_optimum == 0


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), shift=st.floats(-5, 5))
def test_only_differences_of_log_ratios_count(seed, shift):
    """A prompt that all four numbers share drops out, and so does one that policy and reference share."""
    pairs = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
    chosen, rejected, ref_chosen, ref_rejected = pairs
    shift = np.float32(shift)
    for loss in LOSSES.values():
        expected = loss(*pairs)[0]
        np.testing.assert_allclose(loss(*(pairs + shift))[0], expected, rtol=1e-4, atol=1e-4)
        moved = loss(chosen + shift, rejected, ref_chosen + shift, ref_rejected)[0]
        np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-4)
        tilted = loss(chosen + shift, rejected + shift, ref_chosen, ref_rejected)[0]
        np.testing.assert_allclose(tilted, expected, rtol=1e-4, atol=1e-4)


def test_sequence_log_probs_reads_the_response_alone():
    log_probs = jnp.array([[jnp.nan, -1.0, -2.0], [-3.0, jnp.inf, -0.5]])
    mask = jnp.array([[False, True, True], [True, False, True]])
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(preference.sequence_log_probs(x, mask)))(log_probs)
    np.testing.assert_allclose(preference.sequence_log_probs(log_probs, mask), [-3.0, -3.5])
    np.testing.assert_allclose(value, -6.5)
    np.testing.assert_array_equal(gradient, mask.astype(np.float32))


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_shapes_and_aux(name):
    half = [x.astype(jnp.bfloat16) for x in ALL]
    got, _ = LOSSES[name](*half)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, LOSSES[name](*ALL)[0], rtol=1e-6)  # the numbers above are exact in bfloat16
    deep, _ = LOSSES[name](*(x.reshape(1, 3, 1) for x in ALL))
    np.testing.assert_allclose(deep.reshape(3), got, rtol=1e-6)
    gradient = jax.grad(lambda c: jnp.sum(LOSSES[name](c, *ALL[1:])[1]["margin"]))(CHOSEN)
    np.testing.assert_array_equal(gradient, np.zeros(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: preference.bradley_terry(CHOSEN, REJECTED[:2]),
            r"rejected_rewards has shape \(2,\): must be \(3,\)",
        ),
        (lambda: preference.bradley_terry(CHOSEN, REJECTED, margin=jnp.ones(2)), r"margin has shape \(2,\)"),
        (
            lambda: preference.dpo(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED[:1]),
            r"ref_rejected_log_probs has shape",
        ),
        (lambda: preference.dpo(*ALL, beta=0.0), "beta=0.0: must be greater than 0"),
        (lambda: preference.dpo(*ALL, label_smoothing=0.5), r"label_smoothing=0.5: must lie in \[0, 0.5\)"),
        (lambda: preference.ipo(*ALL, beta=-1.0), "beta=-1.0: must be greater than 0"),
        (lambda: preference.sequence_log_probs(CHOSEN, jnp.ones(3)), "mask has dtype float32: must be bool"),
    ],
)
def test_errors_name_argument_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(*LOSSES.items())
    def test_same_with_and_without_jit(self, function):
        chex.assert_trees_all_close(self.variant(function)(*ALL), function(*ALL), rtol=1e-6)
