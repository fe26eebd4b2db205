"""The calculator: what it says is no action and carries no gradient, and it computes nothing but small sums."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import algorithms
from jaxpg.tasks import arithmetic
from jaxpg.types import Experience

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))
import calculator  # noqa: E402

PROBLEM = arithmetic.Problem("37*48=", "1776", 5)


@pytest.fixture
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def encode(text):
    return calculator.TOKENIZER.encode(text)


def gradient(algorithm, batch):
    """With respect to the log-prob of every token."""
    loss_fn = algorithms.make_loss_fn(algorithm, lambda log_probs, batch: (log_probs, jnp.zeros_like(log_probs)))
    return np.asarray(jax.grad(lambda x: loss_fn(x, batch)[0].total)(jnp.full(batch.tokens.shape, -1.0)))


def test_smoke(quick_compilation, monkeypatch, capsys):
    heard, converse = [], calculator.converse
    monkeypatch.setattr(
        calculator, "converse", lambda *args, **options: heard.append(converse(*args, **options)) or heard[-1]
    )
    before, after = calculator.train(calculator.prepare(calculator.Config(smoke=True)))
    assert all(0 <= share <= 1 for share in (*before, *after))
    assert "after RL, held out" in capsys.readouterr().out

    observed_any = False
    for talk in heard:
        rollout = talk.rollout
        real, actions = np.asarray(rollout.token_mask), np.asarray(rollout.action_mask)
        behind_prompt = np.arange(real.shape[1]) >= calculator.PROMPT_LENGTH
        observed = real & ~actions & behind_prompt
        np.testing.assert_array_equal(observed.any(1), talk.turns > 1)
        observed_any |= observed.any()
        rewards = jnp.arange(15.0).reshape(5, 3)  # so that every advantage but the middle one's is not 0
        experience = Experience(rollout, rewards, jnp.ones((5, 3), bool))
        found = gradient(algorithms.rloo(), algorithms.to_batch(algorithms.rloo(), experience))
        assert not found[~actions].any()
        assert found[0][actions[0]].all()
    assert observed_any


def test_demonstrations_teach_no_results():
    batch = calculator.demonstrations([PROBLEM, PROBLEM])
    by_heart, called = (
        [
            "".join(calculator.TOKENIZER.decode(t) for t in row[mask])
            for row, mask in zip(batch.tokens, masks, strict=True)
        ]
        for masks in (batch.action_mask, batch.token_mask)
    )
    assert by_heart == ["1776<eos>", "[37*48]1776<eos>"]
    assert called == ["37*48=1776<eos>", "37*48=[37*48]1776|1776<eos>"]
    found = gradient(algorithms.supervised(), batch)
    np.testing.assert_array_equal(found != 0, batch.action_mask)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("[37*48]", "1776"),
        ("[7+8]", "15"),
        ("[7-8]", "-1"),
        ("[999*999]", "998001"),
        ("[1000*2]", ""),
        ("[" + "9" * 5000 + "*2]", ""),
        ("[9**9]", ""),
        ("[9*9*9]", ""),
        ("[1/0]", ""),
        ("[٣*٣]", ""),
        ("[__import__('os')]", ""),
        ("[1*1]\n", ""),
        ("x[1*1]", ""),
        ("]", ""),
    ],
)
def test_only_small_sums_are_computed(call, result):
    assert calculator.calculate(call) == result


@pytest.mark.parametrize(
    ("turn", "observation", "reward", "done"),
    [
        ("[37*48]", "1776|", 0.0, False),
        ("37*48]", "|", 0.0, False),
        ("1776<eos>", "", 1.0, True),
        ("1775<eos>", "", 0.0, True),
        ("1776", "", 0.0, True),  # cut by the budget
        ("1776<pad><eos>", "", 0.0, True),
    ],
)
def test_environment(turn, observation, reward, done):
    tokens = [token for piece in turn.replace("<", " <").replace(">", "> ").split() for token in pieces(piece)]
    assert calculator.environment(PROBLEM, tokens) == (PROBLEM, encode(observation), reward, done)


def pieces(text):
    special = {"<eos>": 1, "<pad>": 0}
    return [special[text]] if text in special else encode(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group-size", "1"], "--group-size=1"),
        (["--temperature", "0"], "--temperature=0.0"),
        (["--held-out", "33"], "--held-out=33"),
    ],
)
def test_bad_options_are_named(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        calculator.cli.main(calculator.Config, calculator.prepare, calculator.train, description="", args=options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
