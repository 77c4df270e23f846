"""Of which sizes of steps CUDA graphs are captured, and which of them a step replays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from strata.cache.tables import BufferShape
from strata.engine.program.shape import StepShape
from strata.engine.ranks.prefill_context_parallel import RankStep, TokenSharding, rows_of
from strata.kernels.attention.query_chunks import MAX_PROMPTS, MAX_TOKENS

# Launched kernel by kernel, steps with prompts keep the host busy for 15 to 43 ms. Without cuDNN they are captured as
# long as their products are shorter, 10 ms on a Hopper, and up to so many tokens for any model. Past that launches hide
# behind the device's work.
_RECORDED_FLOPS = 7e12
_ALWAYS_RECORDED = 2048
# Numbers of sequences that CUDA graphs of such steps hold: splits of decode attention and sampled rows follow them.
_MIXED_SEQUENCES = (16, 64, 256, 1024)
# Steps with more tokens have time for programs without work: none of those is for few sequences, and of still more
# tokens only two numbers of sequences are told apart.
_FEW_SEQUENCES_TOKENS, _MANY_SEQUENCES_TOKENS = 640, 3072
# From so many on, cuDNN attends faster than the kernel over pages, if there are few prompts.
LIBRARY_TOKENS = 448
# Behind so many keys shorter steps are padded to that: the kernel over pages has few programs then, each of which reads
# all keys. 256 tokens of 8B behind 16,000 are predicted to take 29 ms with it; padded they take 20.
LIBRARY_KEYS = 6144
# And from so many on a step's own keys, which nothing has to gather, save enough for CUDA graphs of their own.
_PURE_PREFILL_TOKENS = 2048
# Where it does, sizes for any number of prompts, which are short then: each is at most a half more than the one before.
_MANY_PROMPTS_TOKENS = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def captured_sizes(
    max_sequences: int,
    max_tokens: int,
    parameters: int,
    library: bool,
    pure_prefill: bool = False,
    division: TokenSharding | None = None,
    exchanged: int | None = None,
) -> list[BufferShape]:
    """All sizes of steps of a model that get a CUDA graph. library: cuDNN can attend for prompts in them, to gathered
    keys; pure_prefill: to those of the step itself. division: how ranks divide the tokens of some. exchanged: from how
    many tokens on rows go to the ranks of their experts alone, of which the host has to know; where launches hide
    behind the device's work such steps are launched."""
    most = min(max_sequences, max_tokens)  # each sequence of a step has a token
    decode = (BufferShape(count, count, count) for count in decode_buckets(most))
    largest = min(max_tokens, max_mixed_tokens(parameters, library or pure_prefill))
    mixed = mixed_buckets(most, largest, library, pure_prefill)
    if pure_prefill and not library:
        largest = max_mixed_tokens(parameters, library)
        mixed = [size for size in mixed if size.pure_prefill or size.tokens <= largest]
    if exchanged is not None:
        largest = max(exchanged - 1, max_mixed_tokens(parameters, library=False))
        mixed = [size for size in mixed if size.tokens <= largest]
    divided = []
    if division is not None:
        rows = min(rows_of(-(-max_tokens // division.ranks)), max_mixed_tokens(parameters, library))
        divided = sharded_buckets(most, rows, division, library)
    return [*decode, *mixed, *divided]


def max_mixed_tokens(parameters: int, library: bool) -> int:
    """Tokens of the largest steps with prompts that are captured of a model with so many weights."""
    return max(MAX_TOKENS if library else _ALWAYS_RECORDED, int(_RECORDED_FLOPS / (2 * parameters)) // 512 * 512)


def decode_buckets(most: int) -> list[int]:
    """Batch sizes of decode that get a CUDA graph: close together where padding would cost most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, most, 64)]
    return [*(size for size in sizes if size < most), most]


def mixed_buckets(max_sequences: int, max_tokens: int, library: bool, pure_prefill: bool = False) -> list[BufferShape]:
    """Sizes of steps with prompts that get a CUDA graph, ascending; padding is at most a quarter beyond 256 tokens, or
    a half where cuDNN can attend but there are too many prompts for it, and the largest step has a size of its own.

    One sequence more than a step may have, so that padding tokens always find one to belong to. pure_prefill: see
    `captured_sizes`; of such sizes a step that fits none runs another, so there are few.
    """
    tokens, largest = _mixed_rows(max_tokens)
    sizes = []
    for size in tokens:
        divided = library and size >= LIBRARY_TOKENS
        fitting = [count for count in _mixed_sequences(max_sequences) if count + 1 < size]
        if pure_prefill and size >= _PURE_PREFILL_TOKENS:
            count = min(max_sequences, MAX_PROMPTS)
            sizes.append(BufferShape(size, count + 1, count, count, pure_prefill=True))
        for count in _told_apart(size, fitting):
            sizes.append(BufferShape(size, count + 1, count, min(count, MAX_PROMPTS) if divided else None))
        if divided and fitting[-1] > MAX_PROMPTS and (size in _MANY_PROMPTS_TOKENS or size == largest):
            sizes.append(BufferShape(size, fitting[-1] + 1, fitting[-1]))
    return sizes


def sharded_buckets(max_sequences: int, max_rows: int, division: TokenSharding, library: bool) -> list[BufferShape]:
    """Sizes of a rank's share of steps whose tokens ranks divide, ascending: as close to each other as those of whole
    steps with as many tokens.

    A share may have two pieces of each prompt that is cut, and its draws are those of the whole step.
    """
    tokens, largest = _mixed_rows(max_rows)
    shortest = rows_of(-(-division.min_tokens // division.ranks))
    sizes = []
    for size in (size for size in tokens if size >= shortest):
        fitting = [count for count in _mixed_sequences(max_sequences) if count + 1 < size]
        cut, prompts, sequences = size // (2 * division.piece), None, 0
        for draws in _told_apart(size, fitting):
            sequences = draws + min(draws, cut) + 1
            prompts = min(sequences - 1, MAX_PROMPTS) if library and size >= LIBRARY_TOKENS else None
            sizes.append(BufferShape(size, sequences, draws, prompts, ranks=division.ranks))
        if prompts is not None and sequences - 1 > MAX_PROMPTS and (size in _MANY_PROMPTS_TOKENS or size == largest):
            sizes.append(BufferShape(size, sequences, draws, ranks=division.ranks))
    return sizes


def _mixed_rows(most: int) -> tuple[list[int], int | None]:
    """Tokens to which steps with prompts are padded, ascending, up to so many; and those of the largest, if that is a
    size of its own."""
    # Close to each other where steps with decodes end up; then as the tiles of products.
    tokens = [32, 64, 96, *range(128, 512, 64), *range(512, 576, 32), 576, 640, 704, 768, 896]
    tokens += [*range(1024, 2048, 256), *range(2048, 4096, 512), *range(4096, MAX_TOKENS + 1, 1024)]
    largest = most if most <= tokens[-1] else None
    return [*(size for size in tokens if size < most), *([] if largest is None else [largest])], largest


def _told_apart(tokens: int, sequences: list[int]) -> list[int]:
    """For which numbers of sequences, ascending, steps of so many tokens have sizes of their own."""
    if tokens <= _FEW_SEQUENCES_TOKENS:
        return sequences
    return sequences[-3 if len(sequences) > 3 and tokens <= _MANY_SEQUENCES_TOKENS else -2 :]


def _mixed_sequences(most: int) -> list[int]:
    return [*(count for count in _MIXED_SEQUENCES if count < most), most]


class StepSizes:
    """Sizes of which there are CUDA graphs.

    decodes: of steps in which every sequence has one token and is sampled; mixed: of others; divided: of a rank's share
    of those that ranks divide. Each ascends, and of equal sizes those come first in which cuDNN attends over the step's
    own keys, then those in which it does over gathered ones, of which there is room for so many `prompt_keys`.
    """

    def __init__(self, sizes: Iterable[BufferShape] = (), prompt_keys: int = 0) -> None:
        self.prompt_keys = prompt_keys
        ascending = sorted(sizes, key=_order)
        self.decodes = tuple(size for size in ascending if size.tokens == size.sequences)
        self.sharded = tuple(size for size in ascending if size.ranks > 1)
        self.mixed = tuple(size for size in ascending if size.ranks == 1 and size.tokens != size.sequences)

    def __len__(self) -> int:
        return len(self.decodes) + len(self.mixed) + len(self.sharded)

    def __iter__(self) -> Iterator[BufferShape]:
        return chain(self.decodes, self.mixed, self.sharded)

    def holding(self, shape: StepShape) -> BufferShape | None:
        """The smallest that holds a step, None if none does, as of prompts that are scored."""
        if shape.decodes:
            return next((size for size in self.decodes if size.sequences >= shape.sequences), None)
        return None if shape.scored else smallest_mixed(self.mixed, shape, self.prompt_keys)

    def holding_share(self, share: RankStep) -> BufferShape | None:
        """The smallest that holds the largest share of a step that ranks divide, one for all ranks."""
        tokens, sequences, draws, prompts, keys = share.max_sizes
        return smallest_mixed(
            self.sharded, StepShape(tokens, sequences, draws, prompts, prompt_keys=keys), self.prompt_keys
        )

    def would_hold(self, shape: StepShape) -> bool:
        """Whether one of them holds a step, or its share."""
        share = shape.share
        return (self.holding(shape) if share is None else self.holding_share(share)) is not None

    @property
    def mixed_tokens(self) -> tuple[int, ...]:
        """Tokens of steps with prompts, ascending."""
        return tuple(sorted({size.tokens for size in self.mixed}))

    @property
    def sharded_tokens(self) -> tuple[int, ...]:
        """The same of steps that ranks divide, of all ranks together."""
        return tuple(sorted({size.tokens * size.ranks for size in self.sharded}))

    @property
    def padded_tokens(self) -> tuple[int, ...]:
        """`mixed_tokens`, and from the shortest on that ranks divide, `sharded_tokens`."""
        divided = self.sharded_tokens
        return (*(tokens for tokens in self.mixed_tokens if not divided or tokens < divided[0]), *divided)

    @property
    def max_tokens(self) -> int:
        """Of a rank, in the largest step; 0 if there is none."""
        return max((size.tokens for size in self), default=0)


def _order(size: BufferShape) -> tuple[int, int, bool, bool]:
    return size.tokens, size.sequences, size.prompts is None, not size.pure_prefill


def smallest_mixed(sizes: Iterable[BufferShape], shape: StepShape, prompt_keys: int = 0) -> BufferShape | None:
    """The first of these ascending sizes that holds a step with prompts, or of those with cuDNN that are no longer than
    its shortest the first where that pays; None if all are smaller. prompt_keys: for which cuDNN has room in those."""
    fitting = (
        size
        for size in sizes
        if size.tokens >= shape.tokens
        and size.sequences > shape.sequences
        and size.draws >= shape.draws
        and (
            size.prompts is None
            or (size.prompts >= shape.prompts and (size.pure_prefill or shape.prompt_keys <= prompt_keys))
        )
        and (not size.pure_prefill or (shape.pure_prefill_rows is not None and size.tokens >= shape.pure_prefill_rows))
    )
    first = next(fitting, None)
    if first is None or first.tokens >= LIBRARY_TOKENS or shape.behind < LIBRARY_KEYS:
        return first
    return next((size for size in fitting if size.tokens <= LIBRARY_TOKENS and size.prompts is not None), first)


def has_few_long_prompts(tokens: int, prompts: int) -> bool:
    """Whether cuDNN, where it can attend, does so for the prompts of a step that is launched."""
    return LIBRARY_TOKENS <= tokens <= MAX_TOKENS and 0 < prompts <= MAX_PROMPTS
