"""Small tokenizers of the two kinds that most models have, trained on a few lines."""

from __future__ import annotations

import json
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers


def byte_level(corpus: Sequence[str], size: int, special: Sequence[str]) -> tokenizers.Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: any token may hold a part of a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*special],
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return backend


def byte_fallback(corpus: Sequence[str], size: int) -> tokenizers.Tokenizer:
    """Like Llama 2 and Mistral: words with a leading ▁, and runs of byte tokens for unknown characters."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are ordinary tokens
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend
