"""Pruned checkpoints and the algorithms that choose: what is in them, and that others read them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strata.kernels.quant.two_of_four import is_two_of_four
from strata.models.pruned.activations import THRESHOLDS, count_activations
from strata.models.pruned.prune import by_magnitude, prune, sparsegpt, wanda
from strata.models.pruned.report import zeros_of
from strata.models.pruned.settings import METHODS, Pruning
from strata.models.quantized.calibrate.quantize import quantize
from strata.models.quantized.calibrate.settings import Rounding
from strata.models.weights import load

from ..batches import packed, random_sequences
from ..calibrate.models import LLAMA, stored, write_llama

CPU = torch.device("cpu")
TEXT = random_sequences(LLAMA["vocab_size"], [40, 33, 50])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def halved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By 2:4 sparsity."""
    out = tmp_path_factory.mktemp("models") / "halved"
    prune(model, out, Pruning.of("2:4", 0.5, "sparsegpt"), TEXT, CPU)
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("pattern", "share"), [("2:4", 0.5), ("unstructured", 0.3)])
def test_products_have_their_share_of_zeros_and_others_are_as_they_were(
    pattern: str, share: float, method: str, model: Path, tmp_path: Path
) -> None:
    pruning, out = Pruning.of(pattern, share, method), tmp_path / "out"
    assert prune(model, out, pruning, TEXT if pruning.needs_text else [], CPU) == []
    before, after = stored(model), stored(out)
    assert before.keys() == after.keys()
    assert (out / "config.json").read_text() == (model / "config.json").read_text()
    for name, weight in after.items():
        assert weight.dtype == before[name].dtype
        if "_proj" not in name:
            assert torch.equal(weight, before[name]), name
            continue
        assert int((weight == 0).sum()) == pytest.approx(share * weight.numel(), abs=len(weight)), name
        assert is_two_of_four(weight) == (pattern == "2:4")
        if method != "sparsegpt":
            assert torch.equal(weight[weight != 0], before[name][weight != 0])


