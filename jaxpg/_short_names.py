"""Short names for modules of subpackages: `jaxpg.losses` is `jaxpg.estimators.losses`, the same object."""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _ShortNames(MetaPathFinder, Loader):
    """Answers an import of a short name with the module itself, so that nothing is ever loaded twice."""

    def __init__(self, homes: dict[str, str]):
        self.homes = homes  # "jaxpg.losses" -> "jaxpg.estimators.losses"

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.homes else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.homes[spec.name])
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # importlib has put that of the short name there


def install(**modules: tuple[str, ...]) -> Callable[[str], ModuleType]:
    """Makes modules of subpackages importable from `jaxpg` itself, and returns the package's `__getattr__`.

    Args:
      **modules: subpackage -> names of its modules.
    """
    homes = {f"jaxpg.{name}": f"jaxpg.{package}.{name}" for package, names in modules.items() for name in names}
    sys.meta_path.append(_ShortNames(homes))

    def load(name: str) -> ModuleType:
        if f"jaxpg.{name}" not in homes:
            raise AttributeError(f"module 'jaxpg' has no attribute {name!r}")
        return importlib.import_module(homes[f"jaxpg.{name}"])

    return load
