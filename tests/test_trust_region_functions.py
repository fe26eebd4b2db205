"""The functions that TRPO is made of: the token-aligned KL, conjugate gradient, the line search."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from test_trust_region import logits_fn, make_batch, make_params, make_state

from jaxpg.training import trust_region


def test_token_kl_is_aligned_with_the_token_it_speaks_about():
    old, new = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.float32)
    new[0, 1, 2] = 1.0  # logits at 1 are about the token at 2
    new[1, 2, 0] = 9.0  # logits of the last position are about no token
    for temperature, x in ((1.0, 1.0), (0.5, 2.0)):
        expected = np.zeros((2, 3))
        expected[0, 2] = np.log((3 + np.exp(x)) / 4) - x / 4
        np.testing.assert_allclose(trust_region.token_kl(old, new, temperature=temperature), expected, atol=1e-6)


def test_conjugate_gradient_solves_a_pytree_and_stops_early():
    rng = np.random.default_rng(1)
    q, _ = np.linalg.qr(rng.normal(size=(7, 7)))
    matrix = ((q * np.array([1.0, 1, 1, 1, 5, 5, 5])) @ q.T).astype(np.float32)  # two eigenvalues: two iterations
    b = {"a": jnp.asarray(rng.normal(size=4), jnp.float32), "b": jnp.asarray(rng.normal(size=(3, 1)), jnp.float32)}

    def matvec(v):
        y = matrix @ jnp.concatenate([v["a"], v["b"][:, 0]])
        return {"a": y[:4], "b": y[4:, None]}

    found = trust_region.conjugate_gradient(matvec, b, iterations=20, tolerance=1e-4)
    assert found.iterations == 2
    expected = np.linalg.solve(matrix, ravel_pytree(b)[0])
    np.testing.assert_allclose(ravel_pytree(found.x)[0], expected, rtol=1e-4, atol=1e-5)


def test_conjugate_gradient_stays_accurate_in_float32():
    """Eigenvalues from 1e-3 to 30: rounding makes the plain recursion forget the directions that it is done with."""
    q, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(30, 30)))
    matrix = ((q * np.geomspace(1e-3, 30, 30)) @ q.T).astype(np.float32)
    b = np.random.default_rng(3).normal(size=30).astype(np.float32)
    krylov = [b.astype(float)]
    for _ in range(9):
        krylov.append(matrix.astype(float) @ krylov[-1] / np.linalg.norm(krylov[-1]))
    basis = np.linalg.qr(np.stack(krylov, axis=1))[0]  # the tenth iterate is the best of this space
    best = basis @ np.linalg.solve(basis.T @ matrix @ basis, basis.T @ b)
    found = trust_region.conjugate_gradient(lambda v: matrix @ v, jnp.asarray(b), iterations=10)
    assert np.linalg.norm(found.x - best) / np.linalg.norm(best) < 1e-4
    np.testing.assert_allclose(found.residual, b - matrix @ best, atol=1e-3)


def test_conjugate_gradient_keeps_what_it_has_where_the_matrix_is_not_positive():
    b = jnp.array([1.0, 0.1])
    indefinite = trust_region.conjugate_gradient(lambda v: jnp.array([2.0, -1.0]) * v, b, iterations=9)
    assert indefinite.iterations == 2
    np.testing.assert_allclose(indefinite.x, (b @ b) / (2.0 - 0.01) * b, rtol=1e-6)  # that of the first iteration
    for factor in (-1.0, jnp.nan, jnp.inf):
        x, residual, iterations = trust_region.conjugate_gradient(lambda v, c=factor: c * v, b, iterations=9)
        assert iterations == 1
        np.testing.assert_array_equal(jnp.stack([x, residual]), jnp.stack([jnp.zeros(2), b]))
    for bad in (jnp.zeros(2), jnp.array([jnp.nan, 1.0])):
        x, _, iterations = trust_region.conjugate_gradient(lambda v: v, bad, iterations=9)
        assert iterations == 0
        np.testing.assert_array_equal(x, [0.0, 0.0])


def test_line_search_never_tries_a_step_that_is_zero_or_not_finite():
    search = partial(trust_region.line_search, max_kl=1.0, backtrack=0.5, max_backtracks=5)
    for length, end, trials in ((0.0, 2.0, 0), (jnp.nan, 2.0, 0), (jnp.inf, 2.0, 0), (3.0, 5.0, 1)):
        found = search(lambda _: (jnp.float32(1), jnp.float32(0)), jnp.array([2.0]), jnp.array([length]))
        assert (found.params, found.accepted, found.trials) == (end, trials == 1, trials)


def test_line_search_takes_the_first_step_that_fits():
    """gain p(3 − p) from 0 and KL p²/2 along a line: of 4, 2 and 1 the last alone is inside."""

    def compare(p):
        return p * (3.0 - p), p**2 / 2

    search = partial(trust_region.line_search, compare, jnp.float32(0), backtrack=0.5)
    found = search(jnp.float32(4), max_kl=1.0, max_backtracks=2)
    assert (found.params, found.accepted, found.fraction, found.gain, found.kl, found.trials) == (
        1,
        True,
        0.25,
        2,
        0.5,
        3,
    )
    found = search(jnp.float32(4), max_kl=1.0, max_backtracks=1)
    assert (found.params, found.accepted, found.fraction, found.gain, found.kl, found.trials) == (0, False, 0, 0, 0, 2)
    # Inside the region 4 loses and 2 gains.
    assert search(jnp.float32(4), max_kl=100.0, max_backtracks=2).params == 2


def test_arguments_out_of_range_are_named():
    for keywords, message in (({"iterations": 0}, "iterations=0"), ({"tolerance": -1.0}, "tolerance=-1.0")):
        with pytest.raises(ValueError, match=message):
            trust_region.conjugate_gradient(lambda v: v, jnp.ones(2), **keywords)
    with pytest.raises(ValueError, match="temperature=0"):
        trust_region.token_kl(jnp.ones((2, 3)), jnp.ones((2, 3)), temperature=0)
    with pytest.raises(ValueError, match=r"logits has shape \(2, 4\): must be \(2, 3\), the shape of old_logits"):
        trust_region.token_kl(jnp.ones((2, 3)), jnp.ones((2, 4)))


def test_a_step_of_the_trainable_parameters_is_that_of_a_policy_which_has_no_others():
    """The others stay as they are, to the bit, and have no share in the Fisher matrix."""
    batch, params = make_batch(), make_params()
    both = {"adapter": params, "base": {"w": 0.1 * params["w"]}}

    def alone(adapter, batch):
        return logits_fn({"w": adapter["w"] + both["base"]["w"]}, batch)

    def together(params, batch):
        return logits_fn({"w": params["adapter"]["w"] + params["base"]["w"]}, batch)

    expected, metrics = jax.jit(trust_region.make_update(alone))(make_state(params), batch)
    update = trust_region.make_update(together, trainable=lambda path: path.startswith("adapter"))
    found, told = jax.jit(update)(make_state(both), batch)
    assert metrics["accepted"].mean == told["accepted"].mean == 1
    np.testing.assert_allclose(found.params["adapter"]["w"], expected.params["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.params["base"]["w"], both["base"]["w"])
