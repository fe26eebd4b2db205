"""Exact bias and variance of policy-gradient estimators, on token MDPs small enough to enumerate.

With 3 tokens and a horizon of 3 a prompt has at most 27 completions, so every expectation is a finite sum: the true
J(θ) and ∇J(θ), and for any estimator g built from this library the exact E[g] and Var[g] over all groups of G
completions. What runs here is the code that trains: `algorithms.to_batch` and `algorithms.make_loss_fn`.

`moments`, `success` and `true_values` compute in float64, whatever JAX is set to. `objective` and `log_probs`, which
are there to be differentiated, compute in the types they are given: wrap them in `jax.enable_x64(True)` for a proof.

    mdp = exact.TokenMDP(rewards=lambda prompt, completion: float(sum(completion) == 3))
    table = jax.random.normal(jax.random.key(0), mdp.table_shape)
    exact.moments(mdp, table, algorithms.rloo(), 4).bias        # 0 to rounding
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxpg.algorithms.algorithm import Algorithm, Outputs, Policy, make_loss_fn, to_batch
from jaxpg.estimators import logprobs
from jaxpg.types import Array, Batch, Experience, Rollout, StopReason

Estimator = Callable[[object, Experience], object]  # (params, experience) -> ascent direction, a pytree like params
LIMIT = 5_000_000  # groups that are enumerated without asking


@dataclasses.dataclass(frozen=True)
class TokenMDP:
    """A language model's decision process in miniature. Prompts are equally likely; transitions append the token.

    Token ids are 0 … vocab_size − 1; prompt p is written as the one token vocab_size + p.
    """

    rewards: Callable[[int, tuple[int, ...]], float | Sequence[float]]  # (prompt, completion): outcome, or one a token
    vocab_size: int = 3
    horizon: int = 3  # tokens a completion may have
    num_prompts: int = 1
    stop_token: int | None = None  # ends a completion; part of it
    policy: Policy | None = None  # (params, batch) -> log_probs, entropy; None for a table of logits

    def __post_init__(self):
        for name in ("vocab_size", "horizon", "num_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.stop_token is not None and not 0 <= self.stop_token < self.vocab_size:
            raise ValueError(f"stop_token={self.stop_token}: must be None or one of the {self.vocab_size} tokens")
        if self.vocab_size**self.horizon > 10_000:
            raise ValueError(
                f"vocab_size={self.vocab_size}, horizon={self.horizon}: more than 10,000 completions, choose less"
            )
        if self.policy is None:
            object.__setattr__(self, "policy", self.tabular)

    @property
    def table_shape(self) -> tuple[int, int, int]:
        """Shape of a tabular policy's parameters: prompt, prefix, logit of the next token."""
        return self.num_prompts, sum(self.vocab_size**t for t in range(self.horizon)), self.vocab_size

    def tabular(self, table: Array, batch: Batch) -> Outputs:
        """The policy with a logit of its own for each prompt, prefix and next token: softmax(table)."""
        prompt = batch.tokens[:, 0] - self.vocab_size
        prefix = jnp.zeros_like(prompt)  # prefixes are numbered like a heap: the root is 0
        prefixes = [prefix]
        for t in range(1, batch.tokens.shape[1]):
            prefix = prefix * self.vocab_size + 1 + batch.tokens[:, t]
            prefixes.append(jnp.clip(prefix, 0, self.table_shape[1] - 1))  # of the last token, nothing follows
        logits = table[prompt[:, None], jnp.stack(prefixes, axis=1)]
        return Outputs(logprobs.token_log_probs(logits, batch.tokens), logprobs.entropy(logits))


class Trajectories(NamedTuple):
    """All P·N prompts with completion, as rows of T = 1 + horizon tokens; the rows of one prompt are adjacent."""

    batch: Batch
    outcome: np.ndarray  # [P·N]
    token_rewards: np.ndarray | None  # [P·N, T]


@dataclasses.dataclass(frozen=True)
class Moments:
    """What an estimator does to D parameters, flattened in the order of `jax.flatten_util.ravel_pytree`."""

    gradient: np.ndarray  # [D] ∇J, the truth
    mean: np.ndarray  # [D] E[g]
    variance: np.ndarray  # [D] Var[g], of each coordinate

    @property
    def bias(self) -> np.ndarray:
        """E[g] − ∇J."""
        return self.mean - self.gradient

    @property
    def scale(self) -> float:
        """⟨E[g], ∇J⟩ / |∇J|²: 1 if unbiased, (G−1)/G for a group's mean as baseline, any number with a normaliser."""
        return float(self.mean @ self.gradient / (self.gradient @ self.gradient))

    @property
    def direction_error(self) -> float:
        """Sine of the angle between E[g] and ∇J: the bias that no learning rate can undo."""
        across = self.mean - self.scale * self.gradient
        return float(np.linalg.norm(across) / max(np.linalg.norm(self.mean), np.finfo(float).tiny))

    @property
    def total_variance(self) -> float:
        """Σ_d Var[g_d] = E|g − E[g]|²."""
        return float(self.variance.sum())

    @property
    def signal_to_noise(self) -> float:
        """|E[g]|² / E|g − E[g]|². Free of the estimator's scale."""
        return float(self.mean @ self.mean / max(self.total_variance, np.finfo(float).tiny))


