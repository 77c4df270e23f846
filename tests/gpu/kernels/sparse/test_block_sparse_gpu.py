"""Block-sparse attention of prompts on CUDA: what is kept holds the share, and every row is right for what is kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.kernels.attention.sparse import prompts
from strata.kernels.attention.sparse.block_choice import BlockChoice, chosen_blocks, pooled_scores
from strata.kernels.attention.sparse.prompts import block_sparse_attention
from strata.kernels.attention.spec import SparseCall
from tests.gpu.kernels.test_attention_mixed_gpu import STEPS, arguments, assert_close
from tests.models.checkpoints import FAMILY_CONFIGS, make_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

CHOICE = BlockChoice(share=0.8, min_keys=1000)
LONG = {**STEPS, "several chunks": [(77, 1), (5000, 1), (6000, 700), (0, 3000), (8192, 2048), (0, 1100)]}
SHAPES = [(32, 8, 128), (14, 2, 64), (6, 6, 80), (16, 1, 256)]


def sharpened(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """With queries so large that weights differ."""
    q, *others = given
    return q * 3, *others


def starts_of(given: tuple[Any, ...]) -> torch.Tensor:
    return given[3].pages.parts.starts


def exact(given: tuple[Any, ...], kept: torch.Tensor, counts: torch.Tensor, choice: BlockChoice) -> torch.Tensor:
    """In float64, of the blocks that were kept; of decodes, over all keys."""
    q, k, _, batch, spec = given
    pages, group = batch.pages, q.shape[1] // k.shape[1]
    starts, lengths, found = starts_of(given).tolist(), pages.lengths.tolist(), []
    for s, (first, last) in enumerate(pairwise(batch.offsets.tolist())):
        new, total = last - first, lengths[s]
        used = pages.tables[s, : -(-total // pages.page_size)].long()
        keys, values = (pool[0][used].flatten(0, 1)[:total].double() for pool in (pages.keys, pages.values))
        at = torch.arange(total - new, total, device="cuda")
        seen = torch.arange(total, device="cuda") <= at[:, None]
        for head in range(q.shape[1]):
            of, mask = head // group, seen.clone()
            for block in range(-(-new // choice.block) if starts[s] == first else 0):
                line = starts[s] // choice.block + s + block
                there = torch.zeros(-(-total // choice.block), dtype=torch.bool, device="cuda")
                there[kept[of, line, : counts[of, line]].long()] = True
                rows = slice(block * choice.block, (block + 1) * choice.block)
                mask[rows] &= there.repeat_interleave(choice.block)[:total]
            scores = (q[first:last, head].double() @ keys[:, of].T * spec.scale).masked_fill(~mask, -torch.inf)
            found.append((slice(first, last), head, scores.softmax(1) @ values[:, of]))
    out = torch.empty(q.shape, dtype=torch.float64, device="cuda")
    for rows, head, part in found:
        out[rows, head] = part
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", LONG.values(), ids=LONG.keys())
def test_every_row(step: list[tuple[int, int]], shape: tuple[int, int, int]) -> None:
    given = sharpened(arguments(step, shape))
    assert prompts.supports(SparseCall(*given, CHOICE))
    kept, counts = prompts.choose(given[0], shape[1], starts_of(given), *given[3:], CHOICE)
    assert_close(prompts.attend(SparseCall(*given, CHOICE)), exact(given, kept, counts, CHOICE))
    assert_close(
        prompts.attend(SparseCall(*given, CHOICE._replace(share=1.0))),
        block_sparse_attention.reference(*given, CHOICE._replace(min_keys=1 << 30)).double(),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_kept_is_what_the_reference_keeps(shape: tuple[int, int, int]) -> None:
    """But for blocks that weigh about what the last one does that is kept."""
    heads, kv_heads, _ = shape
    given = sharpened(arguments([(9, 1), (6000, 700), (0, 3000)], shape))
    q, _, _, batch, spec = given
    kept, counts = prompts.choose(q, kv_heads, starts_of(given), batch, spec, CHOICE)
    for s, (first, new, total) in ((1, (1, 700, 6700)), (2, (701, 3000, 3000))):
        used = batch.pages.tables[s, : -(-total // 16)].long()
        keys = batch.pages.keys[0][used].flatten(0, 1)[:total].float()
        for of in range(kv_heads):
            members = slice(of * heads // kv_heads, (of + 1) * heads // kv_heads)
            scores = pooled_scores(q[first : first + new, members].float(), keys[:, of], CHOICE, spec.scale)
            wanted = chosen_blocks(scores, new, total, CHOICE)
            for block, row in enumerate(wanted):
                line = int(starts_of(given)[s]) // CHOICE.block + s + block
                mine = kept[of, line, : counts[of, line]].long()
                assert torch.equal(mine, mine.unique())
                found = torch.zeros_like(row)
                found[mine] = True
                assert abs(float(scores[block][found].sum() - scores[block][row].sum())) < 0.01
                assert abs(int(found.sum()) - int(row.sum())) <= 1 + int(row.sum()) // 50
                assert float(scores[block][found].sum() / scores[block].sum()) > CHOICE.share - 0.01


def test_sinks_and_other_sequences() -> None:
    given = sharpened(arguments([(2000, 500), (0, 1700)], (16, 8, 64)))
    sinks = torch.randn(16, device="cuda").bfloat16()
    together = prompts.attend(SparseCall(*given, CHOICE, sinks))
    assert not torch.equal(together, prompts.attend(SparseCall(*given, CHOICE)))
    q, k, v, batch, spec = given
    pages = batch.pages
    parts = replace(pages.parts, starts=torch.zeros(1, dtype=torch.int32, device="cuda"))
    alone = replace(pages.sequences(1, 2), parts=parts)
    one = batch._replace(offsets=batch.offsets[1:] - 500, longest=1700, pages=alone)
    behind = SparseCall(q[500:], k[500:], v[500:], one, spec, CHOICE, sinks)
    assert torch.equal(prompts.attend(behind), together[500:])


def test_an_engine_finds_the_same_ids_with_all_keys_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_checkpoint(tmp_path_factory.mktemp("sparse"), dict(FAMILY_CONFIGS)["llama-llama3"])
    asked = [{"prompt_token_ids": [(7 * at * at + 3) % 80 for at in range(length)]} for length in (110, 40, 100)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found = []
    for options in ({}, {"sparse_prefill": 1.0, "sparse_prefill_min_keys": 64, "sparse_prefill_block": 64}):
        llm = LLM(
            folder, device="cuda", dtype="float32", skip_tokenizer_init=True, verbose=False, num_pages=100, **options
        )
        found.append([one.outputs[0].token_ids for one in llm.generate(asked, params, use_tqdm=False)])
        if options:
            assert llm.engine.program.variant("sparse_logits") is not None
    assert found[0] == found[1]
