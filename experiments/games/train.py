"""Games: the returns, losses and updates of the language models play gymnax games.

    pip install -e '.[games]'
    python experiments/games/train.py --algorithm ppo --game CartPole-v1 --run-dir runs/cartpole
    python experiments/games/train.py --algorithm trpo --game Acrobot-v1 --run-dir runs/acrobot

CartPole pays 1 for each of at most 500 steps that the pole is kept upright: solved at a mean return of 475 over 100
episodes. Acrobot costs 1 for each of at most 500 steps until the tip has swung above a line: solved at −100.

A step of the run is a tenth of all iterations, compiled as one program: it plays, estimates and learns without the
host. The run folder holds config.json, checkpoints, metrics.jsonl (a line an iteration, a step and an evaluation) and
summary.json.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import game as games
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from jaxpg import algorithms, run
from jaxpg.parallel import distributed, sharding
from jaxpg.run import cli, folder, ranges, read, report
from jaxpg.training import train_state, trust_region
from jaxpg.training.update import adamw, make_passes, make_update
from jaxpg.types import Weighted

DISCOUNT = 0.99
EVALUATION_EPISODES = 100
SMOKE_STEPS = 14_336  # actions in all, enough to get better at CartPole
SHOWN = 10  # steps of a run, and lines of the table


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
    return {
        "actor_critic": Recipe(explore(a.actor_critic(n=1, discount=DISCOUNT)), 64, 8, 2e-3),
        "a3c": Recipe(explore(a.actor_critic(n=16, discount=DISCOUNT)), 32, 16, 1e-3),
        "trpo": Recipe(a.trpo(discount=DISCOUNT), 32, 64, 1e-3, epochs=5, minibatches=4, max_kl=0.01),
        "ppo": Recipe(explore(a.ppo(discount=DISCOUNT, value_clip=10.0)), 32, 64, 1e-3, epochs=4, minibatches=4),
    }[name]


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


@dataclasses.dataclass(frozen=True)
class Config(run.Options):
    """Options of a run."""

    algorithm: Literal["actor_critic", "a3c", "trpo", "ppo"] = "ppo"
    game: str = "CartPole-v1"  # any gymnax game with a time limit and finitely many actions
    env_steps: ranges.Positive = 1_000_000  # actions in all, rounded up to whole steps of the run
    seed: int = 0
    run_dir: Path = Path("runs/games")
    checkpoint_every: ranges.Positive = 1  # tenths of the run
    smoke: bool = False  # a few iterations, to see that all of it works


class Setup(NamedTuple):
    """What `prepare` checked and built."""

    config: Config
    mesh: jax.sharding.Mesh
    game: games.Game
    recipe: Recipe
    chunk: int  # iterations of a step of the run
    steps: int  # of the run

    @property
    def chunk_actions(self) -> int:
        """Actions of all copies in a step of the run."""
        return self.chunk * self.recipe.num_envs * self.recipe.steps

    @property
    def name(self) -> str:
        """The title of the run."""
        return f"{self.config.algorithm} on {self.config.game}, seed {self.config.seed}"


def prepare(config: Config) -> Setup:
    """Checks every option before anything is compiled or written."""
    c, chosen, mesh = config, recipe(config.algorithm), sharding.make_mesh(config.mesh)
    if chosen.num_envs % sharding.row_shards(mesh):
        raise ValueError(f"--mesh={c.mesh}: data*fsdp must divide the {chosen.num_envs} copies of the game")
    iterations = (SMOKE_STEPS if c.smoke else c.env_steps) // (chosen.num_envs * chosen.steps)
    if iterations < 1:
        raise ValueError(f"--env-steps={c.env_steps}: an iteration takes {chosen.num_envs * chosen.steps} of them")
    chunk = -(-iterations // SHOWN)
    game = games.from_gymnax(c.game)
    return Setup(run.check(c, name="games"), mesh, game, chosen, chunk, steps=-(-iterations // chunk))


def make_start(s: Setup, init):
    """Builds key -> the state of the run: (train state, copies of the game)."""

    def start(key):
        init_key, run_key, start_key = jax.random.split(key, 4)[:3]
        state = init(games.init(init_key, s.game), key=run_key)
        return state, games.start(s.game, start_key, s.recipe.num_envs)

    places = sharding.replicated(s.mesh), sharding.rows(s.mesh)
    return jax.jit(start, out_shardings=places)


def make_chunk(s: Setup, learn):
    """Builds ((train state, copies), first iteration) -> ((train state, copies), metrics [chunk]), to be compiled."""
    r = s.recipe

    def iteration(carry, i):
        state, envs = carry
        play_key, learn_key = jax.random.split(jax.random.fold_in(state.key, i))
        envs, played = games.play(partial(games.logits, state.params), envs, play_key, game=s.game, steps=r.steps)
        experience = games.experience(played, partial(games.values, state.params))
        state, learned = learn(state, algorithms.to_batch(r.algorithm, experience), learn_key)
        return (state, envs), learned | {"return": played.episode_return, "length": played.episode_length}

    def chunk(carry, first):
        return jax.lax.scan(iteration, carry, first + jnp.arange(s.chunk))

    places = sharding.replicated(s.mesh), sharding.rows(s.mesh)
    return jax.jit(chunk, donate_argnums=0, out_shardings=(places, sharding.replicated(s.mesh)))


def make_evaluation(s: Setup):
    """Builds state of the run -> the mean and the worst return of whole episodes."""
    key = jax.random.split(jax.random.key(s.config.seed), 4)[3]

    @jax.jit
    def returns(params):
        return games.evaluate(partial(games.logits, params), key, game=s.game, episodes=EVALUATION_EPISODES)

    def evaluate(carry):
        found = distributed.fetch(returns(carry[0].params))
        return {"mean_return": float(found.mean()), "worst_return": float(found.min())}

    return evaluate


def train(s: Setup) -> None:
    """Plays and learns, a tenth of the run at a time, and tells what came of it."""
    c, r = s.config, s.recipe
    if c.dry_run:
        show(s)
        return
    init, learn = make_learner(r, s.steps * s.chunk * r.epochs * r.minibatches)
    with run.open(c, name=s.name, mesh=s.mesh) as opened:
        state = make_start(s, init)(jax.random.key(c.seed))
        with opened.clock.measure("compile"):
            program = make_chunk(s, learn).lower(state, jnp.int32(0)).compile()
        compiled = opened.clock.row()["seconds_compile"]
        chunk = opened.timed("run", program)
        options = {"evaluate": make_evaluation(s), "evaluate_every": s.steps, "show": ("return",)}
        for k, state in opened.steps(state, s.steps, **options):
            state, history = chunk(state, jnp.int32(k * s.chunk))
            history = jax.device_get(history)  # sums of each iteration
            log_iterations(s, opened, k, history)
            sums = {name: Weighted(x.total.sum(), x.weight.sum()) for name, x in history.items()}
            row = {"env_steps": (k + 1) * s.chunk_actions}
            opened.commit(k, state, row | {name: x for name, x in sums.items() if x.weight})
        if distributed.is_primary():
            conclude(s, opened, compiled)


def log_iterations(s: Setup, opened: run.Run, k: int, history) -> None:
    """Logs a line an iteration: means over its updates, and over the episodes that ended in it, if any did."""
    actions = s.recipe.num_envs * s.recipe.steps
    for i in range(s.chunk):
        row = {name: float(x.total[i] / x.weight[i]) for name, x in history.items() if x.weight[i]}
        done = k * s.chunk + i + 1
        opened.log("iteration", done, {"env_steps": done * actions, **row})


def conclude(s: Setup, opened: run.Run, compiled: float) -> None:
    """Writes summary.json and prints the table, of all sessions of the run."""
    rows, evaluations = read.phases(opened.folder, ("train", "evaluation"))
    seconds, steps, last = sum(row["seconds_run"] for row in rows), rows[-1]["env_steps"], evaluations[-1]
    summary = {
        "algorithm": s.config.algorithm,
        "game": s.config.game,
        "seed": s.config.seed,
        "mean_return": last["mean_return"],
        "worst_return": last["worst_return"],
        "episodes": EVALUATION_EPISODES,
        "env_steps": steps,
        "seconds_compile": compiled,
        "seconds_run": seconds,
        "env_steps_per_second": steps / seconds,
    }
    folder.write_json(opened.folder / "summary.json", summary)
    shown = [
        ("return while learning", f"{row['return']:.1f}" if "return" in row else "", f"{row['env_steps']:,}")
        for row in rows
    ]
    shown += [(f"return, {EVALUATION_EPISODES} episodes after", f"{last['mean_return']:.1f}", f"{steps:,}")]
    opened.console.print(report.table(s.name, ("", "mean", "after steps"), shown))
    opened.console.print(f"{seconds:.1f} s, {steps / seconds:,.0f} steps/s; {compiled:.1f} s of compilation before")


def show(s: Setup) -> None:
    """Prints what a run would do."""
    r = s.recipe
    rows = [
        ("observations, actions to choose from", f"{s.game.num_features} numbers, {s.game.num_actions}"),
        ("copies of the game × actions an iteration", f"{r.num_envs} × {r.steps}"),
        ("updates an iteration", r.epochs * r.minibatches),
        ("steps of the run × iterations", f"{s.steps} × {s.chunk}"),
        ("actions in all", f"{s.steps * s.chunk_actions:,}"),
        ("devices, mesh", f"{s.mesh.size}, {s.config.mesh}"),
    ]
    Console().print(report.table(f"{s.name}, dry run", ("", "value"), rows))


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
