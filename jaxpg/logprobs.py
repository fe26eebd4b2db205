"""Log-probs and entropy of tokens from logits. The shift by one happens here and nowhere else.

A model's logits at position t − 1 are about the token at t. Both functions return token-aligned arrays: index
t speaks about `tokens[:, t]`; nothing predicts index 0, where they return 0.
"""

import jax
import jax.numpy as jnp

from jaxpg import checks
from jaxpg.types import Array


def token_log_probs(logits, tokens, *, temperature: float = 1.0) -> Array:
    """Computes the log-prob of each token given the tokens before it.

        y_t = log softmax(logits_{t−1} / temperature)[tokens_t],   y_0 = 0

    Args:
      logits: [..., T, V] any float dtype, as the model returns them; carries gradient.
      tokens: [..., T] int. A token outside 0..V−1 gives NaN: harmless under the mask, loud elsewhere.
      temperature: that of the sampler, so that on policy the ratio is 1.

    Returns:
      [..., T] float32, nats.

    Raises:
      ValueError: if shapes do not match, `tokens` is not integer or `temperature` is not positive.
    """
    scaled = _next_logits(logits, temperature)
    tokens = checks.integer("tokens", tokens, jnp.shape(logits)[:-1])
    # Without this a negative token would count from the end of the vocabulary.
    index = jnp.where(tokens < 0, jnp.shape(logits)[-1], tokens)[..., 1:, None]
    picked = jnp.take_along_axis(scaled, index, axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]
    # Not log_softmax and then a look-up: that would hold the log-probs of the whole vocabulary.
    return _align(picked - jnp.log(jnp.sum(jnp.exp(scaled), axis=-1)))


def entropy(logits, *, temperature: float = 1.0) -> Array:
    """Computes the entropy of the distribution that each token is drawn from.

        H_t = −Σ_v p(v)·log p(v),   p = softmax(logits_{t−1} / temperature),   H_0 = 0

    Args:
      logits: [..., T, V] any float dtype; carries gradient. A logit of −inf is an impossible token and adds
        0.
      temperature: that of the sampler.

    Returns:
      [..., T] float32, nats, never negative.

    Raises:
      ValueError: if `logits` has fewer than two axes or `temperature` is not positive.
    """
    log_probs = jax.nn.log_softmax(_next_logits(logits, temperature), axis=-1)
    possible = log_probs != -jnp.inf
    finite = jnp.where(possible, log_probs, 0.0)
    return _align(-jnp.sum(jnp.where(possible, jnp.exp(finite) * finite, 0.0), axis=-1))


def _next_logits(logits, temperature) -> Array:
    """Logits [..., T−1, V] of the tokens 1..T−1 in float32, divided by the temperature, their maximum 0."""
    checks.positive("temperature", temperature)
    if jnp.ndim(logits) < 2 or 0 in jnp.shape(logits)[-2:]:
        raise ValueError(f"logits has shape {jnp.shape(logits)}: must be [..., T, V] with T and V at least 1")
    # Cut before the cast, so that float32 is never held for the position that predicts nothing.
    logits = checks.as_float(jnp.asarray(logits)[..., :-1, :])
    return (logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))) / temperature


def _align(x: Array) -> Array:
    """[..., T−1] about the tokens 1..T−1 -> [..., T], 0 in front."""
    return jnp.concatenate([jnp.zeros_like(x, shape=(*x.shape[:-1], 1)), x], axis=-1)
