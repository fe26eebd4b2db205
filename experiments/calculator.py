"""Calculator: a small language model learns in conversations to use a tool, in two to three minutes on one CPU core.

    python experiments/calculator.py                    # or with --rl-steps 300 --seed 1

Asked "37*48=", the policy may write a call, "[37*48]". The calculator answers "1776|", and the policy goes on with the
answer and a stop token. First a warm-up on demonstrations, half of which call the calculator while the others know the
product by heart; it is stopped while the model is mediocre. Then reinforcement learning, which sees nothing but
rewards: 1 for the right final answer. Nobody rewards a call, yet expect nearly every conversation to have one in the
end, and held-out accuracy (sampled, not greedy) to rise from about 0.25 to about 0.9.

What the calculator says is read, but is no action: neither phase puts a gradient on its tokens.
"""

import dataclasses
import operator
import re
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from jaxpg import algorithms
from jaxpg.data import characters, encode_demonstrations, encode_prompts
from jaxpg.estimators import checks, logprobs
from jaxpg.models import Config as ModelConfig
from jaxpg.models import Model
from jaxpg.run import cli
from jaxpg.sampling import Conversation, converse
from jaxpg.tasks import arithmetic
from jaxpg.training import train_state
from jaxpg.training.update import adamw, make_update
from jaxpg.types import Batch, Experience, Rollout

