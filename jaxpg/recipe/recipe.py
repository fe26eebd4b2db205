"""The pieces that a recipe composes, bound to its model, its task and the record of its run."""

import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import optax

from jaxpg.algorithms import Algorithm, make_loss_fn
from jaxpg.algorithms import to_batch as batch_of
from jaxpg.models import lora
from jaxpg.parallel import distributed, sharding
from jaxpg.recipe import warm_up
from jaxpg.recipe.evaluator import Evaluator
from jaxpg.recipe.sampler import encode, make_sampler
from jaxpg.recipe.setup import PROMPTS, Setup
from jaxpg.rollout import policies
from jaxpg.rollout.scorer import make_scorer
from jaxpg.run import Run, fingerprint, metrics
from jaxpg.tasks import scoring
from jaxpg.training import actor_critic, trust_region
from jaxpg.training import start as starting
from jaxpg.training.actor_critic import Part
from jaxpg.training.train_state import Trainable, TrainState
from jaxpg.training.update import adamw, make_kl_adaptation, make_update
from jaxpg.types import Array, Batch, Experience, Prompts, Rollout, Scores

SAMPLE_ADVICE = (
    "fewer completions a step (--batch-size), shorter ones (--max-new-tokens), a --sampler-mesh with more of tensor or "
    "with fsdp, which gathers weights for every token"
)
UPDATE_ADVICE = (
    "more --num-microbatches, which changes no result; --remat; --lora-rank; --compute-dtype bfloat16; more of --mesh "
    "fsdp or tensor"
)
SAMPLED = ("rewards", "valid", "token_rewards", "segments", "scores", "scores_valid", "greedy_rewards")


