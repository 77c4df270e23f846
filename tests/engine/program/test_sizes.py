"""Which sizes of steps are recorded, and which of them a step takes."""

from __future__ import annotations

import pytest

from strata.cache.tables import BufferShape
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import (
    decode_buckets,
    max_mixed_tokens,
    mixed_buckets,
    recorded_sizes,
    smallest_mixed,
)
from strata.kernels.attention.virtual_sequences import fresh_rows


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("most", [256, 512, 1024, 2048])
def test_every_size_holds_what_it_promises_and_wastes_little(most: int, library: bool) -> None:
    longest = max_mixed_tokens(600 * 10**6, library)  # of the 0.6B shape
    sizes = mixed_buckets(most, longest, library)
    assert sizes == sorted(set(sizes), key=lambda size: (size.tokens, size.sequences, size.prompts is None))
    assert len(sizes) < (75 if most == 256 else 90)  # each takes memory and start-up time
    for tokens in (*range(2, 1100), *range(1100, longest, 7), longest):
        for sequences in {min(count, most, tokens - 1) for count in (1, 16, 64, 256, 1024, most)}:
            for prompts in {1, min(16, sequences), min(17, sequences), sequences}:
                size = smallest_mixed(sizes, StepShape(tokens, sequences, sequences, prompts))
                assert size is not None
                assert size.tokens >= tokens
                assert size.sequences > sequences  # padding finds a sequence to belong to
                assert size.sequences < size.tokens  # and no size is taken for one of decodes
                assert size.prompts is None or prompts <= size.prompts
                if tokens > max(256, 2 * sequences):
                    assert size.tokens <= (1.25 if prompts <= 16 or not library else 1.5) * tokens
                if library and tokens >= 448 and prompts <= 16:
                    assert size.prompts == 16
    assert smallest_mixed(sizes, StepShape(longest + 1, 1, 1, 1)) is None
    assert smallest_mixed(sizes, StepShape(600, 100, most + 1, 1)) is None


def test_several_numbers_of_sequences_are_told_apart_where_padding_costs_most() -> None:
    def told_apart(most: int, tokens: int) -> list[int]:
        return [size.draws for size in mixed_buckets(most, 8192, False) if size.tokens == tokens]

    for most, short, middle, long in (
        (8, [8], [8], [8]),
        (64, [16, 64], [16, 64], [16, 64]),
        (256, [16, 64, 256], [64, 256], [64, 256]),
        (1024, [16, 64, 256], [64, 256, 1024], [256, 1024]),
        (2048, [16, 64, 256], [256, 1024, 2048], [1024, 2048]),
    ):
        assert [told_apart(most, tokens) for tokens in (640, 3072, 3584)] == [short, middle, long]


@pytest.mark.parametrize("most", [1, 8, 16, 24])
def test_engines_of_few_sequences_have_as_many_lengths_of_steps(most: int) -> None:
    many, few = ({size.tokens for size in mixed_buckets(count, 8192, True)} for count in (256, most))
    assert few == many


def test_short_steps_behind_many_keys_are_padded_to_the_shortest_for_the_library() -> None:
    def size(tokens: int, behind: int, sequences: int = 5, prompts: int = 1, library: bool = True) -> BufferShape:
        sizes = mixed_buckets(256, 8192, library, fresh=library)
        found = smallest_mixed(sizes, StepShape(tokens, sequences, sequences, prompts, behind=behind))
        assert found is not None
        assert found.tokens >= tokens
        assert found.sequences > sequences
        return found

    for tokens in (33, 100, 256, 384):
        assert size(tokens, 6143).prompts is None
        padded = size(tokens, 6144)
        assert (padded.tokens, padded.prompts) == (448, 16)
        for alike in ((6144, 5, 17), (1 << 20, 5, 17), (6144, 5, 1, False)):  # more prompts than it takes, or none
            assert size(tokens, *alike) == size(tokens, 0, *alike[1:])
    assert size(256, 9999, 100).sequences == 257  # the fewest sequences that suffice there, too
    for tokens in (448, 500, 3000, 8192):
        assert size(tokens, 1 << 20) == size(tokens, 0)


def test_fresh_steps_have_few_sizes_beside_those_of_others() -> None:
    others, sizes = (mixed_buckets(256, 8192, True, fresh) for fresh in (False, True))
    assert [size for size in sizes if not size.fresh] == others
    own = [size for size in sizes if size.fresh]
    assert len(own) == 9
    assert {(size.sequences, size.draws, size.prompts) for size in own} == {(17, 16, 16)}
    assert sizes == sorted(sizes, key=lambda size: (size.tokens, size.sequences, size.prompts is None))
    for new in ((8192,), (2048,) * 4, (512,) * 16, (1, 3900), (300, 5000), (2000,)):
        shape = StepShape(sum(new), len(new), len(new), len(new))
        wanted = smallest_mixed(others, shape)
        found = smallest_mixed(sizes, shape._replace(fresh=fresh_rows(new)))
        assert found is not None
        assert wanted is not None
        assert found.fresh
        assert found.tokens == wanted.tokens
        assert smallest_mixed(sizes, shape) == wanted
    assert not smallest_mixed(sizes, StepShape(8192, 2, 2, 2, fresh=fresh_rows((8191, 1)))).fresh
    assert not smallest_mixed(sizes, StepShape(4000, 17, 17, 17, fresh=fresh_rows((234,) * 17))).fresh
    assert not any(size.fresh for size in recorded_sizes(256, 8192, 10**9, library=False, fresh=False))


def test_steps_are_recorded_while_they_are_short_for_their_model_or_the_library_attends() -> None:
    models = (10**6, 600 * 10**6, 8 * 10**9)
    assert [max_mixed_tokens(parameters, False) for parameters in models] == [3_499_520, 5632, 2048]
    assert [max_mixed_tokens(parameters, True) for parameters in models] == [3_499_520, 8192, 8192]
    for library, longest in ((False, 2048), (True, 8192)):
        sizes = recorded_sizes(256, 8192, 8 * 10**9, library)
        assert max(size.tokens for size in sizes) == longest
        assert library == any(size.prompts is not None for size in sizes)


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("longest", [77, 300, 2000, 2048, 5000])
def test_the_largest_step_is_recorded(longest: int, library: bool) -> None:
    for most in (16, 100):
        sizes = mixed_buckets(min(most, longest - 2), longest, library)
        for prompts in (1, min(most, longest - 2)):
            size = smallest_mixed(sizes, StepShape(longest, most - 30, most - 30, prompts))
            assert size is not None
            assert size.tokens == longest


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("most", [1, 31, 32, 33, 200])
def test_no_size_is_larger_than_a_step_may_be(most: int, library: bool) -> None:
    for tokens in (100, 700):
        for size in mixed_buckets(most, tokens, library):
            assert size.tokens <= tokens
            assert size.draws <= most
    assert decode_buckets(most)[-1] == most


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize(("sequences", "tokens"), [(8, 4), (64, 16), (256, 128), (256, 255), (4, 1), (256, 8192)])
def test_steps_of_fewer_tokens_than_sequences_fit_into_their_buffers(
    sequences: int, tokens: int, library: bool
) -> None:
    sizes = recorded_sizes(sequences, tokens, 10**9, library)
    largest = BufferShape(tokens, sequences + 1, sequences).size
    assert max(size.size for size in sizes) <= largest
    assert max(size.tokens for size in sizes) == (tokens if library or tokens < 8192 else 3072)
