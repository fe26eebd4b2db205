"""The training loop refuses what it cannot do before it compiles or scores anything."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpg.training import loop, train_state
from jaxpg.types import Rollout


def never(*_):
    raise AssertionError("reached")


def sample_rows(rows):
    mask = jnp.ones((rows, 2), bool)
    return lambda *_: Rollout(jnp.zeros((rows, 2), jnp.int32), mask, mask, jnp.zeros((rows, 2)), jnp.zeros(rows))


def step_of(sample, **options):
    """A step that comes as far as its sampler."""
    return loop.policy_gradient_step(
        prompts=lambda k: loop.Prompts(np.zeros((1, 1), np.int32), np.ones((1, 1), bool), ["?"]),
        sample=sample,
        score=never,
        experience=never,
        to_batch=never,
        update=never,
        **options,
    )


def state_of(kl_coef=0.0):
    return train_state.init({}, optax.sgd(1.0), jax.random.key(0), kl_coef=kl_coef)


@pytest.mark.parametrize(("rows", "minibatches"), [(8, 3), (6, 4), (2, 4)])
def test_minibatches_that_do_not_divide_the_rows_are_named(rows, minibatches):
    with pytest.raises(ValueError, match=f"minibatches={minibatches} does not divide the {rows} rows"):
        step_of(sample_rows(rows), minibatches=minibatches)(state_of(), 0)


@pytest.mark.parametrize("rows", [8, 6])
def test_minibatches_that_divide_the_rows_go_on(rows):
    with pytest.raises(AssertionError, match="reached"):
        step_of(sample_rows(rows), minibatches=2)(state_of(), 0)


@pytest.mark.parametrize("name", ["epochs", "minibatches"])
def test_less_than_one_pass_is_named(name):
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        step_of(never, **{name: 0})


def test_a_coefficient_that_could_not_move_is_named():
    """Before the sampler compiles."""
    with pytest.raises(ValueError, match=r"kl_coef=0\.0: must be greater than 0.*train_state\.init"):
        step_of(never, adapt=never)(state_of(), 0)
    for coef, adapt in ((0.2, never), (0.0, None)):
        with pytest.raises(AssertionError, match="reached"):
            step_of(never, adapt=adapt)(state_of(coef), 0)
