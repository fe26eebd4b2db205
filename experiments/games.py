"""Games: the returns, losses and updates of the language models play gymnax games, each whole run one jitted program.

    pip install -e '.[games]'
    python experiments/games.py --algorithm ppo --game CartPole-v1 --run-dir runs/cartpole
    python experiments/games.py --algorithm trpo --game Acrobot-v1 --run-dir runs/acrobot

CartPole pays 1 for each of at most 500 steps that the pole is kept upright: solved at a mean return of 475 over 100
episodes. Acrobot costs 1 for each of at most 500 steps until the tip has swung above a line: solved at −100. The run
folder holds config.json, metrics.jsonl (a line an iteration) and summary.json.
"""

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from jaxpg import algorithms, games
from jaxpg.parallel import sharding
from jaxpg.run import cli, metrics, report
from jaxpg.run import folder as run_folder
from jaxpg.training import train_state, trust_region
from jaxpg.training.update import adamw, make_passes, make_update

DISCOUNT = 0.99
EVALUATION_EPISODES = 100
SMOKE_STEPS = 14_336  # actions in all, enough to get better at CartPole
SHOWN = 10  # lines of the table, each the mean over its share of the run


class Recipe(NamedTuple):
    """What differs between the algorithms: how experience is cut, weighed and learned from."""

    algorithm: algorithms.Algorithm
    num_envs: int  # copies of the game
    steps: int  # actions of each between two updates
    learning_rate: float  # falls to 0 along a line
    epochs: int = 1
    minibatches: int = 1
    max_kl: float | None = None  # the trust region; then learning_rate and epochs are the critic's


