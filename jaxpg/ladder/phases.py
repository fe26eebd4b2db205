"""The two phases of a run: supervised until the model is mediocre, then rewards only."""

import time
from collections.abc import Callable

import jax

from jaxpg import algorithms
from jaxpg.data import encode_demonstrations
from jaxpg.ladder import summary
from jaxpg.ladder.comparison import read_config
from jaxpg.ladder.config import EVALUATION_BATCH, Run
from jaxpg.ladder.parts import DEMONSTRATIONS, VALIDATION, measure, start, stream
from jaxpg.ladder.policies import actor
from jaxpg.ladder.session import Session
from jaxpg.parallel import distributed, sharding
from jaxpg.run import fingerprint
from jaxpg.run import folder as run_folder
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.training import loop, train_state

CHECK_EVERY = 5  # steps of the warm-up between two looks at its accuracy


def warm_up(session: Session) -> dict:
    """Learns from solved problems until the model is mediocre: no better than `warmup_accuracy` asks.

    Returns:
      The parameters, those of `warm_start` if the run is given one.
    """
    run, c = session.run, session.run.config
    places = sharding.shardings(run.mesh, jax.eval_shape(run.model.init, jax.random.key(0)))
    params = jax.jit(lambda: run.model.init(jax.random.key(c.seed)), out_shardings=places)()
    if c.warm_start is not None:
        return _taken_over(run, params)
    # The model's own distribution, whatever the temperature of the sampler will be.
    state, update = start(
        run,
        algorithms.supervised(),
        params,
        policy=actor(run.model, temperature=1.0),
        learning_rate=c.warmup_learning_rate,
    )
    journal, greedy = session.journal("warmup"), session.greedy
    length = run.prompt_length + run.max_new_tokens
    validation = run.task.problems(stream(c, VALIDATION), 0, 2 * EVALUATION_BATCH)

    def batch(k: int):
        problems = run.task.problems(stream(c, DEMONSTRATIONS), k * c.warmup_batch_size, c.warmup_batch_size)
        problems = distributed.pick_local(run.mesh, problems)
        texts = [p.prompt for p in problems], [run.task.demonstrate(p) for p in problems]
        return sharding.put_rows(run.mesh, encode_demonstrations(run.tokenizer, *texts, length=length))

    bar = session.progress.add_task("warm-up, supervised", total=c.warmup_steps, numbers="")
    found = 0.0

    def on_step(state, done, row):
        nonlocal found
        if done % CHECK_EVERY == 0:
            told = measure(run, validation, greedy(state.params, validation))
            session.writer.write({"phase": "warmup_check", "step": done, **told})
            found = told["accuracy"]
        session.progress.update(bar, completed=done, numbers=f"loss {row['loss']:.3f}  accuracy {found:.2f}")
        session.stop.count()
        return found >= c.warmup_accuracy

    step, options = loop.supervised_step(batch, update), {"steps": c.warmup_steps, "max_nonfinite": c.max_nonfinite}
    state = loop.run(step, state, journal, on_step=on_step, **options)
    session.progress.update(bar, total=int(state.step), completed=int(state.step))
    return state.params


def _taken_over(run: Run, like: dict) -> dict:
    """The warm-up of another run, if its options are the same."""
    folder, c = run.config.warm_start, run.config
    if not (folder / "config.json").exists():
        raise ValueError(f"--warm-start={folder} is not the folder of a run: it has no config.json")
    there, here = read_config(folder), run_folder.config_dict(c)
    own = ("seed", "task", "level", "levels", "spare", "smoke")
    names = [name for name in here if name in own or name.startswith("warmup_")]
    differing = [
        f"{name} is {there.get(name)} there, {here[name]} here" for name in names if there.get(name) != here[name]
    ]
    if differing:
        raise ValueError(f"--warm-start={folder} was warmed up with other options: {'; '.join(differing)}")
    saves = Checkpointer(folder / "checkpoints" / "warmup", read_only=True)
    try:
        if not (saves.record() or {"finished": False})["finished"]:
            raise ValueError(f"--warm-start={folder} has not finished its warm-up: let it run on with --resume")
        return saves.restore_params(like)
    finally:
        saves.close()


def fit(
    session: Session,
    step: loop.Step,
    state: train_state.TrainState,
    *,
    acting: Callable[[dict], dict] = lambda params: params,
) -> train_state.TrainState:
    """Learns from rewards alone, evaluates before, meanwhile and after, and writes curves.png and summary.json.

    Args:
      session: from `session`.
      step: of `loop`.
      state: of step 0.
      acting: the parameters that sample among the state's, for an actor with a critic.
    """
    run, c = session.run, session.run.config
    # The parameters of step 0 are those that a reference policy keeps.
    journal = session.journal("rl", {"start": fingerprint.combined(state.params)})
    greedy = session.greedy
    before = greedy(acting(state.params), run.held_out)
    if journal.checkpointer.latest is None:  # else the row stands in the file already
        session.writer.write({"phase": "evaluation", "step": 0, **measure(run, run.held_out, before)})
    bar = session.progress.add_task(f"rewards only, {run.name}", total=c.rl_steps, numbers="")

    def evaluate(state, done):
        if done % c.evaluate_every:
            return None
        told = measure(run, run.held_out, greedy(acting(state.params), run.held_out))
        session.writer.write({"phase": "evaluation", "step": done, **told})
        return told["accuracy"]

    def on_step(state, done, row):
        speed = row["completion_tokens"] / row["seconds_sample"]
        session.progress.update(bar, completed=done, numbers=f"reward {row['reward']:.2f}  {speed:,.0f} tokens/s")
        session.stop.count()

    options = {"steps": c.rl_steps, "max_nonfinite": c.max_nonfinite}
    state = loop.run(step, state, journal, on_step=on_step, evaluate=evaluate, **options)
    session.progress.update(bar, completed=c.rl_steps)
    after = greedy(acting(state.params), run.held_out)
    if distributed.is_first():
        summary.conclude(session, before, after, seconds=time.perf_counter() - session.started)
    distributed.meet("concluded")  # what stands in the folder, all know
    return state
