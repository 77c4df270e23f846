"""A sample shows the same text however its ids are cut into steps, and says why it ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata.engine.samples import Sample
from strata.engine.sampling_params import SamplingParams
from strata.text.tokenizer import Tokenizer

TEXT = "pack my box with five dozen jugs, größer 🙂"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def in_steps(sample: Sample, ids: list[int], size: int, reason: str, stop: int | None = None) -> str:
    """The text of a sample that gets `size` ids at a time and ends with the last for `reason`."""
    steps = [ids[first : first + size] for first in range(0, len(ids), size)]
    text = "".join(sample.append(step, None, None) for step in steps[:-1])
    return text + sample.append(steps[-1], reason, stop)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
class TestAnyStepSize:
    def test_all_text_is_shown(self, tokenizer: Tokenizer, size: int) -> None:
        sample = Sample.of(SamplingParams(), [], tokenizer)
        ids = tokenizer.encode(TEXT)
        assert in_steps(sample, ids, size, "length") == TEXT
        assert (sample.finish_reason, sample.stop_reason, sample.count) == ("length", None, len(ids))

    @pytest.mark.parametrize(("included", "end"), [(False, "pack my "), (True, "pack my box wi")])
    def test_a_stop_string_ends_it_for_good(self, tokenizer: Tokenizer, size: int, included: bool, end: str) -> None:
        params = SamplingParams(stop=["box wi"], include_stop_str_in_output=included)
        sample = Sample.of(params, [], tokenizer)
        ids = tokenizer.encode(TEXT)
        assert in_steps(sample, ids, size, "length") == end
        assert (sample.finish_reason, sample.stop_reason) == ("stop", "box wi")
        shorter = tokenizer.decode(ids[: sample.count - 1])
        assert "box wi" not in shorter
        assert "box wi" in tokenizer.decode(ids[: sample.count])

    @pytest.mark.parametrize("included", [False, True])
    def test_an_id_that_ends_it_is_shown_only_if_asked(self, tokenizer: Tokenizer, size: int, included: bool) -> None:
        ids = tokenizer.encode("five dozen")
        last = tokenizer.decode(ids[-1:])
        sample = Sample.of(SamplingParams(include_stop_str_in_output=included), [], tokenizer)
        shown = in_steps(sample, ids, size, "stop", ids[-1])
        assert shown == ("five dozen" if included else "five dozen".removesuffix(last))
        assert (sample.finish_reason, sample.stop_reason, sample.count) == ("stop", ids[-1], len(ids))


def test_what_was_held_back_is_shown_when_it_fails(tokenizer: Tokenizer) -> None:
    sample = Sample.of(SamplingParams(stop="five dozens"), [], tokenizer)
    shown = sample.append(tokenizer.encode("with five dozen"), None, None)
    assert shown == "with "
    assert shown + sample.fail() == "with five dozen"
    assert sample.finish_reason == "error"


def test_without_text_ids_are_counted(tokenizer: Tokenizer) -> None:
    for sample in (Sample.of(SamplingParams(detokenize=False), [], tokenizer), Sample.of(SamplingParams(), [], None)):
        assert sample.append([1, 2, 3], None, None) == ""
        assert sample.append([4], "stop", 4) == ""
        assert (sample.count, sample.finish_reason, sample.stop_reason) == (4, "stop", 4)


def test_a_process_without_a_gpu_can_use_it() -> None:
    """API processes detokenize: loading torch would cost them seconds and memory."""
    check = "import sys, strata.engine.samples, strata.engine.process.messages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
