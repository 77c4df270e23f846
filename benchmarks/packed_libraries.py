"""Packed checkpoints made by the public libraries, read here and held against the libraries' own decompression.

Prints for each layout how many weights differ in any bit, and exits with 1 if one does. Libraries that are not
installed are named and passed over. Beside the repository and without what they depend on they disturb nothing, and of
gptqmodel and autoawq the unpacked sources are enough (`pip download --no-deps --no-binary :all: gptqmodel autoawq`):

    pip install --target libraries --no-deps compressed-tensors loguru accelerate psutil pypcre logbar device-smi \\
        tokenicer threadpoolctl datasets pyarrow dill
    PYTHONPATH=libraries:gptqmodel-7.7.0:autoawq-0.2.9 python -m benchmarks.packed_libraries
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from strata.kernels.quant.quantized import E8M0_BIAS, dense
from strata.models.checkpoint import read_checkpoint
from strata.models.quantized.formats.read import read_format

# Layouts of compressed-tensors: presets with groups of columns, without, and weights' own numbers.
GROUPED = ("W4A16", "W4A16_ASYM", "W8A16", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP8A16")
UNGROUPED = ("W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK")
CHANNELS = {
    "int 4 channel": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True},
    "int 4 channel asymmetric": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False},
    "int 8 channel asymmetric": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
}
# Groups of presets need multiples of 128. The odd one fills neither words nor blocks.
HIDDEN, INNER, ODD = 128, 384, 396


def main() -> int:
    torch.manual_seed(0)
    wrong = 0
    for library, cases in (
        ("compressed_tensors", compressed_cases),
        ("gptqmodel", gptq_cases),
        ("awq", awq_cases),
        ("transformers", fp8_cases),
    ):
        if importlib.util.find_spec(library) is None:
            print(f"{library}: not installed, passed over")
            continue
        for name, wanted, found in cases():
            differing = sum(int((found[one] != wanted[one]).sum()) for one in wanted)
            count = sum(one.numel() for one in wanted.values())
            wrong += bool(differing) or found.keys() != wanted.keys()
            print(f"{library} {name}: {len(wanted)} matrices, {differing} of {count} weights differ")
    return int(wrong > 0)


Compared = Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]


def written(config: dict[str, Any], tensors: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """What is read of a checkpoint with these tensors, each in the library's dtype."""
    with tempfile.TemporaryDirectory() as folder:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}/model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps({"quantization_config": config}))
        return read(Path(folder), dtypes)


