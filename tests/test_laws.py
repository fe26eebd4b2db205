"""Laws that every function of the math modules obeys, over one table of all of them.

Arguments are made from parameter names: `[N, G, T]` arrays whose six rows are masked on the left, on the right, inside,
not at all, everywhere but one, and everywhere. A public function that is missing in the table fails a test.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import (
    advantages,
    aggregate,
    kl,
    logprobs,
    losses,
    masked,
    preference,
    ratios,
    returns,
    segments,
    value_losses,
)

MODULES = (
    masked, segments, returns, advantages, kl, ratios, losses, value_losses, preference, aggregate, logprobs
)  # fmt: skip
# Tested by their own module's tests alone: helpers that broadcast, and a loss on trees of parameters.
NOT_HERE = {
    "masked.safe_sqrt",
    "masked.safe_divide",
    "value_losses.proximal",
    "logprobs.from_hidden",  # takes a function; test_logprobs compares it with token_log_probs and entropy
    "logprobs.align",
}
MASK = np.array(
    [
        [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 1, 1]],
        [[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]],
    ],
    bool,
)
V = 5  # vocabulary
TOLERANCE = {"rtol": 2e-5, "atol": 1e-5}


class Case(NamedTuple):
    """A function with its options; `shared` if rows see each other, `row` names arguments with one value a row."""

    function: Callable
    options: dict = {}  # noqa: RUF012
    shared: bool = False
    row: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()  # keyword-only arguments that are arrays


def decoupled(rewards, valid, **options):
    """Two rewards a sample, made from one so that it fits the table."""
    both = jnp.stack([rewards, jnp.abs(rewards)], axis=-1)  # exact in every dtype
    return advantages.decoupled(both, jnp.stack([valid, valid], axis=-1), **options)


LAST = {"axis": -1}
TIME = {"discount": 0.9}
MIX = {"discount": 0.9, "lambda_": 0.7}
CASES = {
    "masked.fill": Case(masked.fill),
    "masked.sum": Case(masked.sum, LAST),
    "masked.count": Case(masked.count, LAST),
    "masked.mean": Case(masked.mean, LAST),
    "masked.center": Case(masked.center, LAST),
    "masked.var": Case(masked.var, LAST),
    "masked.std": Case(masked.std, LAST),
    "masked.whiten": Case(masked.whiten, LAST),
    "masked.whiten:batch": Case(masked.whiten, {"ddof": 1, "shift_mean": False}, shared=True),
    "segments.token": Case(segments.token),
    "segments.response": Case(segments.response),
    "segments.steps": Case(segments.steps, {"delimiter": (2,)}),
    "segments.total": Case(segments.total),
    "segments.mean": Case(segments.mean),
    "segments.first": Case(segments.first),
    "segments.last": Case(segments.last),
    "segments.place_outcome": Case(segments.place_outcome, row=("rewards",)),
    "segments.place_steps": Case(segments.place_steps),
    "returns.reward_to_go": Case(returns.reward_to_go, TIME),
    "returns.n_step": Case(returns.n_step, TIME | {"n": 2}, extra=("bootstrap",)),
    "returns.n_step:all": Case(returns.n_step, TIME | {"n": 9}, extra=("bootstrap",)),
    "returns.lambda_returns": Case(returns.lambda_returns, MIX, extra=("bootstrap",)),
    "returns.gae": Case(returns.gae, MIX, extra=("bootstrap",)),
    "returns.gae:ends": Case(returns.gae, MIX, extra=("bootstrap", "ends")),
    "returns.n_step:ends": Case(returns.n_step, TIME | {"n": 2}, extra=("bootstrap", "ends")),
    "returns.segment_gae": Case(returns.segment_gae, MIX, extra=("bootstrap",)),
    "advantages.group_centered": Case(advantages.group_centered),
    "advantages.group_normalized": Case(advantages.group_normalized),
    "advantages.group_normalized:sample": Case(advantages.group_normalized, {"ddof": 1, "epsilon": 1e-4}),
    "advantages.leave_one_out": Case(advantages.leave_one_out),
    "advantages.greedy_baseline": Case(advantages.greedy_baseline),
    "advantages.length_weighted_baseline": Case(advantages.length_weighted_baseline),
    "advantages.mean_normalized": Case(advantages.mean_normalized),
    "advantages.pass_at_k": Case(advantages.pass_at_k, {"k": 2}),
    "advantages.batch_normalized": Case(advantages.batch_normalized, shared=True),
    "advantages.group_centered_batch_normalized": Case(advantages.group_centered_batch_normalized, shared=True),
    "advantages.group_centered_batch_scaled": Case(advantages.group_centered_batch_scaled, shared=True),
    "advantages.decoupled": Case(decoupled, {"ddof": 0, "epsilon": 1e-6}, shared=True),
    "advantages.overlong_penalty": Case(advantages.overlong_penalty, {"limit": 8, "margin": 4}),
    "kl.k1": Case(kl.k1),
    "kl.k2": Case(kl.k2),
    "kl.k3": Case(kl.k3),
    "kl.k3:clamp": Case(kl.k3, {"clamp": (1.0, 0.5)}),
    "kl.exact": Case(kl.exact),
    "kl.double_or_halve": Case(kl.double_or_halve, {"low": 0.5, "high": 1.0}),
    "kl.proportional": Case(kl.proportional, {"target": 1.0, "horizon": 10, "batch": 2}),
    "ratios.log_ratio": Case(ratios.log_ratio),
    "ratios.bounded": Case(ratios.bounded),
    "ratios.token": Case(ratios.token),
    "ratios.segment_product": Case(ratios.segment_product),
    "ratios.segment_mean": Case(ratios.segment_mean),
    "ratios.truncated": Case(ratios.truncated, {"cap": 1.5}),
    "ratios.banded": Case(ratios.banded, {"low": 0.6, "high": 1.5}),
    "losses.reinforce": Case(losses.reinforce),
    "losses.surrogate": Case(losses.surrogate),
    "losses.ppo_clip": Case(losses.ppo_clip, {"clip_high": 0.28}),
    "losses.ppo_clip:dual": Case(losses.ppo_clip, {"dual_clip": 1.5}),
    "losses.gspo": Case(losses.gspo, {"clip_low": 0.1, "clip_high": 0.1}),
    "losses.gspo:steps": Case(losses.gspo, {"clip_low": 0.1, "clip_high": 0.1}, extra=("segments",)),
    "losses.gmpo": Case(losses.gmpo),
    "losses.cispo": Case(losses.cispo, {"clip_high": 0.3}),
    "losses.sapo": Case(losses.sapo),
    "losses.entropy_bonus": Case(losses.entropy_bonus, {"coef": 0.1}),
    "value_losses.squared": Case(value_losses.squared),
    "value_losses.clipped": Case(value_losses.clipped, {"clip": 0.2}),
    "preference.bradley_terry": Case(preference.bradley_terry),
    "preference.dpo": Case(preference.dpo, {"label_smoothing": 0.1}),
    "preference.ipo": Case(preference.ipo),
    "preference.sequence_log_probs": Case(preference.sequence_log_probs),
    "aggregate.token_mean": Case(aggregate.token_mean),
    "aggregate.sequence_mean_token_mean": Case(aggregate.sequence_mean_token_mean),
    "aggregate.sequence_mean_token_mean:empty": Case(aggregate.sequence_mean_token_mean, {"count_empty": True}),
    "aggregate.sequence_mean_token_sum": Case(aggregate.sequence_mean_token_sum),
    "aggregate.constant_length": Case(aggregate.constant_length, {"length": 4}),
    "logprobs.token_log_probs": Case(logprobs.token_log_probs, {"temperature": 0.7}),
    "logprobs.entropy": Case(logprobs.entropy, {"temperature": 0.7}),
}
BY_NAME = pytest.mark.parametrize("name", CASES)


def names_of(case: Case) -> list[str]:
    """Names of the arguments that are arrays."""
    kinds = inspect.signature(case.function).parameters.values()
    return [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD] + list(case.extra)


MASKED = [name for name, case in CASES.items() if {"mask", "valid"} & set(names_of(case))]
POINTWISE = [name for name in CASES if name not in MASKED and not name.startswith("logprobs")]


def arguments(case: Case, mask, seed: int = 0) -> dict[str, np.ndarray]:
    """Makes the arrays that a function's parameters ask for."""
    rng = np.random.default_rng(seed)
    shape, rows = mask.shape, mask.shape[:-1]

    def make(name):
        if name in ("mask", "valid"):
            return mask
        if name == "segments":
            return np.where(mask, (np.cumsum(mask, axis=-1) - 1) // 2, -1).astype(np.int32)
        if name == "tokens":
            return rng.integers(0, V, shape).astype(np.int32)
        if name == "ends":
            return rng.random(shape) < 0.4
        if name == "lengths":
            return rng.integers(1, 9, shape).astype(np.float32)
        sizes = {"logits": (*shape, V), "ref_logits": (*shape, V), "step_rewards": (*rows, 3)}
        sizes |= dict.fromkeys(("greedy_rewards", "bootstrap", *case.row), rows)
        if "ends" in case.extra:  # then there is one after each action
            del sizes["bootstrap"]
        x = rng.normal(size=sizes.get(name, shape)).astype(np.float32)
        return -np.abs(x) if name.endswith("log_probs") else x

    return {name: make(name) for name in names_of(case)}


def is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def counting(name: str, argument: str, mask):
    """Where an argument counts: a logit of `logprobs` one position earlier than the token it predicts."""
    if argument not in ("logits", "ref_logits"):
        return mask
    if name.startswith("logprobs"):
        mask = jnp.concatenate([mask[..., 1:], jnp.zeros_like(mask[..., :1])], axis=-1)
    return jnp.asarray(mask)[..., None]


@functools.cache
def forward(name: str) -> dict:
    """Calls a function under jit, compiled once, in every shape and dtype that the laws below compare."""
    case = CASES[name]

    def call(arrays):
        return case.function(**arrays, **case.options)

    def views(arrays, half):
        flat = {key: x.reshape(6, *x.shape[2:]) for key, x in arrays.items()}
        wide = {key: x.astype(jnp.float32) if is_float(x) else x for key, x in half.items()}
        rows = None if case.shared else jax.vmap(call)(flat)
        return {"whole": call(arrays), "flat": call(flat), "rows": rows, "half": call(half), "wide": call(wide)}

    arrays = {key: jnp.asarray(x) for key, x in arguments(case, MASK).items()}
    half = {key: x.astype(jnp.bfloat16) if is_float(x) else x for key, x in arrays.items()}
    return jax.jit(views)(arrays, half)


@functools.cache
def guarded(name: str):
    """Value and gradient of a weighted sum of all outputs, with what a mask has to do for a function that takes none.

    What such a function reads is set to 0 off the actions before, as the training loop does, and its outputs off the
    actions are left out after. Advantages are not: losses promise to be indifferent to those.
    """
    case = CASES[name]

    def objective(floats, others, mask, weights):
        arrays = floats | others
        if name not in MASKED:
            for key in floats.keys() - {"advantages"}:
                where = jnp.broadcast_to(counting(name, key, mask), floats[key].shape)
                arrays[key] = masked.fill(floats[key], where)
        out = case.function(**arrays, **case.options)
        total = 0.0
        for x in jax.tree.leaves(out):
            per_token = x.shape == mask.shape
            x = masked.fill(x, mask) * weights if per_token else x * jnp.max(weights, axis=-1) if x.ndim else x
            total += jnp.sum(x, dtype=jnp.float32)
        return total, out

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


def value_and_gradient(name, arrays, mask, weights):
    floats = {k: jnp.asarray(x) for k, x in arrays.items() if is_float(x)}
    others = {k: jnp.asarray(x) for k, x in arrays.items() if not is_float(x)}
    (value, out), gradient = guarded(name)(floats, others, jnp.asarray(mask), weights)
    return value, gradient, out


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), **TOLERANCE)


