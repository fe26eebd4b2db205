"""Stop strings, matched exactly on device against the detokenised text, also across token boundaries.

A row stops at its first token after which one of the strings stands in the text decoded so far, special tokens
skipped. The strings become one automaton over bytes (Aho & Corasick 1975), and feeding it a token's bytes becomes one
entry of a table [states, V]: a step of the sampler costs one gather, and the host sees nothing.

*The text* is that of a completion, which continues a prompt. A SentencePiece decoder drops the space at the very start
of what it decodes; in a completion that space is part of the text, so here it counts: the text is what
`decode(prompt + completion)` shows after `decode(prompt)`. A stop string counts when all of it is in the completion.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Sequence

import chex
import jax.numpy as jnp
import numpy as np

from jaxpg.types import Array

START = 0  # the state of a row that has drawn nothing
MATCHED = 1  # the absorbing state: a stop string stands in the text

# What a token is to the decoder: left out of the text; text; or one byte, which is decoded with its neighbours.
_SKIPPED, _TEXT, _BYTE = range(3)
_BROKEN = 8  # state of _utf8_validator: the bytes are not UTF-8, whatever follows


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """The stop strings of one tokenizer; pass `table` to the jitted function, or close over it for a constant.

    Attributes:
      table: [states, V] int16 (int32 beyond 32767 states), the state after a token. State 0 is the start, 1 the match.
    """

    table: np.ndarray


def advance(table: Array, state: Array, token: Array) -> Array:
    """Returns the states after one more token a row: table[state, token].

    Args:
      table: [states, V], `Automaton.table`.
      state: [B] integer; START (0) before the first token. Its dtype is kept.
      token: [B] integer.
    """
    chex.assert_rank(table, 2)
    chex.assert_equal_shape([state, token])
    return jnp.asarray(table)[state, token].astype(state.dtype)


def is_match(state: Array) -> Array:
    """Tells which rows [B] bool have a stop string in their text."""
    return state == MATCHED


def build(stop_strings: Sequence[str], tokenizer, vocab_size: int | None = None) -> Automaton:
    """Builds the automaton of the stop strings, on the host; the table takes 2 · V bytes a state.

    There is about one state a byte of the stop strings. Tokenizers with byte fallback have up to twice as many and
    ten more: their decoder shows a run of byte tokens as U+FFFD if the run as a whole is no UTF-8, so the automaton
    keeps account of that.

    Args:
      stop_strings: any number; with none, nothing matches.
      tokenizer: of `transformers`, with a backend of the `tokenizers` library.
      vocab_size: V, the columns of the model's logits; default: as many as the tokenizer has ids.

    Raises:
      ValueError: for a stop string that is empty or no Unicode text, and where `token_bytes` raises it.
    """
    goto = _aho_corasick(_patterns(stop_strings))
    pieces, kinds = _pieces(tokenizer, vocab_size)
    table = _feed(goto, pieces)
    if (kinds == _BYTE).any():
        table = _with_byte_runs(goto, table, pieces, kinds)
    return Automaton(table.astype(np.int16 if len(table) <= 2**15 else np.int32))


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
    return _pieces(tokenizer, vocab_size)[0]


def _pieces(tokenizer, vocab_size: int | None) -> tuple[list[bytes], np.ndarray]:
    """Returns the bytes of each id and its kind, [V]."""
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
    pieces, kinds = [b""] * vocab_size, np.full(vocab_size, _SKIPPED, np.int8)
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
        return bytes([int(token[3:5], 16)]), _BYTE
    if last == "ByteLevel":
        with contextlib.suppress(KeyError):  # added tokens may hold other characters, and are then plain text
            return bytes(map(_BYTE_OF.__getitem__, token)), _TEXT
    return token.encode(), _TEXT


def _byte_level_alphabet() -> dict[str, int]:
    """Maps GPT-2's 256 printable characters to the bytes they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _patterns(stop_strings: Sequence[str]) -> list[bytes]:
    """Returns the stop strings in UTF-8, without those that contain another: that one matches no later."""
    if isinstance(stop_strings, str):
        raise ValueError(f"stop_strings={stop_strings!r} is one string: pass a list of strings, [{stop_strings!r}]")
    for string in stop_strings:
        if not string or re.search("[\ud800-\udfff\ufffd]", string):
            raise ValueError(
                f"stop_strings={list(stop_strings)!r} has {string!r}: give strings of at least one character, without "
                "U+FFFD and surrogates, which stand for bytes that are no text"
            )
    patterns = {string.encode() for string in stop_strings}
    return sorted(p for p in patterns if not any(other in p for other in patterns - {p}))


