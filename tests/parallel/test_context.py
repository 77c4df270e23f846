"""Context parallelism, ring and Ulysses, against one process in float64; and how evenly the work is shared out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm.collectives import start_all_reduce
from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.kernels.attention.partial import VisibleKeys, partial_attention, partial_attention_gradients
from strata.models.config import config_from_dict
from strata.parallel.context import ContextBatch, check_heads, divide_batch, parallelize_attention
from strata.parallel.context_ring import RingSteps, ring_attention
from strata.parallel.zigzag import Zigzag
from tests.largest import name_of_largest
from tests.models.batches import HandPaged
from tests.parallel.models import SIZES, gradients_of, loss_of, random_batch, random_model
from tests.parallel.ranks import relative_error, run_ranks

# Documents that no number of ranks divides, one longer than the others together, some shorter than the ranks.
BATCH = [37, 1, 9, 3]
# Fewer tokens than ranks; a whole number of chunks.
MORE_BATCHES = [[1], [16]]
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-few-key-heads": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "sliding_window": 6},
    "mistral-short-window": {"architectures": ["MistralForCausalLM"], "sliding_window": 1},
    "qwen3-tied": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True, "tie_word_embeddings": True},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
}


def equal_to_one_process(world: World, folder: Path) -> dict[str, Any]:
    """The largest relative error of every model, method and batch."""
    axis, found = Mesh.of(world, {"cp": world.size}).axis("cp"), {}
    for name, values in CONFIGS.items():
        config = config_from_dict(SIZES | values)
        for lengths in (BATCH, *MORE_BATCHES) if name == "llama" else (BATCH,):
            whole = random_model(config)
            batch, targets = random_batch(config, lengths)
            wanted_hidden, wanted_loss = whole(batch), loss_of(whole, batch, targets)
            wanted_loss.backward()
            for method in ("ring", "ulysses"):
                model = random_model(config)
                parallelize_attention(model)
                part = divide_batch(batch, lengths, axis, method)
                assert isinstance(part, ContextBatch)
                hidden = model(part)
                loss = loss_of(model, part, targets[part.rows])
                loss.backward()
                gradients = gradients_of(model)
                sums = torch.cat([loss.detach().view(1), *(gradient.flatten() for gradient in gradients.values())])
                total, *summed = (
                    start_all_reduce(sums, axis).wait().split([1, *(g.numel() for g in gradients.values())])
                )
                errors = {"loss": abs(total.item() - wanted_loss.item()) / max(1.0, wanted_loss.item())}
                if len(hidden):
                    errors["hidden"] = relative_error(hidden, wanted_hidden[part.rows])
                for parameter, gradient in zip(gradients, summed, strict=True):
                    wanted = whole.get_parameter(parameter).grad
                    assert wanted is not None
                    errors[parameter] = (gradient - wanted.flatten()).abs().max().item() / max(
                        1e-3, wanted.abs().max().item()
                    )
                worst = name_of_largest(errors)
                found[f"{name} {method} {lengths}"] = [worst, errors[worst]]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_loss_and_every_gradient_equal_one_process(world: int, tmp_path: Path) -> None:
    for rank in run_ranks(equal_to_one_process, world, tmp_path):
        assert len(rank) == 2 * (len(CONFIGS) + len(MORE_BATCHES))
        assert {key: error for key, error in rank.items() if not error[1] < 1e-9} == {}


def narrow_ring(world: World, folder: Path) -> dict[str, float]:
    """Relative errors of the ring in bfloat16 against one process in float64, of this rank's rows."""
    axis, found = Mesh.of(world, {"cp": world.size}).axis("cp"), {}
    for lengths in (BATCH, [32]):
        division, draw = Zigzag(tuple(lengths), world.size), torch.Generator().manual_seed(0)
        shapes = [(sum(lengths), heads, 8) for heads in (4, 2, 2, 4)]
        *given, slope = (torch.randn(*shape, generator=draw).bfloat16() for shape in shapes)
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        wide, whole = [one.double() for one in given], VisibleKeys(offsets, offsets, max(lengths), max(lengths), True)
        out, sums = partial_attention(*wide, whole, 0.3)
        wanted = out, *partial_attention_gradients(slope.double(), *wide, out, sums, whole, 0.3)
        rows = division.rows(axis.index)
        leaves = [one[rows].requires_grad_() for one in given]
        mixed = ring_attention(*leaves, RingSteps(division, axis.index, world.device), axis, 0.3)
        mixed.backward(slope[rows])
        for name, mine, exact in zip(
            ("out", "q", "k", "v"), (mixed, *(leaf.grad for leaf in leaves)), wanted, strict=True
        ):
            assert mine.dtype == torch.bfloat16
            found[f"{name} of {lengths}"] = relative_error(mine, exact[rows])
    return found


