"""Which weights of a checkpoint are packed, by which method, and reading them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.files.fields import Fields
from strata.files.json_object import read_existing_object
from strata.kernels.quant.quantized import QuantizedWeight, Scheme
from strata.models.checkpoint import StoredTensor
from strata.models.quantized.formats.awq import read_awq
from strata.models.quantized.formats.compressed_tensors import read_compressed_tensors
from strata.models.quantized.formats.fp8 import read_fp8
from strata.models.quantized.formats.gptq import read_gptq
from strata.models.quantized.formats.matrices import QuantizedMatrix, read_box
from strata.models.quantized.formats.modelopt import read_modelopt
from strata.models.quantized.formats.stored import InputScale, StoredTensors
from strata.models.quantized.method import take_method

_METHODS: Mapping[str, Callable[[Fields, StoredTensors], dict[str, QuantizedMatrix]]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
}
_MXFP4 = "mxfp4"
# Where older files of modelopt say what they hold.
MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class QuantizedFormat:
    """The packed weights of a checkpoint.

    scheme: the method and what it packs, for messages. claimed: all stored tensors that it reads or passes over.
    input_scales: by matrix, of what it multiplies, where the checkpoint has one scale for that.
    """

    scheme: str
    claimed: frozenset[str]
    stored: Mapping[str, QuantizedMatrix]
    input_scales: Mapping[str, InputScale]

    @property
    def matrices(self) -> frozenset[str]:
        """The names of packed matrices, ".weight" last, each expert's its own."""
        return frozenset(self.stored)

    def shape(self, name: str) -> tuple[int, int]:
        """Of a matrix [out, width], from headers."""
        return self.stored[name].shape

    def scheme_of(self, name: str) -> Scheme:
        """By which a matrix is packed, from headers."""
        return self.stored[name].scheme

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> QuantizedWeight:
        """The rows and columns [first, end) of a matrix on the CPU.

        Experts have the largest of the scales that each has for what it multiplies. Raises ValueError for a scale that
        is no finite number, zeros that are not what the config says, and columns that cannot be divided.
        """
        weight, scale = read_box(self.stored[name], name, rows, columns), self.input_scales.get(name)
        return weight if scale is None else weight._replace(input_scale=scale.value)


def read_format(config: dict[str, Any], tensors: Mapping[str, StoredTensor], folder: Path) -> QuantizedFormat | None:
    """The packed weights of a checkpoint; None if its config tells of none, or of experts in mxfp4, which are read as
    floats (`strata.models.joined`).

    config: the contents of config.json. tensors: as `read_checkpoint(folder, packed=True)` gives them. Everything that
    headers and config can tell is checked here. Raises ValueError that names the key or tensor that is not supported,
    is missing, or that nothing reads.
    """
    where = f"{folder / 'config.json'}, quantization_config"
    values = config.get("quantization_config")
    if values is None and (folder / MODELOPT_FILE).is_file():
        where = str(folder / MODELOPT_FILE)
        values = _modelopt_values(read_existing_object(folder / MODELOPT_FILE), where)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ValueError(f"{where} is {values!r}; supported is an object or null")
    fields = Fields(values, where)
    method = take_method(fields, (*_METHODS, _MXFP4))
    if method == _MXFP4:
        return None
    stored = StoredTensors(tensors, folder)
    matrices = _METHODS[method](fields, stored)
    claimed = stored.finish()
    if not matrices:
        raise ValueError(f"{folder} holds no packed weights, though its quantization_config says {method!r}")
    counts = Counter(matrix.scheme for matrix in matrices.values())
    schemes = ", ".join(f"{_words(scheme)} ({count})" for scheme, count in counts.most_common())
    return QuantizedFormat(f"{method}: {schemes}", claimed, matrices, stored.input_scales)


def _words(scheme: Scheme) -> str:
    if scheme.rows > 1:
        return f"{scheme.values} in blocks of {scheme.rows} x {scheme.columns}"
    if scheme.columns:
        return f"{scheme.values} in groups of {scheme.columns}"
    return f"{scheme.values} with a scale for each {'row' if scheme.rows else 'weight'}"


def _modelopt_values(file: dict[str, Any], where: str) -> dict[str, Any]:
    fields = Fields(file, where)
    values = fields.take("quantization")
    fields.finish({"producer"})
    if not isinstance(values, dict):
        raise fields.wrong("quantization", values, "an object")
    return values
