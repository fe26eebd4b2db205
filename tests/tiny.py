"""A checkpoint of a few thousand random parameters, one character a token."""

import string
from pathlib import Path

import jax

from jaxpg.data import characters
from jaxpg.models import Config, Model, hf

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TOKENIZER = characters(string.ascii_letters + string.digits + " ?!.,+-*/=()<>#\n'[]|:")
MODEL = Model(
    Config(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        mlp_size=16,
        max_length=256,
    )
)


def save(folder: Path, *, chat_template: str | None = CHAT) -> Path:
    """Writes it in Hugging Face's layout, and returns the folder."""
    TOKENIZER.chat_template = chat_template
    hf.save(folder, MODEL.config, MODEL.init(jax.random.key(0)), TOKENIZER)
    return folder
