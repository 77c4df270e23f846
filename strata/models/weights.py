"""The weights of a model by the names of its checkpoints: loaded, changed while it runs, and given out again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from strata.files.hub_cache import why_no_folder
from strata.kernels.quant.quantized import TWO_OF_FOUR, QuantizedWeight, Scheme, dense
from strata.kernels.quant.two_of_four import smallest_two_of_four
from strata.models.checkpoint import StoredTensor, read_checkpoint, shorten
from strata.models.config import DTYPES, ModelConfig, config_from_dict, read_config
from strata.models.experts import Experts, stored_name, stored_view, stored_views
from strata.models.families import build
from strata.models.initialize import dummy_values
from strata.models.joined import checkpoint_parameters, checkpoint_values
from strata.models.layers import CausalLM
from strata.models.memory import require_memory
from strata.models.quantized.assembly import assembly, meta_weights, pack_boxes
from strata.models.quantized.checkpoint import Checkpoint
from strata.models.quantized.matrices import LocalMatrix, local_matrices
from strata.models.shapes import SHAPES
from strata.models.shard import Box, Boxes, ModelShard, inside, places, whole, zeroed_places
from strata.models.sources import DERIVED, EMBEDDING, HEAD, InMemory, TensorSource, is_passed_over, match_tensors

_ADVICE = "; leave out sparsity=, or prune by strata prune --pattern 2:4"
_FLOATS = (*DTYPES.values(), torch.float64)


def resolve(model: str | Path, load_format: str = "auto") -> tuple[ModelConfig, Path | None]:
    """The config of a model folder, and the folder; or the config of a shape of `SHAPES`, and None.

    load_format "auto" reads the folder's weights. "dummy" makes random ones, so a folder needs only a config.json and
    a name such as "8B" needs no folder. Where config.json gives no dtype, the weights do. Raises ValueError for
    anything else.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format = {load_format!r} is not supported; accepted are 'auto' and 'dummy'")
    folder = Path(model)
    if folder.is_dir():
        config = read_config(folder)
        if config.dtype is None and load_format == "auto":
            stored = (tensor.dtype for tensor in read_checkpoint(folder, packed=True).values())
            floats = (dtype for dtype in stored if dtype in (*DTYPES.values(), torch.float64))  # others are packed
            config = dataclasses.replace(config, dtype=next(floats, None))
        return config, folder
    if str(model) not in SHAPES:
        names = ", ".join(map(repr, SHAPES))
        raise ValueError(f"{why_no_folder(folder)}; give a folder, or for dummy weights {names}")
    if load_format != "dummy":
        raise ValueError(f"the shape {str(model)!r} has no weights; use load_format='dummy', or give a model folder")
    return config_from_dict(SHAPES[str(model)], str(model)), None


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that weights are loaded as.

    "auto" keeps bfloat16 and float16 checkpoints as they are; float32 (or unknown) stays so on the CPU and becomes
    bfloat16 on CUDA.
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ValueError(f"dtype = {dtype!r} is not supported; accepted are 'auto', {', '.join(map(repr, DTYPES))}")
    if config.dtype in (torch.bfloat16, torch.float16):
        return config.dtype
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load(
    model: str | Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    max_length: int | None = None,
    seed: int = 0,
    part: ModelShard | None = None,
) -> tuple[CausalLM, ModelConfig]:
    """The model of `WeightStore.load` that packs nothing, and its config."""
    store = WeightStore.load(model, {}, device, dtype, load_format, max_length, seed, part)
    return store.model, store.config


class _Home(NamedTuple):
    """Where a matrix lies: in which parameter, and which of its `stored_views` it is."""

    parameter: str
    number: int


