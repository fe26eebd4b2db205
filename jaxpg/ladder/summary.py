"""What a finished run shows and leaves: tables, sentences, curves.png, summary.json."""

import jax

from jaxpg.ladder.comparison import columns, read_phases
from jaxpg.ladder.parts import measure
from jaxpg.ladder.session import Session
from jaxpg.models import num_parameters
from jaxpg.run import folder as run_folder
from jaxpg.run import report


def conclude(session: Session, before: list[str], after: list[str], *, seconds: float) -> None:
    """Sums up a run from its metrics, and from the held-out completions before and after."""
    run, c, console = session.run, session.run.config, session.console
    phases = ("warmup", "rl", "warmup_check", "evaluation")
    warmup, rl, checks, evaluations = read_phases(c.run_dir, phases)
    by_phase = {"warm-up": sum(row["seconds_update"] for row in warmup)} if warmup else {}
    by_phase |= {f"RL, {name}": sum(row[f"seconds_{name}"] for row in rl) for name in ("sample", "score", "update")}
    held_out = {
        f"{name}_{when}": value
        for when, texts in (("before", before), ("after", after))
        for name, value in measure(run, run.held_out, texts).items()
    }
    found = {
        "name": run.name,
        "seed": c.seed,
        **held_out,
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
        "rewards only": {"reward": columns(rl, "reward")}
        | {f"{name}, held out": columns(evaluations, name) for name in ("accuracy", *run.task.measures)}
    }
    report.draw_curves(c.run_dir / "curves.png", curves, title=f"{run.name}, seed {c.seed}")

    figures = [(f"held-out {name.replace('_', ' ')} RL", f"{value:.3f}") for name, value in held_out.items()]
    figures += [(f"seconds, {name}", f"{value:.1f}") for name, value in by_phase.items()]
    figures += [("seconds, this process in all", f"{found['seconds']:.1f}")]
    figures += [("sampled tokens/s", f"{found['sampled_tokens_per_second']:,.0f}")]
    console.print(report.table(f"{run.name}, seed {c.seed}", ("", "value"), figures))
    changed = [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    shown = (changed + [i for i in range(len(before)) if i not in set(changed)])[:10]
    lines = [(shorten(run.held_out[i].prompt), before[i], after[i], run.held_out[i].answer) for i in shown]
    console.print(report.table("Held-out problems", ("prompt", "before", "after", "answer"), lines))
    for sentence in report.in_words(rl):
        console.print(f"• {sentence}")
    console.print(f"More in {c.run_dir}: curves.png, metrics.jsonl, summary.json. Another run: --run-dir elsewhere.")


def shorten(text: str, most: int = 300) -> str:
    """The end of a long text."""
    return text if len(text) <= most else "…" + text[-most:]
