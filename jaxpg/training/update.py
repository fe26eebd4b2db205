"""The update: gradient of a weighted loss over micro-batches, one division, one Optax step."""

import dataclasses
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxpg.algorithms.algorithm import Outputs, Policy, clear
from jaxpg.estimators import aggregate, checks, kl
from jaxpg.parallel.sharding import constrain_rows
from jaxpg.training.train_state import Trainable, TrainState, join, split
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
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    num_microbatches: int = 1,
    trainable: Trainable | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the pure function (state, batch) -> (state, metrics).

        g = Σ_k ∇ total_k / Σ_k weight_k,   k over micro-batches

    Totals and weights add up over micro-batches and the division happens once, so the gradient does not depend on
    how the batch is split, whatever the aggregation. Where the loss or the gradient is not finite, the update is
    skipped: the state stays as it is, to the bit.

    Args:
      loss_fn: (params, batch) -> (Weighted loss, dict of Weighted metrics). The weight must not depend on params.
        The batch it sees carries the state's `kl_coef`, the β of the moment.
      optimizer: applied to the mean gradient.
      num_microbatches: parts that a batch's rows are cut into, to save memory.
      trainable: which parameters are trained, by their path such as "actor/layers/mlp/up"; default all. Of the others
        there is no gradient, no update and nothing in the optimizer. Give `train_state.init` the same.

    Returns:
      A function to jit, donating its state. Its metrics are those of `loss_fn` and `loss`, `grad_norm` (before
      clipping), `update_norm` and `nonfinite`, 1 where it was skipped.

    Raises:
      ValueError: when the update is traced, if the number of rows is not divisible by `num_microbatches`, nothing is
        trainable, or the state was made for another optimizer or other trainable parameters.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches}: must be at least 1")

    def objective(trained, frozen, batch):
        loss, metrics = loss_fn(join(trained, frozen), batch)
        return loss.total.astype(jnp.float32), (loss, metrics)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # On every row, so that the batch may still be cut anywhere.
        batch = dataclasses.replace(batch, kl_coef=jnp.broadcast_to(state.kl_coef, batch.tokens.shape[:1]))
        trained, frozen = split(state.params, trainable)
        _check_state(state, optimizer, trained)
        gradient = jax.grad(lambda trained, part: objective(trained, frozen, part), has_aux=True)
        grads, (loss, metrics) = accumulate(gradient, trained, batch, num_microbatches)
        scale = jnp.where(loss.weight == 0, 0.0, 1.0 / jnp.where(loss.weight == 0, 1.0, loss.weight))
        grads = jax.tree.map(lambda g: g * scale, grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss.total) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        metrics = metrics | {
            "loss": loss,
            "grad_norm": Weighted(grad_norm, jnp.float32(1)),
            "update_norm": Weighted(optax.tree.norm(updates), jnp.float32(1)),
            "nonfinite": Weighted(jnp.where(finite, 0.0, 1.0), jnp.float32(1)),
        }
        new = state.step + 1, optax.apply_updates(trained, updates), opt_state
        old = state.step, trained, state.opt_state
        step, trained, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return dataclasses.replace(state, step=step, params=join(trained, frozen), opt_state=opt_state), metrics

    return update


def make_passes(update: Callable, *, epochs: int = 1, minibatches: int = 1) -> Callable:
    """Builds the pure function (state, batch, key) -> (state, metrics) of several passes over one batch.

    It makes epochs · minibatches updates in one scan; `training.start.minibatches` cuts the same ones on the host.

    Args:
      update: (state, batch) -> (state, metrics), e.g. of `make_update`.
      epochs: passes over the batch.
      minibatches: updates a pass; rows are shuffled anew for each pass. Must divide the rows.

    Returns:
      A function to jit. Its metrics are added up over the updates.

    Raises:
      ValueError: if `epochs` or `minibatches` is below 1; when traced, if `minibatches` does not divide the rows.
    """
    checks.at_least("epochs", epochs, 1)
    checks.at_least("minibatches", minibatches, 1)

    def passes(state: TrainState, batch: Batch, key: Array) -> tuple[TrainState, Metrics]:
        rows = batch.tokens.shape[0]
        if rows % minibatches:
            raise ValueError(f"minibatches={minibatches} does not divide the {rows} rows of a batch: choose a divisor")

        def body(state, i):
            order_key = jax.random.fold_in(key, i // minibatches)
            part = batch if minibatches == 1 else take_rows(batch, order_key, i % minibatches, count=minibatches)
            return update(state, part)

        state, metrics = jax.lax.scan(body, state, jnp.arange(epochs * minibatches))
        return state, jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics)

    return passes


