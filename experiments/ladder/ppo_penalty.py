"""PPO with an adaptive penalty: several updates a rollout, held back by β times the KL to the policy that sampled.

    python experiments/ladder/ppo_penalty.py             # --smoke shows that it runs; --help lists the options

Schulman et al. 2017, section 4. TRPO's constraint becomes a term of the loss, so that ordinary gradient steps do.
After each rollout β is doubled if the KL was above 1.5 times its target, and halved below two thirds of it. The log
has `kl_measured` and `kl_coef`.

Differs from the paper: by default actor and critic share no weights; the KL is estimated from the samples (k3). Watch
β: a target far below what Adam moves the policy in one rollout, whatever the loss, makes β grow without end.
"""

import dataclasses
from functools import partial

from jaxpg import algorithms, kl, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import NonNegativeFloat, Positive, PositiveFloat, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.CriticConfig):
    """Options of PPO with a penalty."""

    epochs: Positive = 2
    lambda_: Share = 1.0  # of GAE
    value_coef: NonNegativeFloat = 0.5
    kl_coef: PositiveFloat = 0.2  # the first β
    kl_target: PositiveFloat = 0.02  # nats a token


def train(r: recipe.Recipe) -> None:
    """Samples, scores, takes penalized steps, and moves the penalty."""
    c = r.config
    algorithm = algorithms.ppo_penalty(lambda_=c.lambda_, value_coef=c.value_coef, kl_coef=c.kl_coef)
    state, to_batch, update = r.start(algorithm, r.warm_up())
    adapt = r.adaptation(state, partial(kl.double_or_halve, low=c.kl_target / 1.5, high=c.kl_target * 1.5))
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params["actor"], prompts, r.key(k))
        scores = r.score(prompts, rollout)
        batch = to_batch(rollout, scores, values=r.critic(state, rollout))
        state, metrics = update(state, batch, r.key(k))  # loss = −ratio · advantage + β · KL
        state, penalty = adapt(state, batch)  # β follows the KL that the updates made
        r.commit(k, state, describe(prompts, rollout, scores) | metrics | penalty)


if __name__ == "__main__":
    recipe.main(Config, train, name="ppo_penalty", description=__doc__)
