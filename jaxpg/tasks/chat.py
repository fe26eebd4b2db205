"""Prompts in a model's own chat format, ready for `data.encode_prompts`."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from jaxpg.tasks.dataset import Prompt


def render(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, system: str | None = None, **options
) -> list[str]:
    """Writes prompts out through the tokenizer's chat template, up to where the assistant begins to speak.

    The template writes the special tokens, BOS included where the model wants one. So the text must be tokenised
    with add_special_tokens=False, as `data.encode_prompts` does: else it begins with BOS twice.

    Args:
      tokenizer: with a chat template.
      prompts: texts, each said by the user, or conversations.
      system: the system's message before each prompt; None for what the template has by itself.
      **options: of the template, e.g. enable_thinking=False.

    Returns:
      A text for each prompt.

    Raises:
      ValueError: without a template; if a conversation brings its own system message besides `system`, or ends with
        the assistant; if a template begins with BOS twice.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template: give encode_prompts the plain text of the "
            "prompts, or load an instruction-tuned checkpoint"
        )
    options = {"tokenize": False, "add_generation_prompt": True} | options
    texts = [tokenizer.apply_chat_template(_conversation(prompt, system), **options) for prompt in prompts]
    bos = tokenizer.bos_token
    for prompt, text in zip(prompts, texts, strict=True):
        if bos and text.startswith(bos + bos):
            raise ValueError(f"prompt {str(prompt)[:80]!r} begins with {bos + bos!r}: leave BOS to the chat template")
    return texts


def end_of_turn(tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[int]) -> int:
    """Finds the token that ends what the assistant says, in the tokenizer's chat template.

    Args:
      tokenizer: with a chat template.
      stop_tokens: those of the model; the first that the template writes behind a reply is taken.

    Returns:
      The token; the first of `stop_tokens` where the template writes none of them.
    """
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    behind = tokenizer(text[text.rindex("b") + 1 :], add_special_tokens=False)["input_ids"]
    return next((token for token in behind if token in stop_tokens), stop_tokens[0])


def _conversation(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(f"prompt {str(prompt)[:80]!r}: must end with a message that the assistant is to answer")
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError(
            f"prompt {str(prompt)[:80]!r} has a system message of its own: leave out system={system[:40]!r}"
        )
    return [{"role": "system", "content": system}, *messages]
