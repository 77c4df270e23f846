"""Memory and least time of a step under each layout: hand counts on the 8B shape, and what was measured of others."""

from __future__ import annotations

from dataclasses import replace
from math import comb
from typing import Any

import pytest

from strata.hardware.links import LINKS
from strata.hardware.specs import device
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.parallel.layout import Layout
from strata.train.predict.estimate import (
    choose_recompute,
    estimate,
    layer_bytes,
    layer_working_bytes,
    memory,
    memory_by_rank,
)
from strata.train.predict.messages import Messages
from strata.train.predict.min_time import min_time
from strata.train.predict.step_shape import TrainShape

GIB = 2**30
H200, LINK = device("h200"), LINKS["h200"]
RATE = 800e12
CONFIG = config_from_dict(SHAPES["8B"], "8B")
MIXTURE = config_from_dict(SHAPES["30B-A3B"], "30B-A3B")
WEIGHTS, HEAD = 8_030_261_248, 128256 * 4096
LAYER = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)  # matrices
TOKENS = 16384
HIDDEN_BYTES = 2 * TOKENS * 4096


def shape(**layout: Any) -> TrainShape:
    """The 8B step of two sequences of 8192 tokens on each data-parallel rank."""
    return TrainShape(CONFIG, TOKENS, 8192, layout=Layout(**layout))


def messages(given: TrainShape, recompute: str = "none") -> dict[str, Messages]:
    return dict(min_time(given, recompute, H200).messages)


@pytest.mark.parametrize(
    ("zero", "state", "sums"),
    [
        (0, 14 * WEIGHTS, 4 * WEIGHTS),
        (1, 2 * WEIGHTS + 12 * WEIGHTS / 8, 4 * WEIGHTS),
        (2, 2 * WEIGHTS + 12 * WEIGHTS / 8, 4 * WEIGHTS / 8),
        (3, 12 * WEIGHTS / 8, 4 * WEIGHTS / 8),
    ],
)
def test_zero_divides_state_and_sums(zero: int, state: float, sums: float) -> None:
    layout = {"shard": 8} if zero else {"dp": 8}
    found = memory(replace(shape(zero=zero, **layout), batches=4), "layers")
    assert found.state == pytest.approx(state)
    assert found.accumulated == pytest.approx(sums)


def test_the_gradient_of_the_head_is_added_to_sums_that_are_whole() -> None:
    whole, divided = (memory(replace(shape(shard=8, zero=zero), batches=4), "layers").gradients for zero in (1, 2))
    assert divided - whole == 4 * HEAD


