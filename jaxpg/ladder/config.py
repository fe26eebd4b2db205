"""Options that all rungs share, the task, and what is checked before anything is compiled or written."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
from transformers import PreTrainedTokenizerBase

from jaxpg.data import characters, encode_prompts
from jaxpg.estimators import checks
from jaxpg.models import Config as ModelConfig
from jaxpg.models import Model
from jaxpg.parallel import distributed, sharding
from jaxpg.run import folder as run_folder
from jaxpg.tasks import arithmetic, wordy

EVALUATION_BATCH = 256
FAMILIES = {"arithmetic": arithmetic, "wordy": wordy}

# What --smoke replaces: a few small steps, to see that everything runs.
SMOKE = {
    "batch_size": 64,
    "group_size": 4,
    "num_microbatches": 1,
    "rl_steps": 2,
    "warmup_steps": 2,
    "warmup_batch_size": 32,
    "held_out": 16,
    "evaluate_every": 2,
}


@dataclasses.dataclass(frozen=True)
class Execution(distributed.Options):
    """Where and how a run is done; no option of these changes what comes of one that ends."""

    mesh: str = "data=-1"  # e.g. data=2,fsdp=2,tensor=2
    sampler_mesh: str | None = None  # of the same devices; default --mesh with fsdp folded into data
    num_microbatches: int = 1  # parts the rows of an update are cut into to save memory
    resume: bool = False  # go on with the run that the folder holds, if there is one
    checkpoint_every: int = 25  # steps
    keep: int = 2  # of the newest checkpoints
    max_nonfinite: int = 4  # steps in a row that may skip an update whose loss or gradient is not finite


EXECUTION = tuple(field.name for field in dataclasses.fields(Execution))
# What else does not tell one run from another.
NOT_IDENTITY = (
    *EXECUTION,
    *("warm_start", "run_dir", "stop_after", "keep_best", "scorer_retries", "scorer_failures"),
)


@dataclasses.dataclass(frozen=True)
class Common(Execution):
    """Options of every run that learns from rewards."""

    seed: int = 0
    batch_size: int = 1024  # completions a step
    group_size: int = 8  # completions a prompt
    rl_steps: int = 400
    rl_learning_rate: float = 7e-4
    temperature: float = 1.0  # of the sampler, hence of the policy that is trained
    epochs: int = 1  # passes over each rollout
    minibatches: int = 2  # updates a pass
    held_out: int = 512  # problems of the evaluation, which no phase trains on
    evaluate_every: int = 25  # steps
    run_dir: Path | None = None  # default runs/<name of the experiment>
    keep_best: int = 1  # of those whose held-out accuracy was highest, besides; where both were done at that step
    scorer_retries: int = 1  # of a scorer that fails
    scorer_failures: Literal["stop", "skip"] = "stop"  # skip: the sample counts as not scored, and is counted
    stop_after: int | None = None  # end this process abruptly after so many steps; --resume goes on
    smoke: bool = False  # a few small steps, to see that everything runs


@dataclasses.dataclass(frozen=True)
class Config(Common):
    """Options of every rung: a small model, sums, a warm-up."""

    task: Literal["arithmetic", "wordy"] = "arithmetic"  # wordy: answers may trail off
    level: int = 2  # difficulty of the problems, 1 to 5
    levels: tuple[int, ...] = ()  # several difficulties in turn, in place of --level
    spare: int = 0  # tokens a completion may have beyond the longest right one
    warmup_steps: int = 600  # at most; the warm-up ends when the model is mediocre
    warmup_batch_size: int = 256
    warmup_learning_rate: float = 2e-3
    warmup_accuracy: float = 0.4  # what counts as mediocre, on training problems
    warm_start: Path | None = None  # the folder of another run, whose warm-up of the same options is taken over


class Task(NamedTuple):
    """Problems, how they are put to the model, and what a completion of one is worth."""

    problems: Callable[[int, int, int], Sequence[Any]]  # (seed, start, count) -> problems to train on
    held_out: Callable[[int], Sequence[Any]]  # count -> problems that no phase trains on
    score: Callable[[Any, str], float]  # (problem, completion) -> reward
    max_new_tokens: int
    demonstrate: Callable[[Any], str] = lambda problem: problem.answer  # what the warm-up learns from
    render: Callable[[Sequence[Any]], list[str]] = lambda problems: [problem.prompt for problem in problems]
    measures: Mapping[str, Callable[[Any, str], float]] = {}  # what evaluations tell besides the mean score


class Run(NamedTuple):
    """What `prepare` checked and built."""

    name: str
    config: Any  # a Common
    mesh: jax.sharding.Mesh
    model: Model
    tokenizer: PreTrainedTokenizerBase
    task: Task
    held_out: Sequence[Any]
    prompt_length: int
    evaluation_batch: int = EVALUATION_BATCH
    driven: bool = False  # sample by `generate`, driven from the host, which pays off where completions are long

    @property
    def sampler_mesh(self) -> jax.sharding.Mesh:
        """Where completions are drawn."""
        return sharding.sampler_mesh(self.mesh, self.config.sampler_mesh)

    @property
    def max_new_tokens(self) -> int:
        """Tokens a completion may have."""
        return self.task.max_new_tokens


def leveled_task(levels: Sequence[int], *, family: ModuleType = arithmetic, spare: int = 0, measures=()) -> Task:
    """Problems of these levels in turn; the budget is the longest answer, a stop token and some `spare` tokens.

    Args:
      levels: of the family.
      family: a module with problem, held_out_set, score and longest_answer, as `tasks.arithmetic` and `tasks.steps`.
      spare: tokens.
      measures: see `Task`.

    Raises:
      ValueError: for a level that the family lacks, no level at all, or a negative `spare`.
    """
    if not levels:
        raise ValueError("--levels is empty: name at least one")
    checks.at_least("--spare", spare, 0)

    def problems(seed: int, start: int, count: int):
        n = len(levels)
        return [family.problem(seed, i // n, level=levels[i % n]) for i in range(start, start + count)]

    def held_out(count: int):
        sets = [family.held_out_set(-(-count // len(levels)), level=level) for level in levels]
        return [problem for together in zip(*sets, strict=True) for problem in together][:count]

    return Task(
        problems=problems,
        held_out=held_out,
        score=lambda problem, text: family.score(problem, text),  # looked up late, so that it can be replaced
        max_new_tokens=max(len(family.longest_answer(level)) for level in levels) + 1 + spare,
        demonstrate=lambda problem: getattr(problem, "demonstration", problem.answer),
        measures=dict(measures),
    )


def prepare(config: Config, *, name: str, family: ModuleType | None = None, measures=()) -> Run:
    """Checks every option of a rung before anything is compiled or written, and opens the folder of its run.

    Args:
      config: the options.
      name: of the experiment, for its title and its folder.
      family: whose problems they are, in place of --task; see `leveled_task`, it has ALPHABET and longest_prompt too.
      measures: what evaluations tell besides accuracy, see `Task`.

    Raises:
      ValueError: naming the option that is wrong, its value and the remedy.
    """
    c = dataclasses.replace(config, **SMOKE) if config.smoke else config
    levels, family = c.levels or (c.level,), family or FAMILIES[c.task]
    task = leveled_task(levels, family=family, spare=c.spare, measures=measures)
    tokenizer = characters(family.ALPHABET)
    prompt_length = max(len(family.longest_prompt(level)) for level in levels)
    model = Model(small_model(len(tokenizer), max_length=prompt_length + task.max_new_tokens, smoke=c.smoke))
    return open_run(c, name=name, model=model, tokenizer=tokenizer, task=task, prompt_length=prompt_length)


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


def open_run(
    config: Common,
    *,
    name: str,
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    prompt_length: int,
    evaluation_batch: int = EVALUATION_BATCH,
    driven: bool = False,
) -> Run:
    """Checks the options that all runs share, and opens the folder: of a model and a task of one's own.

    Args:
      config: the options.
      name: of the experiment.
      model: what is trained.
      tokenizer: its own.
      task: what it is asked.
      prompt_length: room for a prompt, in tokens.
      evaluation_batch: held-out problems at a time.
      driven: sample by `generate`.

    Raises:
      ValueError: naming the option that is wrong, its value and the remedy.
    """
    c = config
    if c.smoke:  # most of a short run would be compilation
        jax.config.update("jax_disable_most_optimizations", True)
    c = c if c.run_dir else dataclasses.replace(c, run_dir=Path("runs") / name)
    _check_sizes(c)
    mesh = sharding.make_mesh(c.mesh)
    held_out = task.held_out(c.held_out)
    run = Run(name, c, mesh, model, tokenizer, task, held_out, prompt_length, evaluation_batch, driven)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    for option, place in meshes(c).items():
        _check_rows(run, option, place)
        sharding.shardings(place, shapes)  # does the mesh divide the model?
    encode_prompts(tokenizer, task.render(held_out), length=prompt_length)  # do they fit?
    run_folder.open_run(c.run_dir, run_folder.config_dict(c, without=NOT_IDENTITY), resume=c.resume)
    return run


def meshes(c: Execution) -> dict[str, jax.sharding.Mesh]:
    """The meshes of the update and of the sampler, by the option that each is from."""
    mesh = sharding.make_mesh(c.mesh)
    return {f"--mesh={c.mesh}": mesh, f"--sampler-mesh={c.sampler_mesh}": sharding.sampler_mesh(mesh, c.sampler_mesh)}


def _check_sizes(c: Common) -> None:
    """Raises ValueError where a size is no size, or the group does not divide the batch."""
    positive = ("batch_size", "group_size", "minibatches", "num_microbatches", "epochs", "held_out", "rl_steps")
    checks.options_at_least(c, 1, *positive, "evaluate_every", "checkpoint_every", "keep")
    checks.options_at_least(c, 0, "keep_best", "max_nonfinite", "scorer_retries")
    if c.temperature <= 0:
        raise ValueError(f"--temperature={c.temperature}: must be positive, or all samples of a prompt are the same")
    if c.batch_size % c.group_size:
        raise ValueError(f"--group-size={c.group_size} does not divide --batch-size={c.batch_size}: choose a divisor")


def _check_rows(run: Run, option: str, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError where rows cannot be spread over the mesh that the option names."""
    c, shards = run.config, sharding.row_shards(mesh)
    parts = {
        "--batch-size / --group-size prompts": c.batch_size // c.group_size,
        "--batch-size / --minibatches / --num-microbatches rows": c.batch_size / c.minibatches / c.num_microbatches,
        "evaluation rows": run.evaluation_batch,
    }
    if isinstance(c, Config):
        parts["--warmup-batch-size rows"] = c.warmup_batch_size
    for name, size in parts.items():
        if size % shards:
            raise ValueError(f"{size:g} {name} cannot be spread over data*fsdp={shards} of {option}: change one")
