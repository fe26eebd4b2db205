"""Published sizes: every preset has as many parameters as its model card says."""

import jax
import pytest

from jaxpg.models import Model, num_parameters
from jaxpg.models.presets import PRESETS

PARAMETERS = {  # of the checkpoints on the hub, in billions
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "llama-3.1-8b": 8.030,
    "llama-3.1-70b": 70.554,
    "gemma-3-27b": 27.009,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_checkpoint(name):
    shapes = jax.eval_shape(Model(PRESETS[name]).init, jax.random.key(0))
    assert num_parameters(shapes) / 1e9 == pytest.approx(PARAMETERS[name], abs=6e-4)
