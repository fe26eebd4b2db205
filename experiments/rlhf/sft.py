"""RLHF, step 1: supervised learning on demonstrations, packed several to a row, with the loss on completions only.

    python experiments/rlhf/sft.py                       # --smoke shows that it runs; --help lists the options
    python experiments/rlhf/sft.py --model HuggingFaceTB/SmolLM2-135M --run-dir runs/rlhf-smollm

Ouyang et al. 2022, section 3.5. A demonstration is a sum, an answer that is right half of the time, and a few
exclamation marks (`jaxpg/tasks/taste.py`): what the writer can, the model learns, his mistakes too. The policy that
results is what the next steps start from and the reference that they stay near.

Expect answers a little less often right than the writer's (0.43 for his 0.5), and a loss that stays above his entropy.
"""

import dataclasses

import jax

from jaxpg import algorithms, data, ladder, rlhf
from jaxpg.parallel import sharding
from jaxpg.run import cli
from jaxpg.tasks import draws, taste
from jaxpg.training import loop


@dataclasses.dataclass(frozen=True)
class Config(rlhf.Config):
    """Options of supervised learning."""

    steps: int = 400
    batch_size: int = 32  # packed rows
    learning_rate: float = 2e-3
    demonstrations: int = 8192
    row_length: int = 64  # tokens that a packed row holds


def prepare(config: Config) -> rlhf.Run:
    """Checks the options before anything is compiled or written."""
    return rlhf.prepare(config, step="sft", smoke={"demonstrations": 512})


def demonstrations(run: rlhf.Run):
    """The demonstrations as rows of `row_length` tokens, documents kept apart."""
    c = run.config
    problems = taste.problems(c.seed, 0, c.demonstrations)
    completions = [taste.demonstration(problem, c.seed, i) for i, problem in enumerate(problems)]
    length = run.prompt_length + run.max_new_tokens
    prompts = [problem.prompt for problem in problems]
    apart = data.encode_demonstrations(run.tokenizer, prompts, completions, length=length)
    return data.pack(apart, length=max(c.row_length, length))


def train(run: rlhf.Run) -> None:
    """Learns to write what the demonstrations hold."""
    c = run.config
    with rlhf.session(run) as session:
        packed = demonstrations(run)
        filled = packed.token_mask.mean()
        session.console.print(f"{c.demonstrations} demonstrations in {len(packed.tokens)} rows, {filled:.0%} full")

        def batch(k: int):
            rows = draws.rows(len(packed.tokens), c.seed, k * c.batch_size, c.batch_size)
            return sharding.put_whole(run.mesh, jax.tree.map(lambda x: x[rows], packed))

        state, update = ladder.start(
            run,
            algorithms.supervised(),  # −log π of the completions' tokens, averaged over them
            run.params,
            policy=ladder.actor(run.model, temperature=1.0),
            learning_rate=ladder.rise_and_fall(c.learning_rate, updates=c.steps),
        )
        state = rlhf.fit(session, loop.supervised_step(batch, update), state, show=("loss",))
        found = rlhf.leave(session, rlhf.evaluate(run, state.params), params=state.params)
    session.console.print(
        f"The policy's answers are right in {found['right']:.0%} of its samples (the writer's in {taste.SKILL:.0%}), "
        f"with {found['marks']:.2f} marks; its true reward is {found['true']:.2f}. {found['seconds']:.0f} seconds."
    )
    session.console.print(f"Next: python experiments/rlhf/reward_model.py --run-dir {c.run_dir}")


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
