"""TRPO: the natural-gradient step of a given length in KL, found without ever forming the Fisher matrix.

    maximise  L(θ) = mean ratio·A   subject to   mean KL(π_old ‖ π_θ) <= δ

`make_update` reads from top to bottom like the paper: the gradient g of L, the direction s ≈ F⁻¹·g by
`conjugate_gradient` on `fisher_vector_product`s, the longest step that the quadratic model of the KL allows, and
`line_search`, which keeps only a step that improves L inside the true constraint.
Source: Schulman et al. 2015 (TRPO), section 6 and appendix C.

Metrics of the update:
  loss: −L before the step. surrogate_gain, kl: after it, both 0 where params did not change. accepted: 1 or 0.
  nonfinite: 1 where the loss or its gradient had a NaN or infinity; the batch was skipped, and loss, grad_norm
    and log_prob_gap, which are unknown then, are 0.
  log_prob_gap: mean |log π − log π_sampler| of the actions before the step, the mismatch of sampler and trainer.
  backtracks: times that the step was shortened. step_norm: length of the change of params. grad_norm: of ∇L.
  cg_iterations: Fisher-vector products. cg_residual: ‖g − (F + damping·I)·s‖/‖g‖.
  passes_forward, passes_backward: what the step cost, in passes of the whole batch through the model. The gradient is
    one of each; π_old's logits and each trial of the line search are one forward; each Fisher-vector product is two
    of each, its own and those of its derivative.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.algorithms.algorithm import log_prob_gap
from jaxpg.estimators import aggregate as aggregate_lib
from jaxpg.estimators import checks, kl, logprobs, losses, masked
from jaxpg.training import vectors
from jaxpg.training.train_state import Trainable, TrainState, join, split
from jaxpg.training.update import Metrics, accumulate
from jaxpg.types import Array, Batch, Weighted

LogitsFn = Callable[[dict, Batch], Array]  # (params, batch) -> [B, T, V], as the model returns them


class Solution(NamedTuple):
    """The result of `conjugate_gradient`."""

    x: dict  # pytree like b
    residual: dict  # pytree b − A·x, by the recursion
    iterations: Array  # [] int32, products A·v it took


class Step(NamedTuple):
    """The result of `line_search`. Where nothing was accepted, the old params, and 0 for fraction, gain and KL."""

    params: dict
    accepted: Array  # [] bool
    fraction: Array  # [] float32, of the full step
    gain: Array  # [] float32
    kl: Array  # [] float32
    trials: Array  # [] int32, points that were evaluated


def make_update(
    logits_fn: LogitsFn,
    *,
    max_kl: float = 0.01,
    cg_iterations: int = 10,
    cg_tolerance: float = 1e-5,
    damping: float = 1e-3,
    backtrack: float = 0.5,
    max_backtracks: int = 10,
    temperature: float = 1.0,
    aggregate: Callable[[Array, Array], Weighted] = aggregate_lib.token_mean,
    num_microbatches: int = 1,
    trainable: Trainable | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the pure function (state, batch) -> (state, metrics) of TRPO, to be jitted; `opt_state` passes through.

        s ≈ (F + damping·I)⁻¹·g,   θ' = θ + backtrack^j·√(2δ / sᵀ(F + damping·I)s)·s

    with the first j that keeps the mean KL within δ and improves L; with none, θ' = θ. Source: see the module.

    Args:
      logits_fn: (params, batch) -> [B, T, V]; differentiated twice, forward over reverse.
      max_kl: δ, nats: bounds the mean over action tokens of KL(π_old ‖ π), where π_old is the state's policy.
      cg_iterations: most Fisher-vector products; that many pytrees like params are held.
      cg_tolerance: conjugate gradient stops once ‖residual‖ <= cg_tolerance·‖g‖.
      damping: added to the eigenvalues of F, a mean over tokens. A softmax's F is singular: this keeps flat directions
        from taking the step, whose length is at most √(2δ/damping).
      backtrack: shortens a step that was refused, `max_backtracks` times at most.
      max_backtracks: trials after the first.
      temperature: that of the sampler.
      aggregate: weighs the tokens in L, linear in its first argument as all of `jaxpg.estimators.aggregate` are.
      num_microbatches: parts that rows are cut into, to save memory; π_old's logits [B, T, V] are held whole.
      trainable: which parameters are trained, by their path, as of `update.make_update`; default all. The step is
        natural in these alone, and all vectors are as long as they are.

    Raises:
      ValueError: for a keyword out of its range; when traced, if nothing is trainable, or for a batch without log_probs
        or advantages.
    """
    _check_numbers(False, max_kl=max_kl, temperature=temperature)
    _check_numbers(True, cg_tolerance=cg_tolerance, damping=damping)
    _check_counts(1, cg_iterations=cg_iterations, num_microbatches=num_microbatches)
    _check_counts(0, max_backtracks=max_backtracks)
    if checks.is_number(backtrack) and not 0 < backtrack < 1:
        raise ValueError(f"backtrack={backtrack}: must lie between 0 and 1, both excluded; 0.5 halves the step")
    search = partial(line_search, max_kl=max_kl, backtrack=backtrack, max_backtracks=max_backtracks)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        for name in ("log_probs", "advantages"):
            if getattr(batch, name) is None:
                raise ValueError(f"batch.{name} is None: TRPO needs it, give [B, T] float32")
        trained, frozen = split(state.params, trainable)

        def logits_of(trained, batch: Batch) -> Array:
            return logits_fn(join(trained, frozen), batch)

        whole = _whole_batch(logits_of, temperature, aggregate, damping, num_microbatches)
        gradient, loss, gap = whole.gradient(trained, batch)
        unit, gradient_norm, finite = _rescale(gradient, loss)
        old = batch, whole.logits(trained, batch)
        matvec = partial(whole.fisher, old, trained)
        solution = conjugate_gradient(matvec, unit, iterations=cg_iterations, tolerance=cg_tolerance)
        full_step = _full_step(solution, unit, max_kl)
        step = search(partial(whole.compare, old), trained, full_step)
        metrics = _metrics(loss, gap, gradient_norm, finite, solution, unit, full_step, step)
        return dataclasses.replace(state, step=state.step + 1, params=join(step.params, frozen)), metrics

    return update


