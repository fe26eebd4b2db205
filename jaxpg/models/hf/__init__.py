"""Checkpoints of other libraries in, and out again: Hugging Face directories, hub names and GGUF files."""

from jaxpg.models.hf.declared import Declared, declared
from jaxpg.models.hf.export import save
from jaxpg.models.hf.load import Loaded, load

__all__ = ["Declared", "Loaded", "declared", "load", "save"]
