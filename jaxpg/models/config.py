"""The one description of a model: everything the Transformer needs to know."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A decoder-only Transformer (RMSNorm, RoPE, grouped-query attention, gated MLP).

    Frozen and hashable, so that it can be a static argument of `jax.jit`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_length: int  # longest sequence, prompt and completion together, in tokens
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = True
    compute_dtype: str = "float32"  # of activations and matmuls; parameters are float32
    remat: bool = False  # recompute each layer in the backward pass instead of keeping its activations

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_size",
            "max_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}: "
                "each key-value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: RoPE rotates pairs, choose an even head_dim")
        if self.compute_dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"compute_dtype={self.compute_dtype!r}: choose float32 or bfloat16")

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.compute_dtype)
