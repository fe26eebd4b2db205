"""Tasks of reasoning-gym by name; without the package, what to install."""

import importlib.util
import sys

import pytest

from jaxpg.tasks import gym

MISSING = importlib.util.find_spec("reasoning_gym") is None
installed = pytest.mark.skipif(MISSING, reason="reasoning-gym is not installed (extra reasoning)")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxpg\[reasoning\]'"):
        gym.problems("chain_sum", 0, 0, 1, max_terms=5)


@installed
def test_problems_are_a_function_of_seed_and_index_and_their_answers_score():
    whole = gym.problems("chain_sum", 1, 0, 12)
    assert whole[4:9] == gym.problems("chain_sum", 1, 4, 5)
    for problem in whole:
        assert gym.score(problem, problem.answer) == 1.0
        assert gym.score(problem, f"let me see: <answer> {problem.answer} </answer>.") == 1.0
        assert gym.score(problem, "<answer>no</answer>") < 0.5
        assert gym.score(problem, "") < 0.5


@installed
def test_streams_share_no_problems_by_their_seeds_and_none_is_held_out():
    a, b = ({p.prompt for p in gym.problems("chain_sum", seed, 0, 100, min_digits=4, max_digits=4)} for seed in (0, 1))
    held = {p.prompt for p in gym.problems("chain_sum", 0, 0, 30, held_out=True, min_digits=4, max_digits=4)}
    assert len(a & b) == 0 and not held & (a | b)


@installed
def test_what_the_package_does_not_know_is_named():
    with pytest.raises(ValueError, match=r"name='chain_sums': reasoning-gym knows .*chain_sum"):
        gym.problems("chain_sums", 0, 0, 1)
    with pytest.raises(ValueError, match="refuses the options"):
        gym.problems("chain_sum", 0, 0, 1, minimum=2)
    with pytest.raises(ValueError, match="refuses the options"):
        gym.problems("chain_sum", 0, 0, 1, min_terms=-1)
    with pytest.raises(ValueError, match="has a count instead"):
        gym.problems("chain_sum", 0, 0, 1, size=3)
