"""Fields of config.json that Strata takes because they say what is done anyway, and those without effect on logits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from strata.files.fields import Fields
from strata.models import generation_fields


class Fixed(NamedTuple):
    """value: the one that says what is done; null says nothing. Any other is refused. meaning: what is done, for the
    message."""

    value: Any
    meaning: str


_NO_BIAS = "products have no bias but those that the family's fields tell"
# Of all families; a family's own (`FamilyConfig.fixed`) stand before them. A field that the family reads itself is
# taken before these are looked at.
COMMON: Mapping[str, Fixed] = MappingProxyType(
    {
        "add_cross_attention": Fixed(False, "these families are decoders"),
        "attention_bias": Fixed(False, "this family's biases are fixed"),
        "attn_logit_softcapping": Fixed(None, "attention scores have no bound"),
        "bias": Fixed(False, _NO_BIAS),
        "cross_attention_hidden_size": Fixed(None, "these families are decoders"),
        "final_logit_softcapping": Fixed(None, "logits have no bound"),
        "full_attn_mod": Fixed(1, "all layers attend alike"),
        "interpolate_factor": Fixed(1, "positions are whole numbers"),
        "is_causal": Fixed(True, "a token sees itself and what is before it"),
        "is_encoder_decoder": Fixed(False, "these families are decoders"),
        "lm_head_bias": Fixed(False, "the head has no bias"),
        "mlp_bias": Fixed(False, "this family's biases are fixed"),
        "per_layer_config": Fixed(None, "all layers have one shape"),
        "pruned_heads": Fixed({}, "all heads are there"),
        "qkv_bias": Fixed(False, _NO_BIAS),
        "rope_interleaved": Fixed(False, "the first half of a head turns with the second"),
        "shared_expert_intermediate_size": Fixed(0, "no expert is for every token"),
        "tie_encoder_decoder": Fixed(False, "these families are decoders"),
        "use_bidirectional_attention": Fixed(False, "a token sees itself and what is before it"),
        "use_mrope": Fixed(False, "positions have one dimension"),
        "use_qk_norm": Fixed(False, "this family normalizes neither queries nor keys"),
        "use_sliding_window": Fixed(False, "this family attends to the whole sequence"),
    }
)
# Of families in which queries and keys are normalized whatever the config says.
HEAD_NORMS: Mapping[str, Fixed] = MappingProxyType(
    {"use_qk_norm": Fixed(True, "this family normalizes queries and keys")}
)

# Of how a model was made, trained or written down, of the program that runs it, of its tokenizer, or of another head
# than that of a language model. Generation parameters in config.json are for `read_generation_config`.
_BOOKKEEPING = """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path
    attention_dropout attn_implementation attn_pdrop bos_token chunk_size_feed_forward classifier_dropout
    context_window_size embd_pdrop eos_token finetuning_task gradient_checkpointing hidden_dropout id2label
    initializer_range is_decoder is_llama_config label2id max_sequence_length model_max_length name_or_path
    neftune_noise_alpha num_labels output_attentions output_hidden_states pad_token prefix pretraining_tp problem_type
    resid_pdrop return_dict sep_token_id seq_length task_specific_params tf_legacy_loss tie_last_hidden_states
    tokenizer_class torchscript transformers.js_config transformers_version unk_token unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache
"""
WITHOUT_EFFECT = frozenset(_BOOKKEEPING.split()) | generation_fields.IN_CONFIG | generation_fields.WITHOUT_EFFECT


def take_fixed(fields: Fields, architecture: str, own: Mapping[str, Fixed]) -> None:
    """Take the fields that say what is done anyway. own: those of the family. Raises ValueError for another value."""
    for key, (value, meaning) in {**COMMON, **own}.items():
        fields.only(key, value, meaning)
    _take_code(fields, architecture)


def _take_code(fields: Fields, architecture: str) -> None:
    """`auto_map` names the code of a checkpoint, which never runs: its classes must be those of the architecture,
    whose mathematics Strata has. Classes of configs and tokenizers have none."""
    classes = fields.take("auto_map", None)
    if classes is None:
        return
    family = architecture.removesuffix("ForCausalLM")
    known = isinstance(classes, dict) and all(
        isinstance(name, str) and name.rpartition(".")[2].startswith(family)
        for kind, name in classes.items()
        if kind.startswith("AutoModel")
    )
    if not known:
        accepted = f"an object whose AutoModel classes are called {family}..., as code of a checkpoint never runs"
        raise fields.wrong("auto_map", classes, accepted)
