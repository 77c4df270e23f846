"""The ids a step reads from the device: chosen by source, and harmless where nothing could be drawn."""

from __future__ import annotations

import torch

from strata.hardware.roofline import Workload
from strata.kernels.sampling.sampling import NO_ID
from strata.kernels.state.gather_tables import newest_tokens


def _ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_source_wins_over_the_token_and_a_missing_id_reads_zero() -> None:
    newest = _ids(70, 71, NO_ID, 73)
    read = newest_tokens(_ids(5, 6, 7, 8, 9), _ids(-1, 3, 0, 2, -1), newest)
    assert read.tolist() == [5, 73, 70, 0, 9]
    assert read.dtype == torch.int32
    assert newest.tolist() == [70, 71, NO_ID, 73]


def test_cost_counts_three_reads_and_a_write_of_four_bytes_a_token() -> None:
    tokens = torch.empty(10, dtype=torch.int32, device="meta")
    cost = newest_tokens.cost(
        tokens, tokens, torch.empty(300, dtype=torch.int32, device="meta"), workload=Workload((10,), (10,))
    )
    assert (cost.flops, cost.read, cost.written) == (0, 120, 40)
