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
from strata.kernels.attention.decode_tile import decode_tile
from strata.kernels.device_limits import DeviceLimits
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_of_pages_in_8_bits_and_in_16(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = {}

    def noted(sequences: int, keys: int, *shape: Any, rounded: bool) -> int:
        planned[sequences] = found = scratch_bytes(sequences, keys, *shape, rounded=rounded)
        return found

    scratch_bytes = decode_cuda.scratch_bytes
    monkeypatch.setattr(decode_cuda, "scratch_bytes", noted)
    asked = EngineConfig("nowhere", max_num_seqs=16, max_model_len=32768, kv_cache_dtype=kind)
    config = config_from_dict(SHAPES["8B"])
    memory = DeviceMemory("a GPU", 141 << 30, 141 << 30)
    place = RankPlace(torch.device("cuda"), DeviceLimits.listed(device("h200")), 0, memory)
    rank_memory(asked, config, place, rank_part(asked, config, place))
    assert set(planned) >= {1, 2, 4, 8, 16}
    for sequences, nbytes in planned.items():
        tile = decode_tile(32, 8, 128, torch.bfloat16, sequences, 32768, rounded=kind == "fp8")
        assert nbytes == sequences * tile.splits * 32 * (128 + 1) * 4
