"""The frame of a recipe: its command line, its record, and what it leaves."""

from collections.abc import Callable
from functools import partial

from jaxpg import run
from jaxpg.recipe.conclude import conclude
from jaxpg.recipe.dry_run import dry_run
from jaxpg.recipe.options import Config
from jaxpg.recipe.recipe import Recipe
from jaxpg.recipe.setup import Setup, prepare
from jaxpg.run import cli

Train = Callable[[Recipe], None]


def main(config: type[Config], train: Train, *, name: str, description: str, args: list[str] | None = None) -> None:
    """Parses options, checks all of them, and runs a recipe.

    Args:
      config: its options.
      train: its loop.
      name: of the recipe, and of its folder under runs/.
      description: shown by --help.
      args: default the command line.
    """
    cli.main(config, partial(prepare, name=name), partial(execute, train=train), description=description, args=args)


def execute(setup: Setup, *, train: Train, conclude: Train = conclude) -> None:
    """Runs a recipe that was prepared: its loop, its last evaluation, its summary. A dry run says what it needs."""
    if setup.config.dry_run:
        dry_run(setup, train)
        return
    with run.open(setup.config, name=setup.name, mesh=setup.mesh) as opened:
        if setup.dropped:
            length, dropped = setup.prompt_length, setup.dropped
            opened.console.print(f"{dropped} prompts of more than {length} tokens are left out (--long-prompts drop).")
        r = Recipe(setup, opened)
        train(r)
        conclude(r)
