"""Which tokens' keys and values a rank keeps, where ranks divide those of each sequence among them."""

from __future__ import annotations

from typing import Any, NamedTuple


class DcpShard(NamedTuple):
    """Of `ranks` that would keep the same keys, number `rank` keeps those at positions p with p % ranks == rank.

    Neighbouring tokens lie on different ranks, so that all have equally many of any sequence, to one. The key in a
    rank's j-th place of a sequence is that of position j * ranks + rank.
    """

    ranks: int = 1
    rank: int = 0

    def count(self, length: Any) -> Any:
        """How many of the first `length` tokens of a sequence; of integers, and of arrays and tensors of them."""
        return (length + self.ranks - 1 - self.rank) // self.ranks

    def pairs(self, length: int) -> int:
        """How many queries and keys see one another among the first `length` positions: each sees those kept here up to
        itself."""
        rest = max(0, length - self.rank)
        whole, more = divmod(rest, self.ranks)
        return rest + self.ranks * whole * (whole - 1) // 2 + whole * more


ALL_KEYS = DcpShard()
# In slot mappings, of a token whose key and value another rank keeps; padding has -1.
ELSEWHERE = -2
