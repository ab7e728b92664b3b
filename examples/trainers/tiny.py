"""What the examples of this folder train: models with random weights and made-up data, so that each takes seconds and no network."""

from __future__ import annotations

from typing import Any

import torch

from retrograde.extras import require

WORDS = [
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "it", "runs", "back",
]  # fmt: skip
SENTENCES = [" ".join(WORDS[k % 5 : k % 5 + 8]) for k in range(16)]


def language_model() -> Any:
    """A Llama of 8 layers."""
    transformers = require("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, attention_dropout=0.1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tokenizer() -> Any:
    """A token for each word."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    vocabulary = {word: k for k, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def tokens() -> list[dict[str, list[int]]]:
    """Rows of a dataset: the sentences as numbers."""
    encode = tokenizer()
    return [
        {"input_ids": encode(sentence)["input_ids"], "labels": encode(sentence)["input_ids"]} for sentence in SENTENCES
    ]


def images(size: int = 32) -> torch.utils.data.TensorDataset:
    """Noise, brighter or darker by class."""
    labels = torch.arange(16) % 4
    noise = torch.randn(16, 3, size, size, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(noise + labels.view(-1, 1, 1, 1), labels)
