"""docs/structures.md says what the code has: names stand in their files, and the worked step is what runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
    files = [(file, row) for row in rows for file in re.findall(r"`([\w/]+\.py)`", row)]
    assert len(files) > 30
    for file, row in files:
        assert (ROOT / file).exists(), row
        if name := re.match(r"\| `(\w+)` ", row):
            assert re.search(rf"\b(class|def) {name[1]}\b", (ROOT / file).read_text()), row


def test_answers_stand_where_they_say() -> None:
    """Each name of an answer is defined in the next file that the answer names, a method or attribute in its class."""
    section = PAGES[0].read_text().partition("## Where to find\n")[2].partition("\n## ")[0]
    answers = [row.split(" | ", 1)[1] for row in section.splitlines() if row.startswith("| where ")]
    assert len(answers) > 10
    for answer in answers:
        names: list[str] = []
        for quoted in re.findall(r"`([^`]+)`", answer):
            if "/" in quoted:
                assert (ROOT / quoted).exists(), answer
            if quoted.endswith(".py"):
                missing = set(names) - set(_defined(ast.parse((ROOT / quoted).read_text())))
                assert not missing, f"{missing} in {quoted}: {answer}"
                names = []
            elif re.fullmatch(r"@?[A-Za-z_][\w.]*", quoted):
                names.append(quoted.removeprefix("@"))
        assert not names, f"no file behind {names}: {answer}"


def _defined(module: ast.Module) -> Iterator[str]:
    """What a file defines: names, `Class.method` and `Class.attribute`."""
    for node in module.body:
        yield from _names(node)
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for inner in node.body for name in _names(inner))


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


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