def read(folder: Path, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    config = json.loads((folder / "config.json").read_text())
    packed = read_format(config, read_checkpoint(folder, packed=True), folder)
    assert packed is not None
    boxes = {name: tuple((0, size) for size in packed.shape(name)) for name in packed.matrices}
    return {name: dense(packed.read(name, *box), dtypes[name]) for name, box in boxes.items()}


def compressed_cases() -> Compared:
    """Whole models, with the config.json that the library writes."""
    quantization = importlib.import_module("compressed_tensors.quantization")
    compressors = importlib.import_module("compressed_tensors.compressors")
    for name in (*GROUPED, *UNGROUPED, *CHANNELS):
        group = {"targets": ["Linear"], "weights": CHANNELS[name]} if name in CHANNELS else ["Linear"]
        groups = {name: group}
        config = quantization.QuantizationConfig(config_groups=groups, ignore=["re:.*lm_head"])
        model = tiny_llama(INNER if name in GROUPED else ODD)
        quantization.apply_quantization_config(model, config, show_progress=False)
        for module in model.modules():
            fill_scales(module)
        compressor = compressors.ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        with tempfile.TemporaryDirectory() as folder:
            save_file({key: one.contiguous() for key, one in model.state_dict().items()}, f"{folder}/model.safetensors")
            model.config.save_pretrained(folder)
            compressor.update_config(folder)
            compressor.decompress_model(model)
            wanted = {
                f"{owner}.weight": module.weight.detach()
                for owner, module in model.named_modules()
                if getattr(module, "quantization_scheme", None) is not None
            }
            yield name, wanted, read(Path(folder), {one: weight.dtype for one, weight in wanted.items()})


def tiny_llama(inner: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="bfloat16",
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


@torch.no_grad()
def fill_scales(module: nn.Module) -> None:
    """Scales near those that a calibration would find, and zeros of all kinds."""
    if getattr(module, "quantization_scheme", None) is None:
        return
    weights = module.quantization_scheme.weights
    scale = module.weight_scale
    largest = {("int", 4): 7.5, ("int", 8): 127.5, ("float", 4): 6.0, ("float", 8): 448.0}
    values = (torch.rand(scale.shape) + 0.5) * module.weight.abs().max().float()
    values = values / largest[weights.type, weights.num_bits]
    if hasattr(module, "weight_global_scale"):
        module.weight_global_scale.fill_(1234.5)
        values = values * 1234.5
    if weights.group_size == 32 and weights.type == "float":
        values = 2.0 ** values.log2().round()
    scale.copy_(values.to(scale.dtype))
    if not weights.symmetric:
        half = 2 ** (weights.num_bits - 1)
        module.weight_zero_point.copy_(torch.randint(-half, half, module.weight_zero_point.shape))


def gptq_cases() -> Compared:
    linear = importlib.import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    model_file = importlib.import_module("gptqmodel.utils.model")
    settings = importlib.import_module("gptqmodel.quantization.config").QuantizeConfig
    for bits in (4, 8):
        for symmetric in (True, False):
            for ordered in (False, True):
                for layout in ("gptq", "gptq_v2"):
                    module = linear(
                        bits=bits,
                        group_size=32,
                        sym=symmetric,
                        desc_act=ordered,
                        in_features=HIDDEN,
                        out_features=INNER,
                        bias=False,
                    )
                    module.pack_original(*gptq_inputs(bits, symmetric, ordered))
                    module.post_init()
                    wanted = {"a.weight": module.dequantize_weight().t()}
                    if layout == "gptq":
                        model_file.convert_gptq_v2_to_v1_format_module(module, settings(bits=bits, group_size=32))
                    tensors = {
                        f"a.{name}": getattr(module, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")
                    }
                    config = {
                        "quant_method": "gptq",
                        "bits": bits,
                        "group_size": 32,
                        "sym": symmetric,
                        "desc_act": ordered,
                        "checkpoint_format": layout,
                        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
                    }
                    found = written(config, tensors, {"a.weight": wanted["a.weight"].dtype})
                    kind = ("symmetric" if symmetric else "asymmetric") + (" act-order" if ordered else "")
                    yield f"{bits} bits {kind} {layout}", wanted, found


def gptq_inputs(bits: int, symmetric: bool, ordered: bool) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """A linear, and scales and zeros [out, groups] and groups [in] as GPTQ leaves them."""
    source = nn.Linear(HIDDEN, INNER, bias=False).half()
    shape = INNER, HIDDEN // 32
    scales = (torch.rand(shape) + 0.5) * 0.1 / 2 ** (bits - 1)
    zeros = torch.full(shape, 2.0 ** (bits - 1)) if symmetric else torch.randint(0, 2**bits, shape).float()
    groups = torch.arange(HIDDEN) // 32
    if ordered:
        groups = groups[torch.randperm(HIDDEN)]
    return source, scales, zeros, groups.int()


def awq_cases() -> Compared:
    """Of AutoAWQ its layer alone: the package imports data sets, and a release of transformers that is gone."""
    found = importlib.util.find_spec("awq")
    assert found is not None
    assert found.submodule_search_locations is not None
    root = Path(found.submodule_search_locations[0])
    for name, folder in (("awq", root), ("awq.utils", root / "utils"), ("awq.modules", root / "modules")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    layer = importlib.import_module("awq.modules.linear.gemm").WQLinear_GEMM
    unpack = importlib.import_module("awq.utils.packing_utils").dequantize_gemm
    for group in (32, 128, -1):
        size = HIDDEN if group == -1 else group
        shape = HIDDEN // size, INNER
        scales, zeros = (torch.rand(shape) + 0.5) * 0.02, torch.randint(0, 16, shape)
        source = nn.Linear(HIDDEN, INNER, bias=False).half()
        # Codes that leave 4 bits would spill into their neighbours.
        codes = torch.randint(0, 16, (HIDDEN, INNER)) - zeros.repeat_interleave(size, 0)
        weight = codes * scales.half().repeat_interleave(size, 0)
        source.weight.data = weight.t().contiguous().half()
        module = layer.from_linear(source, 4, size, scales=scales, zeros=zeros)
        tensors = {f"a.{name}": getattr(module, name) for name in ("qweight", "qzeros", "scales")}
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        wanted = unpack(module.qweight, module.qzeros, module.scales, 4, size).t()
        yield f"groups of {group}", {"a.weight": wanted}, written(config, tensors, {"a.weight": wanted.dtype})


def fp8_cases() -> Compared:
    """transformers' reader of DeepSeek's and Qwen's blocks, which takes weights on the grid of blocks alone."""
    reader = importlib.import_module("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    for kind in ("float", "ue8m0"):
        values = (torch.randn(INNER, HIDDEN) * 40).to(torch.float8_e4m3fn)
        scales = torch.rand(INNER // 128, HIDDEN // 128) + 0.01
        if kind == "ue8m0":
            scales = (scales.log2().round() + E8M0_BIAS).to(torch.uint8)
        wanted = reader._dequantize_one(values, scales, torch.float32)
        config = {"quant_method": "fp8", "scale_fmt": kind, "weight_block_size": [128, 128]}
        tensors = {"a.weight": values, "a.weight_scale_inv": scales}
        yield f"blocks, {kind}", {"a.weight": wanted}, written(config, tensors, {"a.weight": torch.float32})


if __name__ == "__main__":
    sys.exit(main())
