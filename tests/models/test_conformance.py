"""What every family must do: agree with transformers, with itself in pieces, and pass through graph and compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from strata.graph.trace import trace
from strata.models.families import build
from strata.models.initialize import initialize
from strata.models.joined import join_parameters
from strata.models.save import save
from strata.models.weights import load

from .batches import HandPaged, packed, random_sequences
from .checkpoints import FAMILY_CONFIGS, Config, load_oracle, make_checkpoint, oracle_logits
from .conftest import Checkpoint
from .recurrent_checkpoints import RECURRENT_CONFIGS

LENGTHS = (1, 23, 40)
TOLERANCE = 2e-5


def worst(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


@torch.no_grad()
def test_logits_of_a_packed_batch_equal_transformers(checkpoint: Checkpoint) -> None:
    sequences = random_sequences(checkpoint.config.vocab_size, LENGTHS)
    logits = checkpoint.model.head(checkpoint.model(packed(sequences)))
    assert worst(logits, oracle_logits(checkpoint.oracle, sequences)) < TOLERANCE


@torch.no_grad()
def test_chunks_over_pages_equal_whole_sequences(checkpoint: Checkpoint) -> None:
    first, second = random_sequences(checkpoint.config.vocab_size, (31, 17), seed=1)
    model = checkpoint.model
    paged = HandPaged(checkpoint.config, sequences=2, longest=31)
    steps = [{0: first[:9]}, {0: first[9:20], 1: second[:6]}, {1: second[6:15], 0: first[20:21]}]
    steps += [{0: first[21 + i : 22 + i], 1: second[15 + i : 16 + i]} for i in range(2)] + [{0: first[23:]}]
    parts: dict[int, list[Tensor]] = {0: [], 1: []}
    for step in steps:
        batch = paged.next_batch(step)
        for row, hidden in zip(step, model(batch).split([len(tokens) for tokens in step.values()]), strict=True):
            parts[row].append(hidden)
    whole = model(packed([first, second]))
    assert worst(torch.cat(parts[0] + parts[1]), whole) < TOLERANCE


@pytest.mark.parametrize("name", ["llama-dynamic", "qwen2-layer-types-dynamic"])
@torch.no_grad()
def test_dynamic_rope_beyond_the_trained_length(open_checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    """transformers scales for the longest sequence it has seen: the two agree on one of `max_length` tokens."""
    opened = open_checkpoint(name)
    length = opened.config.max_length + 37
    model, _ = load(opened.folder, max_length=length)
    (sequence,) = random_sequences(opened.config.vocab_size, (length,))
    logits = model.head(model(packed([sequence])))
    assert worst(logits, oracle_logits(load_oracle(opened.folder), [sequence])) < TOLERANCE
    short, _ = load(opened.folder, max_length=length - 37)
    assert worst(short(packed([sequence[:50]])), opened.model(packed([sequence[:50]]))) == 0


def test_gradients_equal_transformers(checkpoint: Checkpoint) -> None:
    sequences = random_sequences(checkpoint.config.vocab_size, (5, 19), seed=2)
    weights = torch.randn(24, checkpoint.config.vocab_size, generator=torch.Generator().manual_seed(3))
    ours = {name: one for name, one in checkpoint.model.named_parameters() if one.requires_grad}
    theirs = dict(checkpoint.oracle.named_parameters())
    assert theirs.keys() == join_parameters(checkpoint.model, ours).keys()
    loss = (checkpoint.model.head(checkpoint.model(packed(sequences))) * weights).sum()
    expected = (oracle_logits(checkpoint.oracle, sequences) * weights).sum()
    gradients = dict(zip(ours, torch.autograd.grad(loss, list(ours.values())), strict=True))
    found = join_parameters(checkpoint.model, gradients)
    wanted = torch.autograd.grad(expected, list(theirs.values()))
    for name, other in zip(theirs, wanted, strict=True):
        mine = found[name]
        # Softmax does not see what is added to all keys, so a bias of keys that are not rotated has no gradient at all.
        assert worst(mine, other) <= TOLERANCE * max(1.0, other.abs().max().item()), name


@torch.no_grad()
def test_one_graph_serves_any_number_of_tokens(family: Checkpoint) -> None:
    graph = fx.symbolic_trace(family.model)
    assert {node.op for node in graph.graph.nodes} <= {
        "placeholder",
        "get_attr",
        "call_function",
        "call_method",
        "output",
    }
    for lengths in ((1,), (3, 9), (16, 1, 2)):
        batch = packed(random_sequences(family.config.vocab_size, lengths))
        assert worst(graph(batch), family.model(batch)) == 0
    paged = [HandPaged(family.config, sequences=1, longest=12) for _ in range(2)]
    (sequence,) = random_sequences(family.config.vocab_size, (12,))
    for tokens in (sequence[:7], sequence[7:8], sequence[8:]):
        traced, eager = graph(paged[0].next_batch({0: tokens})), family.model(paged[1].next_batch({0: tokens}))
        assert worst(traced, eager) == 0


@pytest.mark.parametrize("family", ["llama-biases-linear-tied", "qwen3-biases-window"], indirect=True)
def test_compiles_without_a_graph_break(family: Checkpoint) -> None:
    torch.compiler.reset()  # what other models left counts against the number of recompilations
    compiled = torch.compile(family.model, fullgraph=True, backend="eager")
    for lengths in ((7, 2), (4, 11)):
        batch = packed(random_sequences(family.config.vocab_size, lengths))
        with torch.no_grad():
            assert worst(compiled(batch), family.model(batch)) < TOLERANCE
    batch = packed(random_sequences(family.config.vocab_size, (6, 3)))
    parameters = list(family.model.parameters())
    found = torch.autograd.grad(compiled(batch).square().sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad(family.model(batch).square().sum(), parameters, allow_unused=True)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or worst(mine, other) <= TOLERANCE * other.abs().max().item()


@torch.no_grad()
def test_transformers_loads_what_strata_saved(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save(checkpoint.model, checkpoint.config, tmp_path / "saved", max_shard_bytes=20_000)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    sequences = random_sequences(checkpoint.config.vocab_size, (1, 30), seed=4)
    saved, (again, config), batch = load_oracle(tmp_path / "saved"), load(tmp_path / "saved"), packed(sequences)
    for one, other in ((saved, checkpoint.oracle), (again, checkpoint.model)):
        tensors, wanted = one.state_dict(), other.state_dict()
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[name], value) for name, value in wanted.items())
    # Products of equal matrices that lie otherwise in memory need not be equal to the bit.
    assert worst(oracle_logits(saved, sequences), oracle_logits(checkpoint.oracle, sequences)) < TOLERANCE
    assert worst(again(batch), checkpoint.model(batch)) < TOLERANCE
    assert config.to_dict() == {**checkpoint.config.to_dict(), "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-llama3", {}),
        ("qwen3-tied", {}),
        ("mamba2", {}),  # sums of layers stay float32
        # Every token goes to both experts: one that goes to another weighs more than all that is rounded.
        ("qwen3-next", {"moe_intermediate_size": 16, "num_experts": 2}),
    ],
)
@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_transformers(tmp_path: Path, name: str, changes: Config) -> None:
    """In bfloat16 the rotary table stays float32, so the error must not exceed that of transformers."""
    values = (dict(FAMILY_CONFIGS) | RECURRENT_CONFIGS)[name] | changes
    folder = make_checkpoint(tmp_path, values)
    sequences = random_sequences(values["vocab_size"], (40, 90), seed=5)
    exact = oracle_logits(load_oracle(folder), sequences)
    model, _ = load(folder, dtype="bfloat16")
    hidden = model(packed(sequences))
    assert all(one.dtype == torch.float32 for key, one in model.named_buffers() if "rotary" in key)
    assert torch.equal(trace(model)(packed(sequences)), hidden)
    ours = model.head(hidden).float() - exact
    theirs = oracle_logits(load_oracle(folder, torch.bfloat16), sequences).float() - exact
    assert ours.square().mean().sqrt() < 1.2 * theirs.square().mean().sqrt()


def test_moving_and_casting_keep_the_rotary_table(family: Checkpoint) -> None:
    with torch.device("meta"):
        model = build(family.config)
    table = family.model.model.rotary.table
    for moved in (model.to_empty(device="cpu"), model.to(torch.bfloat16), model.double()):
        assert isinstance(moved, nn.Module)
        assert torch.equal(moved.model.rotary.table, table)
        assert moved.model.rotary.table.dtype == torch.float32


def test_initial_values(family: Checkpoint) -> None:
    first, second, third = (build(family.config) for _ in range(3))
    for model, seed in ((first, 7), (second, 7), (third, 8)):
        initialize(model, seed)
    for (name, one), two, three in zip(first.named_parameters(), second.parameters(), third.parameters(), strict=True):
        assert torch.equal(one, two)
        if name.endswith(".bias"):
            assert torch.equal(one, torch.zeros_like(one))
        elif name.endswith("norm.weight"):
            assert torch.equal(one, torch.ones_like(one))
        else:
            scaled = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / (2 * family.config.num_layers) ** 0.5 if scaled else 0.02
            assert one.std().item() == pytest.approx(std, rel=0.15)
            assert not torch.equal(one, three)
