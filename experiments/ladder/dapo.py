"""DAPO: GRPO without a KL, with a higher upper clip bound, token means, and groups that all have a signal.

    python experiments/ladder/dapo.py                    # --smoke shows that it runs; --help lists the options

Yu et al. 2025. Dynamic sampling: a group whose samples are all right or all wrong has advantage 0 and only dilutes
the batch. It is replaced, until the batch is full or --max-resamples draws are spent. The upper clip bound is higher,
so that unlikely tokens may become likely. The loss averages over the tokens of the batch, and completions near the
budget are punished a little.

Differs from the paper: groups stay in the batch once the draws are spent, so its shape, and with it the compiled
program, stays the same. The log has `sampled_groups`, how often the batch was drawn.
"""

import dataclasses

import jax

from jaxpg import algorithms, recipe
from jaxpg.rollout import Drawn, describe, has_signal, replace_groups
from jaxpg.run.ranges import NonNegative, NonNegativeFloat, Positive, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of DAPO."""

    clip_low: Share = 0.2
    clip_high: NonNegativeFloat = 0.28
    max_resamples: NonNegative = 3  # draws a step, beyond the first
    overlong_margin: Positive = 1  # tokens before the budget from where on length is punished


def train(r: recipe.Recipe) -> None:
    """Samples groups until all of them have a signal, and follows the clipped surrogate of their z-scores."""
    c, budget = r.config, r.setup.max_new_tokens
    clip = {"clip_low": c.clip_low, "clip_high": c.clip_high}
    algorithm = algorithms.dapo(limit=budget, margin=c.overlong_margin, **clip)
    state, to_batch, update = r.start(algorithm, r.warm_up())

    def draw(params, k: int, attempt: int) -> Drawn:
        prompts = r.prompts(k * (1 + c.max_resamples) + attempt)
        rollout = r.sample(params, prompts, jax.random.fold_in(r.key(k), attempt))
        return Drawn(prompts, rollout, r.score(prompts, rollout))

    for k, state in r.steps(state):
        kept, draws = draw(state.params, k, 0), 1
        while draws <= c.max_resamples and not has_signal(kept.scores).all():
            kept, draws = replace_groups(kept, draw(state.params, k, draws)), draws + 1
        batch = to_batch(kept.rollout, kept.scores)  # advantage = z-score of the reward, overlong ones punished
        state, metrics = update(state, batch, r.key(k))
        r.commit(k, state, describe(*kept) | metrics | {"sampled_groups": draws})


if __name__ == "__main__":
    recipe.main(Config, train, name="dapo", description=__doc__)