def token_kl(old_logits, logits, *, temperature: float = 1.0) -> Array:
    """Computes KL(π_old ‖ π) of the distribution that each token is drawn from, as `logprobs` aligns it.

        y_t = Σ_v p(v)·log(p(v)/q(v)),   p, q = softmax(old_logits_{t−1}/τ), softmax(logits_{t−1}/τ),   y_0 = 0

    Args:
      old_logits: [..., T, V] any float dtype, as the model returns them; normally data.
      logits: [..., T, V]; carries gradient.
      temperature: τ, that of the sampler.

    Returns:
      [..., T] float32, nats, not negative up to rounding.

    Raises:
      ValueError: if shapes differ or `temperature` is not positive.
    """
    checks.positive("temperature", temperature)
    checks.same_shape(old_logits=old_logits, logits=logits)
    p, q = (checks.as_float(jnp.asarray(x)[..., :-1, :]) / temperature for x in (old_logits, logits))
    divergence = kl.exact(p, q)
    return jnp.concatenate([jnp.zeros_like(divergence, shape=(*divergence.shape[:-1], 1)), divergence], axis=-1)


def fisher_vector_product(kl_fn: Callable, params, vector):
    """Multiplies a vector by the Fisher matrix, the Hessian of the KL where it is 0, which is never formed.

        F·v = d/dε ∇KL(π_old ‖ π_{θ + ε·v}) at ε = 0

    A forward-mode derivative of a reverse-mode one: two forward and two backward passes.
    Source: Schulman et al. 2015 (TRPO), appendix C.1; Pearlmutter 1994.

    Args:
      kl_fn: params -> KL(π_old ‖ π), a scalar, π_old fixed and equal to π at `params`.
      params: pytree.
      vector: pytree like `params`.

    Returns:
      F·v, pytree like `params`.
    """
    return jax.jvp(jax.grad(kl_fn), (params,), (vector,))[1]


