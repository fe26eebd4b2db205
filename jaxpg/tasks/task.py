"""The one type of a task: problems, how they are put to a model, and what a completion is worth."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a task is described without JAX, transformers and the sampler
    from jaxpg.sampling.multi_turn import Environment
    from jaxpg.tasks.scoring import Scorer

Message = dict[str, str]  # with "role" and "content"
Question = str | list[Message]
Demonstration = str | list[tuple[str, bool]]  # a text, or segments (text, whether the policy wrote it)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Problems of a type of their own, which only the functions of the task look into.

    Lengths are in tokens, and for the small model in characters, which are its tokens.
    """

    name: str
    problems: Callable[[int, int, int], Sequence[Any]]  # (seed, start, count) -> problems to train on
    held_out: Callable[[int], Sequence[Any]]  # count -> problems that are never trained on; ValueError if too few
    ask: Callable[[Any], Question]  # problem -> its prompt, a text or the messages of a conversation
    scorers: Mapping[str, "tuple[Scorer, float]"]  # name -> (scorer, weight), see `scoring.combine`
    is_right: "Scorer | None" = None  # what accuracy is the mean of, between 0 and 1; default the first scorer
    vote: Callable[[str], Hashable | None] = str.strip  # completion -> its answer; equal ones are one in majority@k
    demonstrate: Callable[[Any], Demonstration] | None = None  # problem -> completion; None: no demonstrations
    size: int | None = None  # problems of a finite training set, each once in problems(0, 0, size); None: endless
    prompt_length: int | None = None  # room that a prompt needs; None: it depends on the tokenizer
    max_new_tokens: int  # room that a completion needs
    alphabet: str | None = None  # characters of prompts and completions, if the small model can do the task
    chat: bool = False  # prompts go through the model's chat template
    # What evaluations report besides accuracy: the mean of each function (problem, completion) -> number.
    measures: Mapping[str, Callable[[Any, str], float]] = dataclasses.field(default_factory=dict)
    step_rewards: Callable[[Any], Callable] | None = None  # tokenizer -> rewards of steps, see `steps.make_rewards`
    environment: "Callable[..., Environment] | None" = None  # (tokenizer, stop_tokens=()) -> for `sampling.converse`
    max_turns: int = 1  # of the policy in a conversation with the environment
    turn_ends: tuple[str, ...] = ()  # texts that end a turn, besides stop tokens

    def __post_init__(self):
        """Fills in `is_right`.

        Raises:
          ValueError: without scorers.
        """
        if not self.scorers:
            raise ValueError(f"scorers={self.scorers} of task {self.name!r}: name at least one")
        if self.is_right is None:
            first, _ = next(iter(self.scorers.values()))
            object.__setattr__(self, "is_right", first)


def render(task: Task, tokenizer, problems: Sequence[Any], *, system: str | None = None) -> list[str]:
    """Writes the prompts of problems as text for `data.encode_prompts`.

    Args:
      task: its prompts go through the chat template of the tokenizer if it says so.
      tokenizer: of `transformers`.
      problems: of the task.
      system: the system's message before each prompt; only for a task with `chat`.

    Raises:
      ValueError: as `chat.render`.
    """
    questions = [task.ask(problem) for problem in problems]
    if not task.chat:
        return questions
    from jaxpg.tasks import chat

    return chat.render(tokenizer, questions, system=system)
