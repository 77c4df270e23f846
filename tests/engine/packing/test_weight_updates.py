"""Weights that change in a running engine, tensor by tensor, are those of an engine that was started from them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, fx

from strata import LLM, SamplingParams
from strata.comm.operations import Along
from strata.engine.ranks import ranked_runner
from strata.engine.startup.packing import Packing
from strata.graph.compose import compose
from strata.graph.merge import merge
from strata.graph.quantize import quantize
from strata.graph.ranks.shard import shard as shard_graph
from strata.graph.trace import trace, trace_head
from strata.kernels.quant.quantized import Scheme, dense, pack
from strata.models.config import ModelConfig, config_from_dict
from strata.models.experts import Experts
from strata.models.families import build
from strata.models.quantized import checkpoint
from strata.models.save import save
from strata.models.weights import WeightStore, load
from strata.parallel.serving_shard import TENSOR_AXIS, RankShard
from tests.graph.lockstep import run_in_lockstep
from tests.live_bytes import LiveBytes
from tests.models.batches import packed, random_sequences
from tests.models.quantized.made import LAYOUTS
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS
from tests.models.test_save import CountedReader
from tests.parallel.models import BIASED_CONFIGS, CONFIGS, WHOLE_CONFIGS, config_of, random_model

from .test_quantized_checkpoints import LLAMA, written

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_pages": 24,
    "page_size": 8,
    "max_num_seqs": 2,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,  # its keys would be of the weights before
    "verbose": False,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=20, prompt_logprobs=20, detokenize=False)
PROMPTS = [{"prompt_token_ids": [(7 * place + 3) % 47 for place in range(length)]} for length in (19, 5)]
PACKED = {"intermediate_size": 40}
# Name of a configuration, how it is packed, and what is other than there.
CASES: list[tuple[str, str | None, dict[str, Any]]] = [
    *((name, None, {}) for name in (*CONFIGS, *BIASED_CONFIGS, *WHOLE_CONFIGS, *RECURRENT_CONFIGS)),
    *(("llama-biases-tied", scheme, PACKED) for scheme in ("int8", "int4", "fp8", "fp8_block", "mxfp4", "nvfp4")),
    *((name, "int4", PACKED) for name in ("gemma3", "phi3", "mixtral")),
    ("deepseek-v3", "fp8_block", PACKED),
    ("granite-hybrid-experts", "int8", {}),
]
IDS = [f"{name}-{scheme}" for name, scheme, _ in CASES]


def config_by(name: str, changes: dict[str, Any]) -> ModelConfig:
    if name in RECURRENT_CONFIGS:
        return config_from_dict(RECURRENT_CONFIGS[name] | changes)
    return config_of(name, **changes)


def saved(folder: Path, config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Random weights of a model in a folder, as its file has them."""
    save(random_model(config, config.dtype or torch.float32, seed), config, folder)
    return load_file(folder / "model.safetensors")


def answers(llm: LLM) -> list[Any]:
    """Ids, and of each and of the prompt's the most probable with their log-probabilities."""
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        (
            one.outputs[0].token_ids,
            [
                {token: value.logprob for token, value in place.items()}
                for place in (*(one.prompt_logprobs or ())[1:], *(one.outputs[0].logprobs or ()))
            ],
        )
        for one in found
    ]


def operands(store: WeightStore) -> Iterator[tuple[str, Tensor]]:
    """All memory that a store's model computes with."""
    for name, parameter in store.model.named_parameters():
        if not parameter.is_meta:
            yield name, parameter.detach()
    for name, weight in store.quantized.items():
        yield from ((f"{name} {field}", one) for field, one in weight.tensors.items())


