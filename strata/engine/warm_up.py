"""Work before the first request: what compiles or chooses kernels when it is first used does so while nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strata.engine.build import Engine
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.scheduler import Statistics

# Lengths of prompts that fill a step and more, of which the library's attention takes some and our own the others; and
# of prompts that sum up to no round number, for which kernels are compiled apart.
_PROMPTS = ((1024, 512, *(700,) * 10), (*(700,) * 7, 101))
# How many sequences decode beside a prompt that no recorded step holds: kernels have tiles for numbers of rows.
_DECODING = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHORT = 8
_OUTPUTS = 4


def warm_up(engine: Engine) -> None:
    """Run prompts as clients would send them; their pages are shared with nobody, and the statistics forget them.

    On a fresh machine it takes seconds, on one with compiled kernels on its disk tenths of one. A CPU has nothing to
    compile.
    """
    if engine.device.type == "cpu":
        return
    scheduler = engine.loop.scheduler
    config = scheduler.config
    scheduler.config = replace(config, times=None)  # long prompts beside decodes are divided otherwise
    for lengths in _PROMPTS:
        _add(engine, "long", lengths)
        _drain(engine)
    for count in _DECODING:
        if count < config.max_sequences:
            _add(engine, "short", (_SHORT,) * count)
            engine.loop.step()
            engine.loop.step()
            _add(engine, "beside", _lengths(engine, engine.max_recorded_tokens + 1))
            _drain(engine)
    scheduler.config = config
    scheduler.statistics = Statistics()


def _lengths(engine: Engine, total: int) -> list[int]:
    """Prompts that have so many tokens together, as long as the engine takes them."""
    longest = _longest(engine)
    return [*(longest,) * (total // longest), *(total % longest,) * (total % longest > 0)]


def _longest(engine: Engine) -> int:
    return min(engine.max_model_len, engine.pages.num_pages * engine.pages.page_size) - _OUTPUTS


def _add(engine: Engine, name: str, lengths: Sequence[int]) -> None:
    longest = _longest(engine)
    params = SamplingParams(max_tokens=_OUTPUTS, ignore_eos=True)
    for number, length in enumerate(lengths):
        prompt = tuple(id % engine.config.vocab_size for id in range(number, number + min(length, longest)))
        engine.loop.add(Request(f"warm-up: {name} {number}", prompt, params, salt="warm-up"))


def _drain(engine: Engine) -> None:
    for _ in engine.loop.outputs():
        pass
