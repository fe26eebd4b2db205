"""The short names of modules: `jaxpg.losses` is `jaxpg.estimators.losses`, the same object, loaded when it is used."""

import subprocess
import sys

CHECKS = """
import sys
import jaxpg
assert not [name for name in sys.modules if name.startswith(("jax.", "flax", "orbax", "transformers"))]
from jaxpg import advantages
import jaxpg.losses as short
from jaxpg.update import make_update
import jaxpg.estimators.losses as full
import jaxpg.training.update
assert short is full and full.__spec__.name == "jaxpg.estimators.losses"
assert jaxpg.training.update.make_update is make_update and jaxpg.advantages is advantages
"""


def test_a_short_name_is_the_module_itself_and_nothing_loads_before_it_is_used():
    subprocess.run([sys.executable, "-c", CHECKS], check=True)


def test_mathematics_loads_no_model_packages():
    heavy = "('flax', 'orbax', 'transformers')"
    code = f"import sys; from jaxpg import advantages; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_a_name_that_does_not_exist_is_named():
    result = subprocess.run([sys.executable, "-c", "import jaxpg; jaxpg.nothing"], capture_output=True, text=True)
    assert "AttributeError: module 'jaxpg' has no attribute 'nothing'" in result.stderr
