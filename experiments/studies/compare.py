"""The comparison: every rung on the same task, with the same budget of samples, over several seeds.

    python experiments/studies/compare.py                # or --rungs grpo dr_grpo --seeds 0 1 2 --samples 100000
    python experiments/studies/compare.py --model models/smollm2-135m --seconds 400 --seeds 0 --run-dir runs/smollm2

Each run has a folder of its own, runs/compare/<rung>/seed_<k>. What is finished is not done again, and what was
interrupted goes on: the same command may be given as often as one likes, with more rungs or seeds. All rungs of a
seed start from the same warm-up, that of the first. `difficulty.png` has the reward by difficulty, `length.png` the
length of right and wrong completions. Sums have a fixed length. To observe length bias, use the `wordy` task, whose
reward ignores trailing text:

    python experiments/studies/compare.py --rungs grpo dr_grpo --task wordy --levels 1 --warmup-accuracy 0.95 \\
        --samples 20480 --run-dir runs/length

Over three seeds the mean length of right answers went from 5.9 tokens to 2.1 (2.1 to 2.2) with GRPO and to 4.5 (3.3
to 6.4) with Dr. GRPO, that of wrong ones from 6.2 to 11.7 (10.7 to 12.8) and to 6.7 (3.3 to 9.5): the division by the
length spares a long wrong answer, in every run, and without it lengths only wander. Accuracy was the same.

The budget of the curves counts every completion that was drawn, those that DAPO throws away too: its curve ends where
the budget does, but the table has its accuracy after all steps, and its rewards are those of the groups that it kept.
Groups cost prompts: with as many samples, a rung with groups of eight sees an eighth of the prompts of one without.
With --model a checkpoint is trained, and --seconds in place of --samples gives each rung the same time.
"""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
from rich.console import Console

from jaxpg import recipe
from jaxpg.parallel import distributed
from jaxpg.rollout import evaluate
from jaxpg.run import cli, ranges, read, report
from jaxpg.run.ranges import NonNegative, Positive, PositiveFloat, Share

RUNGS = (
    *("reinforce", "reinforce_baseline", "actor_critic", "trpo", "ppo_penalty", "ppo"),
    *("remax", "rloo", "grpo", "dr_grpo", "dapo", "gspo"),
)


@dataclasses.dataclass(frozen=True)
class Config(distributed.Options):
    """Options of the comparison."""

    rungs: tuple[str, ...] = RUNGS
    seeds: tuple[int, ...] = (0, 1, 2)
    samples: Positive = 60_000  # completions a run
    seconds: PositiveFloat | None = None  # a run, in place of --samples; its compilation and evaluations count
    batch_size: Positive | None = None  # completions a step; default 512, or 64 with --model
    model: str | None = None  # a checkpoint in place of the small model
    task: str = "arithmetic"
    levels: tuple[int, ...] | None = None  # difficulties in turn; default 2 3 4, or 2 with --model
    warmup_accuracy: Share = 0.25  # where the warm-up of the small model ends
    spare: NonNegative = 4  # tokens that a completion of the small model may have beyond the longest right one
    temperature: PositiveFloat = 1.0
    rl_learning_rate: PositiveFloat | None = None  # default that of each rung
    lora_rank: NonNegative = 0
    run_dir: Path = Path("runs/compare")
    smoke: bool = False  # a few small steps, to see that everything runs


def prepare(config: Config) -> Config:
    """Checks the options before anything is compiled or written."""
    ranges.check(config)
    unknown = [name for name in config.rungs if name not in RUNGS]
    if unknown or not config.rungs:
        raise ValueError(f"--rungs={' '.join(config.rungs)}: choose among {', '.join(RUNGS)}")
    if not config.seeds:
        raise ValueError("--seeds is empty: name at least one")
    kind = {"batch_size": 64, "levels": (2,)} if config.model else {"batch_size": 512, "levels": (2, 3, 4)}
    missing = {name: value for name, value in kind.items() if getattr(config, name) is None}
    config = dataclasses.replace(config, **missing)
    if config.samples < config.batch_size:
        raise ValueError(f"--samples={config.samples}: must be at least --batch-size={config.batch_size}")
    if config.smoke:
        config = dataclasses.replace(config, rungs=config.rungs[:2], seeds=config.seeds[:1])
    recipe.prepare(options(config, config.rungs[0], config.seeds[0]), name=config.rungs[0])
    return config


