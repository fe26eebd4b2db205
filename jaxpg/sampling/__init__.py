"""Drawing completions from a policy, and scoring them."""

from jaxpg.sampling.filters import Filter
from jaxpg.sampling.generate import generate
from jaxpg.sampling.multi_turn import Conversation, converse
from jaxpg.sampling.sampler import sample
from jaxpg.sampling.score import score

__all__ = ["Conversation", "Filter", "converse", "generate", "sample", "score"]
