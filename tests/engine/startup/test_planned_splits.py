"""What splits of decodes wait in is planned as the pages are kept, whose splits follow rules of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from strata.engine.engine_config import EngineConfig
from strata.engine.ledger import DeviceMemory
from strata.engine.startup.memory import RankPlace, rank_memory, rank_part
from strata.hardware.specs import device
from strata.kernels.attention import decode_cuda
from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.decode_tile import decode_tile
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.state.paged import PagedKV
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_of_pages_in_8_bits_and_in_16(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = {}

    def noted(sequences: int, keys: int, *shape: Any, rounded: bool, some: bool) -> int:
        planned[sequences, some] = found = scratch_bytes(sequences, keys, *shape, rounded=rounded, some=some)
        return found

    scratch_bytes = decode_cuda.scratch_bytes
    monkeypatch.setattr(decode_cuda, "scratch_bytes", noted)
    asked = EngineConfig("nowhere", max_num_seqs=16, max_model_len=32768, kv_cache_dtype=kind)
    config = config_from_dict(SHAPES["8B"])
    memory = DeviceMemory("a GPU", 141 << 30, 141 << 30)
    place = RankPlace(torch.device("cuda"), DeviceLimits.listed(device("h200")), 0, memory)
    rank_memory(asked, config, place, rank_part(asked, config, place))
    assert set(planned) >= {(1, False), (2, False), (4, False), (8, False), (16, False), (17, True)}
    for (sequences, some), nbytes in planned.items():
        tile = decode_tile(32, 8, 128, torch.bfloat16, sequences, 32768, rounded=kind == "fp8", some=some)
        assert nbytes == sequences * tile.splits * 32 * (128 + 1) * 4


def test_decodes_beside_prompts_have_what_each_kernel_of_theirs_needs() -> None:
    """A step that is recorded knows its decodes on the device alone, and has more splits: 30 of 17 sequences, where 17
    that all decode have 4."""
    q = torch.empty((64, 32, 128), dtype=torch.bfloat16, device="meta")
    index = torch.empty(17, dtype=torch.int32, device="meta")
    kept = (torch.empty((9, 16, 8, 128), dtype=torch.bfloat16, device="meta"),)
    tables = torch.empty((17, 2048), dtype=torch.int32, device="meta")
    for decodes, splits in ((None, 30), (17, 4)):
        parts = BatchParts(index, index, index[:2], decodes)
        pages = PagedKV(kept, kept, tables, index, index, parts=parts)
        some = decodes is None
        needed = decode_cuda.scratch(q, 32, 128, 8, pages, 17)
        assert needed == 17 * splits * 32 * (128 + 1) * 4
        assert needed == decode_cuda.scratch_bytes(17, 32768, 32, 8, 128, q.dtype, rounded=False, some=some)