def trajectories(mdp: TokenMDP) -> Trajectories:
    """Lists every completion of every prompt, whatever its probability."""
    completions = [
        tokens
        for length in range(1, mdp.horizon + 1)
        for tokens in itertools.product(range(mdp.vocab_size), repeat=length)
        if mdp.stop_token not in tokens[:-1] and (length == mdp.horizon or tokens[-1] == mdp.stop_token)
    ]
    rows = [(prompt, completion) for prompt in range(mdp.num_prompts) for completion in completions]
    length = 1 + mdp.horizon
    tokens = np.zeros((len(rows), length), np.int32)
    action_mask = np.zeros((len(rows), length), bool)
    outcome, token_rewards, dense = np.zeros(len(rows)), np.zeros((len(rows), length)), False
    for i, (prompt, completion) in enumerate(rows):
        tokens[i, 0] = mdp.vocab_size + prompt
        tokens[i, 1 : 1 + len(completion)] = completion
        action_mask[i, 1 : 1 + len(completion)] = True
        reward = np.asarray(mdp.rewards(prompt, completion), float)
        if reward.ndim == 0:
            outcome[i] = reward
        else:
            token_rewards[i, 1 : 1 + len(completion)], dense = reward, True
    token_mask = action_mask | (np.arange(length) == 0)
    return Trajectories(Batch(tokens, token_mask, action_mask), outcome, token_rewards if dense else None)


def log_probs(mdp: TokenMDP, params, listed: Trajectories) -> Array:
    """Log-prob of each action of each trajectory [P·N, T], 0 elsewhere."""
    outputs = Outputs(*mdp.policy(params, listed.batch))
    return jnp.where(listed.batch.action_mask, outputs.log_probs, 0.0)


def objective(mdp: TokenMDP, params) -> Array:
    """The true J(θ) = 1/P Σ_prompts Σ_τ π_θ(τ)·R(τ), differentiable. []."""
    listed = trajectories(mdp)
    probabilities = jnp.exp(log_probs(mdp, params, listed).sum(axis=-1))
    return jnp.sum(probabilities * _returns(listed).sum(axis=-1)) / mdp.num_prompts


def success(mdp: TokenMDP, params) -> np.ndarray:
    """Expected return of each prompt [P]: its probability of being solved, where rewards are 0 and 1."""
    with jax.enable_x64(True):
        listed = trajectories(mdp)
        weights = np.exp(np.asarray(log_probs(mdp, _double(params), listed), float).sum(axis=-1))
    return (weights * _returns(listed).sum(axis=-1)).reshape(mdp.num_prompts, -1).sum(axis=-1)


def true_values(mdp: TokenMDP, params) -> np.ndarray:
    """The true V before each action, E[rewards still to come | prompt, prefix], of every trajectory. [P·N, T]."""
    with jax.enable_x64(True):
        listed = trajectories(mdp)
        weights = np.exp(np.asarray(log_probs(mdp, _double(params), listed), float).sum(axis=-1))
    to_go = np.cumsum(_returns(listed)[:, ::-1], axis=-1)[:, ::-1]
    values = np.zeros_like(to_go)
    tokens, active = listed.batch.tokens, listed.batch.action_mask
    for t in range(1, tokens.shape[1]):
        _, prefix = np.unique(tokens[:, :t], axis=0, return_inverse=True)
        prefix, weight = prefix.reshape(-1), np.where(active[:, t], weights, 0.0)
        total = np.bincount(prefix, weight * to_go[:, t])
        values[:, t] = (total / np.maximum(np.bincount(prefix, weight), np.finfo(float).tiny))[prefix]
    return np.where(active, values, 0.0)


