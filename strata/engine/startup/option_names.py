"""How a message of an engine names options to somebody who gave them on a command line."""

from __future__ import annotations

import re
from collections.abc import Collection


def as_flags(text: str, options: Collection[str]) -> str:
    """A message that names options as `LLM` takes them, with those of `options` as a command line does: `max_num_seqs`
    becomes `--max-num-seqs`, `quantization='fp8'` becomes `--quantization fp8`, `deterministic=True` a flag alone.

    options: that the command line has, by the names of `EngineConfig`. One that is a word of English counts with its
    value alone.
    """
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    if not names:
        return text
    return re.sub(rf"(?<![\w./-])({names})(?![\w/-])(?:(=)('[^']*'|\w+(?:\.\w+)*)?)?", _flag, text)


def _flag(found: re.Match[str]) -> str:
    name, assigned, value = found.groups()
    if not assigned and "_" not in name:
        return str(found[0])
    spelled = name.replace("_", "-")
    if value == "False":
        return f"--no-{spelled}"
    return f"--{spelled}" if value in (None, "True") else f"--{spelled} {value.strip(chr(39))}"