def _aho_corasick(patterns: Sequence[bytes]) -> np.ndarray:
    """Builds the next state [S, 256] int32 after a byte; no pattern may contain another."""
    children: list[dict[int, int]] = [{}, {}]
    for pattern in patterns:
        node = START
        for byte in pattern[:-1]:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
            node = children[node][byte]
        children[node][pattern[-1]] = MATCHED
    goto = np.zeros((len(children), 256), np.int32)
    goto[MATCHED] = MATCHED
    queue = [(START, START)]  # a state, and that of its longest proper suffix which begins a pattern
    for node, suffix in queue:  # grows: breadth first, so the row of `suffix` is complete
        goto[node] = goto[suffix]
        for byte, child in children[node].items():
            if child != MATCHED:
                queue.append((child, START if node == START else int(goto[suffix, byte])))
            goto[node, byte] = child
    return goto


def _feed(goto: np.ndarray, pieces: Sequence[bytes]) -> np.ndarray:
    """Returns the state [S, V] int32 after all bytes of each piece: one gather a state and byte position."""
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    lengths, data = lengths[longest_first], np.frombuffer(b"".join(pieces[i] for i in longest_first), np.uint8)
    starts = np.cumsum(lengths) - lengths
    counts = [np.count_nonzero(lengths > j) for j in range(lengths.max(initial=0))]
    columns = [data[starts[:count] + j] for j, count in enumerate(counts)]  # byte j of the pieces that have one
    flat, table = goto.ravel(), np.empty((len(goto), len(pieces)), np.int32)
    for start in range(len(goto)):
        state = np.full(len(pieces), start, np.int32)
        for column in columns:
            state[: len(column)] = flat[state[: len(column)] * 256 + column]
        table[start, longest_first] = state
    return table


def _utf8_validator() -> np.ndarray:
    """Builds the next state [9, 256] of a check for UTF-8 (RFC 3629, section 4); 0: all characters are complete."""
    follow = np.full((9, 256), _BROKEN, np.int32)
    ranges = [
        (0, 0x00, 0x7F, 0), (0, 0xC2, 0xDF, 1), (0, 0xE0, 0xE0, 4), (0, 0xE1, 0xEF, 2), (0, 0xED, 0xED, 5),
        (0, 0xF0, 0xF0, 6), (0, 0xF1, 0xF3, 3), (0, 0xF4, 0xF4, 7),
        (1, 0x80, 0xBF, 0), (2, 0x80, 0xBF, 1), (3, 0x80, 0xBF, 2),  # one, two, three more bytes
        (4, 0xA0, 0xBF, 1), (5, 0x80, 0x9F, 1), (6, 0x90, 0xBF, 2), (7, 0x80, 0x8F, 2),  # after E0, ED, F0, F4
    ]  # fmt: skip
    for state, low, high, target in ranges:
        follow[state, low : high + 1] = target
    return follow


def _with_byte_runs(goto: np.ndarray, table: np.ndarray, pieces: Sequence[bytes], kinds: np.ndarray) -> np.ndarray:
    """Extends the table [S, V] by what ByteFallback does to runs of byte tokens.

    A run is decoded as a whole: to its text if it is UTF-8, else to one U+FFFD a byte. So the state is a pair (state
    of the automaton, state of the UTF-8 check), and a broken run is at the start of the automaton until it ends.
    The pairs (s, 0) keep the number s; those within a character or a broken run follow.
    """
    follow = _utf8_validator()
    checks = len(follow)
    broken = follow == _BROKEN
    after = np.where(broken, START, goto[:, None, :]) * checks + follow  # [S, 9, 256]: pair s · 9 + u
    after[MATCHED] = MATCHED * checks
    after = after.reshape(-1, 256)
    pairs = new = np.arange(len(goto)) * checks
    while len(new):
        new = np.setdiff1d(after[new], pairs)
        pairs = np.concatenate([pairs, new])
    number = np.zeros(len(after), np.int32)
    number[pairs] = np.arange(len(pairs))
    wide = table[pairs // checks]  # a text token ends the run
    is_byte = kinds == _BYTE
    bytes_ = [piece[0] for piece, byte in zip(pieces, is_byte, strict=True) if byte]
    wide[:, is_byte] = number[after[pairs]][:, bytes_]
    wide[:, kinds == _SKIPPED] = np.arange(len(pairs))[:, None]
    return wide
