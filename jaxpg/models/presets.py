"""The sizes of published models, to reckon with before a weight is loaded.

Each is what the model's own `config.json` on the Hugging Face hub says and what `hf.load` would build from it: Qwen3
(Yang et al. 2025, table 1), Llama 3.1 (Grattafiori et al. 2024, table 3), Gemma 3 (Gemma Team 2025, table 1; its text
model).
"""

from jaxpg.models.config import Config, RopeScaling


def _qwen3(hidden_size: int, num_layers: int, num_heads: int, mlp_size: int, *, tie_embeddings: bool) -> Config:
    return Config(
        vocab_size=151_936,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=mlp_size,
        max_length=40_960,
        tie_embeddings=tie_embeddings,
        rope_base=1e6,
        query_key_norm=True,
    )


def _llama(hidden_size: int, num_layers: int, num_heads: int, mlp_size: int) -> Config:
    return Config(
        vocab_size=128_256,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=mlp_size,
        max_length=131_072,
        tie_embeddings=False,
        rope_base=5e5,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_length=8192),
        norm_epsilon=1e-5,
    )


def _gemma3(hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int, mlp_size: int) -> Config:
    return Config(
        vocab_size=262_208,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        mlp_size=mlp_size,
        max_length=131_072,
        rope_base=1e6,
        rope_scaling=RopeScaling(kind="linear", factor=8.0),
        local_rope_base=1e4,
        window=1024,
        local_layers=tuple(i % 6 != 5 for i in range(num_layers)),  # five local ones, then one that sees everything
        activation="gelu_tanh",
        norm_offset=1.0,
        query_key_norm=True,
        post_norms=True,
        embedding_scale=hidden_size**0.5,
        query_scale=(hidden_size / num_heads) ** -0.5,
    )


PRESETS: dict[str, Config] = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tie_embeddings=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tie_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, tie_embeddings=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408, tie_embeddings=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600, tie_embeddings=False),
    "llama-3.1-8b": _llama(4096, 32, 32, 14_336),
    "llama-3.1-70b": _llama(8192, 80, 64, 28_672),
    "gemma-3-27b": _gemma3(5376, 62, 32, 16, 21_504),
}