def assert_alike(one: WeightStore, other: WeightStore) -> None:
    mine, theirs = dict(operands(one)), dict(operands(other))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (value.dtype, value.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert torch.equal(value.contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize(
    ("name", "scheme", "changes", "passes"),
    [*((*case, "all") for case in CASES), ("llama-biases-tied", None, {}, "+fold_norm_weights")],
    ids=[*IDS, "folded"],
)
def test_an_updated_engine_is_one_that_was_started_so(
    name: str, scheme: str | None, changes: dict[str, Any], passes: str, tmp_path: Path
) -> None:
    config = config_by(name, changes)
    before, tensors = saved(tmp_path / "before", config, 0), saved(tmp_path / "after", config, 1)
    options = OPTIONS | {"passes": passes}
    running, fresh = (LLM(tmp_path / at, quantization=scheme, **options) for at in ("before", "after"))
    old, wanted = answers(running), answers(fresh)
    assert old != wanted
    store = running.engine.weights
    if scheme is None:
        given = dict(store.export())
        assert given.keys() == before.keys()
        assert all(torch.equal(value, before[one]) for one, value in given.items())
    for one, value in tensors.items():
        store.update(one, value)
    assert_alike(store, fresh.engine.weights)
    assert answers(running) == wanted
    for one, value in before.items():
        store.update(one, value)
    assert answers(running) == old


RANKED: list[tuple[str, str | None, dict[str, Any], dict[str, Any]]] = [
    ("llama-biases-tied", None, PACKED, {}),
    ("llama-biases-tied", "int4", PACKED, {}),
    ("phi3", "int8", PACKED, {}),
    ("gpt-oss", None, {}, {}),
    ("glm4-moe", None, PACKED | {"torch_dtype": "bfloat16"}, {}),
    ("mixtral", "fp8", PACKED, {}),
    ("qwen3-moe", None, PACKED | {"moe_intermediate_size": 16}, {"expert_parallel": True}),
    ("deepseek-v3", "fp8_block", PACKED, {"expert_parallel": True}),
    ("llama", None, {}, {"stages": 2}),
    ("granite-hybrid-experts", "int8", {"mamba_n_heads": 8, "intermediate_size": 8}, {"expert_parallel": True}),
]


def part_store(folder: Path, scheme: str | None, shard: RankShard) -> WeightStore:
    with torch.device("meta"):
        own = shard.build()
    return WeightStore.load(folder, Packing.of(scheme, own, shard).schemes, part=shard)


def rank_graph(store: WeightStore, shard: RankShard) -> fx.GraphModule:
    """Batch to this rank's logits of all tokens, its weights merged."""
    along = Along(TENSOR_AXIS, shard.size)
    parts = [
        quantize(shard_graph(one, shard.placements, along, shard.index, shard.slots), store.quantized)
        for one in (trace(store.model), trace_head(store.model))
    ]
    return merge(compose(*parts))


@torch.no_grad()
@pytest.mark.parametrize(("name", "scheme", "changes", "options"), RANKED)
def test_ranks_take_their_parts_and_give_them_out_whole(
    name: str, scheme: str | None, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    config = config_by(name, changes)
    saved(tmp_path / "before", config, 0)
    tensors = saved(tmp_path / "after", config, 1)
    places = [{"stage": index} if "stages" in options else {} for index in (0, 1)]
    size = 1 if "stages" in options else 2
    shards = [RankShard.of(config, size, index % size, **options, **place) for index, place in enumerate(places)]
    running, fresh = ([part_store(tmp_path / at, scheme, one) for one in shards] for at in ("before", "after"))
    graphs, wanted = (
        [rank_graph(store, shard) for store, shard in zip(stores, shards, strict=True)] if size == 2 else []
        for stores in (running, fresh)
    )
    batches = [(packed(random_sequences(config.vocab_size, (9, 4))),)] * 2
    before = run_in_lockstep(graphs, batches) if graphs else []
    for one, value in tensors.items():
        for store in running:
            store.update(one, value)
    for store, twin in zip(running, fresh, strict=True):
        assert_alike(store, twin)
    if graphs:
        found = run_in_lockstep(graphs, batches)
        assert not any(map(torch.equal, found, before))
        assert all(map(torch.equal, found, run_in_lockstep(wanted, batches)))
    given = dict(running[0].export(running[1:]))
    assert given.keys() == tensors.keys()
    with torch.device("meta"):
        whole = build(config)
    complete = WeightStore.load(tmp_path / "after", Packing.of(scheme, whole).schemes)
    assert all(torch.equal(value, given[one]) for one, value in complete.export())
    if scheme is None:
        assert all(torch.equal(value, tensors[one]) for one, value in given.items())
    with pytest.raises(ValueError, match="is not whole: give the stores of all parts"):
        dict(running[0].export())


def pruned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two of four weights of each product's rows are zeros."""
    for name, tensor in tensors.items():
        if "_proj.weight" in name:
            tensor.view(-1, 4)[:, :2] = 0.0
    return tensors


RUNNING: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama-biases-tied", {"intermediate_size": 48}, {"tensor_parallel_size": 2, "sparsity": "2:4"}),
    (
        "qwen3-moe",
        {"moe_intermediate_size": 16, "torch_dtype": "bfloat16"},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_dp_attention": True},
    ),
    ("phi3", PACKED, {"pipeline_parallel_size": 2, "quantization": "int8"}),
]


@pytest.mark.parametrize(("name", "changes", "ranked"), RUNNING, ids=["pruned", "experts", "stages"])
def test_an_update_reaches_all_ranks_of_a_running_engine(
    name: str, changes: dict[str, Any], ranked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked_runner, "_TENSOR_BYTES", 1000)  # of which a tensor has several
    config = config_by(name, changes)
    stored = {at: saved(tmp_path / at, config, seed) for seed, at in enumerate(("before", "after"))}
    if "sparsity" in ranked:
        for at, tensors in stored.items():
            save_file(pruned(tensors), tmp_path / at / "model.safetensors")
    options = OPTIONS | ranked
    wanted = answers(LLM(tmp_path / "after", **options))
    gc.collect()  # a process is in one group of ranks at a time
    llm = LLM(tmp_path / "before", **options)
    old = answers(llm)
    assert old != wanted
    for one, value in stored["after"].items():
        llm.engine.weights.update(one, value)
    assert answers(llm) == wanted
    if "sparsity" in ranked:  # of rows that the second rank has
        wrong = stored["after"]["model.layers.0.mlp.up_proj.weight"].clone()
        wrong[-1] = 1.0
        with pytest.raises(ValueError, match="the part of another rank does not fit the scheme"):
            llm.engine.weights.update("model.layers.0.mlp.up_proj.weight", wrong)
        assert answers(llm) == wanted
    with pytest.raises(ValueError, match="expected floats"):
        llm.engine.weights.update("model.norm.weight", torch.ones(config.hidden_size, dtype=torch.int64))
    for one, value in stored["before"].items():
        llm.engine.weights.update(one, value)
    assert answers(llm) == old
    del llm
    gc.collect()


@pytest.mark.parametrize("name", ["qwen3-moe", "granite-hybrid-experts"])
@torch.no_grad()
def test_experts_that_were_moved_are_found_in_their_slots(name: str, tmp_path: Path) -> None:
    """In every one that holds a copy."""
    changes = {"num_local_experts": 8} if name.startswith("granite") else {"moe_intermediate_size": 16}
    config = config_by(
        name, PACKED | changes | {"mamba_n_heads": 8} if name.startswith("granite") else PACKED | changes
    )
    saved(tmp_path / "before", config, 0)
    tensors = saved(tmp_path / "after", config, 1)
    shard = RankShard.of(config, 2, 1, expert_parallel=True, redundant=4)
    running, twin = (WeightStore.load(tmp_path / at, {}, part=shard) for at in ("before", "after"))
    whole, _ = load(tmp_path / "after")
    for one, value in tensors.items():
        running.update(one, value)
    assert_alike(running, twin)
    held = (5, 2, 2, 7, 0, 5)
    for module in running.model.modules():
        if isinstance(module, Experts):
            module.local = held
    for one, value in tensors.items():
        running.update(one, value)
    for path, module in running.model.named_modules():
        if isinstance(module, Experts):
            for own, parameter in module.named_parameters():
                assert torch.equal(parameter, whole.get_parameter(f"{path}.{own}")[list(held)]), (path, own)


WRONG: list[tuple[str, Any, str]] = [
    ("model.layers.0.self_attn.q_proj.weight", torch.zeros(2, 24), r"is a part of .*qkv_proj\.weight in the model's"),
    ("model.layers.7.mlp.down_proj.weight", torch.zeros(24, 40), "is no tensor of the model's checkpoints, which have"),
    ("model.layers.0.mlp.down_proj.weight", torch.zeros(24, 41), r"is \[24, 41\], expected \[24, 40\]: give the whole"),
    ("model.norm.weight", torch.ones(24, dtype=torch.int64), "has dtype torch.int64, expected floats"),
    ("model.norm.weight", torch.ones(24).to(torch.float8_e4m3fn), "has dtype torch.float8_e4m3fn, expected floats"),
    ("lm_head.weight", torch.zeros(61, 24), r"is tied to model\.embed_tokens\.weight by config\.json: update that"),
    ("model.layers.0.mlp.gate_up_proj.weight", torch.ones(80, 24), "cannot be packed: 4 of four weights in a row are"),
]


@pytest.mark.parametrize(("name", "tensor", "told"), WRONG)
def test_what_is_refused_changes_nothing(name: str, tensor: Tensor, told: str, tmp_path: Path) -> None:
    """Of a tensor that holds two matrices, too, of which the first could be packed."""
    config = config_of("phi3", intermediate_size=40, tie_word_embeddings=True)
    model = random_model(config, torch.float32)
    scheme = Scheme("2:4", 1, 8)
    sparse = {f"model.layers.0.mlp.{one}_proj.weight": scheme for one in ("gate", "up")}
    with torch.no_grad():
        for one in sparse:
            model.get_parameter(one).view(-1, 4)[:, :2] = 0.0
    save(model, config, tmp_path)
    store = WeightStore.load(tmp_path, sparse)
    if "gate_up" in name:
        tensor = tensor.clone()
        tensor[:40] = 0.0
    kept = {one: value.clone() for one, value in operands(store)}
    with pytest.raises(ValueError, match=told) as error:
        store.update(name, tensor)
    assert str(error.value).startswith(name.replace("gate_up", "up"))
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, kept[one]) for one, value in operands(store))


