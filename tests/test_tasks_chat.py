"""Chat templates: the model's own format, and BOS once."""

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from jaxpg.data import encode_prompts
from jaxpg.tasks import chat

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if quiet %}!{% endif %}"
)


@pytest.fixture
def tokenizer():
    """One character a token; BOS stands in its template, and it puts one before every text, as Llama's does."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|system|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz ?!"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(special)
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_bos_stands_once_at_the_start_and_the_assistant_is_to_speak(tokenizer):
    texts = chat.render(tokenizer, ["hi", "how are you?"])
    assert texts[0] == "<s><|user|>hi</s><|assistant|>"
    tokens, mask = encode_prompts(tokenizer, texts, length=20)
    for row, drawn, text in zip(tokens, mask, texts, strict=True):
        ids = row[drawn].tolist()
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids) == text
    assert tokenizer(texts[0])["input_ids"][:2] == [tokenizer.bos_token_id] * 2, "the fault this guards against"


def test_conversations_system_messages_and_options_of_the_template(tokenizer):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert chat.render(tokenizer, [turns]) == ["<s><|user|>a</s><|assistant|>b</s><|user|>c</s><|assistant|>"]
    assert chat.render(tokenizer, ["a"], system="be brief") == ["<s><|system|>be brief</s><|user|>a</s><|assistant|>"]
    assert chat.render(tokenizer, ["a"], quiet=True)[0].endswith("<|assistant|>!")
    assert len(turns) == 3 and chat.render(tokenizer, []) == []


def test_prompts_that_cannot_be_right_are_refused(tokenizer):
    with pytest.raises(ValueError, match="must end with a message that the assistant"):
        chat.render(tokenizer, [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]])
    with pytest.raises(ValueError, match="has a system message of its own"):
        chat.render(tokenizer, [[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]], system="t")
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    assert chat.render(tokenizer, ["a"]) == ["<s>a"]
    with pytest.raises(ValueError, match="leave BOS to the chat template"):
        chat.render(tokenizer, ["<s>a"])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        chat.render(tokenizer, ["a"])
