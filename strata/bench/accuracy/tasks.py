"""The exercises of the built-in model, asked of a model that an engine serves."""

from __future__ import annotations

from collections.abc import Sequence

from strata.engine.llm import LLM
from strata.engine.sampling_params import SamplingParams
from strata.train.data.encode import Encoder
from strata.train.score import makes
from strata.train.tasks.example import Example


def replies(llm: LLM, encoder: Encoder, examples: Sequence[Example], max_tokens: int) -> list[str]:
    """What the model says to each example, greedily decoded. Where an example wants a call, the reply to its result
    counts, and nothing is said unless the call was made."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def said(prompts: list[list[int]]) -> list[str]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [output.outputs[0].text for output in outputs]

    first = said([encoder.prompt(example) for example in examples])
    called = [i for i, one in enumerate(examples) if one.call is not None and makes(first[i], one.call)]
    after = dict(zip(called, said([encoder.prompt_after_call(examples[i]) for i in called]), strict=True))
    return [first[i] if one.call is None else after.get(i, "") for i, one in enumerate(examples)]
