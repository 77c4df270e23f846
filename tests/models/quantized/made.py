"""Packed weights made bit by bit from the published layouts, and what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Generator, Tensor

from strata.models.checkpoint import read_checkpoint
from strata.models.quantized.formats.read import QuantizedFormat, read_format

E4M3 = torch.float8_e4m3fn
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]
# Of activations, where a layout has one for all.
INPUT_SCALE = 0.0123

# The tensors of a weight [out, width] by the last part of their names, and the weight in float32.
Made = tuple[dict[str, Tensor], Tensor]
Maker = Callable[[int, int, Generator], Made]


@dataclass(frozen=True)
class Layout:
    """A format with its config; `activations` as `Scheme` has it; static: they have `INPUT_SCALE`."""

    config: dict[str, Any]
    make: Maker
    activations: str = ""
    values: str = "int4"
    static: bool = False


def words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Codes in int32 words along a dimension, the first in the lowest bits."""
    if dim == 0:
        return words(codes.t(), bits, 1).t().contiguous()
    rows, count = codes.shape
    packed = torch.zeros(rows, -(-count * bits // 32), dtype=torch.int64)
    for column in range(count):
        packed[:, column * bits // 32] |= codes[:, column].long() << (column * bits % 32)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def codes_of(shape: tuple[int, int], bits: int, generator: Generator) -> Tensor:
    return torch.randint(0, 2**bits, shape, generator=generator)


def scales_of(shape: tuple[int, ...], generator: Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=generator) * 0.02 + 0.001).to(dtype)


def fp8_block(rows: int, columns: int, name: str = "weight_scale_inv", dtype: torch.dtype = torch.float32) -> Maker:
    def make(out: int, width: int, generator: Generator) -> Made:
        values = (torch.randn(out, width, generator=generator) * 50).to(E4M3)
        grid = scales_of((-(-out // rows), -(-width // columns)), generator)
        if dtype == torch.float8_e8m0fnu:
            grid = 2.0 ** torch.randint(-9, -4, grid.shape, generator=generator).float()
        grid = grid.to(dtype)
        wide = torch.kron(grid.float(), torch.ones(rows, columns))[:out, :width]
        return {"weight": values, name: grid}, values.float() * wide

    return make


def one_scale(values_of: str, name: str = "weight_scale", shape: tuple[int, ...] = (), static: str = "") -> Maker:
    """8 bits with a scale for the weight, or (shape [-1, 1]) for each row."""

    def make(out: int, width: int, generator: Generator) -> Made:
        wide = torch.randn(out, width, generator=generator) * 40
        values = wide.to(E4M3) if values_of == "e4m3" else wide.round().clamp(-128, 127).to(torch.int8)
        size = tuple(out if one == -1 else one for one in shape)
        scale = scales_of(size, generator, torch.bfloat16 if shape else torch.float32)
        tensors = {"weight": values, name: scale}
        if static:
            tensors[static] = torch.tensor(INPUT_SCALE)
        return tensors, values.float() * scale.float()

    return make


def pack_quantized(bits: int, group: int, symmetric: bool = True, ordered: bool = False) -> Maker:
    """group: 0: a scale for each row. ordered: columns of a group stand anywhere."""

    def make(out: int, width: int, generator: Generator) -> Made:
        size = group or width
        codes, half = codes_of((out, width), bits, generator), 2 ** (bits - 1)
        scales = scales_of((out, width // size), generator, torch.bfloat16)
        tensors = {
            "weight_packed": words(codes, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor([out, width]),
        }
        zeros = torch.full(scales.shape, half)
        if not symmetric:
            zeros = codes_of((out, width // size), bits, generator)
            tensors["weight_zero_point"] = words(zeros, bits, 0)
        groups = torch.arange(width) // size
        if ordered:
            groups = groups[torch.randperm(width, generator=generator)]
            tensors["weight_g_idx"] = groups.int()
        return tensors, (codes - zeros[:, groups]) * scales.float()[:, groups]

    return make


def gptq(bits: int, group: int, stored_less: int, symmetric: bool = True, ordered: bool = False) -> Maker:
    """stored_less: what zeros are stored less of."""

    def make(out: int, width: int, generator: Generator) -> Made:
        size = group or width
        count = -(-width // size)
        codes = codes_of((out, width), bits, generator)
        scales = scales_of((out, count), generator, torch.float16)
        zeros = torch.full((out, count), 2 ** (bits - 1))
        if not symmetric:
            zeros = torch.randint(stored_less, 2**bits, (out, count), generator=generator)
        groups = torch.arange(width) // size
        if ordered:
            groups = groups[torch.randperm(width, generator=generator)]
        tensors = {
            "qweight": words(codes.t(), bits, 0),
            "qzeros": words((zeros - stored_less).t(), bits, 1),
            "scales": scales.t().contiguous(),
            "g_idx": groups.int(),
        }
        return tensors, (codes - zeros[:, groups]) * scales.float()[:, groups]

    return make


def awq_words(codes: Tensor) -> Tensor:
    """[count, out]: eight rows of a weight in each word, in the order of AWQ's GEMM."""
    placed = torch.empty_like(codes)
    for row in range(codes.shape[1]):
        placed[:, row // 8 * 8 + AWQ_PLACES.index(row % 8)] = codes[:, row]
    return words(placed, 4, 1)


def awq(group: int) -> Maker:
    def make(out: int, width: int, generator: Generator) -> Made:
        size = group or width
        codes, zeros = (codes_of((out, count), 4, generator) for count in (width, width // size))
        scales = scales_of((out, width // size), generator, torch.float16)
        tensors = {
            "qweight": awq_words(codes.t()),
            "qzeros": awq_words(zeros.t()),
            "scales": scales.t().contiguous(),
        }
        groups = torch.arange(width) // size
        return tensors, (codes - zeros[:, groups]) * scales.float()[:, groups]

    return make


def e2m1(group: int, values: str, whole: str = "", divides: bool = False) -> Maker:
    """whole: the name of one more scale."""

    def make(out: int, width: int, generator: Generator) -> Made:
        codes = codes_of((out, width), 4, generator)
        packed = torch.stack([codes[:, at] + 16 * codes[:, at + 1] for at in range(0, width, 2)], 1).byte()
        tensors, shape = {values: packed}, (out, width // group)
        if whole:
            scales = (torch.rand(shape, generator=generator) * 200 + 1).to(E4M3)
            one = torch.tensor([4096.0 if divides else 1 / 4096])  # a power of two, so that products are exact
            tensors |= {"weight_scale": scales, whole: one}
            wide = scales.float() / 4096
        else:
            exponents = torch.randint(115, 124, shape, generator=generator)
            tensors["weight_scale"] = exponents.byte()
            wide = 2.0 ** (exponents.float() - 127)
        return tensors, torch.tensor(E2M1)[codes] * torch.kron(wide, torch.ones(1, group))

    return make


def compressed(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **own: Any
) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    common = {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "actorder": None, "block_structure": None}
    group = {"targets": ["Linear"], "weights": common | {"group_size": None} | weights, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group | {"input_activations": inputs}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    } | own


def numbers(kind: str, bits: int, strategy: str, **own: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True} | own


TOKEN = {"dynamic": True, "observer": None}
BLOCK = {"block_structure": [16, 8]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "damp_percent": 0.01}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"}

# Fields of how weights were found, as GPTQModel 7.7 and 2.2 and transformers 5.23 write them.
_GPTQMODEL: dict[str, Any] = {
    "method": "gptq",
    "checkpoint_format": "gptq",
    "lm_head": False,
    "pack_dtype": "int32",
    "meta": {
        "quantizer": ["gptqmodel:7.7.0"],
        "damp_percent": 0.05,
        "fallback": {"strategy": "rtn", "threshold": "0.5%", "smooth": None},
        "gptaq": None,
        "hessian": {"chunk_size": None, "staging_dtype": "float32"},
        "static_groups": False,
    },
}
_GPTQMODEL_2: dict[str, Any] = {
    "checkpoint_format": "gptq",
    "dynamic": None,
    "hyb_act": False,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:2.2.0"], "uri": "https://github.com/modelcloud/gptqmodel"},
    "pack_dtype": "int32",
    "static_groups": False,
    "true_sequential": True,
    "v2": False,
    "v2_alpha": 0.25,
    "v2_memory_device": "auto",
}
_TRANSFORMERS: dict[str, Any] = {
    "act_group_aware": True,
    "backend": "auto",
    "batch_size": 1,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.1,
    "dataset": None,
    "desc_act": False,
    "max_input_length": None,
    "meta": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
}

_static = partial(Layout, activations="row", values="e4m3", static=True)
_static_int = partial(Layout, activations="row", values="int8", static=True)
_rows, _rows_int = (partial(Layout, activations="row", values=one) for one in ("e4m3", "int8"))
_blocks = partial(Layout, activations="block", values="e4m3")

LAYOUTS: dict[str, Layout] = {
    "fp8": _static({"quant_method": "fp8", "activation_scheme": "static"}, one_scale("e4m3", static="input_scale")),
    "fp8-block": _blocks(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 8]},
        fp8_block(16, 8),
    ),
    "fp8-block-e8m0": _blocks(
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [16, 8], "modules_to_not_convert": ["x"]},
        fp8_block(16, 8, dtype=torch.float8_e8m0fnu),
    ),
    "float-tensor": _static(
        compressed("float-quantized", numbers("float", 8, "tensor"), numbers("float", 8, "tensor", dynamic=False)),
        one_scale("e4m3", shape=(1,), static="input_scale"),
    ),
    "float-channel": _rows(
        compressed("float-quantized", numbers("float", 8, "channel"), numbers("float", 8, "token", **TOKEN)),
        one_scale("e4m3", shape=(-1, 1)),
    ),
    "float-block": _blocks(
        compressed(
            "float-quantized",
            numbers("float", 8, "block", **BLOCK),
            numbers("float", 8, "group", group_size=8, **TOKEN),
        ),
        fp8_block(16, 8, "weight_scale", torch.bfloat16),
    ),
    "int-tensor": _static_int(
        compressed("int-quantized", numbers("int", 8, "channel"), numbers("int", 8, "tensor", dynamic=False)),
        one_scale("int8", shape=(-1, 1), static="input_scale"),
    ),
    "int": _rows_int(
        compressed("int-quantized", numbers("int", 8, "channel"), numbers("int", 8, "token", **TOKEN)),
        one_scale("int8", shape=(-1, 1)),
    ),
    "pack-4": Layout(compressed("pack-quantized", numbers("int", 4, "group", group_size=32)), pack_quantized(4, 32)),
    "pack-4-asymmetric": Layout(
        compressed("pack-quantized", numbers("int", 4, "group", group_size=16, symmetric=False)),
        pack_quantized(4, 16, symmetric=False),
    ),
    "pack-4-channel": Layout(compressed("pack-quantized", numbers("int", 4, "channel")), pack_quantized(4, 0)),
    "pack-4-ordered": Layout(
        compressed("pack-quantized", numbers("int", 4, "group", group_size=16, actorder="group")),
        pack_quantized(4, 16, ordered=True),
    ),
    "pack-8": Layout(
        compressed("pack-quantized", numbers("int", 8, "group", group_size=16)), pack_quantized(8, 16), values="int8"
    ),
    "pack-8-asymmetric": Layout(
        compressed("pack-quantized", numbers("int", 8, "channel", symmetric=False)),
        pack_quantized(8, 0, symmetric=False),
        values="int8",
    ),
    "nvfp4": Layout(
        compressed(
            "nvfp4-pack-quantized",
            numbers("float", 4, "tensor_group", group_size=16),
            numbers("float", 4, "tensor_group", group_size=16, dynamic="local"),
        ),
        e2m1(16, "weight_packed", "weight_global_scale", divides=True),
        values="e2m1",
    ),
    "mxfp4": Layout(
        compressed("mxfp4-pack-quantized", numbers("float", 4, "group", group_size=32)),
        e2m1(32, "weight_packed"),
        values="e2m1",
    ),
    "awq": Layout(_AWQ, awq(32)),
    "awq-whole-rows": Layout(_AWQ | {"group_size": -1, "version": "gemm"}, awq(0)),
    "awq-of-gptqmodel": Layout(_AWQ | _GPTQMODEL | {"method": "awq", "checkpoint_format": "gemm"}, awq(32)),
    "awq-of-transformers": Layout(_AWQ | _TRANSFORMERS | {"format": "gemm"}, awq(32)),
    "gptq-of-transformers": Layout(_GPTQ | _TRANSFORMERS | {"format": "gptq"}, gptq(4, 32, stored_less=1)),
    "gptq": Layout(_GPTQ, gptq(4, 32, stored_less=1)),
    "gptq-v1-in-name-only": Layout(_GPTQ | {"checkpoint_format": "gptq"}, gptq(4, 32, stored_less=0)),
    "gptq-of-gptqmodel": Layout(_GPTQ | _GPTQMODEL | {"format": "gptq"}, gptq(4, 32, stored_less=1)),
    "gptq-of-gptqmodel-2": Layout(_GPTQ | _GPTQMODEL_2, gptq(4, 32, stored_less=1)),
    "gptq-ordered": Layout(_GPTQ | {"desc_act": True}, gptq(4, 32, 1, ordered=True)),
    "gptq-v2-asymmetric": Layout(
        _GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, 32, 0, symmetric=False, ordered=True)
    ),
    "gptq-v1-asymmetric": Layout(
        _GPTQ | {"sym": False, "meta": {"quantizer": ["gptqmodel:2.2.0"]}}, gptq(4, 32, 1, symmetric=False)
    ),
    "gptq-8": Layout(_GPTQ | {"bits": 8, "group_size": -1}, gptq(8, 0, 1), values="int8"),
    "gptq-8-asymmetric": Layout(
        _GPTQ | {"bits": 8, "sym": False, "format": "gptq_v2"}, gptq(8, 32, 0, symmetric=False), values="int8"
    ),
    "modelopt-fp8": _static(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]},
        one_scale("e4m3", static="input_scale"),
    ),
    "modelopt-nvfp4": Layout(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        e2m1(16, "weight", "weight_scale_2"),
        values="e2m1",
    ),
}


def rounded_statically(x: Tensor, values: str) -> Tensor:
    """Float32 activations as a file with static scales asks for them: divided, cut off, rounded, multiplied."""
    scaled = x * torch.tensor(INPUT_SCALE).reciprocal()
    return (
        scaled.clamp(-448, 448).to(E4M3).float() if values == "e4m3" else scaled.round().clamp(-127, 127)
    ) * INPUT_SCALE


def make(
    layout: Layout, owners: dict[str, tuple[int, int]], seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The stored tensors of weights, and what those stand for, by name."""
    generator = torch.Generator().manual_seed(seed)
    stored, dense = {}, {}
    for owner, (out, width) in owners.items():
        tensors, dense[f"{owner}.weight"] = layout.make(out, width, generator)
        stored |= {f"{owner}.{last}": tensor for last, tensor in tensors.items()}
    return stored, dense


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> QuantizedFormat | None:
    """Through files, as a checkpoint."""
    folder.mkdir(exist_ok=True, parents=True)
    whole = {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(tensors, folder / "model.safetensors")
    return read_format(whole, read_checkpoint(folder, packed=True), folder)
