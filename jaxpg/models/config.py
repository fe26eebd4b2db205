"""The one description of a model: everything the Transformer needs to know."""

import dataclasses

import jax
import jax.numpy as jnp

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_size",
    "max_length",
)
DTYPES = ("float32", "bfloat16", "float16", "float64")
ACTIVATIONS = ("silu", "gelu_tanh")
ATTENTION = ("xla", "cudnn", "splash")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to contexts longer than the model was first trained on."""

    kind: str  # "linear" (Chen 2023), "llama3" (Llama 3.1 report) or "yarn" (Peng 2023)
    factor: float  # how many times longer the context became
    original_length: int = 0  # context of the first training, in tokens; not read by "linear"
    low: float = 1.0  # llama3: low_freq_factor; yarn: beta_slow, turns below which a pair is stretched in full
    high: float = 4.0  # llama3: high_freq_factor; yarn: beta_fast, turns above which it is left alone
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines
    truncate: bool = True  # yarn: round the two bounds to whole pairs

    def __post_init__(self):
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"kind={self.kind!r}: RoPE scaling is one of linear, llama3, yarn")
        if self.factor < 1:
            raise ValueError(f"factor={self.factor}: RoPE scaling stretches a context, by at least 1")
        if self.kind != "linear" and self.original_length < 1:
            raise ValueError(f"original_length={self.original_length}: RoPE scaling {self.kind} needs a positive one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A decoder-only Transformer (RMSNorm, RoPE, grouped-query attention, gated MLP or experts).

    The defaults are Llama's; every other family is a few fields away. Frozen and hashable, so that it can be a static
    argument of `jax.jit`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_length: int  # longest sequence, prompt and completion together, in tokens
    tie_embeddings: bool = True
    stop_tokens: tuple[int, ...] = ()  # ids that end a reply, where a checkpoint names them

    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_base: float | None = None  # of local layers, never scaled; None: as the others
    window: int | None = None  # a local layer sees this many tokens, itself included
    local_layers: tuple[bool, ...] = ()  # which layers are local; empty: all if `window` is set

    activation: str = "silu"  # of the MLP's gate: silu or gelu_tanh
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0  # a norm multiplies by offset + scale; Gemma: 1
    query_key_norm: bool = False  # RMS norm of each head's queries and keys
    post_norms: bool = False  # norms also behind attention and MLP
    qkv_bias: bool = False
    embedding_scale: float = 1.0  # multiplies the embeddings
    query_scale: float | None = None  # multiplies queries · keys; None: 1/sqrt(head_dim)
    attention_softcap: float | None = None  # c·tanh(score/c)
    final_softcap: float | None = None  # c·tanh(logit/c)

    num_experts: int = 0  # 0: one dense MLP; else `mlp_size` is that of one expert
    experts_per_token: int = 0
    normalize_experts: bool = True  # do the weights of the chosen experts add up to 1?

    compute_dtype: str = "float32"  # of activations and matmuls; norms, softmax and logits are float32
    attention: str = "xla"  # xla (anywhere), cudnn (GPU, bfloat16) or splash (TPU; elsewhere interpreted, slow)
    remat: bool = False  # recompute each layer in the backward pass instead of keeping its activations
    remat_policy: str = "nothing_saveable"  # what remat keeps: a name in `jax.checkpoint_policies`
    lora_alpha: float = 16.0  # adapters of rank r are scaled by alpha / r

    def __post_init__(self):
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}: "
                "each key-value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: RoPE rotates pairs, choose an even head_dim")
        for name, known in (("compute_dtype", DTYPES), ("activation", ACTIVATIONS), ("attention", ATTENTION)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(known)}")
        if not hasattr(jax.checkpoint_policies, self.remat_policy):
            raise ValueError(f"remat_policy={self.remat_policy!r}: there is no such name in jax.checkpoint_policies")
        self._check_windows()
        self._check_experts()
        if self.attention == "cudnn" and self.attention_softcap is not None:
            raise ValueError(
                f"attention='cudnn' has no attention_softcap={self.attention_softcap}: choose xla or splash"
            )

    def _check_windows(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: must be at least 1, or None")
        if self.local_layers and len(self.local_layers) != self.num_layers:
            raise ValueError(f"local_layers has {len(self.local_layers)} entries for num_layers={self.num_layers}")
        if any(self.local_layers) and self.window is None:
            raise ValueError("local_layers names local layers, but window=None: say how many tokens they see")

    def _check_experts(self):
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token}: must be between 1 and num_experts={self.num_experts}"
            )

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.compute_dtype)

    @property
    def locality(self) -> tuple[bool, ...]:
        """Whether each layer is local."""
        return self.local_layers or (self.window is not None,) * self.num_layers

    @property
    def score_scale(self) -> float:
        """What queries · keys are multiplied by."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale
