"""Drawing from a softmax: exact frequencies, nothing impossible, a row alone as in company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxpg.sampling.draw import CHUNK, _invert, categorical, log_prob_of

draw = jax.jit(categorical)


@pytest.mark.parametrize("size", [1, 7, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_frequencies_match_the_probabilities(size, key):
    scores = 2 * jax.random.normal(key, (size,))
    rows = 40_000
    drawn = draw(jax.random.split(jax.random.key(1), rows), jnp.broadcast_to(scores, (rows, size)))
    expected = rows * np.asarray(jax.nn.softmax(scores), np.float64)
    common = expected >= 5
    observed = np.bincount(np.asarray(drawn), minlength=size)
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    keep = expected > 0
    expected *= rows / expected.sum()
    assert keep.sum() == 1 or scipy.stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-4


def test_what_is_ruled_out_is_never_drawn(key):
    allowed = jnp.array([0, 3, CHUNK - 1, CHUNK, 5 * CHUNK + 1])
    scores = jnp.full(6 * CHUNK, -jnp.inf).at[allowed].set(0.0)
    drawn = draw(jax.random.split(key, 5000), jnp.broadcast_to(scores, (5000, scores.size)))
    assert set(np.asarray(drawn).tolist()) == set(np.asarray(allowed).tolist())


def test_edges_of_the_uniform_fall_on_entries_with_mass():
    mass = jnp.tile(jnp.array([0.0, 0.1, 0.0, 0.7, 0.3, 0.0]), (3, 1))
    largest = np.nextafter(np.float32(1), np.float32(0))
    np.testing.assert_array_equal(_invert(mass, jnp.array([0.0, 0.5, largest])), [1, 3, 4])
    # Sums in a tree need not grow: whatever the number, an entry without mass must not be found.
    mass = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, (1, 5000)), 0.1, 0.0).repeat(2000, axis=0)
    found = _invert(mass, jax.random.uniform(jax.random.key(1), (2000,)))
    assert (jnp.take_along_axis(mass, found[:, None], axis=1) > 0).all()


def test_a_row_does_not_depend_on_its_neighbours(key):
    keys, scores = jax.random.split(key, 8), jax.random.normal(key, (8, 700))
    together = draw(keys, scores)
    alone = [draw(keys[i : i + 1], scores[i : i + 1])[0] for i in range(8)]
    np.testing.assert_array_equal(together, alone)


def test_log_prob_of_equals_log_softmax(key):
    scores = jax.random.normal(key, (4, 300)).at[0, :299].set(-jnp.inf)
    token = jnp.array([299, 0, 5, 299])
    expected = jnp.take_along_axis(jax.nn.log_softmax(scores, axis=-1), token[:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(log_prob_of(scores, token), expected, atol=1e-6)
