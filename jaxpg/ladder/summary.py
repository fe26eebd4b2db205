"""What a finished run shows and leaves: tables, sentences, curves.png, summary.json."""

import jax

from jaxpg import evaluate, metrics, report, run_folder
from jaxpg.ladder.session import Session
from jaxpg.models import num_parameters


def conclude(session: Session, before: list[str], after: list[str], *, seconds: float) -> None:
    """Sums up a run from its metrics, and from the held-out completions before and after."""
    run, c, console = session.run, session.run.config, session.console
    rows = metrics.read_jsonl(c.run_dir / "metrics.jsonl")
    warmup, rl, checks, evaluations = (
        [row for row in rows if row["phase"] == phase] for phase in ("warmup", "rl", "warmup_check", "evaluation")
    )
    by_phase = {"warm-up": sum(row["seconds_update"] for row in warmup)} if warmup else {}
    by_phase |= {f"RL, {name}": sum(row[f"seconds_{name}"] for row in rl) for name in ("sample", "score", "update")}
    found = {
        "name": run.name,
        "seed": c.seed,
        "accuracy_before": evaluate.accuracy(run.task.score, run.held_out, before),
        "accuracy_after": evaluate.accuracy(run.task.score, run.held_out, after),
        "seconds": seconds,
        "seconds_by_phase": by_phase,
        "sampled_tokens_per_second": sum(row["completion_tokens"] for row in rl) / by_phase["RL, sample"],
        "parameters": num_parameters(jax.eval_shape(run.model.init, jax.random.key(0))),
        "warmup_steps": len(warmup),
        "rl_steps": len(rl),
    }
    run_folder.write_json(c.run_dir / "summary.json", found)
    curves = {"warm-up": {"accuracy, training problems": columns(checks, "accuracy")}} if checks else {}
    curves |= {
        "rewards only": {"reward": columns(rl, "reward"), "accuracy, held out": columns(evaluations, "accuracy")}
    }
    report.draw_curves(c.run_dir / "curves.png", curves, title=f"{run.name}, seed {c.seed}")

    figures = [("held-out accuracy before RL", f"{found['accuracy_before']:.3f}")]
    figures += [("held-out accuracy after RL", f"{found['accuracy_after']:.3f}")]
    figures += [(f"seconds, {name}", f"{value:.1f}") for name, value in by_phase.items()]
    figures += [("seconds, this process in all", f"{found['seconds']:.1f}")]
    figures += [("sampled tokens/s", f"{found['sampled_tokens_per_second']:,.0f}")]
    console.print(report.table(f"{run.name}, seed {c.seed}", ("", "value"), figures))
    changed = [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    shown = (changed + [i for i in range(len(before)) if i not in set(changed)])[:8]
    lines = [(shorten(run.held_out[i].prompt), before[i], after[i], run.held_out[i].answer) for i in shown]
    console.print(report.table("Held-out problems", ("prompt", "before", "after", "answer"), lines))
    for sentence in report.in_words(rl):
        console.print(f"• {sentence}")
    console.print(f"More in {c.run_dir}: curves.png, metrics.jsonl, summary.json. Another run: --run-dir elsewhere.")


def shorten(text: str, most: int = 300) -> str:
    """The end of a long text."""
    return text if len(text) <= most else "…" + text[-most:]


def columns(rows: list[dict], name: str) -> tuple[list, list]:
    """The x and y of a curve."""
    return [row["step"] for row in rows], [row[name] for row in rows]
