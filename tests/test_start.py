"""What a run starts from: a state of copies, and minibatches that divide their rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpg import recipe
from jaxpg.parallel import sharding
from jaxpg.training import start, train_state
from jaxpg.types import Batch


def rows(count):
    tokens = jnp.arange(count)[:, None] * jnp.ones((1, 2), jnp.int32)
    return Batch(tokens, *2 * (jnp.ones((count, 2), bool),))


@pytest.mark.parametrize(("count", "minibatches"), [(8, 3), (6, 4), (2, 4)])
def test_minibatches_that_do_not_divide_the_rows_are_named(count, minibatches):
    with pytest.raises(ValueError, match=f"minibatches={minibatches} does not divide the {count} rows"):
        next(start.minibatches(rows(count), jax.random.key(0), epochs=1, count=minibatches))


def test_every_pass_takes_every_row_once_in_an_order_of_its_own():
    parts = [part.tokens[:, 0] for part in start.minibatches(rows(8), jax.random.key(0), epochs=2, count=4)]
    assert [len(part) for part in parts] == [2] * 8
    first, second = np.concatenate(parts[:4]), np.concatenate(parts[4:])
    assert sorted(first) == sorted(second) == list(range(8)) and list(first) != list(second)


def test_an_update_that_donates_its_state_leaves_the_parameters_alone():
    mesh = sharding.make_mesh("data=8")
    params = jax.device_put({"w": jnp.arange(3.0)}, sharding.replicated(mesh))
    state = start.start(mesh, params, optax.sgd(1.0), seed=0)
    update = start.compiled(mesh, lambda state, x: (jax.tree.map(lambda leaf: leaf, state), x), state)
    after, _ = update(state, jnp.zeros(8))
    np.testing.assert_array_equal(params["w"], after.params["w"])
    assert after.params["w"].sharding == state.params["w"].sharding


def test_a_coefficient_that_could_not_move_is_named():
    """Before the policy is built."""
    state = train_state.init({}, optax.sgd(1.0), jax.random.key(0), kl_coef=0.0)
    with pytest.raises(ValueError, match=r"kl_coef=0\.0: must be greater than 0 to be adapted"):
        recipe.Recipe.adaptation(None, state, lambda coef, kl: coef)
