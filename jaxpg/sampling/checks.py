"""The arguments of sampling, checked before anything is compiled."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from jaxpg.estimators.checks import at_least
from jaxpg.models import Model
from jaxpg.parallel.sharding import target_platform
from jaxpg.sampling.decoding import Settings
from jaxpg.sampling.filters import Filter
from jaxpg.sampling.stop_strings import Automaton
from jaxpg.types import Array, Rollout

__all__ = ["Request", "at_least", "check", "check_temperature"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of the sampler, beside parameters, prompts and key; `sample` describes the fields.

    The signatures of `sample`, `generate` and `converse` name these fields, with these defaults.
    """

    model: Model
    max_new_tokens: int
    stop_tokens: Sequence[int]
    samples_per_prompt: int = 1
    temperature: float = 1.0
    filters: Sequence[Filter] = ()
    prompt_ids: Array | None = None
    stop_strings: Automaton | None = None
    min_new_tokens: int | Array = 0
    row_limits: Array | None = None
    greedy: bool = False
    continued: Rollout | None = None
    unroll: bool | None = None

    @property
    def settings(self) -> Settings:
        has_minimum = not isinstance(self.min_new_tokens, int) or self.min_new_tokens > 1
        return Settings(self.model, float(self.temperature), tuple(self.filters), self.unroll, self.greedy, has_minimum)


def check_temperature(value: float) -> None:
    """Raises ValueError for a temperature that nothing can be sampled at."""
    if not 0 <= value < math.inf:
        raise ValueError(f"temperature={value}: must be 0 (greedy) or positive, and finite")


def unrolls_by_default() -> bool:
    """Are layers of decode steps unrolled? On TPUs they are scanned over, see `sampler.sample`."""
    return target_platform() != "tpu"


def check(r: Request, prompts: Array, prompt_mask: Array) -> Request:
    """Checks a Request against its prompts, and decides what it leaves open.

    Raises:
      ValueError: naming the argument, its value and what is allowed.
    """
    if r.unroll is None:
        r = dataclasses.replace(r, unroll=unrolls_by_default())
    at_least("max_new_tokens", r.max_new_tokens, 1)
    at_least("samples_per_prompt", r.samples_per_prompt, 1)
    check_temperature(r.temperature)
    _check_prompts(prompts, prompt_mask, r)
    _check_rows(prompts, r)
    vocabulary = r.model.config.vocab_size
    outside = [token for token in r.stop_tokens if not 0 <= token < vocabulary]
    if outside:
        raise ValueError(f"stop_tokens={outside}: not in a vocabulary of {vocabulary}")
    if r.stop_strings is not None and r.stop_strings.table.shape[1] != vocabulary:
        raise ValueError(
            f"stop_strings were built for {r.stop_strings.table.shape[1]} tokens, the model has {vocabulary}: "
            "pass vocab_size=model.config.vocab_size to build"
        )
    return r


def _check_prompts(prompts: Array, prompt_mask: Array, r: Request):
    if prompts.ndim != 2 or prompts.shape != prompt_mask.shape:
        raise ValueError(f"prompts {prompts.shape} and prompt_mask {prompt_mask.shape}: both must be [prompts, length]")
    if prompt_mask.dtype != jnp.bool_:
        raise ValueError(f"prompt_mask has dtype {prompt_mask.dtype}: pass booleans, True at real tokens")
    if 0 in prompts.shape:
        raise ValueError(f"prompts has shape {prompts.shape}: pass at least one prompt of at least one token")
    if r.prompt_ids is not None and r.prompt_ids.shape != prompts.shape[:1]:
        raise ValueError(f"prompt_ids has shape {r.prompt_ids.shape}: pass one id a prompt, {prompts.shape[:1]}")
    needed = prompts.shape[1] + r.max_new_tokens
    if needed > r.model.config.max_length:
        raise ValueError(
            f"max_new_tokens={r.max_new_tokens} after prompts of length {prompts.shape[1]} needs {needed} positions, "
            f"the model has max_length={r.model.config.max_length}: shorten the prompts or the budget"
        )


def _check_rows(prompts: Array, r: Request):
    rows = (prompts.shape[0] * r.samples_per_prompt,)
    for name in ("row_limits", "min_new_tokens"):
        value = getattr(r, name)
        if value is not None and not isinstance(value, int) and value.shape != rows:
            raise ValueError(f"{name} has shape {value.shape}: pass one number a row, {rows}")
    if isinstance(r.min_new_tokens, int) and not 0 <= r.min_new_tokens <= r.max_new_tokens:
        raise ValueError(f"min_new_tokens={r.min_new_tokens}: must be between 0 and max_new_tokens={r.max_new_tokens}")
    if r.continued is None:
        return
    if r.greedy:
        raise ValueError("greedy=True starts a new row a prompt: it cannot be asked for together with continued")
    had = r.continued.tokens.shape[1] - prompts.shape[1]
    if r.continued.tokens.shape[0] != rows[0] or not 0 <= had <= r.max_new_tokens:
        raise ValueError(
            f"continued has tokens of shape {r.continued.tokens.shape}: must be {rows[0]} rows of these prompts and at "
            f"most max_new_tokens={r.max_new_tokens} columns behind them"
        )
    if r.continued.plain_log_probs is None:
        raise ValueError("continued has no plain_log_probs: pass a Rollout that the sampler returned")
