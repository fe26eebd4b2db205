"""Quickstart: a small language model learns to add two-digit numbers by policy gradients, in minutes on two CPU cores.

    make quickstart                     # or: python experiments/quickstart.py --algorithm rloo --run-dir runs/rloo

First a warm-up: supervised learning on solved sums, stopped while the model is still mediocre. Then reinforcement
learning, which sees nothing but rewards: 1 for the right answer, 0 for any other. Expect held-out greedy accuracy to
rise from below 0.5 to above 0.9. The run folder holds config.json, metrics.jsonl, checkpoints, curves.png and
summary.json.
"""

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console

from jaxpg import algorithms, cli, evaluate, logprobs, loop, metrics, report, run_folder, sharding, train_state
from jaxpg.checkpoint import Checkpointer
from jaxpg.data import characters, decode_completions, encode_demonstrations, encode_prompts
from jaxpg.models import Config as ModelConfig
from jaxpg.models import Model, num_parameters
from jaxpg.sampling import sample
from jaxpg.tasks import arithmetic
from jaxpg.types import Experience
from jaxpg.update import adamw, make_update

STARTED = time.perf_counter()
EVALUATE_EVERY = 25  # steps
WARMUP_CHECK_EVERY = 5  # steps
EVALUATION_BATCH = 256


def budget(level: int) -> int:
    """Tokens a completion may have: the longest answer and a stop token."""
    return len(arithmetic.longest_answer(level)) + 1


