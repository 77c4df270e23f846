"""Strata: pretrains, post-trains and serves large language models, and says how far each part is from its floor.

    from strata import LLM, SamplingParams

Names are resolved when first used, so that `import strata` costs nothing and the helpers that run in their own process
(chat templates) do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.engine.grammars.structured_outputs import StructuredOutputsParams
    from strata.engine.llm import LLM
    from strata.engine.outputs import CompletionOutput, RequestOutput
    from strata.engine.sampling_params import SamplingParams
    from strata.models.save import save

__version__ = "0.1.0"

_MODULES = {
    "LLM": "strata.engine.llm",
    "SamplingParams": "strata.engine.sampling_params",
    "StructuredOutputsParams": "strata.engine.grammars.structured_outputs",
    "RequestOutput": "strata.engine.outputs",
    "CompletionOutput": "strata.engine.outputs",
    "save": "strata.models.save",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'strata' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
