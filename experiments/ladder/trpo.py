"""TRPO: the largest step that keeps the new policy within a given KL of the one that sampled.

    python experiments/ladder/trpo.py                    # --smoke shows that it runs; --help lists the options
    python experiments/ladder/trpo.py --model models/smollm2-135m --lora-rank 8 --critic lora

Schulman et al. 2015. Each rollout gives one step along the natural gradient, found by conjugate gradients on products
with the Fisher matrix, and a line search that accepts nothing that breaks the bound or does not improve the
surrogate. The step has no learning rate: δ is in nats of the mean KL of a token. The critic is fitted by gradient
steps beside it.

Differs from the paper: the Fisher products are taken on the whole batch rather than a tenth of it; a critic of its
own with GAE in place of Monte Carlo returns. Each step costs about ten times one of PPO, and conjugate gradients keep
--cg-iterations vectors of the trained parameters: adapters make that affordable for a checkpoint.
"""

import dataclasses
from typing import Annotated

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import NonNegativeFloat, Only, Positive, PositiveFloat, Share

WHY = "TRPO compares whole distributions"


@dataclasses.dataclass(frozen=True)
class Config(recipe.CriticConfig):
    """Options of TRPO."""

    minibatches: Positive = 1
    top_k: Annotated[int, Only(0, WHY)] = 0
    top_p: Annotated[float, Only(1, WHY)] = 1.0
    min_p: Annotated[float, Only(0, WHY)] = 0.0
    max_kl: PositiveFloat = 0.01  # δ, nats a token
    cg_iterations: Positive = 10
    damping: NonNegativeFloat = 1e-3
    lambda_: Share = 1.0  # of GAE
    critic_learning_rate: PositiveFloat | None = None  # default 2e-3, or 1e-4 with --model
    critic_updates: Positive = 3  # a rollout


def train(r: recipe.Recipe) -> None:
    """Samples, scores, and takes the natural-gradient step that the trust region allows."""
    c = r.config
    algorithm = algorithms.trpo(lambda_=c.lambda_)
    actor = r.natural_gradient(max_kl=c.max_kl, cg_iterations=c.cg_iterations, damping=c.damping)
    critic = r.critic_update(algorithm, c.critic_learning_rate, updates=c.critic_updates)
    state, to_batch, update = r.start_apart(algorithm, r.warm_up(), actor, critic)
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params["actor"], prompts, r.key(k))
        scores = r.score(prompts, rollout)
        values = r.critic(state, rollout)
        batch = to_batch(rollout, scores, values=values)  # advantage = GAE
        state, metrics = update(state, batch, r.key(k))  # maximize E[ratio · advantage] subject to KL ≤ δ
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="trpo", description=__doc__)
