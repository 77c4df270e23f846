"""The calls of `strata bench kernels` and the search for algorithms, without a GPU: valid, large enough, complete."""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import strata.kernels
from benchmarks.kernels import algorithms, attention_cases
from benchmarks.kernels.algorithms import calls_by_table, tune_algorithms
from benchmarks.kernels.case import Case
from benchmarks.kernels.cases import cases
from benchmarks.kernels.products import Product, products
from strata.bench.explain.plain_products import product_here, unpacked_products
from strata.bench.needs_gpu import require_gpu, why_no_processor
from strata.cost.step_model import StepModel
from strata.kernels.linear import cublaslt
from strata.kernels.op import OPERATIONS
from strata.kernels.tuned import Key, TunedChoice
from strata.models.config import ModelConfig, config_from_dict
from strata.models.folder import folder_or_shape
from strata.models.shapes import SHAPES
from strata.plan.explain.measurement import MeasuredStep, StepChunk
from strata.plan.meta_model import find_config, meta_model
from tests.kernels.linear.column_library import ColumnLibrary
from tests.plan.explain.runs import DEVICE

pytest.importorskip("triton")


TRAINING = {
    "linear_cross_entropy", "cross_entropy_gradients", "summed_cross_entropy", "adamw", "muon_momentum", "muon_update",
    "quantize", "scaled_product", "linear_fp8", "linear_silu_mul_fp8", "balance_routing", "partial_attention",
    "partial_attention_gradients",
}  # fmt: skip
# No shape of the benchmark has experts; the ids and the tables that a step reads are a few kilobytes.
APART = {"route", "experts", "combine", "newest_tokens", "gather_tables", "query_chunks"}
# What ranks alone run. What they choose an id from, and what they count, is kilobytes.
APART |= {
    "best_of_shards", "count_choices", "local_experts", "sliced_linear", "vocabulary_embedding", "finish_all_reduce",
    "finish_add_rms_norm",
}  # fmt: skip
# What products by packed weights do on their way (`benchmarks.quantized_products`).
APART |= {"round_rows", "rms_norm_round", "wide_rms_norm_round", "add_rms_norm_round", "silu_mul_round"}
APART |= {"quantized_linear"}
# Only where it is asked for (`benchmarks.sparsity.attention`).
APART |= {"block_sparse_attention", "page_sparse_attention"}


def all_cases(config: ModelConfig) -> list[Case]:
    return [*cases(config), *attention_cases.attention_cases(config)]


def tiny(shape: str) -> ModelConfig:
    smaller = {
        "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 40, "vocab_size": 300, "max_position_embeddings": 128,
    }  # fmt: skip
    return config_from_dict(SHAPES[shape] | smaller, shape)


@pytest.mark.parametrize("model", ["8B", "0.6B"])
def test_every_memory_bound_operation_has_a_call_of_more_than_64_megabytes(model: str) -> None:
    most: dict[str, int] = {}
    with torch.device("meta"):
        for case in all_cases(find_config(model)):
            arguments = case.make()
            case.operation.meta(*arguments)
            name, moved = case.operation.name, case.operation.cost(*arguments, workload=case.workload).bytes
            most[name] = max(most.get(name, 0), moved)
    assert {name: moved for name, moved in most.items() if moved <= 64e6} == {}


def test_every_operation_of_inference_is_measured() -> None:
    for module in pkgutil.walk_packages(strata.kernels.__path__, "strata.kernels."):
        importlib.import_module(module.name)
    config = find_config("8B")
    measured = {case.operation.name for case in all_cases(config)}
    measured |= {product.operation for product in products("8B", config)}
    collectives = {name for name, one in OPERATIONS.items() if one.collective}
    assert measured == set(OPERATIONS) - TRAINING - APART - collectives


@pytest.mark.parametrize("shape", ["8B", "0.6B"])
def test_calls_are_valid(shape: str) -> None:
    """On the CPU, at a small size: every index is in range, and the operation computes what its reference does."""
    torch.manual_seed(0)
    ran = set()
    for case in all_cases(tiny(shape)):
        if case.rows > 2048 or sum(case.workload.total) > 6000:
            continue
        arguments = case.make()
        again = deepcopy(arguments)  # what keeps states leaves others behind
        found, wanted = case.operation(*arguments), case.operation.reference(*again)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        ran.add(case.operation.name)
    assert ran == {case.operation.name for case in all_cases(tiny(shape))}


