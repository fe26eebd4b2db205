"""Every algorithm by name: it trains; padding, micro-batches, missing scores and garbage off the actions are no matter.

What each one means is proved in test_exact.py and test_exact_losses.py.
"""

import dataclasses
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpg import algorithms
from jaxpg.algorithms.algorithm import Algorithm, Outputs, make_loss_fn, to_batch
from jaxpg.estimators import advantages, kl, segments
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.training import train_state
from jaxpg.training.update import adamw, make_kl_adaptation, make_update
from jaxpg.types import Experience, Rollout

PROMPTS, GROUP, LENGTH, VOCABULARY = 3, 4, 8, 5
ROWS = PROMPTS * GROUP

ALGORITHMS = {
    "supervised": algorithms.supervised(),
    "reinforce": algorithms.reinforce(),
    "reinforce_to_go": algorithms.reinforce_to_go(discount=0.9),
    "reinforce_baseline": algorithms.reinforce_baseline(lambda e: 0.5),
    "remax": algorithms.remax(),
    "rloo": algorithms.rloo(),
    "rloo_clip": algorithms.rloo_clip(),
    "opo": algorithms.opo(),
    "maxrl": algorithms.maxrl(),
    "actor_critic": algorithms.actor_critic(n=2),
    "actor_critic_gae": algorithms.actor_critic_gae(),
    "trpo": algorithms.trpo(),
    "ppo_penalty": algorithms.ppo_penalty(),
    "ppo": algorithms.ppo(entropy_coef=0.01),
    "rlhf": algorithms.rlhf(),
    "ppo_critic_free": algorithms.ppo_critic_free(dual_clip=3.0),
    "reinforce_pp": algorithms.reinforce_pp(kl_coef=0.01),
    "reinforce_pp_baseline": algorithms.reinforce_pp_baseline(kl_coef=0.01),
    "grpo": algorithms.grpo(kl_coef=0.01),
    "dr_grpo": algorithms.dr_grpo(max_new_tokens=LENGTH),
    "dapo": algorithms.dapo(limit=LENGTH, margin=4),
    "lite_ppo": algorithms.lite_ppo(),
    "pass_at_k": algorithms.pass_at_k(k=2),
    "gdpo": algorithms.gdpo(),
    "gspo": algorithms.gspo(),
    "gmpo": algorithms.gmpo(),
    "cispo": algorithms.cispo(),
    "sapo": algorithms.sapo(),
    "with_truncated_importance": algorithms.with_truncated_importance(algorithms.grpo()),
    "with_icepop": algorithms.with_icepop(algorithms.grpo()),
}


def policy(params, batch):
    """A bigram model with a critic: logits and V depend on the token before."""
    before = jnp.concatenate([batch.tokens[:, :1], batch.tokens[:, :-1]], axis=1)
    log_probs = jax.nn.log_softmax(params["actor"][before], axis=-1)
    chosen = jnp.take_along_axis(log_probs, batch.tokens[..., None], axis=-1)[..., 0]
    return Outputs(chosen, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1), params["critic"][before])


def make_params(seed=0):
    first, second = jax.random.split(jax.random.key(seed))
    shape = (VOCABULARY, VOCABULARY)
    return {"actor": jax.random.normal(first, shape), "critic": jax.random.normal(second, shape[:1])}


