"""Options that all steps share, and what is checked before a step begins: its options and its predecessors."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
from transformers import PreTrainedTokenizerBase

from jaxpg import ladder
from jaxpg.data import characters, encode_prompts
from jaxpg.estimators import checks
from jaxpg.ladder.config import EXECUTION, Execution, meshes
from jaxpg.models import Model, hf
from jaxpg.parallel import sharding
from jaxpg.run import folder as run_folder
from jaxpg.tasks import taste

NOT_IDENTITY = (*EXECUTION, "run_dir", "name")  # what does not tell one run of a step from another
SMOKE = {"steps": 2, "batch_size": 32, "evaluation_samples": 64}


@dataclasses.dataclass(frozen=True)
class Config(Execution):
    """Options of every step."""

    run_dir: Path = Path("runs/rlhf")  # the folder that all steps share
    name: str | None = None  # folder in it, default that of the step: another one keeps two runs of a step apart
    model: str | None = None  # a directory, a name on the hub or a .gguf file to start from; default a tiny model
    seed: int = 0
    steps: int = 300
    batch_size: int = 256  # rows, pairs or completions a step
    learning_rate: float = 1e-3
    temperature: float = 1.0  # of the sampler, hence of the policy that is trained
    evaluation_samples: int = 1024  # completions that the true preference of a policy is averaged over
    checkpoint_every: int = 100  # steps
    smoke: bool = False  # two small steps, to see that everything runs


class Run(NamedTuple):
    """What `prepare` checked and built; the functions of `ladder` take it for theirs."""

    name: str  # of the step
    config: Any  # a Config
    folder: Path
    mesh: jax.sharding.Mesh
    model: Model
    params: dict  # what the step starts from
    tokenizer: PreTrainedTokenizerBase
    task: ladder.Task
    prompt_length: int
    driven: bool = False  # completions are short: sample as one program

    @property
    def sampler_mesh(self) -> jax.sharding.Mesh:
        """Where completions are drawn."""
        return sharding.sampler_mesh(self.mesh, self.config.sampler_mesh)

    @property
    def max_new_tokens(self) -> int:
        """Tokens a completion may have."""
        return self.task.max_new_tokens


def prepare(config: Config, *, step: str, after: tuple[str, ...] = (), smoke: dict | None = None) -> Run:
    """Checks every option before anything is compiled or written, reads the model and opens the folder of the step.

    Args:
      config: the options.
      step: its name.
      after: the steps whose results it reads, the first of them that whose model it starts from.
      smoke: further options that --smoke replaces.

    Raises:
      ValueError: naming the option that is wrong, its value and the remedy; for a step of `after` that is not done, how
        to do it.
    """
    c = dataclasses.replace(config, **(SMOKE | (smoke or {}))) if config.smoke else config
    if c.smoke:  # most of a short run would be compilation
        jax.config.update("jax_disable_most_optimizations", True)
    _check_sizes(c)
    mesh = sharding.make_mesh(c.mesh)
    for name in after:
        _check_done(c, name)
    if after:
        loaded = hf.load(c.run_dir / after[0] / "model", mesh=mesh)
    else:
        loaded = _tiny(c, mesh) if c.model is None else hf.load(c.model, mesh=mesh)
    config, params, tokenizer = loaded
    sharding.shardings(sharding.sampler_mesh(mesh, c.sampler_mesh), params)  # does it divide the model?
    if tokenizer is None or tokenizer.eos_token_id is None:
        raise ValueError(f"--model={c.model} has no tokenizer with a stop token: choose a checkpoint with one")
    prompt_length, completion_length = _lengths(tokenizer)
    task = ladder.Task(taste.problems, taste.every, taste.utility, max_new_tokens=completion_length)
    if prompt_length + completion_length > config.max_length:
        raise ValueError(f"--model={c.model} has max_length={config.max_length}: too short for sums and their answers")
    folder = c.run_dir / (c.name or step)
    run_folder.open_run(folder, run_folder.config_dict(c, without=NOT_IDENTITY), resume=c.resume)
    return Run(step, c, folder, mesh, Model(config), params, tokenizer, task, prompt_length)


def _tiny(c: Config, mesh) -> hf.Loaded:
    tokenizer = characters(taste.ALPHABET)
    stop = (tokenizer.eos_token_id,)
    config = ladder.small_model(len(tokenizer), max_length=64, smoke=c.smoke, stop_tokens=stop)
    model, key = Model(config), jax.random.key(c.seed)
    places = sharding.shardings(mesh, jax.eval_shape(model.init, key))
    return hf.Loaded(config, jax.jit(model.init, out_shardings=places)(key), tokenizer)


def _lengths(tokenizer) -> tuple[int, int]:
    """Tokens of the longest prompt, and of the longest completion with its stop token."""
    problems = taste.every(100)
    prompts, answers = [problem.prompt for problem in problems], {problem.answer for problem in problems}
    completions = [answer + marks * "!" for answer in answers for marks in range(taste.MOST + 1)]
    ids = [tokenizer(texts, add_special_tokens=False)["input_ids"] for texts in (prompts, completions)]
    longest_prompt, longest_completion = (max(map(len, texts)) for texts in ids)
    # Does it know every character?
    encode_prompts(tokenizer, prompts + completions, length=max(longest_prompt, longest_completion))
    return longest_prompt, longest_completion + 1


def _check_done(c: Config, name: str) -> None:
    """Raises ValueError where a predecessor is not done, or began with another model."""
    folder = c.run_dir / name
    if not ladder.is_finished(folder):
        what = "has not finished" if folder.exists() else "is missing"
        more = " --resume" if folder.exists() else ""
        raise ValueError(f"{folder} {what}: run experiments/rlhf/{name}.py --run-dir {c.run_dir}{more} first")
    there = ladder.read_config(folder)["model"]
    if c.model is not None and c.model != there:
        raise ValueError(f"--model={c.model}, but {folder} began with {there}: give the same, or another --run-dir")


def _check_sizes(c: Config) -> None:
    """Raises ValueError where a size is no size, or cannot be spread over the devices."""
    positive = ("steps", "batch_size", "evaluation_samples", "num_microbatches", "checkpoint_every", "keep")
    checks.options_at_least(c, 1, *positive)
    checks.options_at_least(c, 0, "max_nonfinite")
    checks.positive("--temperature", c.temperature)
    for option, mesh in meshes(c).items():
        shards = sharding.row_shards(mesh)
        for name in ("batch_size", "evaluation_samples"):
            if getattr(c, name) % (shards * c.num_microbatches):
                raise ValueError(
                    f"--{name.replace('_', '-')}={getattr(c, name)} cannot be spread over data*fsdp={shards} of "
                    f"{option} in --num-microbatches={c.num_microbatches} parts: choose a multiple of "
                    f"{shards * c.num_microbatches}"
                )
