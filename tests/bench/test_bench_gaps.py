"""Where the time of a call went, from intervals that were laid out by hand, and the hook by which steps are seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata.bench import workloads
from strata.bench.run import Setup, call, started
from strata.bench.trace import (
    KINDS,
    MESSAGE,
    OTHER,
    DeviceInterval,
    GapSplit,
    busy_of_steps,
    covered,
    kind_of,
    merged,
    read_trace,
)
from strata.engine.plan import StepPlan

COPY, GEMV, NORM, FETCH = "Memcpy HtoD (Pinned -> Device)", "gemv_kernel", "rms_norm_kernel", "Memcpy DtoH"

# Two steps. In each: a copy, two kernels, a copy back, then its mark.
WORK = [
    DeviceInterval(COPY, 100, 110),
    DeviceInterval(GEMV, 115, 145),  # 5 after the copy
    DeviceInterval(NORM, 145, 155),
    DeviceInterval(FETCH, 156, 160),  # 1 after the norm
    DeviceInterval(COPY, 190, 200),
    DeviceInterval(GEMV, 203, 233),
    DeviceInterval(NORM, 230, 240),  # launched early: 3 of its 10 overlap
    DeviceInterval(FETCH, 240, 250),
]
MARKS = [DeviceInterval("spin_kernel", 162, 164), DeviceInterval("spin_kernel", 251, 253)]


def test_idle_time_inside_steps_and_between_them() -> None:
    found = read_trace(WORK, MARKS)
    assert found.span == pytest.approx(150e-9)
    assert found.busy == pytest.approx((10 + 30 + 10 + 4 + 10 + 30 + 7 + 10) * 1e-9)
    assert found.host == pytest.approx((190 - 164) * 1e-9)
    split = found.split(60e-9)
    assert split.launch == pytest.approx((5 + 1 + 4 + 3) * 1e-9)  # 4: from the copy back to the end of the mark
    assert split.busy - 60e-9 == pytest.approx(split.breakdown()["kernels over floor"])
    assert found.idle_share == pytest.approx(39 / 150)


def test_steps_and_kernels_are_counted() -> None:
    found = read_trace(WORK, MARKS)
    assert (found.steps, found.kernels_per_step) == (2, 4)
    assert {kind: time.kernels for kind, time in found.kinds.items()} == {"product": 2, "copy": 4, "norm": 2}
    assert list(found.kinds) == ["product", "copy", "norm"]  # the longest first
    assert found.kinds["norm"].seconds == pytest.approx(20e-9)  # each kernel whole, overlap or not


def test_messages_that_nothing_hides_are_a_part_of_their_own() -> None:
    """Of 60 ns of messages 34 run alone: the kernel of symmetric memory whole, NCCL's beside a product for 6, and the
    copy from another GPU beside NCCL's for 5 and beside a product for 15."""
    work = [
        DeviceInterval(GEMV, 0, 10),
        DeviceInterval("one_shot_norm_kernel", 10, 24),
        DeviceInterval("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 30, 56),
        DeviceInterval("Memcpy PtoP (Device -> Device)", 51, 71),
        DeviceInterval(GEMV, 24, 36),
        DeviceInterval(NORM, 56, 71),
    ]
    found = read_trace(work, [DeviceInterval("spin_kernel", 80, 81)])
    assert found.kinds[MESSAGE].kernels == 3
    assert found.kinds[MESSAGE].seconds == pytest.approx(60e-9)
    assert found.exposed == pytest.approx((14 + 20) * 1e-9)
    split = found.split(30e-9)
    assert split.breakdown()["exposed messages"] == found.exposed
    assert sum(split.breakdown().values()) + 30e-9 == pytest.approx(split.wall)
    assert list(found.lines())[-1].endswith("(43% hidden)")
    assert "exposed messages" not in read_trace(WORK, MARKS).split(None).breakdown()
    assert not any("messages" in line for line in read_trace(WORK, MARKS).lines())


def test_a_copy_engine_hides_no_wait_for_it() -> None:
    work = [
        DeviceInterval(GEMV, 0, 10),
        DeviceInterval("Memcpy DtoD (Device -> Device)", 5, 30),
        DeviceInterval("void c10d::symmetric_memory::wait_signal_kernel(unsigned int**, int, int, int)", 10, 32),
        DeviceInterval(NORM, 32, 40),
    ]
    assert read_trace(work, [DeviceInterval("spin_kernel", 41, 42)]).exposed == pytest.approx(22e-9)


def test_each_step_is_busy_for_its_own_time() -> None:
    assert busy_of_steps(WORK, MARKS) == pytest.approx([54e-9, 57e-9])
    after = DeviceInterval(NORM, 260, 270)  # of a step whose end was not captured
    assert busy_of_steps([*WORK, after], MARKS) == pytest.approx([54e-9, 57e-9])
    at_once = [DeviceInterval(COPY, 164, 170), DeviceInterval(COPY, 170, 172), *WORK]  # the step before ended at 164
    assert busy_of_steps(at_once, MARKS) == pytest.approx([54e-9, 65e-9])
    assert read_trace(at_once, MARKS).kernels_per_step == (4 + 6) / 2
    assert merged([(5, 9), (0, 3), (2, 4), (9, 10), (6, 7)]) == [(0, 4), (5, 10)]
    assert (covered([]), covered([(5, 9), (0, 3), (2, 4), (6, 7)])) == (0, 8)


def test_an_empty_trace_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        read_trace([], MARKS)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 60)), min_size=1),
    st.lists(st.integers(0, 1100), unique=True),
)
def test_every_nanosecond_is_counted_once(kernels: list[tuple[int, int]], ends: list[int]) -> None:
    work = [DeviceInterval(GEMV, start, start + length) for start, length in kernels]
    found = read_trace(work, [DeviceInterval("mark", end, end) for end in ends])
    ran = {at for interval in work for at in range(interval.start, interval.end)}
    first, last = min(ran), max(ran) + 1
    # An idle nanosecond belongs to the host if a step ended since the device fell idle.
    host, ended = 0, False
    for at in range(first, last):
        ended = at not in ran and (ended or at in ends)
        host += ended
    assert round(found.busy * 1e9) == len(ran)
    assert round(found.span * 1e9) == last - first
    assert round(found.host * 1e9) == host


