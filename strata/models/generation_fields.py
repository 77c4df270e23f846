"""What each field of generation_config.json means here: every name that transformers knows stands in one list."""

from __future__ import annotations

from typing import Any

# Read into `GenerationDefaults`.
_HONOURED = """
    bad_words_ids do_sample eos_token_id frequency_penalty max_new_tokens min_new_tokens min_p presence_penalty
    repetition_penalty stop_strings suppress_tokens temperature top_k top_p
"""
HONOURED = frozenset(_HONOURED.split())

# Change which tokens come out, and nothing here does the same. Null and the values listed ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "sequence_bias": ([], {}),
    "token_healing": (False,),
    "watermarking_config": (),
}
# The same, but only where tokens are sampled.
REFUSED_IN_SAMPLING: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (1.0,),
    "typical_p": (1.0,),
}

# Told at the start: the length of a sequence is max_model_len here, that of an output max_tokens.
LENGTHS = frozenset({"max_length"})

# Leave the tokens alone: how they are computed, stored or returned; ids that only mark; what only beams heed.
_WITHOUT_EFFECT = """
    _commit_hash _from_model_config _original_object_hash assistant_confidence_threshold assistant_early_exit
    assistant_ensemble_weight assistant_lookbehind bos_token_id cache_config cache_implementation compile_config
    continuous_batching_config decoder_start_token_id disable_compile early_stopping is_assistant length_penalty
    low_memory max_cache_len max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule
    output_attentions output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size
    prompt_lookup_num_tokens remove_invalid_values renormalize_logits return_dict_in_generate speculation_type
    target_lookbehind transformers_version trust_remote_code use_cache use_mtp
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())

# Those that a config.json may hold, as transformers wrote it before there was a generation_config.json.
IN_CONFIG = (HONOURED | REFUSED.keys() | REFUSED_IN_SAMPLING.keys() | LENGTHS) - {"eos_token_id"}
