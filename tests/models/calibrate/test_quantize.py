"""Checkpoints with fewer bits: what is in them, that interruptions change nothing, and what is refused before work."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from strata import LLM, SamplingParams
from strata.kernels.quant.quantized import dense
from strata.kernels.quant.schemes import SCHEMES
from strata.models.checkpoint import read_checkpoint
from strata.models.generation_config import read_generation_config
from strata.models.quantized.calibrate import rewrite
from strata.models.quantized.calibrate.quantize import quantize
from strata.models.quantized.calibrate.settings import METHODS, Rounding
from strata.models.quantized.formats.read import read_format
from strata.models.weights import WeightStore

from ..batches import packed as batch_of
from ..batches import random_sequences
from ..conftest import Checkpoint
from .models import LLAMA, stored, unpacked, write_llama

CPU = torch.device("cpu")
TEXT = random_sequences(LLAMA["vocab_size"], [40, 33, 50])
# How far a value may lie from what it stands for, in steps of its scale (of floats: as a share).
HALF_STEP = {"int4": 0.5, "int8": 0.5, "int8_weights": 0.5, "fp8": 2**-4, "fp8_block": 2**-4, "fp8_weights": 2**-4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


def rounding(scheme: str, method: str | None = None, skip: tuple[str, ...] = ()) -> Rounding:
    return Rounding.of(scheme, method, 32 if scheme == "int4" else None, skip)


def write(model: Path, out: Path, scheme: str, method: str | None = None, skip: tuple[str, ...] = ()) -> Path:
    quantize(model, out, rounding(scheme, method, skip), [] if method == "rtn" else TEXT, CPU)
    return out


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of whole blocks across, and of rows that are none."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    return write_llama(tmp_path_factory.mktemp("models") / "wide", **sizes)


def products_of(folder: Path) -> dict[str, Tensor]:
    return {name: one.float() for name, one in stored(folder).items() if "proj" in name and name.endswith(".weight")}


@pytest.mark.parametrize("scheme", METHODS)
def test_products_are_within_the_rounding_of_their_scheme_and_others_as_they_were(
    scheme: str, model: Path, wide: Path, tmp_path: Path
) -> None:
    source = wide if scheme == "fp8_block" else model
    out = write(source, tmp_path / "out", scheme, "rtn")
    tensors, before = stored(out), stored(source)
    config = json.loads((out / "config.json").read_text())
    own = read_format(config, read_checkpoint(out, packed=True), out)
    assert own is not None
    assert own.matrices == products_of(source).keys()
    for name, weight in products_of(source).items():
        found = unpacked(tensors, name)
        rows, columns = weight.shape
        read = own.read(name, (0, rows), (0, columns))
        assert read.scheme == rounding(scheme).packing
        assert torch.equal(dense(read), found)
        scale = tensors[name.removesuffix(".weight") + ".weight_scale"]
        assert scale.dtype == torch.bfloat16
        if scheme.startswith("fp8"):
            bound = weight.abs() * HALF_STEP[scheme] + scale.float().max() * 2**-10
        else:
            # Rounding, or what was cut off: scales go down to 0.6 of that of the largest.
            bound = torch.maximum(torch.tensor(HALF_STEP[scheme]) * scale.float().max(), 0.45 * weight.abs())
        assert ((found - weight).abs() <= bound).all(), name
    others = before.keys() - products_of(source).keys()
    assert all(torch.equal(tensors[name], before[name]) for name in others)
    assert {key: value for key, value in config.items() if key != "quantization_config"} == json.loads(
        (source / "config.json").read_text()
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in tensors.values())
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("scheme", METHODS)
def test_the_library_reads_the_same(scheme: str, model: Path, wide: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    source = wide if scheme == "fp8_block" else model
    out = write(source, tmp_path / "out", scheme, skip=("*.o_proj",))
    tensors = stored(out)
    config = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    assert [one for one in config.ignore if "layers.0" in one] == ["model.layers.0.self_attn.o_proj"]
    (group,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    for name in products_of(source):
        if "o_proj" in name:
            continue
        base = name.removesuffix("weight")
        own = {key.removeprefix(base): one for key, one in tensors.items() if key.startswith(base)}
        found = compressor.decompress(own, group)["weight"]
        torch.testing.assert_close(found.float(), unpacked(tensors, name).to(found.dtype).float())


def test_calibration_brings_outputs_nearer(model: Path, tmp_path: Path) -> None:
    """What products make of the activations they see; of methods that move no scales between tensors."""
    plain, searched = (stored(write(model, tmp_path / method, "int4", method)) for method in ("rtn", "gptq"))
    weights = products_of(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    x = torch.nn.functional.normalize(
        stored(model)["model.embed_tokens.weight"].float()[[token for sequence in TEXT for token in sequence]], dim=-1
    )
    errors = [((unpacked(one, name) - weights[name]) @ x.t()).norm() for one in (plain, searched)]
    assert errors[1] < 0.9 * errors[0]


def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    whole = write(model, tmp_path / "whole", "int4", "gptq")
    out = tmp_path / "out"
    code = (
        "import os, signal, sys, torch, json; from pathlib import Path\n"
        "from strata.models.quantized.calibrate.quantize import quantize\n"
        "from strata.models.quantized.calibrate.settings import Rounding\n"
        "def report(done, of):\n    if done == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "model, out, text = sys.argv[1:]\n"
        "rounding = Rounding.of('int4', 'gptq', 32, ())\n"
        "quantize(Path(model), Path(out), rounding, json.loads(text), torch.device('cpu'), report)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(model), str(out), json.dumps(TEXT)], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(ValueError, match="with other method"):
        write(model, out, "int4", "awq")
    (tmp_path / ".out.unfinished" / "model-00003-of-00006.begun").write_bytes(b"half")
    seen: list[int] = []
    quantize(model, out, rounding("int4", "gptq"), TEXT, CPU, lambda done, of: seen.append(done))
    assert seen == [2, 3, 4, 5, 6]
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in out.iterdir())
    assert all((whole / name).read_bytes() == (out / name).read_bytes() for name in names)


def test_what_an_interrupted_run_has_lost_is_told(model: Path, tmp_path: Path) -> None:
    out, unfinished = tmp_path / "out", tmp_path / ".out.unfinished"
    with pytest.raises(KeyboardInterrupt):
        quantize(model, out, rounding("int4"), TEXT, CPU, _stop_after_the_first)
    config = model / "config.json"
    values = config.read_text()
    config.write_text(json.dumps(json.loads(values) | {"rope_theta": 7000.0}))
    with pytest.raises(ValueError, match="with other config;"):
        quantize(model, out, rounding("int4"), TEXT, CPU)
    config.write_text(values)
    (hidden,) = unfinished.glob("hidden-*")
    hidden.write_bytes(hidden.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{hidden.name}, of an interrupted run, .*: remove .*unfinished and run"):
        quantize(model, out, rounding("int4"), TEXT, CPU)
    hidden.unlink()
    with pytest.raises(ValueError, match=rf"{hidden.name}, of an interrupted run"):
        quantize(model, out, rounding("int4"), TEXT, CPU)


def test_experts_in_one_tensor_stay_in_floats_and_the_folder_is_read_again(
    open_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """Of gpt-oss, whose own checkpoints are packed by another method."""
    source = open_checkpoint("gpt-oss-no-windows")
    quantize(source.folder, tmp_path / "out", rounding("int8_weights"), [], CPU)
    names = [name for name, _ in source.model.named_parameters() if ".self_attn." in name and "_proj.weight" in name]
    scheme = rounding("int8_weights").packing
    store = WeightStore.load(tmp_path / "out", dict.fromkeys(names, scheme), dtype="float32")
    made, found = store.model, store.quantized
    for name, parameter in source.model.named_parameters():
        if name in names:
            assert (dense(found[name]) - parameter).abs().max() < 0.01
        else:
            assert torch.equal(made.get_parameter(name), parameter)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("int3", None, None, ()), "accepted are 'fp8'"),
        (("int4", "smoothquant", None, ()), "accepted are 'gptq', 'awq', 'rtn'"),
        (("fp8", None, 64, ()), "no groups"),
        (("int4", None, 7, ()), "even number"),
        (("int4", "rtn", 128, ()), "do not divide 64, 96, the widths of"),
        (("fp8_block", None, None, ()), "--skip"),
        (("int8", "rtn", None, ("*.foo",)), "'*.foo' fits no product"),
        (("int8", "rtn", None, ("*",)), "no product is left"),
        (("int8", "smoothquant", None, ()), "needs calibration text"),
    ],
)
def test_what_cannot_be_done_is_refused_before_work(
    asked: tuple[str, str | None, int | None, tuple[str, ...]], said: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        quantize(model, tmp_path / "out", Rounding.of(*asked), [[]], CPU)
    assert not list(tmp_path.iterdir())


def test_stopped_before_the_first_shard_it_leaves_nothing_and_two_cannot_write_at_once(
    model: Path, tmp_path: Path
) -> None:
    def again(done: int, of: int) -> None:
        with pytest.raises(ValueError, match="another process is writing"):
            quantize(model, tmp_path / "out", rounding("fp8"), [], CPU)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "out", rounding("fp8"), [], CPU, again)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("scheme", "method"), [("int4", "rtn"), ("fp8_weights", "awq")])
def test_a_model_of_float64_has_scales_that_can_be_read(scheme: str, method: str, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "wide")
    wide = {name: value.double() for name, value in stored(model).items()}
    save_file(wide, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    out = write(tmp_path / "wide", tmp_path / "out", scheme, method)
    scales = [one for name, one in stored(out).items() if name.endswith("weight_scale")]
    assert {one.dtype for one in scales} == {torch.float32}
    products = {name.removesuffix("_packed") for name in stored(out) if "proj.weight" in name and "_s" not in name}
    packed = WeightStore.load(out, dict.fromkeys(products, SCHEMES[scheme])).quantized
    assert len(packed) == len(scales)


def test_what_a_folder_says_of_generation_goes_along_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    out = write(tmp_path / "model", tmp_path / "out", "fp8", "rtn")
    found = read_generation_config(out)
    assert (found.sampling, found.eos_ids) == ({"temperature": 0.6}, (2, 7))


def test_folders_and_tokens_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists"):
        quantize(model, tmp_path, rounding("fp8"), [], CPU)
    with pytest.raises(ValueError, match="has token 61"):
        quantize(model, tmp_path / "out", rounding("fp8"), [[61]], CPU)
    with pytest.raises(ValueError, match="has token -1"):
        quantize(model, tmp_path / "out", rounding("fp8"), [[3], [2, -1]], CPU)
    with pytest.raises(ValueError, match="a sample of 65 tokens, and the model takes 64: cut"):
        quantize(model, tmp_path / "out", rounding("fp8"), [[3], [2] * 65], CPU)
    assert not list(tmp_path.iterdir())
    out = write(model, tmp_path / "once", "fp8", "rtn")
    config = json.loads((out / "config.json").read_text())
    for of_its_own in (False, True):  # as files of modelopt have it
        with pytest.raises(ValueError, match="quantized already"):
            quantize(out, tmp_path / "twice", rounding("fp8"), [], CPU)
        if not of_its_own:
            (out / "hf_quant_config.json").write_text("{}")
            (out / "config.json").write_text(json.dumps(config | {"quantization_config": None}))


def test_layers_that_predict_further_tokens_are_copied_piece_by_piece(
    open_checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint("deepseek-v3-groups-yarn")
    folder = shutil.copytree(source.folder, tmp_path / "model")
    behind = f"model.layers.{len(source.model.model.layers)}."
    kept = {
        f"{behind}eh_proj.weight": torch.randn(56, 112).bfloat16(),
        f"{behind}enorm.weight": torch.randn(56),
        f"{behind}mlp.experts.0.up_proj.weight": torch.randn(12, 56),
    }
    save_file(stored(folder) | kept, folder / "model.safetensors")
    plain = write(source.folder, tmp_path / "plain", "int8_weights", "rtn")
    monkeypatch.setattr(rewrite, "_SHARD_BYTES", 56 * 112 * 2 + 56 * 4)
    with pytest.raises(KeyboardInterrupt):
        quantize(folder, tmp_path / "out", rounding("int8_weights", "rtn"), [], CPU, _stop_before_the_last)
    out = write(folder, tmp_path / "out", "int8_weights", "rtn")
    found, without = stored(out), stored(plain)
    assert found.keys() == without.keys() | kept.keys()
    assert all(torch.equal(found[name], one) for name, one in (without | kept).items())
    assert len(list(out.glob("*.safetensors"))) == len(list(plain.glob("*.safetensors"))) + 2
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {f"{behind}eh_proj", f"{behind}mlp.experts.0.up_proj"} <= set(ignored)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers = [
        LLM(str(one), device="cpu", skip_tokenizer_init=True).generate([[5, 6, 7]], greedy, use_tqdm=False)
        for one in (out, plain)
    ]
    assert answers[0][0].outputs[0].token_ids == answers[1][0].outputs[0].token_ids


@pytest.mark.parametrize("skip", ["*.experts.*.down_proj", "*.experts.*.up_proj"])
def test_experts_packed_in_part_are_served_in_floats(
    skip: str, open_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """One operation multiplies by all of a mixture's matrices, packed or not."""
    source = open_checkpoint("glm4-moe-groups")
    out = write(source.folder, tmp_path / "out", "int8_weights", "rtn", (skip,))
    llm = LLM(str(out), device="cpu", dtype="float32", skip_tokenizer_init=True)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    ids = list(llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0].token_ids)
    kept = [name for name, one in llm.engine.model.named_parameters() if one.is_meta]
    assert any("self_attn" in name for name in kept)
    assert not any(".experts." in name for name in kept)
    plain = WeightStore.load(out, {}, dtype="float32").model
    with torch.no_grad():
        logits = plain.head(plain(batch_of([[5, 6, 7, *ids[:-1]]])))[2:]
    assert logits.argmax(-1).tolist() == ids


