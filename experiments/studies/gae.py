"""GAE: all n-step advantages at once, mixed by λ; a study of λ.

    python experiments/studies/gae.py                    # runs each λ in turn; --smoke shows that it runs

Schulman et al. 2016. λ = 0 is the one-step advantage: little variance, and all the bias of the critic. λ = 1 is the
whole return less V: no bias, and the variance of REINFORCE with a baseline. One critic, one actor, one update a
rollout: the runs differ in λ alone, and share their warm-up.

Differs from the paper: the critic takes one gradient step a rollout in place of a trust-region fit. λ near 1 should win
here: answers have few tokens and the reward comes last, so that bootstrapping has little to offer and an untrained
critic to spoil. The table and the curves of all λ are in runs/gae.
"""

import dataclasses
from pathlib import Path

from rich.console import Console

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run import cli, read, report
from jaxpg.run.ranges import NonNegativeFloat, Positive, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.CriticConfig):
    """Options of the study."""

    minibatches: Positive = 1
    rl_steps: Positive = 200
    lambdas: tuple[Share, ...] = (0.0, 0.5, 0.9, 1.0)
    value_coef: NonNegativeFloat = 0.5


def prepare(config: Config) -> dict[float, recipe.Setup]:
    """Checks the options of every run before anything is compiled; the first one warms up for all."""
    base = config.run_dir or Path("runs/gae")
    if not config.lambdas:
        raise ValueError("--lambdas is empty: name at least one number between 0 and 1")
    setups = {}
    for lambda_ in config.lambdas[:2] if config.smoke else config.lambdas:
        first = config.warm_start or base / f"lambda_{config.lambdas[0]:g}"
        start = config.warm_start if lambda_ == config.lambdas[0] else first
        own = {"run_dir": base / f"lambda_{lambda_:g}", "warm_start": start, "lambdas": (lambda_,)}
        setups[lambda_] = recipe.prepare(dataclasses.replace(config, **own), name=f"gae, λ = {lambda_:g}")
    return setups


def train(setups: dict[float, recipe.Setup]) -> None:
    """Trains with each λ, then compares them."""
    folders = {x: setup.config.run_dir for x, setup in setups.items()}
    for lambda_, setup in setups.items():
        recipe.execute(setup, train=train_one)
        if not read.is_finished(folders[lambda_]):
            return  # --stop-after ended it, and the others start from its warm-up: --resume goes on
    rows = [(f"{x:g}", *read.gains([folder], "accuracy")) for x, folder in folders.items()]
    Console().print(report.table("GAE", ("λ", "before", "after", "gain"), rows))
    rewards = {x: read.columns(read.rows(folder, "rl"), "reward") for x, folder in folders.items()}
    curves = {f"λ = {x:g}": curve for x, curve in rewards.items()}
    base = next(iter(folders.values())).parent
    report.draw_curves(base / "curves.png", {"reward": curves}, title="GAE")


def train_one(r: recipe.Recipe) -> None:
    """Samples, scores, estimates advantages with λ, and trains actor and critic together."""
    c = r.config
    algorithm = algorithms.actor_critic_gae(lambda_=c.lambdas[0], value_coef=c.value_coef)
    state, to_batch, update = r.start(algorithm, r.warm_up())
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params["actor"], prompts, r.key(k))
        scores = r.score(prompts, rollout)
        values = r.critic(state, rollout)
        batch = to_batch(rollout, scores, values=values)  # advantage = GAE(λ), targets = advantage + V
        state, metrics = update(state, batch, r.key(k))  # loss of the actor + value_coef · loss of the critic
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
