"""Options of every recipe. What a small model and a checkpoint need differently is in `DEFAULTS`."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxpg.run import Options
from jaxpg.run.ranges import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Share
from jaxpg.tasks import Options as TaskOptions

# What an option is where it is not given: for the small model that a run builds itself, and for a checkpoint.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "batch_size": (1024, 64),
    "num_microbatches": (1, 4),
    "minibatches": (2, 1),
    "rl_steps": (400, 60),
    "rl_learning_rate": (7e-4, 2e-5),
    "held_out": (512, 128),
    "evaluate_every": (25, 10),
    "checkpoint_every": (25, 10),
    "warmup_steps": (600, 0),
    "warmup_batch_size": (256, 32),
    "warmup_learning_rate": (2e-3, 2e-5),
    "warmup_accuracy": (0.4, 1.0),
    "critic_learning_rate": (2e-3, 1e-4),
    "remat": (False, True),
}
LORA_LEARNING_RATE = 2e-4  # adapters take steps ten times as long

# The most that --smoke leaves: a few small steps, to see that everything runs.
SMOKE = {
    "batch_size": (64, 16),
    "group_size": (4, 2),
    "num_microbatches": (1, 1),
    "rl_steps": (2, 2),
    "warmup_steps": (2, 2),
    "warmup_batch_size": (32, 8),
    "held_out": (16, 8),
    "evaluate_every": (2, 2),
}


@dataclasses.dataclass(frozen=True)
class Config(TaskOptions, Options):
    """Options of every recipe."""

    model: str | None = None  # directory in Hugging Face's layout, hub name or GGUF file; default a small model
    prompt_length: Positive | None = None  # tokens that a prompt may have; default the longest of the first prompts
    max_new_tokens: Positive | None = None  # tokens that a completion may have; default what the task needs
    long_prompts: Literal["drop", "stop"] = "drop"  # what becomes of prompts that do not fit
    lora_rank: NonNegative = 0  # rank of LoRA adapters; 0 trains all parameters
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of activations and matrix products
    reference_dtype: Literal["float32", "bfloat16"] = "float32"  # of a copied reference policy
    remat: bool | None = None  # recompute layers in the backward pass; default for a checkpoint
    attention: Literal["xla", "cudnn", "splash"] = "xla"  # the attention kernel
    sampler_mesh: str | None = None  # mesh of the sampler, same devices; default --mesh with fsdp folded into data

    seed: int = 0
    batch_size: Positive | None = None  # completions a step; default 1024, or 64 with --model
    group_size: Positive = 8  # completions a prompt
    rl_steps: NonNegative | None = None  # default 400, or 60 with --model; 0: the warm-up is all
    rl_seconds: PositiveFloat | None = None  # end the reinforcement learning after so long, if its steps are not over
    rl_learning_rate: PositiveFloat | None = None  # default 7e-4; with --model 2e-5, or 2e-4 for LoRA
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0  # gradients are clipped to this global norm
    epochs: Positive = 1  # passes over each rollout
    minibatches: Positive | None = None  # updates a pass; default 2, or 1 with --model
    num_microbatches: Positive | None = None  # parts of an update that save memory; default 1, or 4 with --model

    temperature: PositiveFloat = 1.0  # of the sampler, and so of the policy that is trained
    top_k: NonNegative = 0  # sample among the k most likely tokens; 0: among all
    top_p: Share = 1.0  # sample among the most likely tokens of this total probability
    min_p: Share = 0.0  # sample tokens at least this share as likely as the most likely one

    warmup_steps: NonNegative | None = None  # supervised steps before rewards, at most; default 600, or 0 with --model
    warmup_accuracy: Share | None = None  # the warm-up ends at this accuracy; default 0.4, or 1 with --model
    warmup_batch_size: Positive | None = None  # demonstrations a step; default 256, or 32 with --model
    warmup_learning_rate: PositiveFloat | None = None  # default 2e-3, or 2e-5 with --model
    warmup_demonstrations: Positive = 32_768  # of an endless task; a data set is used whole
    warm_start: Path | None = None  # folder of another run whose finished warm-up is taken over

    held_out: Positive | None = None  # problems of the evaluation, never trained on; default 512, or 128 with --model
    evaluate_every: Positive | None = None  # steps; default 25, or 10 with --model
    evaluate_samples: NonNegative = 0  # samples a held-out problem at the end, for pass@k and majority@k
    checkpoint_every: Positive | None = None  # steps; default 25, or 10 with --model
    scorer_retries: NonNegative = 1  # further attempts of a scorer that fails
    scorer_failures: Literal["stop", "skip"] = "stop"  # skip: the sample counts as not scored, and is counted
    smoke: bool = False  # a few small steps, to see that everything runs

    DEFAULTS: ClassVar[dict[str, tuple[Any, Any]]] = {}  # of the recipe, in place of those above
    NEEDS: ClassVar[tuple[str, ...]] = ()  # what the recipe asks of its task, by fields of `Task`
    NOT_IDENTITY: ClassVar[tuple[str, ...]] = (
        *("rl_seconds", "sampler_mesh", "num_microbatches", "warm_start", "scorer_retries", "scorer_failures"),
    )


@dataclasses.dataclass(frozen=True)
class CriticConfig(Config):
    """Options of a recipe with a critic."""

    group_size: Positive = 1  # a critic needs no group
    critic: Literal["copy", "head", "lora"] = "copy"  # a trunk of its own, a head on the actor's, or adapters on it
    critic_rank: Positive = 16  # of --critic lora


def resolve(config: Config, *, spoken: bool) -> Config:
    """Fills in what was not given, for the small model or a checkpoint that is asked in words; and applies --smoke."""
    kind = int(spoken)
    chosen = {
        name: pair[kind] for name, pair in (DEFAULTS | config.DEFAULTS).items() if getattr(config, name, "") is None
    }
    if config.lora_rank and "rl_learning_rate" in chosen:
        chosen["rl_learning_rate"] = LORA_LEARNING_RATE
    if config.model is not None and "warmup_steps" in chosen:
        chosen["warmup_steps"] = 0  # also of another run's small model, which has warmed up
    resolved = dataclasses.replace(config, **chosen)
    if not config.smoke:
        return resolved
    smaller = {name: min(getattr(resolved, name), pair[kind]) for name, pair in SMOKE.items()}
    return dataclasses.replace(resolved, **smaller)
