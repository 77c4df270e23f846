"""GPTQ, AWQ, SmoothQuant, the search of scales and what is folded, each against another way to the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strata.kernels.quant.quantized import Scheme, dense, unpacked_values
from strata.models.quantized.calibrate import folds
from strata.models.quantized.calibrate.column_scaling import mean_shares, scaling, smoothing
from strata.models.quantized.calibrate.folds import Fold
from strata.models.quantized.calibrate.gptq import gptq
from strata.models.quantized.calibrate.layer import LayerRounding
from strata.models.quantized.calibrate.matrices import layer_views, products
from strata.models.quantized.calibrate.moments import Moments
from strata.models.quantized.calibrate.quantize import quantize
from strata.models.quantized.calibrate.rounding import find_scales, largest_scales, nearest, round_to
from strata.models.quantized.calibrate.settings import Rounding
from strata.models.quantized.calibrate.stream import LayerStream, batches_of

from ..batches import packed, random_sequences
from ..conftest import Checkpoint

INT4 = Scheme("int4", 1, 20)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, width: int) -> Tensor:
    """Activations as products see them: columns that go together, some far larger than others."""
    return random(rows, width) @ random(width, width, seed=1) * torch.exp(random(width, seed=2))


def one_by_one(weight: Tensor, steps: Tensor, hessian: Tensor) -> Tensor:
    """Optimal Brain Quantization of columns in a given order (GPTQ, equation 2), in float64: after each column, the
    inverse of what is left of H is taken anew.
    """
    work, codes = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    left = torch.argsort(hessian.diagonal(), descending=True).tolist()
    while left:
        inverse = torch.linalg.inv(hessian.double()[left][:, left])
        column, left = left[0], left[1:]
        code = torch.round(work[:, column] / steps[:, column]).clamp(-8, 7)
        codes[:, column] = code
        error = (work[:, column] - code * steps[:, column]) / inverse[0, 0]
        work[:, left] -= error[:, None] * inverse[0, 1:]
    return codes


def test_gptq_rounds_as_the_columns_one_by_one_and_better_than_to_the_nearest() -> None:
    width, rows = 140, 400  # more than a block of columns
    weight, x = random(6, width, seed=3), correlated(rows, width)
    gram = x.t() @ x
    scales = find_scales(weight, INT4, torch.float32, x.square().mean(0))
    made = gptq(weight, INT4, scales, gram, rows)

    hessian = (gram * 2 / rows).double()
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    expected = one_by_one(weight, scales.double().repeat_interleave(20, 1), hessian)
    codes = unpacked_values(made).double() - 8
    assert (codes != expected).float().mean() < 0.01  # sums in float32 fall on the other side of a half now and then

    def error(found: Tensor) -> float:
        return float(((found - weight) @ x.t()).norm())

    assert error(dense(made)) < 0.7 * error(dense(round_to(weight, INT4, scales)))


def test_gptq_with_independent_columns_is_rounding_to_nearest_and_forgets_dead_ones() -> None:
    weight = random(4, 40)
    scales = largest_scales(weight, INT4, torch.float32)
    gram = torch.eye(40)
    gram[7, 7] = 0
    made = dense(gptq(weight, INT4, scales, gram, 2))
    plain = dense(round_to(weight, INT4, scales))
    alive = torch.arange(40) != 7
    assert torch.equal(made[:, alive], plain[:, alive])
    assert made[:, 7].abs().max() == 0


def test_gptq_refuses_what_is_no_number() -> None:
    gram = torch.full((40, 40), float("nan"))
    with pytest.raises(ValueError, match="inverted"):
        gptq(random(4, 40), INT4, torch.ones(4, 2), gram, 2)


@pytest.mark.parametrize("weighted", [False, True])
def test_scales_are_the_best_of_those_tried(weighted: bool) -> None:
    weight = random(3, 40) * torch.exp(random(3, 40, seed=5))
    importance = torch.exp(random(40, seed=6)) if weighted else torch.ones(40)
    found = find_scales(weight, INT4, torch.bfloat16, importance if weighted else None)
    for row in range(3):
        for group in range(2):
            own, factors = weight[row, 20 * group : 20 * group + 20], importance[20 * group : 20 * group + 20]
            tried = [own.abs().max() / 7.5 * (1 - 0.4 * step / 20) for step in range(20)]
            stored = [float(one.to(torch.bfloat16)) for one in tried]
            losses = [float(((torch.round(own / s).clamp(-8, 7) * s - own) ** 2 * factors).sum()) for s in stored]
            own_scale = float(found[row, group])
            loss = float(((torch.round(own / own_scale).clamp(-8, 7) * own_scale - own) ** 2 * factors).sum())
            assert loss <= min(losses) * 1.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_group_of_zeros_and_tiny_weights_stay_numbers(dtype: torch.dtype) -> None:
    weight = torch.zeros(2, 40)
    weight[1] = 1e-6
    assert dense(nearest(weight, INT4, dtype)).isfinite().all()
    assert dense(nearest(weight, Scheme("e4m3", 1, 0), dtype)).isfinite().all()


def test_smoothing_makes_activations_and_weights_alike() -> None:
    x, weights = correlated(50, 24), [random(8, 24, seed=1), 3 * random(5, 24, seed=2)]
    factors = smoothing(x.abs().amax(0), weights)
    columns = torch.cat(weights).mul(factors).abs().amax(0)
    # With alpha 1/2 both become the geometric mean of what they were.
    torch.testing.assert_close((x / factors).abs().amax(0), columns)


def test_awq_takes_the_ratio_of_least_loss_and_nothing_where_that_is_best() -> None:
    scheme, weights = Scheme("int4", 1, 8), [random(6, 16), random(3, 16, seed=1)]
    magnitudes = torch.exp(random(16, seed=2))
    shares = mean_shares(weights, scheme)
    by_hand = torch.stack([row.abs() / row.abs().view(2, 8).amax(1).repeat_interleave(8) for row in torch.cat(weights)])
    torch.testing.assert_close(shares, by_hand.mean(0))

    wanted = magnitudes**0.35 / (shares**0.65 + 1e-4)
    wanted = wanted / (wanted.max() * wanted.min()).sqrt()
    found = scaling(magnitudes, weights, scheme, lambda factors: float((factors - wanted).abs().sum()))
    assert found is not None
    torch.testing.assert_close(found, wanted)
    assert scaling(magnitudes, weights, scheme, lambda factors: float((factors - 1).abs().sum())) is None


def test_moments_add_up_and_divide() -> None:
    x, factors = correlated(30, 12), torch.exp(random(12, seed=4))
    moments = Moments.of(x[:11], gram=True)
    moments.add(x[11:])
    moments.divide(factors)
    whole = Moments.of(x / factors, gram=True)
    assert moments.rows == 30
    for name in ("mean_magnitudes", "mean_squares", "largest", "gram"):
        torch.testing.assert_close(getattr(moments, name), getattr(whole, name))


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
