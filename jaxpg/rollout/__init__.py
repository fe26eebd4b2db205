"""From a policy to scored completions, and what is told about them."""

from jaxpg.rollout.describe import describe
from jaxpg.rollout.dynamic_sampling import Drawn, has_signal, replace_groups

__all__ = ["Drawn", "describe", "has_signal", "replace_groups"]
