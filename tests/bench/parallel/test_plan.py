"""What is measured over ranks on a machine, what is left out with which reason, and by which commands."""

from __future__ import annotations

import pytest

from benchmarks.parallel.plan import MODELS, TESTS, BenchMachine, LeftOut, RanksMeasurement, numbers_of_ranks, planned

GIB = 1 << 30
EIGHT = BenchMachine("cuda", 8, 140 * GIB)


Plan = tuple[list[RanksMeasurement], list[LeftOut]]


def plan(machine: BenchMachine, most: int, models: tuple[str, ...] = MODELS) -> Plan:
    found = list(planned(models, TESTS, most, machine, "bfloat16"))
    left_out = [one for one in found if isinstance(one, LeftOut)]
    return [one for one in found if isinstance(one, RanksMeasurement)], left_out


def test_eight_gpus_measure_every_model_on_every_number_of_ranks() -> None:
    wanted, left_out = plan(EIGHT, 8)
    assert [one.ranks for one in wanted if one.model is None] == [2, 4, 8]
    engines = {(model, ranks, False) for model in ("0.6B", "8B", "30B-A3B") for ranks in (1, 2, 4, 8)}
    engines |= {("70B", ranks, False) for ranks in (2, 4, 8)} | {("30B-A3B", ranks, True) for ranks in (2, 4, 8)}
    tests = {(model, ranks, experts, test) for model, ranks, experts in engines for test in ("T0", "T1", "T2", "T4")}
    found = [(one.model, one.ranks, one.expert_parallel, one.test) for one in wanted if one.model is not None]
    assert set(found) == tests
    assert len(found) == len(tests)
    (one,) = left_out  # 141 GB of weights
    assert one.what == "70B on 1 rank"
    assert one.reason == "a rank has 131.5 GiB of weights, and its GPU 140.0 GiB of memory, of which 85% are for them"


def test_ranks_without_a_gpu_are_left_out_with_what_is_there() -> None:
    wanted, left_out = plan(BenchMachine("cuda", 2, None), 8, ("0.6B",))
    assert {one.ranks for one in wanted} == {1, 2}
    assert [one.text() for one in left_out] == ["left out: 4, 8 ranks: this machine has 2 GPUs"]
    assert [one.text() for one in plan(BenchMachine("cuda", 1, None), 2, ("0.6B",))[1]] == [
        "left out: 2 ranks: this machine has 1 GPU"
    ]


def test_numbers_that_heads_do_not_divide_are_left_out_by_the_models_own_words() -> None:
    wanted, left_out = plan(BenchMachine("cpu", 3, None), 3, ("0.6B",))
    assert {one.ranks for one in wanted if one.model is not None} == {1, 2}
    assert "tensor_parallel_size=3 does not divide the 16 attention heads" in left_out[0].reason


def test_ranks_of_a_cpu_share_its_memory() -> None:
    assert not plan(BenchMachine("cpu", 2, 40 * GIB), 1, ("8B",))[1]  # 15 GiB
    (one,) = plan(BenchMachine("cpu", 2, 16 * GIB), 2, ("8B",))[1][1:]
    assert "its share 8.0 GiB" in one.reason


def test_tests_that_are_too_long_for_a_model_are_left_out() -> None:
    wanted, left_out = plan(BenchMachine("cpu", 1, None), 1, ("builtin",))
    assert [one.test for one in wanted] == ["T2", "T0"]
    why = "their sequences are longer than the 1,024 tokens it reads"
    assert left_out[0].text() == f"left out: T1, T4 of builtin: {why}"


def test_commands() -> None:
    def command(test: str, ranks: int, experts: bool = False) -> str:
        model = None if test == "comm" else "30B-A3B"
        return " ".join(RanksMeasurement(test, model, ranks, "cuda", "bfloat16", experts).command(5))

    common = "--device cuda --dtype bfloat16 --repeat"
    engine = "--model 30B-A3B --tensor-parallel-size"
    assert command("comm", 4) == f"bench comm --ranks 4 {common} 5 --json"
    assert command("T0", 1) == f"bench startup {engine} 1 {common} 1 --json"
    assert command("T1", 2, True) == f"bench throughput {engine} 2 {common} 5 --json --enable-expert-parallel"
    assert command("T2", 2) == f"bench latency {engine} 2 {common} 5 --json"
    assert command("T3-b8", 2) == f"bench throughput {engine} 2 {common} 5 --json --batch 8"
    assert command("T4", 2) == f"bench prefill {engine} 2 {common} 5 --json"


@pytest.mark.parametrize(("most", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_numbers_of_ranks(most: int, expected: list[int]) -> None:
    assert numbers_of_ranks(most) == expected
