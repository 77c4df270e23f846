"""A rank's part of the experts, and experts with packed weights: which kernels serve them, what they make and cost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from strata.engine.startup.packing import Packing
from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.silu_mul import Clamp
from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits, as_if_on
from strata.kernels.moe import combine as moe_combine
from strata.kernels.moe import experts as moe_experts
from strata.kernels.moe import grouped as moe_grouped
from strata.kernels.moe import local_order
from strata.kernels.moe.experts import (
    CHOICES,
    CONVERTED,
    FROZEN,
    ROUNDED,
    biased_experts,
    by_library,
    by_tiles,
    experts,
    local_experts,
)
from strata.kernels.moe.local_order import local_numbers
from strata.kernels.quant import dequantize
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, pack, unpacked_values
from strata.kernels.quant.schemes import SCHEMES
from tests.kernels.linear.assembly import halves, run

COUNT, HIDDEN, WIDTH = 7, 16, 8
WAYS = {"reference": local_experts.reference, "cpu": local_experts.bind("cpu")}
INVARIANT = local_experts.bind("cpu", deterministic=True)


def inputs(tokens: int, per_token: int, only: int | None = None) -> list[Tensor]:
    """only: the expert that all tokens go to."""
    chosen = torch.rand(tokens, COUNT).argsort(1)[:, :per_token].contiguous()
    if only is not None:
        chosen = torch.full((tokens, 1), only)
    matrices = torch.randn(COUNT, 2 * WIDTH, HIDDEN), torch.randn(COUNT, HIDDEN, WIDTH)
    return [torch.randn(tokens, HIDDEN), torch.rand(chosen.shape), chosen, *matrices]


def parts_of(run: Any, given: list[Tensor], bounds: list[int], slots: list[int], table: Tensor | None) -> list[Tensor]:
    """What each rank makes: rank r holds the slots from bounds[r] to bounds[r + 1], slot s the expert slots[s]."""
    x, weights, chosen, gate_up, down = given
    held_here = [slots[first:end] for first, end in pairwise(bounds)]
    more = () if table is None else (table,)
    return [
        run(x, weights, chosen, gate_up[own], down[own], first, len(slots), *more)
        for first, own in zip(bounds, held_here, strict=False)
    ]


BOUNDS = {"2": [0, 3, 7], "4": [0, 1, 3, 5, 7], "uneven": [0, 4, 5, 6, 7], "1": [0, 7]}


@pytest.mark.parametrize("way", [*WAYS, "invariant"])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize(("tokens", "per_token"), [(1, 1), (6, 2), (33, 4), (0, 2)])
def test_the_sum_over_ranks_is_the_whole(tokens: int, per_token: int, bounds: list[int], way: str) -> None:
    given = inputs(tokens, per_token)
    parts = parts_of(WAYS.get(way, INVARIANT), given, bounds, list(range(COUNT)), None)
    torch.testing.assert_close(sum(parts), experts.reference(*given), rtol=1e-5, atol=1e-4)


# Expert 2 has three copies, expert 5 two: one of each on every rank, and never two.
SLOTS = [0, 2, 5, 1, 2, 3, 4, 2, 5, 6]
PLACES = {0: [0], 1: [3], 2: [1, 4, 7], 3: [5], 4: [6], 5: [2, 8], 6: [9]}


def table_of(period: int) -> Tensor:
    rows = [[PLACES[expert][turn % len(PLACES[expert])] for turn in range(period)] for expert in range(COUNT)]
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("period", [1, 6])
@pytest.mark.parametrize(("tokens", "only"), [(1, None), (33, None), (13, 2), (13, 0)])
def test_one_copy_of_an_expert_computes_a_choice(tokens: int, only: int | None, period: int, way: str) -> None:
    given = inputs(tokens, 3, only)
    parts = parts_of(WAYS[way], given, [0, 3, 6, 10], SLOTS, table_of(period))
    torch.testing.assert_close(sum(parts), experts.reference(*given), rtol=1e-5, atol=1e-4)
    if only == 2 and period == 6:  # the copies take turns
        worked = torch.stack([part.any(1) for part in parts])
        assert worked.sum(1).tolist() == [5, 4, 4]
        assert worked.sum(0).tolist() == [1] * tokens


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_whose_experts_nobody_chose_gives_zeros(way: str) -> None:
    given = inputs(9, 1, only=6)
    first, last = parts_of(WAYS[way], given, [0, 6, 7], list(range(COUNT)), None)
    assert not first.any()
    torch.testing.assert_close(last, experts.reference(*given))


@pytest.mark.parametrize("way", [*WAYS, "invariant"])
def test_padding_goes_to_no_expert(way: str) -> None:
    given = inputs(9, 2)
    mapping = torch.tensor([0, -1, 7, 3, -1, -1, 4, 5, -1], dtype=torch.int32)
    there = mapping >= 0
    run = WAYS.get(way, INVARIANT)
    found = run(*given, 0, COUNT, None, mapping)
    assert not found[~there].any()
    torch.testing.assert_close(found[there], experts.reference(*given)[there], rtol=1e-5, atol=1e-4)
    numbers = local_numbers(torch.tensor([[2, 0], [5, 2]]), 0, 3, None, torch.tensor([4, -1]))
    assert numbers.tolist() == [[2, 0], [-1, -1]]


def test_numbers_of_experts_here_and_elsewhere() -> None:
    chosen = torch.tensor([[2, 0], [5, 2], [2, 6]])
    assert local_numbers(chosen, 2, 3, None).tolist() == [[0, -1], [-1, 0], [0, -1]]
    # Slots of the tokens: 1 and 0, 8 and 4, 7 and 9.
    assert local_numbers(chosen, 3, 5, table_of(6)).tolist() == [[-1, -1], [-1, 1], [4, -1]]
    assert chosen.tolist() == [[2, 0], [5, 2], [2, 6]]


def test_deterministic_mode_takes_no_copies_that_tokens_share_by_their_place() -> None:
    given = inputs(40, 2)
    whole = INVARIANT(*given[:3], *(one[2:5] for one in given[3:]), 2, COUNT)
    for row in (0, 17, 39):
        alone = [one[row : row + 1] for one in given[:3]]
        part = INVARIANT(*alone, *(one[2:5] for one in given[3:]), 2, COUNT)
        assert torch.equal(part, whole[row : row + 1])
    with pytest.raises(NotImplementedError, match="local_experts"):
        INVARIANT(*given, 0, COUNT, table_of(6))


def test_costs_are_those_counted_by_hand() -> None:
    given = [one.to(torch.bfloat16) if one.is_floating_point() else one for one in inputs(6, 2)]
    x, weights, chosen, gate_up, down = given
    weights = weights.float()
    # 3 of 7 experts: of 12 choices 36 / 7 are this rank's. A choice costs 3 products of 16 * 8, 5 * 8 and 2 * 16.
    flops = round(36 / 7 * (6 * 16 * 8 + 40 + 32))
    # A token misses an expert with probability 5 / 7; an expert has 3 matrices of 16 * 8, 768 bytes.
    used = round(3 * (1 - (5 / 7) ** 6) * 768)
    step = Workload((6,), (6,))
    moved = 6 * 16 * 2
    found = local_experts.cost(x, weights, chosen, gate_up[:3], down[:3], 0, COUNT, workload=step)
    assert found == Cost(flops, moved + 48 + 96 + used, moved, used)
    # Ten slots, of which it has 3; each choice looks its slot up.
    flops, used = round(3.6 * (6 * 16 * 8 + 40 + 32)), round(3 * (1 - 0.8**6) * 768)
    found = local_experts.cost(x, weights, chosen, gate_up[:3], down[:3], 0, 10, table_of(6), workload=step)
    assert found == Cost(flops, moved + 48 + 96 + 48 + used, moved, used)
    assert local_experts.meta(x, weights, chosen, gate_up[:3], down[:3], 0, COUNT).shape == (6, 16)
    # All of them on one rank cost what they cost without ranks.
    whole = local_experts.cost(x, weights, chosen, gate_up, down, 0, COUNT, workload=step)
    assert whole == experts.cost(x, weights, chosen, gate_up, down, workload=step)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 6), (torch.bfloat16, 5000), (torch.float16, 5000)])
def test_cuda_asks_the_host_for_nothing(
    dtype: torch.dtype, tokens: int, placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As capturing a step in a CUDA graph demands: a tensor without values cannot tell the host any."""
    pytest.importorskip("triton")
    x, weights, chosen, gate_up, down = inputs(tokens, 2)
    given = [x.to(dtype), weights, chosen, gate_up[:3].to(dtype), down[:3].to(dtype), 0, 10 if placed else COUNT]
    given += [table_of(6)] if placed else []
    run = local_experts.bind("cuda").choose(*given)
    is_long = chosen.numel() > thresholds_of(MEASURED).sorted_choices
    assert run.name == ("grouped" if is_long and dtype == torch.bfloat16 else "triton tiles")
    launched = run.launches(*local_experts.call_args(*given))
    assert ("local_order_kernel" in launched) != is_long
    assert ("local_order_sums_kernel" in launched) == is_long

    class Launched:
        """Stands for a kernel, which writes into what it was given."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert all(type(size) is int for size in grid)
            return lambda *args, **constants: None

    for module, kernel in (
        (local_order, "local_order_kernel"),
        (local_order, "local_order_counts_kernel"),
        (local_order, "local_order_sums_kernel"),
        (local_order, "local_order_places_kernel"),
        (moe_grouped, "grouped_kernel"),
    ):
        monkeypatch.setattr(module, kernel, Launched())
    monkeypatch.setattr(local_order, "implementations_for", lambda device: "cuda")
    monkeypatch.setattr(moe_combine, "combine_kernel", Launched())
    monkeypatch.setattr(DeviceLimits, "of", lambda device: DeviceLimits("any", (9, 0), SHARED_BYTES, 132))
    monkeypatch.setattr(moe_experts, "silu_mul", torch.mul)
    with FakeTensorMode() as mode, torch.inference_mode():
        fake = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in given]
        assert run.run(*local_experts.call_args(*fake)).shape == (tokens, HIDDEN)
    assert run.run in (by_library, by_tiles)


HOPPER = DeviceLimits("NVIDIA H200", (9, 0), SHARED_BYTES, 132)
AMPERE = DeviceLimits("NVIDIA A100", (8, 0), SHARED_BYTES, 108)
EXPERTS, PER_TOKEN, COLUMNS, INNER = 4, 2, 256, 128


def placed(scheme: Scheme, tokens: int, limits: DeviceLimits) -> list[Any]:
    """The arguments of `experts` on a device, without memory."""

    def on(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return as_if_on(limits, torch.empty(shape, dtype=dtype, device="meta"))

    def packed(out: int, width: int) -> QuantizedWeight:
        one = pack(torch.ones(EXPERTS, out, width), scheme).to("meta")
        return one.with_tensors({field: as_if_on(limits, tensor) for field, tensor in one.tensors.items()})

    x, chosen = on(tokens, COLUMNS, dtype=torch.bfloat16), on(tokens, PER_TOKEN, dtype=torch.int64)
    return [x, on(tokens, PER_TOKEN), chosen, packed(2 * INNER, COLUMNS), packed(COLUMNS, INNER)]


@pytest.mark.parametrize("name", SCHEMES)
def test_each_scheme_has_kernels_for_all_three_operations(name: str) -> None:
    pytest.importorskip("triton")
    for tokens in (1, 2, 4, 5):
        given, way = placed(SCHEMES[name], tokens, HOPPER), CONVERTED
        if tokens == 1 and name in ("fp8", "int8", "fp8_weights", "int8_weights"):
            way = CHOICES
        if tokens == 5 and name in ("fp8", "fp8_block", "int8"):
            way = ROUNDED  # of more than two rows an expert
        biases = [as_if_on(HOPPER, torch.empty(EXPERTS, size, device="meta")) for size in (2 * INNER, COLUMNS)]
        assert experts.bind("cuda", packed=True).choose(*given).name == way
        assert biased_experts.bind("cuda", packed=True).choose(*given, *biases, Clamp(1.7, 7.0)).name == way
        held = local_experts.bind("cuda", packed=True).choose(*given, 0, EXPERTS)
        assert held.name == (CONVERTED if way == CHOICES else way)


def test_what_kernels_cannot_read_is_served_in_floats() -> None:
    """8-bit floats on Ampere, groups that fit no step, and stacks whose experts are no neighbours."""
    pytest.importorskip("triton")
    bound = experts.bind("cuda", packed=True)
    assert bound.choose(*placed(SCHEMES["int8"], 1, AMPERE)).name == CHOICES
    assert bound.choose(*placed(SCHEMES["int8"], 64, AMPERE)).name == CONVERTED
    assert bound.choose(*placed(SCHEMES["fp8"], 1, AMPERE)).name == FROZEN
    assert bound.choose(*placed(Scheme("e4m3", 1, 96, "block"), 64, HOPPER)).name == CONVERTED
    assert bound.choose(*placed(Scheme("int4", 1, 24), 1, HOPPER)).name == FROZEN
    assert bound.choose(*placed(Scheme("e2m1", 1, 2), 1, HOPPER)).name == FROZEN
    x, weights, chosen, gate_up, down = placed(SCHEMES["int8"], 1, HOPPER)
    apart = down._replace(values=as_if_on(HOPPER, torch.empty(EXPERTS, 2 * COLUMNS, INNER, device="meta")[:, ::2]))
    assert bound.choose(x, weights, chosen, gate_up, apart).name == FROZEN
    biases = [as_if_on(HOPPER, torch.empty(EXPERTS, 2 * size, device="meta")[:, ::2]) for size in (2 * INNER, COLUMNS)]
    given = x, weights, chosen, gate_up, down, *biases, Clamp(1.7, 7.0)
    assert biased_experts.bind("cuda", packed=True).choose(*given).name == FROZEN
    assert bound.choose(*placed(Scheme("int8", 0, 0), 1, HOPPER)).name == CONVERTED


@pytest.mark.parametrize(("name", "width"), [("mxfp4", 32), ("nvfp4", 16)])
def test_experts_as_wide_as_a_group_have_kernels(name: str, width: int) -> None:
    """As many ranks may leave them: all columns share a scale."""
    pytest.importorskip("triton")
    x, weights, chosen, gate_up, _ = placed(SCHEMES[name], 4, HOPPER)
    down = pack(torch.ones(EXPERTS, COLUMNS, width), SCHEMES[name])
    fields = {field: as_if_on(HOPPER, tensor.to("meta")) for field, tensor in down.tensors.items()}
    given = x, weights, chosen, gate_up, down.with_tensors(fields)
    assert experts.bind("cuda", packed=True).choose(*given).name == CONVERTED


def test_launches_are_told() -> None:
    pytest.importorskip("triton")
    given = placed(SCHEMES["int4"], 4, HOPPER)
    ordered = ("local_order_kernel", "quantized_grouped_kernel", "quantized_grouped_kernel", "combine_kernel")
    assert experts.bind("cuda", packed=True).launches(*given) == ordered
    alone = experts.bind("cuda", packed=True).launches(*placed(SCHEMES["fp8"], 1, HOPPER))
    assert alone == ("choice_gate_kernel", "choice_sum_kernel")
    in_8_bits = experts.bind("cuda", packed=True).launches(*placed(SCHEMES["fp8"], 64, HOPPER))
    assert in_8_bits == (ordered[0], *("round_rows_kernel", "grouped_kernel") * 2, ordered[3])
    order = as_if_on(HOPPER, torch.empty(INNER, dtype=torch.int32, device="meta"))
    given[4] = given[4]._replace(order=order)
    assert experts.bind("cuda", packed=True).launches(*given) == (*ordered[:2], "(ATen)", *ordered[2:])


def test_a_start_on_a_gpu_takes_packed_experts_but_deterministic_ones() -> None:
    packing = Packing({}, {}, (experts, biased_experts, local_experts), "mxfp4")
    packing.check_kernels("cuda", deterministic=False)
    with pytest.raises(ValueError, match="packed as mxfp4: experts has no deterministic kernel for them on cuda yet"):
        packing.check_kernels("cuda", deterministic=True)


def test_costs_by_hand() -> None:
    """Of one token, which reads two experts of four; values of 8 and of 4 bits, and float32 scales."""
    x = torch.zeros(1, COLUMNS, dtype=torch.bfloat16)
    weights, chosen = torch.zeros(1, PER_TOKEN), torch.tensor([[0, 1]])
    for name, expert in (
        ("fp8", (2 * INNER * COLUMNS + COLUMNS * INNER) + 4 * (2 * INNER + COLUMNS)),
        ("int4", (2 * INNER * COLUMNS + COLUMNS * INNER) // 2 + 4 * (2 * INNER * 2 + COLUMNS)),
    ):
        gate_up = pack(torch.ones(EXPERTS, 2 * INNER, COLUMNS), SCHEMES[name])
        down = pack(torch.ones(EXPERTS, COLUMNS, INNER), SCHEMES[name])
        cost = experts.cost(x, weights, chosen, gate_up, down, workload=Workload((1,), (1,)))
        flops = 2 * (6 * INNER * COLUMNS + 5 * INNER + 2 * COLUMNS)
        read = 2 * COLUMNS + 4 * PER_TOKEN + 8 * PER_TOKEN + 2 * expert
        assert cost == Cost(flops, read, 2 * COLUMNS, 2 * expert)


def test_assembly_scales_every_byte() -> None:
    """Bytes in pairs of one scale each; the compiler gives each byte its own register."""
    pytest.importorskip("triton")
    text = dequantize.SCALED_E2M1_ASSEMBLY.value
    exponents = torch.arange(256).view(128, 2) % 200 + 20
    words = torch.arange(512).view(128, 4).to(torch.uint8)
    exact = unpacked_values(QuantizedWeight.of(Scheme("e2m1", 1, 0), words, torch.ones(128, 1)))
    wanted = exact * torch.ldexp(torch.ones(128, 2), exponents - 127).repeat_interleave(4, 1)
    for word, scales, row in zip(words.tolist(), exponents.tolist(), wanted.tolist(), strict=True):
        operands = [exponent * 0x800080 for exponent in scales for _ in range(2)]
        results = run(text, int.from_bytes(bytes(word), "little"), 4, *operands)
        found = [number for result in results for number in halves(result)]
        assert [found[half * 4 + place] for place in range(4) for half in range(2)] == row


def test_scratch_by_hand() -> None:
    """The order's numbers of 8 bytes, ends of 4, what is gated and what comes out in 2, in 8 bits also both inputs."""
    pytest.importorskip("triton")
    alone = experts.bind("cuda", packed=True).scratch(*placed(SCHEMES["fp8"], 1, HOPPER))
    assert alone == 2 * PER_TOKEN * INNER
    for tokens, name, rounded in ((3, "fp8", 0), (64, "fp8", 64 * (COLUMNS + 4) + 128 * (INNER + 4))):
        rows, given = tokens * PER_TOKEN, placed(SCHEMES[name], tokens, HOPPER)
        found = experts.bind("cuda", packed=True).scratch(*given)
        assert (
            found
            == 16 * rows + 4 * EXPERTS + 2 * rows * COLUMNS + max(0, 2 * rows * INNER - 2 * tokens * COLUMNS) + rounded
        )
