"""Evaluation of a policy: accuracy of its most likely completions with an interval, pass@k and majority@k."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxpg.data import decode_completions
from jaxpg.parallel import distributed
from jaxpg.recipe.sampler import encode, make_sampler
from jaxpg.recipe.setup import Setup
from jaxpg.rollout import evaluate
from jaxpg.tasks import scoring


class Evaluator:
    """Evaluates parameters on held-out problems, and keeps the completions of the first and of the last time."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.first: list[str] | None = None
        self.last: list[str] | None = None
        self._draw = make_sampler(setup, setup.sampling.greedy(), samples_per_prompt=1)
        options = {"retries": setup.config.scorer_retries, "raise_failures": setup.config.scorer_failures == "stop"}
        self._judge = scoring.combine({"accuracy": (setup.task.is_right, 1.0)}, **options)

    def __call__(self, params: dict) -> dict[str, float]:
        """Returns the held-out accuracy, its 95 % interval, and what else the task measures."""
        texts = self.complete(params, self.setup.held_out)
        self.first, self.last = self.first or texts, texts
        return self.measure(self.setup.held_out, texts)

    def complete(self, params: dict, problems: Sequence) -> list[str]:
        """The most likely completion of each problem."""
        key = jax.random.key(0)  # nothing is drawn

        def generate(part):
            rollout = self._draw(params, encode(self.setup, part), key)
            return decode_completions(self.setup.tokenizer, distributed.fetch(rollout))

        return evaluate.complete(generate, problems, batch=self.setup.evaluation_batch)

    def measure(self, problems: Sequence, texts: Sequence[str]) -> dict[str, float]:
        """The accuracy of completions that could be scored with its interval, and the task's measures."""
        scored = self._judge(problems, texts)
        right = scored.rewards[scored.valid]
        mean = float(right.mean()) if len(right) else float("nan")
        low, high = evaluate.interval(mean, len(right))
        told = {"accuracy": mean, "accuracy_low": low, "accuracy_high": high}
        return told | {
            name: evaluate.accuracy(function, problems, texts) for name, function in self.setup.task.measures.items()
        }

    def sampled(self, params: dict, *, samples: int) -> dict[str, float]:
        """pass@k for k = 1, 2, 4, … and majority@k of the sampled policy on the held-out problems."""
        replies = self.replies(params, samples=samples)
        right = self.scored(self.setup.held_out, replies) >= 1
        votes = [[self.setup.task.vote(text) for text in texts] for texts in replies]
        told = {f"pass@{k}": evaluate.pass_at_k(samples, right.sum(1), k=k) for k in powers(samples)}
        told[f"majority@{samples}"] = evaluate.majority_at_k(votes, right)
        return {name: float(value.mean()) for name, value in told.items()}

    def replies(self, params: dict, *, samples: int) -> list[list[str]]:
        """Several sampled completions of each held-out problem."""
        setup, replies = self.setup, []
        draw = make_sampler(setup, setup.sampling, samples_per_prompt=samples)
        size = setup.evaluation_batch
        for start in range(0, len(setup.held_out), size):
            part = list(setup.held_out[start : start + size])
            filled = (part * (size // len(part) + 1))[:size]  # no new shape for the last batch
            key = jax.random.fold_in(jax.random.key(setup.config.seed), start)
            texts = decode_completions(setup.tokenizer, distributed.fetch(draw(params, encode(setup, filled), key)))
            replies += [texts[i * samples : (i + 1) * samples] for i in range(len(part))]
        return replies

    def scored(self, problems: Sequence, replies: Sequence[Sequence[str]]) -> np.ndarray:
        """How right each of several completions of each problem is [P, samples], 0 where it could not be scored."""
        scores = self._judge(problems, [text for texts in replies for text in texts])
        return np.where(scores.valid, scores.rewards, 0.0)


def powers(most: int) -> list[int]:
    """1, 2, 4, … and the number itself."""
    return sorted({*(2**i for i in range(most.bit_length())), most})