def test_every_public_function_is_in_the_table():
    public = {
        f"{module.__name__.removeprefix('jaxpg.estimators.')}.{name}"
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    assert public == {name.split(":")[0] for name in CASES} | NOT_HERE


@BY_NAME
def test_same_with_and_without_jit(name):
    case = CASES[name]
    assert_close(forward(name)["whole"], case.function(**arguments(case, MASK), **case.options))


@BY_NAME
def test_bfloat16_is_computed_in_float32(name):
    half, wide = forward(name)["half"], forward(name)["wide"]
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(half) if is_float(x))
    assert_close(half, wide)


@BY_NAME
def test_rows_and_leading_axes(name):
    """[N, G, T] is [B, T] is row after row of [T], unless the function compares rows."""
    whole, flat, rows = (forward(name)[key] for key in ("whole", "flat", "rows"))
    assert_close(jax.tree.map(lambda x, y: x.reshape(y.shape), whole, flat), flat)
    if rows is not None:  # aggregators add up over rows
        assert_close(jax.tree.map(lambda x, y: x if y.ndim else jnp.sum(x), rows, flat), flat)


@BY_NAME
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_what_stands_under_the_mask_reaches_neither_value_nor_gradient(name, garbage):
    case = CASES[name]
    clean = arguments(case, MASK)
    integers = {"segments": 0, "tokens": case.options.get("delimiter", (-7,))[0]}

    def soil(key, x):
        where = counting(name, key, MASK) if x.shape[: MASK.ndim] == MASK.shape else MASK.any(axis=-1)
        where = np.asarray(where).reshape(where.shape + (1,) * (x.ndim - where.ndim))
        return x if x.dtype == bool else np.where(where, x, garbage if is_float(x) else integers[key]).astype(x.dtype)

    dirty = {key: soil(key, x) for key, x in clean.items()}
    weights = np.cos(np.arange(36.0)).reshape(MASK.shape)  # unequal, or gradients of centered values vanish
    expected = value_and_gradient(name, clean, MASK, weights)
    value, gradient, out = value_and_gradient(name, dirty, MASK, weights)
    assert np.isfinite(value)
    assert_close((value, gradient), expected[:2])
    for key, x in gradient.items():
        if x.shape[: MASK.ndim] == MASK.shape:
            assert not np.any(np.where(counting(name, key, MASK), 0.0, x))
    if name in MASKED and not name.startswith("losses"):
        assert_close(out, expected[2])


