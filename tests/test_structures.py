"""docs/structures.md says what the code has: names stand in their files, and the worked step is what runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.cache.tables import StepBuffer
from strata.engine.plan import StepPlan
from strata.models.batch import Batch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "structures.md", ROOT / "docs" / "glossary.md"]
PROMPT = [0, 29, 292, 227, 30]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_stands_in_its_file(page: Path) -> None:
    rows = page.read_text().splitlines()
    files = [(file, row) for row in rows for file in re.findall(r"`(strata/[\w/]+\.py)`", row)]
    assert len(files) > 30
    for file, row in files:
        assert (ROOT / file).exists(), row
        if name := re.match(r"\| `(\w+)` ", row):
            assert re.search(rf"\b(class|def) {name[1]}\b", (ROOT / file).read_text()), row


def test_the_worked_step_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(device="cpu", page_size=4, num_pages=16, max_num_seqs=2, verbose=False)
    runner: Any = llm.engine.loop._runner
    plans: list[StepPlan] = []
    batches: list[list[Any]] = []
    launch, batch = runner.launch, StepBuffer.batch

    def launching(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    def building(self: StepBuffer, *args: Any) -> Batch:
        made = batch(self, *args)
        assert made.pages is not None
        pages = made.pages
        used = -(-int(pages.lengths[0]) // 4)
        tensors = (pages.tables[0, :used], made.tokens, made.positions, made.offsets, pages.slot_mapping, pages.lengths)
        batches.append([tensor.tolist() for tensor in tensors])  # at once: the buffer is filled again
        return made

    monkeypatch.setattr(runner, "launch", launching)
    monkeypatch.setattr(StepBuffer, "batch", building)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    text = PAGES[0].read_text()
    assert str(PROMPT) in text
    for step, (plan, fields, id) in enumerate(zip(plans, batches, output.outputs[0].token_ids, strict=True), 1):
        (chunk,) = plan.chunks
        cells = [f"{chunk.start}, {chunk.count}", f"{chunk.first_page}: {list(chunk.new_pages)}", *fields, id]
        row = f"| {step} | {' | '.join(map(str, cells))} |"
        assert row in text, row
