"""The memory ledger adds up, and says what to change when something does not fit."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from strata import LLM
from strata.cache.groups import page_groups
from strata.cache.pool import PoolShape
from strata.cache.state_pool import StatePool, StateShape
from strata.cache.tables import BufferShape
from strata.engine import ledger as ledger_module
from strata.engine import sampler as sampler_module
from strata.engine.engine_config import EngineSizes
from strata.engine.ledger import (
    SAMPLING_BYTES,
    DeviceMemory,
    Ledger,
    PoolTooSmall,
    activation_bytes,
    plan_memory,
    sequence_bytes,
)
from strata.engine.program.sizes import decode_buckets
from strata.engine.request import Request, Sequence, new_sequence
from strata.engine.sampler import DrawRow, Sampler
from strata.engine.sampling_params import SamplingParams
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.models.state import PagedRows, RecurrentState
from tests.engine.program.programs import plain_sizes
from tests.live_bytes import LiveBytes
from tests.models.gpt_oss_checkpoints import GPT_OSS_CONFIGS

CONFIG = config_from_dict(SHAPES["0.6B"], "0.6B")
POOL = PoolShape(CONFIG.num_layers, 16, CONFIG.num_kv_heads, CONFIG.head_dim, torch.bfloat16)
GIB = 1 << 30


def planned(kind: str = "cpu", **own: Any) -> Ledger:
    """Of an engine of a few short sequences. own: other sizes, or what `plan_memory` is told beside them."""
    names = own.keys() & {field.name for field in fields(EngineSizes)} - {"weight_bytes"}
    sizes = replace(plain_sizes(POOL, 4, 64, 128), **{name: own.pop(name) for name in names})
    vars(sizes)["captured"] = own.pop("captured", ())
    own = {"weight_bytes": 10**6, "utilization": 0.9, "num_pages": None, "scratch": 0} | own
    return plan_memory(CONFIG, sizes, torch.device(kind), **own)


def test_a_page_of_the_06b_shape_by_hand() -> None:
    assert POOL.page_bytes == 16 * 28 * 2 * 8 * 128 * 2


def test_the_parts_add_up_to_the_budget() -> None:
    ledger = planned()
    parts = (ledger.weights, ledger.activations, ledger.sequences, ledger.graphs, ledger.kv, ledger.margin)
    assert sum(parts) == ledger.budget
    assert ledger.pages == 4 * 128 // 16, "a CPU takes no more than its sequences could use"
    assert ledger.tokens == 4 * 128
    assert any(f"{ledger.tokens:,} tokens" in line for line in ledger.lines())


def test_fixed_states_are_counted_for_slots_padding_and_prefixes() -> None:
    fixed = RecurrentState(((4, 16, 32), (3, 80)), (torch.float32, None))
    states = [fixed if layer % 4 else PagedRows((8, 128)) for layer in range(28)]
    shape = StateShape.of(states, torch.bfloat16)
    assert shape is not None
    row = 21 * (4 * 16 * 32 * 4 + 3 * 80 * 2)
    assert shape.row_bytes == row
    groups = page_groups(states, POOL, 128)
    assert [group.layers for group in groups] == [(0, 4, 8, 12, 16, 20, 24)]
    own = {"states": shape, "groups": groups}
    ledger, without = (planned(**own | {"takes_snapshots": takes}) for takes in (True, False))
    assert (ledger.state_rows, ledger.snapshots, ledger.states) == (4 + 1 + 2 * 4, 2 * 4, 13 * row)
    assert (without.state_rows, without.snapshots) == (4 + 1, 0)
    assert ledger.page_bytes == 16 * 7 * 2 * 8 * 128 * 2
    parts = (ledger.weights, ledger.activations, ledger.sequences, ledger.graphs, ledger.kv, ledger.states)
    assert sum(parts) + ledger.margin == ledger.budget
    pool = StatePool(shape, 13, torch.device("cpu"))
    assert sum(tensor.nbytes for tensors in pool.tensors for tensor in tensors) == ledger.states
    assert [len(tensors) for tensors in pool.tensors[:5]] == [0, 2, 2, 2, 0]
    huge = StateShape.of([RecurrentState(((1 << 40,),), (None,))], torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"fixed size of max_num_seqs=4 sequences need 10240.00 GiB: lower max_num_seqs"
    ):
        planned(**own | {"states": huge})


def test_experts_of_ranks_with_tokens_of_their_own_compute_the_rows_of_all() -> None:
    alone, shared = (planned(sources=count, max_tokens=tokens) for count, tokens in ((1, 256), (4, 64)))
    assert shared.activations == alone.activations - (256 - 64) * CONFIG.vocab_size * (2 + SAMPLING_BYTES)


@pytest.mark.parametrize(("free", "wanted"), [(141, 0.9 * 141), (111, 0.9 * 141 - 30), (20, 0.9 * 141 - 121)])
def test_others_on_a_gpu_keep_what_they_have_and_the_rest_stays_free(
    free: int, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "available_memory", lambda _: (free * GIB, 141 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    ledger = planned("cuda")
    assert ledger.budget == pytest.approx(wanted * GIB, abs=1)
    assert ledger.others == (141 - free) * GIB
    assert 0 <= ledger.margin < ledger.page_bytes
    assert ("in use already" in ledger.lines()[0]) == (free < 141)
    assert free * GIB - ledger.budget == pytest.approx(0.1 * 141 * GIB, abs=1), "what utilization leaves"


def test_a_gpu_that_others_have_filled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "available_memory", lambda _: (10 * GIB, 141 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    with pytest.raises(ValueError, match=r"131\.00 in use already"):
        planned("cuda")


def test_what_is_kept_for_sequences_by_hand() -> None:
    history = 8 * 40961
    tables = 2 * 4 * 2560
    assert sequence_bytes(CONFIG, 256, 40960, 16) == 257 * (history + tables + 151936 // 8 + 4)
    assert planned().sequences == sequence_bytes(CONFIG, 4, 128, 16)
    sampler = Sampler(256, 40960, torch.device("cpu"))
    params = SamplingParams(repetition_penalty=1.3)
    sampler.admit(new_sequence(Sequence(0, Request("0", (1, 2), params), 0, 9, [1, 2], 2), 3, 0))
    assert sampler._history is not None
    assert sampler._history.nbytes == 256 * history


def test_what_attention_needs_is_counted() -> None:
    pytest.importorskip("triton")
    from strata.kernels.attention import batch_invariant as attention_fixed
    from strata.kernels.attention import decode_cuda as decode_attention_cuda

    # 32 parts up to 8,192 keys, and 16 for each doubling after that.
    assert attention_fixed.scratch_bytes(256, 131072, 32, 128) == 256 * (32 + 4 * 16) * 32 * (128 + 2) * 4
    shape = (4096, 32, 8, 128, torch.bfloat16)
    assert decode_attention_cuda.scratch_bytes(256, *shape, rounded=False) == 256 * 4 * 32 * (128 + 1) * 4
    # Of 8 KV heads with four query heads 528 programs; over pools in 8 bits 512 for each KV head.
    assert decode_attention_cuda.scratch_bytes(8, *shape, rounded=False) == 8 * 8 * 32 * (128 + 1) * 4
    assert decode_attention_cuda.scratch_bytes(8, *shape, rounded=True) == 8 * (4096 // 256) * 32 * (128 + 1) * 4
    plain = planned()
    more = planned(scratch=10**6)
    assert more.activations == plain.activations + 10**6


def test_recorded_steps_keep_the_largest_logits_and_activations() -> None:
    sizes = [BufferShape(256, 256, 256), BufferShape(2048, 17, 16)]
    ledger = planned(captured=sizes, scratch=10**6)
    activations = 2048 * (2 * CONFIG.hidden_size + 3 * CONFIG.intermediate_size) * 2
    assert ledger.graphs == 256 * CONFIG.vocab_size * 2 + activations + GIB // 2 + 10**6
    assert any("2 sizes of steps" in line for line in ledger.lines())
    assert planned(scratch=10**6).graphs == 0


def test_activations_cover_what_sampling_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a draw that asks for everything; the draw itself is one kernel on CUDA."""
    monkeypatch.setattr(sampler_module, "draw_ids", lambda logits, *_: logits.argmax(-1).int())
    rows, vocabulary = 16, 20000
    params = SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2, logit_bias={5: 1.0}, logprobs=5
    )
    prompt = tuple(range(30))
    sequences = [Sequence(i, Request(str(i), prompt, params), 0, 40, list(prompt), 30) for i in range(rows)]
    held = [DrawRow(new_sequence(sequence, slot, 0), 30) for slot, sequence in enumerate(sequences)]
    sampler = Sampler(rows, 64, torch.device("cpu"))
    for row in held:
        sampler.admit(row.sequence)
    masks = torch.full((rows, vocabulary // 32), -1, dtype=torch.int32), torch.arange(rows, dtype=torch.int32)
    logits = torch.randn(rows, vocabulary).to(torch.bfloat16)
    inputs: Any = None
    with torch.inference_mode(), LiveBytes() as live:
        sampler.draw(logits, held, inputs, True, masks)
    assert 30 * rows * vocabulary < live.most <= SAMPLING_BYTES * rows * vocabulary


@pytest.mark.parametrize("own", [{}, {"num_pages": 4}], ids=["pages-as-fit", "pages-given"])
def test_weights_that_do_not_fit_are_named_before_all_else(own: dict[str, Any]) -> None:
    """Neither shorter sequences nor fewer pages would help."""
    memory = DeviceMemory("a GPU", 9 * GIB, 10 * GIB)
    own = own | {"memory": memory, "weight_bytes": 9 * GIB}
    with pytest.raises(
        PoolTooSmall, match=r"^the weights alone do not fit: they need 9\.00 GiB, and 8\.00 of a GPU "
    ) as raised:
        planned("cuda", **own)
    first, *ledger = str(raised.value).splitlines()
    assert first.endswith(": take a device with more memory")
    assert ledger[0].startswith("memory on a GPU: 8.00 GiB to use of 10.00")
    options = str(raised.value.with_options(["tensor_parallel_size=2", "quantization='fp8'"])).splitlines()
    assert options[0] == f"{first}, or give tensor_parallel_size=2 or quantization='fp8'"
    assert options[1:] == ledger


def test_an_engine_that_does_not_start_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor, whose memory ranks share: more of them have no more room."""
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 1}
    given |= {"max_num_batched_tokens": 32, "skip_tokenizer_init": True, "verbose": False}
    free = int(0.95 * LLM("builtin", **given).engine.ledger.weights)
    monkeypatch.setattr(ledger_module, "available_memory", lambda _: (free, free))
    with pytest.raises(PoolTooSmall, match="the weights alone do not fit") as raised:
        LLM("builtin", **given)
    first, *_ = str(raised.value).splitlines()
    assert first.endswith(": take a device with more memory, or give quantization='fp8'")
    assert LLM("builtin", quantization="fp8", **given).engine.ledger.weights < free


def test_too_little_room_for_one_sequence_names_the_remedies() -> None:
    with pytest.raises(
        ValueError, match=r"max_model_len=.*: lower max_model_len, max_num_seqs or max_num_batched_tokens, or raise"
    ):
        planned(max_length=10**9, max_sequences=1)


def test_more_pages_than_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="KV pages do not fit"):
        planned(num_pages=10**9)


def test_activations_cover_what_a_layer_holds() -> None:
    tokens = 10
    gate_up_and_product = 3 * CONFIG.intermediate_size
    residual_and_norm = 2 * CONFIG.hidden_size
    assert activation_bytes(CONFIG, tokens, 0, torch.bfloat16) == 2 * tokens * (residual_and_norm + gate_up_and_product)


def test_activations_cover_what_a_state_space_holds() -> None:
    """Gate, channels and time steps; the channels after the convolution, of which some are the states'; and the result;
    beside residuals in float32 and their norm."""
    sizes = {"num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 2, "hidden_size": 2560, "vocab_size": 100}
    named = {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_hidden_layers": 3}
    held = (5120 + (5120 + 2 * 2 * 128) + 80) + (5120 + 2 * 2 * 128) + 5120
    assert activation_bytes(config_from_dict(named | sizes), 10, 0, torch.bfloat16) == 2 * 10 * (3 * 2560 + held)


def test_activations_cover_what_experts_hold() -> None:
    """Eight rows of a token, sorted by expert; what the gates and ups of 768 columns and their products are, and the
    rows that come of them; beside the residual and its norm."""
    held = 8 * (2048 + 3 * 768 + 2048)
    assert activation_bytes(config_from_dict(SHAPES["30B-A3B"]), 10, 0, torch.bfloat16) == 20 * (2 * 2048 + held)


def test_activations_cover_what_a_gated_delta_net_and_gated_attention_hold() -> None:
    """Of the published Qwen3-Next: queries, keys, values, gates, strengths and decays, the channels after the
    convolution, and the result. With few heads there, attention: queries and gates, keys, values and what is found,
    the gates' sigmoids and what they let through."""
    config = replace(config_from_dict(SHAPES["80B-A3B"]), experts=None)
    assert config.recurrence is not None
    held = (2 * 2048 + 2 * 4096 + 64) + (2 * 2048 + 4096) + 4096
    assert activation_bytes(config, 10, 0, torch.bfloat16) == 2 * 10 * (2 * 2048 + held)
    few = replace(config, recurrence=replace(config.recurrence, heads=16))
    held = 16 * 256 * (2 + 1 + 1 + 1) + 2 * 2 * 256
    assert activation_bytes(few, 10, 0, torch.bfloat16) == 2 * 10 * (2 * 2048 + held)


def test_pages_that_are_numbers_alone_are_not_without_bound() -> None:
    """Of all of them the host would hold the ids, once enough has run."""
    states = [RecurrentState(((4, 4),), (None,))] * 28
    own = {"states": StateShape.of(states, torch.bfloat16), "groups": page_groups(states, POOL, 1 << 20)}
    few, many = (
        planned(**own | {"max_length": length, "max_sequences": sequences})
        for length, sequences in ((128, 4), (1 << 20, 64))
    )
    assert (few.pages, few.kv) == (2 * 4 * 128 // 16, 0)
    assert (1 << 20) // 16 <= many.pages <= 1 << 21
    assert many.kv == 0


def test_activations_cover_the_rows_of_all_experts_of_a_token() -> None:
    """gpt-oss: two experts of 32; their gated products are computed in float32."""
    config = config_from_dict(dict(GPT_OSS_CONFIGS)["gpt-oss-yarn"])
    both, temporaries = 2 * 32 * 2, 4 * 32 * 4
    assert activation_bytes(config, 10, 0, torch.bfloat16) == 10 * (2 * 64 * 2 + 2 * (both + temporaries))


def test_activations_of_a_rank_cover_sums_over_ranks() -> None:
    """Narrow products of eight ranks; the residual, a part, the sum of parts and the norm are as wide as ever."""
    heads, hidden = 1, CONFIG.hidden_size
    rank = replace(CONFIG, num_heads=heads, num_kv_heads=heads, head_dim=8, intermediate_size=8)
    assert activation_bytes(rank, 10, 0, torch.bfloat16) == 2 * 10 * 4 * hidden


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 500])
def test_every_batch_size_has_a_bucket_that_wastes_little(most: int) -> None:
    buckets = decode_buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most
    for size in range(1, most + 1):
        bucket = next(bucket for bucket in buckets if bucket >= size)
        assert bucket <= max(2 * size, size + 31)
