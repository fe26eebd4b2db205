"""What a finished recipe shows and leaves: tables, sentences, curves.png, summary.json and the trained model."""

import time
from collections.abc import Sequence
from typing import Any

from jaxpg.models import hf, lora, num_parameters
from jaxpg.parallel import distributed
from jaxpg.recipe.recipe import Recipe
from jaxpg.rollout import policies
from jaxpg.run import folder, read, report

SHOWN = 10  # held-out problems in the table


def conclude(r: Recipe) -> None:
    """Evaluates the last state once more where that is due, saves the model and sums up the run."""
    params, evaluator = policies.acting(r.run.state.params), r.evaluator
    if not r.run.commits:  # a finished run was opened again: its last state was not evaluated
        evaluator(params)
    sampled = evaluator.sampled(params, samples=r.config.evaluate_samples) if r.config.evaluate_samples else {}
    merged = lora.merge(r.model.config, params) if "lora" in params else params
    hf.save(r.run.folder / "model", r.model.config, merged, r.tokenizer, overwrite=True)
    if r.is_primary:
        _sum_up(r, params, sampled)
    distributed.barrier("concluded")  # all know what the folder holds


def _sum_up(r: Recipe, params: dict, sampled: dict[str, float]) -> None:
    c, evaluator, console = r.config, r.evaluator, r.run.console
    phases = ("warmup", "rl", "warmup_check", "evaluation")
    warmup, rl, checks, evaluations = read.phases(r.run.folder, phases)
    held_out = {
        f"{name}_{when}": value
        for when, texts in (("before", evaluator.first), ("after", evaluator.last))
        for name, value in evaluator.measure(r.setup.held_out, texts).items()
    }
    seconds = {"warm-up": sum(row["seconds"] for row in warmup)} if warmup else {}
    seconds |= _seconds(rl)
    summary = {
        "name": r.setup.name,
        "seed": c.seed,
        "spoken": r.setup.spoken,
        **held_out,
        **sampled,
        "seconds": time.perf_counter() - r.run.started,
        "seconds_by_phase": seconds,
        "parameters": num_parameters(params),
        "warmup_steps": len(warmup),
        "rl_steps": len(rl),
        "dropped_prompts": r.setup.dropped,
    }
    sampled_rows = [row for row in rl if "completion_tokens" in row]  # some recipes draw nothing, e.g. DPO
    if sampled_rows:
        tokens = sum(row["completion_tokens"] for row in sampled_rows)
        summary["sampled_tokens_per_second"] = tokens / max(seconds["RL, sample"], 1e-9)
    folder.write_json(r.run.folder / "summary.json", summary)
    curves = {"warm-up": {"accuracy, training problems": read.columns(checks, "accuracy")}} if checks else {}
    measures = ("accuracy", *r.task.measures)
    curves["rewards only"] = {f"{name}, held out": read.columns(evaluations, name) for name in measures}
    if sampled_rows:
        curves["rewards only"] |= {"reward": read.columns(rl, "reward")}
    limits = (-0.02, 1.02) if not r.task.measures else None
    report.draw_curves(r.run.folder / "curves.png", curves, title=f"{r.setup.name}, seed {c.seed}", limits=limits)
    _print(r, summary, held_out, sampled_rows)
    console.print(
        f"More in {r.run.folder}: curves.png, metrics.jsonl, summary.json, model/. Another run: --run-dir elsewhere."
    )


def _seconds(rl: Sequence[dict]) -> dict[str, float]:
    """Seconds of the reinforcement learning by part of a step."""
    parts = sorted({name for row in rl for name in row if name.startswith("seconds_")})
    return {f"RL, {name.removeprefix('seconds_')}": sum(row.get(name, 0.0) for row in rl) for name in parts}


def _print(r: Recipe, summary: dict[str, Any], held_out: dict[str, float], rl: Sequence[dict]) -> None:
    """Prints the tables."""
    console, title = r.run.console, f"{r.setup.name}, seed {r.config.seed}"
    figures = []
    for when in ("before", "after"):
        low, high = held_out[f"accuracy_low_{when}"], held_out[f"accuracy_high_{when}"]
        figures.append(
            (f"held-out accuracy {when} RL", f"{held_out[f'accuracy_{when}']:.3f} ({low:.3f} to {high:.3f})")
        )
        figures += [
            (f"held-out {name.replace('_', ' ')} {when} RL", f"{held_out[f'{name}_{when}']:.3f}")
            for name in r.task.measures
        ]
    figures += [(name, f"{value:.3f}") for name, value in summary.items() if "@" in name]
    figures += [(f"seconds, {name}", f"{value:.1f}") for name, value in summary["seconds_by_phase"].items()]
    figures += [("seconds, this process in all", f"{summary['seconds']:.1f}")]
    if rl:
        figures += [("sampled tokens/s", f"{summary['sampled_tokens_per_second']:,.0f}")]
    console.print(report.table(title, ("", "value"), figures))
    before, after = r.evaluator.first, r.evaluator.last
    changed = [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    shown = (changed + [i for i in range(len(before)) if i not in set(changed)])[:SHOWN]
    problems = [r.setup.held_out[i] for i in shown]
    rows = [
        (report.shorten(str(p.prompt)), before[i], after[i], report.shorten(str(p.answer)))
        for i, p in zip(shown, problems, strict=True)
    ]
    console.print(report.table("Held-out problems", ("prompt", "before", "after", "answer"), rows))
    for sentence in report.in_words(rl, group_size=r.config.group_size) if rl else []:
        console.print(f"• {sentence}")