def load(rung: str) -> ModuleType:
    """Imports a rung from its own file."""
    path = Path(__file__).parents[1] / "ladder" / f"{rung}.py"
    spec = importlib.util.spec_from_file_location(f"ladder_{rung}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def options(config: Config, rung: str, seed: int) -> recipe.Config:
    """The options of one run."""
    first = folder(config, config.rungs[0], seed)
    names = ("task", "levels", "model", "lora_rank", "temperature", "rl_learning_rate", "batch_size", "smoke")
    shared = {name: getattr(config, name) for name in names}
    if config.model is None:
        shared |= {"spare": config.spare, "warmup_accuracy": config.warmup_accuracy}
        shared["warm_start"] = None if rung == config.rungs[0] else first
    return load(rung).Config(
        **shared,
        seed=seed,
        resume=True,
        rl_steps=max(config.samples // config.batch_size, 1),
        rl_seconds=config.seconds,
        run_dir=folder(config, rung, seed),
    )


def train(config: Config) -> None:
    """Does what is not done yet, then compares."""
    for seed in config.seeds:
        for rung in config.rungs:
            if not read.is_finished(folder(config, rung, seed)):
                setup = recipe.prepare(options(config, rung, seed), name=rung)
                recipe.execute(setup, train=load(rung).train)
    compare(config)


def folder(config: Config, rung: str, seed: int) -> Path:
    return config.run_dir / rung / f"seed_{seed}"


def samples(row: dict, batch_size: int) -> int:
    """Completions drawn in a step."""
    return int(row.get("sampled_groups", 1)) * batch_size


def curves(config: Config, rung: str, seed: int) -> dict[str, np.ndarray]:
    """The curves of a run within the budget: of every step its samples and seconds so far, and its numbers."""
    path = folder(config, rung, seed)
    batch_size = read.config(path)["batch_size"]
    rows = read.rows(path, "rl")
    drawn = np.cumsum([samples(row, batch_size) for row in rows])
    if config.seconds is None:
        rows = [row for row, total in zip(rows, drawn, strict=True) if total <= config.samples] or rows[:1]
    seconds = [row["seconds"] for row in rows]
    names = [name for name in rows[0] if name.startswith(("reward", "completion_length"))]
    return {name: smoothed([row[name] for row in rows]) for name in names} | {
        "samples": drawn[: len(rows)],
        "seconds": np.cumsum(seconds),
    }


def smoothed(values: list[float], window: int = 9) -> np.ndarray:
    """The mean of the last few values."""
    return np.array([np.mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))])


def compare(config: Config) -> None:
    """Draws the curves and prints the table, of all seeds of each rung."""
    runs = {rung: [curves(config, rung, seed) for seed in config.seeds] for rung in config.rungs}
    out = config.run_dir

    def bands(x: str, y: str) -> dict[str, report.Band]:
        return {name: read.spread([(run[x], run[y]) for run in of_seeds]) for name, of_seeds in runs.items()}

    report.draw_bands(out / "curves.png", {f"reward by {x}": bands(x, "reward") for x in ("samples", "seconds")})
    lengths = ("completion_length_better", "completion_length_worse")
    report.draw_bands(out / "length.png", {y: bands("samples", y) for y in lengths})
    levels = sorted(name for name in next(iter(runs.values()))[0] if name.startswith("reward/level_"))
    if levels:
        report.draw_bands(out / "difficulty.png", {y: bands("samples", y) for y in levels})
    rows = [(rung, *line(config, rung, runs[rung])) for rung in config.rungs]
    columns = (
        "rung",
        "before",
        "after",
        "gain by seed",
        "after, 95 %",
        "in standard errors",
        "seconds",
        "length, right",
        "length, wrong",
    )
    console = Console(quiet=not distributed.is_primary())
    budget = f"{config.samples:,} samples" if config.seconds is None else f"{config.seconds:.0f} seconds"
    console.print(report.table(f"{budget}, {len(config.seeds)} seeds", columns, rows))


def line(config: Config, rung: str, runs: list[dict]) -> tuple[str, ...]:
    """Held-out accuracy before and after, and what it took."""
    seconds = np.mean([run["seconds"][-1] for run in runs])
    lengths = [np.mean([run[f"completion_length_{kind}"][-1] for run in runs]) for kind in ("better", "worse")]
    folders = [folder(config, rung, seed) for seed in config.seeds]
    gains, errors = read.gains(folders, "accuracy"), read.standard_errors(folders)
    told = [(read.summary(path)["accuracy_after"], read.config(path)["held_out"]) for path in folders]
    low, high = evaluate.interval(float(np.mean([p for p, _ in told])), sum(n for _, n in told))
    rest = (f"{low:.3f} to {high:.3f}", f"{errors:.1f}", f"{seconds:.0f}")
    return *gains, *rest, *(f"{length:.2f}" for length in lengths)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
