"""Factors between a norm or a product and what multiplies its outputs: float models compute the same with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strata.kernels.quant.packed import dense
from strata.models.quantized.calibrate import folds
from strata.models.quantized.calibrate.folds import Fold
from strata.models.quantized.calibrate.layer import LayerRounding
from strata.models.quantized.calibrate.matrices import layer_views, products
from strata.models.quantized.calibrate.quantize import quantize
from strata.models.quantized.calibrate.settings import Rounding
from strata.models.quantized.calibrate.stream import LayerStream, batches_of

from ..batches import packed, random_sequences
from ..conftest import Checkpoint

CPU = torch.device("cpu")
NORMS = {"input_layernorm", "post_attention_layernorm"}
# Of the last layer: what can be folded. Values have heads of their own in two; norms of OLMo stand behind.
FOLDED = {
    "llama-dynamic": {*NORMS, "self_attn.v_proj", "mlp.up_proj"},
    "gemma3-local-global": {"input_layernorm", "pre_feedforward_layernorm", "mlp.up_proj"},
    "olmo2-yarn": {"self_attn.v_proj", "mlp.up_proj"},
    "deepseek-v2-groups-biases-wide-values": {*NORMS, "self_attn.q_a_layernorm", "mlp.shared_experts.up_proj"},
}


def opened(
    checkpoint: Checkpoint, method: str, text: list[list[int]]
) -> tuple[LayerStream, int, Callable[[], LayerRounding]]:
    """The stream, the number of the last layer, and its rounding, to be made once the layer is open."""
    stream = LayerStream(checkpoint.folder, CPU)
    number, batches = stream.layers - 1, batches_of(text)
    hidden = stream.embed(batches)
    return (
        stream,
        number,
        lambda: LayerRounding(stream, number, Rounding.of("int8_weights", method, None, ()), batches, hidden),
    )


@pytest.mark.parametrize("name", FOLDED)
@torch.no_grad()
def test_what_is_folded_changes_no_output(name: str, open_checkpoint: Callable[[str], Checkpoint]) -> None:
    checkpoint = open_checkpoint(name)
    text = random_sequences(checkpoint.config.vocab_size, [21, 30])
    stream, number, start = opened(checkpoint, "awq", text)
    with stream.opened(number):
        work = start()
        work.inputs.observe(work.batches, work.hidden)
        found = work._exact([*folds.norm_folds(work.observer), *folds.product_folds(work.layer)])
        assert {fold.before for fold in found} == FOLDED[name]
        before = stream.run(number, work.batches[0], work.hidden[0])
        for place, fold in enumerate(found):
            width = folds.weights_after(work.layer, fold)[0].shape[1]
            factors = torch.exp(torch.randn(width, generator=torch.Generator().manual_seed(place)))
            folds.apply(work.layer, fold, factors)
        after = stream.run(number, work.batches[0], work.hidden[0])
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))


@torch.no_grad()
def test_a_fold_that_somebody_else_reads_is_found_out_and_taken_back(
    open_checkpoint: Callable[[str], Checkpoint],
) -> None:
    stream, number, start = opened(open_checkpoint("llama-dynamic"), "awq", [[1, 2, 3, 4]])
    with stream.opened(number):
        work = start()
        before = {name: view.clone() for name, _, view in layer_views(stream.model, number)}

        def run() -> Tensor:
            return stream.run(number, work.batches[0], work.hidden[0])

        assert not folds.is_exact(work.layer, Fold("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj")), run)
        assert all(torch.equal(view, before[name]) for name, _, view in layer_views(stream.model, number))


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_rounding_finely_leaves_the_model_as_it_was(method: str, open_checkpoint: Callable[[str], Checkpoint]) -> None:
    """Folds and streams of whole models with experts: in 8 bits little else can have changed their outputs."""
    checkpoint = open_checkpoint("deepseek-v2-groups-biases-wide-values")
    text = random_sequences(checkpoint.config.vocab_size, [40, 31], seed=1)
    stream = LayerStream(checkpoint.folder, CPU)
    batches = batches_of(text)
    hidden = stream.embed(batches)
    scheme = "int8_weights" if method == "awq" else "int8"
    for number in range(stream.layers):
        with stream.opened(number):
            work = LayerRounding(stream, number, Rounding.of(scheme, method, None, ()), batches, hidden)
            made = work.run()
            assert made.keys() == {matrix.name for matrix in products(stream.model, number)}
            assert all(torch.equal(dense(one), work.views[name]) for name, one in made.items())
            hidden = [stream.run(number, batch, x) for batch, x in zip(batches, hidden, strict=True)]
    with torch.no_grad():
        expected = checkpoint.model.model(packed(text))
        found = checkpoint.model.model.norm(hidden[0])
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.03  # of the mean it is more: a few tokens go to other experts


def test_an_expert_that_saw_nothing_is_rounded_to_nearest_and_told(
    open_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint("deepseek-v2-groups-biases-wide-values")
    notes = quantize(checkpoint.folder, tmp_path / "out", Rounding.of("int8", "gptq", None, ()), [[5, 6]], CPU)
    experts = checkpoint.config.experts
    assert experts is not None
    unseen = [note for note in notes if "saw 0 of 2 tokens: rounded to nearest" in note]
    # Two tokens reach at most twice as many experts as each is sent to.
    assert len(unseen) >= sum(experts.layers) * (experts.count - 2 * experts.per_token) > 0
