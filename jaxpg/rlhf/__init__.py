"""What the files of experiments/rlhf share: steps that follow each other in one folder, pairs, reward, evaluation.

run = rlhf.prepare(config, step="ppo", after=("sft", "reward_model"))    # checks all; reads what the former steps left
with rlhf.session(run) as session:
    ...
    state = rlhf.fit(session, step, state, show=("reward", "kl"))
    rlhf.leave(session, state.params, found)                              # a model, and summary.json at the very end
"""

from jaxpg.rlhf.config import Config, Run, prepare
from jaxpg.rlhf.pairs import Pair, collect, encode_pairs, pair_batches, read_pairs, write_pairs
from jaxpg.rlhf.reward import compiled_rewards, evaluate, load_reward, rewards, save_reward, scorer
from jaxpg.rlhf.session import Session, compare, fit, leave, peak, session, summary

__all__ = [
    "Config",
    "Pair",
    "Run",
    "Session",
    "collect",
    "compare",
    "compiled_rewards",
    "encode_pairs",
    "evaluate",
    "fit",
    "leave",
    "load_reward",
    "pair_batches",
    "peak",
    "prepare",
    "read_pairs",
    "rewards",
    "save_reward",
    "scorer",
    "session",
    "summary",
    "write_pairs",
]
