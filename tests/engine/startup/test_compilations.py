"""What is counted when something compiles after an engine is ready; `torch.compile` as an executor to compare with."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from strata import LLM
from strata.engine.build import Compilations
from strata.engine.engine_config import EngineConfig
from strata.engine.process.messages import Statistics, Step
from strata.engine.program import program as program_module
from strata.engine.startup import executor as executor_module
from strata.graph.compile import compiled
from strata.graph.walk import operation_counts
from strata.kernels.compiled import listen
from strata.kernels.triton_import import HAS_TRITON, jit, tl, triton
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.folder import BUILTIN_FOLDER
from strata.serve.observe.metrics import Metrics
from tests.dummies import randomize
from tests.engine.process.desk import A, Desk
from tests.engine.program.programs import step_program
from tests.models.batches import packed, random_sequences
from tests.models.sparse_models import SPARSE_CONFIGS
from tests.serve.observe.test_metrics import samples

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


@jit
def doubled_kernel(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = x + tl.arange(0, BLOCK)
    tl.store(at, 2 * tl.load(at))


def compile_kernel() -> None:
    """As Triton does when the kernel is first launched, for a device that is not here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        doubled_kernel, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 64}, {(0,): [["tt.divisibility", 16]]}
    )
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture
def empty_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


class Counting:
    """One who counts until the `with` block ends."""

    def __init__(self) -> None:
        self.logged: list[str] = []
        self.compilations = Compilations(self.logged.append)

    def __enter__(self) -> Counting:
        self.compilations.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.compilations.end()

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.compilations.counts.values())


@needs_triton
@pytest.mark.usefixtures("empty_disk")
class TestKernels:
    def test_a_compilation_is_told_from_what_lies_on_the_disk(self) -> None:
        with Counting() as one:
            compile_kernel()
            assert one.counts == (1, 0)
            compile_kernel()
            compile_kernel()
            assert one.counts == (1, 2)
            assert one.compilations.total == 3
        compile_kernel()
        assert one.counts == (1, 2)
        assert one.logged == [
            "compiled while serving: doubled_kernel (BLOCK=64, x%16)",
            "read from the disk while serving: doubled_kernel (BLOCK=64, x%16)",
        ]

    def test_who_begins_or_ends_leaves_the_others_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        heard: list[bool] = []
        monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: heard.append(cache_hit))
        with Counting() as first:
            compile_kernel()
            with Counting() as second:
                compile_kernel()
            compile_kernel()
        compile_kernel()
        assert (first.counts, second.counts) == ((1, 2), (0, 1))
        assert heard == [False, True, True, True], "whoever listened before"

    def test_who_ends_while_all_are_told_keeps_it_from_nobody(self) -> None:
        heard: list[str] = []
        ends = [listen(lambda _: ends[0]()), listen(lambda compiled: heard.append(compiled.name))]
        compile_kernel()
        compile_kernel()
        ends[1]()
        assert heard == ["doubled_kernel"] * 2

    def test_what_is_compiled_from_a_file_has_its_name_alone(self, tmp_path: Path) -> None:
        from triton.backends.compiler import GPUTarget

        file = tmp_path / "nothing.ttir"
        file.write_text("module { tt.func public @nothing(%at: !tt.ptr<f32>) { tt.return } }")
        with Counting() as one:
            triton.compile(str(file), target=GPUTarget("cuda", 90, 32))
        assert one.counts == (1, 0)
        assert one.logged == ["compiled while serving: @nothing"]

    def test_beginning_twice_counts_once(self) -> None:
        with Counting() as one:
            one.compilations.begin()
            compile_kernel()
            one.compilations.end()
            compile_kernel()
        assert one.counts == (1, 0)


@needs_triton
@pytest.mark.usefixtures("empty_disk")
class TestEngine:
    def test_counts_travel_to_the_metrics(self, folder: Path) -> None:
        llm = LLM(folder, device="cpu", num_pages=20)
        assert llm.engine.compilations.total == 0
        llm.engine.compilations.begin()
        for _ in range(3):
            compile_kernel()
        llm.engine.compilations.end()
        desk = Desk(llm, A)
        desk.run()
        told = desk.of(A, Step)[-1].statistics
        assert told == Statistics(compiled_kernels=1, cached_kernels=2)
        read = samples(Metrics("m").render(told))
        name = "strata_compilations_after_ready_total"
        assert {kind: read[f"{name}{{kind={kind}}}"] for kind in ("kernel", "cached kernel")} == {
            "kernel": 1,
            "cached kernel": 2,
        }
        assert sum(key.startswith(name) for key in read) == 2

    def test_an_engine_that_is_gone_counts_no_more(self, folder: Path) -> None:
        llm = LLM(folder, device="cpu", num_pages=20)
        compilations = llm.engine.compilations
        compilations.begin()
        compile_kernel()
        assert compilations.total == 1
        del llm
        gc.unfreeze()
        gc.collect()
        compile_kernel()
        assert compilations.total == 1


OPTIONS: dict[str, Any] = {"device": "cpu", "num_pages": 20, "max_num_seqs": 2, "max_model_len": 64, "verbose": False}


@torch.no_grad()
def test_logits_are_those_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotations and routers are in pieces; experts and attention, with windows too, stay."""
    torch.compiler.reset()
    backends: list[int] = []

    def note(piece: fx.GraphModule, _: object) -> fx.GraphModule:
        backends.append(len(piece.graph.nodes))
        return piece

    monkeypatch.setattr(program_module, "compiled", partial(compiled, backend=note))
    config = config_from_dict(SPARSE_CONFIGS["mixtral-window-tied"] | {"num_hidden_layers": 4})
    model = build(config).requires_grad_(False)
    randomize(model, 0)
    plain, made = (step_program(model, "cpu", False, executor=one).logits for one in ("graph", "compile"))
    batch, rows = packed(random_sequences(config.vocab_size, (7, 4))), torch.tensor([6, 10], dtype=torch.int32)
    torch.testing.assert_close(made.forward(batch, rows), plain.forward(batch, rows), rtol=1e-4, atol=1e-5)
    # In front of the first attention, behind each, behind the experts; behind the last attention and the last experts.
    assert len(backends) == 5, "layers alike are compiled once"
    assert sum(operation_counts(made).values()) > sum(operation_counts(plain).values()), "what is costed is not fused"


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ValueError, match="executor 'jit' is unknown; use graph or compile"):
        EngineConfig("somewhere", executor="jit")


def test_a_cpu_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler on a CPU, and there is no .*: install one"):
        LLM(BUILTIN_FOLDER, executor="compile", **OPTIONS)
