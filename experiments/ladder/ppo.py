"""PPO: actor and critic take several small updates a rollout, and the clip removes the gain of going too far.

    python experiments/ladder/ppo.py                     # --smoke shows that it runs; --help lists the options
    python experiments/ladder/ppo.py --model models/smollm2-135m --lora-rank 16 --critic lora

Schulman et al. 2017, equations 7 and 9. The advantage is GAE, whitened over the batch. The ratio is clipped to [1 −
clip_low, 1 + clip_high], and the change of the critic is clipped too. A clipped token has no gradient. The log has
the share of clipped tokens, and `kl_old`, an estimate of how far the policy went.

Differs from the paper: by default actor and critic share no weights and start from the same trunk (--critic copy).
"""

import dataclasses

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import NonNegativeFloat, Positive, PositiveFloat, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.CriticConfig):
    """Options of PPO."""

    epochs: Positive = 2
    lambda_: Share = 1.0  # of GAE
    clip_low: Share = 0.2
    clip_high: NonNegativeFloat = 0.2
    value_clip: PositiveFloat = 0.2
    value_coef: NonNegativeFloat = 0.5
    entropy_coef: float = 0.0


def train(r: recipe.Recipe) -> None:
    """Samples, scores, estimates advantages with the critic, and follows the clipped surrogate."""
    names = ("lambda_", "clip_low", "clip_high", "value_clip", "value_coef", "entropy_coef")
    algorithm = algorithms.ppo(**{name: getattr(r.config, name) for name in names})
    state, to_batch, update = r.start(algorithm, r.warm_up())  # parameters {"actor": ..., "critic": ...}
    for k, state in r.steps(state):
        prompts = r.prompts(k)
        rollout = r.sample(state.params["actor"], prompts, r.key(k))
        scores = r.score(prompts, rollout)
        values = r.critic(state, rollout)  # V before each token [B, T], before the updates
        batch = to_batch(rollout, scores, values=values)  # advantage = GAE, whitened; the critic's targets
        state, metrics = update(state, batch, r.key(k))  # epochs × minibatches of gradient steps
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="ppo", description=__doc__)
