"""Times and weighs log-probs and entropy from hidden states, in chunks, against the plain way over [B, T, V] logits.

    python tools/bench_logprobs.py                                        # seconds and temporary memory by chunk
    python tools/bench_logprobs.py --rows 8 --length 4096 --vocab 150000 --width 64 --repeats 0     # memory alone

Loss and gradient in the projection and the hidden states. Nothing is allocated where `repeats` is 0.
"""

import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console

from jaxpg.estimators import logprobs
from jaxpg.run import report


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    rows: int = 8
    length: int = 512
    vocab: int = 49152
    width: int = 576
    chunks: tuple[int, ...] = (32, 64, 128, 256)
    repeats: int = 3


def unembed(table, hidden):
    """Logits in float32."""
    return jnp.einsum("...e,ve->...v", hidden, table, preferred_element_type=jnp.float32)


def plain(table, hidden, tokens):
    """Loss over the logits of every position at once."""
    logits = unembed(table, hidden)
    return jnp.mean(logprobs.token_log_probs(logits, tokens)) + 0.01 * jnp.mean(logprobs.entropy(logits))


def chunked(table, hidden, tokens, *, chunk, with_entropy=True):
    """The same loss in chunks."""
    log_probs, entropy = logprobs.from_hidden(
        partial(unembed, table), hidden, tokens, chunk=chunk, with_entropy=with_entropy
    )
    return jnp.mean(log_probs) + (0.01 * jnp.mean(entropy) if with_entropy else 0.0)


def main(config: Config) -> None:
    c = config
    shapes = (
        jax.ShapeDtypeStruct((c.vocab, c.width), jnp.float32),
        jax.ShapeDtypeStruct((c.rows, c.length, c.width), jnp.float32),
        jax.ShapeDtypeStruct((c.rows, c.length), jnp.int32),
    )
    losses = {"plain": plain}
    losses |= {f"chunk {n}": partial(chunked, chunk=n) for n in c.chunks}
    losses |= {f"chunk {n}, no entropy": partial(chunked, chunk=n, with_entropy=False) for n in c.chunks}
    compiled = {n: jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(*shapes).compile() for n, f in losses.items()}
    best = dict.fromkeys(losses, float("inf"))
    if c.repeats:
        keys = jax.random.split(jax.random.key(0), 3)
        args = [0.05 * jax.random.normal(keys[0], shapes[0].shape), jax.random.normal(keys[1], shapes[1].shape)]
        args += [jax.random.randint(keys[2], shapes[2].shape, 0, c.vocab)]
    for _ in range(c.repeats):  # in turn, so that a busy machine disturbs all alike
        for name, function in compiled.items():
            started = time.perf_counter()
            jax.block_until_ready(function(*args))
            best[name] = min(best[name], time.perf_counter() - started)
    gigabytes = {name: f.memory_analysis().temp_size_in_bytes / 1e9 for name, f in compiled.items()}
    rows = [
        (name, f"{best[name]:.2f}" if c.repeats else "-", f"{size:.2f}", f"{gigabytes['plain'] / size:.1f}")
        for name, size in gigabytes.items()
    ]
    title = f"{c.rows} x {c.length} tokens, vocabulary {c.vocab}, width {c.width}, {jax.devices()[0].platform}"
    Console().print(report.table(title, ("", "seconds, best", "temporary GB", "times less"), rows))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
