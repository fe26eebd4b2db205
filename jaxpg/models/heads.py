"""Heads with one number a token: the critic's value and a reward model's score, on a trunk of one's choice.

A head is {"kernel": [E], "bias": []} in float32 and reads the hidden states of `Model.hidden`. `rollout.policies` puts
a critic's head on the actor's trunk, on a copy of it, or on adapters of its own. A policy with another trunk is short:

    def policy(params, batch):
        actor, critic = params["actor"], params["critic"]
        hidden = model.hidden(actor, batch.tokens, batch.token_mask)
        log_probs, entropy = logprobs.from_hidden(partial(model.unembed, actor), hidden, batch.tokens)
        hidden = critic_model.hidden(critic["trunk"], batch.tokens, batch.token_mask)
        return log_probs, entropy, heads.values(critic["head"], hidden)

A reward model is a trunk and a head too: `rewards(head, model.hidden(trunk, tokens, token_mask), token_mask)`, trained
by `preference.bradley_terry`.
"""

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks, logprobs
from jaxpg.types import Array


def init(key: Array, hidden_size: int, *, scale: float = 0.0) -> dict:
    """Draws a head.

        kernel ~ N(0, scale²/E),   bias = 0

    At scale 0 it says 0 everywhere. The first gradient then reaches only the head, because the trunk's gradient is
    proportional to the kernel, which is 0.

    Args:
      key: a typed PRNG key.
      hidden_size: E.
      scale: standard deviation of the output where the hidden states have unit variance.

    Raises:
      ValueError: if `hidden_size` is below 1 or `scale` is negative.
    """
    checks.at_least("hidden_size", hidden_size, 1)
    checks.non_negative("scale", scale)
    kernel = jax.random.normal(key, (hidden_size,), jnp.float32) * (scale / hidden_size**0.5)
    return {"kernel": kernel, "bias": jnp.zeros((), jnp.float32)}


def values(head: dict, hidden: Array) -> Array:
    """Computes the value of the state that each token is drawn in.

        V_t = kernel · hidden_{t−1} + bias,   V_0 = 0

    Token-aligned as the log-probs are: V_t knows the tokens before t and not the one at t.

    Args:
      head: from `init`; carries gradient.
      hidden: [..., T, E] any float dtype; carries gradient.

    Returns:
      [..., T] float32.

    Raises:
      ValueError: if the head is of another width.
    """
    return logprobs.align(_outputs(head, hidden)[..., :-1])


def rewards(head: dict, hidden: Array, token_mask: Array) -> Array:
    """Computes the reward of each row, read at its last real token, wherever the padding stands.

        r = kernel · hidden_last + bias

    The same of a value head is the value after the last token: `Experience.bootstrap`.

    Args:
      head: from `init`; carries gradient.
      hidden: [..., T, E] any float dtype; carries gradient.
      token_mask: [..., T] bool, real tokens.

    Returns:
      [...] float32; 0 for a row without any token.

    Raises:
      ValueError: if the head is of another width, or the mask is not boolean or of another shape.
    """
    outputs = _outputs(head, hidden)
    token_mask = checks.boolean("token_mask", token_mask, outputs.shape)
    last = token_mask.shape[-1] - 1 - jnp.argmax(token_mask[..., ::-1], axis=-1, keepdims=True)
    found = jnp.take_along_axis(outputs, last, axis=-1)[..., 0]
    return jnp.where(token_mask.any(axis=-1), found, 0.0)


def _outputs(head: dict, hidden: Array) -> Array:
    """kernel · hidden + bias [..., T], in float32 on every platform."""
    kernel = head["kernel"]
    if jnp.ndim(hidden) < 2 or hidden.shape[-1:] != kernel.shape:
        raise ValueError(
            f"hidden has shape {jnp.shape(hidden)}, the head's kernel {kernel.shape}: must be [..., T, E] and [E]"
        )
    return jnp.matmul(checks.as_float(hidden), kernel, precision="highest") + head["bias"]
