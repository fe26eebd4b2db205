"""Evaluates a model on held-out problems: greedy accuracy with its interval, pass@k, majority@k, by difficulty.

    python tools/evaluate_model.py --model models/smollm2-135m --task arithmetic --level 2 --count 128 --samples 8
    python tools/evaluate_model.py --model runs/grpo                    # a run: its own model and its own task
    python tools/evaluate_model.py --model runs/grpo --task countdown   # or another task

One call draws the most likely completion of each problem and `--samples` others.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxpg import recipe
from jaxpg.parallel import sharding
from jaxpg.recipe.evaluator import Evaluator
from jaxpg.rollout import evaluate
from jaxpg.run import cli, folder, ranges, read, report
from jaxpg.run.ranges import Positive, PositiveFloat
from jaxpg.tasks import Options

TASK = tuple(field.name for field in dataclasses.fields(Options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Options of the evaluation."""

    model: str  # the folder of a run, a directory in Hugging Face's layout, a GGUF file, or a name on the hub
    task: str | None = None  # default that of the run, or arithmetic
    count: Positive = 128  # held-out problems
    samples: Positive = 8  # completions a problem, besides the most likely one
    k: tuple[Positive, ...] = (1, 4, 8)  # of pass@k
    temperature: PositiveFloat = 1.0
    seed: int = 0
    prompt_length: Positive | None = None  # tokens that a prompt may have; default the longest one
    max_new_tokens: Positive | None = None  # tokens that a completion may have; default what the task needs
    json: Path | None = None  # where to write the numbers


def prepare(config: Config) -> tuple[Config, recipe.Setup]:
    """Checks the options before any weights are read."""
    c = config
    ranges.check(c)
    if not c.k or max(c.k) > c.samples:
        raise ValueError(f"--k={' '.join(map(str, c.k))}: must lie between 1 and --samples={c.samples}")
    if c.json is not None:
        folder.make_folder("--json", c.json.parent)
    c = _with_task_of_run(c)
    asked = {name: getattr(c, name) for name in (*TASK, "temperature", "seed", "prompt_length", "max_new_tokens")}
    batch = sharding.row_shards(sharding.make_mesh())  # one prompt a device: nothing is trained
    options = recipe.Config(
        **asked, model=c.model, held_out=c.count, batch_size=batch, group_size=1, minibatches=1, num_microbatches=1,
        warmup_steps=0, rl_steps=0, dry_run=True,
    )  # fmt: skip
    return c, recipe.prepare(options, name=f"{c.model} on {c.task}")


def _with_task_of_run(c: Config) -> Config:
    """Takes the task from the folder of a run, where none was named."""
    if c.task is not None:
        return c
    path = Path(c.model)
    if not (path / "config.json").exists() or not (path / "summary.json").exists():
        return dataclasses.replace(c, task="arithmetic")
    own = {name: value for name, value in read.config(path).items() if name in TASK}
    tuples = {name: tuple(value) for name, value in own.items() if isinstance(value, list)}
    paths = {"gsm8k": own.get("gsm8k") and Path(own["gsm8k"])}
    return dataclasses.replace(c, **own | tuples | paths)


def run(prepared: tuple[Config, recipe.Setup]) -> None:
    """Draws, scores, and prints a table."""
    c, setup = prepared
    evaluator, params, problems = Evaluator(setup), setup.params(), setup.held_out
    greedy = evaluator.scored(problems, [[text] for text in evaluator.complete(params, problems)])
    replies = evaluator.replies(params, samples=c.samples)
    right = evaluator.scored(problems, replies) >= 1
    votes = [[setup.task.vote(text) for text in texts] for texts in replies]
    scores = {"greedy": greedy[:, 0]}
    scores |= {f"pass@{k}": evaluate.pass_at_k(c.samples, right.sum(1), k=k) for k in c.k}
    scores[f"majority@{c.samples}"] = evaluate.majority_at_k(votes, right)
    levels = [getattr(problem, "level", "all") for problem in problems]
    by_level = {name: evaluate.by_group(values, levels) for name, values in scores.items()}
    rows = [(name, _with_interval(x), *(f"{y:.3f}" for y in by_level[name].values())) for name, x in scores.items()]
    groups = [f"level {group}" for group in next(iter(by_level.values()))]
    title = f"{c.model} on {len(problems)} held-out problems of {c.task}"
    Console().print(report.table(title, ("", "all (95 %)", *groups), rows))
    if c.json is not None:
        told = {name: float(values.mean()) for name, values in scores.items()}
        intervals = {name: evaluate.interval(value, len(problems)) for name, value in told.items()}
        folder.write_json(c.json, {"all": told, "interval": intervals, "by_level": _plain(by_level)})


def _with_interval(values: np.ndarray) -> str:
    """A mean with its 95 % interval over problems."""
    low, high = evaluate.interval(float(values.mean()), len(values))
    return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"


def _plain(by_level: dict) -> dict:
    return json.loads(json.dumps({name: {str(k): v for k, v in x.items()} for name, x in by_level.items()}))


if __name__ == "__main__":
    cli.main(Config, prepare, run, description=__doc__)
