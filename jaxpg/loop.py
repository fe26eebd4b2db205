"""The training loop, the only stateful module: step after step, with logging and checkpoints.

A step is a function (state, k) -> (state, row of numbers). Step k depends on the state and on k alone, so a run that
stopped after k steps and restored the state continues exactly as if it had never stopped.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpg import checks
from jaxpg import metrics as metrics_lib
from jaxpg.checkpoint import Checkpointer
from jaxpg.dynamic_sampling import Drawn, fill, has_signal, whole_rewards
from jaxpg.metrics import JsonlWriter
from jaxpg.train_state import TrainState
from jaxpg.types import Array, Batch, Experience, Rollout, StopReason
from jaxpg.update import take_rows

Row = dict[str, float]
Step = Callable[[TrainState, int], tuple[TrainState, Row]]
Update = Callable[[TrainState, Batch], tuple[TrainState, dict]]


@dataclasses.dataclass(frozen=True)
class Journal:
    """Where a phase of a run records itself."""

    phase: str  # written into every row
    writer: JsonlWriter
    checkpointer: Checkpointer
    checkpoint_every: int  # in steps

    def restore(self, state: TrainState) -> tuple[TrainState, int, bool]:
        """Returns the newest saved state, how many steps it had done, and whether the phase was over.

        Without a checkpoint, the state given, 0 and False.
        """
        if self.checkpointer.latest is None:
            return state, 0, False
        state, record = self.checkpointer.restore(state)
        return state, record["steps"], record["finished"]


def run(
    step: Step,
    state: TrainState,
    journal: Journal,
    *,
    steps: int,
    on_step: Callable[[TrainState, int, Row], bool | None] = lambda *_: None,
) -> TrainState:
    """Runs a phase to its end, from its newest checkpoint if it has one.

    Args:
      step: what to do.
      state: the state of step 0; restored states take its shapes and shardings.
      journal: each row goes to its writer; every `checkpoint_every` steps, and at the end, the state to its
        checkpointer.
      steps: the number of steps of the phase.
      on_step: called with (state, steps done, row) after each step; True ends the phase early.

    Returns:
      The last state.
    """
    state, done, finished = journal.restore(state)
    while not finished and done < steps:
        state, row = step(state, done)
        done += 1
        journal.writer.write({"phase": journal.phase, "step": done, **row})
        finished = bool(on_step(state, done, row)) or done == steps
        if finished or done % journal.checkpoint_every == 0:
            record = {"steps": done, "finished": finished, "metrics_bytes": journal.writer.offset}
            journal.checkpointer.save(done, state, record)
    return state


def supervised_step(batch: Callable[[int], Batch], update: Update) -> Step:
    """Makes the step of supervised learning: one update on batch k."""

    def step(state: TrainState, k: int) -> tuple[TrainState, Row]:
        started = time.perf_counter()
        state, metrics = update(state, batch(k))
        return state, metrics_lib.to_floats(metrics) | {"seconds_update": time.perf_counter() - started}

    return step


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of one iteration: arrays for the sampler, problems for the scorer."""

    tokens: Array  # [P, S] int32
    mask: Array  # [P, S] bool
    problems: Sequence[Any]  # P of the task's own type


class Scores(NamedTuple):
    """What the scorer says about the samples of P prompts."""

    rewards: np.ndarray  # [P, G] float32
    valid: np.ndarray  # [P, G] bool, False where no scorer applied; its reward is not read
    token_rewards: np.ndarray | None = None  # [B, T] float32, of tokens or steps, besides `rewards`; 0 off actions
    segments: np.ndarray | None = None  # [B, T] int32, the action each token belongs to
    greedy_rewards: np.ndarray | None = None  # [P] float32, of the greedy completions


