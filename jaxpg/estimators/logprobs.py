"""Log-probs and entropy of tokens. The shift by one happens here and nowhere else.

A model's logits at position t − 1 are about the token at t. Every function returns token-aligned arrays: index
t speaks about `tokens[:, t]`; nothing predicts index 0, where they return 0.

`token_log_probs` and `entropy` take the logits [B, T, V]. Where those are too large to hold, `from_hidden` takes the
hidden states instead and gives the same numbers.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxpg.estimators import checks
from jaxpg.parallel import sharding
from jaxpg.types import Array

# Where `chunk` is not given, a device holds so many logits at a time (half a GiB in float32), or those of as few
# positions a row. Each chunk sums a gradient of the vocabulary projection over the devices: the fewer, the better.
LOGITS_AT_A_TIME = 2**27
SMALLEST_CHUNK = 128
LOGITS_THAT_ARE_KEPT = 2**24  # on a device: so few are kept for the backward pass, not computed again


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
    return align(_log_probs(scaled, tokens[..., 1:]))


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
    return align(_entropy(_next_logits(logits, temperature)))


def from_hidden(
    unembed: Callable[[Array], Array],
    hidden,
    tokens,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool = True,
    adjust: Callable[[Array, Array, Array], Array] | None = None,
) -> tuple[Array, Array | None]:
    """Computes log-probs and entropy from hidden states, never holding the logits [B, T, V].

        logits = unembed(hidden);   y_t = log softmax(logits_{t−1} / temperature)[tokens_t];   H_t = −Σ_v p(v)·log p(v)

    The logits of at most `chunk` positions exist at a time, in the forward pass and again in the backward pass, which
    computes them anew: B·chunk·V in place of B·T·V for a fourth matrix product with the vocabulary beside the usual
    three. The loop runs over time only, so rows that are spread over devices stay where they are. Where one chunk has
    room for all and a device has at most 2²⁴ logits, as with small models, they are kept and nothing is computed anew.

        log_probs, entropy = from_hidden(partial(model.unembed, params), hidden, tokens)

    Args:
      unembed: hidden states [..., E] -> logits [..., V], position by position. Gradient flows to every parameter it
        closes over, added up over the chunks in the dtype of the parameter: one more copy of it in all.
      hidden: [..., T, E] any float dtype; carries gradient.
      tokens: [..., T] int. A token outside 0..V−1 gives NaN, as in `token_log_probs`.
      temperature: that of the sampler.
      chunk: positions of each row whose logits are held at a time; T need not be a multiple. Default: as many as make
        half a GiB on a device, rows being spread over data × fsdp and the vocabulary over tensor, but at least 128.
      with_entropy: False leaves the entropy out, and None in its place.
      adjust: the sampler's filters, (tempered logits [..., V], tokens [...], their index t [...]) -> logits [..., V].

    Returns:
      Log-probs [..., T] float32, nats, and entropy [..., T] float32, nats.

    Raises:
      ValueError: if shapes do not match, `tokens` is not integer, or `temperature` or `chunk` is not positive.
    """
    hidden, tokens = _check_hidden(hidden, tokens, temperature, chunk)
    length = tokens.shape[-1] - 1
    if length == 0:
        nothing = jnp.zeros(tokens.shape, jnp.promote_types(hidden.dtype, jnp.float32))
        return nothing, nothing if with_entropy else None
    per_position = _logits_per_position(unembed, hidden)
    num_chunks = -(-length // (chunk or max(int(LOGITS_AT_A_TIME / per_position), SMALLEST_CHUNK)))

    def of_chunk(hidden, tokens, index):
        logits = unembed(hidden)
        if logits.shape[:-1] != tokens.shape:
            raise ValueError(f"unembed maps {hidden.shape} to {logits.shape}: must be [..., E] -> [..., V]")
        if adjust is None:
            scaled = _scaled(logits, temperature)
        else:
            scaled = _scaled(adjust(checks.as_float(logits) / temperature, tokens, index), 1.0)
        return _log_probs(scaled, tokens), _entropy(scaled) if with_entropy else None

    tokens, last = tokens[..., 1:], tokens.ndim - 1
    index = jnp.broadcast_to(jnp.arange(1, length + 1), tokens.shape)
    if num_chunks == 1 and length * per_position <= LOGITS_THAT_ARE_KEPT:
        return jax.tree.map(align, of_chunk(hidden[..., :-1, :], tokens, index))
    split = partial(_split, num_chunks=num_chunks, size=-(-length // num_chunks))
    chunks = (split(hidden[..., :-1, :], axis=last), split(tokens, axis=last), split(index, axis=last))
    # In a loop nothing can merge the two computations of the logits, so the barriers against it are not needed.
    again = jax.checkpoint(of_chunk, prevent_cse=False)
    results = jax.lax.map(lambda x: again(*x), chunks)
    return jax.tree.map(lambda y: align(_join(y)[..., :length]), results)


def _check_hidden(hidden, tokens, temperature, chunk) -> tuple[Array, Array]:
    """Raises ValueError where the arguments of `from_hidden` do not fit."""
    checks.positive("temperature", temperature)
    checks.at_least("chunk", chunk, 1)  # None passes
    hidden = jnp.asarray(hidden)
    if hidden.ndim < 2 or 0 in hidden.shape[-2:]:
        raise ValueError(f"hidden has shape {hidden.shape}: must be [..., T, E] with T and E at least 1")
    return hidden, checks.integer("tokens", tokens, hidden.shape[:-1])


def _logits_per_position(unembed: Callable[[Array], Array], hidden: Array) -> float:
    """How many logits a device has for one position of each row, on the mesh of the moment."""
    *leading, _, _ = hidden.shape
    vocabulary = jax.eval_shape(unembed, hidden[..., :1, :]).shape[-1]
    parts = sharding.parts(vocabulary, "tensor") * (sharding.parts(leading[0], "data", "fsdp") if leading else 1)
    return max(math.prod(leading) * vocabulary, 1) / parts


def _split(x: Array, *, axis: int, num_chunks: int, size: int) -> Array:
    """Cuts the time axis into chunks and puts those in front; the last position is repeated to fill the last chunk."""
    missing = num_chunks * size - x.shape[axis]
    if missing:
        # Not zeros: the gradient of an arbitrary `unembed` may be NaN there, and 0 · NaN is NaN.
        last = jax.lax.slice_in_dim(x, x.shape[axis] - 1, None, axis=axis)
        x = jnp.concatenate([x, *[last] * missing], axis=axis)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], num_chunks, size, *x.shape[axis + 1 :]), axis, 0)


def _join(x: Array) -> Array:
    """[chunks, ..., size] -> [..., chunks·size]."""
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], -1)


def _log_probs(scaled: Array, tokens: Array) -> Array:
    """Log-probs [...] of tokens [...] under logits [..., V] whose maximum is 0."""
    # Without this a negative token would count from the end of the vocabulary.
    index = jnp.where(tokens < 0, scaled.shape[-1], tokens)[..., None]
    picked = jnp.take_along_axis(scaled, index, axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]
    # Not log_softmax and then a look-up: that would hold the log-probs of the whole vocabulary.
    return picked - jnp.log(jnp.sum(jnp.exp(scaled), axis=-1))


def _entropy(scaled: Array) -> Array:
    """Entropy [...] of softmax(scaled [..., V])."""
    log_probs = jax.nn.log_softmax(scaled, axis=-1)
    possible = log_probs != -jnp.inf
    finite = jnp.where(possible, log_probs, 0.0)
    return -jnp.sum(jnp.where(possible, jnp.exp(finite) * finite, 0.0), axis=-1)


def _next_logits(logits, temperature) -> Array:
    """Logits [..., T−1, V] of the tokens 1..T−1 in float32, divided by the temperature, their maximum 0."""
    checks.positive("temperature", temperature)
    if jnp.ndim(logits) < 2 or 0 in jnp.shape(logits)[-2:]:
        raise ValueError(f"logits has shape {jnp.shape(logits)}: must be [..., T, V] with T and V at least 1")
    # Cut before the cast, so that float32 is never held for the position that predicts nothing.
    return _scaled(jnp.asarray(logits)[..., :-1, :], temperature)


def _scaled(logits: Array, temperature) -> Array:
    """Logits in float32, divided by the temperature, their maximum 0."""
    logits = checks.as_float(logits)
    return (logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))) / temperature


def align(x: Array) -> Array:
    """[..., T−1] about the tokens 1..T−1 -> [..., T], 0 in front."""
    return jnp.concatenate([jnp.zeros_like(x, shape=(*x.shape[:-1], 1)), x], axis=-1)
