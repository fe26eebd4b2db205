"""Step level: one PPO whose actions are tokens, reasoning steps or whole responses, on sums rewarded by the step.

    python experiments/studies/step_level.py --seeds 0 1 2    # --smoke shows that it runs; --help lists the options

"2+3+4=" is answered "5;9", and each right running sum is rewarded where it ends. The runs differ only in `segments`,
which PPO with GAE (Schulman et al. 2016, 2017) uses for credit assignment (where V is read and λ acts), the ratio and
the clip. Without a critic, tokens and steps would have the same credit: the rewards to go of a step's tokens are
equal. Guo et al. 2025 (SPO) credit segments by rollouts from their ends, for outcomes: that is not done here.

Three seeds, 30,720 samples: held-out accuracy rose from 0.240 to 0.546 (token), 0.563 (step), 0.495 (response). The
response was last in each seed, perhaps because its clip hit 15 % of the tokens, against 1.5 % and 4 %. Step against
token is within the spread. At a learning rate of 7e-4 the token level fell, with seed 1.
"""

import dataclasses
from pathlib import Path
from typing import ClassVar

import numpy as np
from rich.console import Console

from jaxpg import algorithms, recipe
from jaxpg.estimators import segments
from jaxpg.parallel import distributed
from jaxpg.rollout import describe
from jaxpg.run import cli, read, report
from jaxpg.run.ranges import NonNegativeFloat, Positive, PositiveFloat, Share
from jaxpg.types import Prompts, Rollout, Scores

# The actions of a rollout, of which the steps are numbered.
ACTIONS = {
    "token": lambda numbered, mask: segments.token(mask),
    "step": lambda numbered, mask: numbered,
    "response": lambda numbered, mask: segments.response(mask),
}
Setups = dict[str, list[recipe.Setup]]  # granularity -> a run for each seed


@dataclasses.dataclass(frozen=True)
class Config(recipe.CriticConfig):
    """Options of the comparison."""

    NEEDS: ClassVar = ("step_rewards",)

    granularities: tuple[str, ...] = tuple(ACTIONS)
    seeds: tuple[int, ...] = ()  # several seeds, in place of --seed
    task: str = "steps"
    level: int = 3  # sums of six digits, five steps
    warmup_accuracy: Share = 0.2  # of whole answers
    batch_size: Positive = 512
    epochs: Positive = 2
    num_microbatches: Positive = 4  # faster on a CPU, since a part fits its caches
    rl_steps: Positive = 60
    rl_learning_rate: PositiveFloat = 3e-4
    evaluate_every: Positive = 5
    lambda_: Share = 0.95  # of GAE, an action
    clip: NonNegativeFloat = 0.2  # of the ratio of an action


def prepare(config: Config) -> Setups:
    """Checks the options of every run before anything is compiled; those of a seed share the first one's warm-up."""
    names, base = config.granularities, config.run_dir or Path("runs/step_level")
    if not names or not set(names) <= set(ACTIONS):
        raise ValueError(f"--granularities={' '.join(names)}: choose among {', '.join(ACTIONS)}")
    names = names[:2] if config.smoke else names  # a third training would take a smoke run over half a minute

    def one(name: str, seed: int) -> recipe.Setup:
        start = config.warm_start or (None if name == names[0] else base / names[0] / f"seed_{seed}")
        own = {"granularities": (name,), "seed": seed, "seeds": (), "warm_start": start, "resume": True}
        c = dataclasses.replace(config, run_dir=base / name / f"seed_{seed}", **own)
        return recipe.prepare(c, name=f"PPO by {name}")

    return {name: [one(name, seed) for seed in config.seeds or (config.seed,)] for name in names}


def train(setups: Setups) -> None:
    """Does what is not done yet, then compares."""
    for setup in (setup for of_seeds in setups.values() for setup in of_seeds):
        if not read.is_finished(setup.config.run_dir):
            recipe.execute(setup, train=train_one)
        if not read.is_finished(setup.config.run_dir):
            return  # --stop-after ended it: the same command goes on
    compare(setups)


def train_one(r: recipe.Recipe) -> None:
    """Samples, rewards each step where it ends, and trains actor and critic on the actions of one granularity."""
    c = r.config
    algorithm = algorithms.ppo(lambda_=c.lambda_, clip_low=c.clip, clip_high=c.clip)
    score = scorer(r, c.granularities[0])
    state, to_batch, update = r.start(algorithm, r.warm_up())
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params["actor"], prompts, r.key(k))
        scores = score(prompts, rollout)
        batch = to_batch(rollout, scores, values=r.critic(state, rollout))  # advantage = GAE over the actions, whitened
        state, metrics = update(state, batch, r.key(k))  # a ratio and a clip for each action
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


def scorer(r: recipe.Recipe, granularity: str):
    """Rewards each step on its last token, and numbers the actions."""
    reward_steps = r.task.step_rewards(r.tokenizer)

    def score(prompts: Prompts, rollout: Rollout) -> Scores:
        mine, own = distributed.pick_local(r.mesh, prompts.problems), distributed.local(rollout)
        found = reward_steps(mine, own.tokens, own.action_mask)
        token_rewards, numbered, mask = distributed.gather(r.mesh, (*found, own.action_mask))
        outcomes = np.zeros((len(prompts.problems), len(numbered) // len(prompts.problems)), np.float32)
        actions = np.asarray(ACTIONS[granularity](numbered, mask))
        valid = np.ones(outcomes.shape, bool)  # the steps' rewards are all that there is
        return Scores(outcomes, valid, token_rewards=token_rewards, segments=actions)

    return score


def compare(setups: Setups) -> None:
    """Draws the curves by samples and prints the table."""
    first = next(iter(setups.values()))[0]
    c, measures = first.config, ("accuracy", *first.task.measures)
    folders = {name: [setup.config.run_dir for setup in of_seeds] for name, of_seeds in setups.items()}

    def band(of_seeds: list[Path], measure: str) -> report.Band:
        told = [read.columns(read.rows(folder, "evaluation"), measure) for folder in of_seeds]
        return read.spread([(c.batch_size * np.array(x), y) for x, y in told])

    panels = {f"{y} by samples, held out": {name: band(f, y) for name, f in folders.items()} for y in measures}
    report.draw_bands(c.run_dir.parents[1] / "curves.png", panels)
    rows = [(name, y.replace("_", " "), *read.gains(f, y)) for y in measures for name, f in folders.items()]
    columns = ("actions", "held out", "before", "after", "gain by seed")
    console = Console(quiet=not distributed.is_primary())
    console.print(report.table(f"{c.rl_steps * c.batch_size:,} samples", columns, rows))


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
