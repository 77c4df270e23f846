"""Text that grows token by token: no half characters, no part of a stop string; joined, the text of all tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from strata.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one sample as its tokens come, up to a stop string.

    prompt_ids: what the sample writes on from; after it a first word keeps its leading space.
    stop: strings that end the text. Of several in the text, the one that ends first counts, then the longer.
    include_stop_str_in_output: the text ends after the stop string rather than before it.
    min_tokens: stop strings do not count in the text of this many first tokens.
    include_stop: the same, for whoever decides about ids that end a sample.
    stopped: the stop string that was reached, None until then.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        if tokenizer.joins_bytes:
            self._stream: _Stream = _ByteStream(tokenizer, hidden)
        else:
            self._stream = _DecoderStream(tokenizer, hidden, prompt_ids)
        self._stops = _StopStrings(stop, include_stop_str_in_output)
        self.include_stop = include_stop_str_in_output
        self._unchecked = min_tokens
        self._held = ""
        self.stopped: str | None = None

    def append(self, token_id: int) -> str:
        """The text that this token lets be shown; empty once stopped."""
        if self.stopped is not None:
            return ""
        new = self._stream.append(token_id)
        if self._unchecked:
            self._unchecked -= 1
            return new
        if not self._stops:
            return new
        held = self._held + new
        if (ended := self._end(held + self._stream.unsure())) is not None:
            return ended
        shown = len(held) - self._stops.overlap(held)
        self._held = held[shown:]
        return held[:shown]

    def finish(self) -> str:
        """The rest of the text, when no more tokens will come."""
        if self.stopped is not None:
            return ""
        rest = self._held + self._stream.finish()
        self._held = ""
        return rest

    def _end(self, text: str) -> str | None:
        """The end of the text, if a stop string is in it."""
        found = self._stops.find(text)
        if found is None:
            return None
        self.stopped, length = found
        return text[:length]


class _StopStrings:
    def __init__(self, strings: tuple[str, ...], include: bool) -> None:
        self._strings = strings
        self._include = include
        self._starts = frozenset(string[:length] for string in strings for length in range(1, len(string)))
        self._longest_start = max((len(string) - 1 for string in strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str) -> tuple[str, int] | None:
        """The stop string that ends first in `text`, and where the text before it (or with it) ends."""
        starts = ((text.find(string), string) for string in self._strings)
        ends = [(start + len(string), start, string) for start, string in starts if start >= 0]
        if not ends:
            return None
        end, start, string = min(ends)
        return string, end if self._include else start

    def overlap(self, text: str) -> int:
        """The length of the longest suffix of `text` that begins a stop string."""
        for length in range(min(self._longest_start, len(text)), 0, -1):
            if text[-length:] in self._starts:
                return length
        return 0


class _Stream(Protocol):
    """Tokens in, text out that later tokens cannot change."""

    def append(self, token_id: int) -> str: ...

    def unsure(self) -> str:
        """What would follow if no more tokens came, as far as a stop string can be in it."""

    def finish(self) -> str: ...


class _ByteStream:
    """Byte-level BPE: the text is the UTF-8 of the joined bytes, so decoding the bytes as they come is exact."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._bytes = tokenizer.token_bytes
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_id: int) -> str:
        return "" if token_id in self._hidden else self._decoder.decode(self._bytes(token_id))

    def unsure(self) -> str:
        return ""

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class _DecoderStream:
    """Any other decoder: each token has a text of its own, whatever stands around it, with two exceptions.

    At the very start a leading space is stripped; so tokens are decoded after one that came before, whose own text is
    cut off again. And a run of byte tokens (byte fallback) is one unit: a single byte that is not UTF-8 turns all of
    the run into U+FFFD, so nothing of a run is sure until it ends.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._byte_ids = tokenizer.byte_ids
        self._run: list[int] = []
        self._before: list[int] = []
        self._before_length = 0
        if (last := next((id for id in reversed(prompt_ids) if self._has_text_alone(id)), None)) is not None:
            self._follow(last)

    def append(self, token_id: int) -> str:
        if token_id in self._hidden or token_id not in self._tokenizer:
            return ""
        self._run.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self.unsure()
        self._run.clear()
        if not self._before:
            self._follow(token_id)
        return text

    def unsure(self) -> str:
        if not self._run:
            return ""
        return self._decode(self._before + self._run)[self._before_length :]

    def finish(self) -> str:
        return self.unsure()

    def _has_text_alone(self, id: int) -> bool:
        return id not in self._hidden and id not in self._byte_ids and id in self._tokenizer

    def _follow(self, id: int) -> None:
        self._before = [id]
        self._before_length = len(self._decode(self._before))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