# Each option swaps the advantage, the loss and the aggregation; nothing else differs between the runs.
ALGORITHMS = {
    "reinforce": lambda c: algorithms.reinforce(),
    "rloo": lambda c: algorithms.rloo(),
    "grpo": lambda c: algorithms.grpo(),
    "dr_grpo": lambda c: algorithms.dr_grpo(max_new_tokens=budget(c.level)),
    "ppo_clip": lambda c: algorithms.ppo_clip(),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the quickstart."""

    algorithm: Literal["reinforce", "rloo", "grpo", "dr_grpo", "ppo_clip"] = "grpo"
    seed: int = 0
    level: int = 2  # difficulty of the sums, 1 to 5
    prompt_length: int = 6  # room for a prompt, in tokens
    batch_size: int = 1024  # completions a step
    group_size: int = 8  # completions a prompt
    rl_steps: int = 650
    rl_learning_rate: float = 7e-4
    temperature: float = 1.0  # of the sampler, hence of the policy that is trained
    epochs: int = 1  # passes over each rollout
    minibatches: int = 2  # updates a pass
    num_microbatches: int = 1  # parts a minibatch is cut into to save memory; changes no result
    warmup_steps: int = 600  # at most; the warm-up ends when the model is mediocre
    warmup_batch_size: int = 256
    warmup_learning_rate: float = 2e-3
    warmup_accuracy: float = 0.4  # what counts as mediocre, on training problems
    held_out: int = 512  # problems of the evaluation, which no phase trains on
    mesh: str = "data=-1"  # e.g. data=2,fsdp=2,tensor=2
    run_dir: Path = Path("runs/quickstart")
    resume: bool = False  # go on with the run in run_dir, if there is one
    checkpoint_every: int = 25  # steps
    stop_after: int | None = None  # end this process abruptly after so many steps; --resume goes on


# Options that change where and how a run is done, but not its results.
NOT_IDENTITY = ("run_dir", "resume", "stop_after", "mesh", "num_microbatches", "checkpoint_every")


class Run(NamedTuple):
    """What `prepare` checked and built: pure functions, and the first state."""

    config: Config
    mesh: jax.sharding.Mesh
    model: Model
    tokenizer: object
    held_out: list[arithmetic.Problem]
    max_new_tokens: int


def prepare(config: Config) -> Run:
    """Checks every option before anything is compiled or written."""
    c = config
    mesh = sharding.make_mesh(c.mesh)
    check_sizes(c, sharding.row_shards(mesh))
    tokenizer = characters(arithmetic.ALPHABET)
    held_out = arithmetic.held_out_set(c.held_out, level=c.level)
    encode_prompts(tokenizer, [arithmetic.longest_prompt(c.level)], length=c.prompt_length)
    max_new_tokens = budget(c.level)
    model = Model(
        ModelConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            mlp_size=192,
            tie_embeddings=False,  # what a digit means in a prompt and in an answer are two things
            max_length=c.prompt_length + max_new_tokens,
        )
    )
    sharding.shardings(mesh, jax.eval_shape(model.init, jax.random.key(0)))  # does the mesh divide the model?
    run_folder.open_run(c.run_dir, run_folder.config_dict(c, without=NOT_IDENTITY), resume=c.resume)
    return Run(c, mesh, model, tokenizer, held_out, max_new_tokens)


def check_sizes(c: Config, shards: int) -> None:
    """Raises ValueError where the sizes do not divide each other."""
    for name in ("batch_size", "group_size", "minibatches", "num_microbatches", "epochs", "held_out", "rl_steps"):
        if getattr(c, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(c, name)}: must be at least 1")
    if c.temperature <= 0:
        raise ValueError(f"--temperature={c.temperature}: must be positive, or all samples of a prompt are the same")
    if c.batch_size % c.group_size:
        raise ValueError(f"--group-size={c.group_size} does not divide --batch-size={c.batch_size}: choose a divisor")
    parts = {
        "--batch-size / --group-size prompts": c.batch_size // c.group_size,
        "--batch-size / --minibatches / --num-microbatches rows": c.batch_size / c.minibatches / c.num_microbatches,
        "--warmup-batch-size rows": c.warmup_batch_size,
        "evaluation rows": EVALUATION_BATCH,
    }
    for name, size in parts.items():
        if size % shards:
            raise ValueError(f"{size:g} {name} cannot be spread over data*fsdp={shards} of --mesh={c.mesh}: change one")


def train(run: Run) -> None:
    """Warms up, evaluates, trains by rewards, evaluates again, reports."""
    c, console = run.config, Console()
    console.print(
        f"[bold]{c.algorithm}[/] on {run.mesh.size} {jax.devices()[0].platform} device(s), folder {c.run_dir}"
    )
    warmup_saves, rl_saves = (Checkpointer((c.run_dir / "checkpoints" / name).absolute()) for name in ("warmup", "rl"))
    newest = rl_saves.record() or warmup_saves.record() or {"metrics_bytes": 0}
    writer = metrics.JsonlWriter(c.run_dir / "metrics.jsonl", offset=newest["metrics_bytes"])
    has_rl_saves = rl_saves.latest is not None
    try:
        with jax.set_mesh(run.mesh), report.progress(console) as progress:
            stop = StopAfter(c.stop_after)
            greedy = make_greedy(run)
            warm = warm_up(
                run, loop.Journal("warmup", writer, warmup_saves, c.checkpoint_every), greedy, progress, stop
            )
            before = greedy(warm.params, run.held_out)
            if not has_rl_saves:  # else the row stands in the file already
                writer.write({"phase": "evaluation", "step": 0, "accuracy": score_texts(run, before)})
            final = reinforce(
                run, warm.params, loop.Journal("rl", writer, rl_saves, c.checkpoint_every), greedy, progress, stop
            )
            after = greedy(final.params, run.held_out)
    except Stopped as stopped:
        console.print(f"Stopped after {stopped} steps of this session, --resume goes on.")
        return
    finally:
        for closing in (writer, warmup_saves, rl_saves):
            closing.close()
    conclude(run, console, before, after)


def make_policy(model: Model, temperature: float):
    """Maps (params, batch) to the log-probs of its tokens and the entropy at each, at the sampler's temperature."""

    def policy(params, batch):
        logits = model.logits(params, batch.tokens, batch.token_mask)
        log_probs = logprobs.token_log_probs(logits, batch.tokens, temperature=temperature)
        return log_probs, logprobs.entropy(logits, temperature=temperature)

    return policy


def start(run: Run, algorithm: algorithms.Algorithm, learning_rate: optax.ScalarOrSchedule, temperature, init_params):
    """Builds the sharded first state of a phase and its compiled update."""
    optimizer = adamw(learning_rate, b2=0.99)
    key = jax.random.key(run.config.seed)

    def init():
        return train_state.init(init_params(), optimizer, key)

    places = sharding.shardings(run.mesh, jax.eval_shape(init))
    update = make_update(
        algorithms.make_loss_fn(algorithm, make_policy(run.model, temperature)),
        optimizer,
        num_microbatches=run.config.num_microbatches,
    )
    update = jax.jit(update, donate_argnums=0, out_shardings=(places, sharding.replicated(run.mesh)))
    return jax.jit(init, out_shardings=places)(), update


def warm_up(run: Run, journal: loop.Journal, greedy, progress, stop) -> train_state.TrainState:
    """Learns from solved sums until the model is mediocre: no better than `warmup_accuracy` asks."""
    c = run.config
    state, update = start(
        run, algorithms.supervised(), c.warmup_learning_rate, 1.0, lambda: run.model.init(jax.random.key(c.seed))
    )
    length = c.prompt_length + run.max_new_tokens
    validation = arithmetic.problems(stream(c, 2), 0, 2 * EVALUATION_BATCH, level=c.level)

    def batch(k: int):
        problems = arithmetic.problems(stream(c, 0), k * c.warmup_batch_size, c.warmup_batch_size, level=c.level)
        prompts, answers = [p.prompt for p in problems], [p.answer for p in problems]
        return sharding.put_rows(run.mesh, encode_demonstrations(run.tokenizer, prompts, answers, length=length))

    bar = progress.add_task("warm-up, supervised", total=c.warmup_steps, numbers="")
    accuracy = 0.0

    def on_step(state, done, row):
        nonlocal accuracy
        if done % WARMUP_CHECK_EVERY == 0:
            accuracy = score_texts(run, greedy(state.params, validation), validation)
            journal.writer.write({"phase": "warmup_check", "step": done, "accuracy": accuracy})
        progress.update(bar, completed=done, numbers=f"loss {row['loss']:.3f}  accuracy {accuracy:.2f}")
        stop.count()
        return accuracy >= c.warmup_accuracy

    state = loop.run(loop.supervised_step(batch, update), state, journal, steps=c.warmup_steps, on_step=on_step)
    progress.update(bar, total=int(state.step), completed=int(state.step))
    return state


def reinforce(run: Run, params, journal: loop.Journal, greedy, progress, stop) -> train_state.TrainState:
    """Learns from rewards alone: sample, score, advantage, update."""
    c, algorithm = run.config, ALGORITHMS[run.config.algorithm](run.config)
    updates = c.rl_steps * c.epochs * c.minibatches
    learning_rate = optax.warmup_cosine_decay_schedule(
        0.0, c.rl_learning_rate, warmup_steps=updates // 15, decay_steps=updates, end_value=0.05 * c.rl_learning_rate
    )
    state, update = start(run, algorithm, learning_rate, c.temperature, lambda: params)
    num_prompts = c.batch_size // c.group_size

    def prompts(k: int) -> loop.Prompts:
        problems = arithmetic.problems(stream(c, 1), k * num_prompts, num_prompts, level=c.level)
        return loop.Prompts(*encode(run, problems), problems)

    def score(problems, rollout) -> loop.Scores:
        texts = decode_completions(run.tokenizer, rollout)
        rewards = [arithmetic.score(problems[i // c.group_size], text) for i, text in enumerate(texts)]
        rewards = np.asarray(rewards, np.float32).reshape(num_prompts, c.group_size)
        return loop.Scores(rewards, valid=np.ones(rewards.shape, bool))

    step = loop.policy_gradient_step(
        prompts=prompts,
        sample=make_sampler(run, samples_per_prompt=c.group_size, temperature=c.temperature),
        score=score,
        experience=lambda state, rollout, scores: Experience(rollout, *sharding.put_rows(run.mesh, tuple(scores))),
        to_batch=jax.jit(partial(algorithms.to_batch, algorithm), out_shardings=sharding.rows(run.mesh)),
        update=update,
        epochs=c.epochs,
        minibatches=c.minibatches,
    )
    bar = progress.add_task(f"rewards only, {c.algorithm}", total=c.rl_steps, numbers="")

    def on_step(state, done, row):
        if done % EVALUATE_EVERY == 0:
            accuracy = score_texts(run, greedy(state.params, run.held_out))
            journal.writer.write({"phase": "evaluation", "step": done, "accuracy": accuracy})
        numbers = f"reward {row['reward']:.2f}  {row['completion_tokens'] / row['seconds_sample']:,.0f} tokens/s"
        progress.update(bar, completed=done, numbers=numbers)
        stop.count()

    state = loop.run(step, state, journal, steps=c.rl_steps, on_step=on_step)
    progress.update(bar, completed=c.rl_steps)
    return state


def make_sampler(run: Run, **options):
    """Compiles the sampler of this model."""
    stops = (run.tokenizer.eos_token_id,)
    sampler = partial(sample, model=run.model, max_new_tokens=run.max_new_tokens, stop_tokens=stops, **options)
    return jax.jit(sampler, out_shardings=sharding.rows(run.mesh))


def make_greedy(run: Run):
    """Builds (params, problems) -> the most likely completion of each, as text."""
    sampler = make_sampler(run, temperature=0.0)
    key = jax.random.key(0)  # greedy decoding draws nothing

    def greedy(params, problems) -> list[str]:
        def generate(part):
            return decode_completions(run.tokenizer, sampler(params, *encode(run, part), key))

        return evaluate.complete(generate, problems, batch=EVALUATION_BATCH)

    return greedy


def encode(run: Run, problems):
    """Tokenizes problems and spreads them over the mesh."""
    texts = [problem.prompt for problem in problems]
    return sharding.put_rows(run.mesh, encode_prompts(run.tokenizer, texts, length=run.config.prompt_length))


def score_texts(run: Run, texts: list[str], problems=None) -> float:
    """Accuracy of completions, by default of the held-out problems."""
    return evaluate.accuracy(arithmetic.score, problems or run.held_out, texts)


def stream(c: Config, purpose: int) -> int:
    """Numbers the problem streams: demonstrations (0), prompts for RL (1) and validation (2) differ for each seed."""
    return 3 * c.seed + purpose


class Stopped(Exception):
    """The session has done the steps that --stop-after allows."""


class StopAfter:
    """Counts the steps of this session, and ends it like a power cut, without a last checkpoint."""

    def __init__(self, limit: int | None):
        self.limit, self.done = limit, 0

    def count(self) -> None:
        self.done += 1
        if self.done == self.limit:
            raise Stopped(self.done)


def conclude(run: Run, console: Console, before: list[str], after: list[str]) -> None:
    """Prints the tables, draws the curves and writes summary.json."""
    c = run.config
    rows = metrics.read_jsonl(c.run_dir / "metrics.jsonl")
    warmup, rl, checks, evaluations = (
        [row for row in rows if row["phase"] == phase] for phase in ("warmup", "rl", "warmup_check", "evaluation")
    )
    seconds = {"warm-up": sum(row["seconds_update"] for row in warmup)}
    seconds |= {f"RL, {name}": sum(row[f"seconds_{name}"] for row in rl) for name in ("sample", "score", "update")}
    tokens = sum(row["completion_tokens"] for row in rl)
    summary = {
        "algorithm": c.algorithm,
        "seed": c.seed,
        "accuracy_before": score_texts(run, before),
        "accuracy_after": score_texts(run, after),
        "seconds": time.perf_counter() - STARTED,
        "seconds_by_phase": seconds,
        "sampled_tokens_per_second": tokens / seconds["RL, sample"],
        "parameters": num_parameters(jax.eval_shape(run.model.init, jax.random.key(0))),
        "warmup_steps": len(warmup),
        "rl_steps": len(rl),
    }
    run_folder.write_json(c.run_dir / "summary.json", summary)
    curves = {
        "warm-up": {"accuracy, training problems": columns(checks, "accuracy")},
        "rewards only": {"reward": columns(rl, "reward"), "accuracy, held out": columns(evaluations, "accuracy")},
    }
    report.draw_curves(c.run_dir / "curves.png", curves, title=f"{c.algorithm}, seed {c.seed}")

    figures = [("held-out accuracy after the warm-up", f"{summary['accuracy_before']:.3f}")]
    figures += [("held-out accuracy after RL", f"{summary['accuracy_after']:.3f}")]
    figures += [(f"seconds, {name}", f"{value:.1f}") for name, value in seconds.items()]
    figures += [("seconds, this process in all", f"{summary['seconds']:.1f}")]
    figures += [("sampled tokens/s", f"{summary['sampled_tokens_per_second']:,.0f}")]
    console.print(report.table(f"{c.algorithm}, seed {c.seed}", ("", "value"), figures))
    changed = [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    shown = (changed + [i for i in range(len(before)) if i not in set(changed)])[:8]
    lines = [(run.held_out[i].prompt, before[i], after[i], run.held_out[i].answer) for i in shown]
    console.print(report.table("Held-out problems", ("prompt", "before", "after", "answer"), lines))
    console.print(f"More in {c.run_dir}: curves.png, metrics.jsonl, summary.json. Another run: --run-dir elsewhere.")


def columns(rows: list[dict], name: str) -> tuple[list, list]:
    """The x and y of a curve."""
    return [row["step"] for row in rows], [row[name] for row in rows]


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