def conjugate_gradient(matvec: Callable, b, *, iterations: int = 10, tolerance: float = 0.0) -> Solution:
    """Solves A·x = b for a symmetric positive definite A that is known by its products A·v alone.

    Stops after `iterations` products, once ‖b − A·x‖ <= tolerance·‖b‖, or at a direction along which A is not
    positive, where it keeps what it has. b = 0 and a b with a NaN give x = 0 without any product.
    Residuals are orthogonal in exact arithmetic, and are kept so: else ten iterations in float32 turned the rounding of
    A·v into half a percent of x. It holds `iterations` vectors in memory. Source: Hestenes & Stiefel 1952.

    Args:
      matvec: v -> A·v, pytrees like `b`.
      b: pytree of float arrays.
      iterations: most products.
      tolerance: relative size of the residual to stop at.

    Returns:
      Solution(x, residual, iterations).

    Raises:
      ValueError: if `iterations` is below 1 or `tolerance` is negative.
    """
    _check_counts(1, iterations=iterations)
    _check_numbers(True, tolerance=tolerance)
    squared = vectors.dot(b, b)
    enough = tolerance**2 * squared

    def going(carry):
        *_, squared, count = carry
        return (count < iterations) & (squared > enough)  # False for a NaN

    def body(carry):
        x, residual, direction, past, squared, count = carry
        product = matvec(direction)
        curvature = vectors.dot(direction, product)
        usable = (curvature > 0) & jnp.isfinite(curvature)
        length = jnp.where(usable, squared / jnp.where(usable, curvature, 1.0), 0.0)
        x = vectors.add_scaled(x, length, direction)
        past = jax.tree.map(lambda q, r: q.at[count].set((r / jnp.sqrt(squared)).astype(q.dtype)), past, residual)
        smaller = vectors.orthogonal(vectors.add_scaled(residual, -length, product), past)
        residual = jax.tree.map(lambda new, old: jnp.where(usable, new, old), smaller, residual)
        after = jnp.where(usable, vectors.dot(residual, residual), 0.0)  # 0 ends the loop
        return x, residual, vectors.add_scaled(residual, after / squared, direction), past, after, count + 1

    zeros = jax.tree.map(jnp.zeros_like, b)
    past = jax.tree.map(lambda x: jnp.zeros((iterations, *x.shape), x.dtype), b)
    x, residual, *_, count = jax.lax.while_loop(going, body, (zeros, b, b, past, squared, jnp.int32(0)))
    return Solution(x, residual, count)


def line_search(compare: Callable, params, full_step, *, max_kl, backtrack: float, max_backtracks: int) -> Step:
    """Finds the longest of the steps backtrack^j·full_step that improves the objective inside the trust region.

        j = min { 0 <= j <= max_backtracks : gain > 0 and KL <= max_kl }

    A step of length 0, or with a NaN or infinity, is not tried at all. Source: Schulman et al. 2015 (TRPO), appendix C.

    Args:
      compare: params -> (gain, KL), scalars: what is gained over `params`, and the distance from them.
      params: pytree to start from.
      full_step: pytree like `params`.
      max_kl: bound on the KL.
      backtrack: factor between one trial and the next.
      max_backtracks: trials after the first.

    Returns:
      Step; its params are exactly `params` where no step was accepted.
    """
    possible = (vectors.norm(full_step) > 0) & jnp.isfinite(vectors.norm(full_step))

    def at(trial):
        fraction = jnp.float32(backtrack) ** trial
        return vectors.add_scaled(params, fraction, full_step), fraction

    def going(carry):
        accepted, trials, *_ = carry
        return possible & ~accepted & (trials <= max_backtracks)

    def body(carry):
        _, trials, *_ = carry
        gain, divergence = compare(at(trials)[0])
        accepted = (gain > 0) & jnp.isfinite(gain) & (divergence <= max_kl)  # False for a NaN
        return accepted, trials + 1, gain.astype(jnp.float32), divergence.astype(jnp.float32)

    start = (jnp.bool_(False), jnp.int32(0), jnp.float32(0), jnp.float32(0))
    accepted, trials, gain, divergence = jax.lax.while_loop(going, body, start)
    moved, fraction = at(jnp.maximum(trials - 1, 0))
    params = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), moved, params)
    fraction, gain, divergence = (jnp.where(accepted, x, 0.0) for x in (fraction, gain, divergence))
    return Step(params, accepted, fraction, gain, divergence, trials)


