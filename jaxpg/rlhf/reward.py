"""The learned reward: applied, saved, used to score rollouts; and both rewards of a policy, learned and true."""

from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxpg import ladder
from jaxpg.data import decode_completions
from jaxpg.estimators import preference
from jaxpg.ladder.parts import encode
from jaxpg.models import Model, heads, hf
from jaxpg.parallel import distributed, sharding
from jaxpg.rlhf.config import Run
from jaxpg.tasks import taste
from jaxpg.tasks.scoring import Scored
from jaxpg.types import Array

NAMES = ("learned", "true", "right", "marks")


def rewards(model: Model, params: dict, tokens: Array, token_mask: Array) -> Array:
    """Computes the learned reward of each row of [..., T], read at its last real token; carries gradient to params.

    Args:
      model: of the trunk.
      params: {"trunk": ..., "head": ...}.
      tokens: [..., T] int32, prompt and completion.
      token_mask: [..., T] bool.

    Returns:
      [...] float32.
    """
    flat, mask = tokens.reshape(-1, tokens.shape[-1]), token_mask.reshape(-1, tokens.shape[-1])
    found = heads.rewards(params["head"], model.hidden(params["trunk"], flat, mask), mask)
    return found.reshape(tokens.shape[:-1])


def compiled_rewards(run: Run):
    """Compiles (params, a Rollout or Batch) -> its learned rewards."""
    return jax.jit(
        lambda params, rows: rewards(run.model, params, rows.tokens, rows.token_mask),
        out_shardings=sharding.replicated(run.mesh),
    )


def save_reward(run: Run, params: dict) -> None:
    """Writes the trunk as a Hugging Face directory and the head beside it, into the folder of the run."""
    head = distributed.fetch(params["head"])
    if distributed.is_first():
        save_file(head, run.folder / "head.safetensors")
    hf.save(run.folder / "model", run.model.config, params["trunk"], run.tokenizer, overwrite=True)


def load_reward(run: Run, folder: Path) -> dict:
    """Reads what `save_reward` wrote."""
    head = jax.device_put(load_file(folder / "head.safetensors"), sharding.replicated(run.mesh))
    return {"trunk": hf.load(folder / "model", mesh=run.mesh).params, "head": head}


def scorer(run: Run, reward: dict):
    """Builds (problems, rollout) -> the learned rewards, and what they are not: the true ones, for the log alone."""
    learned = compiled_rewards(run)

    def score(problems, rollout) -> Scored:
        shape = (len(problems), rollout.tokens.shape[0] // len(problems))
        found = np.asarray(learned(reward, rollout)).reshape(shape)
        told = np.concatenate([found[..., None], truth(run, problems, rollout)], axis=-1)
        return Scored(
            rewards=found,
            valid=np.ones(shape, bool),
            scores=told,
            scores_valid=np.ones(told.shape, bool),
            failures=np.zeros(len(NAMES), np.int64),
            names=NAMES,
        )

    return score


def truth(run: Run, problems, rollout) -> np.ndarray:
    """The true utility, whether the answer is right and how many marks there are [P, G, 3] float32."""
    mine = distributed.pick_local(run.mesh, problems)
    texts = decode_completions(run.tokenizer, distributed.local(rollout))
    samples = len(texts) // len(mine)
    asked = [problem for problem in mine for _ in range(samples)]
    rows = [
        (taste.utility(problem, text), taste.is_right(problem, text), taste.marks(text))
        for problem, text in zip(asked, texts, strict=True)
    ]
    return distributed.gather(run.mesh, np.asarray(rows, np.float32).reshape(len(mine), samples, 3))


def evaluate(run: Run, params: dict, *, reward: dict | None = None, reference: dict | None = None) -> dict[str, float]:
    """Samples completions of all prompts and averages what they are worth.

    Args:
      run: its model and sampler; the same prompts and the same key for every policy.
      params: the policy's.
      reward: a reward model's, for the learned reward.
      reference: another policy's, for an estimate of KL(π ‖ π_ref), nats a completion (k1, unbiased).

    Returns:
      true, right, marks, and learned and kl where they are asked for.
    """
    problems = run.task.held_out(run.config.evaluation_samples)
    rollout = ladder.sampler(run, samples_per_prompt=1)(params, *encode(run, problems), jax.random.key(0))
    found = dict(zip(NAMES[1:], truth(run, problems, rollout).mean((0, 1)).tolist(), strict=True))
    if reward is not None:
        found["learned"] = float(np.asarray(compiled_rewards(run)(reward, rollout)).mean())
    if reference is not None:
        theirs = ladder.reference(run, reference)(None, rollout)
        ratio = jax.jit(lambda a, b, mask: preference.sequence_log_probs(a - b, mask).mean())
        found["kl"] = float(ratio(rollout.log_probs, theirs, rollout.action_mask))
    return found
