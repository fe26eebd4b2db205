"""Language models as pure functions of a parameter pytree. Flax lives in this package alone."""

from jaxpg.models.cache import Cache
from jaxpg.models.config import Config, RopeScaling
from jaxpg.models.transformer import Model, num_parameters, unstack

__all__ = ["Cache", "Config", "Model", "RopeScaling", "num_parameters", "unstack"]
