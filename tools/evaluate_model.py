"""Evaluates a checkpoint on held-out problems: greedy accuracy, pass@k, majority@k, by difficulty.

    python tools/evaluate_model.py --model models/smollm2-135m --task arithmetic --level 2 --count 128 --samples 8
    python tools/evaluate_model.py --model runs/grpo_real/model --task gsm8k --max-new-tokens 400 --prompt-length 256

One call draws the most likely reply and `--samples` others of each problem, from the same prefill.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from jaxpg.data import decode_completions, encode_prompts
from jaxpg.estimators import checks
from jaxpg.models import Model, hf
from jaxpg.rollout import evaluate
from jaxpg.run import cli, report
from jaxpg.run import folder as run_folder
from jaxpg.sampling import generate
from jaxpg.sampling import prepare as lay_out
from jaxpg.tasks import catalog, chat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Options of the evaluation."""

    model: str  # a directory in Hugging Face's layout, a GGUF file, or a name on the hub
    task: str = "arithmetic"  # arithmetic, countdown, gsm8k, reasoning_gym:<name>
    level: int = 2  # of arithmetic and countdown
    data: Path | None = None  # folder with GSM8K's train.jsonl and test.jsonl; default the hub
    count: int = 128  # held-out problems
    samples: int = 8  # replies a problem, besides the most likely one
    k: tuple[int, ...] = (1, 4, 8)  # of pass@k
    temperature: float = 1.0
    seed: int = 0
    batch: int = 16  # problems at a time
    prompt_length: int = 64  # room for a prompt, in tokens
    max_new_tokens: int = 14
    system: str | None = None  # the system's message, in place of the template's own
    json: Path | None = None  # where to write the numbers


def prepare(config: Config):
    """Checks the options and loads the model."""
    c = config
    checks.options_at_least(c, 1, "count", "samples", "batch", "max_new_tokens")
    if not c.k or not all(1 <= k <= c.samples for k in c.k):
        raise ValueError(f"--k={' '.join(map(str, c.k))}: must lie between 1 and --samples={c.samples}")
    if not c.temperature > 0:
        raise ValueError(f"--temperature={c.temperature}: must be positive, or all samples are the same")
    if c.json is not None:
        run_folder.make_folder("--json", c.json.parent)
    questions = catalog.by_name(c.task, level=c.level, source=c.data)
    problems = questions.held_out(c.count)
    return c, questions, problems, hf.load(c.model)


def run(prepared) -> None:
    """Draws, scores, and prints a table."""
    c, questions, problems, (model_config, params, tokenizer) = prepared
    greedy, replies = draw(c, questions, problems, Model(model_config), lay_out(params), tokenizer)
    right = np.array([[questions.score(p, text) >= 1 for text in r] for p, r in zip(problems, replies, strict=True)])
    votes = [[questions.vote(text) for text in texts] for texts in replies]
    scores = {"greedy": np.array([questions.score(p, text) for p, text in zip(problems, greedy, strict=True)])}
    scores |= {f"pass@{k}": evaluate.pass_at_k(c.samples, right.sum(1), k=k) for k in c.k}
    scores[f"majority@{c.samples}"] = evaluate.majority_at_k(votes, right)
    levels = [getattr(problem, "level", "all") for problem in problems]
    by_level = {name: evaluate.by_group(values, levels) for name, values in scores.items()}
    rows = [
        (name, f"{values.mean():.3f}", *(f"{x:.3f}" for x in by_level[name].values()))
        for name, values in scores.items()
    ]
    groups = [f"level {group}" for group in next(iter(by_level.values()))]
    title = f"{c.model} on {c.count} held-out problems of {c.task}"
    Console().print(report.table(title, ("", "all", *groups), rows))
    if c.json is not None:
        told = {name: float(values.mean()) for name, values in scores.items()}
        c.json.write_text(json.dumps({"all": told, "by_level": by_level}, indent=2, default=str) + "\n")


def draw(c: Config, questions, problems, model: Model, params, tokenizer) -> tuple[list[str], list[list[str]]]:
    """The most likely reply to each problem, and the drawn ones."""
    greedy, replies = [], []
    for start in range(0, len(problems), c.batch):
        part = list(problems[start : start + c.batch])
        filled = (part * c.batch)[: c.batch]  # the last batch too, so that no new shape is compiled
        texts = chat.render(tokenizer, [questions.ask(problem) for problem in filled], system=c.system)
        drawn, likely = generate(
            params,
            *encode_prompts(tokenizer, texts, length=c.prompt_length),
            jax.random.fold_in(jax.random.key(c.seed), start),
            model=model,
            max_new_tokens=c.max_new_tokens,
            stop_tokens=(tokenizer.eos_token_id,),
            samples_per_prompt=c.samples,
            temperature=c.temperature,
            greedy=True,
        )
        greedy += decode_completions(tokenizer, likely)[: len(part)]
        texts = decode_completions(tokenizer, drawn)
        replies += [texts[i * c.samples : (i + 1) * c.samples] for i in range(len(part))]
    return greedy, replies


if __name__ == "__main__":
    cli.main(Config, prepare, run, description=__doc__)
