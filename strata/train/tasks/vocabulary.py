"""Making a tokenizer from the mixture: byte-level BPE (Sennrich et al. 2016, Radford et al. 2019), digits apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from strata.models.folder import BUILTIN_FOLDER
from strata.train.data.shards import write_atomically
from strata.train.tasks.example import BOUNDARY
from strata.train.tasks.mixture import ExerciseDocument
from strata.train.tasks.tool import listing

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
SPECIAL_TOKENS = (BEGIN, END, PAD, SYSTEM, USER, ASSISTANT, TOOL)


def make_tokenizer(documents: Iterable[ExerciseDocument], vocab_size: int) -> tokenizers.Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens, or fewer if the documents hold fewer pairs to merge.

    Digits are never merged, so a number is its digits. Words that a reply writes letter by letter count as letters. A
    text that is encoded with special tokens begins with `<|begin|>`.
    """
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(_texts(documents), trainer)
    begin = made.token_to_id(BEGIN)
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    return made


def _texts(documents: Iterable[ExerciseDocument]) -> Iterator[str]:
    for document in documents:
        if document.tools:
            yield listing(document.tools)
        for example in document.examples:
            yield example.question
            if example.call is not None:
                yield example.call.result
            for text in example.written:
                yield text.replace(BOUNDARY, " ")


def write_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, max_length: int) -> None:
    """tokenizer.json and its companions, as transformers lays them out. tokenizer.json comes last and whole."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {name: tokenizer.token_to_id(token) for name, token in (("bos", BEGIN), ("eos", END), ("pad", PAD))}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    generation = {f"{name}_token_id": id for name, id in ids.items()} | {"do_sample": False, "max_new_tokens": 512}
    for name, values in (("tokenizer_config", config), ("generation_config", generation)):
        write_atomically(folder / f"{name}.json", (json.dumps(values, indent=2) + "\n").encode())
    template = BUILTIN_FOLDER / "chat_template.jinja"
    write_atomically(folder / template.name, template.read_bytes())
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
