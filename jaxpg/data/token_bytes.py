"""Bytes of tokens: what each token id adds to the decoded text."""

import contextlib
import json
import re

import numpy as np

# What a token is to the decoder: left out of the text; text; or one byte, which is decoded with its neighbours.
SKIPPED, TEXT, BYTE = range(3)


def token_bytes(tokenizer, vocab_size: int | None = None) -> list[bytes]:
    """Lists the bytes each token id adds to the decoded text with special tokens skipped.

    The backend's decoder decides: ByteLevel (each character stands for a byte), Replace or Metaspace and ByteFallback
    (SentencePiece: '▁' is a space, '<0xNN>' a byte), or plain concatenation.

    Args:
      tokenizer: of `transformers`, with a backend of the `tokenizers` library.
      vocab_size: the length of the list; ids the tokenizer lacks give b"", as do special tokens.

    Raises:
      ValueError: if the decoder is another one, so that a token has no bytes of its own; if the tokenizer cleans up
        spaces; if it has ids at or above `vocab_size`.
    """
    return pieces_and_kinds(tokenizer, vocab_size)[0]


def pieces_and_kinds(tokenizer, vocab_size: int | None = None) -> tuple[list[bytes], np.ndarray]:
    """Returns the bytes of each id, as `token_bytes`, and its kind [V] int8: SKIPPED, TEXT or BYTE."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__} has no backend_tokenizer: load its fast version, a "
            "PreTrainedTokenizerFast"
        )
    if tokenizer.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE":  # ignored for BPE
        raise ValueError(
            "tokenizer.clean_up_tokenization_spaces=True rewrites the decoded text, so that tokens have no bytes of "
            "their own: set it to False"
        )
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    vocab_size = size if vocab_size is None else vocab_size
    if vocab_size < size:
        raise ValueError(f"vocab_size={vocab_size} is below the tokenizer's {size} ids: use the columns of the logits")
    replacements, last = _decoder_steps(backend)
    special = {str(token) for token in backend.get_added_tokens_decoder().values() if token.special}
    pieces, kinds = [b""] * vocab_size, np.full(vocab_size, SKIPPED, np.int8)
    for i in range(size):
        token = backend.id_to_token(i)
        if token is None or token in special:
            continue
        for old, new in replacements:
            token = token.replace(old, new)
        pieces[i], kinds[i] = _decode_token(token, last)
    return pieces, kinds


def _decoder_steps(backend) -> tuple[list[tuple[str, str]], str | None]:
    """Reads the decoder: the replacements in each token, then "ByteLevel", "ByteFallback" or None."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "None (joins with spaces)"}
    steps = _flat(state)
    replacements, last = [], None
    while steps and (steps[0]["type"] == "Metaspace" or "String" in steps[0].get("pattern", ())):
        step = steps.pop(0)
        metaspace = step["type"] == "Metaspace"
        replacements.append((step["replacement"], " ") if metaspace else (step["pattern"]["String"], step["content"]))
    if steps and steps[0]["type"] in ("ByteLevel", "ByteFallback"):
        last = steps.pop(0)["type"]
    one_text = last == "ByteLevel"
    while steps and steps[0]["type"] == "Fuse":
        steps.pop(0)
        one_text = True
    if steps and one_text and steps[0]["type"] == "Strip" and steps[0]["stop"] == 0:
        steps.pop(0)  # only the start of the whole text, which is the prompt's
    if steps:
        raise ValueError(
            f"tokenizer has the decoder {json.dumps(state, ensure_ascii=False)}, of which {steps[0]['type']} is not "
            "understood here: use Replace or Metaspace, ByteLevel or ByteFallback, Fuse, Strip(stop=0), in that order, "
            "or stop on tokens"
        )
    return replacements, last


def _flat(state: dict) -> list[dict]:
    """Lists the steps of a decoder, those of nested Sequences included."""
    if state["type"] != "Sequence":
        return [state]
    return [step for decoder in state["decoders"] for step in _flat(decoder)]


def _decode_token(token: str, last: str | None) -> tuple[bytes, int]:
    """Returns a token's bytes and its kind."""
    if last == "ByteFallback" and re.fullmatch("<0x[0-9a-fA-F]{2}>", token):
        return bytes([int(token[3:5], 16)]), BYTE
    if last == "ByteLevel":
        with contextlib.suppress(KeyError):  # added tokens may hold other characters, and are then plain text
            return bytes(map(_BYTE_OF.__getitem__, token)), TEXT
    return token.encode(), TEXT


def _byte_level_alphabet() -> dict[str, int]:
    """Maps GPT-2's 256 printable characters to the bytes they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
