"""Tokenizers and the way from text to arrays."""

import os

# Before transformers is imported: it complains about a missing torch, which jaxpg never needs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from jaxpg.data.encoding import decode_completions, encode_demonstrations, encode_prompts, encode_segments
from jaxpg.data.packing import pack
from jaxpg.data.tokenizers import characters

__all__ = ["characters", "decode_completions", "encode_demonstrations", "encode_prompts", "encode_segments", "pack"]
