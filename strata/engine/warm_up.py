"""Work before the first request: what compiles or chooses kernels when it is first used does so while nobody waits."""

from __future__ import annotations

from strata.engine.build import Engine
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduler import Statistics

# Long and short prompts, some of which the library's attention takes and some the own one; together more than one step
# takes, so that one step has decodes beside prompts.
_PROMPTS = (1024, 512, 700, 700, 700, 700, 700, 700, 700, 700, 700, 700, 5)
_OUTPUTS = 3


def warm_up(engine: Engine) -> None:
    """Run prompts as clients would send them; their pages are shared with nobody, and the statistics forget them.

    On a fresh machine it takes seconds, on one with compiled kernels on its disk a few tenths. A CPU has nothing to
    compile.
    """
    if engine.device.type == "cpu":
        return
    params = SamplingParams(max_tokens=_OUTPUTS, ignore_eos=True)
    longest = min(engine.max_model_len, engine.pages.num_pages * engine.pages.page_size) - _OUTPUTS
    for number, length in enumerate(_PROMPTS):
        ids = range(number, number + min(length, longest))
        prompt = tuple(id % engine.config.vocab_size for id in ids)
        engine.loop.add(Request(f"warm-up {number}", prompt, params, salt="warm-up"))
    for _ in engine.loop.outputs():
        pass
    engine.loop.scheduler.statistics = Statistics()
