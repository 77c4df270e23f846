"""What is derived from the config alone is what steps launch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from strata.engine.ahead.worker import SLOW
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.models.folder import BUILTIN_FOLDER
from strata.models.shapes import SHAPES
from strata.plan.meta_model import find_config, meta_model
from tests.engine.ahead.dry import derived, noted_before, served_beyond

DUMMY = {"load_format": "dummy", "skip_tokenizer_init": True}


@contextmanager
def process() -> Iterator[Callable[..., Any]]:
    """Calls functions in another process, one after the other."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as one:
        yield lambda function, *given: one.submit(function, *given).result()


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable[..., Any]]:
    """In the process that tests share."""
    with process() as call:
        yield call


@pytest.fixture
def alone() -> Iterator[Callable[..., Any]]:
    """In a process of the test's own."""
    with process() as call:
        yield call


def kernel_names(variants: list[str]) -> set[str]:
    return {json.loads(text)["name"].rpartition(".")[2] for text in variants}


@pytest.mark.parametrize(
    ("model", "deterministic"), [("0.6B", False), ("30B-A3B", False), ("V2-Lite", False), ("8B", True)]
)
def test_kernels_that_steps_are_costed_by_are_derived(
    elsewhere: Callable[..., Any], model: str, deterministic: bool
) -> None:
    """Implementations tell what they launch, for `strata graph`: another account of the same."""
    found = kernel_names(elsewhere(derived, model, DUMMY | {"deterministic": deterministic}))
    priced = meta_model(find_config(model), device("h200"), deterministic=deterministic)
    prompts = [Workload((1,) * rows + (new,), (1000,) * rows + (new + 3000,)) for rows in (1, 70) for new in (40, 7000)]
    decodes = [Workload((1,) * rows, (1000,) * rows) for rows in (1, 8, 129, 256)]
    launched = {kernel for workload in (*prompts, *decodes) for kernel in priced.step(workload).kernels}
    ours = {kernel for kernel in launched if not kernel.startswith("(")}
    assert len(ours) > 10
    assert ours <= found


def test_kernels_of_ranks_are_derived_with_their_messages(elsewhere: Callable[..., Any]) -> None:
    # Keys and values of all ranks are written apart from where they are rotated.
    found = kernel_names(elsewhere(derived, "0.6B", DUMMY | {"prefill_context_parallel_size": 2}))
    assert "kv_write_kernel" in found
    found = kernel_names(elsewhere(derived, "0.6B", DUMMY | {"tensor_parallel_size": 2}))
    assert "kv_write_kernel" not in found
    assert {
        "gather_rows_kernel",
        "one_shot_kernel",
        "one_shot_norm_kernel",
        "one_shot_received_norm_kernel",
        "two_shot_kernel",
        "flag_norm_kernel",
        "rms_norm_kernel",
    } <= found


@pytest.mark.parametrize(
    ("model", "ranks", "attends"),
    [
        ("0.6B", 16, {"decode_attention_kernel", "attention_kernel"}),
        ("V2-Lite", 2, {"latent_decode_kernel", "latent_join_kernel", "latent_prompt_kernel"}),
    ],
)
def test_kernels_of_ranks_that_divide_keys_are_derived(
    elsewhere: Callable[..., Any], model: str, ranks: int, attends: set[str]
) -> None:
    options = {"tensor_parallel_size": ranks, "decode_context_parallel_size": 2}
    variants = elsewhere(derived, model, DUMMY | options)
    assert attends | {"pack_heads_kernel", "join_heads_kernel"} <= kernel_names(variants)


def test_what_takes_long_to_compile_is_noted_first(alone: Callable[..., Any]) -> None:
    """Before imports of PyTorch that take half a second."""
    noted = alone(noted_before, "torch._dynamo", "0.6B", DUMMY)
    kernels = [kernel for kernel, _ in noted]
    assert kernels.index("filter_bounds_kernel") == 0
    assert set(kernels) >= SLOW
    assert sum(is_early for _, is_early in noted) >= 0.9 * len(noted)


