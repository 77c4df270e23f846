"""generation_config.json: what becomes a sampling default, and that wrong values are named."""

import json

import pytest
from transformers import GenerationConfig

from strata.models.generation_config import GenerationDefaults, read_generation_config


def write(folder, values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_folder_without_the_file_has_no_defaults(tmp_path):
    assert read_generation_config(tmp_path) == GenerationDefaults()
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.6"),
        ("temperature", -1),
        ("top_p", 1.5),
        ("top_p", 0),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("do_sample", "yes"),
        ("max_new_tokens", 0),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, None]),
    ],
)
def test_wrong_value_is_named_with_its_file(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{name}"):
        read_generation_config(write(tmp_path, {name: value}))


def test_corrupt_file_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": ')
    with pytest.raises(ValueError, match=r"generation_config\.json, line 1, column 17: not JSON"):
        read_generation_config(tmp_path)
