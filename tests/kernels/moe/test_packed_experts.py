"""Which kernels multiply by packed experts on which device, what they cost, and the assembly that scales values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strata.engine.startup.packing import Packing
from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.clamped_swiglu import Clamp
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits, as_if_on
from strata.kernels.moe.experts import CHOICES, CONVERTED, FROZEN, ROUNDED, biased_experts, experts, local_experts
from strata.kernels.quant import dequantize
from strata.kernels.quant.packed import PackedWeight, Scheme, pack, unpacked_values
from strata.kernels.quant.schemes import SCHEMES
from tests.kernels.linear.assembly import halves, run

HOPPER = DeviceLimits("NVIDIA H200", (9, 0), SHARED_BYTES, 132)
AMPERE = DeviceLimits("NVIDIA A100", (8, 0), SHARED_BYTES, 108)
COUNT, PER_TOKEN, HIDDEN, WIDTH = 4, 2, 256, 128


def placed(scheme: Scheme, tokens: int, limits: DeviceLimits) -> list[Any]:
    """The arguments of `experts` on a device, without memory."""

    def on(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return as_if_on(limits, torch.empty(shape, dtype=dtype, device="meta"))

    def packed(out: int, width: int) -> PackedWeight:
        one = pack(torch.ones(COUNT, out, width), scheme).to("meta")
        return one.with_tensors({field: as_if_on(limits, tensor) for field, tensor in one.tensors.items()})

    x, chosen = on(tokens, HIDDEN, dtype=torch.bfloat16), on(tokens, PER_TOKEN, dtype=torch.int64)
    return [x, on(tokens, PER_TOKEN), chosen, packed(2 * WIDTH, HIDDEN), packed(HIDDEN, WIDTH)]


@pytest.mark.parametrize("name", SCHEMES)
def test_each_scheme_has_kernels_for_all_three_operations(name: str) -> None:
    pytest.importorskip("triton")
    for tokens in (1, 2, 4, 5):
        given, way = placed(SCHEMES[name], tokens, HOPPER), CONVERTED
        if tokens == 1 and name in ("fp8", "int8", "fp8_weights", "int8_weights"):
            way = CHOICES
        if tokens == 5 and name in ("fp8", "fp8_block", "int8"):
            way = ROUNDED  # of more than two rows an expert
        biases = [as_if_on(HOPPER, torch.empty(COUNT, size, device="meta")) for size in (2 * WIDTH, HIDDEN)]
        assert experts.bind("cuda", packed=True).choose(*given).name == way
        assert biased_experts.bind("cuda", packed=True).choose(*given, *biases, Clamp(1.7, 7.0)).name == way
        held = local_experts.bind("cuda", packed=True).choose(*given, 0, COUNT)
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
    apart = down._replace(values=as_if_on(HOPPER, torch.empty(COUNT, 2 * HIDDEN, WIDTH, device="meta")[:, ::2]))
    assert bound.choose(x, weights, chosen, gate_up, apart).name == FROZEN
    biases = [as_if_on(HOPPER, torch.empty(COUNT, 2 * size, device="meta")[:, ::2]) for size in (2 * WIDTH, HIDDEN)]
    given = x, weights, chosen, gate_up, down, *biases, Clamp(1.7, 7.0)
    assert biased_experts.bind("cuda", packed=True).choose(*given).name == FROZEN
    assert bound.choose(*placed(Scheme("int8", 0, 0), 1, HOPPER)).name == CONVERTED


@pytest.mark.parametrize(("name", "width"), [("mxfp4", 32), ("nvfp4", 16)])
def test_experts_as_wide_as_a_group_have_kernels(name: str, width: int) -> None:
    """As many ranks may leave them: all columns share a scale."""
    pytest.importorskip("triton")
    x, weights, chosen, gate_up, _ = placed(SCHEMES[name], 4, HOPPER)
    down = pack(torch.ones(COUNT, HIDDEN, width), SCHEMES[name])
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
    order = as_if_on(HOPPER, torch.empty(WIDTH, dtype=torch.int32, device="meta"))
    given[4] = given[4]._replace(order=order)
    assert experts.bind("cuda", packed=True).launches(*given) == (*ordered[:2], "(ATen)", *ordered[2:])


def test_a_start_on_a_gpu_takes_packed_experts_but_deterministic_ones() -> None:
    packing = Packing({}, {}, (experts, biased_experts, local_experts), "mxfp4")
    packing.check_kernels("cuda", deterministic=False)
    with pytest.raises(ValueError, match="packed as mxfp4: experts has no deterministic kernel for them on cuda yet"):
        packing.check_kernels("cuda", deterministic=True)


def test_costs_by_hand() -> None:
    """Of one token, which reads two experts of four; values of 8 and of 4 bits, and float32 scales."""
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    weights, chosen = torch.zeros(1, PER_TOKEN), torch.tensor([[0, 1]])
    for name, expert in (
        ("fp8", (2 * WIDTH * HIDDEN + HIDDEN * WIDTH) + 4 * (2 * WIDTH + HIDDEN)),
        ("int4", (2 * WIDTH * HIDDEN + HIDDEN * WIDTH) // 2 + 4 * (2 * WIDTH * 2 + HIDDEN)),
    ):
        gate_up = pack(torch.ones(COUNT, 2 * WIDTH, HIDDEN), SCHEMES[name])
        down = pack(torch.ones(COUNT, HIDDEN, WIDTH), SCHEMES[name])
        cost = experts.cost(x, weights, chosen, gate_up, down, workload=Workload((1,), (1,)))
        flops = 2 * (6 * WIDTH * HIDDEN + 5 * WIDTH + 2 * HIDDEN)
        read = 2 * HIDDEN + 4 * PER_TOKEN + 8 * PER_TOKEN + 2 * expert
        assert cost == Cost(flops, read, 2 * HIDDEN, 2 * expert)


def test_assembly_scales_every_byte() -> None:
    """Bytes in pairs of one scale each; the compiler gives each byte its own register."""
    pytest.importorskip("triton")
    text = dequantize.SCALED_E2M1_ASSEMBLY.value
    exponents = torch.arange(256).view(128, 2) % 200 + 20
    words = torch.arange(512).view(128, 4).to(torch.uint8)
    exact = unpacked_values(PackedWeight.of(Scheme("e2m1", 1, 0), words, torch.ones(128, 1)))
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
    assert alone == 2 * PER_TOKEN * WIDTH
    for tokens, name, rounded in ((3, "fp8", 0), (64, "fp8", 64 * (HIDDEN + 4) + 128 * (WIDTH + 4))):
        rows, given = tokens * PER_TOKEN, placed(SCHEMES[name], tokens, HOPPER)
        found = experts.bind("cuda", packed=True).scratch(*given)
        assert (
            found
            == 16 * rows + 4 * COUNT + 2 * rows * HIDDEN + max(0, 2 * rows * WIDTH - 2 * tokens * HIDDEN) + rounded
        )
