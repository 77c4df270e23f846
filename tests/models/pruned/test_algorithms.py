"""Magnitude, Wanda and SparseGPT, each against another way to the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strata.kernels.quant.two_of_four import is_two_of_four
from strata.models.pruned.prune import by_magnitude, sparsegpt, wanda
from strata.models.pruned.settings import Pruning

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
