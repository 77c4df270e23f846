"""One sample of a request as its ids come: the text that may be shown, and why it ended. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from strata.engine.sampling_params import SamplingParams
from strata.text.detokenize import IncrementalDetokenizer
from strata.text.tokenizer import Tokenizer


class Sample:
    """The text of one sample, up to a stop string. `detokenizer` None counts ids and gives no text.

    count: ids so far; what comes after a stop string is not counted.
    finish_reason: "stop", "length", "error" and so on; None while it runs.
    stop_reason: the stop string or stop id that ended it; None for an end-of-sequence id.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer | None) -> None:
        self._detokenizer = detokenizer
        self.count = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @classmethod
    def of(cls, params: SamplingParams, prompt: Sequence[int], tokenizer: Tokenizer | None) -> Sample:
        """A sample that writes on from `prompt` as `params` say; `tokenizer` None gives ids without text."""
        if tokenizer is None or not params.detokenize:
            return cls(None)
        return cls(
            IncrementalDetokenizer(
                tokenizer,
                prompt,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        )

    def append(self, tokens: Sequence[int], finish_reason: str | None, stop_reason: int | str | None) -> str:
        """Take its next ids and why it ended with the last of them, if it did; returns the text to be shown now.

        An id that ends it ("stop") is part of the text only if stop strings are. A stop string in the text ends it with
        the reason "stop", whatever came with it; ids that follow are dropped.
        """
        if self.finish_reason is not None:
            return ""
        detokenizer = self._detokenizer
        if detokenizer is None:
            self.count += len(tokens)
            self.finish_reason, self.stop_reason = finish_reason, stop_reason
            return ""
        hidden = finish_reason == "stop" and not detokenizer.include_stop
        text = ""
        for place, token in enumerate(tokens, 1):
            self.count += 1
            if hidden and place == len(tokens):
                break
            text += detokenizer.append(token)
            if detokenizer.stopped is not None:
                self.finish_reason, self.stop_reason = "stop", detokenizer.stopped
                return text
        if finish_reason is not None:
            text += detokenizer.finish()
            self.finish_reason, self.stop_reason = finish_reason, stop_reason
        return text

    def fail(self) -> str:
        """It ends because no further id could be drawn; returns the rest of its text."""
        return self.append((), "error", None)
