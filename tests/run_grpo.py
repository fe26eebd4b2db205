"""Started in several processes by test_distributed.py: GRPO with a reward that an untrained model can earn.

On request one process alone meets an error or Ctrl-C: WRONG_IN says which, WRONG_WHERE where.
"""

import os
import signal

import jax
from launching import EXPERIMENTS, load

from jaxpg.run import cli
from jaxpg.tasks import arithmetic

grpo = load(EXPERIMENTS / "grpo.py")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
wrong, where = int(os.environ.get("WRONG_IN", -1)), os.environ.get("WRONG_WHERE")


def score(problem, text):
    if where == "scorer" and jax.process_index() == wrong:
        raise OSError("no compiler")
    if where == "interrupt" and jax.process_index() == wrong:
        signal.raise_signal(signal.SIGINT)
    return float(len(text) >= 2)


def prepare(config):
    if where == "prepare" and config.process_id == wrong:
        raise ValueError("--x is not here")
    if where == "bug" and config.process_id == wrong:
        raise KeyError("a fault of ours")
    return grpo.prepare(config)


arithmetic.score = score
cli.main(grpo.Config, prepare, grpo.train, description=__doc__)
