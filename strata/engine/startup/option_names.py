"""How a message of an engine names options to somebody who gave them on a command line."""

from __future__ import annotations

import re
from collections.abc import Collection

_QUOTES = "'\""
# What may be somebody's own words, such as the name of a model: in quotes, or with a slash.
_ECHOED = r"""(?<!\w)'[^'\n]*'(?!\w)|(?<!\w)"[^"\n]*"(?!\w)|(?<!\S)\S*/\S*"""
_VALUE = r"""'[^']*'|"[^"]*"|[-+]?\w+(?:\.\w+)*(?:(?<=e)-\d+)?"""


def as_flags(text: str, options: Collection[str]) -> str:
    """A message that names options as `LLM` takes them, with those of `options` as a command line does: `max_num_seqs`
    becomes `--max-num-seqs`, `quantization='fp8'` becomes `--quantization fp8`, `deterministic=True` a flag alone.

    options: that the command line has, by the names of `EngineConfig`. One that is a word of English counts with its
    value alone. What stands in quotes, or in a path, is left as it is, and so are values of several parts.
    """
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    if not names:
        return text
    named = rf"(?<![\w./-])({names})(?![\w/-]|\.\w)(?:(=)({_VALUE}|(?=[\s,;:.)]|$)))?(?!=)"
    return re.sub(rf"{_ECHOED}|{named}", _flag, text)


def _flag(found: re.Match[str]) -> str:
    name, assigned, value = found.groups()
    if not name or (not assigned and "_" not in name):
        return str(found[0])
    spelled = name.replace("_", "-")
    if value == "False":
        return f"--no-{spelled}"
    if value in (None, "", "True"):
        return f"--{spelled}"
    return f"--{spelled} {value[1:-1] if value[0] in _QUOTES else value}"
