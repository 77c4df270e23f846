"""Which devices run the own kernels, by their properties and tables; the references can stand in for all of them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from strata import LLM, SamplingParams
from strata.graph.bind import bind
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.graph.trace import trace, trace_head
from strata.hardware.specs import device
from strata.kernels import choose
from strata.kernels.choose import MEASURED, thresholds, thresholds_of
from strata.kernels.device_limits import DeviceLimits, implementations_for, why_not
from strata.kernels.op import OPERATIONS

H200 = DeviceLimits("NVIDIA H200", (9, 0), 232448, 132)


@pytest.mark.parametrize(
    ("limits", "has_triton", "words"),
    [
        (H200, True, None),
        (DeviceLimits("NVIDIA B200", (10, 0), 232448, 132), True, None),
        (H200, False, "Triton is not installed"),
        (
            DeviceLimits("Tesla T4", (7, 5), 65536, 40),
            True,
            "T4 has compute capability 7.5, and the kernels need 8.0",
        ),
        (DeviceLimits("NVIDIA L40S", (8, 9), 101376, 142), True, "99 KiB of shared memory for a program.* need 227"),
    ],
    ids=lambda value: value.product if isinstance(value, DeviceLimits) else "",
)
def test_devices(limits: DeviceLimits, has_triton: bool, words: str | None) -> None:
    reason = why_not(limits, has_triton)
    if words is None:
        assert reason is None
        return
    assert reason is not None
    assert "\n" not in reason
    assert re.search(words, reason)


def test_other_devices_are_bound_by_their_type() -> None:
    assert implementations_for(torch.device("cpu")) == "cpu"
    assert implementations_for(torch.device("meta")) == "meta"


def test_the_reference_kind_holds_the_reference_alone() -> None:
    for operation in OPERATIONS.values():
        assert [candidate.run for candidate in operation.bind("reference").candidates] == [operation.definition]


def test_an_engine_of_references_gives_the_same_tokens(folder: Path) -> None:
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(300) for _ in range(count)]} for count in (1, 40, 17, 90)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def ids(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    llm = LLM(folder, device="cpu", dtype="float32", num_pages=50, max_num_batched_tokens=32)
    want = ids(llm)
    model, runner = llm.engine.model, llm.engine.loop._runner
    runner._graph = bind(fuse(merge(trace(model))), "reference").forward
    runner._head = bind(trace_head(model), "reference").forward
    llm.engine.loop.scheduler._prefixes.evict(50)
    assert ids(llm) == want


def test_listed_devices_are_what_their_kernels_are_compiled_for() -> None:
    assert DeviceLimits.listed(device("h200")) == H200
    with pytest.raises(ValueError, match=r"TPU v5e runs no CUDA kernels.*give a GPU of NVIDIA's, such as h200"):
        DeviceLimits.listed(device("tpu-v5e"))


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the package's tables."""
    monkeypatch.setattr(choose, "_FOLDER", tmp_path)
    monkeypatch.setattr(choose, "thresholds_of", thresholds_of.__wrapped__)
    return tmp_path


def write(tables: Path, product: str, rows: list[dict[str, object]]) -> None:
    (tables / f"{product}.json").write_text(json.dumps({"device": product, "thresholds": rows}))


def test_a_device_without_a_table_has_those_that_were_measured() -> None:
    for name in ("h100", "h200"):
        assert thresholds(DeviceLimits.listed(device(name))) == thresholds_of(MEASURED)


def test_a_table_has_every_row_with_its_measurement(tables: Path) -> None:
    known = asdict(thresholds_of(MEASURED)).items()
    values = {name: {2: place} if isinstance(one, dict) else place + 5 for place, (name, one) in enumerate(known)}
    rows: list[dict[str, object]] = [{"name": name, "value": value, "measured": "x"} for name, value in values.items()]
    write(tables, "own", rows)
    assert asdict(choose.thresholds_of("own")) == values
    for wrong in (rows[1:], [*rows, rows[0]], [rows[0] | {"measured": ""}, *rows[1:]], [{"name": "other"}]):
        write(tables, "own", wrong)
        with pytest.raises(ValueError, match=r"own\.json"):
            choose.thresholds_of("own")
