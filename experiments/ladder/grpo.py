"""GRPO: the mean reward of a group is the baseline and its spread the unit; PPO's clip, and no critic.

    python experiments/ladder/grpo.py                    # a small model learns sums; --smoke shows that it runs
    python experiments/ladder/grpo.py --model models/smollm2-135m --task arithmetic --lora-rank 16
    python experiments/ladder/grpo.py --model Qwen/Qwen3-0.6B --task gsm8k --max-new-tokens 512 --dry-run

Shao et al. 2024. The advantage of a sample is its z-score among the samples of its prompt. The loss averages over the
tokens of a completion first, then over completions. A group whose samples all have the same reward has advantage 0.
--kl-coef adds the KL to the policy that rewards began with to the loss (k3), as the paper does.

Differs from the paper: no KL by default, and a rule scores completions in place of a reward model. Both normalizers
bias the gradient: towards short right answers, and towards prompts that are nearly always or nearly never solved. See
`dr_grpo.py` and `experiments/studies/estimator_lab.py`.
"""

import dataclasses

from jaxpg import algorithms, recipe
from jaxpg.rollout import describe
from jaxpg.run.ranges import NonNegativeFloat, Share


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
    """Options of GRPO."""

    clip_low: Share = 0.2  # the ratio is clipped at 1 − clip_low
    clip_high: NonNegativeFloat = 0.2  # and at 1 + clip_high
    kl_coef: NonNegativeFloat = 0.0  # β of the KL to the reference policy


def train(r: recipe.Recipe) -> None:
    """Samples groups, scores them, and follows the clipped surrogate of their z-scores."""
    c, params = r.config, r.warm_up()
    algorithm = algorithms.grpo(clip_low=c.clip_low, clip_high=c.clip_high, kl_coef=c.kl_coef)
    reference = r.reference(params) if c.kl_coef else None
    state, to_batch, update = r.start(algorithm, params)
    for k, state in r.steps(state):
        prompts = r.prompts(k)  # P prompts of at most S tokens
        rollout = r.sample(state.params, prompts, r.key(k))  # G completions of each: [P·G, S + N] tokens
        scores = r.score(prompts, rollout)  # rewards [P, G]
        anchor = {"ref_log_probs": reference(state, rollout)} if reference else {}
        batch = to_batch(rollout, scores, **anchor)  # advantage = (reward − mean) / std of the group
        state, metrics = update(state, batch, r.key(k))  # epochs × minibatches of gradient steps
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)


if __name__ == "__main__":
    recipe.main(Config, train, name="grpo", description=__doc__)
