"""What is counted when something compiles after an engine is ready, and that engines of one process count apart."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from strata import LLM
from strata.engine.compilations import Compilations
from strata.engine.process.messages import Statistics, Step
from strata.kernels.attention import parts
from strata.kernels.attention.library_plans import LibraryPlans, library_plans
from strata.kernels.compiled import listen
from strata.kernels.triton_import import HAS_TRITON, jit, tl, triton
from strata.serve.observe.metrics import Metrics
from tests.engine.process.test_service import A, Desk
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
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[LibraryPlans]:
    """Those of a process that has met no shape yet."""
    library_plans.cache_clear()
    yield library_plans()
    library_plans.cache_clear()


@pytest.fixture
def empty_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def heads(tokens: int, count: int = 2) -> Tensor:
    return torch.zeros(1, count, tokens, 8)


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
@pytest.mark.usefixtures("empty_disk", "plans")
class TestKernels:
    def test_a_compilation_is_told_from_what_lies_on_the_disk(self) -> None:
        with Counting() as one:
            compile_kernel()
            assert one.counts == (1, 0, 0)
            compile_kernel()
            compile_kernel()
            assert one.counts == (1, 2, 0)
            assert one.compilations.total == 3
        compile_kernel()
        assert one.counts == (1, 2, 0)
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
        assert (first.counts, second.counts) == ((1, 2, 0), (0, 1, 0))
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
        assert one.counts == (1, 0, 0)
        assert one.logged == ["compiled while serving: @nothing"]

    def test_beginning_twice_counts_once(self) -> None:
        with Counting() as one:
            one.compilations.begin()
            compile_kernel()
            one.compilations.end()
            compile_kernel()
        assert one.counts == (1, 0, 0)


class TestPlans:
    def test_one_for_each_new_shape(self, plans: LibraryPlans) -> None:
        plans.use(heads(512), heads(512), heads(512), causal=True, summed=False)
        with Counting() as one:
            plans.use(heads(512), heads(512), heads(512), causal=True, summed=False)
            assert one.counts == (0, 0, 0), "it was there before"
            for queries, keys, causal, summed in (
                (heads(1024), heads(1024), True, False),
                (heads(512), heads(1024), True, False),
                (heads(512), heads(512, 1), True, False),
                (heads(512), heads(512), False, False),
                (heads(512), heads(512), True, True),
                (heads(512).double(), heads(512).double(), True, False),
            ):
                before = one.counts[2]
                for _ in range(3):
                    plans.use(queries, keys, keys, causal=causal, summed=summed)
                assert one.counts[2] == before + 1
        assert one.logged == [
            "planned while serving: cuDNN attention (1 x 1024 queries, 1024 keys, 2 and 2 heads of 8, causal)"
        ]

    def test_another_thread_has_none(self, plans: LibraryPlans) -> None:
        plans.use(heads(512), heads(512), heads(512), causal=True, summed=False)
        with Counting() as one:
            shape = (heads(512), heads(512), heads(512))
            thread = Thread(target=plans.use, args=shape, kwargs={"causal": True, "summed": False})
            thread.start()
            thread.join()
        assert one.counts == (0, 0, 1)

    def test_a_thread_that_has_a_former_ones_number_has_none_either(self, plans: LibraryPlans) -> None:
        shape = (heads(512), heads(512), heads(512))
        with Counting() as one:
            for _ in range(3):
                thread = Thread(target=plans.use, args=shape, kwargs={"causal": True, "summed": False})
                thread.start()
                thread.join()
        assert one.counts == (0, 0, 3)

    def test_who_ends_while_all_are_told_keeps_it_from_nobody(self, plans: LibraryPlans) -> None:
        heard: list[str] = []
        ends = [listen(lambda _: ends[0]()), listen(lambda compiled: heard.append(compiled.name))]
        plans.use(heads(512), heads(512), heads(512), causal=True, summed=False)
        plans.use(heads(1024), heads(1024), heads(1024), causal=True, summed=False)
        ends[1]()
        assert len(heard) == 2
        assert not plans.listeners

    def test_attention_by_the_library_tells_of_its_shapes(
        self, plans: LibraryPlans, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return q, q[..., 0]

        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", attend)
        x = torch.zeros(1024, 2, 8)
        with Counting() as one:
            for _ in range(2):
                parts._cudnn(x, x, x, 1, 1.0)
                parts._cudnn(x, x, x, 2, 1.0)
                parts._cudnn_summed(x, x, x, 1.0, causal=True)
                parts._cudnn_summed(x, x[:512], x[:512], 1.0, causal=False)
        assert one.counts == (0, 0, 4)


class TestEngine:
    def test_counts_travel_to_the_metrics(self, folder: Path, plans: LibraryPlans) -> None:
        llm = LLM(folder, device="cpu", num_pages=20)
        assert llm.engine.compilations.total == 0
        llm.engine.compilations.begin()
        for tokens in (512, 1024, 512):
            plans.use(heads(tokens), heads(tokens), heads(tokens), causal=True, summed=False)
        llm.engine.compilations.end()
        desk = Desk(llm, A)
        desk.run()
        told = desk.of(A, Step)[-1].statistics
        assert told == Statistics(plans=2)
        read = samples(Metrics("m").render(told))
        name = "strata_compilations_after_ready_total"
        assert {kind: read[f"{name}{{kind={kind}}}"] for kind in ("kernel", "cached kernel", "plan")} == {
            "kernel": 0,
            "cached kernel": 0,
            "plan": 2,
        }

    def test_an_engine_that_is_gone_counts_no_more(self, folder: Path, plans: LibraryPlans) -> None:
        llm = LLM(folder, device="cpu", num_pages=20)
        compilations = llm.engine.compilations
        compilations.begin()
        assert len(plans.listeners) == 1
        del llm
        gc.unfreeze()
        gc.collect()
        assert plans.listeners == []