def moments(
    mdp: TokenMDP,
    params,
    estimator: Algorithm | Estimator,
    group_size: int,
    *,
    sampling_params=None,
    trainer_params=None,
    ref_params=None,
    values: np.ndarray | None = None,
    kl_coef: float | None = None,
    limit: int = LIMIT,
) -> Moments:
    """Computes the exact mean and variance of a gradient estimate, over all draws of G completions of each prompt.

    A critic's loss is no part of the estimate: ∇J is of the policy alone.

        E[g] = Σ_{groups} P(group)·g(group),   group ∈ multisets of G trajectories, one for each prompt

    Groups are enumerated as multisets, weighed by their permutations: an estimator must not care for the order of
    samples.

    Args:
      mdp: the decision process and its policy.
      params: θ, at which the gradient is taken. Cast to float64.
      estimator: an `Algorithm`, or any (params, experience) -> ascent direction.
      group_size: G, samples of each prompt.
      sampling_params: parameters of the policy that samples (π_old); θ by default, which is on policy.
      trainer_params: π_old as the trainer computes it, where it differs from the sampler; None for no difference.
      ref_params: of the reference policy.
      values: [P·N, T] the critic's V on `trajectories(mdp)`, e.g. `true_values(mdp, params)` plus an error.
      kl_coef: β; default the algorithm's.
      limit: largest number of groups to enumerate.

    Returns:
      Moments, as numpy float64.

    Raises:
      ValueError: if there are more groups than `limit`, the policy's probabilities do not add up to 1, or `values`
        has another shape.
    """
    with jax.enable_x64(True):
        params = _double(params)
        sampling_params = params if sampling_params is None else _double(sampling_params)
        listed = trajectories(mdp)
        sampler = log_probs(mdp, sampling_params, listed)
        arrays = {"log_probs": sampler, "outcome": listed.outcome, "token_rewards": listed.token_rewards}
        for name, other in (("trainer_log_probs", trainer_params), ("ref_log_probs", ref_params)):
            arrays[name] = None if other is None else log_probs(mdp, _double(other), listed)
        arrays["values"] = _checked_values(values, listed)
        greedy = _greedy_returns(mdp, listed, sampler)
        groups, weights = _groups(mdp, _probabilities(mdp, sampler), group_size, limit)
        estimate = _as_estimator(estimator, mdp.policy)
        if kl_coef is None and isinstance(estimator, Algorithm):
            kl_coef = estimator.kl_coef

        def flat_gradient(rows: Array) -> Array:
            return ravel_pytree(estimate(params, _experience(listed, arrays, rows, greedy, kl_coef)))[0]

        mean, square = _expectation(flat_gradient, groups, weights)
        gradient = ravel_pytree(jax.grad(lambda p: objective(mdp, p))(params))[0]
    mean, square, gradient = (np.asarray(x, float) for x in (mean, square, gradient))
    return Moments(gradient=gradient, mean=mean, variance=np.maximum(square - mean**2, 0.0))


def _experience(listed: Trajectories, arrays: dict, rows: Array, greedy: Array, kl_coef: float | None) -> Experience:
    """Lays the trajectories `rows` [P, G] out as a sampler and a scorer would."""
    flat = rows.reshape(-1)
    picked = {name: None if x is None else jnp.asarray(x)[flat] for name, x in arrays.items()}
    batch = jax.tree.map(lambda x: jnp.asarray(x)[flat], listed.batch)
    return Experience(
        rollout=Rollout(
            tokens=batch.tokens,
            token_mask=batch.token_mask,
            action_mask=batch.action_mask,
            log_probs=picked["log_probs"],
            stop_reason=jnp.full(flat.shape, StopReason.BUDGET),
        ),
        rewards=picked["outcome"].reshape(rows.shape),
        valid=jnp.ones(rows.shape, bool),
        token_rewards=picked["token_rewards"],
        greedy_rewards=greedy,
        values=picked["values"],
        ref_log_probs=picked["ref_log_probs"],
        trainer_log_probs=picked["trainer_log_probs"],
        kl_coef=None if kl_coef is None else jnp.asarray(kl_coef, float),
    )


def _as_estimator(estimator: Algorithm | Estimator, policy: Policy) -> Estimator:
    """Turns an algorithm into the ascent direction of its first update after a rollout."""
    if not isinstance(estimator, Algorithm):
        return estimator
    actor = dataclasses.replace(estimator, critic=None)
    loss_fn = make_loss_fn(actor, policy)

    def estimate(params, experience: Experience):
        batch = to_batch(actor, experience)
        if experience.kl_coef is not None:
            batch = dataclasses.replace(batch, kl_coef=jnp.broadcast_to(experience.kl_coef, batch.tokens.shape[:1]))
        return jax.grad(lambda p: -loss_fn(p, batch)[0].mean)(params)

    return estimate