class _WholeBatch(NamedTuple):
    """Sums over micro-batches, divided once. Each line says how many passes through the model it costs."""

    gradient: Callable  # (params, batch) -> ∇L, Weighted −L, log_prob_gap              1 forward, 1 backward
    logits: Callable  # (params, batch) -> [B, T, V]                                    1 forward
    fisher: Callable  # ((batch, old_logits), params, v) -> (F + damping·I)·v           2 forward, 2 backward
    compare: Callable  # ((batch, old_logits), params) -> gain of L, mean KL            1 forward


def _whole_batch(logits_fn: LogitsFn, temperature, aggregate: Callable, damping, num_microbatches: int) -> _WholeBatch:
    """Writes the objective and the constraint for a part of the batch, and their sums for the whole."""
    add_up = partial(accumulate, num_microbatches=num_microbatches)
    logits_of = partial(_action_logits, logits_fn)

    def surrogate(logits, batch):
        log_probs = logprobs.token_log_probs(logits, batch.tokens, temperature=temperature)
        return losses.surrogate(log_probs, batch.log_probs, batch.advantages)[0], log_probs

    def loss_part(params, batch):
        values, log_probs = surrogate(logits_of(params, batch), batch)
        loss = aggregate(values, batch.action_mask)
        gap = log_prob_gap(jax.lax.stop_gradient(log_probs), batch)
        return loss.total, (loss, aggregate_lib.token_mean(gap, batch.action_mask))

    def kl_part(params, batch, old_logits):
        divergence = token_kl(old_logits, logits_of(params, batch), temperature=temperature)
        return aggregate_lib.token_mean(divergence, batch.action_mask).total

    def compare_part(params, old):
        batch, old_logits = old
        logits = logits_of(params, batch)
        # Subtracted token by token: the gain of a short step would drown in the rounding of two large sums.
        loss = aggregate(surrogate(logits, batch)[0] - surrogate(old_logits, batch)[0], batch.action_mask)
        divergence = token_kl(old_logits, logits, temperature=temperature)
        return loss, aggregate_lib.token_mean(divergence, batch.action_mask)

    def gradient(params, batch):
        total, (loss, gap) = add_up(jax.grad(loss_part, has_aux=True), params, batch)
        return jax.tree.map(lambda g: masked.safe_divide(-g, loss.weight).astype(g.dtype), total), loss, gap

    def fisher(old, params, vector):
        def product(v, part):
            return fisher_vector_product(lambda p: kl_part(p, *part), params, v)

        total, actions = add_up(product, vector, old), masked.count(old[0].action_mask)
        return vectors.add_scaled(jax.tree.map(lambda x: masked.safe_divide(x, actions), total), damping, vector)

    def compare(old, params):
        loss, divergence = add_up(compare_part, params, old)
        return -loss.mean, divergence.mean

    return _WholeBatch(gradient, partial(_by_parts, logits_of, num_microbatches), fisher, compare)