def test_activations_are_divided_by_tp_and_by_tokens_only_with_sequence_parallel() -> None:
    norms, matrices, log_sums = 2 * 4096, 6144 + 4096 + 3 * 14336, 4 * 32
    read = 2 * 4096  # the results of norms, whole on each rank unless they are gathered once more to overlap
    plain = 32 * TOKENS * (2 * (norms + read + matrices // 4) + log_sums // 4)
    divided = 32 * TOKENS * (2 * (norms // 4 + read + matrices // 4) + log_sums // 4)
    overlapped = 32 * TOKENS * (2 * (norms // 4 + read // 4 + matrices // 4) + log_sums // 4)
    assert memory(shape(tp=4), "none").activations == plain
    assert memory(shape(tp=4, sequence_parallel=True), "none").activations == divided
    assert memory(shape(tp=4, sequence_parallel=True, overlap=True), "none").activations == overlapped
    norm_weights = 65 * 4096
    assert memory(shape(tp=4), "none").state == 14 * ((WEIGHTS - norm_weights) // 4 + norm_weights)


def test_context_parallel_divides_tokens() -> None:
    whole, part = (
        memory(shape(), "none").activations,
        memory(shape(cp=4, zero=1, context="ulysses"), "none").activations,
    )
    assert part == whole // 4


def test_a_ring_holds_vectors_and_with_a_window_blocks_of_scores() -> None:
    given = shape(cp=4, zero=1)
    own, piece = TOKENS // 4, given.length // 8
    of_queries, of_keys = 3 * 4 + 3 * 2, 2 * (2 * 2 + 2 * 4 + 2)
    assert layer_working_bytes(given, 0) == own * (of_queries * 32 + of_keys * 8) * 128
    windowed = replace(given, config=replace(CONFIG, windows=(256,) * 32))
    scores, vectors = 3 * 32 * piece * piece, own * (4 * 32 + 6 * 8) * 128
    assert layer_working_bytes(windowed, 0) == 4 * (scores + vectors)
    # Long documents fit, since nothing grows with their square.
    long = TrainShape(CONFIG, 65536, 65536, layout=Layout(cp=2, shard=4, zero=3))
    assert choose_recompute(long, 141 * 10**9) == "mlp"


def test_a_loss_with_gradients_takes_no_product_twice() -> None:
    head = 2 * 128256 * 4096 * TOKENS / RATE
    plain, ring = (min_time(one, "none", H200).products for one in (shape(), shape(cp=4, zero=1)))
    assert ring == pytest.approx(plain / 4)
    divided = min_time(shape(tp=4), "none", H200).products
    assert divided == pytest.approx(plain / 4 + head / 4)


def test_pipeline_ranks_hold_their_stages_and_as_many_micro_batches_as_are_under_way() -> None:
    given = TrainShape(CONFIG, 8192, 8192, 8, layout=Layout(pp=4, micro_batches=8))
    held = given.local_parameters
    assert [len(one.layers) for one in held] == [8, 9, 9, 6]  # the head is as much as two to three layers
    assert [bool(one.embedding) for one in held] == [True, False, False, False]
    assert [bool(one.head) for one in held] == [False, False, False, True]
    assert sum(one.total for one in held) == WEIGHTS
    of_layer = memory(TrainShape(CONFIG, 8192, 8192), "none").activations // 32
    found = memory_by_rank(given, "none")
    assert [one.activations for one in found] == [4 * 8 * of_layer, 3 * 9 * of_layer, 2 * 9 * of_layer, 6 * of_layer]
    assert all(one.accumulated == 4 * part.total for one, part in zip(found, held, strict=True))


def test_experts_are_divided_by_ep_and_balanced() -> None:
    alone = TrainShape(MIXTURE, 4096, 4096)
    shared = replace(alone, layout=Layout(shard=8, ep=8, zero=2))
    experts = 48 * 128 * 3 * 2048 * 768
    dense = alone.local_parameters[0].dense
    assert alone.local_parameters[0].experts == experts
    assert (shared.local_parameters[0].dense, shared.local_parameters[0].experts) == (dense, experts // 8)
    # Experts have no other rank of "ep_shard" to divide their optimizer state with.
    assert memory(shared, "none").state == 2 * (dense + experts // 8) + 12 * (dense // 8 + experts // 8)
    # Of a token: norms, q k v before and after norms, attention; then routing and 8 rows through experts 768 wide.
    attention = 2 * (2 * 2048 + (4096 + 1024) + 4096 + (4096 + 512) + 2048) + 4 * 32
    routing = 2 * 128 + 4 * 128 + 8 * (4 + 8 + 16) + 2 * 2048
    rows = 8 * 2 * (2048 + 3 * 768 + 2048)
    # The fullest moment of one rank is the end, where there are all gradients and what one layer keeps.
    assert memory(alone, "none").activations == 4096 * (attention + routing + rows)
    assert memory(shared, "none").activations == 48 * 4096 * (attention + routing + rows)
    active = 48 * (2048 * (2 * 4096 + 2 * 512) + 2048 * 128 + 8 * 3 * 2048 * 768) + 151936 * 2048
    assert min_time(alone, "none", H200).products == pytest.approx(6 * active * 4096 / RATE)


def test_gradients_and_weights_travel_while_passes_run() -> None:
    for zero in (1, 2):
        found = messages(shape(shard=8, zero=zero))
        sent = 4 * WEIGHTS * 7 / 8
        assert found["gradients"].cost.bytes == pytest.approx(sent)
        assert found["weights"].cost.bytes == pytest.approx(sent / 2)
        assert found["gradients"].seconds == pytest.approx(sent / LINK.bandwidth, rel=0.15)
        # The embedding's gradient is complete last, and its weights are read first.
        assert found["gradients"].exposed == pytest.approx(4 * HEAD * 7 / 8 / LINK.bandwidth, rel=0.15)
        assert found["weights"].exposed == pytest.approx(2 * HEAD * 7 / 8 / LINK.bandwidth, rel=0.15)
    several = replace(shape(shard=8, zero=1), batches=4)
    assert messages(several)["gradients"].cost.bytes == pytest.approx(sent)
    every = replace(shape(shard=8, zero=2), batches=4)
    assert messages(every)["gradients"].cost.bytes == pytest.approx(4 * sent)
    assert "weights" not in messages(shape(dp=8))
    assert messages(shape(dp=8))["gradients"].cost.bytes == pytest.approx(2 * sent)
    # What no computation is long enough to hide is exposed.
    short = messages(TrainShape(CONFIG, 512, 512, layout=Layout(shard=8, zero=1)))
    backward = min_time(TrainShape(CONFIG, 512, 512), "none", H200)
    room = (backward.products + backward.attention) * 2 / 3
    assert short["gradients"].exposed == pytest.approx(short["gradients"].seconds - room)


def test_gradients_in_8_bits_by_hand() -> None:
    """2,064 bytes for 2,048 values, there and, of what all ranks have alike, back; what is lost stays in bfloat16."""
    message = WEIGHTS * 2064 / 2048 * 7 / 8
    for layout, times, kept in (
        ({"dp": 8}, 2, WEIGHTS * 9 / 8),
        ({"shard": 8, "zero": 1}, 1, WEIGHTS),
        ({"shard": 8, "zero": 2}, 1, WEIGHTS),
        ({"shard": 8, "zero": 3}, 1, 0),
    ):
        plain, given = shape(**layout), shape(**layout, message_dtype="fp8")
        assert messages(given)["gradients"].cost.bytes == pytest.approx(times * message, rel=1e-4), layout
        assert memory(given, "layers").state - memory(plain, "layers").state == pytest.approx(2 * kept), layout
    # Of two replicas only what a rank has whole goes on, and by FSDP2 as it was.
    replicas = {"dp": 2, "shard": 4, "zero": 3}
    there, back = WEIGHTS * 2064 / 2048 * 3 / 4, 2 * 4 * WEIGHTS / 4 / 2
    assert messages(shape(**replicas, message_dtype="fp8"))["gradients"].cost.bytes == pytest.approx(there + back)
    # Ranks of tp hold the same experts, whose gradients they add up too where each saw a part of the tokens.
    experts = 48 * 128 * 3 * 2048 * 768
    apart, together = (
        memory(TrainShape(MIXTURE, 4096, 4096, layout=Layout(**given, message_dtype="fp8")), "layers").state
        - memory(TrainShape(MIXTURE, 4096, 4096, layout=Layout(**given)), "layers").state
        for given in ({"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True})
    )
    assert together - apart == 2 * experts * 3 // 2


def test_fsdp_gathers_twice_in_every_pass() -> None:
    found = messages(replace(shape(shard=8, zero=3), batches=2))
    assert found["weights"].cost.bytes == pytest.approx(2 * 2 * 2 * WEIGHTS * 7 / 8)
    assert found["gradients"].cost.bytes == pytest.approx(2 * 4 * WEIGHTS * 7 / 8)
    first = 2 * (2 * HEAD + LAYER) * 7 / 8 / LINK.bandwidth
    assert found["weights"].exposed == pytest.approx(2 * first, rel=0.15)


def test_tensor_parallel_waits_for_two_sums_a_layer_each_way() -> None:
    calls = 2 * 2 * 32 + 2
    plain = messages(shape(tp=8))["tensor"]
    assert plain.cost.bytes == calls * 2 * HIDDEN_BYTES * 7 // 8
    assert plain.exposed == plain.seconds
    divided = messages(shape(tp=8, sequence_parallel=True))["tensor"]
    assert divided.cost.bytes == plain.cost.bytes
    overlapped = messages(shape(tp=8, sequence_parallel=True, overlap=True))["tensor"]
    assert overlapped.cost.bytes == plain.cost.bytes + 64 * HIDDEN_BYTES * 7 // 8
    assert overlapped.exposed < 0.25 * plain.exposed
    again = messages(shape(tp=8), "layers")["tensor"]
    # One sum of the two of a layer: nothing in the backward pass needs the other.
    assert again.cost.bytes == (calls + 32) * 2 * HIDDEN_BYTES * 7 // 8
    gathered = messages(shape(tp=8, sequence_parallel=True), "layers")["tensor"]
    assert gathered.cost.bytes == (2 * calls + 32 * 3) * HIDDEN_BYTES * 7 // 8


def test_context_parallel_sends_keys_around_or_exchanges_heads() -> None:
    keys = 2 * (TOKENS // 4) * 1024
    ring = messages(shape(cp=4))["context"]
    # Forward keys and values three times; backward again, and their gradients in float32 four times.
    assert ring.cost.bytes == 32 * (2 * 3 * 2 * keys + 4 * 4 * keys)
    assert ring.exposed < ring.seconds
    ulysses = messages(shape(cp=4, context="ulysses"))["context"]
    assert ulysses.cost.bytes == 32 * 2 * (2 * 4 * keys + 2 * keys) * 3 // 4
    assert ulysses.exposed == ulysses.seconds


# Of eight, how many ranks have an expert of a token, which goes to 8 of 128 experts.
RANKS_OF_TOKEN = 8 * (1 - comb(128 - 16, 8) / comb(128, 8))


def test_experts_exchange_a_row_for_each_rank_four_times_a_layer() -> None:
    found = messages(TrainShape(MIXTURE, 4096, 4096, layout=Layout(shard=8, ep=8, zero=1)))["experts"]
    assert 5.3 < RANKS_OF_TOKEN < 5.4
    rows = int(4096 * RANKS_OF_TOKEN)
    # Numbers and weights of 8 experts each way there, the weights' gradients; how many rows and products there are.
    assert found.cost.bytes == pytest.approx(48 * (4 * rows * 2 * 2048 + 3 * rows * 4 * 8 + 2 * 8 * 8) * 7 / 8)
    assert found.exposed == found.seconds


def test_modules_compute_mlps_again_from_what_enters_them() -> None:
    pipeline, split = (shape(pp=4, micro_batches=4, schedule=one).recomputes for one in ("1f1b", "zero-bubble"))
    assert (pipeline, split) == (("none", "mlp", "layers"), ("none",))
    for layout in ({"tp": 4}, {"tp": 4, "sequence_parallel": True, "overlap": True}):
        given = shape(**layout)
        # Gate, up and SwiGLU's result are not kept.
        assert layer_bytes(given, 0, "none") - layer_bytes(given, 0, "mlp") == TOKENS * 2 * 3 * 14336 // 4
        none, mlp = (min_time(given, one, H200) for one in ("none", "mlp"))
        # What overlaps is no operation of torch's own, so the last product and its messages are repeated, too.
        matrices = 3 if "overlap" in layout else 2
        assert mlp.products - none.products == pytest.approx(2 * TOKENS * 32 * matrices * 4096 * 14336 / 4 / RATE)
        sent = [one.messages["tensor"].cost.bytes for one in (none, mlp)]
        assert sent[1] - sent[0] == (32 * 2 * HIDDEN_BYTES * 3 // 4 if "overlap" in layout else 0)
    experts = TrainShape(MIXTURE, 4096, 4096, layout=Layout(shard=8, ep=8, zero=2))
    attention = 2 * (2 * 2048 + (4096 + 1024) + 4096 + (4096 + 512) + 2048) + 4 * 32
    assert layer_bytes(experts, 0, "mlp") == 4096 * (attention + 2 * 2048)
    none, mlp = (min_time(experts, one, H200) for one in ("none", "mlp"))
    again = 2 * 4096 * 48 * 2048 * (128 + 8 * 3 * 768)
    assert mlp.products - none.products == pytest.approx(again / RATE)
    sent = [one.messages["experts"].cost.bytes for one in (none, mlp)]
    rows = int(4096 * RANKS_OF_TOKEN)  # that travel once more, and not home
    assert sent[1] - sent[0] == pytest.approx(48 * (rows * (2 * 2048 + 2 * 4 * 8) + 2 * 8 * 8) * 7 / 8)


@pytest.mark.parametrize(("schedule", "idle"), [("1f1b", 3.0), ("zero-bubble", 1.0)])
def test_pipeline_waits_at_both_ends(schedule: str, idle: float) -> None:
    """Of passes of equal length forward, inputs and weights: 3 (ranks - 1), a third of it with zero-bubble."""
    found = min_time(
        TrainShape(CONFIG, 8192, 8192, 8, layout=Layout(pp=4, micro_batches=8, schedule=schedule)), "none", H200
    )
    a_pass = (found.products + found.attention) / 8 / 3
    assert found.bubble == pytest.approx(3 * idle * a_pass, rel=0.3)  # attention's backward pass is not halved
    assert found.messages["stages"].cost.bytes == 8 * 2 * 2 * 8192 * 4096
    assert found.messages["stages"].exposed == 0
    parts = found.products + found.attention + found.update + found.bubble + found.communication
    assert found.seconds == parts


def test_one_rank_has_no_messages_and_other_links_are_refused() -> None:
    assert min_time(shape(), "none", H200).messages == {}
    assert min_time(shape(), "none", device("h100")).seconds > 0
    # Where it was not measured, the maker's link counts; where there is none, nothing does.
    assert min_time(shape(tp=8), "none", device("h100")).messages["tensor"].seconds > 0
    with pytest.raises(ValueError, match="no link is recorded for l40s"):
        estimate(shape(tp=8), device("l40s"))


def test_estimate_against_what_was_measured() -> None:
    found = estimate(TrainShape(config_from_dict(SHAPES["1B"], "1B"), TOKENS, 8192), H200)
    # T6 on an H200: 57,693 tokens/s at 52.6 % MFU in 42.77 GiB.
    assert found.recompute == "none"
    assert found.fullest.total / GIB == pytest.approx(42.77, rel=0.02)
    assert 57_693 < found.tokens_per_second < 1.5 * 57_693
    assert found.mfu / found.tokens_per_second == pytest.approx(0.526 / 57_693, rel=0.01)
    # T7 with FSDP2 on eight, of torchtitan (53.2 GiB, 9,567 tokens/s a GPU) and a plain script (60.6, 9,925): both
    # recompute something, but no whole layers.
    fsdp = shape(shard=8, zero=3)
    least, most = memory(fsdp, "layers").total / GIB, memory(fsdp, "none").total / GIB
    assert least < 53.2 < 60.6 < most
    whole = estimate(fsdp, H200, "none")
    assert whole.tokens == 8 * TOKENS
    assert 9_925 < whole.tokens_per_second / 8 < 1.6 * 9_925