def check_groups(mdp: TokenMDP, group_size: int, *, limit: int = LIMIT) -> int:
    """Counts the multisets of `group_size` completions of a prompt.

    Raises:
      ValueError: if the groups of all prompts together are more than `limit`.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size}: must be at least 1")
    completions = len(trajectories(mdp).outcome) // mdp.num_prompts
    multisets = math.comb(completions + group_size - 1, group_size)
    if multisets**mdp.num_prompts > limit:
        raise ValueError(
            f"group_size={group_size}: {multisets:,} groups for each of {mdp.num_prompts} prompts are more than "
            f"limit={limit:,} together; choose a smaller group_size, horizon or num_prompts, or a greater limit"
        )
    return multisets


def _groups(mdp: TokenMDP, probabilities: np.ndarray, size: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers all draws: rows [K, P, G] of `trajectories` and their probabilities [K]."""
    count = probabilities.shape[1]
    multisets = check_groups(mdp, size, limit=limit)
    picks = np.array(list(itertools.combinations_with_replacement(range(count), size)))
    orders = np.array([_permutations(pick) for pick in picks])
    weights = orders * np.prod(probabilities[:, picks], axis=-1)  # [P, M]
    draws = np.array(list(itertools.product(range(multisets), repeat=mdp.num_prompts)))  # [K, P]
    prompts = np.arange(mdp.num_prompts)
    return picks[draws] + count * prompts[:, None], np.prod(weights[prompts, draws], axis=-1)


def _permutations(multiset: np.ndarray) -> int:
    """In how many orders a group can be drawn: G! / Π n_i!."""
    _, repeats = np.unique(multiset, return_counts=True)
    return math.factorial(len(multiset)) // math.prod(math.factorial(n) for n in repeats)


def _expectation(gradient: Callable[[Array], Array], groups: np.ndarray, weights: np.ndarray, chunk: int = 1024):
    """Σ w·g and Σ w·g² over all groups, a chunk at a time."""
    padding = -len(groups) % min(chunk, len(groups))
    groups = np.concatenate([groups, np.repeat(groups[:1], padding, axis=0)])
    weights = np.concatenate([weights, np.zeros(padding)])
    chunks = min(chunk, len(groups))

    def body(total, part):
        rows, weight = part
        g = jax.vmap(gradient)(rows)
        return (total[0] + weight @ g, total[1] + weight @ jnp.square(g)), None

    parts = (groups.reshape(-1, chunks, *groups.shape[1:]), weights.reshape(-1, chunks))
    size = jax.eval_shape(gradient, groups[0]).shape
    return jax.jit(lambda parts: jax.lax.scan(body, (jnp.zeros(size), jnp.zeros(size)), parts)[0])(parts)


def _probabilities(mdp: TokenMDP, sampler: Array) -> np.ndarray:
    """Probability of each completion of each prompt [P, N]."""
    probabilities = np.exp(np.asarray(sampler, float).sum(axis=-1)).reshape(mdp.num_prompts, -1)
    totals = probabilities.sum(axis=-1, keepdims=True)
    if not np.allclose(totals, 1.0, atol=1e-4):
        raise ValueError(
            f"policy: the completions of a prompt have probabilities that add up to {totals[:, 0]}, not 1: "
            f"mask its logits to the {mdp.vocab_size} tokens of the MDP"
        )
    return probabilities / totals


def _greedy_returns(mdp: TokenMDP, listed: Trajectories, sampler: Array) -> np.ndarray:
    """Return of the greedy completion of each prompt [P]: the most likely token after each prefix."""
    sampler, tokens = np.asarray(sampler), listed.batch.tokens
    rows = np.arange(len(tokens)).reshape(mdp.num_prompts, -1)
    best = []
    for candidates in rows:
        for t in range(1, tokens.shape[1]):
            top = candidates[
                np.argmax(np.where(listed.batch.action_mask[candidates, t], sampler[candidates, t], -np.inf))
            ]
            candidates = candidates[tokens[candidates, t] == tokens[top, t]]
        best.append(candidates[0])
    return _returns(listed).sum(axis=-1)[np.array(best)]


def _returns(listed: Trajectories) -> np.ndarray:
    """All rewards as a sequence [P·N, T]; the outcome stands on the last action."""
    mask = listed.batch.action_mask
    last = mask & (np.cumsum(mask, axis=-1) == mask.sum(axis=-1, keepdims=True))
    placed = np.where(last, listed.outcome[:, None], 0.0)
    return placed if listed.token_rewards is None else placed + listed.token_rewards


def _checked_values(values, listed: Trajectories):
    shape = listed.batch.tokens.shape
    if values is not None and np.shape(values) != shape:
        raise ValueError(
            f"values has shape {np.shape(values)}: must be {shape}, one for each token of trajectories(mdp)"
        )
    return None if values is None else np.asarray(values, float)


def _double(params):
    return jax.tree.map(lambda x: jnp.asarray(x, float), params)
