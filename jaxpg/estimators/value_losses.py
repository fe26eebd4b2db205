"""Critic losses: per token, unreduced, for an aggregator of `aggregate`.

They take no mask and are pointwise: set values and returns to 0 off the actions beforehand (`masked.fill`), as
the training loop does, so that no NaN there reaches the parameters.
"""

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks
from jaxpg.types import Array


def squared(values, returns) -> Array:
    """Computes the squared error of the critic.

        loss_t = ½·(V_t − R_t)²

    Source: Schulman et al. 2017 (PPO), eq. 9, L^VF, times ½.

    Args:
      values: [..., T] predictions; carries gradient.
      returns: [..., T] targets; data: stop their gradient if they were bootstrapped from `values`.

    Returns:
      [..., T] float32.

    Raises:
      ValueError: if shapes differ.
    """
    checks.same_shape(values=values, returns=returns)
    return 0.5 * jnp.square(checks.as_float(values) - checks.as_float(returns))


def clipped(values, old_values, returns, *, clip: float) -> Array:
    """Computes the pessimistic one of the error and the error of a prediction kept near the old one.

        loss_t = ½·max((V_t − R_t)², (V_old,t + clip(V_t − V_old,t, ±clip) − R_t)²)

    The gradient is 0 where the prediction has moved by more than `clip` towards the target.
    Source: the PPO implementation of Dhariwal et al. 2017 (OpenAI Baselines); Engstrom et al. 2020
    (Implementation Matters), "value function clipping".

    Args:
      values: [..., T] predictions; carries gradient.
      old_values: [..., T] predictions when the rollout was made; data.
      returns: [..., T] targets; data.
      clip: largest move of a prediction, in units of the return.

    Returns:
      [..., T] float32, never below `squared`.

    Raises:
      ValueError: if shapes differ or `clip` is negative.
    """
    checks.non_negative("clip", clip)
    checks.same_shape(values=values, old_values=old_values, returns=returns)
    old_values = checks.as_float(old_values)
    near = old_values + jnp.clip(checks.as_float(values) - old_values, -clip, clip)
    return jnp.maximum(squared(values, returns), squared(near, returns))


def proximal(params, old_params, *, coef: float) -> Array:
    """Computes the penalty that keeps the critic's parameters near those of the last iteration.

        penalty = coef·‖φ − φ_i‖²

    To be added to the mean of `squared`: the proximal fit ‖Q̂ − V_φ‖² + λ‖φ − φ_i‖² of the critic. A scalar
    of the batch, not of a token: multiply it by the weight if it is added to a `Weighted` total.

    Args:
      params: pytree φ; carries gradient.
      old_params: pytree φ_i of the same structure; data.
      coef: λ.

    Returns:
      [] float32.

    Raises:
      ValueError: if `coef` is negative or the trees differ.
    """
    checks.non_negative("coef", coef)
    if jax.tree.structure(params) != jax.tree.structure(old_params):
        raise ValueError("old_params has another tree structure than params: must be the critic's earlier parameters")

    def distance(leaf, old_leaf):
        checks.same_shape(params=leaf, old_params=old_leaf)
        return jnp.sum(jnp.square(checks.as_float(leaf) - checks.as_float(old_leaf)))

    squares = jax.tree.leaves(jax.tree.map(distance, params, old_params))
    return coef * sum(squares, start=jnp.float32(0.0))
