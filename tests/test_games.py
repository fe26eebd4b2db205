"""Games: terminated and truncated are told apart, copies start anew, and four algorithms get better at CartPole."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launching import EXPERIMENTS, load

from jaxpg import algorithms
from jaxpg.run import read
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.types import Weighted

sys.path.insert(0, str(EXPERIMENTS / "games"))
import game as games

experiment = load(EXPERIMENTS / "games" / "train.py", "games_train")

GOAL, LIMIT = 3, 4


def walk_reset(key):
    return jnp.zeros(2), jnp.zeros(2)


def walk_step(key, state, action):
    """Action 1 walks on; the goal ends the game by its rules, so does time, but that is no rule of the game."""
    state = state + jnp.stack([action, 1]).astype(jnp.float32)
    terminated = state[0] >= GOAL
    return games.Transition(state, state, 1.0 + state[0], terminated, ~terminated & (state[1] >= LIMIT))


# Its observation is where one is, and the time.
WALK = games.Game(walk_reset, walk_step, num_actions=2, num_features=2, max_steps=LIMIT)


def always(*actions):
    """Logits that leave no choice: one action for each copy."""
    return lambda observations: 1e3 * jax.nn.one_hot(jnp.array(actions), 2)


@functools.cache
def walked(*actions, steps):
    def walk(key):
        envs = games.start(WALK, key, len(actions))
        return games.play(always(*actions), envs, key, game=WALK, steps=steps)

    return jax.jit(walk)(jax.random.key(0))


def test_copies_start_anew_and_show_it():
    """Copy 0 stands still and runs out of time, copy 1 walks to the goal."""
    envs, played = walked(0, 1, steps=5)
    rollout = played.rollout
    np.testing.assert_array_equal(rollout.action_mask, [[0, 1, 1, 1, 1, 1]] * 2)
    np.testing.assert_array_equal(rollout.tokens[:, 1:], [[0] * 5, [1] * 5])
    np.testing.assert_array_equal(rollout.log_probs, np.zeros((2, 6)))
    np.testing.assert_array_equal(played.rewards, [[0, 1, 1, 1, 1, 1], [0, 2, 3, 4, 2, 3]])
    np.testing.assert_array_equal(played.truncated, [[0, 0, 0, 0, 1, 0], [0] * 6])
    np.testing.assert_array_equal(played.terminated, [[0] * 6, [0, 0, 0, 1, 0, 0]])
    # What the next action sees is a game set up anew; what the last one reached is kept besides.
    np.testing.assert_array_equal(rollout.observations[0], [[0, 0], [0, 1], [0, 2], [0, 3], [0, 0], [0, 1]])
    np.testing.assert_array_equal(played.reached[0, 1:], [[0, 1], [0, 2], [0, 3], [0, 4], [0, 1]])
    np.testing.assert_array_equal(rollout.observations[1], [[0, 0], [1, 1], [2, 2], [0, 0], [1, 1], [2, 2]])
    np.testing.assert_array_equal(played.reached[1, 1:], [[1, 1], [2, 2], [3, 3], [1, 1], [2, 2]])
    # One episode of 4 and one of 2 + 3 + 4 have ended; what is left goes on in the next rollout.
    assert (played.episode_return.mean, played.episode_length.mean) == (6.5, 3.5)
    np.testing.assert_array_equal(envs.returns, [1, 5])
    np.testing.assert_array_equal(envs.lengths, [1, 2])
    later = jax.jit(lambda envs, key: games.play(always(0, 1), envs, key, game=WALK, steps=1)[1].episode_return)
    assert later(envs, jax.random.key(2)) == Weighted(9, 1)


def test_truncation_bootstraps_from_the_state_before_the_reset_and_termination_from_nothing():
    """V(place, time) = place + 10·time, so that each value says where it was read. By hand, γ = 0.5, λ = 1."""
    _, played = walked(0, 1, steps=5)
    e = games.experience(played, lambda x: x[..., 0] + 10 * x[..., 1])
    np.testing.assert_array_equal(e.values, [[0, 0, 10, 20, 30, 0], [0, 0, 11, 22, 0, 11]])
    np.testing.assert_array_equal(e.bootstrap[0, 4:], [40, 10])  # out of time at (0, 4); the row is cut at (0, 1)
    np.testing.assert_array_equal(e.bootstrap[1, 3:], [0, 11, 22])  # terminated; goes on; cut at (2, 2)
    got = algorithms.reinforce_baseline(lambda e: e.values, discount=0.5).advantage(e)
    np.testing.assert_allclose(got + e.values, [[0, 1.875, 1.75, 1.5, 1, 1], [0, 4.5, 5, 4, 3.5, 3]])  # no critic
    critic = algorithms.actor_critic_gae(discount=0.5, lambda_=1.0)
    still = [1.875 + 40 / 16, 1.75 + 40 / 8, 1.5 + 40 / 4, 1 + 40 / 2, 1 + 10 / 2]
    walking = [4.5, 5, 4, 3.5 + 22 / 4, 3 + 22 / 2]
    np.testing.assert_allclose(critic.critic.targets(e)[:, 1:], [still, walking])
    one = algorithms.actor_critic(n=1, discount=0.5)
    np.testing.assert_allclose(one.critic.targets(e)[:, 1:], [[6, 11, 16, 21, 6], [7.5, 14, 4, 7.5, 14]])


def test_every_episode_is_evaluated_to_its_end_and_no_further():
    got = games.evaluate(always(0, 1, 1), jax.random.key(0), game=WALK, episodes=3)
    np.testing.assert_array_equal(got, [4, 9, 9])


def test_log_probs_of_the_sampler_are_those_of_the_policy(key):
    @jax.jit
    def both(key):
        params = games.init(key, WALK, width=8)
        params["actor"][-1]["kernel"] *= 100  # else it is nearly uniform
        envs = games.start(WALK, key, 3)
        _, played = games.play(lambda x: games.logits(params, x), envs, key, game=WALK, steps=6)
        e = games.experience(played, lambda x: games.values(params, x))
        batch = algorithms.to_batch(algorithms.ppo(), e)
        return batch, games.policy(params, batch), games.batch_logits(params, batch)

    batch, outputs, logits = both(key)
    assert np.ptp(batch.log_probs[:, 1:]) > 0.1
    np.testing.assert_allclose(outputs.log_probs, batch.log_probs, atol=1e-6)
    np.testing.assert_allclose(outputs.values, batch.values, atol=1e-5)
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits))[:, :-1], batch.tokens[:, 1:, None], -1)
    np.testing.assert_allclose(chosen[..., 0], batch.log_probs[:, 1:], atol=1e-6)


# ---- gymnax ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cartpole():
    pytest.importorskip("gymnax", reason="gymnax is not installed: pip install 'jaxpg[games]'")
    return games.from_gymnax("CartPole-v1")


@pytest.mark.parametrize(
    ("time", "theta", "terminated", "truncated"),
    [(7, 0.0, False, False), (499, 0.0, False, True), (7, 0.3, True, False), (499, 0.3, True, False)],
)
def test_the_time_limit_of_gymnax_is_no_termination(cartpole, time, theta, terminated, truncated):
    state, observation = cartpole.reset(jax.random.key(0))
    assert observation.shape == (cartpole.num_features,) == (4,)
    state = state.replace(time=time, theta=jnp.float32(theta), theta_dot=jnp.float32(0.0))
    after = cartpole.step(jax.random.key(1), state, jnp.int32(1))
    assert (bool(after.terminated), bool(after.truncated)) == (terminated, truncated)
    assert after.observation[2] == pytest.approx(theta, abs=1e-6)  # before any reset


def test_games_that_cannot_be_played_are_named():
    pytest.importorskip("gymnax", reason="gymnax is not installed: pip install 'jaxpg[games]'")
    with pytest.raises(ValueError, match=r"game='Pole': gymnax has no such game, choose among .*CartPole-v1"):
        games.from_gymnax("Pole")
    with pytest.raises(ValueError, match="game='Pendulum-v1' has actions of"):
        games.from_gymnax("Pendulum-v1")


def test_gymnax_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(ValueError, match=r"needs gymnax: pip install 'jaxpg\[games\]'"):
        games.from_gymnax("CartPole-v1")


def train(folder, algorithm, **more):
    config = experiment.Config(algorithm=algorithm, smoke=True, run_dir=folder, **more)
    setup = experiment.prepare(config)
    experiment.train(setup)
    return setup


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("algorithm", ["actor_critic", "a3c", "trpo", "ppo"])
def test_smoke_gets_better_on_eight_devices(algorithm, cartpole, tmp_path, capsys, monkeypatch):
    traces, play = [], games.play  # one a trace of a step of the run
    monkeypatch.setattr(games, "play", lambda *args, **options: traces.append(None) or play(*args, **options))
    setup = train(tmp_path / "run", algorithm)
    assert setup.mesh.size == 8
    assert 1 <= len(traces) <= 2  # a scan may trace its body again, but not once for each of its iterations
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows, evaluations = read.phases(tmp_path / "run", ("iteration", "evaluation"))
    assert [row["step"] for row in rows] == list(range(1, setup.steps * setup.chunk + 1))
    assert rows[-1]["env_steps"] == summary["env_steps"] >= experiment.SMOKE_STEPS
    assert [row["step"] for row in evaluations] == [0, setup.steps]
    assert summary["mean_return"] == evaluations[-1]["mean_return"] > evaluations[0]["mean_return"]
    scores = [row["return"] for row in rows if "return" in row]
    before, after = np.mean(scores[: len(scores) // 5]), np.mean(scores[-len(scores) // 5 :])
    assert after > 1.25 * before
    assert "steps/s" in capsys.readouterr().out


def left_behind(folder):
    """What a run logged, less the clocks, and the fingerprints of its last checkpoint."""
    rows = [row for phase in read.phases(folder, ("iteration", "train", "evaluation")) for row in phase]
    last = Checkpointer(folder / "checkpoints" / "train", read_only=True).latest
    saved = next((folder / "checkpoints" / "train" / str(last) / "record").glob("metadata*"))
    return (
        [{name: value for name, value in row.items() if "seconds" not in name} for row in rows],
        json.loads(saved.read_text())["fingerprints"],
    )


@pytest.mark.usefixtures("quick_compilation")
def test_a_run_that_stopped_ends_as_one_that_did_not(cartpole, tmp_path):
    """Between two checkpoints, with the copies in the midst of their episodes."""
    train(tmp_path / "whole", "actor_critic")
    train(tmp_path / "parts", "actor_critic", stop_after=5, checkpoint_every=3)
    assert not (tmp_path / "parts" / "summary.json").exists()
    train(tmp_path / "parts", "actor_critic", resume=True)
    rows, arrays = left_behind(tmp_path / "parts")
    assert (rows, arrays) == left_behind(tmp_path / "whole")
    assert any("lengths" in name for name in arrays) and len(rows) > 30
    for name in ("mean_return", "env_steps"):
        told = [json.loads((tmp_path / run / "summary.json").read_text())[name] for run in ("parts", "whole")]
        assert told[0] == told[1]


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(cartpole, tmp_path, capsys):
    train(tmp_path / "run", "ppo", dry_run=True)
    assert "7 × 1" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game": "Pole"}, "gymnax has no such game"),
        ({"env_steps": 100}, "--env-steps=100: an iteration takes 2048"),
        ({"mesh": "data=3"}, "mesh='data=3' asks for 3 devices"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(options, message, cartpole, tmp_path):
    with pytest.raises(ValueError, match=message):
        experiment.prepare(experiment.Config(run_dir=tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()
