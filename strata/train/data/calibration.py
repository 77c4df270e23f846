"""Some text as token ids, for what looks at a model's activations before it rounds its weights."""

from __future__ import annotations

from pathlib import Path

from strata.text.tokenizer import Tokenizer
from strata.train.data.records import encode_record, kind_of
from strata.train.data.sources import file_ranges, read_range
from strata.train.tasks.mixture import document

# Characters that a token has at most in texts worth reading: what is read of a file is bounded by it.
_CHARACTERS = 16
# Another than that of the training of the built-in model.
_SEED = 1


def file_samples(file: Path, tokenizer: Tokenizer, count: int, longest: int) -> list[list[int]]:
    """The first `count` samples of at most `longest` tokens of a file of texts or chats, as `strata data` reads them.

    A text file is cut into samples; of each record of JSON lines or Parquet the beginning is one, unless its text is
    blank. Raises ValueError for a file without text, or with records that are none.
    """
    samples: list[list[int]] = []
    for file_range in file_ranges([file], max(2**16, count * longest * _CHARACTERS)):
        for where, record in read_range(file_range):
            try:
                kind = kind_of(record)
                if kind == "text" and not str(record["text"]).strip():
                    continue  # its tokens are those that begin and end any text
                documents = encode_record(tokenizer, kind, record)
            except ValueError as error:
                raise ValueError(f"{where}: {error}; correct or remove the record") from None
            if not documents:
                continue
            tokens = documents[0].tokens.tolist()
            ends = len(tokens) if file_range.format == "text" else min(longest, len(tokens))
            samples += [tokens[at : min(at + longest, ends)] for at in range(0, ends, longest)]
            if len(samples) >= count:
                return samples[:count]
    if not samples:
        raise ValueError(f"{file} holds no text; give a file with some, as {count} samples of {longest} tokens")
    return samples


def exercise_samples(tokenizer: Tokenizer, count: int, longest: int) -> list[list[int]]:
    """As many of the exercises of the built-in model, as chats where the tokenizer has a template."""
    samples = []
    for index in range(count):
        messages = [message for example in document(_SEED, index).examples for message in example.messages]
        if tokenizer.has_chat_template:
            tokens = tokenizer.encode_chat(messages, add_generation_prompt=False)
        else:
            tokens = tokenizer.encode("\n".join(str(message.get("content") or "") for message in messages))
        samples.append(tokens[:longest])
    return samples
