"""Writes small GGUF files as llama.cpp's converter does, for the tests that read them."""

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers

CORPUS = ["the sum of two numbers, 12 and 34", "def add(a, b):\n    return a + b\n", "größer, наука, 数学 🎉 it's"] * 3
SIZES = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 64, "layers": 2}


def strings(count: int) -> list[str]:
    """Numbers, code, emoji and several scripts, mixed; always the same strings."""
    rng = np.random.default_rng(0)
    pieces = [
        *(
            "The quick brown fox",
            " isn't",
            "we'll",
            "HTTP/1.1",
            "x_1",
            "camelCase",
            "\n\n",
            "\n",
            "\t",
            "  ",
            "     ",
            " ",
        ),
        *(
            "12345",
            "3.14159",
            "1,000,000",
            "½",
            "٣٤",
            "Ⅷ",
            "x²",
            "²",
            "२०२४",
            "+",
            "-17",
            "=",
            "?!",
            "...",
            "#",
            "\\n",
            "\r\n",
        ),
        *(
            "def f(x):\n    return x[0]",
            "for (int i = 0; i < n; ++i) {",
            "SELECT * FROM t;",
            "<p class='a'>",
            "→",
            "£5",
        ),
        *(
            "🎉",
            "👩‍👩‍👧",
            "🇫🇷",
            "👍🏽",
            "größer",
            "naïve",
            "e\u0301",
            "Привет, мир",
            "Ελληνικά",
            "שלום",
            "مرحبا",
            "नमस्ते",
        ),
        *(
            "สวัสดี",
            "你好世界",
            "こんにちは",
            "한국어",
            "\U0001d539\U0001d552",
            "\u00a0",
            "\u200b",
            "\u3000",
            "«»",
            "—",
            "'s",
            "S'S",
            "€",
        ),
    ]
    made = ["".join(rng.choice(pieces, size=rng.integers(1, 9))) for _ in range(count)]
    return [text + str(rng.integers(10**6)) if i % 3 == 0 else text for i, text in enumerate(made)]


def weights(architecture: str, *, vocabulary: int, rng) -> dict[str, np.ndarray]:
    """Random weights under llama.cpp's names, in Hugging Face's layout."""
    s = SIZES
    q, kv = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
    shapes = {"token_embd": (vocabulary, s["hidden"]), "output_norm": (s["hidden"],)}
    for i in range(s["layers"]):
        block = {"attn_q": (q, s["hidden"]), "attn_k": (kv, s["hidden"]), "attn_v": (kv, s["hidden"])}
        block |= {"attn_output": (s["hidden"], q), "attn_norm": (s["hidden"],), "ffn_norm": (s["hidden"],)}
        block |= {"ffn_gate": (s["mlp"], s["hidden"]), "ffn_up": (s["mlp"], s["hidden"])}
        block |= {"ffn_down": (s["hidden"], s["mlp"])}
        if architecture == "gemma3":
            block |= {"post_attention_norm": (s["hidden"],), "post_ffw_norm": (s["hidden"],)}
            block |= {"attn_q_norm": (s["head_dim"],), "attn_k_norm": (s["head_dim"],)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def byte_level_tokenizer(writer) -> int:
    """Trains a small byte-level BPE, writes it as llama.cpp does, and returns the size of its vocabulary."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS,
        tokenizers.trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    model = bpe.get_vocab()
    tokens = sorted(model, key=model.get)
    merges = [" ".join(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    return len(tokens)


def sentencepiece_tokenizer(writer) -> int:
    """A vocabulary like Gemma's, in small: bytes, user-defined runs of spaces and newlines, scores that are ranks."""
    head = [("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<unk>", 3)]
    head += [("\n", 4), ("\n\n", 4), ("  ", 4), ("   ", 4), ("    ", 4), ("<start_of_turn>", 3)]
    head += [(f"<0x{b:02X}>", 6) for b in range(256)]
    pieces = [
        "▁t",
        "in",
        "th",
        "he",
        "the",
        "▁the",
        "▁s",
        "er",
        "▁a",
        "an",
        "▁an",
        "in▁",
        *"▁abcdefghinorst,.0123456789é数",
    ]
    names = [name for name, _ in head] + pieces
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_scores([-1000.0] * len(head) + [-float(i) for i in range(len(pieces))])
    writer.add_token_types([kind for _, kind in head] + [1] * len(pieces))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    return len(names)


def write(path: Path, architecture="llama", *, more=None, change=None, raw_type=None, split=None) -> dict:
    """Writes a small GGUF file; returns its weights as Hugging Face would have them, under llama.cpp's names."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(SIZES["layers"])
    writer.add_context_length(64)
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_feed_forward_length(SIZES["mlp"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_key_length(SIZES["head_dim"])
    if architecture == "gemma3":
        writer.add_sliding_window(16)
    if split:
        writer.add_uint16("split.count", split)
    vocabulary = (sentencepiece_tokenizer if architecture == "gemma3" else byte_level_tokenizer)(writer)
    if more:
        more(writer)
    made = weights(architecture, vocabulary=vocabulary, rng=np.random.default_rng(0))
    for name, value in made.items():
        stored = change(name, value) if change else value
        if raw_type is not None and stored.ndim > 1:
            writer.add_tensor(name, gguf.quants.quantize(stored, raw_type), raw_dtype=raw_type)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def interleave(name: str, w: np.ndarray) -> np.ndarray:
    """What the converter does to a query or key projection: row i of a head's halves become neighbours."""
    heads = {"attn_q": SIZES["heads"], "attn_k": SIZES["kv_heads"]}.get(name.split(".")[-2])
    if heads is None:
        return w
    halves = w.reshape(heads, 2, -1, w.shape[-1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(w.shape)