def make_experience(seed=0):
    """Responses of 1 to 6 tokens after a prompt of one, with everything an algorithm may ask for."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, ROWS)
    column = np.arange(LENGTH)
    action_mask = (column >= 1) & (column < 1 + lengths[:, None])
    floats = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (ROWS, LENGTH)), jnp.int32)
    log_probs = jnp.where(action_mask, -jnp.abs(floats(ROWS, LENGTH)), 0.0)
    return Experience(
        rollout=Rollout(
            tokens=tokens,
            token_mask=jnp.asarray(action_mask | (column == 0)),
            action_mask=jnp.asarray(action_mask),
            log_probs=log_probs,
            stop_reason=jnp.zeros(ROWS, jnp.int32),
        ),
        rewards=jnp.asarray(rng.integers(0, 2, (PROMPTS, GROUP)), jnp.float32),
        valid=jnp.ones((PROMPTS, GROUP), bool),
        scores=floats(PROMPTS, GROUP, 2),
        greedy_rewards=floats(PROMPTS),
        values=floats(ROWS, LENGTH),
        bootstrap=floats(ROWS),
        ref_log_probs=-jnp.abs(floats(ROWS, LENGTH)),
        trainer_log_probs=log_probs + 0.1 * floats(ROWS, LENGTH),
        kl_coef=jnp.float32(0.1),
    )


def gradient(algorithm, experience, num_microbatches=1):
    """One step of plain gradient descent of length 1, as the difference of parameters."""
    optimizer = optax.sgd(1.0)
    update = jax.jit(make_update(make_loss_fn(algorithm, policy), optimizer, num_microbatches=num_microbatches))
    state = train_state.init(make_params(), optimizer, jax.random.key(0), kl_coef=0.1)
    after, metrics = update(state, jax.jit(partial(to_batch, algorithm))(experience))
    return jax.tree.map(lambda old, new: np.asarray(old - new), state.params, after.params), metrics


def assert_same(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance), a, b)


def test_every_algorithm_of_the_module_is_tested_here_and_linked_in_the_readme():
    makers = {
        name
        for name, thing in vars(algorithms).items()
        if not name.startswith("_") and getattr(thing, "__annotations__", {}).get("return") is Algorithm
    }
    assert makers == set(ALGORITHMS)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    missing = {name for name in makers - {"supervised"} if f"`algorithms.{name}`" not in readme}
    assert not missing


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_a_finite_gradient_that_is_not_zero(name):
    found, metrics = gradient(ALGORITHMS[name], make_experience())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    assert np.abs(found["actor"]).max() > 1e-4
    assert (np.abs(found["critic"]).max() > 1e-4) == (ALGORITHMS[name].critic is not None)
    assert all(np.isfinite(m.mean) for m in metrics.values())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_change_nothing(name):
    # Rows are dealt out in turn: a prompt's samples land in different micro-batches, advantages must not notice.
    once, _ = gradient(ALGORITHMS[name], make_experience())
    parts, _ = gradient(ALGORITHMS[name], make_experience(), num_microbatches=3)
    assert_same(once, parts)


def move_right(x, fill):
    """Pads [B, T] arrays by two on the left instead of the right."""
    return jnp.pad(x, ((0, 0), (2, 0)), constant_values=fill)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_padding_and_what_stands_under_the_mask_change_nothing(name):
    experience = make_experience()
    rollout = experience.rollout
    mask = rollout.action_mask
    garbage = {}
    for field in ("values", "ref_log_probs", "trainer_log_probs"):
        dirty = jnp.where(mask, getattr(experience, field), jnp.nan)
        garbage[field] = move_right(dirty, jnp.inf)
    moved = dataclasses.replace(
        experience,
        rollout=Rollout(
            tokens=move_right(jnp.where(rollout.token_mask, rollout.tokens, 3), 2),
            token_mask=move_right(rollout.token_mask, False),
            action_mask=move_right(mask, False),
            log_probs=move_right(rollout.log_probs, 0.0),
            stop_reason=rollout.stop_reason,
        ),
        **garbage,
    )
    assert_same(gradient(ALGORITHMS[name], experience)[0], gradient(ALGORITHMS[name], moved)[0])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_sample_without_a_score_teaches_nothing(name):
    """Its reward is not read, be it NaN; its advantage is 0 and the critic keeps what it predicted."""
    experience = make_experience()
    valid = experience.valid.at[1, 2].set(False)

    def with_reward(reward):
        rewards, scores = (x.at[1, 2].set(reward) for x in (experience.rewards, experience.scores))
        changed = dataclasses.replace(experience, valid=valid, rewards=rewards, scores=scores)
        return to_batch(ALGORITHMS[name], changed)

    batch, other = with_reward(jnp.nan), with_reward(100.0)
    np.testing.assert_array_equal(batch.advantages, other.advantages)
    row = 1 * GROUP + 2
    np.testing.assert_array_equal(batch.advantages[row], 0.0)
    if batch.returns is not None:
        np.testing.assert_array_equal(batch.returns[row], experience.values[row])
    assert np.isfinite(np.where(batch.action_mask, batch.advantages, 0.0)).all()


def test_gdpo_leaves_out_what_either_mask_says():
    experience = make_experience()
    valid, scores_valid = (
        experience.valid.at[1, 2].set(False),
        jnp.ones(experience.scores.shape, bool).at[0, 0].set(False),
    )
    both = dataclasses.replace(experience, valid=valid, scores_valid=scores_valid)
    merged = scores_valid & valid[..., None]
    for e in (both, dataclasses.replace(experience, scores_valid=merged)):
        expected = advantages.decoupled(experience.scores, merged)
        np.testing.assert_array_equal(algorithms.gdpo().advantage(e), expected)


@pytest.mark.parametrize("name", ["ppo", "ppo_critic_free", "grpo", "gspo", "rlhf"])
def test_segments_of_one_token_are_token_level(name):
    experience = make_experience()
    token = dataclasses.replace(experience, segments=segments.token(experience.rollout.action_mask))
    without = experience
    if name == "gspo":  # whose actions are responses without segments; with one token each it is PPO on them
        algorithm = dataclasses.replace(ALGORITHMS["grpo"], loss=algorithms.grpo(clip_low=3e-4, clip_high=4e-4).loss)
        assert_same(gradient(ALGORITHMS["gspo"], token)[0], gradient(algorithm, without)[0])
        return
    assert_same(gradient(ALGORITHMS[name], token)[0], gradient(ALGORITHMS[name], without)[0])


def test_segments_of_whole_responses_have_one_ratio():
    """GRPO over a response as one action: the ratio is that of the product, and the response counts once."""
    experience = make_experience()
    mask = experience.rollout.action_mask
    whole = dataclasses.replace(experience, segments=segments.response(mask), trainer_log_probs=None)
    batch = to_batch(algorithms.grpo(), whole)
    log_probs = jnp.where(mask, batch.log_probs + 0.01, 0.0)
    loss, aux = algorithms.grpo(clip_low=0.9, clip_high=9.0).loss(log_probs, batch)
    lengths = np.asarray(mask.sum(-1, keepdims=True))
    np.testing.assert_allclose(np.where(mask, aux["ratio"], 0), np.where(mask, np.exp(0.01 * lengths), 0), rtol=1e-5)
    summed = np.where(mask, loss, 0).sum(-1, keepdims=True)
    np.testing.assert_allclose(summed, -np.exp(0.01 * lengths) * batch.advantages[:, -1:] * 1.0, rtol=1e-4)


def test_a_missing_critic_is_named():
    headless = lambda params, batch: policy(params, batch)[:2]  # noqa: E731
    batch = to_batch(algorithms.ppo(), make_experience())
    with pytest.raises(ValueError, match=r"policy returned no values.*critic=False"):
        make_loss_fn(algorithms.ppo(), headless)(make_params(), batch)
    make_loss_fn(algorithms.ppo(), headless, critic=False)(make_params(), batch)


WITH_CRITIC = [name for name, algorithm in ALGORITHMS.items() if algorithm.critic is not None]


@pytest.mark.parametrize("name", WITH_CRITIC)
def test_the_critics_loss_is_weighed_by_its_coefficient_and_logged_without(name):
    algorithm = ALGORITHMS[name]
    twice = dataclasses.replace(algorithm, critic=dataclasses.replace(algorithm.critic, coef=1.0))
    (once, metrics), (double, same_metrics) = (gradient(a, make_experience()) for a in (algorithm, twice))
    np.testing.assert_allclose(double["critic"], once["critic"] / algorithm.critic.coef, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(double["actor"], once["actor"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["value_loss"].mean, same_metrics["value_loss"].mean, rtol=1e-6)


@pytest.mark.parametrize("name", WITH_CRITIC)
def test_without_the_critics_loss_only_the_actor_has_a_gradient(name):
    batch = dataclasses.replace(to_batch(ALGORITHMS[name], make_experience()), kl_coef=jnp.full(ROWS, 0.1))

    def gradient_with(critic):
        loss_fn = make_loss_fn(ALGORITHMS[name], policy, critic=critic)
        return jax.grad(lambda params: loss_fn(params, batch)[0].mean)(make_params())

    whole, alone = gradient_with(True), gradient_with(False)
    np.testing.assert_array_equal(alone["critic"], 0.0)
    np.testing.assert_allclose(alone["actor"], whole["actor"], rtol=1e-5, atol=1e-7)


# ---- The KL coefficient ----------------------------------------------------------------------------------------------

KL_IN_LOSS = {"grpo": algorithms.grpo, "reinforce_pp_baseline": algorithms.reinforce_pp_baseline}
KL_IN_LOSS |= {"ppo_penalty": algorithms.ppo_penalty}


@pytest.mark.parametrize("name", KL_IN_LOSS)
def test_an_update_reads_the_coefficient_of_the_state_and_a_bare_loss_that_of_the_algorithm(name):
    algorithm, other = KL_IN_LOSS[name](kl_coef=0.3), KL_IN_LOSS[name](kl_coef=0.1)
    batch = to_batch(algorithm, make_experience())
    assert batch.kl_coef is None

    def loss(algorithm):
        return lambda params: make_loss_fn(algorithm, policy)(params, batch)[0].mean

    at_the_states, _ = gradient(algorithm, make_experience())  # which is 0.1
    assert_same(at_the_states, jax.grad(loss(other))(make_params()))
    assert np.abs(at_the_states["actor"] - jax.grad(loss(algorithm))(make_params())["actor"]).max() > 1e-4


@pytest.mark.parametrize("name", ["rlhf", "reinforce_pp"])
def test_a_kl_in_the_reward_reads_the_coefficient_of_the_experience(name):
    make = {"rlhf": algorithms.rlhf, "reinforce_pp": algorithms.reinforce_pp}[name]
    first, second = (to_batch(make(kl_coef=coef), make_experience()).advantages for coef in (0.3, 0.1))
    np.testing.assert_array_equal(first, second)
    moved = dataclasses.replace(make_experience(), kl_coef=jnp.float32(0.3))
    assert np.abs(to_batch(make(kl_coef=0.3), moved).advantages - first).max() > 1e-3


def test_impossible_coefficients_are_named():
    for make in (algorithms.grpo, algorithms.reinforce_pp, algorithms.reinforce_pp_baseline):
        with pytest.raises(ValueError, match=r"kl_coef=-0\.1: must be 0 or greater"):
            make(kl_coef=-0.1)
    for make in (algorithms.ppo_penalty, algorithms.rlhf):  # whose coefficient is multiplied
        with pytest.raises(ValueError, match="kl_coef=0: must be greater than 0"):
            make(kl_coef=0)


# ---- PPO-penalty: the coefficient lives in the state -----------------------------------------------------------------

CONTROLLERS = {
    "double_or_halve": partial(kl.double_or_halve, low=1e-4, high=1e-3),
    "proportional": partial(kl.proportional, target=1e-3, horizon=100.0, batch=50.0),
}


def penalty_step(controller, optimizer):
    """Three updates on one rollout, then the controller."""
    update = jax.jit(make_update(make_loss_fn(algorithms.ppo_penalty(), policy), optimizer))
    adapt = jax.jit(make_kl_adaptation(policy, controller, num_microbatches=2))
    sampler_matches = lambda params, e: jnp.where(e.rollout.action_mask, policy(params, e.rollout).log_probs, 0.0)  # noqa: E731

    def step(state, k):
        experience = make_experience(k)
        rollout = dataclasses.replace(experience.rollout, log_probs=sampler_matches(state.params, experience))
        batch = to_batch(
            algorithms.ppo_penalty(), dataclasses.replace(experience, rollout=rollout, trainer_log_probs=None)
        )
        for _ in range(3):
            state, _ = update(state, batch)
        return adapt(state, batch)

    return step


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize(("learning_rate", "direction"), [(0.3, 1), (1e-6, -1)])
def test_the_coefficient_follows_the_kl_after_the_updates(name, learning_rate, direction):
    optimizer = adamw(learning_rate)
    state = train_state.init(make_params(), optimizer, jax.random.key(0), kl_coef=0.2)
    after, metrics = penalty_step(CONTROLLERS[name], optimizer)(state, 0)
    assert np.sign(after.kl_coef - state.kl_coef) == direction
    assert (metrics["kl_measured"].mean > 1e-3) == (direction > 0)
    np.testing.assert_allclose(metrics["kl_coef"].mean, after.kl_coef)


def test_a_larger_coefficient_keeps_the_policy_closer():
    optimizer = adamw(0.05)
    moved = []
    for coef in (0.0, 10.0, 1000.0):
        state = train_state.init(make_params(), optimizer, jax.random.key(0), kl_coef=coef)
        moved.append(float(penalty_step(lambda coef, _: coef, optimizer)(state, 0)[1]["kl_measured"].mean))
    assert moved[0] > moved[1] > moved[2]


def test_the_coefficient_is_resumed(tmp_path):
    optimizer = adamw(0.1)
    step = penalty_step(CONTROLLERS["double_or_halve"], optimizer)
    state = train_state.init(make_params(), optimizer, jax.random.key(0), kl_coef=0.2)
    whole = state
    for k in range(4):
        whole, _ = step(whole, k)
    half, _ = step(step(state, 0)[0], 1)
    assert half.kl_coef != state.kl_coef
    saves = Checkpointer(tmp_path / "saves")
    saves.save(2, half, {"steps": 2, "finished": False, "metrics_bytes": 0})
    saves.close()
    again = Checkpointer(tmp_path / "saves")
    resumed, record = again.restore(train_state.init(make_params(1), optimizer, jax.random.key(1)))
    again.close()
    for k in range(record["steps"], 4):
        resumed, _ = step(resumed, k)
    np.testing.assert_array_equal(resumed.kl_coef, whole.kl_coef)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


def test_readme_code_runs():
    """The README's Python, as it stands, against a real batch."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # our own text, not a model's
    made = [thing for thing in names.values() if isinstance(thing, Algorithm)]
    assert made
    for algorithm in made:
        experience = make_experience()
        found, _ = gradient(algorithm, experience)
        assert np.abs(found["actor"]).max() > 1e-4
        # What no scorer applied to moves no one's baseline.
        valid = experience.valid.at[1, 2].set(False)
        found = [
            to_batch(
                algorithm, dataclasses.replace(experience, valid=valid, rewards=experience.rewards.at[1, 2].set(r))
            )
            for r in (jnp.nan, 100.0)
        ]
        assert np.isfinite(found[0].advantages).all()
        np.testing.assert_array_equal(found[0].advantages, found[1].advantages)
