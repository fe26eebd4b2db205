"""The pieces of a step, bound to a run: prompts, sampler, scorer, experience, update."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpg import algorithms
from jaxpg.algorithms.algorithm import Policy
from jaxpg.data import decode_completions, encode_prompts
from jaxpg.ladder.config import Common, Run
from jaxpg.ladder.policies import actor
from jaxpg.parallel import distributed, sharding
from jaxpg.rollout import evaluate
from jaxpg.rollout.dynamic_sampling import TOLD
from jaxpg.sampling import generate, sample
from jaxpg.sampling.resharding import on_mesh
from jaxpg.tasks import scoring
from jaxpg.training import loop, train_state
from jaxpg.training.train_state import Trainable
from jaxpg.training.update import LossFn, adamw, make_update
from jaxpg.types import Experience

DEMONSTRATIONS, PROMPTS, VALIDATION = range(3)


def stream(c: Common, purpose: int) -> int:
    """Numbers the problem streams: demonstrations, prompts for RL and validation differ for each seed."""
    return 3 * c.seed + purpose


def encode(run: Run, problems):
    """Tokenizes problems, each process its own, and spreads them over the mesh."""
    texts = run.task.render(distributed.pick_local(run.mesh, problems))
    return sharding.put_rows(run.mesh, encode_prompts(run.tokenizer, texts, length=run.prompt_length))


def prompts(run: Run) -> Callable[[int], loop.Prompts]:
    """The problems of iteration k, as many as give `batch_size` completions."""
    c = run.config
    count = c.batch_size // c.group_size

    def draw(k: int) -> loop.Prompts:
        problems = run.task.problems(stream(c, PROMPTS), k * count, count)
        return loop.Prompts(*encode(run, problems), problems)

    return draw


def sampler(
    run: Run,
    *,
    acting: Callable[[dict], dict] = lambda params: params,
    samples_per_prompt: int | None = None,
    temperature: float | None = None,
    **options,
):
    """The sampler (params, tokens, mask, key) -> Rollout; default `group_size` samples, as in training.

    It runs on the sampler's mesh; arguments and results are of the run's mesh.

    Args:
      run: its model and sizes.
      acting: makes the parameters that sample of those given, e.g. `ladder.acting` where there is a critic beside them.
      samples_per_prompt: in place of the group size.
      temperature: in place of that of training.
      **options: of `sampling.sample`.
    """
    c = run.config
    draw = partial(
        generate if run.driven else sample,
        model=run.model,
        max_new_tokens=run.max_new_tokens,
        stop_tokens=(run.tokenizer.eos_token_id,),
        samples_per_prompt=c.group_size if samples_per_prompt is None else samples_per_prompt,
        temperature=c.temperature if temperature is None else temperature,
        **options,
    )
    draw = draw if run.driven else jax.jit(draw, out_shardings=sharding.rows(run.sampler_mesh))
    draw = on_mesh(draw, model=run.model, trained=run.mesh, sampled=run.sampler_mesh)
    return lambda params, *rest: draw(acting(params), *rest)


def make_greedy(run: Run) -> Callable:
    """Builds (params, problems) -> the most likely completion of each, as text."""
    draw, key = sampler(run, samples_per_prompt=1, temperature=0.0), jax.random.key(0)  # nothing is drawn

    def greedy(params, problems) -> list[str]:
        def generate(part):
            return decode_completions(run.tokenizer, distributed.fetch(draw(params, *encode(run, part), key)))

        return evaluate.complete(generate, problems, batch=run.evaluation_batch)

    return greedy


def judge(run: Run) -> Callable[..., scoring.Scored]:
    """The task's scorer for many completions, with the run's retries and its way with failures."""
    c = run.config
    scorers = {"task": (lambda problem, text: run.task.score(problem, text), 1.0)}  # looked up late
    return scoring.combine(scorers, retries=c.scorer_retries, raise_failures=c.scorer_failures == "stop")


def measure(run: Run, problems, texts) -> dict[str, float]:
    """The accuracy of completions that could be scored, and what else the task measures, as means over all."""
    scored = judge(run)(problems, texts)
    found = {"accuracy": float(scored.rewards[scored.valid].mean()) if scored.valid.any() else float("nan")}
    return found | {name: evaluate.accuracy(function, problems, texts) for name, function in run.task.measures.items()}


def scorer(run: Run) -> Callable[..., loop.Scores]:
    """Scores each completion, each process those on its own devices; and those of a greedy rollout, one a prompt.

    A sample without a score is not valid, and none of a prompt whose greedy completion has none. All processes get all
    scores.
    """
    judged = judge(run)

    def of(problems, rollout) -> tuple[np.ndarray, np.ndarray, int]:
        mine = distributed.pick_local(run.mesh, problems)
        found = judged(mine, decode_completions(run.tokenizer, distributed.local(rollout)))
        failed = np.full(len(mine), found.failures.sum() / len(mine))  # a share for each row, which then are added up
        rewards, valid, failed = distributed.gather(run.mesh, (found.rewards, found.valid, failed))
        return rewards, valid, round(float(failed.sum()))

    def score(problems, rollout, greedy=None) -> loop.Scores:
        rewards, valid, failures = of(problems, rollout)
        if greedy is None:
            return loop.Scores(rewards, valid=valid, failures=failures)
        baseline, applies, more = of(problems, greedy)
        valid = valid & applies
        return loop.Scores(rewards, valid=valid, greedy_rewards=baseline[:, 0], failures=failures + more)

    return score


def experience(run: Run, **more):
    """Builds (state, rollout, scores) -> Experience with all that the scores tell.

    Args:
      run: whose mesh it is put on.
      **more: name of a field -> (state, rollout) -> its value, e.g. values=ladder.values(run).
    """

    def build(state, rollout, scores) -> Experience:
        fields = {name: getattr(scores, name, None) for name in TOLD}
        fields = sharding.put_whole(run.mesh, {name: x for name, x in fields.items() if x is not None})
        return Experience(rollout, **fields, **{name: function(state, rollout) for name, function in more.items()})

    return build


def to_batch(run: Run, algorithm: algorithms.Algorithm):
    """The compiled advantages of an algorithm."""
    return jax.jit(partial(algorithms.to_batch, algorithm), out_shardings=sharding.rows(run.mesh))


def schedule(c: Common, learning_rate: float) -> optax.Schedule:
    """`rise_and_fall` over all updates of the phase."""
    return rise_and_fall(learning_rate, updates=c.rl_steps * c.epochs * c.minibatches)


def rise_and_fall(learning_rate: float, *, updates: int) -> optax.Schedule:
    """A short rise and a cosine down to a twentieth."""
    return optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps=updates // 15, decay_steps=updates, end_value=0.05 * learning_rate
    )


def start(
    run: Run,
    algorithm: algorithms.Algorithm,
    params,
    *,
    policy: Policy | None = None,
    learning_rate: optax.ScalarOrSchedule | None = None,
    optimizer: optax.GradientTransformation | None = None,
    trainable: Trainable | None = None,
    kl_coef: float = 0.0,
):
    """Builds the sharded first state of a phase, from a copy of the parameters, and its compiled update.

    Args:
      run: its mesh, key and micro-batches.
      algorithm: losses and aggregation.
      params: what to train.
      policy: default `actor` at the sampler's temperature.
      learning_rate: of AdamW; default the run's, by `schedule`.
      optimizer: in place of AdamW.
      trainable: as of `update.make_update`.
      kl_coef: the state's first KL coefficient.
    """
    c = run.config
    policy = actor(run.model, temperature=c.temperature) if policy is None else policy
    if optimizer is None:
        optimizer = adamw(schedule(c, c.rl_learning_rate) if learning_rate is None else learning_rate, b2=0.99)
    loss_fn = algorithms.make_loss_fn(algorithm, policy)
    return start_loss(run, loss_fn, params, optimizer=optimizer, trainable=trainable, kl_coef=kl_coef)


def start_loss(
    run: Run,
    loss_fn: LossFn,
    params,
    *,
    optimizer: optax.GradientTransformation,
    trainable: Trainable | None = None,
    kl_coef: float = 0.0,
):
    """Does what `start` does for any loss function of `update.make_update`."""
    c = run.config

    def init(params):  # of copies: the state's arrays are donated
        own, key = jax.tree.map(jnp.copy, params), jax.random.key(c.seed)
        return train_state.init(own, optimizer, key, kl_coef=kl_coef, trainable=trainable)

    update = make_update(loss_fn, optimizer, num_microbatches=c.num_microbatches, trainable=trainable)
    places = sharding.shardings(run.mesh, jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=places)(params), compiled(run, update, places)


def compiled(run: Run, update, places):
    """Compiles (state, batch) -> (state, metrics), with the state in its places and donated."""
    return jax.jit(update, donate_argnums=0, out_shardings=(places, sharding.replicated(run.mesh)))
