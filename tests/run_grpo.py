"""Started in several processes by test_distributed.py: GRPO, of which one process alone meets an error or Ctrl-C.

WRONG_IN says which, WRONG_WHERE where: in `prepare` here, or in `own_scorers.wrong_in_one`.
"""

import os
import signal
from functools import partial

from launching import EXPERIMENTS, load

from jaxpg import recipe
from jaxpg.run import cli

grpo = load(EXPERIMENTS / "ladder" / "grpo.py")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored


def prepare(config):
    if config.process_id == int(os.environ.get("WRONG_IN", -1)):
        if os.environ["WRONG_WHERE"] == "prepare":
            raise ValueError("--x is not here")
        if os.environ["WRONG_WHERE"] == "bug":
            raise KeyError("a fault of ours")
    return recipe.prepare(config, name="grpo")


cli.main(grpo.Config, prepare, partial(recipe.execute, train=grpo.train), description=__doc__)
