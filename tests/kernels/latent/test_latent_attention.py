"""Latent attention: the same by keys and values of each head and in the space of the latent, however it is run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.spec import Sequences
from strata.kernels.latent import cpu as latent_cpu
from strata.kernels.latent.attention import ABSORBED, PROMPTS_EXPANDED, latent_attention
from strata.kernels.latent.dcp import absorb_queries, dcp_latent_attention, expand_values
from strata.kernels.latent.forms import Dims, expanded
from strata.kernels.rotary.rope import rope_angles
from strata.kernels.state.dcp_shard import DcpShard
from strata.kernels.state.latent_write import latent_write
from tests.kernels.launches.noted import empty as meta

from .cases import SPEC, Call, by_ranks, make_call, with_parts

DIMS = Dims(heads=5, nope=10, rope=6, rank=24, value=14)
WIDE_VALUES = Dims(heads=3, nope=4, rope=2, rank=7, value=9)
# Decodes, a piece behind long rows, for which queries are absorbed, and pieces for which they are not.
STEP = (1, 3, 1, 29, 11), (1, 90, 33, 29, 40)


def in_space_of_latent(call: Call) -> Tensor:
    """The oracle in float64: scores and sums over whole rows, as section 2.1.2 of DeepSeek-V2 has them."""
    q, row, weight, batch, spec = call
    dims, pages = Dims.of(q, row, weight), batch.pages
    assert pages is not None
    q, weight = q.double(), weight.double().view(dims.heads, -1, dims.rank)
    found = []
    bounds = batch.offsets.tolist()
    for s, length in enumerate(pages.lengths.tolist()):
        rows = pages.keys[0][pages.tables[s].long()].flatten(0, 2)[:length].double()
        for at, token in enumerate(range(bounds[s], bounds[s + 1]), length - (bounds[s + 1] - bounds[s])):
            for head, own in enumerate(weight):
                query = torch.cat((own[: dims.nope].T @ q[token, head, : dims.nope], q[token, head, dims.nope :]))
                share = torch.softmax(rows[: at + 1] @ query * spec.scale, 0)
                found.append(own[dims.nope :] @ (share @ rows[: at + 1, : dims.rank]))
    return torch.stack(found).view(len(q), dims.heads, dims.value)


@pytest.mark.parametrize("dims", [DIMS, WIDE_VALUES])
def test_every_implementation_over_pages_gives_what_the_latents_say(dims: Dims) -> None:
    absorbed = [dims.absorbs(new, total) for new, total in zip(*STEP, strict=True)]
    assert any(absorbed)
    assert not all(absorbed)
    call = make_call(dims, *STEP)
    exact = in_space_of_latent(call)
    assert (latent_attention.reference(*call) - exact).abs().max() < 1e-5
    for deterministic in (False, True):
        bound = latent_attention.bind("cpu", deterministic=deterministic)
        assert (bound(*call) - exact).abs().max() < 1e-5


def test_heads_of_long_sequences_are_expanded_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(DIMS, *STEP)
    monkeypatch.setattr(latent_cpu, "EXPANDED_BYTES", 2 * 40 * (10 + 6 + 14) * 4)  # of the longest two heads
    assert (latent_attention.bind("cpu")(*call) - in_space_of_latent(call)).abs().max() < 1e-5


def test_in_bfloat16_it_is_near() -> None:
    call = make_call(DIMS, *STEP, dtype=torch.bfloat16)
    exact = in_space_of_latent(call)
    for deterministic in (False, True):
        found = latent_attention.bind("cpu", deterministic=deterministic)(*call)
        assert found.dtype == torch.bfloat16
        assert (found - exact).abs().max() < 0.05


@pytest.mark.parametrize("dims", [DIMS, WIDE_VALUES])
def test_without_pages_sequences_are_whole(dims: Dims) -> None:
    q, row, weight, batch, spec = make_call(dims, (1, 5, 17), (1, 5, 17))
    exact = in_space_of_latent((q, row, weight, batch, spec))
    packed = batch._replace(pages=None)
    for deterministic in (False, True):
        bound = latent_attention.bind("cpu", deterministic=deterministic)
        assert (bound(q, row, weight, packed, spec) - exact).abs().max() < 1e-5


def test_bits_depend_on_the_sequence_alone() -> None:
    bound = latent_attention.bind("cpu", deterministic=True)
    q, row, weight, batch, spec = make_call(DIMS, (45, 9), (45, 140))
    pages = batch.pages
    assert pages is not None
    wanted = bound(q, row, weight, batch, spec)
    for first, last in ((0, 7), (7, 45), (44, 45)):
        alone = replace(pages, tables=pages.tables[:1], lengths=torch.tensor([last], dtype=torch.int32))
        step = Sequences(torch.tensor([0, last - first], dtype=torch.int32), last - first, alone)
        assert torch.equal(bound(q[first:last], row[first:last], weight, step, spec), wanted[first:last])


def test_gradients_are_those_of_finite_differences() -> None:
    dims = Dims(2, 3, 2, 4, 2)
    q, row, weight, batch, spec = make_call(dims, (3, 2), (3, 2), torch.float64)
    leaves = [x.detach().requires_grad_() for x in (q, row, weight)]
    packed = batch._replace(pages=None)
    assert torch.autograd.gradcheck(lambda *given: latent_attention(*given, packed, spec), leaves)
    angles = rope_angles(torch.tensor([2, 0, 1], dtype=torch.int32), torch.randn(4, 4, dtype=torch.float64))
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 9), (5,))]
    assert torch.autograd.gradcheck(lambda x, w: latent_write(x, w, 1e-6, *angles, None, 0, True), leaves)


def test_costs_are_the_hand_counts() -> None:
    """DeepSeek-V2-Lite's sizes: two decodes over 1,000 rows, and a prompt of 512."""
    heads, rank, width, pages = 16, 512, 576, make_call(DIMS, (1,), (1,))[3].pages
    assert pages is not None
    batch = Sequences(meta(4), 512, replace(pages, keys=(meta(99, 16, 1, width),)))
    call = meta(514, heads, 192), meta(514, width), meta(heads * 256, rank), batch, SPEC
    products = 2 * heads * rank * 256
    decode = products + 2 * heads * 1000 * (rank + 64 + rank)
    prompt = 512 * products + 2 * heads * (512 * 513 // 2) * (192 + 128)
    rows = 2 * (1000 + 1000 + 512) * width
    weight = 2 * heads * 256 * rank
    expected = Cost(
        2 * decode + prompt,
        read=2 * 514 * heads * 192 + rows + weight,
        written=2 * 514 * heads * 128,
        weights=weight,
        cached=rows,
    )
    assert latent_attention.cost(*call, workload=Workload((1, 1, 512), (1000, 1000, 512))) == expected
    assert latent_attention.meta(*call).shape == (514, heads, 128)
    angles = meta(514, 1, 64, dtype=torch.float32)
    written = latent_write.cost(
        meta(514, width), meta(rank), 1e-6, angles, angles, batch.pages, 0, True, workload=Workload((514,), (514,))
    )
    read = 2 * 514 * width + 2 * rank + 514 * 64 * 4 + pages.slot_mapping.nbytes
    assert written == Cost(514 * (4 * rank + 3 * 64), read, 2 * 2 * 514 * width, 2 * rank)


LITE = Dims(heads=16, nope=128, rope=64, rank=512, value=128)


def of_lite(new: tuple[int, ...], total: tuple[int, ...], decodes: int, *, captured: bool) -> Call:
    return with_parts(make_call(LITE, new, total, torch.bfloat16), decodes, captured=captured)


def test_prompts_are_expanded_where_the_kernel_fits_their_heads() -> None:
    pytest.importorskip("triton")
    bound = latent_attention.bind("cuda")
    prompts = make_call(LITE, (3, 1), (3, 9), torch.bfloat16)
    assert bound.choose(*prompts).name == PROMPTS_EXPANDED
    assert bound.choose(*make_call(LITE, (3, 1), (3, 9), torch.float16)).name == PROMPTS_EXPANDED
    assert bound.choose(*make_call(LITE, (1, 1), (3, 9), torch.bfloat16)).name == ABSORBED
    assert bound.choose(*make_call(LITE, (3, 1), (3, 9), torch.float32)).name == ABSORBED
    assert bound.choose(*make_call(LITE._replace(value=64), (3, 1), (3, 9), torch.bfloat16)).name == ABSORBED
    assert latent_attention.bind("cuda", deterministic=True).choose(*prompts).name == "triton fixed"


def test_what_begins_and_what_the_host_knows_decide_what_is_launched() -> None:
    """Scratch by hand: 8 tokens of 16 heads. Latents of absorbed queries and of what they find, 512 wide, and splits of
    decodes; or, once these are gone, keys and values, 256 wide."""
    pytest.importorskip("triton")
    bound = latent_attention.bind("cuda")
    decode, prompt = ("latent_decode_kernel", "latent_join_kernel"), "latent_prompt_kernel"
    expanded = "(cuBLAS)", "expanded_prompt_kernel"
    alone = of_lite((5, 3), (5, 3), 0, captured=False)
    assert bound.launches(*alone) == expanded
    assert bound.scratch(*alone) == 8 * 16 * 256 * 2
    beside = of_lite((1, 4, 3), (9, 4, 3), 1, captured=False)
    assert bound.launches(*beside) == ("(cuBLAS)", *decode, "(cuBLAS)", *expanded)
    one = 2 * 16 * 512 * 2 + 4 * 16 * 513  # of tables of 12 keys, which are one split
    assert bound.scratch(*beside) == max(one, 8 * 16 * 256 * 2)
    after = of_lite((1, 4, 3), (9, 5, 3), 1, captured=False)
    assert bound.launches(*after) == ("(cuBLAS)", *decode, prompt, "(cuBLAS)", *expanded)
    assert bound.scratch(*after) == 8 * 2 * 16 * 512 * 2 + 4 * 16 * 513
    captured = of_lite((1, 4, 3), (9, 4, 3), 1, captured=True)
    assert bound.launches(*captured) == ("(cuBLAS)", *decode, prompt, "(cuBLAS)", *expanded)
    assert bound.scratch(*captured) == 8 * 2 * 16 * 512 * 2 + 3 * 4 * 16 * 513


@pytest.mark.parametrize("dims", [DIMS, WIDE_VALUES])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_that_keep_some_rows_find_the_same_together(dims: Dims, ranks: int) -> None:
    call = make_call(dims, *STEP)
    exact = in_space_of_latent(call)
    for attend in (dcp_latent_attention.reference, dcp_latent_attention.bind("cpu")):
        assert (by_ranks(call, ranks, attend) - exact).abs().max() < 1e-5


def test_costs_of_ranks_that_keep_some_rows_by_hand() -> None:
    """Of V2-Lite on rank 1 of 4: 2 heads of its own and 8 in all; two decodes of 1000 and 6 tokens, of which 250 and 2
    are here."""
    rank, width, workload = 512, 576, Workload((1, 1), (1000, 6))
    q, weight = torch.empty(2, 2, 192, dtype=torch.bfloat16), torch.empty(2 * 256, rank, dtype=torch.bfloat16)
    q, weight = q.to("meta"), weight.to("meta")
    queries = absorb_queries.meta(q, weight, 128)
    half = 2 * 2 * 128 * rank
    assert queries.shape == (2, 2, width)
    absorbed = absorb_queries.cost(q, weight, 128, workload=workload)
    assert absorbed == Cost(2 * half, 2 * 2 * 2 * 192 + half, 2 * 2 * 2 * width, weights=half)
    found = torch.empty(2, 2, rank, dtype=torch.bfloat16, device="meta")
    values = expand_values.cost(found, weight, 128, workload=workload)
    assert values == Cost(2 * half, 2 * 2 * 2 * rank + half, 2 * 2 * 2 * 128, weights=half)
    batch = make_call(Dims(2, 128, 64, rank, 128), (1, 1), (1000, 6), torch.bfloat16)[3]
    all_queries, row = (torch.empty(2, *shape, dtype=torch.bfloat16) for shape in ((8, width), (width,)))
    kept = DcpShard(4, 1)
    attended = dcp_latent_attention.cost(all_queries, row, batch, SPEC, kept, rank, workload=workload)
    rows = (250 + 2) * width * 2
    flops = 2 * 8 * (width + rank) * (250 + 2)
    assert attended == Cost(flops, 2 * 2 * 8 * width + rows, 4 * 2 * 8 * (rank + 1), cached=rows)


def test_rows_are_written_where_they_stay() -> None:
    call = make_call(DIMS, (4, 3), (4, 9))
    pages = call[3].pages
    assert pages is not None
    slots = pages.slot_mapping.clone()
    slots[1] = -1
    angles = rope_angles(torch.arange(7, dtype=torch.int32), torch.randn(9, 6))
    product, weight = torch.randn(7, 30), torch.randn(24)
    for written in (latent_write.reference, latent_write.bind("cpu", deterministic=True)):
        own = replace(pages, keys=(torch.zeros_like(pages.keys[0]),), slot_mapping=slots)
        row = written(product, weight, 1e-6, *angles, own, 0, True)
        pool = own.keys[0].flatten(0, 2)
        assert torch.equal(pool[slots[slots >= 0].long()], row[slots >= 0])
        assert int((pool != 0).any(1).sum()) == 6
        # Neighbours are the coordinates of a rotation: their length stays.
        pairs, turned = product[:, 24:].unflatten(1, (3, 2)), row[:, 24:].unflatten(1, (2, 3))
        table = torch.cat((angles[0][:, 0, :3], angles[1][:, 0, 3:]), 1).unflatten(1, (2, 3))
        length = pairs.norm(dim=2) * table.norm(dim=1)
        assert torch.allclose(turned.norm(dim=1), length, atol=1e-5)


def test_keys_of_all_heads_end_alike() -> None:
    q, row, weight, _, _ = make_call(DIMS, (6,), (6,))
    keys, values = expanded(row, weight, Dims.of(q, row, weight))
    assert torch.equal(keys[:, 0, 10:], row[:, 24:])
    assert torch.equal(keys[:, 4, 10:], row[:, 24:])
    assert values.shape == (6, 5, 14)
