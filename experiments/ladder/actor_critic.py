"""Actor-critic: a learned critic says what to expect, and n rewards and its guess replace the whole return.

    python experiments/ladder/actor_critic.py --n 1      # TD(0); --smoke shows that it runs; --help lists the options

Mnih et al. 2016 (A3C). The advantage is the n-step return less V, and the critic is fitted to the n-step return. The
fit is proximal: a few gradient steps on |Q − V_φ|² + coef·|φ − φ_i|², with φ_i the critic before them, so that a
small batch does not throw it about. Rewards come at the end alone: the smaller n, the more the actor learns from the
critic, and from its errors. With n above the longest answer the advantage is the return less V.

Differs from the paper: one synchronous batch in place of asynchronous workers; by default actor and critic share no
weights; no entropy bonus. If accuracy falls, the critic knows too little: try a larger n.
"""

import dataclasses

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import NonNegativeFloat, Positive, PositiveFloat


@dataclasses.dataclass(frozen=True)
class Config(recipe.CriticConfig):
    """Options of actor-critic."""

    minibatches: Positive = 1
    n: Positive = 3  # rewards before the critic's guess, in tokens
    critic_learning_rate: PositiveFloat | None = None  # default 2e-3, or 1e-4 with --model
    critic_updates: Positive = 4  # a rollout
    proximal_coef: NonNegativeFloat = 1e-3  # of |φ − φ_i|²


def train(r: recipe.Recipe) -> None:
    """Samples, scores, bootstraps from the critic, and moves actor and critic by updates of their own."""
    c = r.config
    algorithm = algorithms.actor_critic(n=c.n)
    actor = r.actor_update(algorithm, r.optimizer(c.rl_learning_rate))
    critic = r.critic_update(algorithm, c.critic_learning_rate, updates=c.critic_updates, proximal_coef=c.proximal_coef)
    state, to_batch, update = r.start_apart(algorithm, r.warm_up(), actor, critic)
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params["actor"], prompts, r.key(k))
        scores = r.score(prompts, rollout)
        values = r.critic(state, rollout)
        batch = to_batch(rollout, scores, values=values)  # advantage = n-step return − V
        state, metrics = update(state, batch, r.key(k))
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="actor_critic", description=__doc__)