@pytest.mark.parametrize("name", [n for n in CASES if n not in POINTWISE])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), left=st.integers(0, 3), order=st.permutations(range(6)))
def test_padding_and_row_order_change_nothing(name, seed, left, order):
    """Three tokens of padding, shared out between the two sides; what belongs to a row moves with it."""
    rng = np.random.default_rng(seed)
    case, mask = CASES[name], rng.random(MASK.shape) < 0.7
    if name.startswith("logprobs"):
        mask[..., 0] = False  # the first token of all is predicted by nothing, behind padding by a pad
    arrays, weights = arguments(case, mask, seed), rng.random(MASK.shape).astype(np.float32)

    def move(x, pad):
        rows = x.reshape(6, *x.shape[2:])[np.array(order)].reshape(x.shape)
        if x.shape[:3] != MASK.shape:
            return rows
        return np.pad(rows, [(0, 0), (0, 0), (left, 3 - left)] + [(0, 0)] * (x.ndim - 3), constant_values=pad)

    value, gradient, _ = value_and_gradient(name, arrays, mask, weights)
    moved = {key: move(x, 0 if x.dtype == bool else 3) for key, x in arrays.items()}
    moved_value, moved_gradient, _ = value_and_gradient(name, moved, move(mask, 0), move(weights, 0))
    assert_close(moved_value, value)
    for key, x in gradient.items():
        got = moved_gradient[key]
        got = got[:, :, left : left + 6] if x.shape[:3] == MASK.shape else got
        assert_close(got.reshape(6, -1), x.reshape(6, -1)[np.array(order)])