def test_the_library_attends_over_the_same_keys() -> None:
    """Of one sequence, whose keys a single query sees all, in whatever order the pages are."""
    torch.manual_seed(0)
    decode = next(case for case in attention_cases.attention_cases(tiny("8B")) if case.rows == 1)
    arguments = decode.make()
    wanted = decode.operation.reference(*arguments)
    with sdpa_kernel(SDPBackend.MATH):
        found = attention_cases._dense(*arguments)
    torch.testing.assert_close(found[:, :, 0], wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("model", "device", "has_gpu", "refused"),
    [
        ("8B", "auto", False, True),
        ("8B", "auto", True, False),
        ("8B", "cpu", False, False),
        ("0.6B", "auto", False, False),
        ("30B-A3B", "auto", False, True),
    ],
)
def test_large_models_need_a_gpu_where_nobody_named_a_device(
    model: str, device: str, has_gpu: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = find_config(model)
    assert (why_no_processor(config, device) is not None) == refused
    if refused:
        with pytest.raises(ValueError, match=f"{model}: it needs a GPU, and .* billion parameters take hours; "):
            require_gpu(model, config, device)


HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 256, 704, 8, 2, 32, 5, 4096
LAYER = HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INNER


def step(sequences: int, tokens: int) -> MeasuredStep:
    return MeasuredStep(0.0, 1.0, tuple(StepChunk(one, 0, tokens, 1) for one in range(sequences)))


def of(quantization: str | None) -> StepModel:
    config = find_config(folder_or_shape("builtin"))
    return StepModel(meta_model(config, None, torch.bfloat16, quantization=quantization), DEVICE)


def test_every_product_of_every_step_counts() -> None:
    """A product takes as many seconds as it multiplies. The last layer's rows behind attention, and the head's, are
    those that are drawn from."""
    steps = (step(2, 30), step(2, 1), step(2, 1), step(2, 1))
    found = unpacked_products(steps, of("int4"), lambda rows, out, width: float(rows * out * width), asked=True)
    assert found is not None
    kept = HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM  # q, k and v of the last layer, of all its tokens
    tokens, drawn = 2 * 30 + 3 * 2, 4 * 2
    wanted = tokens * ((LAYERS - 1) * LAYER + kept) + drawn * (LAYER - kept + VOCABULARY * HIDDEN)
    assert (found.values, found.operation, found.asked) == ("int4", "linear", True)
    assert found.plain == wanted


def test_plain_weights_are_not_unpacked() -> None:
    def nobody(*_: int) -> float:
        raise AssertionError("no product has to be measured")

    assert unpacked_products((step(1, 1),), of(None), nobody, asked=False) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_product_is_measured_as_it_runs_here(deterministic: bool) -> None:
    seconds = product_here(torch.bfloat16, deterministic)
    assert 0 < seconds(1, 16, 16) < seconds(64, 1024, 512)


OUT, WIDTH, VERSION = 24, 40, 130100
PRODUCT = Product("tiny", "o", "linear", OUT, WIDTH)


def proposal(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(56)


def key(rows: int) -> Key:
    return Key("linear", "bfloat16", OUT, WIDTH, rows)


def measured(algorithm: bytes, seconds: float = 1e-6, version: int = VERSION) -> TunedChoice:
    return TunedChoice("cublaslt", {"version": version, "algorithm": algorithm.hex()}, seconds, 1e-3)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ColumnLibrary]:
    """Proposes the algorithms 1, 2 and 3."""
    fake = ColumnLibrary()
    fake.algorithms = 3
    monkeypatch.setattr(cublaslt, "_library", lambda: fake)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: ctypes.c_void_p(1))
    monkeypatch.setattr(cublaslt, "_stream", lambda device: 0)
    monkeypatch.setattr(cublaslt, "supports", lambda x, weight: True)
    monkeypatch.setattr(Product, "weights", lambda self: [torch.randn(OUT, WIDTH).bfloat16() for _ in range(2)])
    cublaslt.product_by.cache_clear()
    yield fake
    cublaslt.product_by.cache_clear()


def clock(monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary, times: dict[bytes | None, float]) -> set[Any]:
    """Seconds by algorithm (None: F.linear); returns what has been timed."""
    timed = set()

    def time_replayed(calls: Sequence[Callable[[], Tensor]], **_: object) -> SimpleNamespace:
        assert len(calls) == 2, "weights that take turns"
        first = calls[0]
        algorithm = None
        if not (isinstance(first, partial) and first.func is F.linear):
            first()
            algorithm = library.multiplied_by[-1]
        timed.add(algorithm)
        return SimpleNamespace(seconds=times[algorithm])

    monkeypatch.setattr(algorithms, "time_replayed", time_replayed)
    return timed