@pytest.mark.parametrize(
    ("model", "options", "longest"),
    [
        ("0.6B", DUMMY, 1500),
        ("1B", DUMMY | {"max_num_seqs": 40, "max_num_batched_tokens": 3000, "dtype": "float16"}, 2500),
        (str(BUILTIN_FOLDER), DUMMY | {"deterministic": True}, 900),
        ("0.6B", DUMMY | {"tensor_parallel_size": 2, "max_num_seqs": 60, "overlap_tokens": 600}, 900),
        ("0.6B", DUMMY | {"tensor_parallel_size": 16, "decode_context_parallel_size": 2, "max_num_seqs": 60}, 900),
        ("V2-Lite", DUMMY | {"max_num_seqs": 40, "max_num_batched_tokens": 3000}, 2500),
        ("V2-Lite", DUMMY | {"tensor_parallel_size": 4, "decode_context_parallel_size": 4, "max_num_seqs": 60}, 900),
    ],
)
def test_requests_of_all_kinds_launch_nothing_else(
    elsewhere: Callable[..., Any], model: str, options: dict[str, Any], longest: int
) -> None:
    assert elsewhere(served_beyond, model, options, longest) == []


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_layers_that_are_alike_are_left_out(elsewhere: Callable[..., Any], tmp_path: Path, layers: int) -> None:
    """Of a model whose layers have a window and none by turns."""
    told = SHAPES["0.6B"] | {"num_hidden_layers": layers, "use_sliding_window": True, "sliding_window": 100}
    told["layer_types"] = (["full_attention", "sliding_attention"] * 4)[:layers]
    (tmp_path / "config.json").write_text(json.dumps(told))
    options = DUMMY | {"max_model_len": 3000, "max_num_seqs": 40, "max_num_batched_tokens": 3000}
    few = set(elsewhere(derived, str(tmp_path), options))
    assert set(map(window, few)) == ({None, 0} if layers == 1 else {None, 0, 100})
    assert set(elsewhere(derived, str(tmp_path), options, True)) == few


def test_layers_with_experts_and_without(elsewhere: Callable[..., Any], tmp_path: Path) -> None:
    told = SHAPES["30B-A3B"] | {"num_hidden_layers": 6, "mlp_only_layers": [0, 3]}
    (tmp_path / "config.json").write_text(json.dumps(told))
    options = DUMMY | {"max_model_len": 3000, "max_num_seqs": 8, "max_num_batched_tokens": 3000}
    few, whole = (set(elsewhere(derived, str(tmp_path), options, whole)) for whole in (False, True))
    assert few == whole
    assert {"combine_kernel", "dot_kernel"} <= kernel_names(list(few))


def test_layers_that_keep_a_state_of_fixed_size(elsewhere: Callable[..., Any], tmp_path: Path) -> None:
    """Beside one that attends, and with experts in both."""
    told = SHAPES["80B-A3B"] | {"num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 16}
    (tmp_path / "config.json").write_text(json.dumps(told))
    options = DUMMY | {"max_model_len": 600, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    assert elsewhere(served_beyond, str(tmp_path), options, 300) == []


def test_experts_that_move_between_ranks(elsewhere: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["30B-A3B"] | {"num_hidden_layers": 2}))
    options = DUMMY | {"max_model_len": 3000, "max_num_seqs": 8, "max_num_batched_tokens": 3000}
    options |= {"tensor_parallel_size": 2, "enable_expert_parallel": True, "overlap_tokens": 1000}
    stay = kernel_names(elsewhere(derived, str(tmp_path), options))
    options |= {"enable_eplb": True, "num_redundant_experts": 2}
    move = kernel_names(elsewhere(derived, str(tmp_path), options))
    assert {"local_order_kernel", "grouped_kernel", "combine_kernel"} <= stay
    assert move == stay | {"count_choices_kernel"}
    assert elsewhere(served_beyond, str(tmp_path), options, 900) == []


def test_ranks_with_sequences_of_their_own(elsewhere: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["30B-A3B"] | {"num_hidden_layers": 2}))
    options = DUMMY | {"max_model_len": 3000, "max_num_seqs": 8, "max_num_batched_tokens": 3000}
    options |= {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_dp_attention": True}
    found = kernel_names(elsewhere(derived, str(tmp_path), options))
    assert {"local_order_kernel", "grouped_kernel", "combine_kernel", "filter_bounds_kernel"} <= found
    assert {"gather_rows_kernel", "one_shot_kernel"} <= found
    assert not any("in_part" in name for name in found), "each rank has the logits of all ids"
    # Among sixteen ranks rows of a step that is launched go to their experts' ranks alone, and come back as sums.
    options |= {"tensor_parallel_size": 16, "max_model_len": 8192, "max_num_batched_tokens": 8192}
    variants = elsewhere(derived, str(tmp_path), options)
    assert {False, True} == {constant(one, "WEIGHTED") for one in variants if kernel_names([one]) == {"combine_kernel"}}


def constant(variant: str, name: str) -> Any:
    """The value of one for which a kernel is compiled, None if it has none of that name."""
    told = json.loads(variant)
    names = list(told["signature"])
    constants = {names[key[0]]: value for key, value in zip(told["constant_keys"], told["constant_vals"], strict=True)}
    return constants.get(name)


def window(variant: str) -> int | None:
    """That of an attention kernel, 0 for none."""
    found: int | None = constant(variant, "WINDOW")
    return found


def test_the_pages_of_a_machine_do_not_matter(elsewhere: Callable[..., Any]) -> None:
    found = [set(elsewhere(derived, "0.6B", DUMMY | {"num_pages": pages})) for pages in (6001, 1 << 17)]
    assert found[0] == found[1]
