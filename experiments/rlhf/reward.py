"""The learned reward: applied, saved, read again; and what the three later steps share."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxpg import recipe
from jaxpg.models import Model, heads, hf
from jaxpg.parallel import distributed, sharding
from jaxpg.run import read
from jaxpg.types import Array, Rollout, Scores


def check_done(folder: Path, *, script: str) -> None:
    """Raises ValueError where an earlier step is not done."""
    if not read.is_finished(folder):
        what = "has not finished" if folder.exists() else "is missing"
        more = " --resume" if folder.exists() else ""
        raise ValueError(f"{folder} {what}: run python experiments/rlhf/{script} --run-dir {folder}{more} first")


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


def compiled_rewards(setup: recipe.Setup) -> Callable:
    """Compiles (params, a Rollout or Batch) -> its learned rewards."""
    return jax.jit(
        lambda params, rows: rewards(setup.model, params, rows.tokens, rows.token_mask),
        out_shardings=sharding.replicated(setup.mesh),
    )


def save_reward(r: recipe.Recipe, params: dict) -> None:
    """Writes the trunk as a Hugging Face directory and the head beside it, into the folder of the run."""
    head = distributed.fetch(params["head"])
    if distributed.is_primary():
        save_file(head, r.run.folder / "head.safetensors")
    hf.save(r.run.folder / "model", r.model.config, params["trunk"], r.tokenizer, overwrite=True)


def load_reward(setup: recipe.Setup, folder: Path) -> Callable[[Rollout], np.ndarray]:
    """Builds rollout -> the learned reward of each row, from what `save_reward` wrote."""
    head = jax.device_put(load_file(folder / "head.safetensors"), sharding.replicated(setup.mesh))
    params = {"trunk": hf.load(folder / "model", mesh=setup.mesh).params, "head": head}
    learned = compiled_rewards(setup)
    return lambda rollout: np.asarray(learned(params, rollout))


def in_place_of(true: Scores, learned: np.ndarray) -> Scores:
    """Scores whose rewards are the learned ones. The true ones stay beside them, for the log alone.

    Args:
      true: of the task's own scorer, the true utility.
      learned: [P·G] float32.
    """
    learned = learned.reshape(true.rewards.shape)
    both = np.stack([learned, true.rewards], axis=-1).astype(np.float32)
    return dataclasses.replace(
        true,
        rewards=learned.astype(np.float32),
        scores=both,
        scores_valid=np.broadcast_to(true.valid[..., None], both.shape),
        names=("learned", "true"),
        failures=np.append(0, true.failures),
    )
