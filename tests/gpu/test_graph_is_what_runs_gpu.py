"""The kernels that a profiler sees in a step are those that the step's graphs tell, in names and order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from strata.cache.tables import BufferShape
from strata.engine.build import Engine, build_engine
from strata.engine.engine_config import EngineConfig
from strata.engine.plan import StepPlan
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import StepSizes
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.hardware.roofline import Workload
from strata.hardware.specs import recognize
from strata.models.shapes import SHAPES
from strata.plan.meta_model import find_config, meta_model

pytestmark = pytest.mark.gpu

LAYERS = {"0.6B": 28, "8B": 4}
# Words in the names of libraries' kernels; those of Strata's own are compared as they are.
LIBRARIES = {
    "(cuDNN)": ("cudnn",),
    "(cuBLAS)": ("nvjet", "cublas", "gemm", "gemv", "splitk", "cutlass"),
    "(ATen)": ("at::native", "at_cuda_detail", "cub::"),
}
MARK = "spin_kernel"


class Marks:
    """Lets a kernel that nothing else launches run where each step ends."""

    def begin(self, plan: StepPlan) -> None:
        pass

    def end(self) -> None:
        torch.cuda._sleep(1)


@pytest.fixture(scope="module", params=LAYERS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine]:
    folder = tmp_path_factory.mktemp(request.param)
    config = SHAPES[request.param] | {"num_hidden_layers": LAYERS[request.param]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, started(folder)


def started(folder: Path, **others: str) -> Engine:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096, "num_pages": 3000}
    options |= {"enable_prefix_caching": False, "device": "cuda", "max_num_batched_tokens": 16384}
    return build_engine(EngineConfig.from_options(folder, options | others), log=lambda _: None)


def own_or_library(name: str) -> str:
    if re.fullmatch("[a-z0-9_]+_kernel", name):  # Triton's have no namespace
        return name
    small = name.lower()
    return next((library for library, words in LIBRARIES.items() if any(word in small for word in words)), name)


def collapsed(names: Sequence[str]) -> list[str]:
    """A library's kernels that follow one another count as one: how many it takes for a call is for it to choose."""
    return [name for name, same in groupby(names) for name in (same if not name.startswith("(") else [name])]


def traced_steps(engine: Engine, arrivals: Sequence[Sequence[int]]) -> Iterator[tuple[Workload, list[str]]]:
    """Run requests with prompts of these lengths, each tuple of them arriving two steps after the one before.

    Of each step the workload and the names of the kernels that the profiler saw.
    """
    loop: Any = engine.loop
    plans: list[StepPlan] = []
    launch = loop._runner.launch

    def noted(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    loop._runner.launch = noted
    loop.observe(Marks())
    params = SamplingParams(temperature=0.6, max_tokens=6, ignore_eos=True)
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for number, lengths in enumerate(arrivals):
                for index, length in enumerate(lengths):
                    prompt = tuple((7 * place + index) % 1000 for place in range(length))
                    loop.add(Request(f"{number} {index}", prompt, params, salt=f"{number} {index}"))
                loop.step()
                loop.step()
            for _ in loop.outputs():
                pass
            torch.cuda.synchronize()
    finally:
        loop.observe(None)
        del loop._runner.launch
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.device_type().name == "CUDA"]
    names = [event.name() for event in sorted(events, key=lambda event: event.start_ns())]
    names = [name for name in names if not name.startswith(("Memcpy", "Memset"))]
    ends = [place for place, name in enumerate(names) if MARK in name]
    assert len(ends) == len(plans), f"the trace holds {len(ends)} of {len(plans)} steps"
    for plan, first, end in zip(plans, [0, *(end + 1 for end in ends)], ends, strict=False):
        new = tuple(chunk.count for chunk in plan.chunks)
        total = tuple(chunk.start + chunk.count for chunk in plan.chunks)
        yield Workload(new, total), names[first:end]


@pytest.mark.parametrize(
    "arrivals",
    [
        *([(20,) * batch] for batch in (1, 8, 64, 256)),  # decode steps
        [(20,) * 8, (300,)],  # captured steps with prompts
        [(20,) * 70, (513, 40)],
        [(2048,)],
        [(700, 90)],
        [(2100,)],
        [(20,) * 8, (2048,)],
        [(4000, 4000)],
        [(20,) * 8, (4000, 4000, 1500)],  # more than is captured
    ],
    ids=str,
)
def test_a_profiler_sees_what_the_graph_tells(subject: tuple[Path, Engine], arrivals: list[tuple[int, ...]]) -> None:
    compare(subject, arrivals)


@pytest.mark.parametrize(
    "arrivals", [[(300,)], [(20,) * 8, (700, 90)], [(4000, 4000)], [(20,) * 8, (40,) * 17]], ids=str
)
def test_so_it_does_where_no_size_with_prompts_is_recorded(
    subject: tuple[Path, Engine], arrivals: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = StepSizes.holding

    def of_decodes(sizes: StepSizes, shape: StepShape) -> BufferShape | None:
        return holding(sizes, shape) if shape.decodes else None

    monkeypatch.setattr(StepSizes, "holding", of_decodes)
    compare(subject, arrivals)


@pytest.fixture(scope="module", params=["fp8", "int8"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine, str]:
    folder, scheme = tmp_path_factory.mktemp(request.param), request.param
    (folder / "config.json").write_text(json.dumps(SHAPES["8B"] | {"num_hidden_layers": 2}))
    return folder, started(folder, quantization=scheme), scheme


@pytest.mark.parametrize("arrivals", [[(20,)], [(20,) * 40], [(20,) * 8, (300,)], [(4000, 4000)]], ids=str)
def test_so_it_does_with_packed_weights(packed: tuple[Path, Engine, str], arrivals: list[tuple[int, ...]]) -> None:
    folder, engine, scheme = packed
    compare((folder, engine), arrivals, scheme)


def compare(subject: tuple[Path, Engine], arrivals: list[tuple[int, ...]], scheme: str | None = None) -> None:
    """Kernels told and seen in each step of a run, one by one. scheme: of packed weights."""
    folder, engine = subject
    device = recognize(torch.cuda.get_device_name())
    if device is None:
        pytest.skip("the device is not in the database")
    model = meta_model(find_config(str(folder)), device, quantization=scheme, max_model_len=4096)
    list(traced_steps(engine, arrivals))  # what is compiled or loaded when it first runs has been
    compared = set()
    for workload, names in traced_steps(engine, arrivals):
        told, has_prompt = model.step(workload), max(workload.new) > 1
        assert (told.graph in ("logits", "quantized_logits")) == has_prompt
        # What prompts have got new pages for is entered into the block tables in front of the step: a kernel of ATen.
        wanted = collapsed(["(ATen)"] * has_prompt + told.kernels)
        found = collapsed([own_or_library(name) for name in names])
        for place, (one, other) in enumerate(zip_longest(wanted, found)):
            assert one == other, (
                f"{told.graph} of {len(workload.new)} sequences, {workload.tokens} tokens: kernel {place} is {other}, "
                f"and the graph tells {one}. Told around it: {wanted[max(0, place - 3) : place + 4]}; seen: "
                f"{found[max(0, place - 3) : place + 4]}. {len(wanted)} told, {len(found)} seen. All: {names}"
            )
        compared.add(told.graph)
    assert compared & {"logits", "quantized_logits"}
    assert compared & {"decode_small_batch", "decode_large_batch"}
