"""GRPO on a real model: its held-out accuracy rises by rewards alone, on two CPU cores too.

    python tools/get_model.py smollm2-135m
    python experiments/grpo_real.py --model models/smollm2-135m --task arithmetic --level 2
    python experiments/grpo_real.py --model Qwen/Qwen3-0.6B --task gsm8k --prompt-length 256 --max-new-tokens 512
    python experiments/grpo_real.py --model <dir or hub name> --task reasoning_gym:chain_sum --lora-rank 16

Shao et al. 2024, with Dr. GRPO's advantage by --algorithm dr_grpo. The questions are put through the model's own chat
template; the reward is 1 for the right answer, whatever stands around it, and 0 otherwise. Choose a task that the model
solves now and then: what it never solves it cannot learn from, see `zero_variance_groups`. With --lora-rank the base
is frozen and adapters are trained, which saves the optimizer's memory; 0 trains everything.

Expect SmolLM2-135M-Instruct on sums of two two-digit numbers to start near 0.2. The run folder gets curves.png,
metrics.jsonl, ten completions before and after, and at the end the model for `transformers`, in model/.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Literal

import jax

from jaxpg import algorithms, ladder
from jaxpg.estimators import logprobs
from jaxpg.models import Model, hf, lora
from jaxpg.parallel import sharding
from jaxpg.run import cli
from jaxpg.tasks import catalog, chat
from jaxpg.training import loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ladder.Common):
    """Options of GRPO on a real model."""

    model: str  # a directory in Hugging Face's layout, a GGUF file, or a name on the hub
    task: str = "arithmetic"  # arithmetic, countdown, gsm8k, reasoning_gym:<name>
    level: int = 2  # of arithmetic and countdown
    data: Path | None = None  # folder with GSM8K's train.jsonl and test.jsonl; default the hub
    system: str | None = None  # the system's message, in place of the template's own
    algorithm: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    prompt_length: int = 64  # room for a prompt, in tokens
    max_new_tokens: int = 14
    lora_rank: int = 0  # 0: all parameters are trained
    remat: bool = True  # recompute layers in the backward pass, to save memory
    batch_size: int = 64
    group_size: int = 8
    minibatches: int = 1
    num_microbatches: int = 4
    rl_steps: int = 60
    rl_learning_rate: float = 2e-5
    held_out: int = 128
    evaluate_every: int = 10
    checkpoint_every: int = 10


SMOKE = {"batch_size": 16, "group_size": 2, "rl_steps": 2, "held_out": 8, "evaluate_every": 2, "num_microbatches": 1}


def prepare(config: Config):
    """Checks the options, loads the model and opens the folder of the run."""
    c = dataclasses.replace(config, **SMOKE) if config.smoke else config
    if c.lora_rank < 0 or c.max_new_tokens < 1:
        raise ValueError(f"--lora-rank={c.lora_rank}: must be at least 0; --max-new-tokens={c.max_new_tokens}: 1")
    questions = catalog.by_name(c.task, level=c.level, source=c.data)
    model_config, params, tokenizer = hf.load(c.model, mesh=sharding.make_mesh(c.mesh), remat=c.remat)
    task = ladder.Task(
        problems=questions.problems,
        held_out=questions.held_out,
        score=questions.score,
        max_new_tokens=c.max_new_tokens,
        render=lambda problems: chat.render(tokenizer, [questions.ask(p) for p in problems], system=c.system),
    )
    run = ladder.open_run(
        c,
        name="grpo_real",
        model=Model(model_config),
        tokenizer=tokenizer,
        task=task,
        prompt_length=c.prompt_length,
        evaluation_batch=8 if c.smoke else 32,
        driven=True,
    )
    return run, params


def train(prepared) -> None:
    """Learns from rewards alone, and saves the model."""
    run, params = prepared
    c, model = run.config, run.model
    algorithm = {
        "grpo": algorithms.grpo,
        "dr_grpo": partial(algorithms.dr_grpo, max_new_tokens=c.max_new_tokens),
        "rloo": algorithms.rloo,
    }[c.algorithm]()

    def policy(params, batch):  # without ever holding the logits of a whole sequence
        hidden = model.hidden(params, batch.tokens, batch.token_mask)
        return logprobs.from_hidden(partial(model.unembed, params), hidden, batch.tokens, temperature=c.temperature)

    trainable = None
    if c.lora_rank:
        adapters = lora.init(jax.random.key(c.seed), model.config, rank=c.lora_rank)
        params, trainable = lora.attach(params, adapters), lora.is_adapter
        params = jax.device_put(params, sharding.shardings(run.mesh, params))
    with ladder.session(run) as session:
        state, update = ladder.start(run, algorithm, params, policy=policy, trainable=trainable)
        del params  # the state has copies
        step = loop.policy_gradient_step(
            prompts=ladder.prompts(run),
            sample=ladder.sampler(run),
            score=ladder.scorer(run),
            experience=ladder.experience(run),
            to_batch=ladder.to_batch(run, algorithm),
            update=update,
            epochs=c.epochs,
            minibatches=c.minibatches,
        )
        state = ladder.fit(session, step, state)
        merged = lora.merge(model.config, state.params) if c.lora_rank else state.params
        hf.save(c.run_dir / "model", model.config, merged, run.tokenizer)


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
