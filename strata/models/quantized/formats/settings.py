"""What the quantization_config of a config.json may hold, beside single values."""

from __future__ import annotations

from typing import Any

from strata.files.fields import Fields
from strata.models.quantized.formats.stored import StoredTensors

# How weights were found or are to be run, not what they are. GPTQModel writes the fields of its algorithm (in 2025
# beside the others, later in `meta`), and transformers 5 those of GPTQ for AWQ, too. The tensors' names tell whether
# the head is packed.
_HOW_MADE = """
    act_group_aware backend batch_size block_name_to_quantize buffered_fwd cache_block_outputs damp_auto_increment
    damp_percent dataset disable_exllama exllama_config fail_safe failsafe fallback foem gc_mode gptaq gptaq_alpha
    gptaq_memory_device hessian hessian_chunk_size hyb_act lm_head max_input_length meta mock_quantization
    model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
    moe mse offload_to_disk offload_to_disk_path pack_impl pad_token_id parallel_packing static_groups tokenizer
    true_sequential use_cuda_fp16 use_exllama v2 v2_alpha v2_memory_device
"""
HOW_MADE = frozenset(_HOW_MADE.split())


def take_names(fields: Fields, *keys: str) -> tuple[str, ...]:
    """The strings of the lists at these keys, of which any may be absent or null."""
    found: list[str] = []
    for key in keys:
        value = fields.take(key, None)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise fields.wrong(key, value, "a list of strings or null")
        found += value
    return tuple(found)


def take_object(fields: Fields, key: str) -> dict[str, Any]:
    """The object at a key; absent or null, an empty one."""
    value = fields.take(key, None)
    if value is not None and not isinstance(value, dict):
        raise fields.wrong(key, value, "an object or null")
    return value or {}


def take_cache(fields: Fields, stored: StoredTensors, *keys: str) -> None:
    """What a config says of a cache of keys and values at any of these keys; then its scales are passed over.

    `kv_cache_dtype` alone says of how many bits pages are, and pages of fewer bits have scales of their own.
    """
    told = [fields.take(key, None) for key in keys]
    if any(one is not None for one in told):
        for last in ("k_scale", "v_scale"):
            for owner in stored.owners(last):
                stored.pass_over(f"{owner}.{last}")


def take_group(fields: Fields, *keys: str) -> int:
    """The columns that share a scale, of the first key that is there; 0 for all, which files write as -1."""
    key = next((key for key in keys if fields.has(key)), keys[0])
    value = fields.take(key)
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or value > 0):
        raise fields.wrong(key, value, "a positive integer, or -1 for one scale a row")
    return max(value, 0)
