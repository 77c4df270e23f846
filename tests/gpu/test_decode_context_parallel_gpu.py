"""Ranks that divide keys by sequence: side by side on one GPU with the logits of one rank, on two with its answers."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from strata import LLM, SamplingParams
from strata.comm.join_heads import joined
from strata.kernels.collective.joined_heads import pack_heads, unpack_heads
from strata.kernels.device_limits import DeviceLimits
from tests.engine.program.programs import graph_of, step_program
from tests.gpu.ranks import require_gpus
from tests.graph.lockstep import run_in_lockstep
from tests.largest import largest
from tests.models.batches import HandPaged
from tests.parallel.models import SIZES, random_model
from tests.parallel.shards import divisible_config, shard_of
from tests.parallel.shards import joined as of_all_ids
from tests.parallel.test_decode_context_parallel import DcpPaged, steps_of

pytestmark = pytest.mark.gpu

WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}


def on(device: str, caches: list[Any]) -> None:
    """Pools full of zeros, of which none that was not written may matter."""
    for cache in caches:
        cache.keys = tuple(pool.zero_().to(device) for pool in cache.keys)
        cache.values = cache.keys if cache.values is cache.keys else tuple(p.zero_().to(device) for p in cache.values)


def errors(name: str, kv_heads: int | None, size: int, dtype: torch.dtype, device: str, way: str) -> list[float]:
    """Of the logits of each step by the graphs of this name."""
    config = divisible_config(name, num_key_value_heads=kv_heads, **(WIDE if kv_heads else {}))
    model = random_model(config, dtype).requires_grad_(False)
    parts = [shard_of(model, config, size, index, key_ranks=size) for index in range(size)]
    limits = DeviceLimits.of(torch.device(device)) if device == "cuda" else None
    graphs = [
        graph_of(step_program(own.to(device), device, deterministic=False, shard=part, limits=limits), way)
        for part, own in parts
    ]
    caches = [DcpPaged(part.config, 3, 64, part.kept, 16) for part, _ in parts]
    for cache in caches:
        cache.keys, cache.values = (tuple(p.to(dtype) for p in pools) for pools in (cache.keys, cache.values))
    on(device, caches)
    alone = HandPaged(config, 3, 64, page_size=16, dtype=dtype)
    on(device, [alone])
    whole = step_program(model.to(device), device, deterministic=False, limits=limits).logits

    def there(arguments: Any) -> list[tuple[Any, ...]]:
        return [pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), one) for one in arguments]

    (wanted,) = steps_of([alone], lambda given: [whole(*there(given)[0])], config.vocab_size)
    found = steps_of(caches, lambda given: run_in_lockstep(graphs, there(given)), config.vocab_size)
    pairs = zip(of_all_ids(found, config.vocab_size), wanted, strict=True)
    return [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs if len(b)]


@pytest.mark.parametrize(
    ("name", "kv_heads", "size", "dtype"),
    [
        ("qwen3-biases-tied", 1, 2, torch.float32),
        ("qwen3-biases-tied", 1, 2, torch.bfloat16),
        ("deepseek-v3", None, 4, torch.float32),  # in 16 bits routers choose other experts than one rank does
    ],
)
@pytest.mark.parametrize("way", ["logits", "gathered_logits"])
def test_ranks_have_the_logits_of_one(way: str, name: str, kv_heads: int | None, size: int, dtype: torch.dtype) -> None:
    assert largest(errors(name, kv_heads, size, dtype, "cuda", way)) < (3e-2 if dtype == torch.bfloat16 else 1e-4)


def test_what_ranks_have_found_is_packed_and_joined() -> None:
    mixed, sums = torch.randn(4, 33, 4 * 3, 80).cuda(), 5 * torch.randn(4, 33, 4 * 3).cuda()
    sums[1:, 0] = -torch.inf
    packed = torch.stack([pack_heads(*one, 4) for one in zip(mixed, sums, strict=True)])
    found = [unpack_heads(packed[:, rank].contiguous(), 80, torch.float32) for rank in range(4)]
    torch.testing.assert_close(torch.cat(found, 1), joined(mixed, sums), rtol=1e-5, atol=1e-6)


def test_two_gpus_answer_as_one(tmp_path: Path) -> None:
    require_gpus(2)
    shape = SIZES | WIDE | {"num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 1024}
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {
        "load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 8,
        "max_num_batched_tokens": 128, "seed": 0, "verbose": False,
    }  # fmt: skip
    prompts = [[(step * at + 3) % 500 for at in range(length)] for length, step in ((300, 7), (1, 5), (90, 11))]

    def ids(llm: LLM) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts * 2], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    one = LLM(tmp_path, num_pages=100, **options)
    wanted = ids(one)
    del one
    gc.collect()
    two = LLM(tmp_path, num_pages=50, tensor_parallel_size=2, decode_context_parallel_size=2, **options)
    assert ids(two) == wanted
    assert two.engine.captured is not None
    assert set(two.engine.captured.uncaptured.values()) == {0}
