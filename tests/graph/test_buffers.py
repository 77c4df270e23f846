"""The planned buffers of a step are those that an allocator sees: by hand, on a CPU, and of the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from strata.engine.ledger import activation_bytes
from strata.engine.program.meta_model import MetaModel
from strata.engine.startup.packing import Packing
from strata.graph.bind import bind
from strata.graph.buffers import CUDA_BLOCK, buffer_plan
from strata.graph.deferred import make_code
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.graph.trace import trace
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.models.config import config_from_dict
from strata.models.families import FAMILIES, build
from strata.models.shapes import SHAPES
from strata.plan.meta_model import find_config, meta_model
from tests.dummies import randomize
from tests.engine.program.programs import step_program
from tests.live_bytes import LiveBytes, tensors_of
from tests.models.batches import HandPaged, packed, random_sequences
from tests.models.checkpoints import FAMILY_CONFIGS
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS
from tests.models.sparse_models import SPARSE_CONFIGS

from .tiny import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, Tiny
from .tiny import packed as tiny_batch

CONFIGS = {
    config["architectures"][0]: config
    for config in (*RECURRENT_CONFIGS.values(), *SPARSE_CONFIGS.values(), *dict(FAMILY_CONFIGS).values())
}
TOLERANCE = 0.05


def test_a_small_model_by_hand() -> None:
    """Most is alive where the gate is: the residual, both halves of a product, which is read as it lies, and what
    comes of them. A result of views, the split queries, takes nothing."""
    with torch.device("meta"):
        graph = bind(fuse(merge(trace(Tiny()))), "cpu")
    tokens, meta = 11, tiny_batch(11)
    plan = buffer_plan(
        graph, type(meta)(*(one.to("meta") if isinstance(one, Tensor) else one for one in vars(meta).values()))
    )
    row = 4 * tokens
    assert plan.peak == row * (HIDDEN + 2 * INNER + INNER)
    assert plan.peak_node.startswith("silu_mul")
    qkv = next(one for one in plan.buffers if "q_proj&k_proj&v_proj" in one.module)
    assert qkv.nbytes == row * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    reader = plan.names[qkv.last]
    assert reader.startswith("attention"), "views of it are read there"
    assert sum("split" in one.node for one in plan.buffers) == 0
    assert plan.made > 2 * plan.peak


def test_every_family_has_a_config() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_on_a_cpu_what_is_alive_between_operations_is_what_was_planned(family: str) -> None:
    """Of every family, prompts and decodes; what a reference takes while it runs is its own."""
    config = config_from_dict(CONFIGS[family])
    model = build(config).requires_grad_(False)
    randomize(model, 0)
    graph = step_program(model, "cpu", deterministic=False).logits
    paged = HandPaged(config, 4, 21)
    before = paged.next_batch({row: [1 + row] * 20 for row in range(4)})
    graph.forward(before, torch.zeros(1, dtype=torch.int32))
    prompts, ends = packed(random_sequences(config.vocab_size, (40, 23))), torch.tensor([39, 62], dtype=torch.int32)
    steps = (prompts, ends), (paged.next_batch({row: [5] for row in range(4)}), torch.arange(4, dtype=torch.int32))
    plans = [buffer_plan(graph, step) for step in steps]
    wanted = graph.forward(*steps[0])
    most = 0

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal most
            result = run(*args)
            most = max(most, live.now)
            return result

        call.__name__ = getattr(run, "__name__", "call")
        return call

    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is not getattr:
            node.target = counted(node.target)
    make_code(graph)
    for step, plan in zip(steps, plans, strict=True):
        most = 0
        with LiveBytes([*tensors_of(graph), *step]) as live:
            found = graph.forward(*step)
        assert found.shape == (len(step[1]), config.vocab_size)
        assert step is not steps[0] or torch.equal(found, wanted)
        assert plan.peak == pytest.approx(most, rel=TOLERANCE)


def on_meta(model: MetaModel, workload: Workload) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    choice = model.choose(workload)
    if max(workload.new) > 1:
        choice = choice._replace(variant=model.program.variants[-1])
    return choice.variant.graph, model._arguments(workload, len(workload.new), choice)[1]


@pytest.mark.parametrize(
    ("shape", "quantization"),
    [*((shape, None) for shape in SHAPES), ("8B", "fp8"), ("8B", "int4")],
)
def test_what_kernels_on_an_h200_allocate_is_what_was_planned(shape: str, quantization: str | None) -> None:
    """The implementations run on the meta device, where they allocate as there and launch nothing."""
    pytest.importorskip("triton")
    from strata.engine.ahead.derive import as_if_launched, shortened

    model = meta_model(shortened(find_config(shape)), device("h200"), quantization=quantization)
    assert model.limits is not None
    for new, total in (((1,) * 32, (1001,) * 32), ((2048,), (2048,)), ((1,) * 8 + (500,), (1000,) * 8 + (500,))):
        graph, arguments = on_meta(model, Workload(new, total))
        plan = buffer_plan(graph, arguments, model.limits, CUDA_BLOCK)
        with as_if_launched(model.limits, lambda variant: None):
            graph.forward(*arguments)  # what is made once and kept
            with LiveBytes([*tensors_of(graph), *arguments], CUDA_BLOCK) as live:
                graph.forward(*arguments)
        assert plan.peak == pytest.approx(live.most, rel=TOLERANCE), (new, plan.peak_node)


def test_the_largest_step_of_an_engine() -> None:
    """A prompt of 8B: gate and up, what comes of both, the residual and the angles of rotation."""
    model = meta_model(find_config("8B").with_layers((0, 1, 2)), device("h200"))
    plan = model.planned_buffers(2048, 16)
    width, hidden, angles = 14336, 4096, 2 * 128 * 4
    assert plan.peak == 2048 * (2 * (2 * width + width + 2 * hidden) + angles)
    assert plan.scratch[plan.peak_place] == 2048 * 2 * 2 * width


def test_weights_that_products_turn_into_floats_are_in_the_ledger() -> None:
    """Of int4, whose products of many rows are the library's: gate and up of a layer as bfloat16."""
    config = find_config("8B").with_layers((0, 1, 2))
    with torch.device("meta"):
        packing = Packing.of("int4", build(config))
    assert packing.largest_in_floats(torch.bfloat16) == 2 * 2 * 14336 * 4096
    model = meta_model(config, device("h200"), quantization="int4")
    plan = model.planned_buffers(2048, 16)
    set_aside = activation_bytes(config, 2048, 16, model.dtype) + packing.largest_in_floats(model.dtype)
    assert activation_bytes(config, 2048, 16, model.dtype) < plan.peak < set_aside
