"""Drawing completions from a policy, and scoring them."""

from jaxpg.sampling.filters import Filter
from jaxpg.sampling.sampler import generate, sample
from jaxpg.sampling.score import score

__all__ = ["Filter", "generate", "sample", "score"]
