"""Stop strings: the automaton stops a row at the very token at which the decoded text first has one of them."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxpg.data.tokenizers import characters
from jaxpg.sampling import stop_strings

TEXT = "a baab the answer is 42.\n\nUser: aab abba, café 漢字 🙂 naïve </answer> the user said: ab."


def _byte_level():
    """ByteLevel BPE with merges, an added token that is text, and special ones."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([TEXT] * 4, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    backend.add_tokens([AddedToken("漢 ab", special=False), AddedToken("é", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def _byte_fallback(strip=True):
    """A BPE as SentencePiece's: '▁' for a space, 256 byte tokens, the decoder of Llama."""
    words = ["▁", "a", "b", "▁a", "ab", "aab", "▁the", "▁▁", "é", "漢", "xaabx", ":", "\n", "User", "🙂"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    backend = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _metaspace():
    pieces = [(piece, -1.0) for piece in ("<unk>", "▁", "▁a", "a", "b", "ab", "é", "漢", "🙂")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


TOKENIZERS = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "byte_fallback_no_strip": lambda: _byte_fallback(strip=False),
    "metaspace": _metaspace,
    "characters": lambda: characters("ab :é漢🙂\nUserx"),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def _text(tokenizer, ids):
    """What a completion shows after a prompt, here one token that shows "b"."""
    prompt = [tokenizer.convert_tokens_to_ids("b")]
    text = tokenizer.decode(prompt + list(ids), skip_special_tokens=True)
    assert text[0] == "b"
    return text[1:]


def _first_match(tokenizer, ids, strings):
    """The oracle: the smallest k with a stop string in the text of ids[:k], else None."""
    found = (k for k in range(1, len(ids) + 1) if any(s in _text(tokenizer, ids[:k]) for s in strings))
    return next(found, None)


@jax.jit
def _states(table, tokens):
    """States [B, T] after each of the tokens [B, T]."""

    def step(state, token):
        state = stop_strings.advance(table, state, token)
        return state, state

    start = jnp.full(tokens.shape[0], stop_strings.START, jnp.int32)
    return jax.lax.scan(step, start, tokens.T)[1].T


def _first_matches(automaton, tokens):
    """The first k at which each row matches, None for never; a match must last."""
    hits = np.asarray(stop_strings.is_match(_states(jnp.asarray(automaton.table), jnp.asarray(tokens))))
    assert (np.diff(hits.astype(int), axis=1) >= 0).all()
    return [int(row.argmax()) + 1 if row.any() else None for row in hits]


def _draw_ids(rng, tokenizer, alphabet, length):
    """Ids of which half spell common text, some are bytes of a character in order, and the rest are any."""
    ids = []
    while len(ids) < length:
        c = rng.choice(alphabet)
        spelled = tokenizer.convert_tokens_to_ids([f"<0x{b:02X}>" for b in c.encode()])
        if rng.random() < 0.3 and None not in spelled and tokenizer.unk_token_id not in spelled:
            ids += spelled[: rng.choice([len(spelled), len(spelled), 1])]
        elif rng.random() < 0.6:
            ids += tokenizer.encode(c, add_special_tokens=False)
        else:
            ids.append(rng.randrange(len(tokenizer)))
    return ids[:length]


def _draw_string(rng, text):
    """One to three characters in a row of the text."""
    text = max(text.split("\ufffd"), key=len)
    start = rng.randrange(max(1, len(text) - 2))
    return text[start : start + rng.randint(1, 3)]


@pytest.mark.parametrize("seed", range(4))
def test_matches_at_the_token_where_the_decoded_text_first_has_a_stop_string(tokenizer, seed):
    rng = random.Random(seed)
    alphabet = ["a", "b", "ab", " ", " a", "é", "漢", "🙂"]
    rows = [_draw_ids(rng, tokenizer, alphabet, 16) for _ in range(80)]
    strings = [_draw_string(rng, _text(tokenizer, row)) for row in rows[: rng.randint(2, 4)]]
    expected = [_first_match(tokenizer, row, strings) for row in rows]
    assert any(expected), strings
    assert _first_matches(stop_strings.build(strings, tokenizer), np.array(rows)) == expected, strings


@pytest.mark.parametrize("strings", [["aab", "ab"], ["ab", "aab"], ["aba", "ab a", "baab"], ["a", "a"]])
def test_overlapping_stop_strings(strings):
    tokenizer = characters("ab ")
    rows = np.array(np.meshgrid(*[[3, 4, 5]] * 6)).reshape(6, -1).T
    expected = [_first_match(tokenizer, row, strings) for row in rows.tolist()]
    assert _first_matches(stop_strings.build(strings, tokenizer), rows) == expected


def _run(tokenizer, strings, tokens):
    """Where the tokens, given as strings of the vocabulary, first match."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    [match] = _first_matches(stop_strings.build(strings, tokenizer), np.array([ids]))
    assert match == _first_match(tokenizer, ids, strings)
    return match


@pytest.mark.parametrize(
    ("strings", "tokens", "match"),
    [
        (["b the:"], ["aab", "▁the", ":"], 3),  # over three tokens
        (["aab"], ["b", "xaabx", "b"], 2),  # in the middle of a token
        (["ab"], ["a", "</s>", "b"], 3),  # a special token shows nothing
        (["é"], ["<0xC3>", "<0xA9>"], 2),
        (["é"], ["<0xC3>", "</s>", "<0xA9>"], 3),
        (["é"], ["<0xC3>", "a", "<0xA9>"], None),
        (["aé漢"], ["a", "<0xC3>", "<0xA9>", "漢"], 4),
        (["A"], ["<0xC3>", "<0x41>", "a", "<0x41>"], 4),  # the decoder shows C3 41 as two U+FFFD
        (["aA"], ["a", "<0x41>"], 2),
        (["A漢"], ["<0x41>", "<0xE6>", "<0xBC>", "<0xA2>"], 4),
        (["a漢"], ["a", "<0xE6>", "<0xBC>", "漢"], None),
        ([" a"], ["▁a"], 1),  # the first space belongs to the completion
    ],
)
def test_byte_fallback_by_hand(strings, tokens, match):
    assert _run(_byte_fallback(), strings, tokens) == match


def test_utf8_validator_accepts_what_python_decodes():
    edges = [0, *(b for high in (0x7F, 0x8F, 0x9F, 0xBF, 0xC1, 0xDF, 0xE0, 0xEC, 0xED, 0xEF) for b in (high, high + 1))]
    edges += [0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    continued = [0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0]
    follow = stop_strings._utf8_validator()
    for sequence in itertools.chain(*(itertools.product(edges, *[continued] * n) for n in range(4))):
        state = 0
        for byte in sequence:
            state = follow[state, byte]
        assert (state == 0) == ("\ufffd" not in bytes(sequence).decode(errors="replace")), bytes(sequence)


def test_byte_level_by_hand():
    tokenizer = _byte_level()
    emoji = ["ð", "Ł", "Ļ", "Ĥ"]  # F0 9F 99 82
    assert _run(tokenizer, ["🙂"], emoji) == 4
    assert _run(tokenizer, ["🙂"], [*emoji[:3], "a", emoji[3]]) is None
    assert _run(tokenizer, ["a"], [*emoji[:3], "a"]) == 4
    assert _run(tokenizer, ["漢 a"], ["漢 ab"]) == 1


def test_token_bytes_join_to_the_decoded_text(tokenizer):
    rng = random.Random(0)
    pieces = stop_strings.token_bytes(tokenizer)
    assert len(pieces) == len(tokenizer)
    assert all(pieces[i] == b"" for i in tokenizer.all_special_ids)
    texts = ["ab é漢🙂", " a  b", "🙂é"]
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    if not any(token.startswith("<0x") for token in tokenizer.get_vocab()):  # there, broken runs show otherwise
        rows.append([rng.randrange(len(tokenizer)) for _ in range(500)])
    for ids in rows:
        assert b"".join(pieces[i] for i in ids).decode(errors="replace") == _text(tokenizer, ids)


def test_vocab_size_pads_and_keeps_the_state():
    tokenizer = characters("ab")
    assert stop_strings.token_bytes(tokenizer, 7) == [b"", b"", b"", b"a", b"b", b"", b""]
    automaton = stop_strings.build(["ab"], tokenizer, 7)
    assert automaton.table.shape == (3, 7)
    assert automaton.table.dtype == np.int16
    assert _first_matches(automaton, np.array([[3, 6, 4, 5], [3, 3, 0, 5]])) == [3, None]


def test_no_stop_strings_never_match():
    tokenizer = _byte_fallback()
    automaton = stop_strings.build([], tokenizer)
    assert _first_matches(automaton, np.arange(len(tokenizer))[None]) == [None]


def test_advance_keeps_the_dtype_of_the_state():
    table = stop_strings.build(["ab"], characters("ab")).table
    state = stop_strings.advance(table, jnp.zeros(2, jnp.int8), jnp.array([3, 4]))
    assert state.dtype == jnp.int8
    assert state.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("strings", "message"), [([""], "stop_strings"), ("ab", "list"), (["a\ufffd"], "FFFD"), (["\ud800"], "surrogate")]
)
def test_refuses_stop_strings(strings, message):
    with pytest.raises(ValueError, match=message):
        stop_strings.build(strings, characters("ab"))


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("a+"), "b"), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Strip(" ", 1, 0),  # without Fuse it strips every token
    ],
)
def test_refuses_decoders_that_give_a_token_no_bytes_of_its_own(decoder):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoder
    with pytest.raises(ValueError, match="tokenizer has the decoder"):
        stop_strings.token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_refuses_a_small_vocabulary_and_a_clean_up():
    tokenizer = characters("ab")
    with pytest.raises(ValueError, match="vocab_size=4"):
        stop_strings.build(["a"], tokenizer, 4)
    tokenizer.clean_up_tokenization_spaces = True
    with pytest.raises(ValueError, match="clean_up"):
        stop_strings.build(["a"], tokenizer)
    with pytest.raises(ValueError, match="backend_tokenizer"):
        stop_strings.token_bytes(object())
