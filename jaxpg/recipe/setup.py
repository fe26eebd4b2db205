"""From options to a task, a model and their budgets: everything that is checked before any weights are read."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from transformers import PreTrainedTokenizerBase

from jaxpg import run
from jaxpg.data import characters, fitting
from jaxpg.models import Config as ModelConfig
from jaxpg.models import Model, hf, lora
from jaxpg.models.hf import names
from jaxpg.models.hf.load import check, open_source, read_config
from jaxpg.parallel import sharding
from jaxpg.recipe.options import Config, resolve
from jaxpg.run import compilation_cache, ranges
from jaxpg.sampling import Sampling, filters
from jaxpg.tasks.find import find
from jaxpg.tasks.task import Task, render

DEMONSTRATIONS, PROMPTS, VALIDATION = range(3)  # streams of problems
SMALL_EVALUATION_BATCH, EVALUATION_BATCH = 256, 32  # held-out problems at a time


@dataclasses.dataclass(frozen=True)
class Setup:
    """What was checked and built of a recipe's options."""

    name: str
    config: Config
    mesh: jax.sharding.Mesh
    sampler_mesh: jax.sharding.Mesh
    task: Task
    model: Model
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling  # shared by the sampler and the policy that is trained
    render: Callable[[Sequence[Any]], list[str]]  # problems -> prompts as text
    fitted: fitting.Fitted  # training and held-out problems whose prompts fit
    prompt_length: int  # tokens
    max_new_tokens: int
    spoken: bool  # are questions put in words, to a checkpoint?
    evaluation_batch: int
    checkpoint: Path | str | None  # where weights come from; None: they are drawn

    def params(self) -> dict:
        """Reads or draws the parameters, sharded over the mesh, with adapters where --lora-rank asks for them."""
        c = self.config
        if self.checkpoint is None:
            places = sharding.shardings(self.mesh, self.shapes)
            params = jax.jit(lambda: self.model.init(jax.random.key(c.seed)), out_shardings=places)()
        else:
            params = hf.load(self.checkpoint, mesh=self.mesh).params  # the configuration was read before
        if not c.lora_rank:
            return params
        params = lora.attach(params, lora.init(jax.random.key(c.seed), self.model.config, rank=c.lora_rank))
        return jax.device_put(params, sharding.shardings(self.mesh, params))

    def stream(self, purpose: int) -> int:
        """Numbers the streams of problems: demonstrations, prompts and validation differ for each seed."""
        return 3 * self.config.seed + purpose

    def problems(self, seed: int, start: int, count: int) -> Sequence[Any]:
        """Training problems start … start + count − 1 of the stream `seed`, whose prompts fit."""
        return self.fitted.problems(seed, start, count)

    @property
    def held_out(self) -> Sequence[Any]:
        """Problems that no phase trains on."""
        return self.fitted.held_out

    @property
    def dropped(self) -> int:
        """Prompts that did not fit, among those that were looked at so far."""
        return self.fitted.dropped

    @cached_property
    def shapes(self) -> dict:
        """Shapes of the model's own parameters."""
        return jax.eval_shape(self.model.init, jax.random.key(0))


def prepare(config: Config, *, name: str) -> Setup:
    """Checks every option of a recipe before anything is loaded, compiled or written.

    Args:
      config: the options.
      name: of the recipe, for its title and its folder.

    Raises:
      ValueError: naming the option that is wrong, its value and the remedy.
    """
    ranges.check(config)
    checkpoint, spoken = _checkpoint(config)
    c = resolve(config, spoken=spoken)
    if c.smoke:  # most of a short run would be compilation
        jax.config.update("jax_disable_most_optimizations", True)
    if c.compilation_cache:
        compilation_cache.enable()
    _check_group(c)
    task = find(c, spoken=spoken)
    _check_needs(task, c)
    mesh = sharding.make_mesh(c.mesh)
    model_config, tokenizer = _describe(c, task, checkpoint)
    rendered = _renderer(c, task, tokenizer)
    fitted = fitting.fit(task, rendered, tokenizer, length=c.prompt_length, held_out=c.held_out, policy=c.long_prompts)
    budget = c.max_new_tokens or task.max_new_tokens
    # The folder of a run has the budgets, though they were not given: other data may need others.
    c = run.check(dataclasses.replace(c, prompt_length=fitted.length, max_new_tokens=budget), name=name)
    model_config = _with_room(model_config, fitted.length + budget, fixed=checkpoint is not None)
    setup = Setup(
        name=name,
        config=c,
        mesh=mesh,
        sampler_mesh=sharding.sampler_mesh(mesh, c.sampler_mesh),
        task=task,
        model=Model(model_config),
        tokenizer=tokenizer,
        sampling=Sampling.for_model(model_config, tokenizer, temperature=c.temperature, filters=_filters(c)),
        render=rendered,
        fitted=fitted,
        prompt_length=fitted.length,
        max_new_tokens=budget,
        spoken=spoken,
        evaluation_batch=min(c.held_out, EVALUATION_BATCH if spoken else SMALL_EVALUATION_BATCH),
        checkpoint=checkpoint,
    )
    _check_meshes(setup)
    return setup


