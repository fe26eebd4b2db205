"""Games as experience: rollouts over many copies of an environment, with an actor and a critic that are small MLPs.

A row is a stretch of play of one copy, and actions are its tokens: what `returns`, `losses`, `update` and
`trust_region` do for language they do here. Index 0 of a row holds no token, it only shows the first observation;
observation t − 1 is to token t what hidden state t − 1 is in a language model, so that `logprobs` aligns both.

    Game ──start, play──▶ Played ──experience──▶ Experience ──algorithms.to_batch──▶ Batch

Episodes end inside rows, in one of two ways, which are told apart throughout:
  terminated  by the rules of the game: nothing more can be earned, the return ends there
  truncated   by the time limit: more could have been earned, so the return goes on with the critic's V of the state
              that was reached, before the game was set up anew
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mlp

from jaxpg.algorithms.algorithm import Outputs
from jaxpg.estimators import logprobs
from jaxpg.types import Array, Batch, Experience, Rollout, StopReason, Weighted, pytree

NO_LIMIT = 2**30  # steps: more than any episode has
# Returns are tens to hundreds. Adam's steps are of one size whatever the gradient's, so that a critic whose outputs are
# of order 1 would get there hundreds of updates late, and the actor would learn from its errors meanwhile.
VALUE_SCALE = 10.0


class Transition(NamedTuple):
    """What an action leads to, before any reset."""

    state: Any
    observation: Array  # [F] float32
    reward: Array  # [] float32
    terminated: Array  # [] bool, by the rules
    truncated: Array  # [] bool, by the time limit alone


class Game(NamedTuple):
    """An environment as pure functions of one copy."""

    reset: Callable  # key -> (state, observation [F])
    step: Callable  # (key, state, action [] int32) -> Transition
    num_actions: int
    num_features: int  # F
    max_steps: int  # the time limit of an episode


@pytree
class Envs:
    """B copies of a game in mid-play."""

    state: Any  # leaves [B, ...]
    observations: Array  # [B, F] float32
    returns: Array  # [B] float32, rewards of the episode so far
    lengths: Array  # [B] int32, actions of the episode so far


@pytree
class Played:
    """T actions of each copy; index 0 of a row is before the first of them."""

    rollout: Rollout  # [B, T + 1], with observations
    rewards: Array  # [B, T + 1] float32
    terminated: Array  # [B, T + 1] bool
    truncated: Array  # [B, T + 1] bool
    reached: Array  # [B, T + 1, F] float32, the observation each action led to, before any reset
    episode_return: Weighted  # mean over the episodes that ended
    episode_length: Weighted  # the same


def from_gymnax(name: str) -> Game:
    """Makes a game of a gymnax environment with a time limit and finitely many actions (classic control, MinAtar).

    gymnax mixes termination and the time limit in `done`. Here the environment itself runs without a limit, so that
    its `done` is termination, and the limit is applied outside.

    Raises:
      ValueError: if gymnax is not installed, has no such environment, or actions are not finitely many.
    """
    try:
        import gymnax
        from gymnax.environments import spaces
    except ImportError as missing:
        raise ValueError(f"game={name!r} needs gymnax: pip install 'jaxpg[games]'") from missing
    if name not in gymnax.registered_envs:
        raise ValueError(f"game={name!r}: gymnax has no such game, choose among {', '.join(gymnax.registered_envs)}")
    env, params = gymnax.make(name)
    actions = env.action_space(params)
    if not isinstance(actions, spaces.Discrete):
        raise ValueError(f"game={name!r} has actions of {actions.shape} numbers: choose a game with finitely many")
    limit, endless = int(params.max_steps_in_episode), params.replace(max_steps_in_episode=NO_LIMIT)

    def flat(observation) -> Array:
        return jnp.ravel(observation).astype(jnp.float32)

    def reset(key):
        observation, state = env.reset_env(key, endless)
        return state, flat(observation)

    def step(key, state, action):
        observation, state, reward, done, _ = env.step_env(key, state, action, endless)
        terminated = jnp.asarray(done, bool)
        truncated = ~terminated & (state.time >= limit)
        return Transition(state, flat(observation), jnp.asarray(reward, jnp.float32), terminated, truncated)

    features = jax.eval_shape(reset, jax.random.key(0))[1].shape[0]
    return Game(reset, step, num_actions=actions.n, num_features=features, max_steps=limit)


# ---- Playing --------------------------------------------------------------------------------------------------------


def start(game: Game, key: Array, num_envs: int) -> Envs:
    """Sets up `num_envs` copies of a game."""
    state, observations = jax.vmap(game.reset)(jax.random.split(key, num_envs))
    state = jax.tree.map(jnp.asarray, state)
    return Envs(state, observations, jnp.zeros(num_envs), jnp.zeros(num_envs, jnp.int32))


def play(logits_fn: Callable[[Array], Array], envs: Envs, key: Array, *, game: Game, steps: int) -> tuple[Envs, Played]:
    """Draws and plays `steps` actions in every copy; a copy whose episode ends is set up anew at once.

    Args:
      logits_fn: observations [B, F] -> logits [B, A] of the policy.
      envs: where the copies stand.
      key: a typed PRNG key.
      game: the rules.
      steps: T.

    Returns:
      Where the copies stand then, and what was played.
    """

    def step(envs: Envs, key: Array):
        actions, log_probs = _draw(jax.random.fold_in(key, 0), logits_fn(envs.observations))
        after = _step_all(game, jax.random.fold_in(key, 1), envs, actions)
        ended = after.terminated | after.truncated
        played = envs.returns + after.reward, envs.lengths + 1
        record = (envs.observations, actions, log_probs, after._replace(state=None), *(x * ended for x in played))
        fresh = start(game, jax.random.fold_in(key, 2), ended.shape[0])
        return _where(ended, fresh, Envs(after.state, after.observation, *played)), record

    envs_after, record = jax.lax.scan(step, envs, jax.random.split(key, steps))
    record = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), record)  # [B, T, ...]
    shown, actions, log_probs, after, returns, lengths = record
    mask = logprobs.align(jnp.ones(actions.shape, bool))
    rollout = Rollout(
        tokens=logprobs.align(actions),
        token_mask=mask,
        action_mask=mask,
        log_probs=logprobs.align(log_probs),
        stop_reason=jnp.full(actions.shape[0], StopReason.BUDGET),
        observations=jnp.concatenate([shown, envs_after.observations[:, None]], axis=1),
    )
    reward, terminated, truncated = (logprobs.align(x) for x in (after.reward, after.terminated, after.truncated))
    reached = jnp.pad(after.observation, ((0, 0), (1, 0), (0, 0)))
    count = jnp.sum(terminated | truncated, dtype=jnp.float32)
    totals = (Weighted(jnp.sum(x, dtype=jnp.float32), count) for x in (returns, lengths))
    return envs_after, Played(rollout, reward, terminated, truncated, reached, *totals)


def experience(played: Played, values_fn: Callable[[Array], Array]) -> Experience:
    """Adds the critic's V to what was played, and marks where episodes ended.

    Args:
      played: from `play`.
      values_fn: observations [..., F] -> V [...].

    Returns:
      Experience whose bootstrap [B, T + 1] is 0 after a termination and else V of the state that was reached.
    """
    rows = played.rewards.shape[0]
    reached = values_fn(played.reached)
    return Experience(
        rollout=played.rollout,
        rewards=jnp.zeros((rows, 1)),  # there is no outcome besides the rewards of the actions
        valid=jnp.ones((rows, 1), bool),
        token_rewards=played.rewards,
        values=logprobs.align(values_fn(played.rollout.observations)[:, :-1]),
        bootstrap=jnp.where(played.terminated, 0.0, reached),
        ends=played.terminated | played.truncated,
    )


def evaluate(logits_fn: Callable[[Array], Array], key: Array, *, game: Game, episodes: int) -> Array:
    """Plays whole episodes, actions drawn from the policy, and returns the return of each [episodes]."""

    def going(carry):
        return jnp.any(carry[2])

    def step(carry):
        key, envs, playing = carry
        key, act_key, step_key = jax.random.split(key, 3)
        after = _step_all(game, step_key, envs, _draw(act_key, logits_fn(envs.observations))[0])
        returns = envs.returns + jnp.where(playing, after.reward, 0.0)
        playing &= ~(after.terminated | after.truncated)
        return key, Envs(after.state, after.observation, returns, envs.lengths + 1), playing

    key, start_key = jax.random.split(key)
    carry = key, start(game, start_key, episodes), jnp.ones(episodes, bool)
    return jax.lax.while_loop(going, step, carry)[1].returns


def _step_all(game: Game, key: Array, envs: Envs, actions: Array) -> Transition:
    return jax.vmap(game.step)(jax.random.split(key, actions.shape[0]), envs.state, actions)


def _draw(key: Array, logits: Array) -> tuple[Array, Array]:
    """Actions [B] int32 of the policy and their log-probs [B]."""
    actions = jax.random.categorical(key, logits).astype(jnp.int32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], axis=-1)
    return actions, chosen[:, 0]


def _where(condition: Array, yes, no):
    """Chooses among two trees of leaves [B, ...] by row; the dtypes are those of `no`."""

    def choose(a, b):
        return jnp.where(condition.reshape(condition.shape + (1,) * (b.ndim - 1)), a, b).astype(b.dtype)

    return jax.tree.map(choose, yes, no)


# ---- The actor and the critic ---------------------------------------------------------------------------------------


def init(key: Array, game: Game, *, width: int = 64) -> dict:
    """Draws an actor and a critic, two hidden layers of `width` each: {"actor": ..., "critic": ...}."""
    actor_key, critic_key = jax.random.split(key)
    hidden = (game.num_features, width, width)
    return {
        "actor": mlp.init(actor_key, (*hidden, game.num_actions), last_scale=0.01),
        "critic": mlp.init(critic_key, (*hidden, 1)),
    }


def logits(params: dict, observations: Array) -> Array:
    """The actor's logits [..., A] of observations [..., F]."""
    return mlp.apply(params["actor"], observations)


def values(params: dict, observations: Array) -> Array:
    """The critic's V [...] of observations [..., F]."""
    return VALUE_SCALE * mlp.apply(params["critic"], observations)[..., 0]


def batch_logits(params: dict, batch: Batch) -> Array:
    """The logits [B, T, A] that `trust_region.make_update` asks for."""
    return logits(params, batch.observations)


def policy(params: dict, batch: Batch) -> Outputs:
    """The policy of `algorithms.make_loss_fn`, with the critic's values."""
    scores = batch_logits(params, batch)
    return Outputs(
        log_probs=logprobs.token_log_probs(scores, batch.tokens),
        entropy=logprobs.entropy(scores),
        values=logprobs.align(values(params, batch.observations)[:, :-1]),
    )
