"""Drawing completions from a policy, and scoring them."""

from jaxpg.sampling.driver import generate, prepare
from jaxpg.sampling.filters import Filter
from jaxpg.sampling.multi_turn import Conversation, converse
from jaxpg.sampling.sampler import sample
from jaxpg.sampling.scoring import score
from jaxpg.sampling.settings import Sampling

__all__ = ["Conversation", "Filter", "Sampling", "converse", "generate", "prepare", "sample", "score"]
