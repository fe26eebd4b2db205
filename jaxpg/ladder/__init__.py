"""What the experiment files of the ladder share: a small model, a task, a warm-up, the run's records.

    run = ladder.prepare(config)                          # checks all options, compiles nothing
    with ladder.session(run) as session:
        params = ladder.warm_up(session)                  # supervised, until the model is mediocre
        state, update = ladder.start(run, algorithm, params)
        step = loop.policy_gradient_step(prompts=ladder.prompts(run), sample=ladder.sampler(run), ..., update=update)
        ladder.fit(session, step, state)                  # rewards only, evaluations, curves, summary

That is a rung: see `experiments/`.
"""

from jaxpg.ladder.comparison import (
    columns,
    gains,
    is_finished,
    read_config,
    read_rows,
    read_summary,
    shared_programs,
    spread,
    standard_errors,
)
from jaxpg.ladder.config import FAMILIES, Common, Config, Run, Task, leveled_task, open_run, prepare, small_model
from jaxpg.ladder.halves import fit_critic, start_halves, update_halves
from jaxpg.ladder.parts import (
    compiled,
    experience,
    measure,
    prompts,
    rise_and_fall,
    sampler,
    schedule,
    scorer,
    start,
    start_loss,
    to_batch,
)
from jaxpg.ladder.phases import fit, warm_up
from jaxpg.ladder.policies import acting, actor, actor_critic, reference, values, with_critic
from jaxpg.ladder.session import Session, session

__all__ = [
    "FAMILIES",
    "Common",
    "Config",
    "Run",
    "Session",
    "Task",
    "acting",
    "actor",
    "actor_critic",
    "columns",
    "compiled",
    "experience",
    "fit",
    "fit_critic",
    "gains",
    "is_finished",
    "leveled_task",
    "measure",
    "open_run",
    "prepare",
    "prompts",
    "read_config",
    "read_rows",
    "read_summary",
    "reference",
    "rise_and_fall",
    "sampler",
    "schedule",
    "scorer",
    "session",
    "shared_programs",
    "small_model",
    "spread",
    "standard_errors",
    "start",
    "start_halves",
    "start_loss",
    "to_batch",
    "update_halves",
    "values",
    "warm_up",
    "with_critic",
]
