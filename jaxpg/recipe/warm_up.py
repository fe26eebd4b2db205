"""The warm-up: supervised learning on demonstrations before any reward, packed several to a row."""

import json
import typing
from collections.abc import Callable

import jax
import numpy as np

from jaxpg import algorithms
from jaxpg.data import encode_demonstrations, encode_segments, fitting, pack
from jaxpg.parallel import sharding
from jaxpg.recipe.setup import DEMONSTRATIONS, VALIDATION, Setup
from jaxpg.rollout import policies
from jaxpg.run import folder
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.sampling import Sampling
from jaxpg.tasks import chat, draws
from jaxpg.training import start as starting
from jaxpg.training.update import adamw, make_update
from jaxpg.types import Batch

if typing.TYPE_CHECKING:
    from jaxpg.recipe.recipe import Recipe

CHECK_EVERY = 5  # steps between two looks at the accuracy
LOOKED_AT = 512  # training problems that it is measured on
ROW = 32  # least tokens of a packed row
OWN = ("seed", "model", "task", "level", "levels", "spare", "smoke", "lora_rank")  # what else a warm-up depends on


def warm_up(r: "Recipe") -> dict:
    """Learns from demonstrations until the model is mediocre: no better than --warmup-accuracy asks.

    Returns:
      The parameters, those of --warm-start if it is given, and those of the model where there is no warm-up.
    """
    c, params = r.config, r.setup.params()
    if c.warm_start is not None:
        return _taken_over(r, params)
    if not c.warmup_steps:
        return params
    if not c.rl_steps:
        r.evaluator(params)  # plain fine-tuning: what it is compared with
    # The model's own distribution, whatever the temperature of the sampler is.
    plain = policies.actor(r.model, Sampling(stop_tokens=r.sampling.stop_tokens))
    # Where accuracy ends the warm-up, nobody knows how many steps there are to come: then the rate is constant.
    ends_early = c.warmup_accuracy < 1
    rate = c.warmup_learning_rate
    optimizer = adamw(rate, b2=0.99) if ends_early else r.optimizer(rate, updates=c.warmup_steps)
    trainable = r.trainable(critic=False)
    loss_fn = algorithms.make_loss_fn(algorithms.supervised(), plain)
    step = make_update(loss_fn, optimizer, trainable=trainable)
    state = r.first_state(params, optimizer, trainable=trainable)
    del params
    update, batch = starting.compiled(r.mesh, step, state), _batches(r.setup)
    timed, accuracy = r.run.timed("update", update), 0.0
    validation = r.setup.problems(r.setup.stream(VALIDATION), 0, min(LOOKED_AT, r.setup.fitted.size or LOOKED_AT))
    for k, state in r.run.steps(state, c.warmup_steps, phase="warmup", show=("loss", "accuracy")):
        state, metrics = timed(state, batch(k))
        if ends_early and (k + 1) % CHECK_EVERY == 0:
            told = r.evaluator.measure(validation, r.evaluator.complete(state.params, validation))
            r.run.log("warmup_check", k + 1, told)
            accuracy = told["accuracy"]
        r.run.commit(k, state, metrics | {"accuracy": accuracy}, last=accuracy >= c.warmup_accuracy)
    return r.run.state.params


def _batches(setup: Setup) -> Callable[[int], Batch]:
    """Builds k -> batch k: packed rows of the demonstrations, shuffled anew for each pass over them."""
    c = setup.config
    packed, count = pack_demonstrations(setup)
    rows = len(packed.tokens)
    size = max(round(c.warmup_batch_size * rows / count), 1)
    empty = -size % sharding.row_shards(setup.mesh)  # rows without a token, so that no mesh changes what is learned

    def batch(k: int) -> Batch:
        chosen = draws.rows(rows, c.seed, k * size, size)
        part = jax.tree.map(lambda x: np.pad(x[chosen], ((0, empty), (0, 0))), packed)
        return sharding.put_whole(setup.mesh, part)

    return batch


def pack_demonstrations(setup: Setup) -> tuple[Batch, int]:
    """Tokenizes and packs the demonstrations of the task; returns the rows and how many demonstrations they hold.

    Of a data set all are taken, of an endless task --warmup-demonstrations. A completion ends with the token that ends
    a turn in the model's chat format.
    """
    c, task, tokenizer = setup.config, setup.task, setup.tokenizer
    count = setup.fitted.size or (512 if c.smoke else c.warmup_demonstrations)
    problems = setup.problems(setup.stream(DEMONSTRATIONS), 0, count)
    prompts, completions = setup.render(problems), [task.demonstrate(problem) for problem in problems]
    room = setup.prompt_length + setup.max_new_tokens
    asked = fitting.token_counts(tokenizer, prompts)
    answered = [len(ids) for ids, _ in encode_segments(tokenizer, completions)]
    fits = [a + b + 1 <= room for a, b in zip(asked, answered, strict=True)]
    if c.long_prompts == "stop" and not all(fits):
        raise ValueError(
            f"--long-prompts=stop: {fits.count(False)} of {len(fits)} demonstrations exceed {room} tokens: raise "
            "--max-new-tokens, or pass --long-prompts drop"
        )
    kept = [(prompt, text) for prompt, text, fine in zip(prompts, completions, fits, strict=True) if fine]
    if not kept:
        raise ValueError(f"no demonstration of --task={c.task} fits {room} tokens: raise --max-new-tokens")
    end = chat.end_of_turn(tokenizer, setup.sampling.stop_tokens) if task.chat else None
    apart = encode_demonstrations(tokenizer, *zip(*kept, strict=True), length=room, stop_token=end)
    longest = int(apart.token_mask.sum(1).max())
    return pack(apart, length=max(longest, min(ROW, 4 * longest))), len(kept)


def _taken_over(r: "Recipe", like: dict) -> dict:
    """The warm-up of another run, if its options are the same."""
    place, here = r.config.warm_start, folder.config_dict(r.config)
    if not (place / "config.json").exists():
        raise ValueError(f"--warm-start={place} is not the folder of a run: it has no config.json")
    there = json.loads((place / "config.json").read_text())
    names = [name for name in here if name in OWN or name.startswith("warmup_")]
    differing = [
        f"{name} is {there.get(name)} there, {here[name]} here" for name in names if there.get(name) != here[name]
    ]
    if differing:
        raise ValueError(f"--warm-start={place} was warmed up with other options: {'; '.join(differing)}")
    saves = Checkpointer(place / "checkpoints" / "warmup", read_only=True)
    try:
        if not (saves.record() or {"finished": False})["finished"]:
            raise ValueError(f"--warm-start={place} has not finished its warm-up: let it run on with --resume")
        return saves.restore_params(like)
    finally:
        saves.close()