def test_the_ring_rounds_to_bfloat16_only_what_a_turn_adds(tmp_path: Path) -> None:
    for rank in run_ranks(narrow_ring, 2, tmp_path):
        assert {name: error for name, error in rank.items() if not error < 1e-2} == {}


def one_rank() -> Axis:
    return Mesh.of(World(0, 0, 1, torch.device("cpu"), None), {}).axis("cp")


def test_one_rank_keeps_the_batch_and_the_model_what_it_computes() -> None:
    config = config_from_dict(SIZES | CONFIGS["llama"])
    batch, _ = random_batch(config, [5, 3])
    model = random_model(config)
    wanted = model(batch)
    parallelize_attention(model)
    assert divide_batch(batch, [5, 3], one_rank(), "ring") is batch
    assert torch.equal(model(batch), wanted)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(37, 1, 9), (2,), (), (64, 128)])
def test_every_token_has_one_rank_and_every_seen_pair_one_block(lengths: tuple[int, ...], ranks: int) -> None:
    division = Zigzag(lengths, ranks)
    rows = [division.rows(rank) for rank in range(ranks)]
    assert sorted(row for own in rows for row in own) == list(range(sum(lengths)))
    assert [len(own) for own in rows] == division.tokens
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    for window in (max(lengths, default=0) + 1, 1, 7):
        for rank in range(ranks):
            pairs = set()
            for source in range(ranks):
                for block in division.blocks(rank, source, window):
                    for place, query in enumerate(rows[rank][block.queries]):
                        for other, key in enumerate(rows[source][block.keys]):
                            distance = block.offset + place - other
                            assert distance == query - key
                            seen = 0 <= distance < window
                            assert seen or block.masked
                            if seen:
                                assert (query, key) not in pairs
                                pairs.add((query, key))
            wanted = {
                (query, key)
                for query in rows[rank]
                for key in range(sum(lengths))
                if document[query] == document[key] and key <= query and query - key < window
            }
            assert pairs == wanted


def test_rows_side_by_side_are_not_gathered() -> None:
    """Of one document: all rows, the late half of the queries, the early half of the keys."""
    ring_steps = RingSteps(Zigzag((64,), 4), 1, torch.device("cpu"))
    found = [(step.queries, step.keys) for step in (ring_steps[source] for source in range(4)) if step is not None]
    early, late, whole = slice(0, 8), slice(8, 16), slice(0, 16)
    assert found == [(whole, early), (whole, whole), (late, whole), (late, whole)]
    several = RingSteps(Zigzag((64, 64), 4), 1, torch.device("cpu"))[3]
    assert several is not None
    assert isinstance(several.queries, torch.Tensor)
    assert several.queries.tolist() == [*range(8, 16), *range(24, 32)]
    assert several.keys == slice(0, 32)


def test_ranks_have_equal_work() -> None:
    division = Zigzag((64, 16, 240), 4)
    pairs = []
    for rank in range(4):
        positions = []
        for row in division.rows(rank):
            positions.append(row if row < 64 else row - 64 if row < 80 else row - 80)
        pairs.append(sum(position + 1 for position in positions))
    assert len(set(pairs)) == 1
    assert division.tokens == [80] * 4


def test_heads_that_ulysses_cannot_share_out_are_refused() -> None:
    config = config_from_dict(SIZES | CONFIGS["llama"])  # 8 query heads, 4 key/value heads
    for cp, tp in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)):
        check_heads(config, cp, tp, "ulysses")
    check_heads(config, 3, 1, "ring")
    with pytest.raises(ValueError, match="cp = 3 with ulysses shares out 8 query heads and 4 key/value heads"):
        check_heads(config, 3, 1, "ulysses")
    with pytest.raises(ValueError, match="or method 'ring'"):
        check_heads(config, 8, 2, "ulysses")


def test_a_batch_with_pages_is_refused() -> None:
    config = config_from_dict(SIZES | CONFIGS["llama"])
    batch = HandPaged(config, sequences=1, longest=4).next_batch({0: [1, 2]})
    axis = Axis("cp", 2, 0, (0, 1), torch.distributed.ProcessGroup(0, 2))
    with pytest.raises(ValueError, match="a batch with a KV cache cannot be divided along cp"):
        divide_batch(batch, [2], axis, "ring")