def tuned(
    table: dict[Key, TunedChoice], known: dict[Key, TunedChoice], rows: Sequence[int] = (96,)
) -> dict[int, TunedChoice]:
    return {found.key.rows: found.choice for found in tune_algorithms([PRODUCT], table, known, rows)}


TIMES = {None: 10.0, proposal(1): 10.0, proposal(2): 8.0, proposal(3): 9.0, proposal(7): 7.0}


FAST, SLOW, OTHER = (
    TunedChoice("small M", {}, 8.1, 10.0),
    TunedChoice("small M", {}, 9.0, 10.0),
    TunedChoice("cublas", {}, 8.1, 8.1),
)
KNOWN, STALE = measured(proposal(7)), measured(proposal(7), version=VERSION - 1)
SECOND = TunedChoice("cublaslt", {"version": VERSION, "algorithm": proposal(2).hex()}, 8.0, 10.0)
SEVENTH = TunedChoice("cublaslt", {"version": VERSION, "algorithm": proposal(7).hex()}, 7.0, 10.0)


@pytest.mark.parametrize(
    ("table", "known", "rows", "found"),
    [
        pytest.param({}, {}, (96,), {96: SECOND}, id="the fastest is kept with its version"),
        pytest.param({}, {key(128): KNOWN}, (96,), {96: SEVENTH}, id="what was known is a candidate"),
        pytest.param({}, {key(128): STALE}, (96,), {96: SECOND}, id="in its version"),
        pytest.param({key(96): FAST, key(128): SLOW}, {}, (96, 128), {128: SECOND}, id="what is slower goes"),
        # Fewer rows take a tile no longer; an entry for them would hide it otherwise.
        pytest.param({key(96): FAST}, {}, (80,), {80: FAST}, id="a tile of more rows stays where it is as fast"),
        pytest.param({key(96): SLOW}, {}, (80,), {80: SECOND}, id="and goes where it is slower"),
        pytest.param({key(96): OTHER}, {}, (80,), {80: SECOND}, id="the library may choose worse for fewer"),
    ],
)
def test_what_is_found_beside_the_table(
    table: dict[Key, TunedChoice], known: dict[Key, TunedChoice], rows: tuple[int, ...], found: dict[int, TunedChoice],
    monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary,
) -> None:  # fmt: skip
    timed = clock(monkeypatch, library, TIMES)
    assert tuned(table, known, rows) == found
    assert timed >= {None, *map(proposal, (1, 2, 3))}


def test_less_than_two_percent_is_no_gain(monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary) -> None:
    clock(monkeypatch, library, TIMES | {proposal(2): 9.9, proposal(3): 9.85})
    assert tuned({}, {}) == {96: TunedChoice("cublas", {}, 10.0, 10.0)}


def test_a_weight_that_no_algorithm_would_serve_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary
) -> None:
    """A small one, one of odd sizes, or any on another device: an entry would stand in the way of a tile."""
    timed = clock(monkeypatch, library, TIMES)
    monkeypatch.setattr(cublaslt, "supports", lambda x, weight: weight.shape != (OUT, WIDTH))
    assert tuned({key(96): SLOW}, {}) == {}
    assert not timed


def test_one_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch, library, TIMES)
    right = library.cublasLtMatmul

    def wrong(*arguments: Any) -> int:
        return 0 if bytes(arguments[12]) == proposal(2) else right(*arguments)

    monkeypatch.setattr(library, "cublasLtMatmul", wrong)
    assert tuned({}, {})[96].parameters["algorithm"] == proposal(3).hex()
    assert proposal(2).hex() in capsys.readouterr().err


def test_calls_are_by_the_algorithm_in_the_table(library: ColumnLibrary) -> None:
    weights, x = PRODUCT.weights(), torch.randn(90, WIDTH).bfloat16()
    calls = calls_by_table(PRODUCT, x, weights, {key(96): measured(proposal(7))})
    assert calls is not None
    for call in calls:
        call()
    assert library.multiplied_by == [proposal(7)] * 2
    assert calls_by_table(PRODUCT, x, weights, {key(96): TunedChoice("cublas", {}, 1.0, 1.0)}) is None
    assert calls_by_table(PRODUCT, x[:40], weights, {key(96): measured(proposal(7))}) is None
