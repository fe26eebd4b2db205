"""Stop strings, matched exactly on device against the detokenised text, also across token boundaries.

A row stops at its first token after which one of the strings stands in the text decoded so far, special tokens
skipped. The strings become one automaton over bytes (Aho & Corasick 1975), and feeding it a token's bytes becomes one
entry of a table [states, V]: a step of the sampler costs one gather, and the host sees nothing.

*The text* is that of a completion, which continues a prompt. A SentencePiece decoder drops the space at the very start
of what it decodes; in a completion that space is part of the text, so here it counts: the text is what
`decode(prompt + completion)` shows after `decode(prompt)`. A stop string counts when all of it is in the completion.
"""

import dataclasses
import re
from collections.abc import Sequence

import chex
import jax.numpy as jnp
import numpy as np

from jaxpg.data.token_bytes import BYTE, SKIPPED, pieces_and_kinds, token_bytes
from jaxpg.types import Array

__all__ = ["Automaton", "advance", "build", "is_match", "token_bytes"]

START = 0  # the state of a row that has drawn nothing
MATCHED = 1  # the absorbing state: a stop string stands in the text

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
    pieces, kinds = pieces_and_kinds(tokenizer, vocab_size)
    table = _feed(goto, pieces)
    if (kinds == BYTE).any():
        table = _with_byte_runs(goto, table, pieces, kinds)
    return Automaton(table.astype(np.int16 if len(table) <= 2**15 else np.int32))


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
    is_byte = kinds == BYTE
    bytes_ = [piece[0] for piece, byte in zip(pieces, is_byte, strict=True) if byte]
    wide[:, is_byte] = number[after[pairs]][:, bytes_]
    wide[:, kinds == SKIPPED] = np.arange(len(pairs))[:, None]
    return wide
