"""Tokenizers, all with the interface of Hugging Face `transformers`."""

import tokenizers
from transformers import PreTrainedTokenizerFast


def characters(alphabet: str) -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token a character, after `<pad>` (0), `<eos>` (1) and `<unk>` (2).

    Args:
      alphabet: the characters, each once.

    Raises:
      ValueError: if a character stands twice.
    """
    twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if twice or not alphabet:
        raise ValueError(f"alphabet={alphabet!r} repeats {twice}: name each character once, and at least one")
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