def test_what_a_start_passes_over_an_update_does_too(tmp_path: Path) -> None:
    config = config_of("deepseek-v3", **PACKED)
    saved(tmp_path, config, 0)
    store = WeightStore.load(tmp_path, {})
    kept = {one: value.clone() for one, value in operands(store)}
    for name in ("model.layers.2.embed_tokens.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"):
        store.update(name, torch.zeros(3))
    assert all(torch.equal(value, kept[one]) for one, value in operands(store))


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_what_a_checkpoint_packed_is_packed_again_in_its_form(layout: str, tmp_path: Path) -> None:
    """Zeros, order of columns, type of scales and scale of activations stay; values are the nearest."""
    written(tmp_path, layout)
    with torch.device("meta"):
        empty = build(config_from_dict(LLAMA))
    schemes = Packing.of(None, empty, folder=tmp_path).schemes
    store = WeightStore.load(tmp_path, schemes, dtype="float32")
    graph = merge(quantize(trace(store.model), store.quantized))
    batch = packed(random_sequences(store.config.vocab_size, (9, 4)))
    old = graph(batch)
    before = {name: replace_tensors(weight) for name, weight in store.quantized.items()}
    generator = torch.Generator().manual_seed(0)
    assert before
    for name, was in before.items():
        value = torch.randn(was.shape, generator=generator)
        value[:32] = 0.0
        store.update(name, value)
        now = store.quantized[name]
        assert now._replace(values=None, scales=None, zeros=None, row_scales=None, order=None) == was._replace(
            values=None, scales=None, zeros=None, row_scales=None, order=None
        )
        for field, one in now.tensors.items():
            assert (one.dtype, one.shape) == (was.tensors[field].dtype, was.tensors[field].shape)
        if now.order is not None:
            assert torch.equal(now.order, was.order)
        columns = torch.arange(was.shape[-1]) if now.order is None else now.order.long()
        nearest = torch.empty_like(value)
        nearest[:, columns] = dense(pack(value[:, columns], schemes[name]))
        assert torch.equal(dense(now)[:16], value[:16])
        step = (nearest - value).abs().max()
        assert (dense(now) - value).abs().max() <= 2.1 * step
        assert (dense(now) - value).square().mean() <= 2.5 * (nearest - value).square().mean()
    wanted = quantize(trace(store.model), store.quantized)(batch)
    assert (graph(batch) - wanted).abs().max() < 1e-4 * (old - wanted).abs().max()