def recipe(name: str) -> Recipe:
    """The algorithms of the ladder, and the sizes they are run with."""
    a, explore = algorithms, partial(dataclasses.replace, entropy_coef=0.01)
    critic = a.actor_critic_gae(discount=DISCOUNT)
    trpo = dataclasses.replace(a.trpo(discount=DISCOUNT), targets=critic.targets, value_loss=critic.value_loss)
    return {
        "actor_critic": Recipe(explore(a.actor_critic(n=1, discount=DISCOUNT)), 64, 8, 2e-3),
        "a3c": Recipe(explore(a.actor_critic(n=16, discount=DISCOUNT)), 32, 16, 1e-3),
        "trpo": Recipe(trpo, 32, 64, 1e-3, epochs=5, minibatches=4, max_kl=0.01),
        "ppo": Recipe(explore(a.ppo(discount=DISCOUNT, value_clip=10.0)), 32, 64, 1e-3, epochs=4, minibatches=4),
    }[name]


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of a run."""

    algorithm: Literal["actor_critic", "a3c", "trpo", "ppo"] = "ppo"
    game: str = "CartPole-v1"  # any gymnax game with a time limit and finitely many actions
    env_steps: int = 1_000_000  # actions in all
    seed: int = 0
    mesh: str = "data=-1"  # devices that share the copies of the game
    smoke: bool = False  # a few iterations, to see that all of it works
    run_dir: Path = Path("runs/games")


class Run(NamedTuple):
    """What `prepare` checked and built."""

    config: Config
    mesh: jax.sharding.Mesh
    game: games.Game
    recipe: Recipe
    iterations: int


def prepare(config: Config) -> Run:
    """Checks every option before anything is compiled or written."""
    c, chosen, mesh = config, recipe(config.algorithm), sharding.make_mesh(config.mesh)
    if chosen.num_envs % sharding.row_shards(mesh):
        raise ValueError(f"--mesh={c.mesh}: data*fsdp must divide the {chosen.num_envs} copies of the game")
    iterations = (SMOKE_STEPS if c.smoke else c.env_steps) // (chosen.num_envs * chosen.steps)
    if iterations < 1:
        raise ValueError(f"--env-steps={c.env_steps}: an iteration takes {chosen.num_envs * chosen.steps} of them")
    run = Run(c, mesh, games.from_gymnax(c.game), chosen, iterations)
    run_folder.open_run(c.run_dir, run_folder.config_dict(c, without=("run_dir", "mesh")), resume=False)
    return run


def make_learner(r: Recipe, updates: int):
    """Builds the functions that make the first state, and that learn from a batch."""
    optimizer = adamw(optax.linear_schedule(r.learning_rate, 0.0, updates), max_grad_norm=0.5, b2=0.999)
    trainable = None if r.max_kl is None else lambda path: path.startswith("critic")
    loss_fn = algorithms.make_loss_fn(r.algorithm, games.policy)
    passes = make_passes(
        make_update(loss_fn, optimizer, trainable=trainable), epochs=r.epochs, minibatches=r.minibatches
    )
    init = partial(train_state.init, optimizer=optimizer, trainable=trainable)
    if r.max_kl is None:
        return init, passes
    natural_step = trust_region.make_update(games.batch_logits, max_kl=r.max_kl)

    def step_then_fit_critic(state, batch, key):
        state, step_metrics = natural_step(state, batch)
        state, critic_metrics = passes(state, batch, key)
        return state, critic_metrics | step_metrics

    return init, step_then_fit_critic


def make_training(game: games.Game, r: Recipe, iterations: int, mesh: jax.sharding.Mesh):
    """Builds key -> (state, metrics [iterations], returns of the evaluation's episodes): one program to jit."""
    init, learn = make_learner(r, iterations * r.epochs * r.minibatches)

    def training(key):
        init_key, run_key, start_key, evaluation_key = jax.random.split(key, 4)
        state = init(games.init(init_key, game), key=run_key)
        state = jax.lax.with_sharding_constraint(state, sharding.replicated(mesh))
        envs = jax.lax.with_sharding_constraint(games.start(game, start_key, r.num_envs), sharding.rows(mesh))

        def iteration(carry, k):
            state, envs = carry
            play_key, learn_key = jax.random.split(jax.random.fold_in(state.key, k))
            envs, played = games.play(partial(games.logits, state.params), envs, play_key, game=game, steps=r.steps)
            experience = games.experience(played, partial(games.values, state.params))
            state, learned = learn(state, algorithms.to_batch(r.algorithm, experience), learn_key)
            return (state, envs), learned | {"return": played.episode_return, "length": played.episode_length}

        (state, _), history = jax.lax.scan(iteration, (state, envs), jnp.arange(iterations))
        act = partial(games.logits, state.params)
        return state, history, games.evaluate(act, evaluation_key, game=game, episodes=EVALUATION_EPISODES)

    return training


def train(run: Run) -> None:
    """Compiles the whole run, runs it, and tells what came of it."""
    c, r, console = run.config, run.recipe, Console()
    started = time.perf_counter()
    program = jax.jit(make_training(run.game, r, run.iterations, run.mesh)).lower(jax.random.key(c.seed)).compile()
    compiled = time.perf_counter()
    _, history, returns = jax.block_until_ready(program(jax.random.key(c.seed)))
    seconds = time.perf_counter() - compiled
    history, returns = jax.device_get((history, returns))
    steps = run.iterations * r.num_envs * r.steps
    summary = {
        "algorithm": c.algorithm,
        "game": c.game,
        "seed": c.seed,
        "mean_return": float(returns.mean()),
        "worst_return": float(returns.min()),
        "episodes": returns.size,
        "env_steps": steps,
        "seconds_compile": compiled - started,
        "seconds_run": seconds,
        "env_steps_per_second": steps / seconds,
    }
    run_folder.write_json(c.run_dir / "summary.json", summary)
    write_history(run, history)
    rows = [
        ("return while learning", share(history["return"], k), f"{(k + 1) * steps // SHOWN:,}") for k in range(SHOWN)
    ]
    rows += [(f"return, {returns.size} episodes after", f"{summary['mean_return']:.1f}", f"{steps:,}")]
    console.print(report.table(f"{c.algorithm} on {c.game}, seed {c.seed}", ("", "mean", "after steps"), rows))
    console.print(f"{seconds:.1f} s, {steps / seconds:,.0f} steps/s; {compiled - started:.1f} s of compilation before")


def share(per_iteration, k: int) -> str:
    """The mean over the k-th of SHOWN parts of a run; empty where no episode ended in it."""
    total, weight = (np.array_split(x, SHOWN)[k].sum() for x in (per_iteration.total, per_iteration.weight))
    return f"{total / weight:.1f}" if weight else ""


def write_history(run: Run, history) -> None:
    """Writes a line an iteration: means over its updates, and over the episodes that ended in it, if any did."""
    writer = metrics.JsonlWriter(run.config.run_dir / "metrics.jsonl")
    for k in range(run.iterations):
        row = {name: float(x.total[k] / x.weight[k]) for name, x in history.items() if x.weight[k]}
        writer.write({"iteration": k + 1, "env_steps": (k + 1) * run.recipe.num_envs * run.recipe.steps, **row})
    writer.close()


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
