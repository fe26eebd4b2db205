"""Argument checks of the math modules: a ValueError names the argument, what it was, and the remedy.

Everything here looks at shapes, dtypes and Python numbers only, so it runs while a function is traced, before
anything is compiled. Values of arrays are never looked at.
"""

import numbers

import jax.numpy as jnp
import numpy as np

from jaxpg.types import Array, Batch, Experience

# How to come by the fields that only some algorithms read.
_REMEDIES = {
    "advantages": "make the batch with algorithms.to_batch, or set Batch.advantages",
    "greedy_rewards": "set Experience.greedy_rewards [P], the rewards of the greedy completions",
    "kl_coef": "set Experience.kl_coef [] to the train state's; make_loss_fn and update.make_update set Batch.kl_coef",
    "log_probs": "make the batch with algorithms.to_batch, or set Batch.log_probs [B, T], those of π_old",
    "ref_log_probs": "set Experience.ref_log_probs [B, T], of the reference policy, or ask for no KL to it",
    "returns": "give the algorithm a `critic` and make the batch with algorithms.to_batch",
    "sampler_log_probs": "set Experience.trainer_log_probs [B, T], the rollout's as the trainer computes them at π_old",
    "scores": "set Experience.scores [P, G, K], the rewards of the K scorers apart",
    "values": "set Experience.values [B, T], the critic's V before each action",
}


def require(data: Experience | Batch, name: str) -> Array:
    """Returns an optional field, or raises ValueError: the algorithm at hand cannot do without it."""
    value = getattr(data, name)
    if value is None:
        raise ValueError(f"{name} is None in the {type(data).__name__}: this algorithm reads it; {_REMEDIES[name]}")
    return value


def as_float(x) -> Array:
    """Casts to float32; float64 stays, so that proofs may run in double precision."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def boolean(name: str, mask, shape: tuple[int, ...]) -> Array:
    """Returns the mask as an array after checking that it is boolean and of that shape."""
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise ValueError(f"{name} has dtype {mask.dtype}: must be bool; write {name} > 0")
    if mask.shape != shape:
        raise ValueError(f"{name} has shape {mask.shape}: must be {shape}, one entry for each value it masks")
    return mask


def integer(name: str, x, shape: tuple[int, ...]) -> Array:
    """Returns x as an array after checking that it is of an integer dtype and of that shape."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {x.dtype}: must be integer; write {name}.astype(int)")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}: must be {shape}")
    return x


def same_shape(**arrays) -> None:
    """Checks that all named arrays have the shape of the first."""
    (first, reference), *rest = arrays.items()
    for name, array in rest:
        if jnp.shape(array) != jnp.shape(reference):
            raise ValueError(
                f"{name} has shape {jnp.shape(array)}: must be {jnp.shape(reference)}, the shape of {first}; "
                f"broadcast it explicitly if that is meant"
            )


def shape(name: str, array, expected: tuple[int, ...], why: str) -> None:
    """Checks an array's shape; `why` says in words where the expected one comes from."""
    if jnp.shape(array) != expected:
        raise ValueError(f"{name} has shape {jnp.shape(array)}: must be {expected}, {why}")


def has_axis(name: str, array, what: str) -> None:
    """Checks that the last axis exists and is not empty; `what` says what it enumerates."""
    dims = jnp.shape(array)
    if not dims or dims[-1] == 0:
        raise ValueError(f"{name} has shape {dims}: its last axis must hold at least one {what}")


def per_token(name: str, array, tokens_shape: tuple[int, ...]) -> None:
    """Checks for [..., T], or [..., 1] which stands for one value a row."""
    dims = jnp.shape(array)
    if dims not in (tokens_shape, (*tokens_shape[:-1], 1)):
        raise ValueError(
            f"{name} has shape {dims}: must be {tokens_shape} or {(*tokens_shape[:-1], 1)}; "
            f"write {name}[..., None] for one value a row"
        )


def is_number(value) -> bool:
    """True for a plain number, whose value is known while tracing."""
    return isinstance(value, numbers.Real | np.number)


def positive(name: str, value) -> None:
    """Checks a plain number for > 0; arrays, which may be traced, pass."""
    if is_number(value) and not value > 0:
        raise ValueError(f"{name}={value}: must be greater than 0")


def non_negative(name: str, value) -> None:
    """Checks a plain number for >= 0; arrays, which may be traced, pass."""
    if is_number(value) and not value >= 0:
        raise ValueError(f"{name}={value}: must be 0 or greater")


def at_least(name: str, value, low) -> None:
    """Checks a plain number for >= low; arrays, which may be traced, pass."""
    if is_number(value) and not value >= low:
        raise ValueError(f"{name}={value}: must be at least {low}")


def options_at_least(options, low, *names: str) -> None:
    """Checks options of a command line, by the names of their fields, and says them as they are typed."""
    for name in names:
        at_least(f"--{name.replace('_', '-')}", getattr(options, name), low)


def unit_interval(name: str, value) -> None:
    """Checks a plain number for 0 <= value <= 1; arrays, which may be traced, pass."""
    if is_number(value) and not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: must lie between 0 and 1")