class Recipe:
    """What a recipe's loop is made of. Every piece is a function; what depends on the step takes k or a key."""

    def __init__(self, setup: Setup, run: Run):
        self.setup, self.run, self.config = setup, run, setup.config
        self.model, self.task, self.tokenizer = setup.model, setup.task, setup.tokenizer
        self.sampling, self.mesh = setup.sampling, setup.mesh
        c = self.config
        draw = make_sampler(setup, setup.sampling, samples_per_prompt=c.group_size)
        self.sample = self.timed("sample", draw, advice=SAMPLE_ADVICE)
        self.score = self.timed("score", make_scorer(self.judge, self.tokenizer, self.mesh))

    def timed(self, name: str, function: Callable, *, advice: str = "") -> Callable:
        """Makes a function count its seconds for a part of the step (`Run.timed`)."""
        return self.run.timed(name, function, advice=advice)

    # ---- A step ------------------------------------------------------------------------------------------------------

    def steps(self, state: TrainState) -> Iterator[tuple[int, TrainState]]:
        """Iterates over (k, state) of the reinforcement learning, from the newest checkpoint on (`Run.steps`)."""
        c, self.began = self.config, time.perf_counter()
        return self.run.steps(
            state,
            c.rl_steps,
            phase="rl",
            identity={"start": fingerprint.combined(state.params)},  # a reference policy keeps the parameters of step 0
            evaluate=lambda state: self.evaluator(policies.acting(state.params)),
            evaluate_every=c.evaluate_every,
            show=("reward", "completion_length"),
        )

    def commit(self, k: int, state: TrainState, row: dict) -> None:
        """Logs, evaluates, saves and stops, each where it is due (`Run.commit`)."""
        limit, seconds = self.config.rl_seconds, time.perf_counter() - self.began
        self.run.commit(k, state, row, last=limit is not None and distributed.any_of(seconds >= limit))

    def key(self, k: int) -> Array:
        """The randomness of step k."""
        return jax.random.fold_in(jax.random.key(self.config.seed), k)

    def converse(self, params: dict, prompts: Prompts, key: Array) -> Rollout:
        """Does what `sample` does for a task with an environment: the policy takes turns with it.

        Raises:
          ValueError: for a task without one.
        """
        if self.task.environment is None:
            raise ValueError(f"--task={self.config.task} has no environment to talk with, e.g. calculator has one")
        return self.sample(params, prompts, key)

    def prompts(self, k: int) -> Prompts:
        """The prompts of step k: as many problems as give --batch-size completions, and their tokens [P, S]."""
        count = self.config.batch_size // self.config.group_size
        return encode(self.setup, self.setup.problems(self.setup.stream(PROMPTS), k * count, count))

    # ---- What the loop starts from ---------------------------------------------------------------------------------

    def warm_up(self) -> dict:
        """The model's parameters, after supervised learning on demonstrations where --warmup-steps asks for it."""
        return warm_up.warm_up(self)

    def start(self, algorithm: Algorithm, params: dict) -> tuple[TrainState, Callable, Callable]:
        """Builds the first train state, `to_batch` and `update` of an algorithm.

            batch = to_batch(rollout, scores, **more fields of an Experience)       # advantages
            state, row = update(state, batch, key)                                  # epochs × minibatches

        Args:
          algorithm: with a critic, the state's parameters are {"actor": params, "critic": ...}.
          params: the policy's; the state has copies of them.
        """
        policy = policies.actor(self.model, self.sampling)
        if algorithm.critic is not None:
            params, policy = self.with_critic(params), policies.actor_critic(self.model, self.sampling)
        trainable = self.trainable(critic=algorithm.critic is not None)
        optimizer = self.optimizer(self.config.rl_learning_rate)
        step = make_update(
            make_loss_fn(algorithm, policy),
            optimizer,
            num_microbatches=self.config.num_microbatches,
            trainable=trainable,
        )
        state = self.first_state(params, optimizer, kl_coef=algorithm.kl_coef, trainable=trainable)
        return state, self.to_batch(algorithm), self.passes(self.compiled(step, state))

    def start_apart(self, algorithm: Algorithm, params: dict, actor: Part, critic: Part):
        """Does what `start` does, for an actor and a critic that have updates of their own."""
        params, optimizer = self.with_critic(params), actor_critic.optimizer_of(actor, critic)
        options = {
            "kl_coef": algorithm.kl_coef,
            "trainable": lambda path: actor.trainable(path) or critic.trainable(path),
        }
        state = self.first_state(params, optimizer, **options)
        update = self.passes(self.compiled(actor_critic.alternate(actor, critic), state))
        return state, self.to_batch(algorithm), update

    def actor_update(self, algorithm: Algorithm, optimizer: optax.GradientTransformation) -> Part:
        """The actor's part of `start_apart`: gradient steps on the algorithm's loss, without its critic's share."""
        act = policies.actor(self.model, self.sampling)
        loss_fn = make_loss_fn(algorithm, lambda params, batch: act(params["actor"], batch), critic=False)
        parts = self.config.num_microbatches
        step = make_update(loss_fn, optimizer, num_microbatches=parts, trainable=self._is_actor)
        return Part(step, optimizer, self._is_actor)

    def natural_gradient(self, *, max_kl: float, cg_iterations: int, damping: float) -> Part:
        """The actor's part of `start_apart` by TRPO (`trust_region.make_update`)."""
        logits = policies.logits(self.model, self.sampling)
        step = trust_region.make_update(
            lambda params, batch: logits(params["actor"], batch),
            max_kl=max_kl,
            cg_iterations=cg_iterations,
            damping=damping,
            num_microbatches=self.config.num_microbatches,
            trainable=self._is_actor,
        )
        return Part(step, optax.identity(), self._is_actor)

    def critic_update(
        self, algorithm: Algorithm, learning_rate: float, *, updates: int, proximal_coef: float = 0.0
    ) -> Part:
        """The critic's part of `start_apart`: gradient steps on its fit to the targets (`actor_critic.fit_critic`)."""
        options = {"updates": updates, "proximal_coef": proximal_coef}
        optimizer = adamw(learning_rate, b2=0.99, max_grad_norm=self.config.max_grad_norm)
        parts = self.config.num_microbatches
        return actor_critic.fit_critic(
            algorithm, policies.values(self.model), optimizer, num_microbatches=parts, **options
        )

    def _is_actor(self, path: str) -> bool:
        return path.startswith("actor/") and (not self.config.lora_rank or lora.is_adapter(path))

    def first_state(self, params, optimizer, *, kl_coef: float = 0.0, trainable: Trainable | None = None) -> TrainState:
        """The state of update 0, of copies of the parameters."""
        options = {"seed": self.config.seed, "kl_coef": kl_coef, "trainable": trainable}
        return starting.start(self.mesh, params, optimizer, **options)

    def compiled(self, update: Callable, state: TrainState) -> Callable:
        """Compiles (state, batch) -> (state, metrics); the state's arrays are donated and stay where they are."""
        return starting.compiled(self.mesh, update, state)

    def to_batch(self, algorithm: Algorithm) -> Callable[..., Batch]:
        """Builds (rollout, scores, **more) -> Batch, the algorithm's advantages computed; `more` are Experience's."""
        compute = jax.jit(partial(batch_of, algorithm), out_shardings=sharding.rows(self.mesh))

        def build(rollout: Rollout, scores: Scores, **more) -> Batch:
            fields = {name: getattr(scores, name) for name in SAMPLED if getattr(scores, name) is not None}
            return compute(Experience(rollout, **sharding.put_whole(self.mesh, fields), **more))

        return self.timed("update", build, advice=UPDATE_ADVICE)

    def passes(self, step: Callable) -> Callable:
        """Builds (state, batch, key) -> (state, row): epochs × minibatches updates, and the means of what they tell."""
        c = self.config

        def update(state: TrainState, batch: Batch, key: Array) -> tuple[TrainState, dict[str, float]]:
            told, order = [], jax.random.fold_in(key, 1)  # the sampler folds in 0
            for part in starting.minibatches(batch, order, epochs=c.epochs, count=c.minibatches):
                state, metrics_of_part = step(state, part)
                told.append(metrics_of_part)
            row = metrics.sum_up(told)
            if "log_prob_gap" in told[0]:  # later updates are off policy by design
                row["log_prob_gap"] = metrics.to_floats(told[0])["log_prob_gap"]
            return state, row

        return self.timed("update", update, advice=UPDATE_ADVICE)

    def adaptation(self, state: TrainState, controller: Callable, **options) -> Callable:
        """Builds (state, batch) -> (state, row): moves β once the updates of a rollout are done.

        Args:
          state: the first one; its β must be above 0, since controllers multiply it.
          controller: (β, KL) -> β, of `kl`.
          **options: of `update.make_kl_adaptation`.
        """
        if not isinstance(state.kl_coef, jax.ShapeDtypeStruct) and not state.kl_coef > 0:
            raise ValueError(
                f"kl_coef={state.kl_coef}: must be greater than 0 to be adapted, the controllers multiply it; give the "
                "algorithm a kl_coef"
            )
        policy = policies.actor(self.model, self.sampling)
        adapt = make_kl_adaptation(
            lambda params, batch: policy(policies.acting(params), batch),
            controller,
            num_microbatches=self.config.num_microbatches,
            **options,
        )
        step = self.compiled(adapt, state)

        def adapted(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, float]]:
            state, told = step(state, batch)
            return state, metrics.to_floats(told)

        return self.timed("update", adapted)

    def optimizer(self, learning_rate: float, *, updates: int | None = None) -> optax.GradientTransformation:
        """AdamW with the run's options: the rate rises shortly, then falls along a cosine to a twentieth."""
        c = self.config
        updates = c.rl_steps * c.epochs * c.minibatches if updates is None else updates
        schedule = optax.warmup_cosine_decay_schedule(
            0.0,
            learning_rate,
            warmup_steps=updates // 15,
            decay_steps=max(updates, 1),
            end_value=0.05 * learning_rate,
        )
        return adamw(schedule, b2=0.99, max_grad_norm=c.max_grad_norm, weight_decay=c.weight_decay)

    def trainable(self, *, critic: bool) -> Trainable | None:
        """Which parameters are trained: with --lora-rank the adapters and the critic; None for all."""
        return policies.trainable_paths(self.config.lora_rank > 0, self.config.critic if critic else None)

    # ---- The critic and the reference policy -------------------------------------------------------------------------

    def with_critic(self, params: dict) -> dict:
        """Parameters of an actor and a critic beside it, of the kind that --critic says; it predicts 0 at first."""
        both = self._with_critic(params)
        return jax.device_put(both, sharding.shardings(self.mesh, both))

    def _with_critic(self, params: dict) -> dict:
        c, key = self.config, jax.random.fold_in(jax.random.key(self.config.seed), 1)
        critic = policies.init_critic(key, self.model, params, kind=c.critic, rank=c.critic_rank)
        return {"actor": params, "critic": critic}

    @cached_property
    def critic(self) -> Callable[[TrainState, Rollout], Array]:
        """(state, rollout) -> the critic's V before each token [B, T]."""
        values = jax.jit(policies.values(self.model))
        return self.timed("critic", lambda state, rollout: values(state.params, rollout), advice=UPDATE_ADVICE)

    def reference(self, params: dict) -> Callable[[TrainState, Rollout], Array]:
        """Builds (state, rollout) -> log-probs [B, T] under the policy of `params`, which never changes.

        With adapters the reference shares the base with the policy, and keeps the adapters of now. Without, it keeps
        the parameters, in --reference-dtype.
        """
        log_probs, frozen = jax.jit(policies.reference(self.model, self.sampling)), params
        if self.config.lora_rank:
            frozen = {"lora": jax.tree.map(jnp.copy, params["lora"])}
        elif self.config.reference_dtype != "float32":
            frozen = jax.tree.map(lambda x: x.astype(self.config.reference_dtype), params)

        def of(state: TrainState, rollout: Rollout) -> Array:
            whole = lora.base(policies.acting(state.params)) | frozen if self.config.lora_rank else frozen
            return log_probs(whole, rollout)

        return self.timed("reference", of, advice=UPDATE_ADVICE)

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    @cached_property
    def judge(self) -> Callable[..., Scores]:
        """The task's scorers as one, with the run's retries and its way with failures."""
        c = self.config
        return scoring.combine(
            dict(self.task.scorers), retries=c.scorer_retries, raise_failures=c.scorer_failures == "stop"
        )

    @cached_property
    def evaluator(self) -> Evaluator:
        """Held-out accuracy of a policy's parameters."""
        return Evaluator(self.setup)

    @property
    def is_primary(self) -> bool:
        """Is this the process that writes?"""
        return distributed.is_primary()
