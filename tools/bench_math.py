"""Times the advantages, returns and losses of a large batch against one forward pass of a model on the same device.

    python tools/bench_math.py            # 512 × 4096 tokens against a model of 100M parameters

The model's forward pass is timed on `model_rows` rows and scaled to all rows: its cost per row does not depend on how
many there are.
"""

import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from jaxpg.estimators import advantages, aggregate, losses, masked, returns, segments
from jaxpg.models import Config as ModelConfig
from jaxpg.models import Model, num_parameters
from jaxpg.run import report


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    rows: int = 512
    length: int = 4096
    group_size: int = 16
    model_rows: int = 1
    repeats: int = 5


def seconds(function, *args, repeats: int) -> float:
    """Median of a compiled call."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*args))
    laps = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        laps.append(time.perf_counter() - started)
    return float(np.median(laps))


def with_gradient(loss, log_probs, mask):
    """A loss aggregated, and its gradient."""
    return jax.value_and_grad(lambda x: aggregate.token_mean(loss(x)[0], mask).mean)(log_probs)


def main(config: Config) -> None:
    c = config
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (c.rows, c.length)
    mask = jnp.arange(c.length) < jax.random.randint(keys[0], (c.rows, 1), 1, c.length + 1)
    log_probs = -jax.random.exponential(keys[1], shape)
    old = log_probs + 0.1 * jax.random.normal(keys[2], shape)
    values, rewards = jax.random.normal(keys[3], shape), jax.random.normal(keys[4], shape)
    outcome = rewards[:, 0].reshape(-1, c.group_size)
    steps = jnp.where(mask, jnp.arange(c.length) // 64, -1)
    loss_of = {
        "ppo_clip + gradient": lambda x: losses.ppo_clip(x, old, values),
        "gspo + gradient": lambda x: losses.gspo(x, old, values[:, :1], mask),
        "cispo + gradient": lambda x: losses.cispo(x, old, values, clip_high=4.0),
    }
    timed = {
        "group_normalized": (advantages.group_normalized, outcome),
        "reward_to_go": (returns.reward_to_go, rewards, mask),
        "gae": (returns.gae, rewards, values, mask),
        "n_step(8)": (partial(returns.n_step, n=8), rewards, values, mask),
        "segment_gae": (returns.segment_gae, rewards, values, steps, mask),
        "segments.mean": (segments.mean, rewards, steps, mask),
        "whiten": (masked.whiten, values, mask),
    }
    timed |= {name: (partial(with_gradient, loss), log_probs, mask) for name, loss in loss_of.items()}

    model = Model(
        ModelConfig(
            vocab_size=32_000, hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64, mlp_size=2048,
            max_length=c.length,
        )
    )  # fmt: skip
    params = model.init(jax.random.key(0))
    tokens = jax.random.randint(keys[0], (c.model_rows, c.length), 0, 32_000)
    forward = seconds(model.logits, params, tokens, jnp.ones(tokens.shape, bool), repeats=c.repeats)
    forward *= c.rows / c.model_rows

    rows = []
    for name, (function, *args) in timed.items():
        took = seconds(function, *args, repeats=c.repeats)
        rows.append((name, f"{1e3 * took:.1f}", f"{100 * took / forward:.4f} %"))
    millions = num_parameters(params) / 1e6
    title = f"{c.rows} x {c.length} tokens on {jax.devices()[0].platform}; forward of {millions:.0f}M: {forward:.1f} s"
    Console().print(report.table(title, ("function", "ms", "of the forward pass"), rows))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
