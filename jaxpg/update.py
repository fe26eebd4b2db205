"""The update: gradient of a weighted loss over micro-batches, one division, one Optax step."""

import dataclasses
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxpg.train_state import TrainState
from jaxpg.types import Array, Batch, Weighted

Metrics = dict[str, Weighted]
LossFn = Callable[[dict, Batch], tuple[Weighted, Metrics]]


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    max_grad_norm: float = 1.0,
    weight_decay: float = 0.0,
    b2: float = 0.95,
) -> optax.GradientTransformation:
    """Clips the gradient to a global norm, then takes an AdamW step (Loshchilov & Hutter 2019, alg. 2).

    Args:
      learning_rate: a number, or a schedule of the number of updates done.
      max_grad_norm: longest gradient let through.
      weight_decay: decoupled, times the learning rate.
      b2: decay of the second moment.

    Raises:
      ValueError: if `max_grad_norm` is not positive.
    """
    if max_grad_norm <= 0:
        raise ValueError(f"max_grad_norm={max_grad_norm}: must be positive; use a large number not to clip")
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm), optax.adamw(learning_rate, b2=b2, weight_decay=weight_decay)
    )


def make_update(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, *, num_microbatches: int = 1
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the pure function (state, batch) -> (state, metrics).

        g = Σ_k ∇ total_k / Σ_k weight_k,   k over micro-batches

    Totals and weights add up over micro-batches and the division happens once, so the gradient does not depend on
    how the batch is split, whatever the aggregation.

    Args:
      loss_fn: (params, batch) -> (Weighted loss, dict of Weighted metrics). The weight must not depend on params.
      optimizer: applied to the mean gradient.
      num_microbatches: parts that a batch's rows are cut into, to save memory.

    Returns:
      A function to jit, donating its state. Its metrics are those of `loss_fn` and `loss`, `grad_norm` (before
      clipping) and `update_norm`.

    Raises:
      ValueError: if the number of rows is not divisible by `num_microbatches` (when the update is traced).
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches}: must be at least 1")

    def objective(params, batch):
        loss, metrics = loss_fn(params, batch)
        return loss.total.astype(jnp.float32), (loss, metrics)

    def gradient(params, batch):
        grads, aux = jax.grad(objective, has_aux=True)(params, batch)
        return grads, aux

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        summed = gradient_sum(gradient, state.params, batch, num_microbatches)
        grads, (loss, metrics) = summed
        scale = jnp.where(loss.weight == 0, 0.0, 1.0 / jnp.where(loss.weight == 0, 1.0, loss.weight))
        grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = metrics | {
            "loss": loss,
            "grad_norm": Weighted(optax.tree.norm(grads), jnp.float32(1)),
            "update_norm": Weighted(optax.tree.norm(updates), jnp.float32(1)),
        }
        return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics

    return update


def gradient_sum(gradient: Callable, params, batch: Batch, num_microbatches: int):
    """Adds up gradient(params, micro-batch) over micro-batches with a scan."""
    if num_microbatches == 1:
        return gradient(params, batch)
    parts = jax.tree.map(lambda x: _split_rows(x, num_microbatches), batch)
    first = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)

    def body(total, part):
        return jax.tree.map(operator.add, total, gradient(params, part)), None

    return jax.lax.scan(body, zeros, parts)[0]


def _split_rows(x: Array, parts: int) -> Array:
    """Cuts [B, ...] into [parts, B / parts, ...], dealing rows out in turn.

    Dealing leaves every device with a share of each part when rows are sharded in blocks; cutting in blocks
    would put a whole part on a few devices.
    """
    rows = x.shape[0]
    if rows % parts:
        raise ValueError(f"num_microbatches={parts} does not divide the {rows} rows of a batch: choose a divisor")
    return x.reshape(rows // parts, parts, *x.shape[1:]).swapaxes(0, 1)
