"""Attention of decodes over chosen pages on CUDA: bounds, what is chosen by them, and every row for what is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.kernels.attention.sparse import decodes
from strata.kernels.attention.sparse.page_choice import PageChoice, page_scores, write_bounds
from strata.kernels.attention.spec import SparseCall
from strata.kernels.state.paged import PagedKV
from tests.gpu.kernels.test_attention_mixed_gpu import PAGE, STEPS, arguments, as_captured, assert_close, padded
from tests.gpu.kernels.test_attention_mixed_gpu import exact as exact_over_all
from tests.gpu.tensors import captured
from tests.models.checkpoints import FAMILY_CONFIGS, make_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

CHOICE = PageChoice(9)
# With sequences of as many pages as are chosen, of one more, and of one key.
DECODES = [(5, 1), (900, 1), (143, 1), (144, 1), (9221, 1), (0, 1)]
MIXED = {name: STEPS[name] for name in ("everything", "only decodes and short prompts", "fresh alike")}
SHAPES = [(32, 8, 128), (14, 2, 64), (6, 6, 80), (16, 1, 256)]


def with_bounds(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """With the bounds of what was written before this step, by the reference."""
    *vectors, batch, spec = given
    pages = batch.pages
    bounds = torch.full((len(pages.keys[0]), 2, *pages.keys[0].shape[2:]), torch.nan, device="cuda").bfloat16()
    held = replace(pages, bounds=(bounds,))
    before = replace(held, lengths=pages.lengths - batch.offsets.diff())
    write_bounds(before, torch.cat((batch.offsets[:1], before.lengths.cumsum(0))).int(), 0)
    return *vectors, batch._replace(pages=held), spec


def decodes_of(given: tuple[Any, ...]) -> int:
    count: int = given[3].pages.parts.decodes
    return count


def chosen(given: tuple[Any, ...]) -> PagedKV:
    """What the decodes of a step see whose bounds have been written."""
    q, _, _, batch, spec = given
    rows = slice(0, decodes_of(given))
    pages = replace(batch.pages, tables=batch.pages.tables[rows], lengths=batch.pages.lengths[rows])
    return decodes.choose(q[rows], pages, spec, CHOICE)


def exact(given: tuple[Any, ...], over: PagedKV) -> torch.Tensor:
    """In float64: of decodes over these pages, of others over all."""
    q, k, *_, spec = given
    out, group = exact_over_all(given), q.shape[1] // k.shape[1]
    for row, length in enumerate(over.lengths.tolist()):
        for of in range(k.shape[1]):
            used = over.tables[row, of, : -(-length // PAGE)].long()
            keys, values = (pool[0][used, :, of].flatten(0, 1)[:length].double() for pool in (over.keys, over.values))
            heads = slice(of * group, (of + 1) * group)
            out[row, heads] = (q[row, heads].double() @ keys.T * spec.scale).softmax(1) @ values
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [DECODES, *MIXED.values()], ids=["decodes", *MIXED])
def test_every_row_and_padding(step: list[tuple[int, int]], shape: tuple[int, int, int]) -> None:
    given = with_bounds(arguments(step, shape))
    assert decodes.supports(SparseCall(*given, CHOICE))
    found = decodes.attend(SparseCall(*given, CHOICE))
    wanted = exact(given, chosen(given)) if decodes_of(given) else exact_over_all(given)
    assert_close(found, wanted)
    for sequences, tokens in ((1, 200), (40, 133)):
        padding = decodes.attend(SparseCall(*padded(as_captured(given), sequences, tokens), CHOICE))
        assert_close(padding[: len(wanted)], wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [DECODES, *MIXED.values()], ids=["decodes", *MIXED])
def test_bounds_are_those_of_the_reference(step: list[tuple[int, int]], shape: tuple[int, int, int]) -> None:
    *_, batch, _ = given = with_bounds(arguments(step, shape))
    bounds = batch.pages.bounds[0].clone()
    decodes.attend(SparseCall(*given, CHOICE))
    write_bounds(replace(batch.pages, bounds=(bounds,)), batch.offsets, 0)
    assert torch.equal(batch.pages.bounds[0].view(torch.int16), bounds.view(torch.int16))


@pytest.mark.parametrize("sign", [1, -1], ids=["any", "no score above zero"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_chosen_could_score_most(shape: tuple[int, int, int], sign: int) -> None:
    """But for pages whose scores differ by what rounding in float32 makes of them."""
    given = arguments(DECODES, shape)
    q = given[0]
    if sign < 0:
        q.abs_()
        given[3].pages.keys[0].sub_(6)
    given = with_bounds(given)
    decodes.attend(SparseCall(*given, CHOICE))
    pages, group, over = given[3].pages, shape[0] // shape[1], chosen(given)
    for row, length in enumerate(pages.lengths.tolist()):
        count = -(-length // PAGE)
        assert int(over.lengths[row]) == length - max(0, count - CHOICE.pages) * PAGE
        table = pages.tables[row, :count]
        for of in range(shape[1]):
            mine = over.tables[row, of, : min(count, CHOICE.pages)]
            at = (table[None] == mine[:, None]).int().argmax(1)
            assert torch.equal(table[at], mine)
            assert bool((at.diff() > 0).all())
            assert int(at[-1]) == count - 1
            if count > CHOICE.pages:
                scores = page_scores(
                    q[row, of * group : (of + 1) * group].double(), pages.bounds[0][table, :, of].double()
                )
                assert (sign > 0) or bool((scores < 0).all())
                left = torch.ones(count, dtype=torch.bool, device="cuda")
                left[at] = False
                assert float(scores[at[:-1]].min()) > float(scores[left].max()) - 1e-4 * float(scores.abs().max())


def test_sinks() -> None:
    given = with_bounds(arguments(DECODES, (16, 8, 64)))
    sinks = torch.randn(16, device="cuda").bfloat16()
    calls = SparseCall(*given, CHOICE), SparseCall(*given, CHOICE, sinks)
    plain, found = map(decodes.attend, calls)
    q, *_, spec = given
    over = chosen(given)
    for row, length in enumerate(over.lengths.tolist()):
        used = over.tables[row, :, : -(-length // PAGE)].long()
        for head in range(16):
            keys = over.keys[0][used[head // 2], :, head // 2].flatten(0, 1)[:length].double()
            scores = keys @ q[row, head].double() * spec.scale
            share = scores.exp().sum() / (scores.exp().sum() + sinks[head].double().exp())
            torch.testing.assert_close(
                found[row, head].double(), plain[row, head].double() * share, rtol=0.02, atol=0.01
            )


def test_one_recording_serves_other_lengths() -> None:
    cases = [
        with_bounds(arguments(step, (16, 8, 128))) for step in ([(900, 1), (31, 1), (600, 1)], [(5, 1), (2000, 1)])
    ]
    sequences, most = 4, 140
    count = max(len(given[3].pages.keys[0]) for given in cases)
    keys, values = (torch.zeros(count, PAGE, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    bounds = keys.new_zeros(count, 2, 8, 128)
    q, k, v = (torch.zeros(sequences, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (16, 8, 8))
    lengths = torch.zeros(sequences, dtype=torch.int32, device="cuda")
    tables = torch.zeros(sequences, most, dtype=torch.int32, device="cuda")
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
    *_, batch, spec = cases[0]
    held = {"keys": (keys,), "values": (values,), "bounds": (bounds,)}
    pages = replace(batch.pages, **held, tables=tables, lengths=lengths, parts=None)
    own = (q, k, v, batch._replace(offsets=offsets, longest=1, pages=pages), spec)
    graph, found = captured(lambda: decodes.attend(SparseCall(*own, CHOICE)))
    for given in cases:
        theirs, rows = given[3].pages, len(given[3].pages.lengths)
        for mine, other in ((keys, theirs.keys[0]), (values, theirs.values[0]), (bounds, theirs.bounds[0])):
            mine[: len(other)] = other
        q[:rows] = given[0]
        lengths.zero_()[:rows] = theirs.lengths
        tables.zero_()[:rows, : theirs.tables.shape[1]] = theirs.tables
        graph.replay()
        decodes.attend(SparseCall(*given, CHOICE))  # which writes its bounds
        assert_close(found[:rows], exact(given, chosen(given)))


def test_an_engine_finds_the_ids_of_a_cpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = dict(FAMILY_CONFIGS)["llama-llama3"] | {"num_hidden_layers": 4}
    folder = make_checkpoint(tmp_path_factory.mktemp("pages"), config)
    prompts = [{"prompt_token_ids": [(7 * at * at + 3) % 80 for at in range(length)]} for length in (90, 40, 80)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for device, pages in (("cuda", None), ("cuda", 40), ("cpu", 3), ("cuda", 3)):
        sizes = {"page_size": 4, "num_pages": 400, "decode_pages": pages}
        llm = LLM(folder, device=device, dtype="float32", skip_tokenizer_init=True, verbose=False, **sizes)
        found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
    assert found[1] == found[0]
    assert found[3] == found[2]
    assert found[3] != found[0]