class WeightStore:
    """A model, or a rank's part of one, by what its checkpoints call its weights.

    model: on a device; parameters that are packed are on the meta device there, and stand in `packed` by their names.
    config: of the model, or of the part. folded: what was computed from parameters, by their names, and how it is
    computed anew when one changes. everywhere: of a part, how the other ranks of a running engine are told of an update
    (a name, its tensor, and what writes it here), so that all of them write it or none does.
    """

    folded: Sequence[tuple[Container[str], Callable[[], object]]] = ()
    everywhere: Callable[[str, Tensor, Callable[[], None]], None] | None = None

    def __init__(
        self,
        config: ModelConfig,
        complete: CausalLM,
        model: CausalLM,
        part: ModelShard | None,
        schemes: Mapping[str, Scheme],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """config, complete: of the whole model, which may be on the meta device, or be `model`. schemes: of the
        parameters that are packed."""
        self.model, self.config = model, config if part is None else part.config
        self._whole, self._complete, self._part = config, complete, part
        self._schemes, self._device, self._dtype = schemes, device, dtype
        self._assemblies = {name: assembly(model, name) for name in schemes}
        self._names = {name for name, _ in model.named_parameters()}
        self._mixtures = [module for module in model.modules() if isinstance(module, Experts)]
        self._held: tuple[Sequence[int], ...] | None = None
        self._homes: dict[str, list[_Home]] = {}

    @staticmethod
    @torch.no_grad()
    def load(
        model: str | Path,
        schemes: Mapping[str, Scheme],
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "auto",
        load_format: str = "auto",
        max_length: int | None = None,
        seed: int = 0,
        part: ModelShard | None = None,
    ) -> WeightStore:
        """Of a folder, or, with dummy weights, of a named shape.

        All headers are checked against the model before memory is allocated or a weight is read. Weights are streamed
        into place in pieces, so the host never holds more than the pages of one file and a piece; of packed ones a
        matrix in floats, of dummy ones a parameter. `load_format` as in `resolve`, `dtype` as in `resolve_dtype`,
        `max_length` as in `build`; `seed` is that of dummy weights. part: of the model that is wanted, whose boxes
        alone are read of each tensor.

        schemes: of the parameters that are to be packed; others than the part has are passed over. Of a checkpoint that
        is packed already they only tell which parameters stay so; what else is packed there becomes floats. Values are
        rounded to `dtype` before they are packed, as they are in a model that is not. A part's scales are those of the
        whole matrix, so parts of any number of ranks stand for the same values.

        Raises ValueError for a missing or corrupt file; missing, unexpected or misshapen tensors; a parameter that its
        scheme cannot pack; too little memory.
        """
        config, folder = resolve(model, load_format)
        device = torch.device(device)
        dtype = resolve_dtype(dtype, config, device)
        with torch.device("meta"):
            complete = build(config, max_length).to(dtype)
            made = complete if part is None else part.build(max_length)
        own = {name for name, _ in made.named_parameters()}
        schemes = {name: scheme for name, scheme in schemes.items() if name in own}
        checkpoint = None if folder is None or load_format == "dummy" else Checkpoint.of(folder, complete)
        planned = meta_weights(made, complete, part, schemes, checkpoint, dtype)
        require_memory(quantized_bytes(made, dtype, planned), device, dtype)
        allocate(made, device, dtype, schemes)
        store = WeightStore(config, complete, made, part, schemes, device, dtype)
        homes = store._current_homes()
        given = _dummies(complete, schemes, seed, device, dtype) if checkpoint is None else checkpoint.read_all(homes)
        for stored, source in given:
            for write in store._writes(stored, source):
                write()
        embedding = stored_name(complete, EMBEDDING)
        if checkpoint is not None and config.tied and embedding in homes:
            shape = checkpoint.sources[embedding].shape
            checkpoint.check_tied(HEAD, embedding, store._boxes(EMBEDDING, shape))
        return store

    @property
    def quantized(self) -> dict[str, QuantizedWeight]:
        """By parameter."""
        return {name: one.weight for name, one in self._assemblies.items()}

    @torch.inference_mode()
    def update(self, name: str, tensor: Tensor) -> None:
        """Let the tensor that checkpoints call `name` be another from the next step on: whole, in any floats, on any
        device. What is packed is packed again, as `load` packs it; a part takes its boxes.

        To be called between steps by whoever launches them; of the ranks of an engine on the first, which tells the
        others. Keys and values that were computed before, those of cached prefixes too, stay those of the old weights.
        Raises ValueError, before anything has changed, for a name that the model's checkpoints do not have, another
        shape, no floats, and what cannot be packed.
        """
        write = self.prepared(name, tensor)
        if self.everywhere is None:
            write()
        else:
            self.everywhere(name, tensor, write)

    @torch.inference_mode()
    def prepared(self, name: str, tensor: Tensor) -> Callable[[], None]:
        """What writes what this has of a tensor, packed already, so that it cannot fail. Raises as `update` does."""
        if name not in self._tensors:
            if DERIVED.fullmatch(name) or is_passed_over(self._complete, name):
                return lambda: None
            raise ValueError(self._why_unknown(name))
        shape, parts = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(shape)}: give the whole tensor")
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected floats, which are packed here where need be")
        reader = InMemory(tensor)
        writes = [write for one, place in parts.items() for write in self._writes(one, TensorSource(place, reader))]
        changed = {home.parameter for one in parts for home in self._current_homes().get(one, ())}
        return partial(self._write, writes, changed)

    @torch.inference_mode()
    def _write(self, writes: Sequence[Callable[[], object]], changed: set[str]) -> None:
        for write in writes:
            write()
        for names, make in self.folded:
            if any(name in names for name in changed):
                make()

    def export(self, others: Sequence[WeightStore] = ()) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors as a checkpoint has them; packed ones as the floats that they stand for.

        Of a whole model they are its own memory, where checkpoints do not have several in one. others: where this is
        a part, the stores of all other parts. Raises ValueError for a tensor that these do not have whole.
        """
        return checkpoint_values(self._complete, self._values((self, *others)))

    def _values(self, stores: Sequence[WeightStore]) -> Iterator[tuple[str, Tensor]]:
        """The parameters of the whole model, those of parts put together."""
        for name, parameter in self._complete.named_parameters():
            if self._part is None:
                yield name, self._value(name)
                continue
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            wholes = dict(stored_views(self._complete, name, value))
            found: set[tuple[str, Box]] = set()
            for store in stores:
                if name not in store._names:  # of another stage
                    continue
                for stored, view in stored_views(store.model, name, store._value(name)):
                    for box, place in places(view, store._boxes(name, tuple(wholes[stored].shape))):
                        wholes[stored][inside(box)].copy_(place)
                        found.add((stored, box))
            if sum(math.prod(end - first for first, end in box) for _, box in found) != value.numel():
                raise ValueError(f"{name} is not whole: give the stores of all parts")
            yield name, value

    def _value(self, name: str) -> Tensor:
        one = self._assemblies.get(name)
        return self.model.get_parameter(name).detach() if one is None else dense(one.weight, self._dtype)

    @cached_property
    def _tensors(self) -> dict[str, tuple[tuple[int, ...], dict[str, StoredTensor]]]:
        """By the name of each tensor of a checkpoint its shape, and where in it matrices lie."""
        with torch.device("meta"):
            model = build(self._whole)
        tensors = {
            name: StoredTensor(name, Path(), torch.float32, tuple(one.shape), 0)
            for name, one in checkpoint_parameters(model).items()
        }
        found: dict[str, tuple[tuple[int, ...], dict[str, StoredTensor]]]
        found = {name: (tensor.shape, {}) for name, tensor in tensors.items()}
        for stored, place in match_tensors(model, tensors, Path()).items():
            found[place.name][1][stored] = place
        return found

    def _why_unknown(self, name: str) -> str:
        if name == HEAD:
            return f"{HEAD} is tied to {stored_name(self._complete, EMBEDDING)} by config.json: update that alone"
        home = next((home for home, (_, parts) in self._tensors.items() if name in parts), None)
        if home is not None:
            return f"{name} is a part of {home} in the model's checkpoints: update that, whole"
        return f"{name} is no tensor of the model's checkpoints, which have {shorten([*self._tensors])}"

    def _current_homes(self) -> dict[str, list[_Home]]:
        """Of each matrix that this has, several where an expert has copies."""
        experts = tuple(module.local for module in self._mixtures)
        if experts != self._held:  # they move
            self._held, self._homes = experts, {}
            for name, parameter in self.model.named_parameters():
                for number, (stored, _) in enumerate(stored_views(self.model, name, parameter)):
                    self._homes.setdefault(stored, []).append(_Home(name, number))
        return self._homes

    def _boxes(self, name: str, shape: tuple[int, ...]) -> Boxes:
        """What this has of a matrix of `shape` that lies in the parameter `name`."""
        if self._part is None:
            return (whole(shape),)
        boxes = self._part.boxes(name, shape)
        owner = self.model.get_submodule(name.rpartition(".")[0])
        if len(shape) == 3 and isinstance(owner, Experts) and owner.is_part:
            return tuple(((one, one + 1), *box[1:]) for one, box in zip(owner.local, boxes, strict=True))
        return boxes

    def _writes(self, stored: str, source: TensorSource) -> Iterator[Callable[[], object]]:
        """What puts a matrix where it belongs, one after another; packed already."""
        for home in self._current_homes().get(stored, ()):
            boxes = self._boxes(home.parameter, source.stored.shape)
            if home.parameter not in self._schemes:
                value = self.model.get_parameter(home.parameter).detach()  # where it lies now: merging moves it
                yield partial(_copy, source, boxes, stored_view(self.model, *home, value))
                continue
            target = self._assemblies[home.parameter]
            for number, matrix in self._packed(stored, home, boxes, source):
                yield partial(target.put, number, matrix)

    def _packed(
        self, stored: str, home: _Home, boxes: Boxes, source: TensorSource
    ) -> Iterator[tuple[int, QuantizedWeight]]:
        """The matrices of a tensor that are packed each by itself, and which of the parameter's each is."""
        packed = source.quantized(boxes)
        if packed is not None:
            yield home.number, packed.to(self._device)
            return
        scheme, like = self._schemes[home.parameter], self._assemblies[home.parameter].made
        for further, matrix in enumerate(local_matrices(home.parameter, source.stored.shape, boxes)):
            try:
                packed = pack_boxes(partial(self._read, source, matrix), matrix.shape, matrix.boxes, scheme, like)
            except ValueError as error:
                advice = _ADVICE * (scheme.values == TWO_OF_FOUR)
                raise ValueError(f"{stored} cannot be packed: {error}{advice}") from None
            yield home.number + further, packed

    def _read(self, source: TensorSource, matrix: LocalMatrix, box: Box) -> Tensor:
        wanted = matrix.in_tensor(box)
        value = torch.empty([end - first for first, end in wanted], dtype=self._dtype, device=self._device)
        source.copy(wanted, value)
        return value.view(value.shape[-2:])