def test_parts_add_up_to_the_wall_time_and_the_largest_is_named() -> None:
    split = GapSplit(wall=10.0, floor=6.0, busy=8.5, launch=1.2, host=0.3)
    assert sum(split.breakdown().values()) + 6.0 == pytest.approx(split.wall)
    assert split.largest == "kernels over floor"
    assert GapSplit(10.0, 6.0, 6.5, 0.5, 3.0).largest == "host gaps"
    unknown = GapSplit(wall=10.0, floor=None, busy=8.5, launch=1.2, host=0.3)
    assert sum(unknown.breakdown().values()) == pytest.approx(unknown.wall)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "product"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "product"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>", "attention"),
        ("Memset (Device)", "copy"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>", "lookup"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", OTHER),
        # Own ones with words of several kinds.
        ("quantized_grouped_kernel", "experts"),
        ("quantized_write_kernel", "rotation and KV write"),
        ("gather_prompt_keys_kernel", "attention"),
    ],
)
def test_kernels_have_their_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


# The kind of all kernels of a file, by how its name begins.
KIND_OF_FILE = {
    "activation": "activation",
    "attention": "attention",
    "decode_attention": "attention",
    "embedding": "lookup",
    "gemm_all_reduce": "message",
    "gemm": "product",
    "kv_write": "rotation and KV write",
    "linear": "product",
    "moe": "experts",
    "norm": "norm",
    "qk_rope": "rotation and KV write",
    "rope": "rotation and KV write",
    "sampling": "sampling",
}


def test_own_kernels_have_their_kind() -> None:
    pytest.importorskip("triton")
    from tests.kernels.test_compile import CASES

    for case in CASES:
        file = case.kernel.fn.__module__.rpartition(".")[2]
        kind = kind_of(case.kernel.fn.__name__)
        wanted = next((kind for start, kind in KIND_OF_FILE.items() if file.startswith(start)), kind)
        assert kind == wanted, f"{case.kernel.fn.__name__} of {file}.py"
        assert kind != OTHER, f"strata/bench/trace.py names no kind for {case.kernel.fn.__name__} of {file}.py"
    assert set(KIND_OF_FILE.values()) <= {kind for kind, _ in KINDS}


def test_an_observer_sees_each_step_begin_and_end() -> None:
    class Seen:
        def __init__(self) -> None:
            self.said: list[str] = []

        def begin(self, plan: StepPlan) -> None:
            self.said.append("begin")

        def end(self) -> None:
            self.said.append("end")

    from strata.models.folder import BUILTIN_FOLDER

    test = workloads.InferenceTest("small", workloads.random_prompts(2, 5), (3, 4))
    torch.manual_seed(0)
    llm = started(Setup(str(BUILTIN_FOLDER), None, "auto", "cpu", False), test)
    seen = Seen()
    llm.engine.loop.observe(seen)
    call(llm, test)
    assert seen.said == ["begin", "end"] * 4  # both prompts in one step, then a token of each sequence a step
    llm.engine.loop.observe(None)
    call(llm, test)
    assert len(seen.said) == 8