def test_transformers_reads_it_and_computes_the_same(halved: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(halved, dtype=torch.float32)
    ours, _ = load(halved, dtype="float32")
    with torch.no_grad():
        found = ours.head(ours(packed([TEXT[0]])))
        torch.testing.assert_close(theirs(torch.tensor([TEXT[0]])).logits[0], found, rtol=1e-4, atol=1e-4)


def test_the_report_counts_what_is_stored(model: Path, halved: Path) -> None:
    *kinds, everything = zeros_of(halved)
    assert [one.kind for one in kinds] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tensors = {name: one for name, one in stored(halved).items() if "_proj" in name}
    assert everything.zeros == sum(int((one == 0).sum()) for one in tensors.values())
    assert (everything.matrices, everything.two_of_four) == (14, 14)
    assert everything.nbytes == sum(one.nbytes for one in tensors.values())
    assert everything.quantized_bytes == everything.nbytes * 9 // 16
    plain = zeros_of(model)[-1]
    assert (plain.two_of_four, plain.quantized_bytes) == (0, plain.nbytes)


def test_small_inputs_of_second_products_are_counted(model: Path) -> None:
    found = count_activations(model, TEXT, CPU)
    ours, _ = load(model, dtype="float32")
    for layer, one in zip(ours.model.layers, found, strict=True):
        given: list[torch.Tensor] = []
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, x, given=given: given.append(x[0]))
        with torch.no_grad():
            ours(packed(TEXT))
        sizes = given[0].abs()
        assert (one.values, one.zeros) == (sizes.numel(), int((sizes == 0).sum()))
        for count, share in zip(one.small, THRESHOLDS, strict=True):
            assert count == pytest.approx(int((sizes < share * sizes.amax(1, keepdim=True)).sum()), abs=2)
    with pytest.raises(ValueError, match="there is none"):
        count_activations(model, [], CPU)
    with pytest.raises(ValueError, match="has token 61, and the model 61 tokens"):
        count_activations(model, [[3], [61]], CPU)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("1:2", 0.5, "wanda"), "accepted are '2:4', 'unstructured'"),
        (("2:4", 0.5, "obs"), "accepted are 'sparsegpt', 'wanda', 'magnitude'"),
        (("unstructured", 1.0, "wanda"), "less than 1"),
        (("2:4", 0.6, "wanda"), "half of the weights"),
        (("2:4", 0.5, "wanda"), "needs calibration text"),
    ],
)
def test_what_cannot_be_done_is_refused_before_work(
    asked: tuple[str, float, str], said: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        prune(model, tmp_path / "out", Pruning.of(*asked), [], CPU)
    assert not list(tmp_path.iterdir())


def test_models_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    magnitude = Pruning.of("2:4", 0.5, "magnitude")
    odd = write_llama(tmp_path / "odd", intermediate_size=90, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"do not divide 90, the widths of model.layers.0.mlp.down_proj.weight"):
        prune(odd, tmp_path / "out", magnitude, [], CPU)
    quantize(model, tmp_path / "fp8", Rounding.of("fp8", "rtn", None, ()), [], CPU)
    with pytest.raises(ValueError, match="prune the model in floats"):
        prune(tmp_path / "fp8", tmp_path / "out", magnitude, [], CPU)


TWO_OF_FOUR = Pruning.of("2:4", 0.5, "sparsegpt")
WIDTH, ROWS = 140, 400  # more than a block of columns


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = random(6, WIDTH, seed=3)
X = random(ROWS, WIDTH) @ random(WIDTH, WIDTH, seed=1) * torch.exp(random(WIDTH, seed=2))


def surgeon(weight: Tensor, share: float | None, hessian: Tensor) -> Tensor:
    """Optimal Brain Surgeon, column by column in float64: what is left of H is inverted anew for each. share: of blocks
    of 128 columns; None: two of four.
    """
    work, gone = weight.double().clone(), torch.zeros(weight.shape, dtype=torch.bool)
    pivots = torch.stack([torch.linalg.inv(hessian[j:, j:])[0, 0] for j in range(len(hessian))])
    for column in range(len(hessian)):
        together = 4 if share is None else 128
        if column % together == 0:
            block = slice(column, column + together)
            scores = work[:, block].square() / pivots[block]
            if share is None:
                for row, least in enumerate(scores.argsort(1)[:, :2]):
                    gone[row, column + least] = True
            else:
                least = scores.flatten().argsort()[: round(share * scores.numel())]
                own = torch.zeros(scores.numel(), dtype=torch.bool)
                own[least] = True
                gone[:, block] = own.view(scores.shape)
        inverse = torch.linalg.inv(hessian[column:, column:])
        lost = work[:, column] * gone[:, column]
        work[:, column:] -= torch.outer(lost / inverse[0, 0], inverse[0])
    return work.masked_fill(gone, 0.0)


@pytest.mark.parametrize("share", [None, 0.3])
def test_sparsegpt_is_the_surgeon_column_by_column(share: float | None) -> None:
    pruning = TWO_OF_FOUR if share is None else Pruning.of("unstructured", share, "sparsegpt")
    gram = X.t() @ X
    made = sparsegpt(WEIGHT, pruning, gram, ROWS)
    hessian = (gram * 2 / ROWS).double()
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    expected = surgeon(WEIGHT, share, hessian)
    assert ((made == 0) != (expected == 0)).float().mean() < 0.01  # near ties fall otherwise in float32
    same = ((made == 0) == (expected == 0)).all(1)
    torch.testing.assert_close(made[same].double(), expected[same], rtol=1e-2, atol=2e-3)
    assert same.sum() >= 4
    if share is None:
        assert is_two_of_four(made)
    else:  # of the block of 128 columns and of the 12 after it
        assert int((made == 0).sum()) == round(0.3 * 6 * 128) + round(0.3 * 6 * 12)


def test_the_more_is_known_the_smaller_is_the_error() -> None:
    means = X.square().mean(0)
    for pruning in (TWO_OF_FOUR, Pruning.of("unstructured", 0.5, "sparsegpt")):
        made = [
            by_magnitude(WEIGHT, pruning),
            wanda(WEIGHT, pruning, means),
            sparsegpt(WEIGHT, pruning, X.t() @ X, ROWS),
        ]
        magnitude, scored, surgeon = (float(((one - WEIGHT) @ X.t()).norm()) for one in made)
        assert surgeon < 0.9 * scored < 0.8 * magnitude


def test_magnitude_is_of_the_matrix_and_wanda_of_each_row() -> None:
    weight = torch.tensor([[1.0, -2.0, 3.0, 4.0], [10.0, 20.0, -30.0, 40.0]])
    quarter = Pruning.of("unstructured", 0.25, "magnitude")
    assert by_magnitude(weight, quarter).tolist() == [[0.0, 0.0, 3.0, 4.0], [10.0, 20.0, -30.0, 40.0]]
    # Columns whose inputs have mean squares 25, 1, 1 and 4: scores 5, 2, 3, 8 and 50, 20, 30, 80.
    inputs = torch.tensor([25.0, 1.0, 1.0, 4.0])
    assert wanda(weight, quarter, inputs).tolist() == [[1.0, 0.0, 3.0, 4.0], [10.0, 0.0, -30.0, 40.0]]
    half = Pruning.of("2:4", 0.5, "wanda")
    assert wanda(weight, half, inputs).tolist() == [[1.0, 0.0, 0.0, 4.0], [10.0, 0.0, 0.0, 40.0]]


def test_columns_that_nothing_reaches_become_zeros() -> None:
    gram = torch.eye(8)
    gram[5, 5] = 0
    made = sparsegpt(torch.ones(2, 8), TWO_OF_FOUR, gram, 1)
    assert made[:, 5].abs().max() == 0
    assert is_two_of_four(made)
    with pytest.raises(ValueError, match="inverted"):
        sparsegpt(torch.ones(2, 8), TWO_OF_FOUR, torch.full((8, 8), torch.nan), 1)
