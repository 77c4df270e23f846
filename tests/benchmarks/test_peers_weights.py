"""Folders with the same weights for both engines: transformers and Strata read them and compute the same."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.peers import engines as setup
from benchmarks.peers import offline, offline_in_turns, serve_in_turns, weights
from benchmarks.peers.table import row_name
from strata import LLM, SamplingParams
from strata.models.shapes import SHAPES
from tests.benchmarks.conftest import MakeEngines
from tests.benchmarks.test_peers_offline import CapturingEngine
from tests.models.checkpoints import FAMILY_CONFIGS

_FEW = {"vocab_size": 803, "hidden_size": 96, "num_hidden_layers": 3, "max_position_embeddings": 256, "eos_token_id": 1}
_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "num_experts_per_tok": 3, "bos_token_id": 0}
_MIXTURE = _FEW | _HEADS | {"intermediate_size": 72, "moe_intermediate_size": 40}
_LATENTS = {"kv_lora_rank": 24, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20}
TINY = {
    "V2-Lite": SHAPES["V2-Lite"] | _MIXTURE | _LATENTS | {"n_routed_experts": 7},
    "30B-A3B": SHAPES["30B-A3B"] | _MIXTURE | {"num_experts": 9, "num_key_value_heads": 1, "head_dim": 32},
    # Routers with biases of their own in float32, and experts that lie in one tensor.
    "glm4-moe": dict(FAMILY_CONFIGS)["glm4-moe-groups"],
    "gpt-oss-20b": dict(FAMILY_CONFIGS)["gpt-oss-yarn"],
}
Folders = Callable[[str], Path]
MIXTURES = ("V2-Lite", "30B-A3B")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a tiny shape, written once. Do not write to it."""
    made: dict[str, Path] = {}

    def folder(shape: str) -> Path:
        if shape not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(SHAPES, shape, TINY[shape])
                made[shape] = tmp_path_factory.mktemp("weights") / shape
                weights.write(made[shape], shape, torch.device("cpu"))
        return made[shape]

    return folder


@pytest.fixture(autouse=True)
def _tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, config in TINY.items():
        monkeypatch.setitem(SHAPES, shape, config)