LOSSES = {
    "reinforce": lambda lp, old, a, m: losses.reinforce(lp, a),
    "ppo_clip": lambda lp, old, a, m: losses.ppo_clip(lp, old, a, dual_clip=3.0),
    "gspo": lambda lp, old, a, m: losses.gspo(lp, old, a, m, clip_low=0.2, clip_high=0.2),
    "gmpo": losses.gmpo,
    "cispo": lambda lp, old, a, m: losses.cispo(lp, old, a, clip_high=0.3),
    "sapo": lambda lp, old, a, m: losses.sapo(lp, old, a),
    "k3": lambda lp, old, a, m: (kl.k3(lp, old), {}),
    "value": lambda lp, old, a, m: (value_losses.clipped(lp, old, a, clip=0.2), {}),
}
AGGREGATORS = (
    aggregate.token_mean,
    aggregate.sequence_mean_token_mean,
    aggregate.sequence_mean_token_sum,
    functools.partial(aggregate.constant_length, length=6),
)


@jax.jit
def every_loss(log_probs, old, advantages, mask):
    """Total, weight and gradient of the total, and the clip fraction, of every loss with every aggregator."""
    clean = masked.fill(old, mask)

    def total(lp, loss, aggregator):
        per_token, aux = loss(masked.fill(lp, mask), clean, advantages, mask)
        clipped = aggregate.token_mean(aux.get("clipped_high", jnp.zeros(mask.shape)), mask)
        mean = aggregator(per_token, mask)
        return mean.total, (mean.weight, clipped.total, clipped.weight)

    calls = [functools.partial(total, loss=loss, aggregator=a) for loss in LOSSES.values() for a in AGGREGATORS]
    return [jax.value_and_grad(call, has_aux=True)(log_probs) for call in calls]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), order=st.permutations(range(6)))
def test_no_loss_depends_on_how_its_batch_is_split_or_ordered(seed, order):
    """Loss, weight, clip fraction and gradient: micro-batches add up, whatever rows they hold."""
    rng = np.random.default_rng(seed)
    order, mask = np.array(order), rng.random((6, 5)) < 0.7
    arrays = [*(-rng.random((2, 6, 5)).astype(np.float32)), rng.normal(size=(6, 5)).astype(np.float32), mask]
    whole = every_loss(*arrays)
    split = [every_loss(*part) for part in zip(*(np.split(x[order], 3) for x in arrays), strict=True)]
    for expected, *got in zip(whole, *split, strict=True):
        (value, aux), gradient = expected
        assert_close(sum(part[0][0] for part in got), value)
        assert_close([sum(x) for x in zip(*(part[0][1] for part in got), strict=True)], list(aux))
        assert_close(np.concatenate([part[1] for part in got]), gradient[order])
