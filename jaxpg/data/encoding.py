"""Between text and the padded, masked arrays of the library."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxpg.types import Batch, Rollout

Completion = str | Sequence[tuple[str, bool]]  # the policy's text, or segments (text, whether the policy wrote it)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizes prompts into left-padded rows.

    Args:
      tokenizer: without adding special tokens of its own: what a prompt needs stands in its text.
      texts: P prompts.
      length: S, the budget in tokens.

    Returns:
      tokens [P, S] int32 and mask [P, S] bool.

    Raises:
      ValueError: if a prompt is empty, does not fit, or has a character the tokenizer does not know.
    """
    ids = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    tokens = np.zeros((len(ids), length), np.int32)
    mask = np.zeros((len(ids), length), bool)
    for row, (text, prompt) in enumerate(zip(texts, ids, strict=True)):
        _check(tokenizer, text, prompt, length, "prompt", "prompt_length")
        tokens[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = True
    return tokens, mask


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    completions: Sequence[Completion],
    *,
    length: int,
    stop_token: int | None = None,
) -> Batch:
    """Tokenizes prompts with their completions, a stop token after each, right-padded; the completions are actions.

    Args:
      tokenizer: without adding special tokens of its own, as `encode_prompts`.
      prompts: B texts.
      completions: B texts, or conversations as `encode_segments` takes them.
      length: T, the room for both and the stop token.
      stop_token: ends a completion and is an action; default the tokenizer's `eos_token_id`.

    Returns:
      A Batch of [B, T] tokens and masks.

    Raises:
      ValueError: as `encode_prompts`, or if there is no stop token.
    """
    stop_token = tokenizer.eos_token_id if stop_token is None else stop_token
    if stop_token is None:
        raise ValueError("stop_token=None, and the tokenizer has no eos_token: name the token that ends a completion")
    prompt_ids = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    encoded = encode_segments(tokenizer, completions)
    shape = (len(prompt_ids), length)
    tokens, token_mask, action_mask = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
    for row, (prompt, (completion, actions)) in enumerate(zip(prompt_ids, encoded, strict=True)):
        ids = [*prompt, *completion, stop_token]
        _check(tokenizer, prompts[row] + _text(completions[row]), ids, length, "demonstration", "length")
        tokens[row, : len(ids)] = ids
        token_mask[row, : len(ids)] = True
        action_mask[row, len(prompt) : len(ids)] = [*actions, True]
    return Batch(tokens=tokens, token_mask=token_mask, action_mask=action_mask)


def encode_segments(
    tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion]
) -> list[tuple[list[int], list[bool]]]:
    """Tokenizes completions that several parties write, each segment by itself, as the sampler meets them.

    Args:
      tokenizer: as of `encode_prompts`.
      completions: for each a list of segments (text, whether the policy wrote it). A plain text is the policy's.

    Returns:
      For each completion its token ids, and which of them are actions.
    """
    parts = [_segments(completion) for completion in completions]
    texts = [text for segments in parts for text, _ in segments]
    ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    encoded = []
    for segments in parts:
        tokens: list[int] = []
        actions: list[bool] = []
        for _, is_action in segments:
            tokens += (own := next(ids))
            actions += [is_action] * len(own)
        encoded.append((tokens, actions))
    return encoded


def _segments(completion: Completion) -> list[tuple[str, bool]]:
    return [(completion, True)] if isinstance(completion, str) else list(completion)


def _text(completion: Completion) -> str:
    return "".join(text for text, _ in _segments(completion))


def decode_completions(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """Turns each row's actions into text, without special tokens."""
    tokens, actions = np.asarray(rollout.tokens), np.asarray(rollout.action_mask)
    kept = [row[drawn].tolist() for row, drawn in zip(tokens, actions, strict=True)]
    return tokenizer.batch_decode(kept, skip_special_tokens=True)


def _check(tokenizer, text: str, ids: list[int], length: int, what: str, argument: str):
    if not ids:
        raise ValueError(f"{what} {text!r} has no tokens: give the model something to continue")
    if len(ids) > length:
        raise ValueError(f"{what} {text!r} has {len(ids)} tokens, {argument}={length}: raise it or shorten the text")
    # Tokenizers of bytes know everything, and some name their stop token as the unknown one.
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown != tokenizer.eos_token_id and unknown in ids:
        raise ValueError(f"{what} {text!r} has a character that the tokenizer does not know: extend its alphabet")
