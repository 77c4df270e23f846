"""The weights of published models, by name: what `strata bench kernels --tune` can make a device's table for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Protocol


class Sizes(Protocol):
    """Of a model, what the shapes of its weights follow from, named as in a config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class Published:
    """The sizes in a model's config.json; of a shard, what one of `ranks` has."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    ranks: int = 1

    @staticmethod
    def of(sizes: Sizes) -> Published:
        return Published(**{one.name: getattr(sizes, one.name) for one in fields(Published) if one.name != "ranks"})

    def shard(self, ranks: int) -> Published:
        """What one of several ranks has of it: its part of the heads, of the inner width and of the vocabulary.

        Raises ValueError if they cannot be divided.
        """
        if ranks < 1 or any(size % ranks for size in (self.num_kv_heads, self.intermediate_size, self.vocab_size)):
            raise ValueError(f"{self} cannot be divided among {ranks} ranks")
        return replace(
            self,
            intermediate_size=self.intermediate_size // ranks,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            vocab_size=self.vocab_size // ranks,
            ranks=ranks,
        )


_LLAMA_70B = Published(8192, 28672, 64, 8, 128, 128256)

PUBLISHED = {
    "Qwen2.5-0.5B": Published(896, 4864, 14, 2, 64, 151936),
    "Llama-3.2-1B": Published(2048, 8192, 32, 8, 64, 128256),
    "Llama-3.2-3B": Published(3072, 8192, 24, 8, 128, 128256),
    "Qwen3-1.7B": Published(2048, 6144, 16, 8, 128, 151936),
    "Qwen3-4B": Published(2560, 9728, 32, 8, 128, 151936),
    "Qwen3-8B": Published(4096, 12288, 32, 8, 128, 151936),
    "Qwen3-14B": Published(5120, 17408, 40, 8, 128, 151936),
    "Qwen3-32B": Published(5120, 25600, 64, 8, 128, 151936),
    "Mistral-7B": Published(4096, 14336, 32, 8, 128, 32768),
    "Llama-3.3-70B": _LLAMA_70B,
    "Llama-3.3-70B/2": _LLAMA_70B.shard(2),
    "Llama-3.3-70B/4": _LLAMA_70B.shard(4),
    "Llama-3.3-70B/8": _LLAMA_70B.shard(8),
}
