"""Drawing completions from a policy."""

from jaxpg.sampling.sampler import Filter, sample

__all__ = ["Filter", "sample"]
