"""Completions as bytes: chunks of a stream, one for every token of every client, and choices with long lists.

What a chunk holds is in `schema.completions.Completion`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from strata.serve.api.completion_choice import ChoiceDelta, merged
from strata.serve.api.ledger_reply import last_chunk
from strata.serve.schema.ledger import RequestLedgerReply
from strata.serve.schema.reply import ReplyHead, Usage

_encode = msgspec.json.encode


class CompletionStream:
    """Writes the events of one answer.

    usage: gives what has been used so far, for every chunk (continuous_usage_stats); None shows no usage in them.
    with_usage: there will be a last chunk of usage, so the others say null.
    with_ids: report token ids.
    """

    def __init__(self, head: ReplyHead, *, with_usage: bool, usage: Callable[[], Usage] | None, with_ids: bool) -> None:
        self._start = b"data: " + _encode(head.fields("text_completion"))[:-1]
        self._end = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._usage = usage
        self._with_ids = with_ids
        self._held: dict[int, list[ChoiceDelta]] = {}

    def chunk(self, index: int, delta: ChoiceDelta, prompt_ids: list[int] | None = None) -> bytes:
        """The chunk that shows a delta of a choice; empty while there is no text to show.

        prompt_ids: reported with the choice's first delta.
        """
        held = self._held.setdefault(index, [])
        held.append(delta)
        if not delta.text and delta.finish_reason is None and prompt_ids is None:
            return b""
        del self._held[index]
        choice = written_choice(index, merged(held), with_ids=self._with_ids, prompt_ids=prompt_ids)
        end = self._end if self._usage is None else _with_usage(self._usage())
        return b"".join((self._start, b',"choices":[', choice, b"]", end))

    def last(self, usage: Usage | None, ledger: RequestLedgerReply | None) -> bytes:
        """The last chunk of a stream with usage, a ledger or both; empty without."""
        return last_chunk(self._start, usage, ledger)


def written_completion(
    head: ReplyHead, choices: list[bytes], usage: Usage, ledger: RequestLedgerReply | None = None
) -> bytes:
    """A whole `Completion` as JSON, of choices that are."""
    start = _encode(head.fields("text_completion"))[:-1]
    told = b"" if ledger is None else b',"ledger":' + ledger.model_dump_json().encode()
    usage_json = usage.model_dump_json().encode()
    return b"".join((start, b',"choices":[', b",".join(choices), b'],"usage":', usage_json, told, b"}"))


def written_choice(index: int, delta: ChoiceDelta, *, with_ids: bool, prompt_ids: list[int] | None) -> bytes:
    """A `CompletionChoice` as JSON. with_ids: report the token ids. prompt_ids: reported unless None."""
    return b"".join(
        (
            b'{"index":%d,"text":' % index,
            _encode(delta.text),
            b',"logprobs":',
            b"null" if delta.logprobs is None else delta.logprobs.written(),
            b',"finish_reason":',
            b"null" if delta.finish_reason is None else _last(delta),
            b"" if not with_ids else b',"token_ids":' + _encode(delta.token_ids),
            b"" if prompt_ids is None else b',"prompt_token_ids":' + _encode(prompt_ids),
            b"}",
        )
    )


def _last(delta: ChoiceDelta) -> bytes:
    return _encode(delta.finish_reason) + b',"stop_reason":' + _encode(delta.stop_reason)


def _with_usage(usage: Usage) -> bytes:
    return b',"usage":' + usage.model_dump_json().encode() + b"}\n\n"
