"""What a checkpoint declares beside its weights, and what a run makes of each."""

from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from jaxpg.models.config import Config
from jaxpg.models.hf.load import open_source
from jaxpg.models.hf.source import Source

USES = {
    "stop tokens": "used: each ends a completion, and so does the tokenizer's eos",
    "pad token": "not used: masks mark what is real, so the token under a masked position is never read",
    "bos token": "used where the chat template writes it; nothing else puts it in front of a prompt",
    "context length": "used: prompt and completion together may not be longer",
    "chat template": "used for tasks that ask in words",
    "system prompt": "used: the template writes it, unless --system replaces it",
    "temperature": "not used: --temperature says at which one the policy is sampled and trained",
    "top_p": "not used: --top-p does, 1 keeping all",
    "top_k": "not used: --top-k does, 0 keeping all",
    "repetition_penalty": "not used: what was said before would change the distribution that is trained",
}
GENERATION = ("temperature", "top_p", "top_k", "repetition_penalty")


class Declared(NamedTuple):
    """One thing that a checkpoint declares."""

    value: Any  # None where the checkpoint is silent
    use: str  # "used: ..." or "not used: ..."


def declared(
    source: Source | str | Path, config: Config, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Declared]:
    """Lists what a checkpoint declares, and how a run treats it.

        stop tokens           used: all that generation_config.json or else config.json lists, and the tokenizer's eos
        pad token             not used: no function reads what stands at a masked position
        bos token             used where the chat template writes it
        context length        used: bounds prompt and completion together
        chat template         used for tasks that ask in words
        system prompt         used as the template writes it by default, unless a run brings its own
        temperature, top_p,   not used: they suit users of the finished model. The policy gradient is that of the
        top_k,                distribution that is sampled, so a run samples and trains with its own options, by
        repetition_penalty    default the model's unfiltered distribution at temperature 1

    Args:
      source: of `load.open_source`, or what it opens: a directory, a hub name or a GGUF file.
      config: of the checkpoint, see `load.read_config`.
      tokenizer: of the checkpoint, if it has one.

    Returns:
      A Declared for each key of `USES`, in that order.
    """
    if isinstance(source, (str, Path)):
        source = open_source(source)
    eos, bos, pad = (getattr(tokenizer, f"{role}_token_id", None) for role in ("eos", "bos", "pad"))
    found = {
        "stop tokens": tuple(dict.fromkeys((*config.stop_tokens, *(() if eos is None else (eos,))))) or None,
        "pad token": source.generation_config.get("pad_token_id", source.config.get("pad_token_id", pad)),
        "bos token": source.generation_config.get("bos_token_id", source.config.get("bos_token_id", bos)),
        "context length": config.max_length,
        "chat template": getattr(tokenizer, "chat_template", None),
        "system prompt": system_prompt(tokenizer),
    }
    found |= {name: source.generation_config.get(name) for name in GENERATION}
    return {name: Declared(found[name], use) for name, use in USES.items()}


def system_prompt(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Finds what the chat template writes as the system's message where none is given; None if nothing.

    The template is rendered with and without a message of the system. What stands around that message in the one text
    stands around the default in the other.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    system, user = "<<the system>>", "<<the user>>"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    try:
        given, default = (tokenizer.apply_chat_template(m, tokenize=False) for m in (messages, messages[1:]))
    except jinja2.TemplateError:  # the template knows no system
        return None
    before, _, after = given.partition(user)[0].partition(system)
    front = default.partition(user)[0]
    if not (front.startswith(before) and front.endswith(after)) or len(front) <= len(before) + len(after):
        return None
    return front[len(before) : len(front) - len(after)].strip() or None
