"""What recipes are made of: options, a model, a task, and the record of the run. See experiments/ladder/grpo.py.

def train(r: recipe.Recipe) -> None:
    algorithm = algorithms.grpo()
    state, to_batch, update = r.start(algorithm, r.warm_up())
    for k, state in r.steps(state):                                    # goes on from the newest checkpoint
        prompts = r.prompts(k)
        rollout = r.sample(state.params, prompts, r.key(k))
        scores = r.score(prompts, rollout)
        state, metrics = update(state, to_batch(rollout, scores), r.key(k))
        r.commit(k, state, describe(prompts, rollout, scores) | metrics)   # logs, evaluates, saves, stops
"""

from jaxpg.recipe.main import execute, main
from jaxpg.recipe.options import Config, CriticConfig
from jaxpg.recipe.recipe import Recipe
from jaxpg.recipe.setup import Setup, prepare

__all__ = ["Config", "CriticConfig", "Recipe", "Setup", "execute", "main", "prepare"]