def replace_tensors(weight: Any) -> Any:
    return weight.with_tensors({name: one.clone() for name, one in weight.tensors.items()})


@pytest.mark.parametrize("scheme", [None, "int4"])
def test_a_start_reads_each_byte_once(scheme: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama", intermediate_size=40)
    tensors = saved(tmp_path, config, 0)
    counts: dict[str, int] = {}
    safe_open = checkpoint.safe_open
    monkeypatch.setattr(checkpoint, "safe_open", lambda *a, **k: CountedReader(safe_open(*a, **k), counts))
    with torch.device("meta"):
        schemes = Packing.of(scheme, build(config)).schemes
    WeightStore.load(tmp_path, schemes)
    assert counts == {name: tensor.nbytes for name, tensor in tensors.items()}


def test_weights_are_held_once_also_when_they_are_merged_and_updated(tmp_path: Path) -> None:
    tensors = saved(tmp_path, config_of("qwen3-moe", **PACKED), 0)
    with LiveBytes(tensors.values()) as live:
        store = WeightStore.load(tmp_path, {})
        merge(trace(store.model))
        loaded = live.now
        for name, value in tensors.items():
            store.update(name, value)
    kept = [one.untyped_storage() for one in (*store.model.parameters(), *store.model.buffers())]
    assert live.now == loaded == sum({one._cdata: one.nbytes() for one in kept}.values())
