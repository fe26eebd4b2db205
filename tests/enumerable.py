"""The token MDPs on which test_exact.py and test_exact_losses.py prove their claims."""

import numpy as np

from jaxpg.algorithms import exact

UNBIASED = 1e-9


def draw_table(mdp, seed=0, scale=1.0):
    return scale * np.random.default_rng(seed).normal(size=mdp.table_shape)


def outcome(prompt, completion):
    """An arbitrary outcome reward, different for every completion."""
    return float(np.sin(1.0 + sum((i + 1) * (token + 2) for i, token in enumerate(completion)) + 3 * prompt))


def dense(prompt, completion):
    """Arbitrary rewards of every token."""
    return [np.cos(1.0 + token * (i + 2) + sum(completion[:i]) + prompt) for i, token in enumerate(completion)]


STOPPING = exact.TokenMDP(rewards=outcome, stop_token=0)
DENSE = exact.TokenMDP(rewards=dense, stop_token=0)
TABLE = draw_table(STOPPING)


def moments(mdp, algorithm, group_size=2, params=TABLE, **options):
    return exact.moments(mdp, params, algorithm, group_size, **options)
