"""Rebuilds a Hugging Face tokenizer from the metadata of a GGUF file."""

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token_type; 1 is normal, 2 unknown, 6 a byte
_GPT2 = ("gpt-2", "gpt2")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": _WORDS.replace("DIGITS", ""), "llama-bpe": _WORDS.replace("DIGITS", "{1,3}")}
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# How llama.cpp knows the end of a turn in a file that does not name it (llama-vocab.cpp).
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def special_ids(metadata: dict) -> dict:
    """Ids of the first, the last and the padding token, as config.json has them; without a padding token, eos pads."""
    ids = {
        name: metadata.get(f"tokenizer.ggml.{_ROLES[name]}_token_id")
        for name in ("bos_token", "eos_token", "pad_token")
    }
    ids["pad_token"] = ids["eos_token"] if ids["pad_token"] is None else ids["pad_token"]
    return {f"{name}_id": i for name, i in ids.items()}


def stop_tokens(metadata: dict) -> list[int]:
    """Ids that end a reply: of the text, of a turn and of a message that calls a tool, in this order, each once.

    Where the file names no end of a turn, a control token that is known as one stands in.
    """
    eos, eot, eom = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom"))
    if eot is None:
        tokens, types = (metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
        control = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL}
        eot = next((control[text] for text in _ENDS_OF_TURN if text in control), None)
    return list(dict.fromkeys(i for i in (eos, eot, eom) if i is not None))


def build(metadata: dict, name: str, *, max_length: int) -> PreTrainedTokenizerFast:
    """Rebuilds the tokenizer.

    Args:
      metadata: of the GGUF file.
      name: of the file, for the errors.
      max_length: longest sequence the model takes, in tokens.

    Returns:
      A tokenizer that pads on the left, with the chat template of the file.

    Raises:
      ValueError: if the file holds no tokenizer, or one of another kind.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ValueError(
            f"{name} holds a tokenizer {kind!r}; supported are 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE)"
        )
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if kind == "llama":
        # The converter writes spaces where the vocabulary of these tokens has its own sign for them.
        tokens = [t.replace(" ", "▁") if y == _USER_DEFINED else t for t, y in zip(tokens, types, strict=True)]
    backend = (
        _byte_level(metadata, tokens, types, name) if kind == "gpt2" else _sentencepiece(metadata, tokens, types, name)
    )
    backend.add_tokens(
        [
            AddedToken(t, special=y == _CONTROL, normalized=False)
            for t, y in zip(tokens, types, strict=True)
            if y in (3, 4)
        ]
    )
    ids = special_ids(metadata)
    roles = {
        role: metadata.get(f"tokenizer.ggml.{key}_token_id", ids.get(f"{role}_id")) for role, key in _ROLES.items()
    }
    roles = {role: tokens[i] for role, i in roles.items() if i is not None}
    _add_ends(backend, metadata, roles, kind)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        **roles,
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _byte_level(metadata: dict, tokens: list, types: list, name: str) -> tokenizers.Tokenizer:
    """BPE over bytes; what the text is split into before is known from the name in tokenizer.ggml.pre alone."""
    pre, merges = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.merges")
    supported = (*_GPT2, *_SINGLE_DIGITS, *_SPLITS)
    if pre not in supported or merges is None:
        raise ValueError(
            f"{name} splits text by tokenizer.ggml.pre={pre!r}; supported are {', '.join(supported)}, with merges"
        )
    vocabulary = {token: i for i, (token, y) in enumerate(zip(tokens, types, strict=True)) if y != _UNUSED}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 takes a word that is a token as it is, even where no merges lead there.
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    before = []
    if pre in _SINGLE_DIGITS:
        before = [pre_tokenizers.Digits(individual_digits=True)]
    elif pre in _SPLITS:
        before = [pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level]) if before else byte_level
    backend.normalizer = normalizers.NFC() if pre == "qwen2" else None
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict, tokens: list, types: list, name: str) -> tokenizers.Tokenizer:
    """BPE over characters with bytes for those unknown; the merges follow from the scores, as in transformers."""
    scores, unknown = metadata.get("tokenizer.ggml.scores"), metadata.get("tokenizer.ggml.unknown_token_id")
    if scores is None or unknown is None:
        raise ValueError(
            f"{name} has a SentencePiece vocabulary without scores or unknown token: convert the model again"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # SentencePiece takes user-defined tokens before any merge; the converter gave them the score -1000.
    score = {t: 1.0 if y == _USER_DEFINED else s for t, s, y in zip(tokens, scores, types, strict=True)}
    merges = [
        (score[token], token[:i], token[i:])
        for token, y in zip(tokens, types, strict=True)
        if y in (1, _USER_DEFINED)
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary
    ]
    merges.sort(key=lambda m: (m[0], len(m[1]), len(m[2])), reverse=True)
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocabulary, [m[1:] for m in merges], unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return backend


def _add_ends(backend: tokenizers.Tokenizer, metadata: dict, roles: dict, kind: str) -> None:
    """Sets which of bos and eos go around a text; where the file is silent, as llama.cpp does."""
    default = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    bos = metadata.get("tokenizer.ggml.add_bos_token", default) and roles.get("bos_token")
    eos = metadata.get("tokenizer.ggml.add_eos_token", False) and roles.get("eos_token")
    first, last = ([bos] if bos else []), ([eos] if eos else [])
    if not (first or last):
        return
    special = [(token, backend.token_to_id(token)) for token in {*first, *last}]
    single = [*first, "$A", *last]
    pair = [*single, *(f"{t}:1" for t in first), "$B:1", *(f"{t}:1" for t in last)]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