def _action_logits(logits_fn: LogitsFn, params, batch: Batch) -> Array:
    """The logits that actions were drawn from, in the model's alignment, and 0 elsewhere, whatever stood there.

    It stops the gradient of every NaN off the actions, be it the model's or under the mask in log_probs, advantages.
    """
    logits = logits_fn(params, batch)
    checks.shape("logits_fn's result", logits, (*batch.tokens.shape, *jnp.shape(logits)[-1:]), "[B, T, V]")
    predicts = jnp.pad(batch.action_mask[:, 1:], ((0, 0), (0, 1)))
    return jnp.where(predicts[..., None], logits, jnp.zeros((), logits.dtype))


def _by_parts(function: Callable, parts: int, params, batch: Batch) -> Array:
    """Computes an array with a leading row axis part by part; the rows come back in their order."""
    if parts == 1:
        return function(params, batch)
    # Rows are dealt out in turn, as `accumulate` does, so that every device has a share of each part.
    dealt = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
    stacked = jax.lax.map(partial(function, params), dealt)
    return stacked.swapaxes(0, 1).reshape(-1, *stacked.shape[2:])


def _rescale(gradient, loss: Weighted):
    """Scales the gradient to a largest entry of 1, which leaves the step as it is and keeps squares within float32.

    Returns it, its norm before, and whether it and the loss were finite; where not, both are 0.
    """
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(checks.as_float(g)), initial=0.0) for g in jax.tree.leaves(gradient)]))
    finite = jnp.isfinite(largest) & jnp.isfinite(loss.total)
    divisor = jnp.where(finite & (largest > 0), largest, 1.0)
    unit = jax.tree.map(lambda g: jnp.where(finite, g / divisor, 0.0).astype(g.dtype), gradient)
    return unit, divisor * vectors.norm(unit), finite


def _full_step(solution: Solution, gradient, max_kl):
    """√(2δ / sᵀAs)·s with A = F + damping·I: by A's quadratic model of the KL, its length is δ.

    With F alone, a flat direction could make the step infinitely long; OpenAI Baselines' `trpo_mpi` damps here too.
    """
    # A·s = g − residual, without a further product.
    curvature = vectors.dot(solution.x, gradient) - vectors.dot(solution.x, solution.residual)
    scale = jnp.where(curvature > 0, jnp.sqrt(2.0 * max_kl / jnp.where(curvature > 0, curvature, 1.0)), 0.0)
    return jax.tree.map(lambda s: (scale * s).astype(s.dtype), solution.x)


def _metrics(loss, gap, gradient_norm, finite, solution: Solution, gradient, full_step, step: Step) -> Metrics:
    """Says what the step did and what it cost; the module's docstring explains each."""
    products = solution.iterations
    values = {
        "surrogate_gain": step.gain,
        "kl": step.kl,
        "accepted": step.accepted,
        "backtracks": jnp.maximum(step.trials - 1, 0),
        "nonfinite": ~finite,
        "cg_residual": masked.safe_divide(vectors.norm(solution.residual), vectors.norm(gradient)),
        "cg_iterations": products,
        "step_norm": jnp.where(step.accepted, step.fraction * vectors.norm(full_step), 0.0),
        "grad_norm": gradient_norm,
        "passes_forward": 2 + 2 * products + step.trials,
        "passes_backward": 1 + 2 * products,
    }
    metrics = {name: Weighted(value.astype(jnp.float32), jnp.float32(1)) for name, value in values.items()}
    means = {"loss": loss, "log_prob_gap": gap}
    return metrics | {
        name: Weighted(jnp.where(finite, x.total, 0.0).astype(jnp.float32), x.weight) for name, x in means.items()
    }


def _check_numbers(zero_is_fine: bool, **numbers) -> None:
    rule = "not negative; 0 for none" if zero_is_fine else "greater than 0"
    for name, value in numbers.items():
        if checks.is_number(value) and not (0 < value < math.inf or (zero_is_fine and value == 0)):
            raise ValueError(f"{name}={value}: must be finite and {rule}")


def _check_counts(low: int, **numbers) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < low:
            raise ValueError(f"{name}={value}: must be a whole number, at least {low}")