def opened(folder: Path) -> PreTrainedModel:
    """As transformers loads it, in float32, which it says is all that there is and no more."""
    model, about = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(about[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", TINY)
@torch.no_grad()
def test_transformers_and_strata_compute_the_same(shape: str, folders: Folders) -> None:
    folder = folders(shape)
    theirs = opened(folder)
    llm = LLM(folder, device="cpu", dtype="float32", num_pages=40, max_num_batched_tokens=16, skip_tokenizer_init=True)
    prompts = [torch.randint(theirs.config.vocab_size, (length,)).tolist() for length in (21, 5)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        logits: Tensor = theirs(torch.tensor([prompt + answer.token_ids])).logits[0][len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids
        assert answer.logprobs is not None
        ours = [of[id].logprob for of, id in zip(answer.logprobs, answer.token_ids, strict=True)]
        torch.testing.assert_close(torch.tensor(ours), logits.log_softmax(-1).amax(-1), atol=2e-4, rtol=0)


@pytest.mark.parametrize("shape", MIXTURES)
def test_a_folder_is_as_published_ones_are(shape: str, folders: Folders) -> None:
    folder = folders(shape)
    assert json.loads((folder / "config.json").read_text()) == TINY[shape]
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == TINY[shape]["vocab_size"]
    tensors = load_file(folder / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    experts = TINY[shape].get("num_experts") or TINY[shape]["n_routed_experts"]
    for number in range(experts):
        assert tensors[f"model.layers.1.mlp.experts.{number}.gate_proj.weight"].shape == (40, 96)
        assert tensors[f"model.layers.1.mlp.experts.{number}.down_proj.weight"].shape == (96, 40)
    assert f"model.layers.1.mlp.experts.{experts}.gate_proj.weight" not in tensors
    for name, value in tensors.items():
        if "norm" in name:
            assert (value == 1).all(), name
        else:
            assert 0.015 < value.float().std().item() < 0.025, name
            assert abs(value.float().mean().item()) < 0.005, name


def test_matrices_differ_and_a_seed_says_which(folders: Folders, tmp_path: Path) -> None:
    first = load_file(folders("30B-A3B") / "model.safetensors")
    weights.write(tmp_path / "again", "30B-A3B", torch.device("cpu"))
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in first.items())
    matrices = [value for value in first.values() if value.dim() == 2]
    assert len({tuple(matrix.flatten()[:8].tolist()) for matrix in matrices}) == len(matrices)


def test_biases_of_routers_are_zeros_in_float32(folders: Folders) -> None:
    tensors = load_file(folders("glm4-moe") / "model.safetensors")
    biases = [value for name, value in tensors.items() if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(value.dtype == torch.float32 and not value.any() for value in biases)


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(weights, "end_on_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["weights.py", *options])
    weights.main()


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    run(monkeypatch, "--model", "V2-Lite", "--out", str(folder))  # an empty one is filled
    before = (folder / "model.safetensors").read_bytes()
    for taken in (folder, folder / "config.json"):
        with pytest.raises(SystemExit, match=re.escape(f"{taken} is there and not an empty folder; give a new")):
            run(monkeypatch, "--model", "30B-A3B", "--out", str(taken))
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_disk_without_room_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the shape as it is
    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return shutil._ntuple_diskusage(100 * 2**30, 99 * 2**30, 2**30)  # type: ignore[attr-defined]

    monkeypatch.setattr(weights.shutil, "disk_usage", usage)
    folder = tmp_path / "new" / "model"
    # DeepSeek-V2-Lite has 15.7 billion parameters.
    with pytest.raises(SystemExit, match=r"V2-Lite takes 29\.3 GiB and its disk has 1\.0 left; give a folder else"):
        run(monkeypatch, "--model", "V2-Lite", "--out", str(folder))
    assert asked == [tmp_path]
    assert not folder.parent.exists()


def test_an_engine_loads_the_folder(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, folder = CapturingEngine(), folders("V2-Lite")
    list(offline.results(engine, "V2-Lite", [], repeat=1, more={}, weights=folder))
    assert (engine.options["model"], engine.options["load_format"]) == (str(folder), "auto")


def test_stratas_own_llm_runs_a_test_on_it(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = offline.workloads.InferenceTest("T2", ((1, 2, 3),), (4,), unit="ms")
    monkeypatch.setattr(offline.workloads, "single", lambda: few)
    monkeypatch.setattr(offline.workloads, "MAX_MODEL_LEN", 256)
    saved, folder = tmp_path / "results.jsonl", folders("30B-A3B")
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    options = ["--engine", "strata", "--model", "30B-A3B", "--tests", "T2", "--repeat", "1", "--save", str(saved)]
    monkeypatch.setattr(sys, "argv", ["offline.py", *options, "--weights", str(folder)])
    offline.main()
    (line,) = [json.loads(text) for text in saved.read_text().splitlines()]
    assert (line["weights"], line["model"]) == ("saved", "30B-A3B")
    assert row_name(line) == "T2 30B-A3B with saved weights bf16, ms"
    assert row_name(line | {"weights": "random"}) == "T2 30B-A3B bf16, ms"
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_both_get_the_folder_in_turns(
    engines: MakeEngines, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder, saved = engines(), folders("30B-A3B"), tmp_path / "results.jsonl"
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    monkeypatch.chdir(folder.parent)
    common = [*made.options, "--models", "30B-A3B", "--turns", "1", "--weights", folder.name, "--save", str(saved)]
    for script, own in ((offline_in_turns, ["--tests", "T2"]), (serve_in_turns, ["--loads", "single"])):
        monkeypatch.setattr(script, "end_on_signals", lambda: None)
        monkeypatch.setattr(sys, "argv", ["in_turns.py", *common, *own])
        script.main()
    turns = [call["options"] for call in made.calls() if call["module"] == "benchmarks.peers.offline"]
    assert [options[options.index("--weights") + 1] for options in turns] == [str(folder)] * 2
    for call in made.servers():
        assert call["options"][:2] == ["serve", str(folder)]
        assert call["options"][call["options"].index("--load-format") + 1] == "auto"
    served = [line for text in saved.read_text().splitlines() if (line := json.loads(text))["test"] == "T5"]
    assert [line["weights"] for line in served] == ["saved", "saved"]
    assert row_name(served[0] | {"model": "30B-A3B"}) == "30B-A3B with saved weights, one at a time"
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


@pytest.mark.parametrize("script", [offline, offline_in_turns, serve_in_turns])
def test_a_folder_of_something_else_is_refused(
    script: Any,
    engines: MakeEngines,
    folders: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made, folder = engines(), folders("V2-Lite")
    broken = tmp_path / "broken"
    setup.write_config(broken, "V2-Lite")
    (broken / "config.json").write_text("{")
    own = ["--engine", "strata", "--model", "0.6B"] if script is offline else [*made.options, "--models", "0.6B"]
    for given, message in (
        (folder, f"--weights {folder}: its config.json is not that of 0.6B; ask for the one model"),
        (tmp_path, f"argument --weights: {tmp_path} is no folder with a config.json"),
        (broken, f"--weights {broken}: its config.json cannot be read"),
    ):
        options = [*own, "--weights", str(given), "--save", str(tmp_path / "results.jsonl")]
        monkeypatch.setattr(sys, "argv", ["script.py", *options])
        with pytest.raises(SystemExit):
            script.main()
        assert message in capsys.readouterr().err
    assert made.calls() == []
