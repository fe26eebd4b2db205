"""The sampler of a recipe: completions of prompts, or conversations where the task has an environment."""

import functools
from collections.abc import Callable, Sequence

import jax

from jaxpg.data import encode_prompts
from jaxpg.parallel import distributed, sharding
from jaxpg.recipe.setup import Setup
from jaxpg.sampling import Sampling, converse, generate, sample
from jaxpg.sampling.resharding import on_mesh
from jaxpg.types import Array, Prompts, Rollout


def encode(setup: Setup, problems: Sequence) -> Prompts:
    """Tokenizes problems, each process its own, and spreads them over the mesh."""
    texts = setup.render(distributed.pick_local(setup.mesh, problems))
    arrays = encode_prompts(setup.tokenizer, texts, length=setup.prompt_length)
    return Prompts(*sharding.put_rows(setup.mesh, arrays), problems)


def make_sampler(setup: Setup, sampling: Sampling, *, samples_per_prompt: int) -> Callable[..., Rollout]:
    """Builds (params, prompts, key, greedy=False) -> Rollout; with `greedy` two of them, the second one greedy.

    It runs on the sampler's mesh; its arguments and results are of the run's mesh. Where the task has an environment,
    the policy takes turns with it.

    Args:
      setup: its model and budgets.
      sampling: the distribution that is sampled.
      samples_per_prompt: G.
    """
    options = {
        "model": setup.model,
        "max_new_tokens": setup.max_new_tokens,
        "samples_per_prompt": samples_per_prompt,
    } | sampling.options
    moved = functools.partial(on_mesh, model=setup.model, trained=setup.mesh, sampled=setup.sampler_mesh)
    if setup.task.environment is not None:
        return _conversations(setup, moved, options)

    @functools.cache
    def draw(greedy: bool):
        function = functools.partial(generate if setup.spoken else sample, **options, greedy=greedy)
        if not setup.spoken:  # completions are short: one compiled program
            function = jax.jit(function, out_shardings=sharding.rows(setup.sampler_mesh))
        return moved(function)

    def sampler(params, prompts: Prompts, key: Array, *, greedy: bool = False):
        return draw(greedy)(params, prompts.tokens, prompts.mask, jax.random.fold_in(key, 0))

    return sampler


def _conversations(setup: Setup, moved: Callable, options: dict) -> Callable[..., Rollout]:
    task = setup.task
    environment = task.environment(setup.tokenizer, options["stop_tokens"])

    def talk(params, tokens, mask, key, problems):
        states = [problem for problem in problems for _ in range(options["samples_per_prompt"])]
        return converse(
            params,
            tokens,
            mask,
            key,
            environment=environment,
            states=states,
            max_turns=task.max_turns,
            **options,
        ).rollout

    draw = moved(talk)

    def sampler(params, prompts: Prompts, key: Array, *, greedy: bool = False):
        if greedy:
            raise ValueError("greedy=True: a conversation has no greedy row beside it, choose a task of one turn")
        return draw(params, prompts.tokens, prompts.mask, jax.random.fold_in(key, 0), prompts.problems)

    return sampler