def _copy(source: TensorSource, boxes: Boxes, target: Tensor) -> None:
    for box, place in zeroed_places(target, boxes):
        source.copy(box, place)


def _dummies(
    complete: CausalLM, schemes: Mapping[str, Scheme], seed: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, TensorSource]]:
    """Random values. They have no zeros of their own: where 2:4 is wanted, the least become zeros."""
    for name, value in dummy_values(complete, seed, device, dtype):
        if name in schemes and schemes[name].values == TWO_OF_FOUR:
            value.masked_fill_(smallest_two_of_four(value.abs()), 0.0)
        for stored, view in stored_views(complete, name, value):
            place = StoredTensor(stored, Path(), value.dtype, tuple(view.shape), 0)
            yield stored, TensorSource(place, InMemory(view))


def weight_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """What the parameters take as `dtype`, and the buffers as they are. The model may be on the meta device."""
    parameters = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return parameters + sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())


def quantized_bytes(model: nn.Module, dtype: torch.dtype, packed: Mapping[str, QuantizedWeight]) -> int:
    """What a model takes of which these parameters are packed and the others of `dtype`. All may be on the meta
    device."""
    floats = sum(model.get_parameter(name).numel() for name in packed) * dtype.itemsize
    return weight_bytes(model, dtype) - floats + sum(weight.nbytes for weight in packed.values())


def allocate(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None, without: Container[str] = ()
) -> None:
    """Give a model, or a module of one, other memory on `device`, its parameters as `dtype` if one is given: the rotary
    table is filled, the parameters are not. without: parameters that stay as they are."""
    # Not `to_empty`, whose `empty_like` of a tensor on the meta device imports a package for symbolic algebra.
    model.to(dtype=dtype)
    left = {id(parameter) for name, parameter in model.named_parameters() if name in without}

    def with_memory(tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in left else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    model._apply(with_memory)