LEVEL = 5  # products of two-digit numbers
TOKENIZER = characters(arithmetic.ALPHABET + "[]|")
END_OF_CALL, END_OF_RESULT = "]", "|"
CALL = re.compile(r"\[([0-9]{1,3})([*+-])([0-9]{1,3})\]")
OPERATIONS = {"*": operator.mul, "+": operator.add, "-": operator.sub}
PROMPT_LENGTH = len(arithmetic.longest_prompt(LEVEL))
MAX_TURNS = 2  # a call and an answer
BUDGET = len("[99*99]9801|9801") + 1  # tokens of both sides, and a stop token


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the calculator."""

    seed: int = 0
    batch_size: int = 256  # conversations a step
    group_size: int = 8  # conversations a prompt
    rl_steps: int = 120
    rl_learning_rate: float = 1e-3
    temperature: float = 1.0  # of the sampler, hence of the policy that is trained
    warmup_steps: int = 600  # at most; the warm-up ends when the model is mediocre
    warmup_batch_size: int = 256
    warmup_learning_rate: float = 2e-3
    warmup_accuracy: float = 0.2  # what counts as mediocre, on training problems
    held_out: int = 256  # problems of the evaluation, which no phase trains on
    report_every: int = 25  # steps
    smoke: bool = False  # a few small steps, to see that everything runs


class Summary(NamedTuple):
    """Held-out accuracy, and the share of conversations with a call."""

    accuracy: float
    calls: float


def calculate(call: str) -> str:
    """Answers a call such as "[37*48]"; anything else than two numbers of up to three digits gets an empty answer."""
    found = CALL.fullmatch(call)
    return str(OPERATIONS[found[2]](int(found[1]), int(found[3]))) if found else ""


def environment(problem: arithmetic.Problem, tokens: list[int]):
    """Takes a turn of the policy: a call is answered, anything else is the final answer."""
    text = TOKENIZER.decode(tokens)
    if text.endswith(END_OF_CALL):
        return problem, TOKENIZER.encode(calculate(text) + END_OF_RESULT), 0.0, False
    return problem, [], float(text == problem.answer + TOKENIZER.eos_token), True


def demonstrations(problems: list[arithmetic.Problem]) -> Batch:
    """Writes solved conversations, every other one with a call; what the calculator says is real, but no action."""
    calls = [f"[{p.prompt[:-1]}]" if i % 2 else "" for i, p in enumerate(problems)]
    results = [calculate(call) + END_OF_RESULT if call else "" for call in calls]
    completions = [call + result + p.answer for call, result, p in zip(calls, results, problems, strict=True)]
    prompts = [p.prompt for p in problems]
    batch = encode_demonstrations(TOKENIZER, prompts, completions, length=PROMPT_LENGTH + BUDGET)
    for row, (prompt, call, result) in enumerate(zip(prompts, calls, results, strict=True)):
        start = len(prompt + call)
        batch.action_mask[row, start : start + len(result)] = False
    return batch


def prepare(config: Config) -> Config:
    """Checks the options before anything is compiled."""
    c = config
    if c.smoke:
        # Odd sizes, which the sampler does not halve when rows end: fewer shapes to compile.
        sizes = {"batch_size": 15, "group_size": 3, "warmup_batch_size": 16, "held_out": 5}
        c = dataclasses.replace(c, **sizes, warmup_steps=2, rl_steps=2, report_every=2)
    checks.options_at_least(c, 1, "rl_steps", "warmup_steps", "warmup_batch_size", "held_out", "report_every")
    if c.temperature <= 0:
        raise ValueError(f"--temperature={c.temperature}: must be positive, or all samples of a prompt are the same")
    if c.group_size < 2 or c.batch_size < 1 or c.batch_size % c.group_size:
        raise ValueError(f"--group-size={c.group_size}: must be at least 2 and divide --batch-size={c.batch_size}")
    if c.held_out % (c.batch_size // c.group_size):
        raise ValueError(
            f"--held-out={c.held_out}: must be a multiple of the {c.batch_size // c.group_size} prompts a step"
        )
    return c


def train(c: Config) -> tuple[Summary, Summary]:
    """Warms up, evaluates, trains by rewards, evaluates again."""
    console, started = Console(), time.perf_counter()
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_size": 192}
    model = Model(ModelConfig(vocab_size=len(TOKENIZER), max_length=PROMPT_LENGTH + BUDGET, **sizes))
    held_out = arithmetic.held_out_set(c.held_out, level=LEVEL)
    key, num_prompts = jax.random.key(c.seed), c.batch_size // c.group_size
    validation = arithmetic.problems(3 * c.seed + 2, 0, num_prompts, level=LEVEL)

    def talk(params, problems, key) -> Conversation:
        prompts = encode_prompts(TOKENIZER, [p.prompt for p in problems], length=PROMPT_LENGTH)
        return converse(
            params,
            *prompts,
            key,
            model=model,
            environment=environment,
            states=[p for p in problems for _ in range(c.group_size)],
            max_turns=MAX_TURNS,
            max_new_tokens=BUDGET,
            stop_tokens=(TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids(END_OF_CALL)),
            samples_per_prompt=c.group_size,
            temperature=c.temperature,
        )

    def policy(params, batch: Batch):  # log-probs of the distribution that is sampled from
        logits = model.logits(params, batch.tokens, batch.token_mask)
        log_probs = logprobs.token_log_probs(logits, batch.tokens, temperature=c.temperature)
        return log_probs, logprobs.entropy(logits, temperature=c.temperature)

    def start(algorithm, params, learning_rate):
        optimizer = adamw(learning_rate, b2=0.99)
        update = make_update(algorithms.make_loss_fn(algorithm, policy), optimizer)
        return train_state.init(params, optimizer, jax.random.key(c.seed)), jax.jit(update, donate_argnums=0)

    def evaluate(params, problems) -> Summary:  # as many at a time as in training, for which all is compiled
        parts = [problems[i : i + num_prompts] for i in range(0, len(problems), num_prompts)]
        return Summary(*np.mean([summarize(talk(params, part, key)) for part in parts], axis=0).tolist())

    def report(phase, step, summary):
        seconds = time.perf_counter() - started
        numbers = f"accuracy {summary.accuracy:.3f}  calls {summary.calls:.2f}  {seconds:.0f} s"
        console.print(f"{phase:<20} step {step:>4}  {numbers}")

    # Supervised, until the model is mediocre.
    state, update = start(algorithms.supervised(), jax.jit(model.init)(key), c.warmup_learning_rate)
    for k in range(c.warmup_steps):
        problems = arithmetic.problems(3 * c.seed, k * c.warmup_batch_size, c.warmup_batch_size, level=LEVEL)
        state, _ = update(state, demonstrations(problems))
        if (k + 1) % c.report_every == 0:
            checked = evaluate(state.params, validation)
            report("warm-up, training", k + 1, checked)
            if checked.accuracy >= c.warmup_accuracy:
                break
    before = evaluate(state.params, held_out)
    report("before RL, held out", 0, before)

    # Rewards only: converse, compare within a group, update.
    algorithm = algorithms.rloo()
    state, update = start(algorithm, state.params, optax.linear_schedule(c.rl_learning_rate, 0.0, c.rl_steps))
    to_batch = jax.jit(partial(algorithms.to_batch, algorithm))
    for k in range(c.rl_steps):
        problems = arithmetic.problems(3 * c.seed + 1, k * num_prompts, num_prompts, level=LEVEL)
        conversations = talk(state.params, problems, jax.random.fold_in(key, k))
        rewards = conversations.token_rewards.sum(-1).reshape(num_prompts, c.group_size)  # of the outcome
        experience = Experience(conversations.rollout, rewards, valid=jnp.ones(rewards.shape, bool))
        state, _ = update(state, to_batch(experience))
        if (k + 1) % c.report_every == 0:
            report("rewards only", k + 1, summarize(conversations))

    after = evaluate(state.params, held_out)
    report("after RL, held out", c.rl_steps, after)
    shown = transcript(talk(state.params, held_out[:num_prompts], key).rollout, 0)
    console.print(f"One conversation, what the calculator says «marked»: {shown}", markup=False)
    return before, after


def summarize(conversations: Conversation) -> Summary:
    """Averages the rewards, and counts who called."""
    return Summary(float(conversations.token_rewards.sum(-1).mean()), float((conversations.turns > 1).mean()))


def transcript(rollout: Rollout, row: int) -> str:
    """Writes a row as text, what the environment said behind the prompt «marked»."""
    tokens, real, actions = (np.asarray(x[row]) for x in (rollout.tokens, rollout.token_mask, rollout.action_mask))
    observed = real & ~actions & (np.arange(len(tokens)) >= actions.argmax())
    pieces = [f"«{TOKENIZER.decode(t)}»" if o else TOKENIZER.decode(t) for t, o in zip(tokens, observed, strict=True)]
    return "".join(piece for piece, is_real in zip(pieces, real, strict=True) if is_real).replace("»«", "")


if __name__ == "__main__":
    cli.main(Config, prepare, train, description=__doc__)