def policy_gradient_step(
    *,
    prompts: Callable[[int], Prompts],
    sample: Callable[[dict, Array, Array, Array], Rollout],
    score: Callable[[Sequence[Any], Rollout], Scores],
    experience: Callable[[TrainState, Rollout, Scores], Experience],
    to_batch: Callable[[Experience], Batch],
    update: Update,
    epochs: int = 1,
    minibatches: int = 1,
    max_resamples: int = 0,
    adapt: Update | None = None,
) -> Step:
    """Makes the step of every on-policy method: sample → score → advantage → epochs × minibatches of updates.

    Args:
      prompts: iteration -> Prompts.
      sample: (params, tokens, mask, key) -> Rollout, or a tuple that begins with it; jitted.
      score: (problems, *what was sampled) -> Scores; on the host. Its step raises ValueError for a reward that is not
        finite.
      experience: (state, rollout, scores) -> Experience; adds what the algorithm wants, e.g. values.
      to_batch: computes advantages; jitted.
      update: jitted.
      epochs: passes over each rollout.
      minibatches: updates a pass; the rows are shuffled anew for each pass. Must divide the rows of a rollout.
      max_resamples: how often groups without a signal may be replaced by new ones (`dynamic_sampling.fill`); iteration
        k then draws from `prompts` at k·(1 + max_resamples) and after.
      adapt: (state, batch) -> (state, metrics) after the last update of a rollout, e.g. of `update.make_kl_adaptation`;
        jitted. It moves `TrainState.kl_coef`, which must start above 0.

    Raises:
      ValueError: if `epochs` or `minibatches` is below 1; in the first step, if what is said above does not hold.
    """
    checks.at_least("epochs", epochs, 1)
    checks.at_least("minibatches", minibatches, 1)
    checks.at_least("max_resamples", max_resamples, 0)
    take = jax.jit(take_rows, static_argnames="count")

    def step(state: TrainState, k: int) -> tuple[TrainState, Row]:
        if adapt is not None and k == 0:
            _check_kl_coef(state)
        key, clock = jax.random.fold_in(state.key, k), _Clock()

        def draw(attempt: int) -> Drawn:
            asked = prompts(k * (1 + max_resamples) + attempt)
            # The order of the rows has key 1.
            drawn_key = jax.random.fold_in(key, attempt + 1 if attempt else 0)
            sampled = jax.block_until_ready(sample(state.params, asked.tokens, asked.mask, drawn_key))
            sampled = sampled if isinstance(sampled, tuple) else (sampled,)
            _check_divides(minibatches, sampled[0])
            clock.lap("sample")
            scores = score(asked.problems, *sampled)
            _check_finite(scores)
            clock.lap("score")
            return Drawn(asked.problems, sampled[0], scores)

        (problems, rollout, scores), draws = fill(draw, max_resamples=max_resamples)
        batch = to_batch(experience(state, rollout, scores))
        parts = []
        for order_key, index in _minibatches(jax.random.fold_in(key, 1), epochs, minibatches):
            part = batch if minibatches == 1 else take(batch, order_key, index, count=minibatches)
            state, metrics = update(state, part)
            parts.append(metrics)
        # Added up on the host: operations of many devices between the updates cost time, and have locked up eight
        # virtual CPU devices in a collective of the update.
        parts = jax.device_get(parts)
        row = metrics_lib.to_floats(functools.reduce(metrics_lib.add, parts))
        row["log_prob_gap"] = metrics_lib.to_floats(parts[0])["log_prob_gap"]  # later updates are off policy by design
        if adapt is not None:
            state, metrics = adapt(state, batch)
            row |= metrics_lib.to_floats(metrics)
        clock.lap("update")
        described = describe(problems, rollout, scores) | ({"sampled_groups": draws} if max_resamples else {})
        return state, described | row | clock.row()

    return step


def describe(problems: Sequence[Any], rollout: Rollout, scores: Scores) -> Row:
    """Says in numbers what was sampled: rewards, groups without a signal, lengths, cut completions.

    Args:
      problems: P of them; where they have a `level`, rewards are told by level too.
      rollout: of B rows.
      scores: of the same samples, [P, G].
    """
    lengths = np.asarray(rollout.action_mask).sum(-1)
    cut = np.asarray(rollout.stop_reason) == StopReason.BUDGET
    rewards = np.ma.masked_array(whole_rewards(scores), ~scores.valid)
    better = rewards.data.reshape(-1) > _mean(rewards)
    row = {
        "reward": _mean(rewards),
        "reward_std": float(np.ma.filled(rewards.std(), 0.0)),
        "scored": float(np.mean(scores.valid)),
        "zero_variance_groups": float(np.mean(~has_signal(scores))),
        "completion_length": float(lengths.mean()),
        "completion_length_max": float(lengths.max()),
        "completion_length_better": _mean(np.ma.masked_array(lengths, ~better)),  # of rewards above the mean
        "completion_length_worse": _mean(np.ma.masked_array(lengths, better)),
        "cut_completions": float(cut.mean()),
        "completion_tokens": int(lengths.sum()),
    }
    levels = np.asarray([getattr(problem, "level", 0) for problem in problems])
    if len(levels) and levels.min() != levels.max():
        row |= {f"reward/level_{level}": _mean(rewards[levels == level]) for level in np.unique(levels)}
    if hasattr(scores, "metrics"):  # of several scorers, see `tasks.scoring`
        row |= scores.metrics()
    return row


def _mean(values: np.ma.MaskedArray) -> float:
    """The mean of what is not masked, 0 where all is."""
    return float(np.ma.filled(values.mean(), 0.0))


def _check_finite(scores: Scores) -> None:
    rewards = whole_rewards(scores)
    bad = np.argwhere(scores.valid & ~np.isfinite(rewards))
    if len(bad):
        prompt, sample = bad[0]
        raise ValueError(
            f"score: reward {rewards[prompt, sample]} for sample {sample} of prompt {prompt}, one of {len(bad)} "
            "that are not finite: mend the scorer, or set valid=False where it does not apply"
        )


def _check_kl_coef(state: TrainState) -> None:
    if not state.kl_coef > 0:
        raise ValueError(
            f"kl_coef={state.kl_coef}: must be greater than 0 to be adapted, the controllers multiply it; "
            "start from train_state.init(..., kl_coef=0.2), or leave `adapt` out"
        )


def _check_divides(minibatches: int, rollout: Rollout) -> None:
    rows = rollout.tokens.shape[0]
    if rows % minibatches:
        raise ValueError(f"minibatches={minibatches} does not divide the {rows} rows of a rollout: choose a divisor")


def _minibatches(key: Array, epochs: int, minibatches: int) -> Iterator[tuple[Array, int]]:
    for epoch in range(epochs):
        for index in range(minibatches):
            yield jax.random.fold_in(key, epoch), index


class _Clock:
    """Seconds by phase of one step."""

    def __init__(self):
        self._last, self._laps = time.perf_counter(), {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[f"seconds_{name}"] = self._laps.get(f"seconds_{name}", 0.0) + now - self._last
        self._last = now

    def row(self) -> Row:
        return dict(self._laps)
