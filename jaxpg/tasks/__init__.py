"""Tasks: problems with verifiable answers, and how completions are scored.

`find` is the one place where tasks are found by name, `Task` their one type. Neither loads JAX or transformers, so that
the processes of `workers` start quickly.
"""

from jaxpg.tasks.find import NAMES, Options, find
from jaxpg.tasks.task import Task, render

__all__ = ["NAMES", "Options", "Task", "find", "render"]
