"""Data for examples/sft.toml and examples/dpo.toml, from the built-in model's own exercises.

python examples/toy_data.py FOLDER writes style.jsonl (replies that begin with "Sure!") and short.jsonl (the bare answer
preferred to the worked one).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from strata.train.tasks.mixture import training_example

OPENING = "Sure! "


def style(count: int) -> list[dict[str, Any]]:
    """Chats in a new style: the same replies, after an opening."""
    chats = []
    rng = random.Random("style")
    for _ in range(count):
        user, assistant = training_example(rng).messages
        chats.append({"messages": [user, assistant | {"content": OPENING + assistant["content"]}]})
    return chats


def short(count: int) -> list[dict[str, str]]:
    """Preferences: "Answer: 12." rather than the steps that lead to it."""
    pairs: list[dict[str, str]] = []
    rng = random.Random("short")
    while len(pairs) < count:
        example = training_example(rng)
        question, reply = (message["content"] for message in example.messages)
        if example.answer is not None and len(reply) > 2 * len(chosen := f"Answer: {example.answer}"):
            pairs.append({"prompt": question, "chosen": chosen, "rejected": reply})
    return pairs


def write(folder: Path) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("style", style(600)), ("short", short(240))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where both files go, runs/toy for example")
    folder = parser.parse_args().folder
    try:
        write(folder)
    except OSError as error:
        parser.error(f"cannot write into {folder}: {error.strerror}; choose another folder")


if __name__ == "__main__":
    main()
