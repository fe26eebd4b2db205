"""Started in several processes by test_distributed.py: GRPO with a reward that an untrained model can earn."""

import importlib.util
import sys
from pathlib import Path

from jaxpg import cli
from jaxpg.tasks import arithmetic

arithmetic.score = lambda problem, text: float(len(text) >= 2)
path = Path(__file__).parents[1] / "experiments" / "grpo.py"
spec = importlib.util.spec_from_file_location("grpo", path)
module = importlib.util.module_from_spec(spec)
sys.modules["grpo"] = module
spec.loader.exec_module(module)
cli.main(module.Config, module.prepare, module.train, description=__doc__)
