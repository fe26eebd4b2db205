"""Tokens/s of the sampler, by batch, prompt length and group size, beside the memory-bandwidth limit.

    python tools/bench_sampler.py --model models/smollm2-135m
    python tools/bench_sampler.py --model models/smollm2-135m --transformers     # side by side, needs torch
    python tools/bench_sampler.py --skewed                                       # cost of stragglers

A decode step must read the weights and the cache once: `limit` is the share of that bound which the step reaches, at
the bandwidth measured in the same run by summing an array larger than the caches. Parameters are laid out for decoding
beforehand, as `transformers` does when it loads them; --no-prepared lays them out in each call, as after an update.
Without --model a random one of a few million parameters is measured.
"""

import dataclasses
import math
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxpg import sampling
from jaxpg.models import Config as ModelConfig
from jaxpg.models import Model, hf
from jaxpg.run import cli, report
from jaxpg.sampling import generate
from jaxpg.sampling.driver import Prepared

RANDOM = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=768,
    max_length=8192,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    model: str | None = None  # directory, GGUF file or hub name
    batches: tuple[int, ...] = (1, 4, 16)  # rows
    prompts: tuple[int, ...] = (64,)  # tokens
    groups: tuple[int, ...] = (1,)  # rows that share a prompt
    new_tokens: int = 64
    temperature: float = 1.0
    repeats: int = 3
    dtype: str = "float32"
    unroll: bool | None = None  # as the platform's default
    prepared: bool = True  # lay the parameters out once, not in each call
    transformers: bool = False  # transformers.generate on the same weights, in turns with ours
    skewed: bool = False  # also: rows of geometric lengths with one straggler, against the same tokens without


def prepare(config: Config) -> Config:
    if config.transformers and config.model is None:
        raise ValueError("--transformers needs --model: it loads the same directory")
    return config


def seconds(call, repeats: int) -> float:
    """Median time of a call that has been compiled."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes read a second, by XLA on one device."""
    array = jnp.ones(1 << 26)
    total = jax.jit(jnp.sum)
    return array.nbytes / seconds(lambda: total(array).block_until_ready(), 5)


def main(config: Config) -> None:
    console = Console()
    if config.model is None:
        model_config, params = RANDOM, Model(RANDOM).init(jax.random.key(0))
    else:
        model_config, params, _ = hf.load(config.model, dtype=config.dtype, compute_dtype=config.dtype)
    model, rate = Model(model_config), bandwidth()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    console.print(f"{weights / 1e6:,.0f} MB of weights, {rate / 1e9:.1f} GB/s, {jax.devices()[0].platform}")
    peer = _peer(config) if config.transformers else None
    if config.prepared and config.unroll is not False:
        params = sampling.prepare(params)
    rows = [
        measure(config, model, params, rate, weights, peer, batch, length, group)
        for batch in config.batches
        for length in config.prompts
        for group in config.groups
        if batch % group == 0
    ]
    heads = ("rows", "prompt", "group", "prompt cache MB", "seconds", "tokens/s", "prefill s", "ms/step", "limit")
    heads += ("transformers", "ratio")
    console.print(report.table(f"{config.new_tokens} new tokens", heads, rows))
    if config.skewed:
        console.print(
            report.table("Cost of stragglers", ("lengths", "tokens", "seconds"), skewed(config, model, params))
        )


def measure(config, model, params, rate, weights, peer, batch, length, group):
    """One line of the table."""
    prompts, mask = _prompts(model, batch // group, length)
    options = {"model": model, "stop_tokens": (), "samples_per_prompt": group, "temperature": config.temperature}
    options["unroll"] = config.unroll

    def ours(new_tokens):
        return generate(
            params, prompts, mask, jax.random.key(0), max_new_tokens=new_tokens, **options
        ).tokens.block_until_ready()

    total, first = seconds(lambda: ours(config.new_tokens), config.repeats), seconds(lambda: ours(1), config.repeats)
    step = (total - first) / (config.new_tokens - 1)
    c = model.config
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * c.dtype.itemsize
    cache = (batch // group * length + batch * config.new_tokens / 2) * per_token
    speed = batch * config.new_tokens / total
    line = [f"{batch}", f"{length}", f"{group}", f"{prompt_cache(model, params, prompts, mask, group) / 1e6:.1f}"]
    line += [f"{total:.2f}", f"{speed:,.0f}", f"{first:.2f}", f"{step * 1e3:.1f}"]
    line.append(f"{(weights + cache) / rate / step:.0%}")
    if peer is None:
        return [*line, "", ""]
    theirs = batch * config.new_tokens / seconds(lambda: peer(np.asarray(prompts).repeat(group, 0)), config.repeats)
    return [*line, f"{theirs:,.0f}", f"{speed / theirs:.2f}"]


def prompt_cache(model: Model, params, prompts, mask, group: int) -> int:
    """Bytes that the keys and values of the prompts take."""
    stacked = params.params if isinstance(params, Prepared) else params
    prefill = partial(model.prefill, samples_per_prompt=group, slots=1)
    _, cache = jax.eval_shape(prefill, stacked, prompts, mask)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in (cache.prompt_keys, cache.prompt_values))


def skewed(config: Config, model: Model, params):
    """Lengths of which half are short and one is long, with the time of as many tokens in equal rows beside it."""
    batch = max(config.batches)
    prompts, mask = _prompts(model, batch, config.prompts[0])
    lengths = np.minimum(np.random.default_rng(0).geometric(8 / config.new_tokens, batch), config.new_tokens)
    lengths[0] = config.new_tokens
    even = np.full(batch, -(-lengths.sum() // batch))

    def run(limits):
        return seconds(
            lambda: generate(
                params,
                prompts,
                mask,
                jax.random.key(0),
                model=model,
                stop_tokens=(),
                max_new_tokens=config.new_tokens,
                row_limits=jnp.asarray(limits),
                unroll=config.unroll,
            ).tokens.block_until_ready(),
            config.repeats,
        )

    cases = {
        "skewed": lengths,
        "the same sum, even": even,
        "all as long as the longest": np.full(batch, config.new_tokens),
    }
    return [(name, f"{limits.sum()}", f"{run(limits):.2f}") for name, limits in cases.items()]


def _prompts(model: Model, rows: int, length: int):
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 3, model.config.vocab_size)
    return tokens, jnp.ones((rows, length), bool)


def _peer(config: Config):
    """transformers.generate as a function of prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(Path(config.model), dtype=getattr(torch, config.dtype))
    sampling = (
        {"do_sample": True, "temperature": config.temperature, "top_k": 0}
        if config.temperature
        else {"do_sample": False}
    )

    def run(prompts):
        ids = torch.tensor(prompts, dtype=torch.long)
        new = config.new_tokens
        with torch.inference_mode():
            return peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
                **sampling,
            )

    return run


if __name__ == "__main__":
    cli.main(Config, prepare, main, description=__doc__)