def take_rows(batch: Batch, key: Array, index: Array, *, count: int) -> Batch:
    """Takes minibatch `index` of `count` from the rows shuffled by `key`."""
    order = jax.random.permutation(key, batch.tokens.shape[0])
    size = batch.tokens.shape[0] // count
    chosen = jax.lax.dynamic_slice(order, (index * size,), (size,))
    return jax.tree.map(lambda x: jnp.take(x, chosen, axis=0), batch)


def _check_state(state: TrainState, optimizer: optax.GradientTransformation, trained) -> None:
    expected = jax.eval_shape(optimizer.init, trained)
    if jax.tree.structure(expected) != jax.tree.structure(state.opt_state):
        raise ValueError(
            "state.opt_state is of another optimizer or of other trainable parameters: give train_state.init and "
            "make_update the same optimizer and trainable"
        )


def kl_to_old(log_probs: Array, batch: Batch) -> Weighted:
    """Estimates the mean KL(π_old ‖ π) of a token from the samples of π_old (k3, nats)."""
    return aggregate.token_mean(kl.k3(checks.require(batch, "log_probs"), log_probs), batch.action_mask)


def make_kl_adaptation(
    policy: Policy,
    controller: Callable[[Array, Array], Array],
    *,
    measure: Callable[[Array, Batch], Weighted] = kl_to_old,
    num_microbatches: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the function that moves the state's KL coefficient once the updates of a rollout are done.

        β ← controller(β, KL)

    It measures the policy as it is after the updates, which the updates' own metrics never see. Both controllers of
    `kl` multiply, so that β = 0 stays 0: start from `train_state.init(..., kl_coef=algorithm.kl_coef)` above 0. Within
    jit that cannot be checked.

    Args:
      policy: as given to `algorithms.make_loss_fn`.
      controller: (coef, kl) -> coef, e.g. `partial(kl.double_or_halve, low=..., high=...)` (Schulman 2017, section 4)
        or `partial(kl.proportional, target=..., horizon=..., batch=...)` (Ziegler 2019).
      measure: (log_probs [B, T] of the policy now, batch) -> mean KL as Weighted. A measure that does not read its
        first argument costs no forward pass.
      num_microbatches: as of `make_update`.

    Returns:
      A function to jit, donating its state. Its metrics are `kl_measured` and `kl_coef`, the new one.
    """

    def measured(params, batch: Batch) -> Weighted:
        log_probs = jnp.where(batch.action_mask, Outputs(*policy(params, batch)).log_probs, 0.0)
        return measure(log_probs, clear(batch))

    def adapt(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        measurement = accumulate(measured, state.params, batch, num_microbatches)
        coef = controller(state.kl_coef, measurement.mean)
        coef = jnp.where(jnp.isfinite(measurement.mean), coef, state.kl_coef)
        metrics = {"kl_measured": measurement, "kl_coef": Weighted(coef, jnp.float32(1))}
        return dataclasses.replace(state, kl_coef=coef), metrics

    return adapt


def accumulate(function: Callable, params, batch, num_microbatches: int):
    """Adds up function(params, micro-batch), a pytree of sums such as a gradient, over micro-batches with a scan.

    Args:
      function: (params, micro-batch) -> pytree of arrays.
      params: pytree.
      batch: pytree of arrays [B, ...], cut by rows.
      num_microbatches: must divide B.

    Raises:
      ValueError: if `num_microbatches` does not divide B.
    """
    if num_microbatches == 1:
        return function(params, batch)
    parts = jax.tree.map(lambda x: _split_rows(x, num_microbatches), batch)
    first = jax.eval_shape(function, params, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)

    def body(total, part):
        part = jax.tree.map(constrain_rows, part)
        return jax.tree.map(operator.add, total, function(params, part)), None

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
