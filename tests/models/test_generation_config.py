"""generation_config.json: what becomes a sampling default, and that wrong values are named."""

import json
from typing import Any

import pytest
from transformers import GenerationConfig

from strata.models.generation_config import GenerationDefaults, read_generation_config
from strata.models.generation_fields import HONOURED, LENGTHS, REFUSED, REFUSED_IN_SAMPLING, WITHOUT_EFFECT


def write(folder, values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_folder_without_the_file_has_no_defaults(tmp_path):
    assert read_generation_config(tmp_path) == GenerationDefaults(where=str(tmp_path / "config.json"))
    assert read_generation_config(tmp_path).sampling == {}


def test_file_that_transformers_wrote_is_read_back(tmp_path):
    written = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.05,
        max_new_tokens=99,
        eos_token_id=[7, 9],
        pad_token_id=0,
    )
    written.save_pretrained(tmp_path)
    read = read_generation_config(tmp_path)
    assert read.eos_ids == (7, 9)
    assert read.sampling == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_tokens": 99,
    }


def test_not_sampling_is_temperature_zero_whatever_else_is_there(tmp_path):
    read = read_generation_config(write(tmp_path, {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 5}))
    assert read.sampling == {"temperature": 0.0}


def test_file_silent_on_sampling_leaves_it_to_the_engine(tmp_path):
    read = read_generation_config(write(tmp_path, {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2}))
    assert read.sampling == {}
    assert read.eos_ids == (2,)


WRONG: dict[str, list[Any]] = {
    "temperature": ["0.6", -1],
    "top_p": [1.5, 0],
    "top_k": [2.5, -2],
    "min_p": [2],
    "repetition_penalty": [0],
    "do_sample": ["yes"],
    "max_new_tokens": [0],
    "min_new_tokens": [-1],
    "presence_penalty": [2.5],
    "frequency_penalty": ["1"],
    "stop_strings": [["a", ""]],
    "bad_words_ids": [[3], [[]]],
    "suppress_tokens": [3, [True]],
    "eos_token_id": ["</s>", [1, None]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_value_is_named_with_its_file(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{name}"):
        read_generation_config(write(tmp_path, {name: value}))


def test_corrupt_file_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": ')
    with pytest.raises(ValueError, match=r"generation_config\.json, line 1, column 17: not JSON"):
        read_generation_config(tmp_path)


def test_what_forbids_ids_and_ends_outputs_is_read(tmp_path):
    written = GenerationConfig(
        min_new_tokens=3, bad_words_ids=[[4], [5, 6]], suppress_tokens=[7, 8], stop_strings=["\n\n", "END"]
    )
    written.save_pretrained(tmp_path)
    read = read_generation_config(tmp_path)
    assert read.bad_words == ((4,), (5, 6), (7,), (8,))
    assert read.sampling == {"min_tokens": 3, "stop": ("\n\n", "END")}
    assert read.unused == ()


def test_penalties_that_only_vllm_knows_are_read(tmp_path):
    read = read_generation_config(write(tmp_path, {"presence_penalty": 1.5, "frequency_penalty": -0.5}))
    assert read.sampling == {"presence_penalty": 1.5, "frequency_penalty": -0.5}


# fmt: off
CHANGES_OUTPUT = {
    "begin_suppress_tokens": [3], "constraints": [1], "diversity_penalty": 0.5, "dola_layers": "high",
    "encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2, "epsilon_cutoff": 3e-4, "eta_cutoff": 1e-3,
    "exponential_decay_length_penalty": [5, 1.1], "force_words_ids": [[3]], "forced_bos_token_id": 3,
    "forced_eos_token_id": 3, "guidance_scale": 1.5, "max_time": 2.0, "min_length": 9, "no_repeat_ngram_size": 3,
    "num_beam_groups": 2, "num_beams": 4, "num_return_sequences": 2, "penalty_alpha": 0.6, "sequence_bias": [[[3],
    -1.0]], "token_healing": True, "top_h": 0.4, "typical_p": 0.9, "watermarking_config": {"bias": 2.0},
}
# fmt: on


@pytest.mark.parametrize("name", CHANGES_OUTPUT)
def test_a_field_that_would_change_the_output_is_refused_with_a_remedy(tmp_path, name):
    with pytest.raises(ValueError, match=rf"generation_config\.json: {name} = .*remove the field"):
        read_generation_config(write(tmp_path, {name: CHANGES_OUTPUT[name]}))
    assert read_generation_config(write(tmp_path, {name: None})).sampling == {}


@pytest.mark.parametrize(
    "values",
    [
        {"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0, "length_penalty": 2.0, "early_stopping": True},
        {"no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "min_length": 0, "guidance_scale": 1.0},
        {"typical_p": 1.0, "epsilon_cutoff": 0.0, "begin_suppress_tokens": [], "num_return_sequences": 1},
        {
            "pad_token_id": 0,
            "bos_token_id": 1,
            "use_cache": True,
            "transformers_version": "4.1",
            "renormalize_logits": True,
        },
    ],
)
def test_fields_that_ask_for_nothing_are_taken(tmp_path, values):
    read = read_generation_config(write(tmp_path, values))
    assert (read.sampling, read.bad_words, read.unused) == ({}, (), ())


def test_ways_of_sampling_do_not_matter_where_nothing_is_sampled(tmp_path):
    read = read_generation_config(write(tmp_path, {"do_sample": False, "typical_p": 0.9, "eta_cutoff": 0.1}))
    assert read.sampling == {"temperature": 0.0}


def test_what_is_not_used_is_told(tmp_path):
    read = read_generation_config(write(tmp_path, {"max_length": 4096, "chat_format": "chatml", "top_k": 3}))
    assert len(read.unused) == 2
    assert "max_length is not used" in read.unused[0]
    assert "chat_format is unknown and not used" in read.unused[1]


def test_every_field_of_transformers_has_its_place():
    places = [HONOURED, REFUSED.keys(), REFUSED_IN_SAMPLING.keys(), LENGTHS, WITHOUT_EFFECT]
    for name in vars(GenerationConfig()):
        assert sum(name in place for place in places) == 1, name
    assert CHANGES_OUTPUT.keys() == REFUSED.keys() | REFUSED_IN_SAMPLING.keys()


def test_generation_fields_of_an_old_config_are_those_of_the_model(tmp_path):
    """transformers reads them where there is no generation_config.json, and only there."""
    old = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "suppress_tokens": [3], "repetition_penalty": 1.7}
    (tmp_path / "config.json").write_text(json.dumps(old))
    read = read_generation_config(tmp_path)
    assert (read.sampling, read.bad_words, read.eos_ids) == ({"repetition_penalty": 1.7}, ((3,),), None)
    (tmp_path / "config.json").write_text(json.dumps(old | {"no_repeat_ngram_size": 2}))
    with pytest.raises(ValueError, match=r"/config\.json: no_repeat_ngram_size = 2"):
        read_generation_config(tmp_path)
    assert read_generation_config(write(tmp_path, {"top_k": 5})).sampling == {"top_k": 5}