def test_shards_of_another_count_are_told_before_work(
    open_checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a version that left out layers that predict further tokens: names of shards hold how many there are."""
    source = open_checkpoint("deepseek-v3-groups-yarn")
    folder = shutil.copytree(source.folder, tmp_path / "model")
    behind = {f"model.layers.{len(source.model.model.layers)}.eh_proj.weight": torch.randn(56, 112)}
    save_file(stored(folder) | behind, folder / "model.safetensors")

    def again(done: int, of: int) -> None:
        raise AssertionError

    with monkeypatch.context() as before:
        before.setattr(rewrite, "_pieces", lambda tensors: [])
        with pytest.raises(KeyboardInterrupt):
            quantize(folder, tmp_path / "out", rounding("int8_weights", "rtn"), [], CPU, _stop_after_the_first)
    with pytest.raises(
        ValueError, match=r"lacks model-00001-of-\d+\.safetensors, .*; remove .*\.out\.unfinished and run"
    ):
        quantize(folder, tmp_path / "out", rounding("int8_weights", "rtn"), [], CPU, again)


def _stop_after_the_first(done: int, of: int) -> None:
    if done == 1:
        raise KeyboardInterrupt


def _stop_before_the_last(done: int, of: int) -> None:
    if done == of - 1:
        raise KeyboardInterrupt
