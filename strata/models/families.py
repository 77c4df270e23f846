"""From a config to the model of its family."""

from __future__ import annotations

from strata.models.config import ModelConfig
from strata.models.family.deepseek import DeepseekV2, DeepseekV3
from strata.models.family.gemma3 import Gemma3
from strata.models.family.glm4_moe import Glm4Moe
from strata.models.family.gpt_oss import GptOss
from strata.models.family.granite_hybrid import GraniteHybrid
from strata.models.family.mamba2 import Mamba2
from strata.models.family.mixtral import Mixtral
from strata.models.family.olmo2 import Olmo2
from strata.models.family.phi3 import Phi3
from strata.models.family.qwen2 import Qwen2
from strata.models.family.qwen3 import Qwen3
from strata.models.family.qwen3_moe import Qwen3MoE
from strata.models.family.qwen3_next import Qwen3Next
from strata.models.layers import CausalLM

FAMILIES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": CausalLM,
    "MistralForCausalLM": CausalLM,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "MixtralForCausalLM": Mixtral,
    "Qwen3MoeForCausalLM": Qwen3MoE,
    "SmolLM3ForCausalLM": CausalLM,
    "Olmo2ForCausalLM": Olmo2,
    "Phi3ForCausalLM": Phi3,
    "Olmo3ForCausalLM": Olmo2,
    "Gemma3ForCausalLM": Gemma3,
    "Glm4MoeForCausalLM": Glm4Moe,
    "Mamba2ForCausalLM": Mamba2,
    "DeepseekV2ForCausalLM": DeepseekV2,
    "DeepseekV3ForCausalLM": DeepseekV3,
    "GraniteMoeHybridForCausalLM": GraniteHybrid,
    "GptOssForCausalLM": GptOss,
    "Qwen3NextForCausalLM": Qwen3Next,
}


def build(config: ModelConfig, max_length: int | None = None) -> CausalLM:
    """The model, on the current default device and dtype, its parameters uninitialized.

    max_length: the longest sequence that this instance will see, which sizes the rotary table and, for dynamic rope,
    sets its base; by default the longest that the checkpoint is made for.

    Fill the parameters with `strata.models.initialize`, or build on the meta device and let
    `strata.models.weights.load` do both.
    """
    return FAMILIES[config.architecture](config, config.longest if max_length is None else max_length)