def _checkpoint(c: Config) -> tuple[Path | str | None, bool]:
    """Where the weights come from, and whether questions are put in words.

    The folder of another run stands for the model that it saved, and for the form of question that this one was
    trained on.
    """
    if c.model is None:
        return None, False
    summary = Path(c.model) / "summary.json"
    if summary.exists() and (Path(c.model) / "model").is_dir():
        return Path(c.model) / "model", json.loads(summary.read_text())["spoken"]
    return c.model, True


def _describe(c: Config, task: Task, checkpoint) -> tuple[ModelConfig, PreTrainedTokenizerBase]:
    """The model's configuration and its tokenizer, without weights."""
    compute = {"compute_dtype": c.compute_dtype, "attention": c.attention, "remat": c.remat}
    if checkpoint is None:
        tokenizer = characters(task.alphabet)
        return small_model(len(tokenizer), max_length=1, smoke=c.smoke, **compute), tokenizer
    source = open_source(checkpoint)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ValueError(f"--model={c.model} has no tokenizer: choose a checkpoint that comes with one")
    config = dataclasses.replace(read_config(source, name=str(c.model)), **compute)
    check(names.tensors(config), source, name=str(c.model), tied=config.tie_embeddings)
    return config, tokenizer


def small_model(vocab_size: int, *, max_length: int, smoke: bool = False, **more) -> ModelConfig:
    """Describes a model that learns sums within minutes on a CPU, half as deep where it need not learn anything.

    Args:
      vocab_size: of its tokenizer.
      max_length: tokens of a prompt and its completion.
      smoke: to see that everything runs.
      **more: fields of `models.Config`.
    """
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        num_layers=1 if smoke else 2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_size=192,
        tie_embeddings=False,  # what a digit means in a prompt and in an answer are two things
        max_length=max_length,
        **more,
    )


def _with_room(config: ModelConfig, needed: int, *, fixed: bool) -> ModelConfig:
    """The configuration with the context that prompts and completions need."""
    if not fixed:
        return dataclasses.replace(config, max_length=needed)
    if needed > config.max_length:
        raise ValueError(
            f"prompts and completions need {needed} tokens, the model's context has {config.max_length}: lower "
            "--prompt-length or --max-new-tokens"
        )
    return config


def _renderer(c: Config, task: Task, tokenizer) -> Callable[[Sequence[Any]], list[str]]:
    """Builds problems -> their prompts as text, in the model's chat format where the task is for one that speaks."""
    if task.chat and tokenizer.chat_template is None:
        raise ValueError(
            f"--task={c.task} asks in words, and the tokenizer of --model={c.model} has no chat template: choose an "
            "instruction-tuned checkpoint"
        )
    return lambda problems: render(task, tokenizer, problems, system=c.system)


def _filters(c: Config) -> tuple[filters.Filter, ...]:
    """The filters of the sampler that the options ask for."""
    asked = ((c.top_k, filters.TopK, 0), (c.top_p, filters.TopP, 1.0), (c.min_p, filters.MinP, 0.0))
    return tuple(make(value) for value, make, off in asked if value != off)


def _check_group(c: Config) -> None:
    if c.batch_size % c.group_size:
        raise ValueError(f"--group-size={c.group_size} does not divide --batch-size={c.batch_size}: choose a divisor")


def _check_needs(task: Task, c: Config) -> None:
    for name in c.NEEDS:
        if not getattr(task, name):
            raise ValueError(f"--task={c.task} has no {name.replace('_', ' ')}, which this recipe learns from")
    if c.warmup_steps and task.demonstrate is None:
        raise ValueError(f"--task={c.task} has no demonstrations to warm up on: pass --warmup-steps 0")


def _check_meshes(setup: Setup) -> None:
    """Raises ValueError where a mesh does not divide the model, or rows cannot be spread over it."""
    c = setup.config
    parts = {
        "--batch-size / --group-size prompts": c.batch_size // c.group_size,
        "--batch-size / --minibatches / --num-microbatches rows": c.batch_size / c.minibatches / c.num_microbatches,
        "evaluation rows": setup.evaluation_batch,
    }
    if c.warmup_steps:
        parts["--warmup-batch-size rows"] = c.warmup_batch_size
    meshes = {f"--mesh={c.mesh}": setup.mesh, f"--sampler-mesh={c.sampler_mesh}": setup.sampler_mesh}
    for option, mesh in meshes.items():
        shards = sharding.row_shards(mesh)
        for name, size in parts.items():
            if size % shards:
                raise ValueError(f"{size:g} {name} cannot be spread over data*fsdp={shards} of {option}: change one")
        sharding.shardings(mesh, setup.shapes)  # does the mesh divide the model?
