"""What the experiment files of the ladder share: a small model, a task, a warm-up, the run's records.

    run = ladder.prepare(config)                          # checks all options, compiles nothing
    with ladder.session(run) as session:
        params = ladder.warm_up(session)                  # supervised, until the model is mediocre
        state, update = ladder.start(run, algorithm, params)
        step = loop.policy_gradient_step(prompts=ladder.prompts(run), sample=ladder.sampler(run), ..., update=update)
        ladder.fit(session, step, state)                  # rewards only, evaluations, curves, summary

That is a rung: see `experiments/`.
"""

from jaxpg.ladder.config import Common, Config, Run, Task, arithmetic_task, open_run, prepare
from jaxpg.ladder.halves import fit_critic, start_halves, update_halves
from jaxpg.ladder.parts import experience, prompts, sampler, schedule, scorer, start, to_batch
from jaxpg.ladder.phases import fit, warm_up
from jaxpg.ladder.policies import actor, actor_critic, reference, values, with_critic
from jaxpg.ladder.session import Session, session

__all__ = [
    "Common",
    "Config",
    "Run",
    "Session",
    "Task",
    "actor",
    "actor_critic",
    "arithmetic_task",
    "experience",
    "fit",
    "fit_critic",
    "open_run",
    "prepare",
    "prompts",
    "reference",
    "sampler",
    "schedule",
    "scorer",
    "session",
    "start",
    "start_halves",
    "to_batch",
    "update_halves",
    "values",
    "warm_up",
    "with_critic",
]
