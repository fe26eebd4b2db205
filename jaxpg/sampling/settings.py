"""The distribution that completions are drawn from, and what ends them: one object for sampler and trainer.

    sampling = Sampling.for_model(model.config, tokenizer, temperature=0.7, filters=(filters.TopP(0.95),))
    draw = partial(sample, model=model, max_new_tokens=64, **sampling.options)
    policy = policies.actor(model, sampling)

A policy gradient is that of the distribution that was sampled. Sharing the object makes both sides agree.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxpg.models import Config
from jaxpg.sampling import checks
from jaxpg.sampling.filters import Filter, Vocabulary
from jaxpg.sampling.stop_strings import Automaton, build


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and what ends a row. Frozen and hashable, hence a static argument of `jax.jit`.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      filters: of `sampling.filters`, applied to the tempered logits in order.
      stop_tokens: ids that end a row.
      stop_strings: ends a row whose text contains one of its strings.
    """

    temperature: float = 1.0
    filters: tuple[Filter, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    stop_strings: Automaton | None = None

    def __post_init__(self):
        checks.check_temperature(self.temperature)
        for name in ("filters", "stop_tokens"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for one in self.filters:
            if not callable(one):
                raise ValueError(f"filters has {one!r}: must be functions of logits, see jaxpg.sampling.filters")
        outside = [token for token in self.stop_tokens if token < 0]
        if outside:
            raise ValueError(f"stop_tokens={outside}: token ids are at least 0")

    @classmethod
    def for_model(
        cls,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        *,
        temperature: float = 1.0,
        filters: Sequence[Filter] = (),
        texts: Sequence[str] = (),
    ) -> "Sampling":
        """Builds the settings of a model and its tokenizer.

        A row ends at every stop token that the checkpoint declares and at the tokenizer's own: the turns of Gemma end
        with another token than its <eos>, and Llama 3 and Qwen list several. A model whose vocabulary is padded beyond
        the tokenizer gets a filter in front, so that no id without a text is drawn.

        Args:
          config: of the model; its `stop_tokens` are those of the checkpoint.
          tokenizer: of the model.
          temperature: as above.
          filters: as above.
          texts: strings that end a row too, e.g. the end of a call to a tool.

        Raises:
          ValueError: if neither the config nor the tokenizer has a stop token; for a text that cannot be matched, as
            `stop_strings.build` says; if a field is out of range.
        """
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        stop_tokens = tuple(dict.fromkeys((*config.stop_tokens, *own)))
        if not stop_tokens:
            raise ValueError(
                "stop_tokens: neither the model's config nor its tokenizer has any, so that no completion would end: "
                "set tokenizer.eos_token, or config = dataclasses.replace(config, stop_tokens=(id,))"
            )
        size = max(tokenizer.get_vocab().values()) + 1  # not len(tokenizer): some vocabularies have gaps
        if config.vocab_size > size:
            filters = (Vocabulary(size), *filters)
        automaton = None
        if texts:
            # Some tokenizers have ids that the model lacks. These are never drawn.
            automaton = build(texts, tokenizer, vocab_size=max(size, config.vocab_size))
            automaton = Automaton(automaton.table[:, : config.vocab_size])
        return cls(temperature, tuple(filters), stop_tokens, automaton)

    def greedy(self) -> "Sampling":
        """Returns the same settings with temperature 0: the most likely token that the filters leave."""
        return dataclasses.replace(self, temperature=0.0)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `sample`, `generate` and `converse` that these settings are."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
