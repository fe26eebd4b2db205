"""The training loop, the only stateful module: step after step, with logging and checkpoints.

A step is a function (state, k) -> (state, row of numbers). Step k depends on the state and on k alone, so a run that
stopped after k steps and restored the state continues exactly as if it had never stopped.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpg.estimators import checks
from jaxpg.parallel import distributed
from jaxpg.rollout.dynamic_sampling import Drawn, fill, has_signal, whole_rewards
from jaxpg.run import faults
from jaxpg.run import metrics as metrics_lib
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.run.metrics import JsonlWriter
from jaxpg.training.train_state import TrainState
from jaxpg.training.update import take_rows
from jaxpg.types import Array, Batch, Experience, Rollout, StopReason

Row = dict[str, float]
Step = Callable[[TrainState, int], tuple[TrainState, Row]]
Update = Callable[[TrainState, Batch], tuple[TrainState, dict]]
# What to turn where a device has too little memory.
SAMPLE_KNOBS = (
    "fewer completions a step (--batch-size), shorter ones (--max-new-tokens), a --sampler-mesh with more of tensor or "
    "with fsdp, which gathers weights for every token"
)
UPDATE_KNOBS = (
    "more --num-microbatches, which changes no result; rematerialisation; log-probs by `logprobs.from_hidden`, which "
    "keeps no logits; more of --mesh fsdp or tensor"
)


@dataclasses.dataclass(frozen=True)
class Journal:
    """Where a phase of a run records itself."""

    phase: str  # written into every row
    writer: JsonlWriter
    checkpointer: Checkpointer
    checkpoint_every: int  # in steps
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of what the state depends on but lacks

    def restore(self, state: TrainState) -> tuple[TrainState, int, bool]:
        """Returns the newest saved state, how many steps it had done, and whether the phase was over.

        Without a checkpoint, the state given, 0 and False.

        Raises:
          ValueError: if the checkpoint depends on something else than this run, e.g. another reference policy.
        """
        if self.checkpointer.latest is None:
            return state, 0, False
        state, record = self.checkpointer.restore(state)
        for name, value in self.identity.items():
            if record["identity"].get(name) != value:
                raise ValueError(
                    f"{self.phase}: {name} is {record['identity'].get(name)} in the checkpoint and {value} here: go on "
                    "with the one that the run began with, or begin anew in another folder"
                )
        if not record["finished"]:  # else the rows of later phases follow
            self.writer.rewind(record["metrics_bytes"])
        return state, record["steps"], record["finished"]

    def save(self, state: TrainState, done: int, *, finished: bool, score: float | None) -> None:
        """Starts to save what `restore` returns."""
        record = {
            "steps": done,
            "finished": finished,
            "metrics_bytes": self.writer.offset,
            "identity": dict(self.identity),
        }
        self.checkpointer.save(done, state, record, score=score)


def run(
    step: Step,
    state: TrainState,
    journal: Journal,
    *,
    steps: int,
    on_step: Callable[[TrainState, int, Row], bool | None] = lambda *_: None,
    evaluate: Callable[[TrainState, int], float | None] = lambda *_: None,
    max_nonfinite: int = 4,
) -> TrainState:
    """Runs a phase to its end, from its newest checkpoint if it has one.

    Args:
      step: what to do.
      state: the state of step 0; restored states take its shapes and shardings.
      journal: each row goes to its writer; every `checkpoint_every` steps, and at the end, the state to its
        checkpointer.
      steps: the number of steps of the phase.
      on_step: called with (state, steps done, row) after each step; True ends the phase early.
      evaluate: called with (state, steps done) after each step; what it returns is the score of the state, by which
        the checkpointer keeps the best, None where there is none.
      max_nonfinite: how many steps in a row may have updates that were skipped since they were not finite.

    Returns:
      The last state.

    Raises:
      faults.Preempted: after SIGTERM, once the step is done and its state is saved; it ends the process with 143.
      faults.NonFiniteError: after more than `max_nonfinite` such steps.
      RuntimeError: if a checkpoint could not be written.
      ValueError: if `max_nonfinite` is below 0.
    """
    checks.at_least("max_nonfinite", max_nonfinite, 0)
    streak = faults.Streak(max_nonfinite)
    state, done, finished = journal.restore(state)
    with faults.Preemption() as preemption:
        while not finished and done < steps:
            state, row = step(state, done)
            done += 1
            journal.writer.write({"phase": journal.phase, "step": done, **row})
            streak.look(row)
            score = evaluate(state, done)
            finished = bool(on_step(state, done, row)) or done == steps
            preempted = preemption.noticed()
            if finished or preempted or done % journal.checkpoint_every == 0:
                journal.save(state, done, finished=finished, score=score)
            else:
                journal.checkpointer.check()
            if preempted:
                journal.checkpointer.wait()
                raise faults.Preempted(done)
    return state


def supervised_step(batch: Callable[[int], Batch], update: Update) -> Step:
    """Makes the step of supervised learning: one update on batch k."""

    def step(state: TrainState, k: int) -> tuple[TrainState, Row]:
        started = time.perf_counter()
        with faults.memory_advice("updating", UPDATE_KNOBS):
            state, metrics = update(state, batch(k))
            row = _sum_up([metrics])
        return state, row | {"seconds_update": time.perf_counter() - started}

    return step


def _sum_up(parts: list[dict]) -> Row:
    """The means over the updates that were made, and how many were skipped.

    They are added up on the host: operations of many devices between the updates cost time, and have locked up eight
    virtual CPU devices in a collective of the update.
    """
    made, skipped = faults.sift(jax.device_get(parts))
    return metrics_lib.to_floats(functools.reduce(metrics_lib.add, made)) | skipped


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
    failures: int = 0  # samples on which the scorer failed; they are not valid


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
            with faults.memory_advice("sampling", SAMPLE_KNOBS):
                sampled = jax.block_until_ready(sample(state.params, asked.tokens, asked.mask, drawn_key))
            sampled = sampled if isinstance(sampled, tuple) else (sampled,)
            _check_divides(minibatches, sampled[0])
            clock.lap("sample")
            scores = score(asked.problems, *sampled)
            _check_finite(scores)
            clock.lap("score")
            return Drawn(asked.problems, sampled[0], scores)

        (problems, rollout, scores), draws = fill(draw, max_resamples=max_resamples)
        parts = []
        with faults.memory_advice("updating", UPDATE_KNOBS):
            batch = to_batch(experience(state, rollout, scores))
            for order_key, index in _minibatches(jax.random.fold_in(key, 1), epochs, minibatches):
                part = batch if minibatches == 1 else take(batch, order_key, index, count=minibatches)
                state, metrics = update(state, part)
                parts.append(metrics)
            row = _sum_up(parts)
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
    actions, stop_reason = distributed.fetch((rollout.action_mask, rollout.stop_reason))
    lengths, cut = actions.sum(-1), stop_reason == StopReason.BUDGET
    rewards = np.ma.masked_array(whole_rewards(scores), ~scores.valid)
    better = rewards.data.reshape(-1) > _mean(rewards)
    row = {
        "reward": _mean(rewards),
        "reward_std": float(np.ma.filled(rewards.std(), 0.0)),
        "scored": float(np.mean(scores.valid)),
        "scorer_failures": int(np.sum(getattr(scores, "failures", 0))),
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
